//! Settings that control how peers are reached.

use std::time::Duration;

use tcpx_net::interfaces::InterfaceSelector;

use crate::config::TransportKind;
use crate::config::advertise::{Advertise, Places};
use crate::config::form::{
    Bytes, Choice, Congestion, Interfaces, Metrics, Number, Text, Time, time_text,
};
use crate::config::ports::{PortRange, Ports};
use crate::config::row::{DefaultValue, Row};

const TCP_CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// GPUDirect-TCPX programs flow rules for each connection, and then waits five seconds.
const PLUGIN_CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// Range of timeouts for a peer: a busy machine cannot answer within a shorter time.
const PATIENCE: Time = Time {
    min: Duration::from_millis(100),
    max: Duration::from_secs(3600),
};

pub(in crate::config) static INTERFACES: Row<Interfaces> = Row {
    key: "interfaces",
    variables: &["TCPX_INTERFACES", "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME"],
    help: || "Interfaces that carry lanes.".into(),
    form: Interfaces,
    default: DefaultValue::Derived {
        of: |_| InterfaceSelector::every_usable(),
        text: || "every usable interface; loopback only if there is no other".into(),
    },
    why: || "lanes combine the bandwidth of all interfaces".into(),
    get: |v| &v.interfaces,
    get_mut: |v| &mut v.interfaces,
};

pub(in crate::config) static CONTROL_INTERFACE: Row<Interfaces> = Row {
    key: "control_interface",
    variables: &["TCPX_CONTROL_INTERFACE", "NCCL_SOCKET_IFNAME"],
    help: || {
        "Interfaces to listen on in addition to the interfaces that carry lanes. Their addresses \
         are published last, and lanes use them only if no other interface reaches the peer. An \
         interface that carries lanes is not affected."
            .into()
    },
    form: Interfaces,
    default: DefaultValue::Derived {
        of: |_| InterfaceSelector::every_usable(),
        text: || "none".into(),
    },
    why: || "peers connect over the interfaces that carry lanes".into(),
    get: |v| &v.control_interface,
    get_mut: |v| &mut v.control_interface,
};

pub(in crate::config) static TRANSPORT: Row<Choice<TransportKind>> = Row {
    key: "transport",
    variables: &["TCPX_TRANSPORT"],
    help: || "The transport that carries bytes: native TCP lanes, or a NCCL net plugin.".into(),
    form: Choice {
        words: &[
            ("tcp", TransportKind::Tcp),
            ("plugin", TransportKind::Plugin),
        ],
    },
    default: DefaultValue::Fixed(|| TransportKind::Tcp),
    why: || "needs nothing but the kernel".into(),
    get: |v| &v.transport,
    get_mut: |v| &mut v.transport,
};

pub(in crate::config) static PLUGIN: Row<Text> = Row {
    key: "plugin",
    variables: &["TCPX_PLUGIN"],
    help: || "The NCCL net plugin to load.".into(),
    form: Text {
        what: "a path, or a name as NCCL_NET_PLUGIN takes it",
    },
    default: DefaultValue::Derived {
        of: |_| String::new(),
        text: || "empty, which means libnccl-net.so".into(),
    },
    why: || "as NCCL does".into(),
    get: |v| &v.plugin,
    get_mut: |v| &mut v.plugin,
};

pub(in crate::config) static PLUGIN_VERSION: Row<Number<u32>> = Row {
    key: "plugin_version",
    variables: &["TCPX_PLUGIN_VERSION"],
    help: || {
        "The version of the plugin API to use, for libraries that offer several; 0 selects the \
         newest."
            .into()
    },
    form: Number {
        what: "a version",
        or: Some(0),
        min: 4,
        max: 12,
    },
    default: DefaultValue::Fixed(|| 0),
    why: || "as NCCL does".into(),
    get: |v| &v.plugin_version,
    get_mut: |v| &mut v.plugin_version,
};

pub(in crate::config) static PEER_TIMEOUT: Row<Time> = Row {
    key: "peer_timeout",
    variables: &["TCPX_PEER_TIMEOUT"],
    help: || {
        "How long a peer with outstanding work may make no progress before its transfers fail."
            .into()
    },
    form: PATIENCE,
    default: DefaultValue::Fixed(|| Duration::from_secs(10)),
    why: || "longer than any pause of a healthy process, yet a bearable wait".into(),
    get: |v| &v.peer_timeout,
    get_mut: |v| &mut v.peer_timeout,
};

pub(in crate::config) static CONNECT_TIMEOUT: Row<Time> = Row {
    key: "connect_timeout",
    variables: &["TCPX_CONNECT_TIMEOUT"],
    help: || "How long connecting to a peer may take, all lanes and the handshake together.".into(),
    form: PATIENCE,
    default: DefaultValue::Derived {
        of: |v| match v.transport.value {
            TransportKind::Tcp => TCP_CONNECT_TIMEOUT,
            TransportKind::Plugin => PLUGIN_CONNECT_TIMEOUT,
        },
        text: || {
            let [tcp, plugin] = [TCP_CONNECT_TIMEOUT, PLUGIN_CONNECT_TIMEOUT].map(time_text);
            format!("{tcp}, {plugin} on a plugin")
        },
    },
    why: || "survives three lost SYN packets; GPUDirect-TCPX takes more than five seconds".into(),
    get: |v| &v.connect_timeout,
    get_mut: |v| &mut v.connect_timeout,
};

pub(in crate::config) static MAX_CONNECTIONS: Row<Number<usize>> = Row {
    key: "max_connections",
    variables: &["TCPX_MAX_CONNECTIONS"],
    help: || {
        "The limit for connections accepted from sessions whose connection info is not loaded. \
         Further connections are refused with a reason. Lanes of these connections never use more \
         than three quarters of the process's file descriptors."
            .into()
    },
    form: Number {
        what: "a number of connections",
        or: None,
        min: 1,
        max: 1 << 20,
    },
    default: DefaultValue::Fixed(|| 4096),
    why: || "thousands of peers with one connection each".into(),
    get: |v| &v.max_connections,
    get_mut: |v| &mut v.max_connections,
};

pub(in crate::config) static MAX_CONNECTIONS_PER_PEER: Row<Number<usize>> = Row {
    key: "max_connections_per_peer",
    variables: &["TCPX_MAX_CONNECTIONS_PER_PEER"],
    help: || {
        "The limit for connections accepted from one session, including connections of which only \
         some lanes are established."
            .into()
    },
    form: Number {
        what: "a number of connections",
        or: None,
        min: 2,
        max: 1 << 20,
    },
    default: DefaultValue::Fixed(|| 4),
    why: || "a peer needs one connection, and a second to replace it; the rest is a margin".into(),
    get: |v| &v.max_connections_per_peer,
    get_mut: |v| &mut v.max_connections_per_peer,
};

pub(in crate::config) static SOCKET_BUFFER_BYTES: Row<Bytes> = Row {
    key: "socket_buffer_bytes",
    variables: &["TCPX_SOCKET_BUFFER_BYTES"],
    help: || {
        "Send and receive buffer of every socket; 0 leaves it to the kernel's autotuning.".into()
    },
    form: Bytes {
        or_zero: true,
        min: 4 << 10,
        max: 1 << 30,
    },
    default: DefaultValue::Fixed(|| 0),
    why: || "autotuning follows bandwidth × round trip and is not capped by net.core limits".into(),
    get: |v| &v.socket_buffer_bytes,
    get_mut: |v| &mut v.socket_buffer_bytes,
};

pub(in crate::config) static CONGESTION: Row<Congestion> = Row {
    key: "congestion",
    variables: &["TCPX_CONGESTION"],
    help: || {
        "Congestion control of the lanes: auto (cubic between processes of one machine, otherwise \
         the system's default), system (the system's default), or a name such as cubic or bbr."
            .into()
    },
    form: Congestion,
    default: DefaultValue::Fixed(|| "auto".into()),
    why: || "traffic within a machine needs no pacing".into(),
    get: |v| &v.congestion,
    get_mut: |v| &mut v.congestion,
};

pub(in crate::config) static LISTEN_PORT: Row<Ports> = Row {
    key: "listen_port",
    variables: &["TCPX_LISTEN_PORT"],
    help: || {
        "The port to listen on, for machines behind a firewall; 0 takes any free port. The \
         sessions of a host may share a range: each session takes the first port that is free at \
         all of its addresses."
            .into()
    },
    form: Ports,
    default: DefaultValue::Fixed(|| PortRange::ANY),
    why: || "the connection info carries the port to peers".into(),
    get: |v| &v.listen_port,
    get_mut: |v| &mut v.listen_port,
};

pub(in crate::config) static ADVERTISE: Row<Places> = Row {
    key: "advertise",
    variables: &["TCPX_ADVERTISE"],
    help: || {
        "Addresses and names that peers connect to, for sessions behind NAT or in pods. The \
         connection info lists them instead of the addresses that the session listens on, or \
         before those if the list begins with +. The connecting side resolves names anew for each \
         connection. Mapped ports correspond to the ports of listen_port, in order; without a \
         mapping the port is the same."
            .into()
    },
    form: Places,
    default: DefaultValue::Derived {
        of: |_| Advertise::default(),
        text: || "the addresses that the session listens on".into(),
    },
    why: || "peers on the same network reach these addresses".into(),
    get: |v| &v.advertise,
    get_mut: |v| &mut v.advertise,
};

pub(in crate::config) static METRICS: Row<Metrics> = Row {
    key: "metrics",
    variables: &["TCPX_METRICS"],
    help: || {
        "The address at which statistics are served as OpenMetrics text (/metrics), for all \
         sessions of the process with the same setting. The default address is loopback. Of a port \
         range the first free port is taken, 0 takes any free port; the log names the port."
            .into()
    },
    form: Metrics,
    default: DefaultValue::Fixed(|| None),
    why: || "no port is opened unless requested".into(),
    get: |v| &v.metrics,
    get_mut: |v| &mut v.metrics,
};

pub(in crate::config) static TOP: Row<Choice<bool>> = Row {
    key: "top",
    variables: &["TCPX_TOP"],
    help: || {
        "Whether `tcpx top` shows the session: the process offers its statistics on a Unix socket \
         that only its user and the superuser can reach, in $XDG_RUNTIME_DIR/tcpx, \
         /run/user/UID/tcpx or /tmp/tcpx-UID."
            .into()
    },
    form: Choice {
        words: &[("on", true), ("off", false)],
    },
    default: DefaultValue::Fixed(|| true),
    why: || "costs nothing until somebody looks".into(),
    get: |v| &v.top,
    get_mut: |v| &mut v.top,
};
