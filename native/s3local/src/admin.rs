//! The controls, as HTTP with JSON below `/-`, a path that no bucket can have. Without signatures: this is a server for one machine.
//!
//! | request | does |
//! |---|---|
//! | `GET /-/health` | answers 200 |
//! | `GET /-/faults` | lists the rules |
//! | `POST /-/faults` | adds the rule in the body, or each of a list; answers with the numbers |
//! | `DELETE /-/faults`, `DELETE /-/faults/N` | removes all rules, or one |
//! | `GET /-/counters` | counts of requests by operation |
//! | `POST /-/pause`, `POST /-/resume` | S3 requests wait; wait no longer |

use std::collections::BTreeMap;

use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use serde::Serialize;

use crate::fault::Fault;
use crate::wire::{AnswerBody, Shared, empty, respond};

/// Where the controls are.
pub(crate) const PATH: &str = "/-/";
/// Longest body of a control request in bytes.
const LONGEST_BODY: usize = 1024 * 1024;

/// Answers a control request. `path` is what follows [`PATH`].
pub(crate) async fn answer(
    shared: &Shared,
    path: &str,
    request: Request<Incoming>,
) -> Response<AnswerBody> {
    let method = request.method().clone();
    match (&method, path.trim_end_matches('/')) {
        (&Method::GET, "health") => respond(StatusCode::OK, "text/plain", "ok\n".to_owned()),
        (&Method::GET, "faults") => json(&shared.faults.rules()),
        (&Method::POST, "faults") => add_faults(shared, request).await,
        (&Method::DELETE, "faults") => {
            shared.faults.clear();
            empty(StatusCode::NO_CONTENT)
        }
        (&Method::GET, "counters") => {
            let rows = shared.counters.all();
            json(
                &rows
                    .into_iter()
                    .map(|(op, counts)| (name(&op), counts))
                    .collect::<BTreeMap<_, _>>(),
            )
        }
        (&Method::POST, "pause" | "resume") => {
            shared.paused.send_replace(path.starts_with("pause"));
            empty(StatusCode::NO_CONTENT)
        }
        (&Method::DELETE, path) => match path.strip_prefix("faults/").map(str::parse) {
            Some(Ok(id)) if shared.faults.remove(id) => empty(StatusCode::NO_CONTENT),
            Some(_) => refuse(StatusCode::NOT_FOUND, "no such rule"),
            None => refuse(StatusCode::NOT_FOUND, "no such control"),
        },
        _ => refuse(StatusCode::NOT_FOUND, "no such control"),
    }
}

async fn add_faults(shared: &Shared, request: Request<Incoming>) -> Response<AnswerBody> {
    let body = match Limited::new(request.into_body(), LONGEST_BODY)
        .collect()
        .await
    {
        Ok(body) => body.to_bytes(),
        Err(error) => return refuse(StatusCode::BAD_REQUEST, &error.to_string()),
    };
    // By its first character, so that the error speaks of the rule and not of the alternatives.
    let faults: Result<Vec<Fault>, _> = if body.trim_ascii_start().starts_with(b"[") {
        serde_json::from_slice(&body)
    } else {
        serde_json::from_slice(&body).map(|fault| vec![fault])
    };
    let faults = match faults {
        Ok(faults) => faults,
        Err(error) => return refuse(StatusCode::BAD_REQUEST, &error.to_string()),
    };
    if let Some(why) = faults.iter().find_map(|fault| fault.check().err()) {
        return refuse(StatusCode::BAD_REQUEST, why);
    }
    let ids: Vec<u64> = faults
        .into_iter()
        .map(|fault| shared.faults.add(fault))
        .collect();
    json(&BTreeMap::from([("ids", ids)]))
}

fn name(op: &impl Serialize) -> String {
    match serde_json::to_value(op) {
        Ok(serde_json::Value::String(name)) => name,
        Ok(other) => other.to_string(),
        Err(error) => error.to_string(),
    }
}

fn json(value: &impl Serialize) -> Response<AnswerBody> {
    match serde_json::to_string(value) {
        Ok(text) => respond(StatusCode::OK, "application/json", text + "\n"),
        Err(error) => refuse(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

fn refuse(status: StatusCode, why: &str) -> Response<AnswerBody> {
    respond(status, "text/plain", format!("{why}\n"))
}
