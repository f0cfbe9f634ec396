//! The library the BEAM loads: terms in, terms out, nothing decided here.
