//! A second session of the client, and the one that the server starts for it.
//!
//! The sessions that test the lanes are configured for that test. Other measurements need sessions
//! of their own.

use tcpx::{Config, Error, Peer, Session};
use tcpx_bench::bootstrap::Channel;

use super::message::Message;
use super::{CheckError, Step};

/// Starts a session and exchanges connection infos with the server's second session, without
/// connecting. The inner error is the server's reason for having none.
pub(super) fn open(
    config: &Config,
    channel: &mut Channel,
) -> Result<Result<(Session, Peer), String>, CheckError> {
    // Use any free port: this side connects, so no peer needs its port, and the configured one may
    // be taken.
    let session = config
        .clone()
        .with("listen_port", 0)
        .and_then(|config| config.with("advertise", ""))
        .map_err(Error::from)
        .and_then(Session::new)
        .step("cannot start a session")?;
    let info = session.connection_info();
    Message::Beside { info }.send(channel)?;
    let info = match Message::receive(channel)? {
        Message::Beside { info } => info,
        Message::Without { reason } => return Ok(Err(reason)),
        other => return Err(other.unexpected("Beside or Without")),
    };
    let peer = session
        .add_peer(&info)
        .step("cannot use the server's connection info")?;
    Ok(Ok((session, peer)))
}
