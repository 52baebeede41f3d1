//! The public types around [`Config`](super::Config).

use std::fmt;

/// Where a value came from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// Derived from the machine or fixed in the code.
    #[default]
    Default,
    /// This environment variable.
    Environment(String),
    /// Set by the program.
    Explicit,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Environment(variable) => write!(f, "environment ({variable})"),
            Self::Explicit => f.write_str("set by the program"),
        }
    }
}

/// How bytes travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportKind {
    /// Native multi-lane TCP.
    #[default]
    Tcp,
    /// A NCCL net plugin.
    Plugin,
}

/// Which memory passes through pinned staging.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StagingKind {
    /// Memory of GPUs, which sockets cannot reach.
    #[default]
    Auto,
    /// Host memory too, by way of a stand-in for a GPU: to try the path where there is none.
    Always,
}

/// Whether transfers of GPU memory stay near the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GpuLocality {
    /// They use the interfaces that are nearest to it, and workers run on its NUMA node where that is
    /// the one of everything in use.
    #[default]
    Auto,
    /// They use all interfaces, and workers run anywhere.
    Off,
}

/// Whether memory of processes on this host is copied without the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SameHostKind {
    /// Where both sides can.
    #[default]
    Auto,
    /// Never.
    Off,
    /// Always: transfers that cannot be moved like that fail, with the reason.
    Require,
}

/// A configuration value that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The value is not of the expected form.
    #[error("{name}={value:?} cannot be used: expected {expected}")]
    BadValue {
        /// The variable or key as it was given.
        name: String,
        /// The value that was found.
        value: String,
        /// What would have been accepted.
        expected: String,
    },
    /// There is no such setting.
    #[error("there is no setting {name:?}; the settings are: {known}")]
    UnknownKey {
        /// The key as it was given.
        name: String,
        /// All keys.
        known: String,
    },
}

/// One setting with its value, its source and its reason: what `tcpx config` prints.
#[derive(Clone, Debug)]
pub struct ConfigRow {
    /// The key, as [`Config::set`](super::Config::set) and NIXL's backend parameters take it.
    pub key: &'static str,
    /// The environment variable; the ones after the first are older names or fall-backs.
    pub variables: &'static [&'static str],
    /// The value in force.
    pub value: String,
    /// Where it came from.
    pub source: Source,
    /// What is accepted.
    pub accepts: String,
    /// The default, described for all machines.
    pub default: String,
    /// The default and why it is what it is.
    pub reason: String,
    /// What the setting does.
    pub help: String,
}
