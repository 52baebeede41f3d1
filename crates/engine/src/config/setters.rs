//! A typed setter for every setting.

use std::time::Duration;

use tcpx_net::interfaces::InterfaceSelector;

use super::form::Form;
use super::row::Row;
use super::{Config, ConfigError, GpuLocality, SameHostKind, StagingKind, TransportKind, rows};

/// Typed setters: as [`Config::with`], and with the same errors. Each replaces what the environment
/// says.
impl Config {
    fn put<F: Form>(mut self, row: &Row<F>, value: F::Value) -> Result<Self, ConfigError> {
        row.put(&mut self.values, value)?;
        self.derive();
        Ok(self)
    }

    /// Sets the session's name.
    ///
    /// # Errors
    /// The name is empty or too long.
    pub fn with_name(self, name: impl Into<String>) -> Result<Self, ConfigError> {
        self.put(&rows::NAME, name.into())
    }

    /// Sets the number of TCP streams to each peer.
    ///
    /// # Errors
    /// The number is out of range.
    pub fn with_lanes(self, lanes: usize) -> Result<Self, ConfigError> {
        self.put(&rows::LANES, lanes)
    }

    /// Sets the most bytes that one lane moves at once.
    ///
    /// # Errors
    /// The number is out of range.
    pub fn with_chunk_bytes(self, bytes: usize) -> Result<Self, ConfigError> {
        self.put(&rows::CHUNK_BYTES, bytes)
    }

    /// Sets how many chunks are in flight on one lane.
    ///
    /// # Errors
    /// The number is out of range.
    pub fn with_window(self, chunks: usize) -> Result<Self, ConfigError> {
        self.put(&rows::WINDOW, chunks)
    }

    /// Sets the number of threads that move bytes.
    ///
    /// # Errors
    /// The number is out of range.
    pub fn with_workers(self, workers: usize) -> Result<Self, ConfigError> {
        self.put(&rows::WORKERS, workers)
    }

    /// Chooses the interfaces that carry lanes.
    ///
    /// # Errors
    /// None yet: whether the interfaces are there is found out when a session starts.
    pub fn with_interfaces(self, selector: InterfaceSelector) -> Result<Self, ConfigError> {
        self.put(&rows::INTERFACES, selector)
    }

    /// Chooses interfaces to listen on besides those that carry lanes.
    ///
    /// # Errors
    /// None yet: whether the interfaces are there is found out when a session starts.
    pub fn with_control_interface(self, selector: InterfaceSelector) -> Result<Self, ConfigError> {
        self.put(&rows::CONTROL_INTERFACE, selector)
    }

    /// Chooses how bytes travel.
    ///
    /// # Errors
    /// None yet.
    pub fn with_transport(self, transport: TransportKind) -> Result<Self, ConfigError> {
        self.put(&rows::TRANSPORT, transport)
    }

    /// Names the NCCL net plugin to load, by a path or a name; empty means `libnccl-net.so`.
    ///
    /// # Errors
    /// None yet: whether the plugin can be loaded is found out when a session starts.
    pub fn with_plugin(self, plugin: impl Into<String>) -> Result<Self, ConfigError> {
        self.put(&rows::PLUGIN, plugin.into())
    }

    /// Sets the version of the plugin API to use; 0 takes the newest.
    ///
    /// # Errors
    /// There is no such version.
    pub fn with_plugin_version(self, version: u32) -> Result<Self, ConfigError> {
        self.put(&rows::PLUGIN_VERSION, version)
    }

    /// Chooses whether memory of processes on this host is copied without the network.
    ///
    /// # Errors
    /// None.
    pub fn with_same_host(self, same_host: SameHostKind) -> Result<Self, ConfigError> {
        self.put(&rows::SAME_HOST, same_host)
    }

    /// Chooses which memory passes through pinned staging.
    ///
    /// # Errors
    /// None yet.
    pub fn with_staging(self, staging: StagingKind) -> Result<Self, ConfigError> {
        self.put(&rows::STAGING, staging)
    }

    /// Sets the most host memory that is pinned for staging.
    ///
    /// # Errors
    /// The number is out of range.
    pub fn with_staging_bytes(self, bytes: usize) -> Result<Self, ConfigError> {
        self.put(&rows::STAGING_BYTES, bytes)
    }

    /// Sets the memory that is taken on each GPU; 0 takes none.
    ///
    /// # Errors
    /// The number is out of range.
    pub fn with_device_bytes(self, bytes: usize) -> Result<Self, ConfigError> {
        self.put(&rows::DEVICE_BYTES, bytes)
    }

    /// Chooses whether transfers of GPU memory stay near the GPU.
    ///
    /// # Errors
    /// None yet.
    pub fn with_gpu_locality(self, locality: GpuLocality) -> Result<Self, ConfigError> {
        self.put(&rows::GPU_LOCALITY, locality)
    }

    /// Sets the most memory that peers can make the session keep for them.
    ///
    /// # Errors
    /// The number is out of range.
    pub fn with_queue_bytes(self, bytes: usize) -> Result<Self, ConfigError> {
        self.put(&rows::QUEUE_BYTES, bytes)
    }

    /// Sets how long a peer with work outstanding may make no progress.
    ///
    /// # Errors
    /// The time is out of range.
    pub fn with_peer_timeout(self, time: Duration) -> Result<Self, ConfigError> {
        self.put(&rows::PEER_TIMEOUT, time)
    }

    /// Sets how long connecting to a peer may take.
    ///
    /// # Errors
    /// The time is out of range.
    pub fn with_connect_timeout(self, time: Duration) -> Result<Self, ConfigError> {
        self.put(&rows::CONNECT_TIMEOUT, time)
    }

    /// Sets the most connections that are accepted from sessions whose connection info is not loaded.
    ///
    /// # Errors
    /// The number is out of range.
    pub fn with_max_connections(self, connections: usize) -> Result<Self, ConfigError> {
        self.put(&rows::MAX_CONNECTIONS, connections)
    }

    /// Sets the most connections that are accepted from one session.
    ///
    /// # Errors
    /// The number is out of range.
    pub fn with_max_connections_per_peer(self, connections: usize) -> Result<Self, ConfigError> {
        self.put(&rows::MAX_CONNECTIONS_PER_PEER, connections)
    }

    /// Sets how long a worker looks for more work before it sleeps.
    ///
    /// # Errors
    /// The time is out of range.
    pub fn with_spin(self, time: Duration) -> Result<Self, ConfigError> {
        self.put(&rows::SPIN_US, time)
    }

    /// Sets the buffers of every socket; 0 leaves them to the kernel's autotuning.
    ///
    /// # Errors
    /// The number is out of range.
    pub fn with_socket_buffer_bytes(self, bytes: usize) -> Result<Self, ConfigError> {
        self.put(&rows::SOCKET_BUFFER_BYTES, bytes)
    }

    /// Names the congestion control of the lanes, or `auto` or `system`.
    ///
    /// # Errors
    /// This kernel has no such congestion control.
    pub fn with_congestion(self, name: impl Into<String>) -> Result<Self, ConfigError> {
        self.put(&rows::CONGESTION, name.into())
    }

    /// Sets the port to listen on; 0 takes a free one.
    ///
    /// # Errors
    /// None yet: whether the port is free is found out when a session starts.
    pub fn with_listen_port(self, port: u16) -> Result<Self, ConfigError> {
        self.put(&rows::LISTEN_PORT, port)
    }

    /// Chooses what is logged: a level or a filter.
    ///
    /// # Errors
    /// None yet.
    pub fn with_log(self, filter: impl Into<String>) -> Result<Self, ConfigError> {
        self.put(&rows::LOG, filter.into())
    }
}
