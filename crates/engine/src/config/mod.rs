//! The typed configuration of a session: defaults derived from the machine, overridden by the
//! environment, then by the caller.
//!
//! Every setting is one [`Row`](row::Row) of [`rows`] that holds its key, variables, help, accepted
//! values, default and the reason for the default, so that these cannot drift apart.

mod advertise;
mod form;
mod ports;
#[cfg(test)]
mod reference;
mod row;
mod rows;
mod setters;
pub(crate) mod staging;
#[cfg(test)]
mod tests;
mod types;
mod unknown;

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tcpx_net::interfaces::InterfaceSelector;

pub use self::advertise::Advertise;
pub(crate) use self::advertise::PortsDoNotFit;
pub use self::ports::PortRange;
use self::row::Held;
use self::rows::{MAX_LANES, ROWS};
use self::staging::{CHUNK_FACTOR, DEPTH, MAX_SLOT_BYTES};
pub use self::types::{
    ConfigError, ConfigRow, GpuLocality, MetricsAddress, SameHostKind, Source, StagingKind,
    TransportKind,
};
pub use self::unknown::UnknownVariable;

/// The configuration of a [`Session`](crate::Session).
///
/// Start from [`Config::from_env`] or [`Config::defaults`], then set values: by key and text
/// ([`Config::set`], [`Config::with`]), as users write settings, or by the typed `with_` methods.
/// Values are checked when they are set and never again later. A default that depends on other
/// settings follows them until it is set itself.
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
    listen_port: Held<PortRange>,
    advertise: Held<Advertise>,
    metrics: Held<Option<MetricsAddress>>,
    top: Held<bool>,
    trace: Held<Option<PathBuf>>,
    trace_bytes: Held<usize>,
    log: Held<String>,
}

impl Config {
    /// Returns the defaults for this machine, without reading the environment.
    #[must_use]
    pub fn defaults() -> Self {
        let mut config = Self {
            values: Values::default(),
        };
        config.derive();
        config
    }

    /// Returns the defaults, overridden by the environment.
    ///
    /// # Errors
    /// A variable holds an invalid value: the error names the variable, the value and the accepted
    /// form.
    pub fn from_env() -> Result<Self, ConfigError> {
        Self::from_environment(|name| std::env::var_os(name))
    }

    /// Like [`Config::from_env`], with the environment as an argument. Empty values count as unset.
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
    /// The key does not exist, or the value is invalid.
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

    /// Like [`Config::set`], for building a configuration in one expression.
    ///
    /// # Errors
    /// As [`Config::set`].
    pub fn with(mut self, key: &str, value: impl fmt::Display) -> Result<Self, ConfigError> {
        self.set(key, &value.to_string())?;
        Ok(self)
    }

    /// Returns every setting with its value, source and reason.
    #[must_use]
    pub fn rows(&self) -> Vec<ConfigRow> {
        ROWS.iter().map(|row| row.describe(&self.values)).collect()
    }

    /// Finds environment variables that begin with `TCPX_` and that no part of tcpx reads, such as
    /// misspelt settings.
    #[must_use]
    pub fn unknown_variables() -> Vec<UnknownVariable> {
        unknown::in_environment()
    }

    /// Logs a warning for each of [`Config::unknown_variables`], once per process.
    pub(crate) fn warn_of_unknown_variables() {
        unknown::warn();
    }

    /// Computes the defaults of all settings that were not set.
    fn derive(&mut self) {
        for row in ROWS {
            row.derive(&mut self.values);
        }
    }

    /// Returns the session's name, as peers see it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.values.name.value
    }

    /// Returns the number of TCP streams to each peer.
    #[must_use]
    pub fn lanes(&self) -> usize {
        self.values.lanes.value
    }

    /// Returns the largest number of bytes that one lane moves at once.
    #[must_use]
    pub fn chunk_bytes(&self) -> usize {
        self.values.chunk_bytes.value
    }

    /// Returns the number of chunks in flight per lane.
    #[must_use]
    pub fn window(&self) -> usize {
        self.values.window.value
    }

    /// Returns the number of threads that move bytes.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.values.workers.value
    }

    /// Returns the interfaces that carry lanes.
    #[must_use]
    pub fn interfaces(&self) -> &InterfaceSelector {
        &self.values.interfaces.value
    }

    /// Returns the interfaces to listen on in addition to the interfaces that carry lanes.
    #[must_use]
    pub fn control_interface(&self) -> &InterfaceSelector {
        &self.values.control_interface.value
    }

    /// Returns whether memory of processes on this host is copied without the network.
    #[must_use]
    pub fn same_host(&self) -> SameHostKind {
        self.values.same_host.value
    }

    /// Returns which memory passes through pinned staging.
    #[must_use]
    pub fn staging(&self) -> StagingKind {
        self.values.staging.value
    }

    /// Returns the size of a staging slot in bytes.
    #[must_use]
    pub fn staging_slot_bytes(&self) -> usize {
        slot_bytes(self.chunk_bytes())
    }

    /// Returns the number of staging slots that a lane to a busy peer uses,
    /// both directions together.
    #[must_use]
    pub fn staging_slots_per_lane(&self) -> usize {
        2 * DEPTH
    }

    /// Returns the limit for host memory pinned for staging.
    #[must_use]
    pub fn staging_bytes(&self) -> usize {
        self.values.staging_bytes.value
    }

    /// Returns the memory reserved on each GPU; 0 for none.
    #[must_use]
    pub fn device_bytes(&self) -> usize {
        self.values.device_bytes.value
    }

    /// Returns whether transfers of GPU memory stay near the GPU.
    #[must_use]
    pub fn gpu_locality(&self) -> GpuLocality {
        self.values.gpu_locality.value
    }

    /// Returns the limit for memory that the session keeps on behalf of peers.
    #[must_use]
    pub fn queue_bytes(&self) -> usize {
        self.values.queue_bytes.value
    }

    /// Returns the transport that carries bytes.
    #[must_use]
    pub fn transport(&self) -> TransportKind {
        self.values.transport.value
    }

    /// Returns the NCCL net plugin to load; empty means `libnccl-net.so`.
    #[must_use]
    pub fn plugin(&self) -> &str {
        &self.values.plugin.value
    }

    /// Returns the version of the plugin API to use; 0 means the newest.
    #[must_use]
    pub fn plugin_version(&self) -> u32 {
        self.values.plugin_version.value
    }

    /// Raises the number of lanes, unless it was set.
    pub(crate) fn raise_lanes(&mut self, lanes: usize) {
        self.values.lanes.value = self.lanes_for(lanes);
    }

    /// Returns the number of lanes of a connection with `ways` paths; each path should have one.
    pub(crate) fn lanes_for(&self, ways: usize) -> usize {
        let lanes = &self.values.lanes;
        match lanes.source {
            Source::Default => lanes.value.max(ways.min(MAX_LANES)),
            _ => lanes.value,
        }
    }

    /// Returns the number of lanes of a connection over `pairs` pairs of interfaces. If a GPU uses
    /// only one in `parts` of the interfaces, the number is multiplied by `parts`, so that the GPU
    /// has as many lanes as it would have over all interfaces. With a plugin, its devices determine
    /// the number.
    pub(crate) fn lanes_over(&self, pairs: usize, parts: usize) -> usize {
        match self.transport() {
            TransportKind::Tcp if pairs > 1 => self.lanes_for(pairs.max(parts * self.lanes())),
            TransportKind::Tcp => self.lanes_for(pairs),
            TransportKind::Plugin => self.lanes(),
        }
    }

    /// Returns how long a peer with outstanding work may make no progress.
    #[must_use]
    pub fn peer_timeout(&self) -> Duration {
        self.values.peer_timeout.value
    }

    /// Returns how long connecting may take.
    #[must_use]
    pub fn connect_timeout(&self) -> Duration {
        self.values.connect_timeout.value
    }

    /// Returns the limit for connections accepted from
    /// sessions whose connection info is not loaded.
    #[must_use]
    pub fn max_connections(&self) -> usize {
        self.values.max_connections.value
    }

    /// Returns the limit for connections accepted from one session.
    #[must_use]
    pub fn max_connections_per_peer(&self) -> usize {
        self.values.max_connections_per_peer.value
    }

    /// Returns how long a worker looks for more work before it sleeps.
    #[must_use]
    pub fn spin(&self) -> Duration {
        self.values.spin.value
    }

    /// Returns the size of socket buffers, or 0 for autotuning.
    #[must_use]
    pub fn socket_buffer_bytes(&self) -> usize {
        self.values.socket_buffer_bytes.value
    }

    /// Returns the congestion control for lanes to a peer on this machine (`local`) or on another
    /// one; `None` keeps the system's default.
    #[must_use]
    pub fn congestion_control(&self, local: bool) -> Option<&str> {
        match self.values.congestion.value.as_str() {
            // Pacing (bbr) halves the throughput of loopback and doubles its CPU cost.
            "auto" => local.then_some("cubic"),
            "system" => None,
            name => Some(name),
        }
    }

    /// Returns the ports of which the session takes one to listen on.
    #[must_use]
    pub fn listen_port(&self) -> PortRange {
        self.values.listen_port.value
    }

    /// Returns the addresses that peers connect to, in addition to or instead of the session's own.
    #[must_use]
    pub fn advertise(&self) -> &Advertise {
        &self.values.advertise.value
    }

    /// Returns the address at which statistics are served, if any.
    #[must_use]
    pub fn metrics(&self) -> Option<MetricsAddress> {
        self.values.metrics.value
    }

    /// Returns whether `tcpx top` shows the session.
    #[must_use]
    pub fn top(&self) -> bool {
        self.values.top.value
    }

    /// Returns the file that events are recorded to; `None` if there is none.
    #[must_use]
    pub fn trace(&self) -> Option<&Path> {
        self.values.trace.value.as_deref()
    }

    /// Returns the limit for the bytes of that file.
    #[must_use]
    pub fn trace_bytes(&self) -> usize {
        self.values.trace_bytes.value
    }

    /// Returns the log filter.
    #[must_use]
    pub fn log(&self) -> &str {
        &self.values.log.value
    }
}

/// Returns the size of a staging slot for chunks of `chunk_bytes` bytes.
fn slot_bytes(chunk_bytes: usize) -> usize {
    (CHUNK_FACTOR * chunk_bytes).min(MAX_SLOT_BYTES)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn host_name() -> String {
    let name = tcpx_net::host_name();
    // Leave room for the process id within the 255 bytes of a name.
    let name: String = name.chars().filter(|c| !c.is_control()).take(60).collect();
    if name.is_empty() { "host".into() } else { name }
}
