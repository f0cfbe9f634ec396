//! The one way from an error of the SDK to ours, whatever the operation.

use aws_credential_types::provider::error::CredentialsError;
use aws_smithy_runtime_api::client::orchestrator::HttpResponse;
use aws_smithy_runtime_api::client::result::SdkError;
use aws_smithy_types::error::metadata::ProvideErrorMetadata;

use crate::error::{Answer, Failure, Op, StoreError, chain_text};

/// Reads an error. `place` is bucket, key and endpoint, as it appears in the message.
pub(crate) fn read<E>(op: Op, place: &str, error: SdkError<E, HttpResponse>) -> StoreError
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
    let (failure, what) = if matches!(error, SdkError::ConstructionFailure(_)) {
        (Failure::Http(400), "no request can be made of it")
    } else if matches!(error, SdkError::TimeoutError(_)) {
        (Failure::Timeout, "it took too long")
    } else if matches!(&error, SdkError::DispatchFailure(dispatch) if dispatch.is_timeout()) {
        (Failure::Timeout, "no connection in time")
    } else {
        (Failure::Connection, "no connection, or it broke")
    };
    let message = format!("{} {place}: {what}: {}", op.name(), chain_text(&error));
    StoreError::new(op, failure, message).with_source(error)
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
    let (code, message) = match document {
        Some(document) => (document.code, document.message),
        None => (
            text(meta.and_then(|meta| meta.code())),
            text(meta.and_then(|meta| meta.message())),
        ),
    };
    (status >= 300 || code.is_some()).then_some(Answer {
        status,
        code,
        message,
    })
}

fn no_credentials(op: Op, place: &str, cause: &CredentialsError) -> StoreError {
    let (failure, what) = if matches!(cause, CredentialsError::CredentialsNotLoaded(_)) {
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
        format!("{} {place}: {what}: {}", op.name(), chain_text(cause)),
    )
}

/// The first error of type `E` in a chain.
fn find<'a, E: std::error::Error + 'static>(
    error: &'a (dyn std::error::Error + 'static),
) -> Option<&'a E> {
    std::iter::successors(Some(error), |error| error.source())
        .find_map(|error| error.downcast_ref::<E>())
}
