//! The one typed configuration: defaults derived from the machine, then the environment, then what
//! the caller says.
//!
//! Every setting is one row of a table that holds its key, its variables, its help, how it is parsed and shown
//! and why its default is what it is, so that none of these can drift apart.

mod value;

use std::fmt;
use std::time::Duration;

use tcpx_net::interfaces::InterfaceSelector;

use self::value::{bytes, duration, number};
use crate::staging::{CHUNK_FACTOR, DEPTH, MAX_SLOT_BYTES};

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Derived from the machine or fixed in the code.
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransportKind {
    /// Native multi-lane TCP.
    Tcp,
    /// A NCCL net plugin.
    Plugin,
}

/// Which memory passes through pinned staging.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StagingKind {
    /// Memory of GPUs, which sockets cannot reach.
    Auto,
    /// Host memory too, by way of a stand-in for a GPU: to try the path where there is none.
    Always,
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
    /// The key, as [`Config::set`] and NIXL's backend parameters take it.
    pub key: &'static str,
    /// The environment variable; the ones after the first are older names or fall-backs.
    pub variables: &'static [&'static str],
    /// The value in force.
    pub value: String,
    /// Where it came from.
    pub source: Source,
    /// Why the default is what it is.
    pub reason: String,
    /// What the setting does.
    pub help: &'static str,
}

/// The configuration of a [`Session`](crate::Session).
#[derive(Clone, Debug)]
pub struct Config {
    name: String,
    lanes: usize,
    chunk_bytes: usize,
    window: usize,
    workers: usize,
    interfaces: InterfaceSelector,
    control_interface: InterfaceSelector,
    transport: TransportKind,
    plugin: String,
    plugin_version: u32,
    staging: StagingKind,
    staging_bytes: usize,
    peer_timeout: Duration,
    connect_timeout: Duration,
    spin: Duration,
    socket_buffer_bytes: usize,
    congestion: String,
    listen_port: u16,
    log: String,
    /// One per row of [`SETTINGS`], in its order.
    sources: Vec<Source>,
}

/// The most lanes to one peer.
const MAX_LANES: usize = 64;
/// The smallest chunk: below this the frame headers begin to cost.
const MIN_CHUNK_BYTES: usize = 16 << 10;

/// GPUDirect-TCPX programs flow rules for each connection, and then waits five seconds.
const PLUGIN_CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

struct Setting {
    key: &'static str,
    variables: &'static [&'static str],
    help: &'static str,
    expected: &'static str,
    parse: fn(&mut Config, &str) -> Option<()>,
    show: fn(&Config) -> String,
    reason: fn() -> String,
}

const SETTINGS: &[Setting] = &[
    Setting {
        key: "name",
        variables: &["TCPX_NAME"],
        help: "What this session calls itself to its peers.",
        expected: "1 to 255 bytes of text",
        parse: |c, v| (1..=255).contains(&v.len()).then(|| c.name = v.to_owned()),
        show: |c| c.name.clone(),
        reason: || "host name and process id: unique without being asked for".into(),
    },
    Setting {
        key: "lanes",
        variables: &["TCPX_LANES", "UCCL_TCPX_NUM_CHANNELS"],
        help: "TCP streams to each peer. More lanes use more cores and more NIC queues.",
        expected: "a whole number from 1 to 64",
        parse: |c, v| number(v, 1, MAX_LANES).map(|n| c.lanes = n),
        show: |c| c.lanes.to_string(),
        reason: || {
            format!(
                "half of {} cores, at most 8: a stream keeps a core busy at each end, and eight \
                 fill any NIC of today",
                cores()
            )
        },
    },
    Setting {
        key: "chunk_bytes",
        variables: &["TCPX_CHUNK_BYTES", "UCCL_TCPX_CHUNK_BYTES"],
        help: "The most bytes one lane moves at once, and half of the most where GPU memory is involved. Smaller chunks spread better over lanes, larger ones cost fewer headers.",
        expected: "bytes from 16K to 256M, such as 1048576, 512K or 4M",
        parse: |c, v| bytes(v, MIN_CHUNK_BYTES, 256 << 20).map(|n| c.chunk_bytes = n),
        show: |c| c.chunk_bytes.to_string(),
        reason: || "1 MiB: half of a core's L2 cache, and 0.003 % of header".into(),
    },
    Setting {
        key: "window",
        variables: &["TCPX_WINDOW"],
        help: "Chunks in flight on one lane. Lanes × window × chunk must cover bandwidth × round trip.",
        expected: "a whole number from 1 to 1024",
        parse: |c, v| number(v, 1, 1024).map(|n| c.window = n),
        show: |c| c.window.to_string(),
        reason: || "16 × 1 MiB a lane covers 25 Gbit/s at 5 ms".into(),
    },
    Setting {
        key: "workers",
        variables: &["TCPX_WORKERS"],
        help: "Threads that move bytes. They sleep when nothing moves.",
        expected: "a whole number from 1 to 64",
        parse: |c, v| number(v, 1, 64).map(|n| c.workers = n),
        show: |c| c.workers.to_string(),
        reason: || "one a lane: a lane is driven by one thread at a time".into(),
    },
    Setting {
        key: "interfaces",
        variables: &["TCPX_INTERFACES", "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME"],
        help: "Interfaces that carry lanes: names or prefixes separated by commas, ^ excludes, = is exact.",
        expected: "a list such as eth1,eth2 or =eth0 or ^docker",
        parse: |c, v| v.parse().ok().map(|s| c.interfaces = s),
        show: |c| c.interfaces.to_string(),
        reason: || "every usable interface, loopback only when there is no other".into(),
    },
    Setting {
        key: "control_interface",
        variables: &["TCPX_CONTROL_INTERFACE", "NCCL_SOCKET_IFNAME"],
        help: "The interface whose address peers try first when they connect.",
        expected: "a list such as eth0",
        parse: |c, v| v.parse().ok().map(|s| c.control_interface = s),
        show: |c| c.control_interface.to_string(),
        reason: || "the first of the interfaces that carry lanes".into(),
    },
    Setting {
        key: "transport",
        variables: &["TCPX_TRANSPORT"],
        help: "How bytes travel: native TCP lanes, or a NCCL net plugin.",
        expected: "tcp or plugin",
        parse: |c, v| {
            c.transport = match v {
                "tcp" => TransportKind::Tcp,
                "plugin" => TransportKind::Plugin,
                _ => return None,
            };
            Some(())
        },
        show: |c| match c.transport {
            TransportKind::Tcp => "tcp".into(),
            TransportKind::Plugin => "plugin".into(),
        },
        reason: || "needs nothing but the kernel".into(),
    },
    Setting {
        key: "plugin",
        variables: &["TCPX_PLUGIN"],
        help: "The NCCL net plugin to load: a path, or a name as NCCL_NET_PLUGIN takes it.",
        expected: "a path or a name",
        parse: |c, v| {
            c.plugin = v.to_owned();
            Some(())
        },
        show: |c| c.plugin.clone(),
        reason: || "empty: libnccl-net.so, as for NCCL".into(),
    },
    Setting {
        key: "plugin_version",
        variables: &["TCPX_PLUGIN_VERSION"],
        help: "The version of the plugin API to use, for libraries that offer several; 0 takes the newest.",
        expected: "0, or a version from 4 to 12",
        parse: |c, v| {
            let version = v.parse().ok().filter(|n| matches!(n, 0 | 4..=12))?;
            c.plugin_version = version;
            Some(())
        },
        show: |c| c.plugin_version.to_string(),
        reason: || "0: what NCCL does".into(),
    },
    Setting {
        key: "staging",
        variables: &["TCPX_STAGING"],
        help: "Which memory passes through pinned host memory: that of GPUs (auto), or host memory too (always), which is slower and only of use to try the path without a GPU.",
        expected: "auto or always",
        parse: |c, v| {
            c.staging = match v {
                "auto" => StagingKind::Auto,
                "always" => StagingKind::Always,
                _ => return None,
            };
            Some(())
        },
        show: |c| match c.staging {
            StagingKind::Auto => "auto".into(),
            StagingKind::Always => "always".into(),
        },
        reason: || "auto: sockets reach all other memory directly".into(),
    },
    Setting {
        key: "staging_bytes",
        variables: &["TCPX_STAGING_BYTES"],
        help: "The most host memory that is pinned for GPU transfers, for all peers together. It is pinned as it is needed.",
        expected: "bytes from 1M to 64G, such as 256M",
        parse: |c, v| bytes(v, 1 << 20, 64 << 30).map(|n| c.staging_bytes = n),
        show: |c| c.staging_bytes.to_string(),
        reason: || {
            "256 MiB: four slots of 1 MiB each way on eight lanes to four peers at once".into()
        },
    },
    Setting {
        key: "peer_timeout",
        variables: &["TCPX_PEER_TIMEOUT"],
        help: "How long a peer with work outstanding may make no progress before its transfers fail.",
        expected: "a time from 100ms to 1h, such as 10s, 500ms or 2m (a bare number is seconds)",
        parse: |c, v| duration(v, Duration::from_millis(100)).map(|d| c.peer_timeout = d),
        show: |c| format!("{:?}", c.peer_timeout),
        reason: || {
            "10 s: longer than any pause of a healthy process, shorter than a user's patience"
                .into()
        },
    },
    Setting {
        key: "connect_timeout",
        variables: &["TCPX_CONNECT_TIMEOUT"],
        help: "How long connecting to a peer may take, all lanes and the handshake together.",
        expected: "a time from 100ms to 1h, such as 10s, 500ms or 2m (a bare number is seconds)",
        parse: |c, v| duration(v, Duration::from_millis(100)).map(|d| c.connect_timeout = d),
        show: |c| format!("{:?}", c.connect_timeout()),
        reason: || {
            "10 s: survives three lost SYN packets; 30 s on a plugin: GPUDirect-TCPX takes more than five".into()
        },
    },
    Setting {
        key: "spin_us",
        variables: &["TCPX_SPIN_US"],
        help: "How long a worker looks for more work before it sleeps. Longer lowers latency and burns CPU.",
        expected: "microseconds from 0 to 100000",
        parse: |c, v| number(v, 0, 100_000).map(|n| c.spin = Duration::from_micros(n as u64)),
        show: |c| c.spin.as_micros().to_string(),
        reason: || {
            if cores() == 1 {
                "0: with one core, spinning keeps the peer from running".into()
            } else {
                "50 µs: about what it costs to put a thread to sleep and wake it".into()
            }
        },
    },
    Setting {
        key: "socket_buffer_bytes",
        variables: &["TCPX_SOCKET_BUFFER_BYTES"],
        help: "Send and receive buffer of every socket; 0 leaves it to the kernel's autotuning.",
        expected: "0, or bytes from 4K to 1G",
        parse: |c, v| bytes(v, 0, 1 << 30).map(|n| c.socket_buffer_bytes = n),
        show: |c| c.socket_buffer_bytes.to_string(),
        reason: || {
            "0: autotuning follows bandwidth × round trip and is not capped by net.core limits"
                .into()
        },
    },
    Setting {
        key: "congestion",
        variables: &["TCPX_CONGESTION"],
        help: "Congestion control of the lanes: auto, system (whatever the kernel is set to), or a name such as cubic or bbr.",
        expected: "auto, system or a congestion control of this kernel (net.ipv4.tcp_available_congestion_control)",
        parse: |c, v| {
            (v == "auto" || v == "system" || tcpx_net::has_congestion_control(v))
                .then(|| c.congestion = v.to_owned())
        },
        show: |c| c.congestion.clone(),
        reason: || {
            "auto: between processes of one machine cubic, since there is nothing to pace; else the system's".into()
        },
    },
    Setting {
        key: "listen_port",
        variables: &["TCPX_LISTEN_PORT"],
        help: "The port to listen on, for machines behind a firewall; 0 takes a free one.",
        expected: "a port from 0 to 65535",
        parse: |c, v| v.parse().ok().map(|p| c.listen_port = p),
        show: |c| c.listen_port.to_string(),
        reason: || "0: the connection info carries the port, nobody needs to know it".into(),
    },
    Setting {
        key: "log",
        variables: &["TCPX_LOG"],
        help: "What is logged: error, warn, info, debug or trace, or a filter such as tcpx=debug.",
        expected: "a level or a filter",
        parse: |c, v| {
            c.log = v.to_owned();
            Some(())
        },
        show: |c| c.log.clone(),
        reason: || "warn: silent while all is well".into(),
    },
];

impl Config {
    /// The defaults of this machine; the environment is not looked at.
    #[must_use]
    pub fn defaults() -> Self {
        let cores = cores();
        let lanes = (cores / 2).clamp(1, 8);
        Self {
            name: format!("{}-{}", host_name(), std::process::id()),
            lanes,
            chunk_bytes: 1 << 20,
            window: 16,
            workers: lanes,
            interfaces: InterfaceSelector::every_usable(),
            control_interface: InterfaceSelector::every_usable(),
            transport: TransportKind::Tcp,
            plugin: String::new(),
            plugin_version: 0,
            staging: StagingKind::Auto,
            staging_bytes: 256 << 20,
            peer_timeout: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(10),
            spin: Duration::from_micros(if cores == 1 { 0 } else { 50 }),
            socket_buffer_bytes: 0,
            congestion: "auto".into(),
            listen_port: 0,
            log: "warn".into(),
            sources: vec![Source::Default; SETTINGS.len()],
        }
    }

    /// The defaults, overridden by the environment.
    ///
    /// # Errors
    /// A variable holds a value that cannot be used: the error names it, the value and what was
    /// expected.
    pub fn from_env() -> Result<Self, ConfigError> {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    /// As [`Config::from_env`], with the environment as an argument. Empty values count as unset.
    ///
    /// # Errors
    /// As [`Config::from_env`].
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        let mut config = Self::defaults();
        for (index, setting) in SETTINGS.iter().enumerate() {
            let found = setting
                .variables
                .iter()
                .find_map(|name| Some((*name, variable(name).filter(|v| !v.is_empty())?)));
            if let Some((name, value)) = found {
                config.apply(index, name, &value, Source::Environment(name.to_owned()))?;
            }
        }
        Ok(config)
    }

    /// Sets one value by its key, or by the name of its variable.
    ///
    /// # Errors
    /// There is no such key, or the value cannot be used.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), ConfigError> {
        let index = SETTINGS
            .iter()
            .position(|s| s.key == key || s.variables.contains(&key))
            .ok_or_else(|| ConfigError::UnknownKey {
                name: key.to_owned(),
                known: SETTINGS
                    .iter()
                    .map(|s| s.key)
                    .collect::<Vec<_>>()
                    .join(", "),
            })?;
        self.apply(index, key, value, Source::Explicit)
    }

    /// As [`Config::set`], for building in one expression.
    ///
    /// # Errors
    /// As [`Config::set`].
    pub fn with(mut self, key: &str, value: impl fmt::Display) -> Result<Self, ConfigError> {
        self.set(key, &value.to_string())?;
        Ok(self)
    }

    /// Sets the session's name.
    ///
    /// # Errors
    /// The name is empty or longer than 255 bytes.
    pub fn with_name(self, name: impl Into<String>) -> Result<Self, ConfigError> {
        let name = name.into();
        self.with("name", name)
    }

    /// Every setting with its value, source and reason.
    #[must_use]
    pub fn rows(&self) -> Vec<ConfigRow> {
        SETTINGS
            .iter()
            .zip(&self.sources)
            .map(|(setting, source)| ConfigRow {
                key: setting.key,
                variables: setting.variables,
                value: (setting.show)(self),
                source: source.clone(),
                reason: (setting.reason)(),
                help: setting.help,
            })
            .collect()
    }

    fn apply(
        &mut self,
        index: usize,
        name: &str,
        value: &str,
        source: Source,
    ) -> Result<(), ConfigError> {
        let setting = &SETTINGS[index];
        // A name is whatever it is; around everything else spaces are an accident.
        let taken = if setting.key == "name" {
            value
        } else {
            value.trim()
        };
        (setting.parse)(self, taken).ok_or_else(|| ConfigError::BadValue {
            name: name.to_owned(),
            value: value.to_owned(),
            expected: setting.expected.to_owned(),
        })?;
        self.sources[index] = source;
        // Workers follow lanes unless somebody said otherwise.
        let is_default = |config: &Self, key| {
            SETTINGS
                .iter()
                .zip(&config.sources)
                .any(|(s, from)| s.key == key && *from == Source::Default)
        };
        if is_default(self, "workers") {
            self.workers = self.lanes.min((cores() / 2).max(1));
        }
        Ok(())
    }

    /// What this session calls itself.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Streams to each peer.
    #[must_use]
    pub fn lanes(&self) -> usize {
        self.lanes
    }

    /// The most bytes one lane moves at once.
    #[must_use]
    pub fn chunk_bytes(&self) -> usize {
        self.chunk_bytes
    }

    /// Chunks in flight on one lane.
    #[must_use]
    pub fn window(&self) -> usize {
        self.window
    }

    /// Threads that move bytes.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// Which interfaces carry lanes.
    #[must_use]
    pub fn interfaces(&self) -> &InterfaceSelector {
        &self.interfaces
    }

    /// Which interface's address peers try first.
    #[must_use]
    pub fn control_interface(&self) -> &InterfaceSelector {
        &self.control_interface
    }

    /// Which memory passes through pinned staging.
    #[must_use]
    pub fn staging(&self) -> StagingKind {
        self.staging
    }

    /// Bytes of one staging slot.
    #[must_use]
    pub fn staging_slot_bytes(&self) -> usize {
        (CHUNK_FACTOR * self.chunk_bytes).min(MAX_SLOT_BYTES)
    }

    /// Staging slots that a lane to a busy peer takes, both directions together.
    #[must_use]
    pub fn staging_slots_per_lane(&self) -> usize {
        2 * DEPTH
    }

    /// The most host memory that is pinned for staging.
    #[must_use]
    pub fn staging_bytes(&self) -> usize {
        self.staging_bytes
    }

    /// How bytes travel.
    #[must_use]
    pub fn transport(&self) -> TransportKind {
        self.transport
    }

    /// The NCCL net plugin to load; empty means `libnccl-net.so`.
    #[must_use]
    pub fn plugin(&self) -> &str {
        &self.plugin
    }

    /// The version of the plugin API to use; 0 means the newest.
    #[must_use]
    pub fn plugin_version(&self) -> u32 {
        self.plugin_version
    }

    /// At least so many lanes, unless somebody said how many.
    pub(crate) fn raise_lanes(&mut self, lanes: usize) {
        if self.is_default("lanes") {
            self.lanes = self.lanes.max(lanes.min(MAX_LANES));
        }
    }

    /// Whether nobody has set this.
    fn is_default(&self, key: &str) -> bool {
        let index = SETTINGS.iter().position(|s| s.key == key);
        index.is_some_and(|index| self.sources[index] == Source::Default)
    }

    /// How long a peer with work outstanding may make no progress.
    #[must_use]
    pub fn peer_timeout(&self) -> Duration {
        self.peer_timeout
    }

    /// How long connecting may take. Unless somebody has set it, plugins have more time.
    #[must_use]
    pub fn connect_timeout(&self) -> Duration {
        match self.transport {
            TransportKind::Plugin if self.is_default("connect_timeout") => PLUGIN_CONNECT_TIMEOUT,
            _ => self.connect_timeout,
        }
    }

    /// How long a worker looks for more work before it sleeps.
    #[must_use]
    pub fn spin(&self) -> Duration {
        self.spin
    }

    /// Socket buffers, or 0 for autotuning.
    #[must_use]
    pub fn socket_buffer_bytes(&self) -> usize {
        self.socket_buffer_bytes
    }

    /// The congestion control that a lane to a peer on this machine (`local`) or on another one
    /// gets; none leaves it as the system has it.
    #[must_use]
    pub fn congestion_control(&self, local: bool) -> Option<&str> {
        match self.congestion.as_str() {
            // Pacing (bbr) halves what loopback carries and doubles its CPU cost.
            "auto" => local.then_some("cubic"),
            "system" => None,
            name => Some(name),
        }
    }

    /// The port to listen on, or 0 for a free one.
    #[must_use]
    pub fn listen_port(&self) -> u16 {
        self.listen_port
    }

    /// What is logged.
    #[must_use]
    pub fn log(&self) -> &str {
        &self.log
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn host_name() -> String {
    let name = tcpx_net::host_name();
    // Leaves room for the process id within the 255 bytes of a name.
    let name: String = name.chars().filter(|c| !c.is_control()).take(60).collect();
    if name.is_empty() { "host".into() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn from(pairs: &[(&str, &str)]) -> Result<Config, ConfigError> {
        Config::from_variables(|name| {
            pairs
                .iter()
                .find(|(n, _)| *n == name)
                .map(|(_, v)| (*v).to_owned())
        })
    }

    #[test]
    fn the_environment_overrides_defaults_and_is_remembered() {
        let config = from(&[("TCPX_LANES", "3"), ("TCPX_CHUNK_BYTES", "512K")]).unwrap();
        assert_eq!((config.lanes(), config.chunk_bytes()), (3, 512 << 10));
        let row = config
            .rows()
            .into_iter()
            .find(|r| r.key == "lanes")
            .unwrap();
        assert_eq!(row.source, Source::Environment("TCPX_LANES".into()));
    }

    #[test]
    fn older_names_count_only_where_the_new_one_is_unset() {
        assert_eq!(from(&[("UCCL_TCPX_NUM_CHANNELS", "5")]).unwrap().lanes(), 5);
        let both = from(&[("TCPX_LANES", "2"), ("UCCL_TCPX_NUM_CHANNELS", "5")]).unwrap();
        assert_eq!(both.lanes(), 2);
        let empty = from(&[("TCPX_LANES", ""), ("UCCL_TCPX_NUM_CHANNELS", "5")]).unwrap();
        assert_eq!(empty.lanes(), 5);
    }

    #[test]
    fn a_bad_value_names_variable_value_and_expectation() {
        let error = from(&[("TCPX_LANES", "many")]).unwrap_err().to_string();
        assert!(
            error.contains("TCPX_LANES") && error.contains("many") && error.contains("1 to 64")
        );
        for (key, value) in [
            ("TCPX_WINDOW", "0"),
            ("TCPX_CHUNK_BYTES", "1T"),
            ("TCPX_CHUNK_BYTES", "99999999999999999999"),
            ("TCPX_PEER_TIMEOUT", "1ms"),
            ("TCPX_PEER_TIMEOUT", "-1"),
            ("TCPX_TRANSPORT", "rdma"),
            ("TCPX_LISTEN_PORT", "65536"),
        ] {
            assert!(from(&[(key, value)]).is_err(), "{key}={value}");
        }
    }

    #[test]
    fn unknown_keys_list_the_known_ones() {
        let error = Config::defaults().set("lane", "1").unwrap_err().to_string();
        assert!(
            error.contains("\"lane\"") && error.contains("lanes"),
            "{error}"
        );
    }

    #[test]
    fn workers_follow_lanes_until_they_are_set() {
        let config = Config::defaults().with("lanes", 1).unwrap();
        assert_eq!(config.workers(), 1);
        let config = config.with("workers", 7).unwrap().with("lanes", 2).unwrap();
        assert_eq!(config.workers(), 7);
    }

    #[test]
    fn every_default_can_be_set_again_from_what_it_shows() {
        let mut config = Config::defaults();
        for row in Config::defaults().rows() {
            config
                .set(row.key, &row.value)
                .unwrap_or_else(|e| panic!("{e}"));
        }
    }

    proptest! {
        #[test]
        fn no_value_panics(key in 0..SETTINGS.len(), value in ".{0,40}") {
            let _ = Config::defaults().set(SETTINGS[key].key, &value);
        }
    }
}
