//! Errors of plugins, by the party that must act.

use std::fmt;

use crate::MemoryKind;

/// The reason a plugin could not be opened or a call failed.
///
/// [`Error::fault`] sorts the variants by the party that must act. Back-pressure is no error: a
/// full queue is `None`, a pending connection is `Poll::Pending`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The list is `none`: no plugin is wanted.
    #[error("no plugin is wanted: the list of plugins is \"none\"; name a plugin to use one")]
    Disabled,

    /// No entry of the list could be used.
    #[error("no net plugin could be used{}", Listed(tried))]
    NoneUsable {
        /// Each name tried, in order, with the reason it could not be used.
        tried: Vec<Tried>,
    },

    /// The library is not a net plugin: it exports no table of a known version.
    #[error(
        "{library} is not a net plugin: it exports none of ncclNetPlugin_v{oldest} to \
         ncclNetPlugin_v{newest}"
    )]
    NotAPlugin {
        /// The library's name as it was opened.
        library: String,
        /// The oldest version this loader knows.
        oldest: u32,
        /// The newest version this loader knows.
        newest: u32,
    },

    /// The library does not export the requested version.
    #[error("{library} has no ncclNetPlugin_v{version}; it exports versions {found:?}")]
    VersionMissing {
        /// The library's name as it was opened.
        library: String,
        /// The requested version.
        version: u32,
        /// The versions it exports, newest first.
        found: Vec<u32>,
    },

    /// The library is already in use under another version; its `init` may be called only once.
    #[error(
        "{library} is in use as version {in_use} in this process and cannot be opened as version \
         {version}: it can be initialised once only"
    )]
    VersionInUse {
        /// The library's name as it was opened.
        library: String,
        /// The version requested or found.
        version: u32,
        /// The version it was initialised with.
        in_use: u32,
    },

    /// `init` failed in a library that other code had loaded, and may have initialised.
    #[error(
        "{reason}; this process had loaded {library} before, perhaps for NCCL, and a plugin can be initialised once only: \
         name a copy of the file instead"
    )]
    InitialisedBefore {
        /// The library's name as it was opened.
        library: String,
        /// The error of `init`.
        reason: String,
    },

    /// A required function is missing.
    #[error("{library} (version {version}) has no `{member}`, which every plugin must have")]
    Incomplete {
        /// The library's name as it was opened.
        library: String,
        /// The API version in use.
        version: u32,
        /// The member that is NULL.
        member: &'static str,
    },

    /// The plugin initialised but reports no device.
    #[error("{library} found no network device ({count} reported); check its interface settings")]
    NoDevices {
        /// The library's name as it was opened.
        library: String,
        /// The count it reported.
        count: i32,
    },

    /// The plugin needs a device protocol that this loader does not support.
    #[error(
        "{library} wants device type {device_type} version {device_version} on device {device}; \
         host (0) and unpack (1) version 7 are supported"
    )]
    DeviceType {
        /// The library's name as it was opened.
        library: String,
        /// The device's index.
        device: usize,
        /// The type that the plugin reported.
        device_type: i32,
        /// The version that the plugin reported.
        device_version: i32,
    },

    /// A call to the plugin returned an error.
    #[error("{call} failed: {code}{}", Warned(warning))]
    Call {
        /// The member that was called.
        call: &'static str,
        /// The code it returned.
        code: Code,
        /// The plugin's last warning, if it printed any.
        warning: Option<String>,
    },

    /// The plugin reported success without the result that the contract requires.
    #[error("{call} broke the plugin contract: {what}")]
    Contract {
        /// The member that was called.
        call: &'static str,
        /// The missing result.
        what: &'static str,
    },

    /// An earlier call failed; the object can only be dropped.
    #[error("{call} was not called: an earlier call failed, drop this and connect again")]
    Dead {
        /// The call that was not made.
        call: &'static str,
    },

    /// A listener has already returned its connection.
    #[error("this listener has given its one connection; listen again for another")]
    ListenerSpent,

    /// The device does not exist.
    #[error("device {device} does not exist: the plugin has {count}")]
    NoSuchDevice {
        /// The requested index.
        device: usize,
        /// Number of devices.
        count: usize,
    },

    /// A connection handle has an invalid length.
    #[error("a connection handle of {length} bytes is not valid: 1 to 128 are")]
    HandleLength {
        /// The length given.
        length: usize,
    },

    /// More bytes than one call can take.
    #[error("{call} of {bytes} bytes is too large: this plugin takes at most {limit}")]
    TooLarge {
        /// The member that would have been called.
        call: &'static str,
        /// Bytes requested.
        bytes: usize,
        /// Maximum bytes of one call.
        limit: usize,
    },

    /// A range outside the registered memory.
    #[error("bytes {offset}..{offset}+{bytes} are outside the registered {registered} bytes")]
    OutOfBounds {
        /// Start of the range.
        offset: usize,
        /// Length of the range.
        bytes: usize,
        /// Length of the registered memory.
        registered: usize,
    },

    /// A memory handle or request belongs to another comm.
    #[error("{what} belongs to another comm")]
    Foreign {
        /// The object passed in.
        what: &'static str,
    },

    /// Requests must be tested, and receives consumed, in the order in which they were posted.
    #[error("{call} of request {asked} is out of order: {}", Next(next))]
    OutOfOrder {
        /// `test` or `irecvConsumed`.
        call: &'static str,
        /// The request passed in.
        asked: u64,
        /// The expected request, if any.
        next: Option<u64>,
    },

    /// The plugin cannot access this kind of memory.
    #[error("{plugin} cannot reach {kind} memory")]
    MemoryUnsupported {
        /// The plugin's name.
        plugin: String,
        /// The requested kind.
        kind: MemoryKind,
    },

    /// The plugin lacks this function, or it must not be called on this plugin.
    #[error("{plugin} does not offer {call}")]
    Unsupported {
        /// The plugin's name.
        plugin: String,
        /// The requested member.
        call: &'static str,
    },
}

/// The party that must act on an [`Error`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The machine or its configuration: a missing library or device.
    Environment,
    /// The plugin, its network or its peer.
    Plugin,
    /// The code that uses this crate.
    Caller,
}

impl Error {
    /// Returns the party that must act.
    #[must_use]
    pub fn fault(&self) -> Fault {
        match self {
            Self::Disabled
            | Self::NoneUsable { .. }
            | Self::NotAPlugin { .. }
            | Self::VersionMissing { .. }
            | Self::Incomplete { .. }
            | Self::InitialisedBefore { .. }
            | Self::NoDevices { .. }
            | Self::DeviceType { .. }
            | Self::MemoryUnsupported { .. }
            | Self::Unsupported { .. } => Fault::Environment,
            Self::Call { .. } | Self::Contract { .. } | Self::Dead { .. } => Fault::Plugin,
            Self::VersionInUse { .. }
            | Self::ListenerSpent
            | Self::NoSuchDevice { .. }
            | Self::HandleLength { .. }
            | Self::TooLarge { .. }
            | Self::OutOfBounds { .. }
            | Self::Foreign { .. }
            | Self::OutOfOrder { .. } => Fault::Caller,
        }
    }
}

/// One name tried, and why it could not be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tried {
    /// The name passed to the system's loader.
    pub name: String,
    /// The reason it could not be used.
    pub reason: String,
}

/// A result code of the plugin API (`ncclResult_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code(pub i32);

impl Code {
    /// Returns NCCL's name of the code.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self.0 {
            0 => "ncclSuccess",
            1 => "ncclUnhandledCudaError",
            2 => "ncclSystemError",
            3 => "ncclInternalError",
            4 => "ncclInvalidArgument",
            5 => "ncclInvalidUsage",
            6 => "ncclRemoteError",
            7 => "ncclInProgress",
            8 => "ncclTimeout",
            _ => "a code NCCL does not define",
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name(), self.0)
    }
}

struct Listed<'a>(&'a [Tried]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return write!(f, ": the list of plugins has no name in it");
        }
        for (index, tried) in self.0.iter().enumerate() {
            let separator = if index == 0 { ":" } else { ";" };
            write!(f, "{separator} {} ({})", tried.name, tried.reason)?;
        }
        Ok(())
    }
}

struct Warned<'a>(&'a Option<String>);

impl fmt::Display for Warned<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(warning) => write!(f, "; the plugin's last warning: {warning}"),
            None => Ok(()),
        }
    }
}

struct Next<'a>(&'a Option<u64>);

impl fmt::Display for Next<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(next) => write!(f, "it is the turn of request {next}"),
            None => write!(f, "none is waiting"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_say_what_was_asked_and_found() {
        let error = Error::NoneUsable {
            tried: vec![
                Tried {
                    name: "x".into(),
                    reason: "not found".into(),
                },
                Tried {
                    name: "libnccl-net-x.so".into(),
                    reason: "bad".into(),
                },
            ],
        };
        assert_eq!(
            error.to_string(),
            "no net plugin could be used: x (not found); libnccl-net-x.so (bad)"
        );
        let error = Error::Call {
            call: "connect",
            code: Code(2),
            warning: Some("no route".into()),
        };
        assert_eq!(
            error.to_string(),
            "connect failed: ncclSystemError (2); the plugin's last warning: no route"
        );
        let error = Error::OutOfOrder {
            call: "test",
            asked: 9,
            next: None,
        };
        assert_eq!(
            error.to_string(),
            "test of request 9 is out of order: none is waiting"
        );
    }

    #[test]
    fn unknown_codes_have_a_text() {
        assert_eq!(Code(-5).to_string(), "a code NCCL does not define (-5)");
    }
}
