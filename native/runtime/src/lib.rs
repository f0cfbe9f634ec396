//! Governor, fragment transfers and store requests on one tokio runtime.
