//! The one way from an error of the SDK to ours, whatever the operation.

use aws_credential_types::provider::error::CredentialsError;
use aws_smithy_runtime_api::client::orchestrator::HttpResponse;
use aws_smithy_runtime_api::client::result::SdkError;
use aws_smithy_types::error::metadata::ProvideErrorMetadata;

use crate::error::{Answer, Failure, Op, StoreError, chain_text};

/// Steps of a chain that name layers of the client and tell a reader nothing.
const LAYERS: [&str; 5] = [
    "dispatch failure",
    "io error",
    "client error (Connect)",
    "timeout",
    "timed out",
];

/// Reads an error. `place` is bucket, key and endpoint, as it appears in the message; `proxied` is whether a proxy stands in between.
pub(crate) fn read<E>(
    op: Op,
    place: &str,
    proxied: bool,
    error: SdkError<E, HttpResponse>,
) -> StoreError
where
    E: ProvideErrorMetadata + std::error::Error + Send + Sync + 'static,
{
    if let Some(response) = error.raw_response() {
        let status = response.status().as_u16();
        if let Some(answer) = answer(status, response, error.as_service_error()) {
            return StoreError::answer(op, place, &answer);
        }
        let text = chain_text(&error);
        let message = format!("{} {place}: the answer cannot be read: {text}", op.name());
        return StoreError::new(op, Failure::Connection, message).with_source(error);
    }
    if let Some(cause) = find::<CredentialsError>(&error) {
        return no_credentials(op, place, cause);
    }
    let text = chain_text(&error);
    let (failure, what) = if matches!(error, SdkError::ConstructionFailure(_)) {
        (Failure::Http(400), "no request can be made of it")
    } else if matches!(error, SdkError::TimeoutError(_)) {
        (Failure::Timeout, "it took too long")
    } else if matches!(&error, SdkError::DispatchFailure(dispatch) if dispatch.is_timeout()) {
        (Failure::Timeout, "no connection in time")
    } else if text.contains("(Connect)") {
        (Failure::Connection, "no connection")
    } else {
        (Failure::Connection, "the connection broke")
    };
    let mut message = format!("{} {place}: {what}", op.name());
    for step in text.split(": ").filter(|step| !LAYERS.contains(step)) {
        message.push_str(": ");
        message.push_str(step);
    }
    if let Some(advice) = advice(&error, what, proxied) {
        message.push_str(&format!(" ({advice})"));
    }
    StoreError::new(op, failure, message).with_source(error)
}

/// What to look at where there is no connection.
fn advice(
    error: &(dyn std::error::Error + 'static),
    what: &str,
    proxied: bool,
) -> Option<&'static str> {
    use rustls::CertificateError as Certificate;
    match find::<rustls::Error>(error) {
        // A bad signature is one of an authority with the same name and another key: somebody has made a new one.
        Some(rustls::Error::InvalidCertificate(
            Certificate::UnknownIssuer | Certificate::BadSignature,
        )) => Some("set ca_file to the authority that issued the store's certificate"),
        Some(rustls::Error::InvalidCertificate(
            Certificate::Expired
            | Certificate::ExpiredContext { .. }
            | Certificate::NotValidYet
            | Certificate::NotValidYetContext { .. },
        )) => Some("renew the store's certificate, or set this machine's clock"),
        Some(rustls::Error::InvalidCertificate(
            Certificate::NotValidForName | Certificate::NotValidForNameContext { .. },
        )) => Some("the store's certificate is for another host than endpoint names"),
        Some(rustls::Error::InvalidMessage(_)) => {
            Some("what answers there does not speak TLS: should endpoint begin with http://?")
        }
        Some(_) => None,
        None if !what.starts_with("no connection") => None,
        None if proxied => Some("is proxy right, and can it reach the store?"),
        None => Some("is endpoint right, and is the store up?"),
    }
}

/// What the store said. `None` where a success cannot be understood: then it is not known what the store did.
fn answer<E: ProvideErrorMetadata>(
    status: u16,
    response: &HttpResponse,
    error: Option<&E>,
) -> Option<Answer> {
    let document = response
        .body()
        .bytes()
        .and_then(|body| Answer::parse(status, body));
    let meta = error.map(ProvideErrorMetadata::meta);
    let text = |text: Option<&str>| text.map(str::to_owned);
    let mut answer = document.unwrap_or_else(|| Answer {
        status,
        code: text(meta.and_then(|meta| meta.code())),
        message: text(meta.and_then(|meta| meta.message())),
        region: None,
        time: None,
    });
    if let Some(region) = response.headers().get("x-amz-bucket-region") {
        answer.region = Some(region.to_owned());
    }
    (status >= 300 || answer.code.is_some()).then_some(answer)
}

fn no_credentials(op: Op, place: &str, cause: &CredentialsError) -> StoreError {
    let text = chain_text(cause);
    let (failure, what) = if text.contains("credentials-process") {
        let what = "a profile of the shared config files has a credential_process, which is never run, because no program is started \
                    from inside the VM; set access_key_id and secret_key, or give the node a role";
        let message = format!("{} {place}: {what}", op.name());
        return StoreError::new(op, Failure::Setting("access_key_id"), message);
    } else if matches!(cause, CredentialsError::CredentialsNotLoaded(_)) {
        let what =
            "no credentials found; set access_key_id and secret_key, or give the node a role";
        (Failure::Setting("access_key_id"), what)
    } else if matches!(cause, CredentialsError::InvalidConfiguration(_)) {
        (
            Failure::Setting("access_key_id"),
            "the configuration of the credentials cannot be used",
        )
    } else {
        (Failure::Connection, "the credentials cannot be fetched")
    };
    StoreError::new(
        op,
        failure,
        format!("{} {place}: {what}: {text}", op.name()),
    )
}

/// The first error of type `E` in a chain. An `io::Error` hides the error that it was made of: its source is that of the hidden one.
fn find<'a, E: std::error::Error + 'static>(
    error: &'a (dyn std::error::Error + 'static),
) -> Option<&'a E> {
    std::iter::successors(Some(error), |error| {
        match error
            .downcast_ref::<std::io::Error>()
            .and_then(std::io::Error::get_ref)
        {
            Some(hidden) => Some(hidden as &(dyn std::error::Error + 'static)),
            None => error.source(),
        }
    })
    .find_map(|error| error.downcast_ref::<E>())
}
