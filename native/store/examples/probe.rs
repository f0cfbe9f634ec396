//! Tries a store from the command line: `cargo run -p stream_s3_store --example probe -- ENDPOINT BUCKET ACCESS_KEY SECRET_KEY [PREFIX]`.
//! Prints what the store supports, or what is wrong with it.

use std::process::ExitCode;

use stream_s3_store::{Credentials, ObjectStore, S3Settings, S3Store};

#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [endpoint, bucket, access_key_id, secret_key, prefix @ ..] = arguments.as_slice() else {
        eprintln!("usage: probe ENDPOINT BUCKET ACCESS_KEY SECRET_KEY [PREFIX]");
        return ExitCode::FAILURE;
    };
    let settings = S3Settings {
        bucket: bucket.clone(),
        endpoint: Some(endpoint.clone()),
        credentials: Credentials::Static {
            access_key_id: access_key_id.clone(),
            secret_key: secret_key.clone(),
            session_token: None,
        },
        ..S3Settings::default()
    };
    let prefix = prefix.first().map_or("rabbitmq", String::as_str);
    let probed = match S3Store::open(settings) {
        Ok(store) => store.probe(prefix).await,
        Err(error) => Err(error),
    };
    match probed {
        Ok(capabilities) => {
            println!("{capabilities:?}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
