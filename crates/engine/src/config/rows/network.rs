//! Settings of how peers are reached.

use std::time::Duration;

use tcpx_net::interfaces::InterfaceSelector;

use crate::config::TransportKind;
use crate::config::form::{Bytes, Choice, Congestion, Interfaces, Number, Text, Time, time_text};
use crate::config::row::{DefaultValue, Row};

const TCP_CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// GPUDirect-TCPX programs flow rules for each connection, and then waits five seconds.
const PLUGIN_CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// Times that a peer may take: a shorter one is over before a busy machine answers.
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
        text: || "every usable interface, loopback only when there is no other".into(),
    },
    why: || "lanes add up the bandwidth of all of them".into(),
    get: |v| &v.interfaces,
    get_mut: |v| &mut v.interfaces,
};

pub(in crate::config) static CONTROL_INTERFACE: Row<Interfaces> = Row {
    key: "control_interface",
    variables: &["TCPX_CONTROL_INTERFACE", "NCCL_SOCKET_IFNAME"],
    help: || {
        "Interfaces to listen on besides those that carry lanes. Their addresses are published \
         last, and lanes use them only when no other interface leads to the peer. An interface \
         that carries lanes anyway is not affected."
            .into()
    },
    form: Interfaces,
    default: DefaultValue::Derived {
        of: |_| InterfaceSelector::every_usable(),
        text: || "none".into(),
    },
    why: || "peers connect on the interfaces that carry lanes".into(),
    get: |v| &v.control_interface,
    get_mut: |v| &mut v.control_interface,
};

pub(in crate::config) static TRANSPORT: Row<Choice<TransportKind>> = Row {
    key: "transport",
    variables: &["TCPX_TRANSPORT"],
    help: || "How bytes travel: native TCP lanes, or a NCCL net plugin.".into(),
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
    why: || "what NCCL does".into(),
    get: |v| &v.plugin,
    get_mut: |v| &mut v.plugin,
};

pub(in crate::config) static PLUGIN_VERSION: Row<Number<u32>> = Row {
    key: "plugin_version",
    variables: &["TCPX_PLUGIN_VERSION"],
    help: || {
        "The version of the plugin API to use, for libraries that offer several; 0 takes the \
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
    why: || "what NCCL does".into(),
    get: |v| &v.plugin_version,
    get_mut: |v| &mut v.plugin_version,
};

pub(in crate::config) static PEER_TIMEOUT: Row<Time> = Row {
    key: "peer_timeout",
    variables: &["TCPX_PEER_TIMEOUT"],
    help: || {
        "How long a peer with work outstanding may make no progress before its transfers fail."
            .into()
    },
    form: PATIENCE,
    default: DefaultValue::Fixed(|| Duration::from_secs(10)),
    why: || "longer than any pause of a healthy process, shorter than a user's patience".into(),
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
        "The most connections that are accepted from sessions whose connection info is not loaded; \
         further ones are refused, and their side is told. Lanes of these connections never take \
         more than three quarters of the process's file descriptors."
            .into()
    },
    form: Number {
        what: "a number of connections",
        or: None,
        min: 1,
        max: 1 << 20,
    },
    default: DefaultValue::Fixed(|| 4096),
    why: || "thousands of peers, each with one connection".into(),
    get: |v| &v.max_connections,
    get_mut: |v| &mut v.max_connections,
};

pub(in crate::config) static MAX_CONNECTIONS_PER_PEER: Row<Number<usize>> = Row {
    key: "max_connections_per_peer",
    variables: &["TCPX_MAX_CONNECTIONS_PER_PEER"],
    help: || {
        "The most connections that are accepted from one session, those included of which only some \
         lanes have come."
            .into()
    },
    form: Number {
        what: "a number of connections",
        or: None,
        min: 2,
        max: 1 << 20,
    },
    default: DefaultValue::Fixed(|| 4),
    why: || "a peer needs one, and a second to replace it; the others are slack".into(),
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
        "Congestion control of the lanes: auto (cubic between processes of one machine, else the \
         system's), system (whatever the kernel is set to), or a name such as cubic or bbr."
            .into()
    },
    form: Congestion,
    default: DefaultValue::Fixed(|| "auto".into()),
    why: || "within a machine there is nothing to pace".into(),
    get: |v| &v.congestion,
    get_mut: |v| &mut v.congestion,
};

pub(in crate::config) static LISTEN_PORT: Row<Number<u16>> = Row {
    key: "listen_port",
    variables: &["TCPX_LISTEN_PORT"],
    help: || "The port to listen on, for machines behind a firewall; 0 takes a free one.".into(),
    form: Number {
        what: "a port",
        or: None,
        min: 0,
        max: u16::MAX,
    },
    default: DefaultValue::Fixed(|| 0),
    why: || "the connection info carries the port, nobody needs to know it".into(),
    get: |v| &v.listen_port,
    get_mut: |v| &mut v.listen_port,
};
