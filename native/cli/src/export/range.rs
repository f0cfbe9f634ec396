//! Which records are wanted: a range of offsets, a range of time, or where both agree.

use std::str::FromStr;

use clap::Args;
use stream_s3_core::units::{Offset, TimestampMs};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// The options that say which records.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Range")]
pub(crate) struct RangeArgs {
    /// First offset wanted
    #[arg(long, value_name = "OFFSET")]
    from: Option<u64>,
    /// Offset behind the last one wanted
    #[arg(long, value_name = "OFFSET")]
    to: Option<u64>,
    /// From the first chunk on that was written at this time or later: RFC 3339 as in 2026-11-29T12:00:00Z, or milliseconds
    /// since the Unix epoch. Records have the time of their chunk
    #[arg(long, value_name = "TIME")]
    since: Option<Moment>,
    /// Up to the first chunk that was written at this time or later, without it
    #[arg(long, value_name = "TIME")]
    until: Option<Moment>,
}

/// A moment as a user writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Moment(pub(crate) TimestampMs);

impl FromStr for Moment {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(ms) = text.parse() {
            return Ok(Self(TimestampMs(ms)));
        }
        let Ok(moment) = OffsetDateTime::parse(text, &Rfc3339) else {
            return Err("write it as in 2026-11-29T12:00:00Z or 2026-11-29T13:00:00+01:00, or as milliseconds since the Unix epoch".to_owned());
        };
        let ms = moment.unix_timestamp_nanos().div_euclid(1_000_000);
        // The years 0 to 9999 fit many times.
        Ok(Self(TimestampMs(i64::try_from(ms).unwrap_or(i64::MAX))))
    }
}

/// Which records: those of offsets `from..to`, of chunks from the first one at `since` or later up to the first one at `until`
/// or later. Always one stretch of the stream, even where clocks went back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// First offset.
    pub(crate) from: Offset,
    /// Offset behind the last one.
    pub(crate) to: Offset,
    /// Earliest time of the first chunk.
    pub(crate) since: TimestampMs,
    /// Where time ends, exclusive.
    pub(crate) until: TimestampMs,
}

impl RangeArgs {
    /// What the options say; what they leave open has no limit.
    pub(crate) fn wanted(&self) -> Wanted {
        Wanted {
            from: Offset(self.from.unwrap_or(0)),
            to: Offset(self.to.unwrap_or(u64::MAX)),
            since: self
                .since
                .map_or(TimestampMs(i64::MIN), |Moment(since)| since),
            until: self
                .until
                .map_or(TimestampMs(i64::MAX), |Moment(until)| until),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_rfc_3339_of_any_zone_or_milliseconds() {
        let at = |text: &str| text.parse::<Moment>().map(|Moment(TimestampMs(ms))| ms);
        assert_eq!(at("1970-01-01T00:00:01.5Z"), Ok(1500));
        assert_eq!(at("1970-01-01T01:00:00+01:00"), Ok(0));
        assert_eq!(at("1969-12-31T23:59:59.9999Z"), Ok(-1));
        assert_eq!(at("1700000000000"), Ok(1_700_000_000_000));
        assert!(at("yesterday").is_err());
    }
}
