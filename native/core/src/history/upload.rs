//! From a permit to an acknowledgment.

use super::event::{Effect, Examined, Outcome, Precondition, Put, Read, Stored};
use super::machine::{Acknowledgment, Machine, Phase, Then};
use crate::error::ErrorClass;

impl Machine {
    pub(super) fn permitted(&mut self) {
        if let Phase::Queued { seq } = self.phase {
            // The index may have moved on while the permit was waited for.
            let seq = self.window.next().map_or(seq, |next| next.seq);
            self.read(seq, None);
        }
    }

    fn read(&mut self, seq: u64, replaces: Option<String>) {
        self.phase = Phase::Reading { seq, replaces };
        let attempt = self.fresh();
        self.emit(Effect::Read { attempt, seq });
    }

    pub(super) fn was_read(&mut self, read: Read) {
        let Phase::Reading { seq, replaces } = &self.phase else {
            return;
        };
        let (seq, replaces) = (*seq, replaces.clone());
        match read {
            Read::Ready => {
                let when = replaces
                    .clone()
                    .map_or(Precondition::Absent, Precondition::Matches);
                self.phase = Phase::Storing { seq, replaces };
                let attempt = self.fresh();
                self.emit(Effect::Put { attempt, seq, when });
            }
            Read::NotSealed => {
                self.emit(Effect::GivePermitBack);
                self.window.done(seq);
                self.failures = 0;
                self.go_on();
            }
        }
    }

    pub(super) fn was_put(&mut self, put: Put) {
        let Phase::Storing { seq, replaces } = &self.phase else {
            return;
        };
        let (seq, replaced) = (*seq, replaces.is_some());
        match put {
            Put::Stored { crc, size } => {
                let stored = if replaced {
                    Stored::Replaced
                } else {
                    Stored::Uploaded
                };
                self.is_stored(seq, crc, size, stored);
            }
            Put::Exists { crc, payload_len } => {
                self.phase = Phase::Examining { seq, crc };
                let attempt = self.fresh();
                self.emit(Effect::Examine {
                    attempt,
                    seq,
                    crc,
                    payload_len,
                });
            }
            Put::Changed => self.start_over(),
        }
    }

    pub(super) fn was_examined(&mut self, examined: Examined) {
        let Phase::Examining { seq, crc } = self.phase else {
            return;
        };
        match examined {
            Examined::Same { size } => self.is_stored(seq, crc, size, Stored::AlreadyPresent),
            Examined::Other { etag } => {
                self.emit(Effect::ReportMismatch { seq });
                self.read(seq, Some(etag));
            }
            Examined::Vanished => self.start_over(),
        }
    }

    /// Somebody else changes the object at the same time: look again, a little later.
    fn start_over(&mut self) {
        self.emit(Effect::GivePermitBack);
        self.count(Outcome::RetryableError, 0);
        self.pause(ErrorClass::Transient, u32::MAX, Then::GoOn);
    }

    fn is_stored(&mut self, seq: u64, crc: u32, size: u64, stored: Stored) {
        let bytes = match stored {
            Stored::Uploaded | Stored::Replaced => size,
            Stored::AlreadyPresent => 0,
        };
        self.count(Outcome::Stored(stored), bytes);
        self.failures = 0;
        self.emit(Effect::GivePermitBack);
        self.acknowledge(Acknowledgment {
            seq,
            crc,
            size,
            stored,
        });
    }

    pub(super) fn acknowledge(&mut self, of: Acknowledgment) {
        self.phase = Phase::Acknowledging(of);
        let attempt = self.fresh();
        let Acknowledgment {
            seq,
            crc,
            size,
            stored,
        } = of;
        self.emit(Effect::Acknowledge {
            attempt,
            seq,
            crc,
            size,
            stored,
        });
    }

    pub(super) fn acknowledged(&mut self) {
        if let Phase::Acknowledging(of) = self.phase {
            self.window.done(of.seq);
            self.failures = 0;
            self.go_on();
        }
    }
}
