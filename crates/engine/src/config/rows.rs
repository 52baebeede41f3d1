//! The table of settings.

mod moving;
mod network;

pub(super) use self::moving::*;
pub(super) use self::network::*;
use super::row::Setting;

/// All settings. A default may depend on rows above its own.
pub(super) static ROWS: &[&dyn Setting] = &[
    &NAME,
    &LANES,
    &CHUNK_BYTES,
    &WINDOW,
    &WORKERS,
    &INTERFACES,
    &CONTROL_INTERFACE,
    &TRANSPORT,
    &PLUGIN,
    &PLUGIN_VERSION,
    &SAME_HOST,
    &STAGING,
    &STAGING_BYTES,
    &DEVICE_BYTES,
    &GPU_LOCALITY,
    &QUEUE_BYTES,
    &PEER_TIMEOUT,
    &CONNECT_TIMEOUT,
    &MAX_CONNECTIONS,
    &MAX_CONNECTIONS_PER_PEER,
    &SPIN_US,
    &SOCKET_BUFFER_BYTES,
    &CONGESTION,
    &LISTEN_PORT,
    &ADVERTISE,
    &METRICS,
    &TOP,
    &TRACE,
    &TRACE_BYTES,
    &LOG,
];
