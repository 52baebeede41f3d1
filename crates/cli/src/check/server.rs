//! The server of `tcpx check`, which waits for a client.

use std::net::TcpListener;
use std::time::Duration;

use tcpx::{Config, LaneInfo, Peer, Session};
use tcpx_bench::bootstrap::{BootstrapError, Channel};
use tcpx_bench::memory::Placed;
use tcpx_bench::place::Place;
use tcpx_bench::workload::Pattern;
use tracing::warn;

use super::message::{Message, or_tell};
use super::paths::{self, Kind};
use super::reverse;
use super::{CheckError, REGION_MAX, Report, Step, judge, party, remote_party, start};

/// Combined with the seed of the WRITE, gives the seed of the READ: old bytes do not pass as new.
const READ_SEED: u64 = 0x0072_6561_6421;
/// A timeout that never expires in practice.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// The limit for the time that a client may request for trying its addresses.
const PROBE_MAX: Duration = Duration::from_secs(10);

/// Waits for a client, without a limit by default, and goes through the check with it.
///
/// Connections that are not from `tcpx check client` are dropped with a warning.
pub(crate) fn serve(
    listener: &TcpListener,
    config: &Config,
    place: Place,
    wait: Option<Duration>,
    timeout: Duration,
) -> Result<Report, CheckError> {
    loop {
        let mut channel = Channel::accept(listener, wait.unwrap_or(FOREVER))?;
        channel.set_timeout(timeout);
        match Message::receive(&mut channel) {
            Ok(Message::Hello { info }) => {
                let outcome = attend(&mut channel, config, place, &info);
                return or_tell(outcome, &mut channel);
            }
            Ok(other) => warn!(
                "a visitor began with {:?}",
                other.unexpected("Hello").to_string()
            ),
            Err(error) => warn!("a visitor was no client of `tcpx check`: {error}"),
        }
    }
}

fn attend(
    channel: &mut Channel,
    config: &Config,
    place: Place,
    info: &[u8],
) -> Result<Report, CheckError> {
    let session = start(config)?;
    let peer = session
        .add_peer(info)
        .step("cannot use the client's connection info")?;
    let own = session.connection_info();
    Message::Hello { info: own }.send(channel)?;
    let mut service = Service {
        info,
        session: &session,
        peer: &peer,
        channel,
        config,
        place,
        lent: None,
        beside: None,
        before: Vec::new(),
    };
    service.until_done()
}

/// Answers one client until it is done.
struct Service<'a> {
    /// The client's connection info.
    info: &'a [u8],
    session: &'a Session,
    peer: &'a Peer,
    channel: &'a mut Channel,
    config: &'a Config,
    /// Where the memory for the client lies.
    place: Place,
    /// The memory that the client may write to and read from.
    lent: Option<Placed>,
    /// The second session, which tries direct copies with the client.
    beside: Option<Beside>,
    /// The lanes before any payload.
    before: Vec<LaneInfo>,
}

/// A second session, which copies directly if its settings allow it.
struct Beside {
    /// Declared before `session`, so that memory is deregistered first.
    lent: Vec<Placed>,
    _peer: Peer,
    session: Session,
}

impl Service<'_> {
    fn until_done(&mut self) -> Result<Report, CheckError> {
        loop {
            match Message::receive(self.channel)? {
                Message::Reach { limit } => {
                    let attempts = reverse::probe(self.info, limit.min(PROBE_MAX));
                    Message::Reached { attempts }.send(self.channel)?;
                }
                Message::Want { bytes } => self.lend(bytes)?,
                Message::Written { seed } => self.compare(seed)?,
                Message::Beside { info } => self.meet(&info)?,
                Message::Lend { kind } => self.lend_beside(kind)?,
                Message::Pour { bytes } => self.lend_to_measure(bytes)?,
                Message::Done { problem } => {
                    let report = self.report(problem);
                    Message::Noted.send(self.channel)?;
                    return Ok(report);
                }
                other => {
                    return Err(
                        other.unexpected("Reach, Want, Written, Beside, Lend, Pour or Done")
                    );
                }
            }
        }
    }

    fn lend(&mut self, bytes: usize) -> Result<(), CheckError> {
        // The client asks after it has connected and measured round trips, before it sends payload.
        self.before = self.peer.lanes();
        let bytes = bytes.clamp(1, REGION_MAX);
        let lent = Placed::new(self.session, self.place, bytes).step("cannot register memory")?;
        let descriptor = lent.region().descriptor().to_bytes();
        self.lent = Some(lent);
        Ok(Message::Region { descriptor }.send(self.channel)?)
    }

    fn meet(&mut self, info: &[u8]) -> Result<(), CheckError> {
        self.beside = None;
        let session = match Session::new(self.config.clone()) {
            Ok(session) => session,
            // The session that tests the lanes may have taken the only port of `listen_port`.
            Err(error) => {
                let reason = format!("the peer cannot start another session: {error}");
                return Ok(Message::Without { reason }.send(self.channel)?);
            }
        };
        let peer = session
            .add_peer(info)
            .step("cannot use the client's connection info")?;
        let info = session.connection_info();
        self.beside = Some(Beside {
            lent: Vec::new(),
            _peer: peer,
            session,
        });
        Ok(Message::Beside { info }.send(self.channel)?)
    }

    fn lend_beside(&mut self, kind: Kind) -> Result<(), CheckError> {
        let Some(beside) = &mut self.beside else {
            return Err(Message::Lend { kind }.unexpected("Beside"));
        };
        let place = match kind {
            Kind::Host => Place::Host,
            Kind::Gpu => paths::gpu_place(self.place),
        };
        let answer = match Placed::new(&beside.session, place, paths::BYTES) {
            Ok(memory) => {
                let descriptor = memory.region().descriptor().to_bytes();
                beside.lent.push(memory);
                Message::Region { descriptor }
            }
            Err(error) => Message::Without {
                reason: format!("the peer has none: {error}"),
            },
        };
        Ok(answer.send(self.channel)?)
    }

    fn lend_to_measure(&mut self, bytes: usize) -> Result<(), CheckError> {
        let Some(beside) = &mut self.beside else {
            return Err(Message::Pour { bytes }.unexpected("Beside"));
        };
        let bytes = bytes.clamp(1, REGION_MAX);
        let answer = match Placed::new(&beside.session, self.place, bytes) {
            Ok(memory) => {
                let descriptor = memory.region().descriptor().to_bytes();
                beside.lent.push(memory);
                Message::Region { descriptor }
            }
            Err(error) => Message::Without {
                reason: format!("the peer has no memory for it: {error}"),
            },
        };
        Ok(answer.send(self.channel)?)
    }

    fn compare(&mut self, seed: u64) -> Result<(), CheckError> {
        let next = seed ^ READ_SEED;
        let mut difference = None;
        if let Some(memory) = &self.lent {
            let mut bytes = vec![0; memory.len()];
            memory.read(&mut bytes).step("cannot read memory")?;
            difference = Pattern::new(seed).first_difference(0, &bytes);
            Pattern::new(next).fill(0, &mut bytes);
            memory.write(&bytes).step("cannot write memory")?;
        }
        Ok(Message::Compared {
            difference,
            seed: next,
        }
        .send(self.channel)?)
    }

    fn report(&self, problem: Option<String>) -> Report {
        let lanes = judge(self.peer.lanes(), &self.before, &[]);
        Report {
            ok: problem.is_none(),
            problem,
            local: party(self.session, self.channel.local()),
            remote: remote_party(self.peer, &lanes, self.channel.remote()),
            connect_seconds: None,
            bytes: self.lent.as_ref().map_or(0, |memory| memory.len() as u64),
            lanes,
            paths: Vec::new(),
            reverse: None,
            speed: None,
        }
    }
}

impl CheckError {
    /// Returns whether no client came in time, as opposed to a check that failed.
    pub(crate) fn is_nobody(&self) -> bool {
        matches!(
            self,
            CheckError::Bootstrap(BootstrapError::NobodyCame { .. })
        )
    }
}
