//! The public types around [`Config`](super::Config).

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;

/// Source of a value.
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

/// Transport that carries bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum TransportKind {
    /// Native multi-lane TCP.
    #[default]
    Tcp,
    /// A NCCL net plugin.
    Plugin,
}

/// Address of the metrics server: an address and a range of ports, of which the first free port is
/// taken. Written `PORT`, `FIRST-LAST`, `ADDRESS:PORT` or `ADDRESS:FIRST-LAST`; the default address
/// is loopback. Port 0 takes any free port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetricsAddress {
    /// The address to listen on.
    pub ip: IpAddr,
    /// The first port to try.
    pub first_port: u16,
    /// The last port to try, at least `first_port`.
    pub last_port: u16,
}

impl FromStr for MetricsAddress {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (ip, ports) = match text.rsplit_once(':') {
            Some((ip, ports)) => {
                let bare = ip.strip_prefix('[').and_then(|ip| ip.strip_suffix(']'));
                let ip: IpAddr = bare.unwrap_or(ip).parse().map_err(drop)?;
                // An IPv6 address contains colons, so its port needs brackets.
                if ip.is_ipv6() != bare.is_some() {
                    return Err(());
                }
                (ip, ports)
            }
            None => (IpAddr::from(Ipv4Addr::LOCALHOST), text),
        };
        let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
        let [first_port, last_port] = [first.parse().map_err(drop)?, last.parse().map_err(drop)?];
        if last_port < first_port {
            return Err(());
        }
        Ok(Self {
            ip,
            first_port,
            last_port,
        })
    }
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            ip,
            first_port,
            last_port,
        } = self;
        write!(f, "{}", SocketAddr::new(*ip, *first_port))?;
        match first_port == last_port {
            true => Ok(()),
            false => write!(f, "-{last_port}"),
        }
    }
}

/// Which memory passes through pinned staging.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StagingKind {
    /// GPU memory, which sockets cannot access.
    #[default]
    Auto,
    /// Host memory as well, through a stand-in for a GPU: tests the path without a GPU.
    Always,
}

/// Whether transfers of GPU memory stay near the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GpuLocality {
    /// Transfers use the interfaces nearest to the GPU. Workers run on its NUMA node if all GPUs
    /// and interfaces in use are on that node.
    #[default]
    Auto,
    /// Transfers use all interfaces, and workers run anywhere.
    Off,
}

/// Whether memory of processes on this host is copied without the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SameHostKind {
    /// Direct copies if both sides support them.
    #[default]
    Auto,
    /// Never.
    Off,
    /// Always: transfers that cannot be copied directly fail with the reason.
    Require,
}

/// An invalid configuration value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The value is not of the expected form.
    #[error("{name}={value:?} cannot be used: expected {expected}")]
    BadValue {
        /// The variable or key that was given.
        name: String,
        /// The invalid value.
        value: String,
        /// Describes the accepted values.
        expected: String,
    },
    /// There is no such setting.
    #[error("there is no setting {name:?}; the settings are: {known}")]
    UnknownKey {
        /// The key that was given.
        name: String,
        /// All keys.
        known: String,
    },
}

/// One setting with its value, source and reason, as `tcpx config` prints it.
#[derive(Clone, Debug)]
pub struct ConfigRow {
    /// The key, as [`Config::set`](super::Config::set) and NIXL's backend parameters accept it.
    pub key: &'static str,
    /// The environment variable, followed by older names and fall-backs.
    pub variables: &'static [&'static str],
    /// The current value.
    pub value: String,
    /// The source of the value.
    pub source: Source,
    /// Describes the accepted values.
    pub accepts: String,
    /// Describes the default for all machines.
    pub default: String,
    /// The default and the reason for it.
    pub reason: String,
    /// Describes the effect of the setting.
    pub help: String,
}
