//! Every request passes here, on its way from the connection to the S3 service and back: here it is counted, and here faults are made.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, StreamExt};
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, BodyStream, Empty, Full, StreamBody};
use hyper::body::{Body, Frame, Incoming};
use s3s::StdError;
use s3s::service::S3Service;
use tokio::sync::watch;

use crate::admin;
use crate::counters::Counters;
use crate::fault::{Action, Faults, Operation};
use crate::socket::Ending;

/// How long the bytes before a cut have to get out.
const WRITING: Duration = Duration::from_millis(20);

/// The body of an answer.
pub(crate) type AnswerBody = UnsyncBoxBody<Bytes, StdError>;

/// Ends a connection without an answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Abort {
    /// As a fault has it.
    #[error("ended by a fault")]
    Fault,
    /// The S3 service failed.
    #[error(transparent)]
    Service(StdError),
}

/// What all connections share.
pub(crate) struct Shared {
    pub(crate) service: S3Service,
    pub(crate) faults: Arc<Faults>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) paused: watch::Sender<bool>,
}

/// Answers one request.
pub(crate) async fn answer(
    shared: Arc<Shared>,
    ending: Ending,
    request: Request<Incoming>,
) -> Result<Response<AnswerBody>, Abort> {
    if let Some(path) = request.uri().path().strip_prefix(admin::PATH) {
        let path = path.to_owned();
        return Ok(admin::answer(&shared, &path, request).await);
    }
    let (op, key) = classify(&request);
    let announced = length(request.headers());
    let counting = shared.counters.begin(op);
    let mut paused = shared.paused.subscribe();
    // An error means that the server is gone, and this task with it.
    if paused.wait_for(|paused| !paused).await.is_err() {
        return Err(Abort::Fault);
    }
    let plan = shared.faults.take(op, &key);
    shared.counters.faults(op, plan.faults);
    if !plan.delay.is_zero() {
        tokio::time::sleep(plan.delay).await;
    }
    let answer = match plan.then {
        None => serve(&shared, request.map(plain)).await,
        Some(action) => faulty(&shared, &ending, request, action).await,
    };
    if let Ok(answer) = &answer {
        counting.end(
            answer.status().is_success(),
            announced,
            length(answer.headers()),
        );
    }
    answer
}

/// Lets the service answer. Where it refuses without having read the whole body, the rest is read here: a client that is still
/// sending when the connection is closed may never see the answer.
async fn serve(
    shared: &Shared,
    request: Request<s3s::Body>,
) -> Result<Response<AnswerBody>, Abort> {
    let (request, rest) = if length(request.headers()) > 0 {
        let rest = Rest::default();
        let kept = rest.clone();
        let request = request.map(|body| s3s::Body::http_body_unsync(kept.of(body)));
        (request, Some(rest))
    } else {
        (request, None)
    };
    let answer = shared.service.call(request).await;
    let answer = answer.map_err(|error| Abort::Service(error.into()))?;
    if let Some(mut rest) = rest.filter(|_| !answer.status().is_success()) {
        while let Some(Ok(_)) = rest.frame().await {}
    }
    Ok(answer.map(BodyExt::boxed_unsync))
}

/// A request's body that outlives its reader.
#[derive(Clone, Default)]
struct Rest(Arc<Mutex<Option<s3s::Body>>>);

impl Rest {
    fn of(self, body: s3s::Body) -> Self {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(body);
        self
    }
}

impl Body for Rest {
    type Data = Bytes;
    type Error = StdError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, StdError>>> {
        let mut body = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match body.as_mut() {
            Some(body) => Pin::new(body).poll_frame(cx),
            None => Poll::Ready(None),
        }
    }
}

/// A body as it comes from the connection.
fn plain(body: Incoming) -> s3s::Body {
    s3s::Body::from(body)
}

async fn faulty(
    shared: &Shared,
    ending: &Ending,
    request: Request<Incoming>,
    action: Action,
) -> Result<Response<AnswerBody>, Abort> {
    match action {
        // A plan holds its delays apart.
        Action::Delay { .. } => serve(shared, request.map(plain)).await,
        Action::Status { status, code } => {
            drain(request).await?;
            Ok(error_document(
                StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
                &code,
            ))
        }
        Action::ErrorBody { code } => {
            drain(request).await?;
            Ok(error_document(StatusCode::OK, &code))
        }
        Action::Stall => {
            drain(request).await?;
            std::future::pending::<Infallible>().await;
            Err(Abort::Fault)
        }
        Action::ResetBefore => {
            ending.reset();
            Err(Abort::Fault)
        }
        Action::LostReply => {
            let answer = serve(shared, request.map(plain)).await?;
            // The whole of it, so that the effect is complete.
            answer.into_body().collect().await.map_err(Abort::Service)?;
            ending.reset();
            Err(Abort::Fault)
        }
        Action::ResetBody { after_bytes } if length(request.headers()) > 0 => {
            let request = request.map(|body| {
                through(cut(
                    BodyStream::new(body),
                    after_bytes,
                    Some(ending.clone()),
                ))
            });
            let answer = serve(shared, request).await?;
            if ending.is_reset() {
                Err(Abort::Fault)
            } else {
                Ok(answer)
            }
        }
        Action::ResetBody { after_bytes } => {
            let answer = serve(shared, request.map(plain)).await?;
            Ok(cut_answer(answer, after_bytes, Some(ending.clone())))
        }
        Action::Truncate { after_bytes } => {
            let answer = serve(shared, request.map(plain)).await?;
            Ok(cut_answer(answer, after_bytes, None))
        }
        Action::WrongChecksum => {
            let mut answer = serve(shared, request.map(plain)).await?;
            if answer.status().is_success() {
                // The CRC-32 of nothing at all: no answer to a body has it by chance.
                answer
                    .headers_mut()
                    .insert("x-amz-checksum-crc32", HeaderValue::from_static("AAAAAA=="));
            }
            Ok(answer)
        }
        Action::Slow { bytes_per_sec } => {
            // A body that is wrapped no longer shows that it is empty, and the service would miss its length.
            let request = if length(request.headers()) > 0 {
                request.map(|body| through(paced(BodyStream::new(body), bytes_per_sec)))
            } else {
                request.map(plain)
            };
            let answer = serve(shared, request).await?;
            Ok(answer.map(|body| {
                StreamBody::new(paced(BodyStream::new(body), bytes_per_sec)).boxed_unsync()
            }))
        }
    }
}

/// Reads a request to its end: a client that is still sending may otherwise never see the answer. An error where the client goes away
/// in the middle.
async fn drain(request: Request<Incoming>) -> Result<(), Abort> {
    let mut body = BodyStream::new(request.into_body());
    while let Some(frame) = body.next().await {
        frame.map_err(|error| Abort::Service(error.into()))?;
    }
    Ok(())
}

fn through<S>(stream: S) -> s3s::Body
where
    S: Stream<Item = Result<Frame<Bytes>, StdError>> + Send + 'static,
{
    s3s::Body::http_body_unsync(StreamBody::new(stream))
}

fn cut_answer(
    answer: Response<AnswerBody>,
    after: u64,
    ending: Option<Ending>,
) -> Response<AnswerBody> {
    // A promise the body will not keep.
    let len = length(answer.headers());
    let mut answer = answer
        .map(|body| StreamBody::new(cut(BodyStream::new(body), after, ending)).boxed_unsync());
    if len > 0 {
        answer
            .headers_mut()
            .insert(header::CONTENT_LENGTH, HeaderValue::from(len));
    }
    answer
}

/// The first `after` bytes, then an error, even where there would be nothing more. With an ending, that of the connection is a reset.
fn cut<S, E>(
    stream: S,
    after: u64,
    ending: Option<Ending>,
) -> impl Stream<Item = Result<Frame<Bytes>, StdError>> + Send + 'static
where
    S: Stream<Item = Result<Frame<Bytes>, E>> + Send + 'static,
    E: Into<StdError>,
{
    futures::stream::unfold(Some((Box::pin(stream), after)), move |state| {
        let ending = ending.clone();
        async move {
            let (mut stream, left) = state?;
            let next = if left > 0 { stream.next().await } else { None };
            let next: Option<Result<Frame<Bytes>, StdError>> =
                next.map(|frame| frame.map_err(Into::into));
            let Some(frame) = next else {
                // A body that fails takes along what has not been written yet, so time is given to write it.
                tokio::time::sleep(WRITING).await;
                if let Some(ending) = &ending {
                    ending.reset();
                }
                let error: StdError = Box::new(Abort::Fault);
                return Some((Err(error), None));
            };
            match frame.map(Frame::into_data) {
                Err(error) => Some((Err(error), None)),
                Ok(Err(other)) => Some((Ok(other), Some((stream, left)))),
                Ok(Ok(mut bytes)) => {
                    bytes.truncate(usize::try_from(left).unwrap_or(usize::MAX));
                    let left = left - bytes.len() as u64;
                    Some((Ok(Frame::data(bytes)), Some((stream, left))))
                }
            }
        }
    })
}

/// The same frames in small pieces at a steady pace.
fn paced<S, E>(
    stream: S,
    bytes_per_sec: u64,
) -> impl Stream<Item = Result<Frame<Bytes>, StdError>> + Send + 'static
where
    S: Stream<Item = Result<Frame<Bytes>, E>> + Send + 'static,
    E: Into<StdError>,
{
    const PIECES_PER_SEC: u64 = 20;
    let piece = usize::try_from((bytes_per_sec / PIECES_PER_SEC).max(1)).unwrap_or(usize::MAX);
    let pieces = stream.flat_map(move |frame| {
        let pieces: Vec<Result<Frame<Bytes>, StdError>> = match frame {
            Err(error) => vec![Err(error.into())],
            Ok(frame) => match frame.into_data() {
                Err(other) => vec![Ok(other)],
                Ok(mut bytes) => {
                    let mut pieces = Vec::new();
                    while !bytes.is_empty() {
                        pieces.push(Ok(Frame::data(bytes.split_to(piece.min(bytes.len())))));
                    }
                    pieces
                }
            },
        };
        futures::stream::iter(pieces)
    });
    pieces.then(move |frame| async move {
        let len = frame
            .as_ref()
            .ok()
            .and_then(Frame::data_ref)
            .map_or(0, Bytes::len);
        tokio::time::sleep(Duration::from_secs_f64(len as f64 / bytes_per_sec as f64)).await;
        frame
    })
}

fn error_document(status: StatusCode, code: &str) -> Response<AnswerBody> {
    let code = code.replace('&', "&amp;").replace('<', "&lt;");
    let text = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?><Error><Code>{code}</Code><Message>as ordered by a fault</Message></Error>"
    );
    respond(status, "application/xml", text)
}

/// A whole answer.
pub(crate) fn respond(
    status: StatusCode,
    content_type: &'static str,
    text: String,
) -> Response<AnswerBody> {
    let body = Full::new(Bytes::from(text)).map_err(|never| match never {});
    let mut answer = Response::new(body.boxed_unsync());
    *answer.status_mut() = status;
    answer
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    answer
}

/// An answer without a body.
pub(crate) fn empty(status: StatusCode) -> Response<AnswerBody> {
    let mut answer = Response::new(Empty::new().map_err(|never| match never {}).boxed_unsync());
    *answer.status_mut() = status;
    answer
}

fn length(headers: &http::HeaderMap) -> u64 {
    let value = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok());
    value.and_then(|value| value.parse().ok()).unwrap_or(0)
}

/// What a path-style request is, and about which key.
fn classify<B>(request: &Request<B>) -> (Operation, String) {
    let path = request.uri().path().trim_start_matches('/');
    let (bucket, key) = path.split_once('/').unwrap_or((path, ""));
    let key = decode(key);
    let query = request.uri().query().unwrap_or_default();
    let parameter = |name: &str| {
        query
            .split('&')
            .find_map(|pair| match pair.split_once('=') {
                Some((key, value)) if key == name => Some(decode(value)),
                None if pair == name => Some(String::new()),
                Some(_) | None => None,
            })
    };
    let op = match (request.method(), key.is_empty()) {
        (_, _) if parameter("uploads").is_some() || parameter("uploadId").is_some() => {
            Operation::Other
        }
        (&Method::PUT, false) => Operation::Put,
        (&Method::GET, false) => Operation::Get,
        (&Method::HEAD, false) => Operation::Head,
        (&Method::DELETE, false) => Operation::Delete,
        (&Method::POST, true) if parameter("delete").is_some() => Operation::MultiDelete,
        (&Method::GET, true) if !bucket.is_empty() && parameter("location").is_none() => {
            Operation::List
        }
        _ => Operation::Other,
    };
    let key = if op == Operation::List {
        parameter("prefix").unwrap_or_default()
    } else {
        key
    };
    (op, key)
}

fn decode(text: &str) -> String {
    percent_encoding::percent_decode_str(text)
        .decode_utf8_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn classified(method: &str, uri: &str) -> (Operation, String) {
        classify(
            &Request::builder()
                .method(method)
                .uri(uri)
                .body(())
                .expect("a request"),
        )
    }

    #[test]
    fn requests_are_told_apart() {
        assert_eq!(
            classified("PUT", "/b/a%20b/c?x-id=PutObject"),
            (Operation::Put, "a b/c".to_owned())
        );
        assert_eq!(classified("GET", "/b/k"), (Operation::Get, "k".to_owned()));
        assert_eq!(
            classified("GET", "/b?list-type=2&prefix=p%2Fq"),
            (Operation::List, "p/q".to_owned())
        );
        assert_eq!(
            classified("POST", "/b/?delete="),
            (Operation::MultiDelete, String::new())
        );
        assert_eq!(
            classified("DELETE", "/b/k?x-id=DeleteObject"),
            (Operation::Delete, "k".to_owned())
        );
        assert_eq!(classified("PUT", "/b"), (Operation::Other, String::new()));
        assert_eq!(
            classified("PUT", "/b/k?partNumber=1&uploadId=u").0,
            Operation::Other
        );
        assert_eq!(classified("GET", "/").0, Operation::Other);
    }
}
