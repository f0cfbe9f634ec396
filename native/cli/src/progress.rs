//! A progress bar on stderr, in bytes of stored data, and only where a person is watching.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The bar of one command. Clones share it.
#[derive(Clone)]
pub(crate) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar, invisible where `quiet` is set or stderr is no terminal.
    pub(crate) fn new(quiet: bool) -> Self {
        let target = if quiet || !std::io::stderr().is_terminal() {
            ProgressDrawTarget::hidden()
        } else {
            ProgressDrawTarget::stderr()
        };
        let bar = ProgressBar::with_draw_target(Some(0), target);
        let template = "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Self { bar }
    }

    /// Starts over with something of `total` bytes.
    pub(crate) fn start(&self, what: &str, total: u64) {
        self.bar.reset();
        self.bar.set_length(total);
        self.bar.set_message(what.to_owned());
    }

    /// `bytes` more have been seen.
    pub(crate) fn advance(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    /// `bytes` of those seen will come again.
    pub(crate) fn take_back(&self, bytes: u64) {
        self.bar.dec(bytes);
    }

    /// Removes the bar from the screen.
    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
