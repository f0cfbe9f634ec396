//! The options that say where the bucket is.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use stream_s3_core::key::Prefix;
use stream_s3_store::{Credentials, FsStore, S3Settings, S3Store, SharedStore};

use crate::reader::Failed;

/// Where the bucket is. The same for all commands.
#[derive(Args)]
#[command(next_help_heading = "Store")]
pub(crate) struct StoreArgs {
    // Options that may stand behind the command too cannot be required or exclude each other: `open` sees to that.
    /// Directory of an fs store; either this or --bucket
    #[arg(long, value_name = "DIR", global = true)]
    fs: Option<PathBuf>,
    /// Bucket in an S3 store; either this or --fs
    #[arg(long, value_name = "NAME", global = true)]
    bucket: Option<String>,
    /// What all keys start with
    #[arg(long, default_value = "rabbitmq", global = true)]
    prefix: String,
    /// URL of the S3 store; AWS where not given
    #[arg(long, value_name = "URL", global = true)]
    endpoint: Option<String>,
    /// Region of the bucket; may be left out where an endpoint is given
    #[arg(long, env = "AWS_REGION", global = true)]
    region: Option<String>,
    /// Bucket in the path instead of the host name: the default with an endpoint; `--path-style=false` turns it off
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL", global = true)]
    path_style: Option<bool>,
    /// Key id of fixed credentials; where not given, they are looked for in shared config files and roles
    #[arg(long, env = "AWS_ACCESS_KEY_ID", value_name = "ID", global = true)]
    access_key_id: Option<String>,
    /// Secret of fixed credentials; better set in the environment, where other users do not see it
    #[arg(
        long,
        env = "AWS_SECRET_ACCESS_KEY",
        value_name = "SECRET",
        hide_env_values = true,
        global = true
    )]
    secret_key: Option<String>,
    /// Token of temporary credentials
    #[arg(
        long,
        env = "AWS_SESSION_TOKEN",
        value_name = "TOKEN",
        hide_env_values = true,
        global = true
    )]
    session_token: Option<String>,
    /// PEM file with the certificate authorities to trust instead of the system's
    #[arg(long, value_name = "FILE", global = true)]
    ca_file: Option<PathBuf>,
    /// URL of an HTTP proxy
    #[arg(long, value_name = "URL", global = true)]
    proxy: Option<String>,
    /// Account that must own the bucket
    #[arg(long, value_name = "ACCOUNT", global = true)]
    expected_bucket_owner: Option<String>,
}

impl StoreArgs {
    /// Opens the store. Makes no request yet.
    pub(crate) fn open(mut self) -> Result<(SharedStore, Prefix), Failed> {
        let prefix = Prefix::parse(&self.prefix).map_err(|error| {
            Failed::Usage(format!("--prefix {:?} cannot be one: {error}", self.prefix))
        })?;
        let store = match (self.fs.take(), self.bucket.take()) {
            (Some(dir), None) => open_dir(&dir)?,
            (None, Some(bucket)) => {
                let settings = self.settings(bucket)?;
                Arc::new(S3Store::open(settings)?) as SharedStore
            }
            (Some(_), Some(_)) | (None, None) => {
                return Err(Failed::Usage(
                    "say where the bucket is: either --fs DIR or --bucket NAME".to_owned(),
                ));
            }
        };
        Ok((store, prefix))
    }

    fn settings(self, bucket: String) -> Result<S3Settings, Failed> {
        Ok(S3Settings {
            bucket,
            region: self.region,
            endpoint: self.endpoint,
            path_style: self.path_style,
            credentials: credentials(self.access_key_id, self.secret_key, self.session_token)?,
            ca_file: self.ca_file,
            proxy: self.proxy,
            expected_bucket_owner: self.expected_bucket_owner,
            ..S3Settings::default()
        })
    }
}

/// Opens an fs store that is there: the store itself would make the directory, and a mistyped name would look like an empty bucket.
fn open_dir(dir: &Path) -> Result<SharedStore, Failed> {
    let absolute = std::path::absolute(dir)
        .map_err(|error| Failed::Usage(format!("--fs {}: {error}", dir.display())))?;
    if !absolute.is_dir() {
        return Err(Failed::Usage(format!(
            "--fs {}: there is no such directory",
            dir.display()
        )));
    }
    Ok(Arc::new(FsStore::open(absolute)?))
}

fn credentials(
    id: Option<String>,
    secret: Option<String>,
    session_token: Option<String>,
) -> Result<Credentials, Failed> {
    match (id, secret) {
        (Some(access_key_id), Some(secret_key)) => Ok(Credentials::Static {
            access_key_id,
            secret_key,
            session_token,
        }),
        (None, None) => Ok(Credentials::Chain),
        (Some(_), None) => Err(half(
            "--access-key-id (AWS_ACCESS_KEY_ID)",
            "--secret-key (AWS_SECRET_ACCESS_KEY)",
        )),
        (None, Some(_)) => Err(half(
            "--secret-key (AWS_SECRET_ACCESS_KEY)",
            "--access-key-id (AWS_ACCESS_KEY_ID)",
        )),
    }
}

fn half(given: &str, missing: &str) -> Failed {
    Failed::Usage(format!(
        "{given} is set without {missing}: set both, or neither to use config files and roles"
    ))
}
