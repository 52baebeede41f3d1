//! A typed setter for every setting.

use std::path::PathBuf;
use std::time::Duration;

use tcpx_net::interfaces::InterfaceSelector;

use super::form::Form;
use super::row::Row;
use super::{
    Advertise, Config, ConfigError, GpuLocality, MetricsAddress, PortRange, SameHostKind,
    StagingKind, TransportKind, rows,
};

/// Typed setters: like [`Config::with`], with the same errors. Each overrides the environment.
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

    /// Sets the largest number of bytes that one lane moves at once.
    ///
    /// # Errors
    /// The number is out of range.
    pub fn with_chunk_bytes(self, bytes: usize) -> Result<Self, ConfigError> {
        self.put(&rows::CHUNK_BYTES, bytes)
    }

    /// Sets the number of chunks in flight per lane.
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
    /// None at present: a session checks at its start whether the interfaces exist.
    pub fn with_interfaces(self, selector: InterfaceSelector) -> Result<Self, ConfigError> {
        self.put(&rows::INTERFACES, selector)
    }

    /// Chooses interfaces to listen on in addition to the interfaces that carry lanes.
    ///
    /// # Errors
    /// None at present: a session checks at its start whether the interfaces exist.
    pub fn with_control_interface(self, selector: InterfaceSelector) -> Result<Self, ConfigError> {
        self.put(&rows::CONTROL_INTERFACE, selector)
    }

    /// Chooses the transport that carries bytes.
    ///
    /// # Errors
    /// None at present.
    pub fn with_transport(self, transport: TransportKind) -> Result<Self, ConfigError> {
        self.put(&rows::TRANSPORT, transport)
    }

    /// Names the NCCL net plugin to load, by path or name; empty means `libnccl-net.so`.
    ///
    /// # Errors
    /// None at present: a session loads the plugin at its start.
    pub fn with_plugin(self, plugin: impl Into<String>) -> Result<Self, ConfigError> {
        self.put(&rows::PLUGIN, plugin.into())
    }

    /// Sets the version of the plugin API to use; 0 selects the newest.
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
    /// None at present.
    pub fn with_staging(self, staging: StagingKind) -> Result<Self, ConfigError> {
        self.put(&rows::STAGING, staging)
    }

    /// Sets the limit for host memory pinned for staging.
    ///
    /// # Errors
    /// The number is out of range.
    pub fn with_staging_bytes(self, bytes: usize) -> Result<Self, ConfigError> {
        self.put(&rows::STAGING_BYTES, bytes)
    }

    /// Sets the memory reserved on each GPU; 0 reserves none.
    ///
    /// # Errors
    /// The number is out of range.
    pub fn with_device_bytes(self, bytes: usize) -> Result<Self, ConfigError> {
        self.put(&rows::DEVICE_BYTES, bytes)
    }

    /// Chooses whether transfers of GPU memory stay near the GPU.
    ///
    /// # Errors
    /// None at present.
    pub fn with_gpu_locality(self, locality: GpuLocality) -> Result<Self, ConfigError> {
        self.put(&rows::GPU_LOCALITY, locality)
    }

    /// Sets the limit for memory that the session keeps on behalf of peers.
    ///
    /// # Errors
    /// The number is out of range.
    pub fn with_queue_bytes(self, bytes: usize) -> Result<Self, ConfigError> {
        self.put(&rows::QUEUE_BYTES, bytes)
    }

    /// Sets how long a peer with outstanding work may make no progress.
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

    /// Sets the limit for connections accepted from sessions whose connection info is not loaded.
    ///
    /// # Errors
    /// The number is out of range.
    pub fn with_max_connections(self, connections: usize) -> Result<Self, ConfigError> {
        self.put(&rows::MAX_CONNECTIONS, connections)
    }

    /// Sets the limit for connections accepted from one session.
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

    /// Sets the port to listen on, or a range of which a free port is taken; 0 takes any free port.
    ///
    /// # Errors
    /// None at present: a session binds the port at its start.
    pub fn with_listen_port(self, ports: impl Into<PortRange>) -> Result<Self, ConfigError> {
        self.put(&rows::LISTEN_PORT, ports.into())
    }

    /// Sets the addresses and names that peers connect to.
    ///
    /// # Errors
    /// None at present: a session checks at its start whether mapped ports match `listen_port`.
    pub fn with_advertise(self, places: Advertise) -> Result<Self, ConfigError> {
        self.put(&rows::ADVERTISE, places)
    }

    /// Serves statistics at this address.
    ///
    /// # Errors
    /// None at present: a session binds the port at its start.
    pub fn with_metrics(
        self,
        address: impl Into<Option<MetricsAddress>>,
    ) -> Result<Self, ConfigError> {
        self.put(&rows::METRICS, address.into())
    }

    /// Sets the file that events are recorded to, or none.
    ///
    /// # Errors
    /// None yet: a session that starts finds out whether the file can be written.
    pub fn with_trace(self, file: impl Into<Option<PathBuf>>) -> Result<Self, ConfigError> {
        self.put(&rows::TRACE, file.into())
    }

    /// Sets the limit for the bytes of that file.
    ///
    /// # Errors
    /// The number is out of range.
    pub fn with_trace_bytes(self, bytes: usize) -> Result<Self, ConfigError> {
        self.put(&rows::TRACE_BYTES, bytes)
    }

    /// Sets whether `tcpx top` shows the session.
    ///
    /// # Errors
    /// None yet.
    pub fn with_top(self, top: bool) -> Result<Self, ConfigError> {
        self.put(&rows::TOP, top)
    }

    /// Sets the log filter: a level or a filter expression.
    ///
    /// # Errors
    /// None at present.
    pub fn with_log(self, filter: impl Into<String>) -> Result<Self, ConfigError> {
        self.put(&rows::LOG, filter.into())
    }
}
