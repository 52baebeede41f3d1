//! Measures how fast memory moves to the server, and what limits the rate.
//!
//! The sessions that test the lanes have one small chunk in flight on each lane. Two more sessions,
//! with unchanged settings, measure the rate that an application gets.

use std::time::{Duration, Instant};

use serde::Serialize;
use tcpx::stats::{ProcessStats, Sample};
use tcpx::{Config, Error, Op, Peer, RemoteRegion, Segment, Session};
use tcpx_bench::bootstrap::Channel;
use tcpx_bench::memory::Placed;
use tcpx_bench::place::Place;

use super::message::Message;
use super::{CheckError, REGION_MAX, Step, beside};

/// The shortest time to measure.
const TIME: Duration = Duration::from_millis(300);

/// The size of the first WRITE. Sizes grow until a WRITE takes `A_WHILE`.
const FIRST_BYTES: usize = 1 << 20;

/// The duration from which on a WRITE is large enough.
const A_WHILE: Duration = Duration::from_millis(100);

/// The limit for connecting. The lanes were tested before, so connecting is fast or impossible.
const CONNECT_TIME: Duration = Duration::from_secs(3);

/// The result of the measurement.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Speed {
    /// Bytes per second of WRITEs; none if they could not be measured.
    pub(crate) bytes_per_second: Option<f64>,
    /// What limits the rate, in words.
    pub(crate) limit: Option<String>,
    /// Why the rate could not be measured.
    pub(crate) why_not: Option<String>,
}

impl Speed {
    fn unknown(reason: impl ToString) -> Self {
        Self {
            bytes_per_second: None,
            limit: None,
            why_not: Some(reason.to_string()),
        }
    }
}

/// Writes to the server for a moment.
pub(super) fn measure(
    config: &Config,
    place: Place,
    channel: &mut Channel,
    timeout: Duration,
) -> Result<Speed, CheckError> {
    let (session, peer) = match beside::open(config, channel)? {
        Ok(both) => both,
        Err(reason) => return Ok(Speed::unknown(reason)),
    };
    if let Err(error) = peer.connect(timeout.min(CONNECT_TIME)) {
        return Ok(Speed::unknown(error));
    }
    Message::Pour { bytes: REGION_MAX }.send(channel)?;
    let descriptor = match Message::receive(channel)? {
        Message::Region { descriptor } => descriptor,
        Message::Without { reason } => return Ok(Speed::unknown(reason)),
        other => return Err(other.unexpected("Region or Without")),
    };
    let remote =
        RemoteRegion::from_bytes(&descriptor).step("cannot use the server's region descriptor")?;
    let local = match Placed::new(&session, place, REGION_MAX) {
        Ok(local) => local,
        Err(error) => return Ok(Speed::unknown(error)),
    };
    let writer = Writer {
        session: &session,
        peer: &peer,
        local: &local,
        remote: &remote,
        timeout,
    };
    let sample = writer.measure().step("writing for a moment failed")?;
    Ok(Speed {
        bytes_per_second: Some(sample.bytes as f64 / sample.elapsed.as_secs_f64().max(1e-9)),
        limit: Some(sample.limit().to_string()),
        why_not: None,
    })
}

struct Writer<'a> {
    session: &'a Session,
    peer: &'a Peer,
    local: &'a Placed,
    remote: &'a RemoteRegion,
    timeout: Duration,
}

impl Writer<'_> {
    fn measure(&self) -> Result<Sample, Error> {
        let mut len = FIRST_BYTES;
        while self.write(len)? < A_WHILE && len < REGION_MAX {
            len = (4 * len).min(REGION_MAX);
        }
        let read = || ProcessStats::with_session(self.session.stats_with_kernel());
        let before = read();
        let start = Instant::now();
        while start.elapsed() < TIME {
            self.write(len)?;
        }
        let sample = read().sample(&before, 0, self.peer.name());
        Ok(sample.unwrap_or_default())
    }

    fn write(&self, len: usize) -> Result<Duration, Error> {
        let segment = Segment {
            local: self.local.region().at(0),
            remote: self.remote.at(0),
            len,
        };
        let transfer = self.session.prepare(Op::Write, self.peer, [segment])?;
        let start = Instant::now();
        transfer.post()?;
        transfer.wait(self.timeout)?;
        Ok(start.elapsed())
    }
}
