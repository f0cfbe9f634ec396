//! What has to happen in worlds of the history uploader.

use stream_s3_core::error::ErrorClass;
use stream_s3_core::history::{Effect, Event, Examined, Outcome, Put, Read, Stored};

use super::world::Call;

/// Everything that the worlds of the history uploader are for: what the machine is told and wants done, each failure of each request, and what
/// happens around it. So often as [`crate::bound`] says.
pub const HISTORY_REQUIRED: &[&str] = &[
    // Events.
    "event sealed",
    "event listed",
    "event rescanned",
    "event permit",
    "event read",
    "event not_sealed",
    "event stored",
    "event exists",
    "event changed",
    "event same",
    "event other",
    "event vanished",
    "event acknowledged",
    "event catalog",
    "event catalog none",
    "event done",
    "event gone",
    "event failed",
    "event tick",
    "event purge",
    // Effects.
    "effect list",
    "effect ask_permit",
    "effect give_permit_back",
    "effect read",
    "effect put",
    "effect put in place of",
    "effect examine",
    "effect report_mismatch",
    "effect acknowledge",
    "effect wake_at",
    "effect abort",
    "effect catalog",
    "effect delete",
    "effect sweep",
    "effect tell_host",
    // Outcomes.
    "count uploaded",
    "count already_present",
    "count replaced",
    "count retryable_error",
    "count permanent_error",
    "count gone",
    // Failures: passing ones, throttles, and permanent ones.
    "list fails",
    "list is throttled",
    "list fails for good",
    "read fails",
    "read is throttled",
    "read fails for good",
    "put fails",
    "put is throttled",
    "put fails for good",
    "examine fails",
    "examine is throttled",
    "examine fails for good",
    "acknowledge fails",
    "acknowledge is throttled",
    "acknowledge fails for good",
    "catalog fails",
    "catalog is throttled",
    "catalog fails for good",
    "delete fails",
    "delete is throttled",
    "delete fails for good",
    "sweep fails",
    "sweep is throttled",
    "sweep fails for good",
    "purged fails",
    "purged is throttled",
    "purged fails for good",
    "lost reply",
    "lost request",
    "late",
    "stored by the store, but late",
    "deleted in part",
    // The host.
    "acknowledged",
    "acknowledged again",
    "hint lost",
    "unreadable run",
    "run that stays unreadable",
    "something else is there",
    "retention postponed",
    "retention knows nothing",
    "retention purges",
    "purge",
    "purged",
    "a write after the purge",
    "a write of an owner that is behind",
    "orphan swept",
    // Owners.
    "takeover",
    "takeover from a snapshot",
    "works before it has caught up",
    "caught up",
    "owner ends in the middle",
    "two owners at once",
    "waits for the only permit",
    "old answer",
];

pub(super) fn event_name(event: &Event) -> &'static str {
    match event {
        Event::Sealed { .. } => "event sealed",
        Event::Listed { .. } => "event listed",
        Event::Rescanned { .. } => "event rescanned",
        Event::Permit { .. } => "event permit",
        Event::Read { read, .. } => match read {
            Read::Ready => "event read",
            Read::NotSealed => "event not_sealed",
        },
        Event::Put { put, .. } => match put {
            Put::Stored { .. } => "event stored",
            Put::Exists { .. } => "event exists",
            Put::Changed => "event changed",
        },
        Event::Examined { examined, .. } => match examined {
            Examined::Same { .. } => "event same",
            Examined::Other { .. } => "event other",
            Examined::Vanished => "event vanished",
        },
        Event::Acknowledged { .. } => "event acknowledged",
        Event::Catalog { had_segments, .. } => {
            if *had_segments {
                "event catalog"
            } else {
                "event catalog none"
            }
        }
        Event::Done { .. } => "event done",
        Event::Gone { .. } => "event gone",
        Event::Failed { .. } => "event failed",
        Event::Tick => "event tick",
        Event::Purge => "event purge",
    }
}

pub(super) fn effect_name(effect: &Effect) -> &'static str {
    use stream_s3_core::history::Precondition;
    match effect {
        Effect::List { .. } => "effect list",
        Effect::AskPermit { .. } => "effect ask_permit",
        Effect::GivePermitBack => "effect give_permit_back",
        Effect::Read { .. } => "effect read",
        Effect::Put { when, .. } => match when {
            Precondition::Absent => "effect put",
            Precondition::Matches(_) => "effect put in place of",
        },
        Effect::Examine { .. } => "effect examine",
        Effect::ReportMismatch { .. } => "effect report_mismatch",
        Effect::Acknowledge { .. } => "effect acknowledge",
        Effect::WakeAt { .. } => "effect wake_at",
        Effect::Count { outcome, .. } => match outcome {
            Outcome::Stored(Stored::Uploaded) => "count uploaded",
            Outcome::Stored(Stored::AlreadyPresent) => "count already_present",
            Outcome::Stored(Stored::Replaced) => "count replaced",
            Outcome::RetryableError => "count retryable_error",
            Outcome::PermanentError => "count permanent_error",
            Outcome::Gone => "count gone",
        },
        Effect::Abort => "effect abort",
        Effect::Catalog { .. } => "effect catalog",
        Effect::Delete { .. } => "effect delete",
        Effect::Sweep { .. } => "effect sweep",
        Effect::TellHost { .. } => "effect tell_host",
    }
}

pub(super) fn failure_name(call: &Call, class: ErrorClass) -> &'static str {
    let [transient, throttled, permanent] = match call {
        Call::List => ["list fails", "list is throttled", "list fails for good"],
        Call::Read(_) => ["read fails", "read is throttled", "read fails for good"],
        Call::Put(_) => ["put fails", "put is throttled", "put fails for good"],
        Call::Examine(..) => [
            "examine fails",
            "examine is throttled",
            "examine fails for good",
        ],
        Call::Acknowledge(_) => [
            "acknowledge fails",
            "acknowledge is throttled",
            "acknowledge fails for good",
        ],
        Call::Catalog => [
            "catalog fails",
            "catalog is throttled",
            "catalog fails for good",
        ],
        Call::Delete => [
            "delete fails",
            "delete is throttled",
            "delete fails for good",
        ],
        Call::Sweep => ["sweep fails", "sweep is throttled", "sweep fails for good"],
        Call::Purged => [
            "purged fails",
            "purged is throttled",
            "purged fails for good",
        ],
    };
    match class {
        ErrorClass::Transient => transient,
        ErrorClass::Throttled => throttled,
        ErrorClass::Permanent => permanent,
    }
}
