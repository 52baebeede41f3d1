//! The one typed configuration: defaults derived from the machine, then the environment, then what
//! the caller says.
//!
//! Every setting is one [`Row`](row::Row) of [`rows`] that holds its key, its variables, its help,
//! what it accepts, its default and the reason for it, so that none of these can drift apart.

mod form;
#[cfg(test)]
mod reference;
mod row;
mod rows;
mod setters;
pub(crate) mod staging;
#[cfg(test)]
mod tests;
mod types;

use std::ffi::OsString;
use std::fmt;
use std::time::Duration;

use tcpx_net::interfaces::InterfaceSelector;

use self::row::Held;
use self::rows::{MAX_LANES, ROWS};
use self::staging::{CHUNK_FACTOR, DEPTH, MAX_SLOT_BYTES};
pub use self::types::{
    ConfigError, ConfigRow, GpuLocality, SameHostKind, Source, StagingKind, TransportKind,
};

/// The configuration of a [`Session`](crate::Session).
///
/// Start from [`Config::from_env`] or [`Config::defaults`], then set values: by key and text
/// ([`Config::set`], [`Config::with`]), as settings come from users, or by the typed `with_`
/// methods. A value that was accepted can be used; there is no later check. Defaults that depend on
/// other settings follow them until they are set themselves.
#[derive(Clone, Debug)]
pub struct Config {
    values: Values,
}

/// The values of all settings, each with its source.
#[derive(Clone, Debug, Default)]
struct Values {
    name: Held<String>,
    lanes: Held<usize>,
    chunk_bytes: Held<usize>,
    window: Held<usize>,
    workers: Held<usize>,
    interfaces: Held<InterfaceSelector>,
    control_interface: Held<InterfaceSelector>,
    transport: Held<TransportKind>,
    plugin: Held<String>,
    plugin_version: Held<u32>,
    same_host: Held<SameHostKind>,
    staging: Held<StagingKind>,
    staging_bytes: Held<usize>,
    device_bytes: Held<usize>,
    gpu_locality: Held<GpuLocality>,
    queue_bytes: Held<usize>,
    peer_timeout: Held<Duration>,
    connect_timeout: Held<Duration>,
    max_connections: Held<usize>,
    max_connections_per_peer: Held<usize>,
    spin: Held<Duration>,
    socket_buffer_bytes: Held<usize>,
    congestion: Held<String>,
    listen_port: Held<u16>,
    log: Held<String>,
}

impl Config {
    /// The defaults of this machine; the environment is not looked at.
    #[must_use]
    pub fn defaults() -> Self {
        let mut config = Self {
            values: Values::default(),
        };
        config.derive();
        config
    }

    /// The defaults, overridden by the environment.
    ///
    /// # Errors
    /// A variable holds a value that cannot be used: the error names it, the value and what was
    /// expected.
    pub fn from_env() -> Result<Self, ConfigError> {
        Self::from_environment(|name| std::env::var_os(name))
    }

    /// As [`Config::from_env`], with the environment as an argument. Empty values count as unset.
    ///
    /// # Errors
    /// As [`Config::from_env`].
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        Self::from_environment(|name| variable(name).map(OsString::from))
    }

    fn from_environment(variable: impl Fn(&str) -> Option<OsString>) -> Result<Self, ConfigError> {
        let mut config = Self::defaults();
        for row in ROWS {
            let found = row
                .variables()
                .iter()
                .find_map(|name| Some((*name, variable(name).filter(|v| !v.is_empty())?)));
            if let Some((name, value)) = found {
                let value = value.into_string().map_err(|raw| ConfigError::BadValue {
                    name: name.to_owned(),
                    value: raw.to_string_lossy().into_owned(),
                    expected: format!("UTF-8, {}", row.expected()),
                })?;
                let source = Source::Environment(name.to_owned());
                row.set(&mut config.values, name, &value, source)?;
            }
        }
        config.derive();
        Ok(config)
    }

    /// Sets one value by its key, or by the name of its variable.
    ///
    /// # Errors
    /// There is no such key, or the value cannot be used.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), ConfigError> {
        let row = ROWS
            .iter()
            .find(|row| row.key() == key || row.variables().contains(&key))
            .ok_or_else(|| {
                let known: Vec<_> = ROWS.iter().map(|row| row.key()).collect();
                ConfigError::UnknownKey {
                    name: key.to_owned(),
                    known: known.join(", "),
                }
            })?;
        row.set(&mut self.values, key, value, Source::Explicit)?;
        self.derive();
        Ok(())
    }

    /// As [`Config::set`], for building in one expression.
    ///
    /// # Errors
    /// As [`Config::set`].
    pub fn with(mut self, key: &str, value: impl fmt::Display) -> Result<Self, ConfigError> {
        self.set(key, &value.to_string())?;
        Ok(self)
    }

    /// Every setting with its value, source and reason.
    #[must_use]
    pub fn rows(&self) -> Vec<ConfigRow> {
        ROWS.iter().map(|row| row.describe(&self.values)).collect()
    }

    /// Computes the defaults of everything that nobody has set.
    fn derive(&mut self) {
        for row in ROWS {
            row.derive(&mut self.values);
        }
    }

    /// What this session calls itself.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.values.name.value
    }

    /// Streams to each peer.
    #[must_use]
    pub fn lanes(&self) -> usize {
        self.values.lanes.value
    }

    /// The most bytes one lane moves at once.
    #[must_use]
    pub fn chunk_bytes(&self) -> usize {
        self.values.chunk_bytes.value
    }

    /// Chunks in flight on one lane.
    #[must_use]
    pub fn window(&self) -> usize {
        self.values.window.value
    }

    /// Threads that move bytes.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.values.workers.value
    }

    /// Which interfaces carry lanes.
    #[must_use]
    pub fn interfaces(&self) -> &InterfaceSelector {
        &self.values.interfaces.value
    }

    /// Which interfaces are listened on besides those that carry lanes.
    #[must_use]
    pub fn control_interface(&self) -> &InterfaceSelector {
        &self.values.control_interface.value
    }

    /// Whether memory of processes on this host is copied without the network.
    #[must_use]
    pub fn same_host(&self) -> SameHostKind {
        self.values.same_host.value
    }

    /// Which memory passes through pinned staging.
    #[must_use]
    pub fn staging(&self) -> StagingKind {
        self.values.staging.value
    }

    /// Bytes of one staging slot.
    #[must_use]
    pub fn staging_slot_bytes(&self) -> usize {
        slot_bytes(self.chunk_bytes())
    }

    /// Staging slots that a lane to a busy peer takes, both directions together.
    #[must_use]
    pub fn staging_slots_per_lane(&self) -> usize {
        2 * DEPTH
    }

    /// The most host memory that is pinned for staging.
    #[must_use]
    pub fn staging_bytes(&self) -> usize {
        self.values.staging_bytes.value
    }

    /// The memory that is taken on each GPU; 0 if none is.
    #[must_use]
    pub fn device_bytes(&self) -> usize {
        self.values.device_bytes.value
    }

    /// Whether transfers of GPU memory stay near the GPU.
    #[must_use]
    pub fn gpu_locality(&self) -> GpuLocality {
        self.values.gpu_locality.value
    }

    /// The most memory that peers can make the session keep for them.
    #[must_use]
    pub fn queue_bytes(&self) -> usize {
        self.values.queue_bytes.value
    }

    /// How bytes travel.
    #[must_use]
    pub fn transport(&self) -> TransportKind {
        self.values.transport.value
    }

    /// The NCCL net plugin to load; empty means `libnccl-net.so`.
    #[must_use]
    pub fn plugin(&self) -> &str {
        &self.values.plugin.value
    }

    /// The version of the plugin API to use; 0 means the newest.
    #[must_use]
    pub fn plugin_version(&self) -> u32 {
        self.values.plugin_version.value
    }

    /// Raises the number of lanes, unless somebody has set it.
    pub(crate) fn raise_lanes(&mut self, lanes: usize) {
        self.values.lanes.value = self.lanes_for(lanes);
    }

    /// The number of lanes of a connection with so many ways to use, each of which should have one.
    pub(crate) fn lanes_for(&self, ways: usize) -> usize {
        let lanes = &self.values.lanes;
        match lanes.source {
            Source::Default => lanes.value.max(ways.min(MAX_LANES)),
            _ => lanes.value,
        }
    }

    /// The number of lanes of a connection over so many pairs of interfaces. Where a GPU uses only one
    /// in `parts` of these, there are that many times as many: it has as many lanes as it would have
    /// over all of them. On a plugin its devices decide, and not the interfaces.
    pub(crate) fn lanes_over(&self, pairs: usize, parts: usize) -> usize {
        match self.transport() {
            TransportKind::Tcp if pairs > 1 => self.lanes_for(pairs.max(parts * self.lanes())),
            TransportKind::Tcp => self.lanes_for(pairs),
            TransportKind::Plugin => self.lanes(),
        }
    }

    /// How long a peer with work outstanding may make no progress.
    #[must_use]
    pub fn peer_timeout(&self) -> Duration {
        self.values.peer_timeout.value
    }

    /// How long connecting may take.
    #[must_use]
    pub fn connect_timeout(&self) -> Duration {
        self.values.connect_timeout.value
    }

    /// The most connections that are accepted from sessions whose connection info is not loaded.
    #[must_use]
    pub fn max_connections(&self) -> usize {
        self.values.max_connections.value
    }

    /// The most connections that are accepted from one session.
    #[must_use]
    pub fn max_connections_per_peer(&self) -> usize {
        self.values.max_connections_per_peer.value
    }

    /// How long a worker looks for more work before it sleeps.
    #[must_use]
    pub fn spin(&self) -> Duration {
        self.values.spin.value
    }

    /// Socket buffers, or 0 for autotuning.
    #[must_use]
    pub fn socket_buffer_bytes(&self) -> usize {
        self.values.socket_buffer_bytes.value
    }

    /// The congestion control that a lane to a peer on this machine (`local`) or on another one
    /// gets; none leaves it as the system has it.
    #[must_use]
    pub fn congestion_control(&self, local: bool) -> Option<&str> {
        match self.values.congestion.value.as_str() {
            // Pacing (bbr) halves what loopback carries and doubles its CPU cost.
            "auto" => local.then_some("cubic"),
            "system" => None,
            name => Some(name),
        }
    }

    /// The port to listen on, or 0 for a free one.
    #[must_use]
    pub fn listen_port(&self) -> u16 {
        self.values.listen_port.value
    }

    /// What is logged.
    #[must_use]
    pub fn log(&self) -> &str {
        &self.values.log.value
    }
}

/// The size of a staging slot for chunks of so many bytes.
fn slot_bytes(chunk_bytes: usize) -> usize {
    (CHUNK_FACTOR * chunk_bytes).min(MAX_SLOT_BYTES)
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
