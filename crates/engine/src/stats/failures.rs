//! Failed transfers by cause.

use serde::{Deserialize, Serialize};

use crate::error::ErrorKind;

/// Transfers that have failed, by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failures {
    pub(super) counts: [u64; Failures::CAUSES.len()],
}

impl Failures {
    /// Every cause.
    pub const CAUSES: [ErrorKind; 14] = [
        ErrorKind::InvalidArgument,
        ErrorKind::NotFound,
        ErrorKind::NotAllowed,
        ErrorKind::Busy,
        ErrorKind::Timeout,
        ErrorKind::Disconnected,
        ErrorKind::Refused,
        ErrorKind::Aborted,
        ErrorKind::Truncated,
        ErrorKind::Environment,
        ErrorKind::Closed,
        ErrorKind::Forked,
        ErrorKind::ProtocolViolation,
        ErrorKind::NotSupported,
    ];

    pub(super) fn index(cause: ErrorKind) -> usize {
        let mut causes = Self::CAUSES.iter();
        causes.position(|known| *known == cause).expect("complete")
    }

    /// Returns the number of transfers that failed for this cause.
    #[must_use]
    pub fn of(&self, cause: ErrorKind) -> u64 {
        self.counts[Self::index(cause)]
    }

    /// Returns the number of transfers that failed.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the name of a cause in metrics.
    #[must_use]
    pub fn label(cause: ErrorKind) -> &'static str {
        match cause {
            ErrorKind::InvalidArgument => "invalid_argument",
            ErrorKind::NotFound => "not_found",
            ErrorKind::NotAllowed => "not_allowed",
            ErrorKind::Busy => "busy",
            ErrorKind::Timeout => "timeout",
            ErrorKind::Disconnected => "disconnected",
            ErrorKind::Refused => "refused",
            ErrorKind::Aborted => "aborted",
            ErrorKind::Truncated => "truncated",
            ErrorKind::Environment => "environment",
            ErrorKind::Closed => "closed",
            ErrorKind::Forked => "forked",
            ErrorKind::ProtocolViolation => "protocol_violation",
            ErrorKind::NotSupported => "not_supported",
        }
    }
}
