//! Texts of the most frequent errors.

use std::io;
use std::time::Duration;

use tcpx_proto::handshake::HandshakeError;

use super::*;

fn lost(cause: impl Into<LostCause>) -> Error {
    Error::PeerLost {
        peer: "decode".into(),
        cause: cause.into(),
    }
}

fn unreachable(causes: impl IntoIterator<Item = AttemptCause>) -> Error {
    let attempts = (1..).zip(causes).map(|(host, cause)| Attempt {
        address: ([10, 0, 0, host], 7000).into(),
        cause,
    });
    Error::PeerUnreachable {
        peer: "decode".into(),
        attempts: attempts.collect(),
    }
}

#[test]
fn unreachable_peer_text_lists_each_address() {
    let refused = || io::Error::from_raw_os_error(111);
    let error = unreachable([refused().into(), AttemptCause::TimedOut]);
    assert_eq!(error.kind(), ErrorKind::Disconnected);
    let told = |error: &Error| {
        let (text, remedy) = (error.to_string(), error.remedy().unwrap());
        let told = text.strip_suffix(&format!(" (remedy: {remedy})"));
        told.expect("the text ends with the remedy").to_owned()
    };
    assert_eq!(
        told(&error),
        "peer \"decode\" cannot be reached: 10.0.0.1:7000: Connection refused (os error 111); \
         10.0.0.2:7000: no answer in time"
    );
    assert_eq!(
        told(&unreachable([HandshakeError::PeerProofWrong.into()])),
        "peer \"decode\" cannot be reached: 10.0.0.1:7000: the peer does not know the secret of \
         the connection info"
    );
    // The listener closed the stream.
    let closed = AttemptCause::from(io::Error::from(io::ErrorKind::UnexpectedEof));
    assert_eq!(
        told(&unreachable([closed])),
        "peer \"decode\" cannot be reached: 10.0.0.1:7000: closed the connection during the \
         handshake"
    );
    assert_eq!(
        unreachable([]).to_string(),
        "peer \"decode\" cannot be reached: none of its addresses could be tried"
    );
}

#[test]
fn lost_peer_text_names_the_cause() {
    const LOST: &str = "lost the connection to peer \"decode\": ";
    let reset = io::Error::from_raw_os_error(104);
    let stuck = Error::PluginBroke(PluginFault::UnknownMemory);
    for (error, why) in [
        (
            lost(io::Error::from(io::ErrorKind::UnexpectedEof)),
            "it closed the connection",
        ),
        (lost(reset), "Connection reset by peer (os error 104)"),
        (
            lost(LostCause::Goodbye("the session was closed".into())),
            "the session was closed",
        ),
        (
            lost(LostCause::Goodbye(String::new())),
            "it said goodbye and gave no reason",
        ),
        (
            lost(stuck),
            "the plugin broke its contract: it does not know memory that it received into",
        ),
    ] {
        assert_eq!(error.to_string(), format!("{LOST}{why}"));
        assert_eq!(error.kind(), ErrorKind::Disconnected);
    }
}

#[test]
fn plugin_connect_text_names_the_cause() {
    let error = |cause| {
        let peer = "decode".into();
        let error = Error::PluginNotConnected { peer, cause };
        assert_eq!(error.kind(), ErrorKind::Disconnected);
        error.to_string()
    };
    assert_eq!(
        error(CommCause::TimedOut),
        "the plugin cannot connect to peer \"decode\": the plugin did not connect in time (limit: \
         TCPX_CONNECT_TIMEOUT)"
    );
    assert_eq!(
        error(CommCause::PluginsDiffer {
            ours: "Socket_v6".into(),
            theirs: "Socket_v8".into(),
        }),
        "the plugin cannot connect to peer \"decode\": one side uses the plugin \"Socket_v6\", \
         the other \"Socket_v8\": both must use the same (TCPX_PLUGIN, TCPX_PLUGIN_VERSION)"
    );
    assert_eq!(
        error(CommCause::Goodbye("listen failed".into())),
        "the plugin cannot connect to peer \"decode\": the peer says: listen failed"
    );
}

#[test]
fn timeout_text_names_the_awaited_event() {
    let error = Error::Timeout {
        what: "the end of the transfer",
        after: Duration::from_secs(3),
    };
    assert_eq!(
        error.to_string(),
        "the end of the transfer did not happen within 3s"
    );
}

#[test]
fn taken_ports_text_names_ports_and_remedy() {
    let taken = |ports: &str| {
        let address = ([10, 0, 0, 1], 18015).into();
        let ports = ports.parse().unwrap();
        Error::PortsTaken { ports, address }
    };
    assert_eq!(taken("18000").kind(), ErrorKind::Environment);
    assert_eq!(
        taken("18000-18015").to_string(),
        "all 16 ports of TCPX_LISTEN_PORT=18000-18015 are taken (last tried: \
         10.0.0.1:18015): widen the range, each session of this host takes one port"
    );
    assert_eq!(
        taken("18015").to_string(),
        "the port 18015 of TCPX_LISTEN_PORT is taken (10.0.0.1:18015): give a range that the \
         sessions of this host share, such as 18015-18030"
    );
}
