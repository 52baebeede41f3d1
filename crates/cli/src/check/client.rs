//! The client of `tcpx check`, which drives the check.

use std::time::{Duration, Instant};

use tcpx::{Config, Op, Peer, Region, RemoteRegion, Segment, Session};
use tcpx_bench::bootstrap::Channel;
use tcpx_bench::memory::Placed;
use tcpx_bench::place::Place;
use tcpx_bench::workload::Pattern;

use super::message::{Message, or_tell};
use super::{
    CHUNKS, CheckError, Lane, REGION_MAX, Report, Reverse, Step, judge, party, paths, remote_party,
    speed, start,
};

/// The seed of the first round's WRITE. Each round has its own, so that old bytes do not pass as
/// new.
const WRITE_SEED: u64 = 0x7772_6974_6521;
/// The limit for rounds. Lanes take chunks as they become ready: in one round, fast lanes may leave
/// none to another lane.
const ROUNDS: u64 = 8;

/// How long the server tries to connect to this side.
const PROBE_TIME: Duration = Duration::from_secs(3);
/// The shortest `connect_timeout` that the engine accepts.
const CONNECT_MIN: Duration = Duration::from_millis(100);

/// Connects to the server at `host`, tests every lane, and reports the result to the server.
pub(crate) fn run(
    config: &Config,
    place: Place,
    host: &str,
    timeout: Duration,
) -> Result<Report, CheckError> {
    let _device = place.open().step("cannot use that memory")?;
    let mut channel = Channel::connect(host, timeout)?;
    let outcome = start_to_connect(config, timeout).and_then(|session| {
        let report = test(&session, config, place, &mut channel, timeout)?;
        let problem = report.problem.clone();
        Message::Done { problem }.send(&mut channel)?;
        // Keep the lanes until the server has read its own view of them.
        match Message::receive(&mut channel)? {
            Message::Noted => Ok(report),
            other => Err(other.unexpected("Noted")),
        }
    });
    or_tell(outcome, &mut channel)
}

fn test(
    session: &Session,
    config: &Config,
    place: Place,
    channel: &mut Channel,
    timeout: Duration,
) -> Result<Report, CheckError> {
    let info = session.connection_info();
    Message::Hello { info }.send(channel)?;
    let info = match Message::receive(channel)? {
        Message::Hello { info } => info,
        other => return Err(other.unexpected("Hello")),
    };
    let peer = session
        .add_peer(&info)
        .step("cannot use the server's connection info")?;
    // The server tries to connect to this side at the same time.
    let limit = PROBE_TIME.min(timeout / 2);
    Message::Reach { limit }.send(channel)?;
    let started = Instant::now();
    let outcome = peer.connect(timeout);
    let connected = started.elapsed();
    let reverse = match Message::receive(channel)? {
        Message::Reached { attempts } => Reverse::new(attempts),
        other => return Err(other.unexpected("Reached")),
    };
    if let Err(source) = outcome {
        let reverse = Box::new(reverse);
        return Err(CheckError::Lanes { source, reverse });
    }

    let before = peer.lanes();
    let mut round_trips = Vec::with_capacity(before.len());
    for lane in &before {
        round_trips.push(
            peer.round_trip(lane.index, timeout)
                .step("no answer on a lane")?,
        );
    }
    let len = (before.len().max(1) * CHUNKS * session.config().chunk_bytes()).min(REGION_MAX);
    let mut test = Test {
        session,
        peer: &peer,
        channel,
        timeout,
        place,
        len,
    };
    let remote = test.remote_region()?;
    let (mut problem, mut lanes) = (None, Vec::new());
    for round in 0..ROUNDS {
        problem = test.write_and_read(&remote, round)?;
        lanes = judge(peer.lanes(), &before, &round_trips);
        if problem.is_some() || lanes.iter().all(|lane| lane.ok) {
            break;
        }
    }
    let paths = paths::find(config, place, &lanes, channel, timeout)?;
    let speed = match problem {
        // Do not measure a connection that changes bytes.
        Some(_) => None,
        None => Some(speed::measure(config, place, channel, timeout)?),
    };
    Ok(Report {
        ok: problem.is_none() && lanes.iter().all(|lane| lane.ok),
        problem: problem.or_else(|| idle(&lanes)),
        local: party(session, channel.local()),
        remote: remote_party(&peer, &lanes, channel.remote()),
        connect_seconds: Some(connected.as_secs_f64()),
        bytes: len as u64,
        lanes,
        paths,
        reverse: Some(reverse),
        speed,
    })
}

/// Starts a session whose attempts to connect end within `timeout`, so that the engine's error
/// lists the result at every address.
fn start_to_connect(config: &Config, timeout: Duration) -> Result<Session, CheckError> {
    let limit = (timeout * 4 / 5).max(CONNECT_MIN);
    let limit = format!("{}ms", config.connect_timeout().min(limit).as_millis());
    let config = config.clone().with("connect_timeout", limit);
    start(
        &config
            .map_err(tcpx::Error::from)
            .step("cannot start a session")?,
    )
}

/// Names the lanes that carried no payload.
fn idle(lanes: &[Lane]) -> Option<String> {
    let idle: Vec<String> = lanes
        .iter()
        .filter(|lane| !lane.ok)
        .map(|lane| lane.index.to_string())
        .collect();
    (!idle.is_empty()).then(|| format!("no payload went both ways on lane {}", idle.join(", ")))
}

/// One WRITE and one READ of `len` bytes, some chunks for every lane.
struct Test<'a> {
    session: &'a Session,
    peer: &'a Peer,
    channel: &'a mut Channel,
    timeout: Duration,
    /// Where this side's memory lies.
    place: Place,
    len: usize,
}

impl Test<'_> {
    /// Writes and reads back; returns a description of the first wrong byte, if any.
    fn write_and_read(
        &mut self,
        remote: &RemoteRegion,
        round: u64,
    ) -> Result<Option<String>, CheckError> {
        let written = WRITE_SEED + round;
        let memory =
            Placed::new(self.session, self.place, self.len).step("cannot register memory")?;
        let region = memory.region();

        let mut bytes = vec![0; self.len];
        Pattern::new(written).fill(0, &mut bytes);
        memory.write(&bytes).step("cannot write memory")?;
        self.transfer(Op::Write, region, remote)
            .step("the WRITE failed")?;

        Message::Written { seed: written }.send(self.channel)?;
        let (difference, seed) = match Message::receive(self.channel)? {
            Message::Compared { difference, seed } => (difference, seed),
            other => return Err(other.unexpected("Compared")),
        };
        if let Some(offset) = difference {
            return Ok(Some(format!("byte {offset} of the WRITE arrived changed")));
        }

        self.transfer(Op::Read, region, remote)
            .step("the READ failed")?;
        memory.read(&mut bytes).step("cannot read memory")?;
        let difference = Pattern::new(seed).first_difference(0, &bytes);
        Ok(difference.map(|offset| format!("byte {offset} of the READ arrived changed")))
    }

    fn remote_region(&mut self) -> Result<RemoteRegion, CheckError> {
        Message::Want { bytes: self.len }.send(self.channel)?;
        match Message::receive(self.channel)? {
            Message::Region { descriptor } => RemoteRegion::from_bytes(&descriptor)
                .step("cannot use the server's region descriptor"),
            other => Err(other.unexpected("Region")),
        }
    }

    fn transfer(&self, op: Op, local: &Region, remote: &RemoteRegion) -> Result<(), tcpx::Error> {
        let segment = Segment {
            local: local.at(0),
            remote: remote.at(0),
            len: self.len,
        };
        let transfer = self.session.prepare(op, self.peer, [segment])?;
        transfer.post()?;
        transfer.wait(self.timeout)
    }
}
