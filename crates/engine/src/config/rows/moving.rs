//! Settings that control how bytes are moved.

use std::time::Duration;

use tcpx_proto::frame::MAX_CHUNK_BYTES;
use tcpx_proto::info::Name as SessionName;

use crate::config::form::{
    Bytes, Choice, Form, Microseconds, Name, Number, OptionalFile, Text, bytes_text,
};
use crate::config::row::{DefaultValue, Row};
use crate::config::staging::{CHUNK_FACTOR, DEPTH};
use crate::config::{GpuLocality, SameHostKind, StagingKind, cores, host_name, slot_bytes};

/// Limits the lanes to one peer.
pub(in crate::config) const MAX_LANES: usize = 64;

/// Limits the default number of lanes to one peer.
const USUAL_LANES: usize = 8;

const DEFAULT_CHUNK_BYTES: usize = 1 << 20;
const DEFAULT_WINDOW: usize = 16;
const DEFAULT_STAGING_BYTES: usize = 256 << 20;
const DEFAULT_DEVICE_BYTES: usize = 96 << 20;
const DEFAULT_QUEUE_BYTES: usize = 24 << 20;
const DEFAULT_SPIN: Duration = Duration::from_micros(50);

pub(in crate::config) static NAME: Row<Name> = Row {
    key: "name",
    variables: &["TCPX_NAME"],
    help: || "The name under which peers know this session.".into(),
    form: Name {
        max: SessionName::MAX_LEN,
    },
    default: DefaultValue::Derived {
        of: |_| format!("{}-{}", host_name(), std::process::id()),
        text: || "host name and process id".into(),
    },
    why: || "unique without configuration".into(),
    get: |v| &v.name,
    get_mut: |v| &mut v.name,
};

pub(in crate::config) static LANES: Row<Number<usize>> = Row {
    key: "lanes",
    variables: &["TCPX_LANES", "UCCL_TCPX_NUM_CHANNELS"],
    help: || {
        "TCP streams to each peer. More lanes use more cores and more NIC queues. Unless this is \
         set, every pair of interfaces that reaches a peer, and every device of a plugin, has its \
         own lane; where GPUs use only some of the interfaces (gpu_locality), these interfaces \
         have as many lanes as all interfaces would have otherwise. One additional stream per \
         peer carries messages and small transfers."
            .into()
    },
    form: Number {
        what: "a whole number",
        or: None,
        min: 1,
        max: MAX_LANES,
    },
    default: DefaultValue::Derived {
        of: |_| usual_lanes(cores()),
        text: || format!("half of the cores, less one in sixteen, from 1 to {USUAL_LANES}"),
    },
    why: || {
        format!(
            "a stream keeps a core busy at each end, the application needs some where both ends \
             run on one machine, and {USUAL_LANES} saturate any current NIC; this machine has {}",
            match cores() {
                1 => "one core".into(),
                cores => format!("{cores} cores"),
            }
        )
    },
    get: |v| &v.lanes,
    get_mut: |v| &mut v.lanes,
};

/// Returns the lanes for a machine with this many cores. Where both ends run on it, workers of both
/// together leave some cores to the application.
pub(in crate::config) fn usual_lanes(cores: usize) -> usize {
    (cores / 2 - cores / 16).clamp(1, USUAL_LANES)
}

pub(in crate::config) static CHUNK_BYTES: Row<Bytes> = Row {
    key: "chunk_bytes",
    variables: &["TCPX_CHUNK_BYTES", "UCCL_TCPX_CHUNK_BYTES"],
    help: || {
        format!(
            "The largest number of bytes that one lane moves at once; {CHUNK_FACTOR} times as many \
             for GPU memory. Smaller chunks spread better over lanes, larger chunks cost fewer \
             headers."
        )
    },
    // Shorter chunks spend a noticeable share on frame headers; longer chunks do not fit a frame.
    form: Bytes {
        or_zero: false,
        min: 16 << 10,
        max: MAX_CHUNK_BYTES as usize,
    },
    default: DefaultValue::Fixed(|| DEFAULT_CHUNK_BYTES),
    why: || "half of a core's L2 cache, and 0.003 % of header".into(),
    get: |v| &v.chunk_bytes,
    get_mut: |v| &mut v.chunk_bytes,
};

pub(in crate::config) static WINDOW: Row<Number<usize>> = Row {
    key: "window",
    variables: &["TCPX_WINDOW"],
    help: || {
        "Chunks in flight on one lane. Lanes × window × chunk must cover bandwidth × round trip."
            .into()
    },
    form: Number {
        what: "a whole number",
        or: None,
        min: 1,
        max: 1024,
    },
    default: DefaultValue::Fixed(|| DEFAULT_WINDOW),
    why: || {
        let in_flight = (DEFAULT_WINDOW * DEFAULT_CHUNK_BYTES) as u64;
        let milliseconds = 8 * in_flight / 25_000_000;
        format!(
            "with chunks of {} a lane covers 25 Gbit/s at {milliseconds} ms",
            bytes_text(DEFAULT_CHUNK_BYTES)
        )
    },
    get: |v| &v.window,
    get_mut: |v| &mut v.window,
};

pub(in crate::config) static WORKERS: Row<Number<usize>> = Row {
    key: "workers",
    variables: &["TCPX_WORKERS"],
    help: || {
        "Threads that move large transfers; small transfers have a thread of their own. All \
         of them sleep while nothing moves."
            .into()
    },
    form: Number {
        what: "a whole number",
        or: None,
        min: 1,
        max: 64,
    },
    default: DefaultValue::Derived {
        of: |v| v.lanes.value.min((cores() / 2).max(1)),
        text: || "as lanes, at most half of the cores".into(),
    },
    why: || "one thread drives a lane at a time, and the application needs cores as well".into(),
    get: |v| &v.workers,
    get_mut: |v| &mut v.workers,
};

pub(in crate::config) static SAME_HOST: Row<Choice<SameHostKind>> = Row {
    key: "same_host",
    variables: &["TCPX_SAME_HOST"],
    help: || {
        "Whether memory of processes on this host is copied directly, without the network: auto \
         (where both sides can), off (never), or require (always: a transfer that cannot be copied \
         directly fails with the reason)."
            .into()
    },
    form: Choice {
        words: &[
            ("auto", SameHostKind::Auto),
            ("off", SameHostKind::Off),
            ("require", SameHostKind::Require),
        ],
    },
    default: DefaultValue::Fixed(|| SameHostKind::Auto),
    why: || "one copy is faster than a socket".into(),
    get: |v| &v.same_host,
    get_mut: |v| &mut v.same_host,
};

pub(in crate::config) static STAGING: Row<Choice<StagingKind>> = Row {
    key: "staging",
    variables: &["TCPX_STAGING"],
    help: || {
        "Which memory passes through pinned host memory: GPU memory (auto), or host memory as well \
         (always), which is slower and serves only to test the path without a GPU."
            .into()
    },
    form: Choice {
        words: &[("auto", StagingKind::Auto), ("always", StagingKind::Always)],
    },
    default: DefaultValue::Fixed(|| StagingKind::Auto),
    why: || "sockets access host memory directly".into(),
    get: |v| &v.staging,
    get_mut: |v| &mut v.staging,
};

pub(in crate::config) static STAGING_BYTES: Row<Bytes> = Row {
    key: "staging_bytes",
    variables: &["TCPX_STAGING_BYTES"],
    help: || {
        let (slots, slot) = (2 * DEPTH, slot_bytes(DEFAULT_CHUNK_BYTES));
        format!(
            "The limit for host memory that is pinned for GPU transfers, for all peers together. \
             Memory is pinned on demand: with the default chunk_bytes a lane to a busy peer uses \
             up to {slots} slots of {}, {} in all.",
            bytes_text(slot),
            bytes_text(slots * slot)
        )
    },
    form: Bytes {
        or_zero: false,
        min: 1 << 20,
        max: 64 << 30,
    },
    default: DefaultValue::Fixed(|| DEFAULT_STAGING_BYTES),
    why: || {
        let slot = slot_bytes(DEFAULT_CHUNK_BYTES);
        let peers = DEFAULT_STAGING_BYTES / (2 * DEPTH * slot * USUAL_LANES);
        format!(
            "{DEPTH} slots of {} each way on {USUAL_LANES} lanes to {peers} peers at once",
            bytes_text(slot)
        )
    },
    get: |v| &v.staging_bytes,
    get_mut: |v| &mut v.staging_bytes,
};

pub(in crate::config) static DEVICE_BYTES: Row<Bytes> = Row {
    key: "device_bytes",
    variables: &["TCPX_DEVICE_BYTES"],
    help: || {
        "Memory that a session reserves on each GPU that has registered memory. Scattered blocks \
         are gathered there in large batches, so that kernels of the application lose little time. \
         0 reserves none: blocks cross the bus one by one, which halves the speed of a model that \
         decodes at the same time."
            .into()
    },
    form: Bytes {
        or_zero: true,
        min: 1 << 20,
        max: 1 << 30,
    },
    default: DefaultValue::Fixed(|| DEFAULT_DEVICE_BYTES),
    why: || "3 batches of 16 MiB per direction: one being filled, two in flight".into(),
    get: |v| &v.device_bytes,
    get_mut: |v| &mut v.device_bytes,
};

pub(in crate::config) static GPU_LOCALITY: Row<Choice<GpuLocality>> = Row {
    key: "gpu_locality",
    variables: &["TCPX_GPU_LOCALITY"],
    help: || {
        "Whether transfers of a GPU's memory stay near the GPU (auto): they use the interfaces \
         nearest to it, and workers run on its NUMA node if all GPUs and interfaces in use share \
         one node. With off, transfers use all interfaces, and workers run anywhere. Host memory \
         always uses all interfaces."
            .into()
    },
    form: Choice {
        words: &[("auto", GpuLocality::Auto), ("off", GpuLocality::Off)],
    },
    default: DefaultValue::Fixed(|| GpuLocality::Auto),
    why: || "crossing the link between CPUs is slow, and slows down other traffic".into(),
    get: |v| &v.gpu_locality,
    get_mut: |v| &mut v.gpu_locality,
};

pub(in crate::config) static QUEUE_BYTES: Row<Bytes> = Row {
    key: "queue_bytes",
    variables: &["TCPX_QUEUE_BYTES"],
    help: || {
        "The limit for memory that a session keeps on behalf of all peers: notifications that were \
         not taken, and tagged messages without a matching receive. One peer may use half of it. \
         The same half limits the bytes queued for one peer and the length of a notification. At \
         the limit the session stops reading from the peer's lane."
            .into()
    },
    form: Bytes {
        or_zero: false,
        min: 1 << 20,
        max: 64 << 30,
    },
    default: DefaultValue::Fixed(|| DEFAULT_QUEUE_BYTES),
    why: || {
        let messages = DEFAULT_QUEUE_BYTES / 2 / 256;
        format!("about {messages} short notifications from one peer, at a small memory cost")
    },
    get: |v| &v.queue_bytes,
    get_mut: |v| &mut v.queue_bytes,
};

pub(in crate::config) static SPIN_US: Row<Microseconds> = Row {
    key: "spin_us",
    variables: &["TCPX_SPIN_US"],
    help: || {
        "How long a worker looks for more work before it sleeps. A longer time lowers latency and \
         costs CPU."
            .into()
    },
    form: Microseconds { max: 100_000 },
    default: DefaultValue::Derived {
        of: |_| {
            if cores() == 1 {
                Duration::ZERO
            } else {
                DEFAULT_SPIN
            }
        },
        text: || format!("{}, 0 with one core", SPIN_US.form.show(&DEFAULT_SPIN)),
    },
    why: || {
        "about the cost of putting a thread to sleep and waking it; with one core, spinning keeps \
         the peer from running"
            .into()
    },
    get: |v| &v.spin,
    get_mut: |v| &mut v.spin,
};

pub(in crate::config) static TRACE: Row<OptionalFile> = Row {
    key: "trace",
    variables: &["TCPX_TRACE"],
    help: || {
        "The file that transfers, chunks, copies and system calls are recorded to, for \
         ui.perfetto.dev. Sessions of one process share it; a second process that names the same \
         file puts its process ID before the extension."
            .into()
    },
    form: OptionalFile,
    default: DefaultValue::Fixed(|| None),
    why: || "recording costs time for each event, small transfers most".into(),
    get: |v| &v.trace,
    get_mut: |v| &mut v.trace,
};

pub(in crate::config) static TRACE_BYTES: Row<Bytes> = Row {
    key: "trace_bytes",
    variables: &["TCPX_TRACE_BYTES"],
    help: || {
        "The limit for the bytes of the trace. Events after that are counted, and not recorded."
            .into()
    },
    form: Bytes {
        or_zero: false,
        min: 64 << 10,
        max: 64 << 30,
    },
    default: DefaultValue::Fixed(|| 64 << 20),
    why: || "some ten thousand chunks, and what a browser opens at once".into(),
    get: |v| &v.trace_bytes,
    get_mut: |v| &mut v.trace_bytes,
};

pub(in crate::config) static LOG: Row<Text> = Row {
    key: "log",
    variables: &["TCPX_LOG"],
    help: || "The log filter.".into(),
    form: Text {
        what: "error, warn, info, debug or trace, or a filter such as tcpx=debug",
    },
    default: DefaultValue::Fixed(|| "warn".into()),
    why: || "silent in normal operation".into(),
    get: |v| &v.log,
    get_mut: |v| &mut v.log,
};
