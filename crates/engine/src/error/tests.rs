//! What people read where things go wrong often.

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
fn a_peer_that_cannot_be_reached_is_told_address_by_address() {
    let refused = || io::Error::from_raw_os_error(111);
    let error = unreachable([refused().into(), AttemptCause::TimedOut]);
    assert_eq!(error.kind(), ErrorKind::Disconnected);
    assert_eq!(
        error.to_string(),
        "peer \"decode\" cannot be reached: 10.0.0.1:7000: Connection refused (os error 111); \
         10.0.0.2:7000: no answer in time"
    );
    assert_eq!(
        unreachable([HandshakeError::PeerProofWrong.into()]).to_string(),
        "peer \"decode\" cannot be reached: 10.0.0.1:7000: the peer does not know the secret of \
         the connection info"
    );
    // Whoever listens there has left.
    let closed = AttemptCause::from(io::Error::from(io::ErrorKind::UnexpectedEof));
    assert_eq!(
        unreachable([closed]).to_string(),
        "peer \"decode\" cannot be reached: 10.0.0.1:7000: closed the connection during the \
         handshake"
    );
    assert_eq!(
        unreachable([]).to_string(),
        "peer \"decode\" cannot be reached: none of its addresses could be tried"
    );
}

#[test]
fn a_peer_that_was_lost_is_told_with_the_cause() {
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
fn a_plugin_that_cannot_connect_is_told_with_the_cause() {
    let error = |cause| {
        let peer = "decode".into();
        let error = Error::PluginNotConnected { peer, cause };
        assert_eq!(error.kind(), ErrorKind::Disconnected);
        error.to_string()
    };
    assert_eq!(
        error(CommCause::TimedOut),
        "the plugin cannot connect to peer \"decode\": the plugin's connections did not come \
         about in time (limit: TCPX_CONNECT_TIMEOUT)"
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
fn a_time_limit_is_told_with_what_was_waited_for() {
    let error = Error::Timeout {
        what: "the end of the transfer",
        after: Duration::from_secs(3),
    };
    assert_eq!(
        error.to_string(),
        "the end of the transfer did not happen within 3s"
    );
}
