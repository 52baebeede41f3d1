//! Finds out which path carries each kind of memory between two sessions on one host, by trying.
//!
//! The sessions that test the lanes never copy directly, so each side starts a second session. The
//! client's second session refuses lanes: a transfer that needs them fails with the reason.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tcpx::{Config, Error, Op, Peer, RemoteRegion, SameHostKind, Segment, Session};
use tcpx_bench::bootstrap::Channel;
use tcpx_bench::memory::Placed;
use tcpx_bench::path::Path;
use tcpx_bench::place::Place;
use tcpx_bench::workload::Pattern;

use super::message::Message;
use super::{CheckError, Lane, Step, beside};

/// The number of bytes to copy.
pub(super) const BYTES: usize = 4 << 10;

/// Any pattern that is not zero.
const SEED: u64 = 0x7061_7468;

/// The path of one kind of memory.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct MemoryPath {
    /// The kind of memory, at both ends.
    pub(crate) memory: Kind,
    /// The path that carries the memory.
    pub(crate) path: Path,
    /// Why lanes carry the memory; none if it is copied directly.
    pub(crate) why_not: Option<String>,
}

/// A kind of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    Host,
    Gpu,
}

impl MemoryPath {
    fn new(memory: Kind, outcome: Result<(), String>) -> Self {
        let why_not = outcome.err();
        let path = match why_not {
            None => Path::SameHost,
            Some(_) => Path::Lanes,
        };
        Self {
            memory,
            path,
            why_not,
        }
    }
}

/// Returns whether the other end of a lane is on this host.
pub(crate) fn is_local(lanes: &[Lane]) -> bool {
    lanes.iter().any(|lane| {
        lane.remote.ip() == lane.local.ip() || lane.remote.ip().to_canonical().is_loopback()
    })
}

/// Returns the place of GPU memory: the chosen one, or the first GPU.
pub(super) fn gpu_place(chosen: Place) -> Place {
    match chosen {
        Place::Host => Place::Vram(0),
        chosen => chosen,
    }
}

/// Finds the path of host memory, and of GPU memory if this side has a GPU.
pub(super) fn find(
    config: &Config,
    place: Place,
    lanes: &[Lane],
    channel: &mut Channel,
    timeout: Duration,
) -> Result<Vec<MemoryPath>, CheckError> {
    let all_lanes = |reason: &str| {
        let mut kinds = vec![Kind::Host];
        kinds.extend((!place.is_host()).then_some(Kind::Gpu));
        let lanes = |kind| MemoryPath::new(kind, Err(reason.to_owned()));
        Ok(kinds.into_iter().map(lanes).collect())
    };
    if !is_local(lanes) {
        return all_lanes("it is on another host");
    }
    if config.same_host() == SameHostKind::Off {
        return all_lanes("same_host is off");
    }
    let config = config.clone().with_same_host(SameHostKind::Require);
    let config = config.map_err(Error::from).step("cannot refuse lanes")?;
    let (session, peer) = match beside::open(&config, channel)? {
        Ok(both) => both,
        Err(reason) => return all_lanes(&reason),
    };
    if let Err(error) = peer.connect(timeout) {
        return all_lanes(&reason(error));
    }
    let mut probe = Probe {
        session: &session,
        peer: &peer,
        channel,
        timeout,
    };
    let mut paths = vec![MemoryPath::new(
        Kind::Host,
        probe.copies(Kind::Host, Place::Host)?,
    )];
    let place = gpu_place(place);
    if let Ok(_device) = place.open() {
        paths.push(MemoryPath::new(Kind::Gpu, probe.copies(Kind::Gpu, place)?));
    }
    Ok(paths)
}

/// Tries direct copies over a connected peer.
struct Probe<'a> {
    session: &'a Session,
    peer: &'a Peer,
    channel: &'a mut Channel,
    timeout: Duration,
}

impl Probe<'_> {
    /// Copies memory there and back. The inner error says why lanes must carry it.
    fn copies(&mut self, kind: Kind, place: Place) -> Result<Result<(), String>, CheckError> {
        Message::Lend { kind }.send(self.channel)?;
        let descriptor = match Message::receive(self.channel)? {
            Message::Region { descriptor } => descriptor,
            Message::Without { reason } => return Ok(Err(reason)),
            other => return Err(other.unexpected("Region or Without")),
        };
        let remote = RemoteRegion::from_bytes(&descriptor)
            .step("cannot use the server's region descriptor")?;
        match self.there_and_back(place, &remote) {
            Ok(true) => Ok(Ok(())),
            Ok(false) => Err(CheckError::Copied),
            Err(error) => Ok(Err(reason(error))),
        }
    }

    /// Returns whether the bytes that come back are those that were written.
    fn there_and_back(&self, place: Place, remote: &RemoteRegion) -> Result<bool, Error> {
        let memory = Placed::new(self.session, place, BYTES)?;
        let mut bytes = vec![0; BYTES];
        Pattern::new(SEED).fill(0, &mut bytes);
        memory.write(&bytes)?;
        self.transfer(Op::Write, &memory, remote)?;
        memory.write(&[0; BYTES])?;
        self.transfer(Op::Read, &memory, remote)?;
        memory.read(&mut bytes)?;
        Ok(Pattern::new(SEED).first_difference(0, &bytes).is_none())
    }

    fn transfer(&self, op: Op, local: &Placed, remote: &RemoteRegion) -> Result<(), Error> {
        let segment = Segment {
            local: local.region().at(0),
            remote: remote.at(0),
            len: BYTES,
        };
        let transfer = self.session.prepare(op, self.peer, [segment])?;
        transfer.post()?;
        transfer.wait(self.timeout)
    }
}

/// Says in a few words why lanes must carry the memory.
fn reason(error: Error) -> String {
    match error {
        Error::NotSameHost { reason, .. } => reason,
        Error::Incompatible { .. } => "the peer does not offer it".to_owned(),
        other => other.to_string(),
    }
}
