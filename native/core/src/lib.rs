//! The pure part: formats, fragment assembly, manifest, the replica-reader machine, and every decision of the upload path.
