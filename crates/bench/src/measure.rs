//! Alternates rounds of the engine and rounds of the floor over the same bytes.
//!
//! ```text
//!   prepare ─► verified run of each ─► warm-up, floor tuned ─► rounds ─► verified run
//!                                                              engine floor
//!                                                              floor engine
//!                                                              engine floor …
//! ```
//!
//! Alternating makes other load or a falling clock affect both alike, and changing the first of
//! each pair cancels the effect of the order. Before a verified run both buffers are poisoned with
//! different patterns, so that a transfer that does nothing cannot pass.

pub mod beside;
mod rounds;
mod stage;

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tcpx::{Config, Peer, Session, Source};

use crate::error::Error;
use crate::floor::{Streams, Waiting};
use crate::memory::{Contestant, Memory};
use crate::path::{Path, Taken};
use crate::peer::control::SHARED_SETTINGS;
use crate::peer::{Program, Remote};
use crate::place::{Opened, Place, Places};
use crate::stats::Measured;
use crate::suite::{Case, Group};
use crate::workload::{Layout, Op, Shape};

use beside::{BesideResult, LoadKind};
use stage::Stage;
pub(crate) use stage::{complete, prepare};

/// Time limit for the lanes to connect.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(35);

/// Bytes of the transfer that finds out which path is used.
const PROBE_BYTES: u64 = 4 << 10;

/// Receives the progress of a measurement: draws a bar, prints a line, or does nothing (`()`).
pub trait Progress {
    /// Called when a case begins, `index` (from 0) of `count`.
    fn started(&mut self, index: usize, count: usize, case: &Case) {
        let _ = (index, count, case);
    }

    /// Called for each step within the case.
    fn step(&mut self, step: Step) {
        let _ = step;
    }

    /// Returns whether the user has interrupted: the measurement ends with the results so far.
    fn is_interrupted(&self) -> bool {
        false
    }

    /// Called when the case is done.
    fn finished(&mut self, result: &CaseResult) {
        let _ = result;
    }

    /// Called when the case beside a load is done.
    fn finished_beside(&mut self, result: &BesideResult) {
        let _ = result;
    }
}

impl Progress for () {}

/// The progress of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Step {
    /// Memory is allocated and filled, and every byte of a first run is checked.
    Verifying,
    /// Warm-up, and the choice of the floor's call size.
    WarmingUp,
    /// Rounds are being measured.
    Measuring {
        /// From 0 to 1.
        done: f64,
        /// GB/s of the engine in the latest round.
        engine: f64,
        /// GB/s of the floor in the latest round.
        floor: Option<f64>,
    },
    /// A load runs, alone and beside the transfer.
    Computing {
        /// The load.
        load: LoadKind,
        /// From 0 to 1.
        done: f64,
    },
}

/// Options besides measuring the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extras {
    /// Measure the floor too, where lanes carry the bytes: copies within a host use no sockets.
    pub floor: bool,
    /// Verify every byte, before and after.
    pub verify: bool,
}

impl Default for Extras {
    fn default() -> Extras {
        Extras {
            floor: true,
            verify: true,
        }
    }
}

/// The result of one case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CaseResult {
    /// The case's name.
    pub name: String,
    /// The group it belongs to.
    pub group: Group,
    /// The transferred data.
    pub shape: Shape,
    /// The way the caller waited.
    pub waiting: Waiting,
    /// Number of lanes of the engine, and of streams of the floor.
    pub lanes: usize,
    /// Time to prepare the transfer, in milliseconds.
    pub prepare_ms: f64,
    /// The engine's numbers.
    pub engine: Measured,
    /// The floor's numbers, if it was measured.
    pub floor: Option<FloorResult>,
    /// What limits the engine, in words, as this side sees it.
    #[serde(default)]
    pub limit: String,
    /// Whether every byte was checked, before and after the rounds. Wrong bytes give no result.
    pub verified: bool,
}

/// The result of the floor in the same case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FloorResult {
    /// Its numbers.
    #[serde(flatten)]
    pub measured: Measured,
    /// Bytes per system call, or per message: the fastest of the candidates.
    pub call_bytes: usize,
    /// Whether it used a NCCL net plugin, as the engine did.
    #[serde(default)]
    pub plugin: bool,
    /// The engine's GB/s as a fraction of the floor's.
    pub ratio: f64,
    /// The smallest and the largest ratio of two consecutive rounds.
    pub ratio_range: (f64, f64),
    /// The engine's CPU seconds per GB as a multiple of the floor's.
    pub cpu_ratio: f64,
}

/// The measuring side: a session of its own, and the other process.
pub struct Bench {
    session: Session,
    peer: Peer,
    /// Before `remote`: its half of a broken round ends when the streams close.
    streams: Option<Streams>,
    remote: Remote,
    places: Places,
    taken: Taken,
    /// Held between cases, so that no case pays for a new context.
    _device: Opened,
    /// Makes the patterns of different runs differ.
    seed: u64,
}

/// Uses any port: the two processes of a machine connect at addresses of their own, whatever the
/// settings open to others.
pub(crate) fn unmapped(config: Config) -> Result<Config, tcpx::ConfigError> {
    config.with("listen_port", 0)?.with("advertise", "")
}

impl Bench {
    /// Measures on this machine, against a second process. Unless configured otherwise, lanes carry
    /// the bytes over the loopback interface, so that the floor is comparable.
    ///
    /// # Errors
    /// The memory of either place is not available, a setting is wrong, or the process cannot be
    /// started or connected.
    pub fn spawn(program: &Program, places: Places, mut config: Config) -> Result<Bench, Error> {
        let device = places.initiator.open()?;
        stay_on_loopback(&mut config)?;
        config = unmapped(config)?;
        set_default(&mut config, "same_host", Path::Lanes.setting())?;
        let settings = shared_settings(&config, true);
        let remote = Remote::spawn(program, places.target, &settings)?;
        Bench::new(remote, places, device, config)
    }

    /// Measures against a [`Server`](crate::peer::Server) at `host`, as `name:port`.
    ///
    /// # Errors
    /// As for [`Bench::spawn`].
    pub fn connect(
        host: &str,
        timeout: Duration,
        places: Places,
        mut config: Config,
    ) -> Result<Bench, Error> {
        let device = places.initiator.open()?;
        let local = is_loopback(host);
        if local {
            stay_on_loopback(&mut config)?;
        }
        let settings = shared_settings(&config, local);
        let remote = Remote::connect(host, timeout, places.target, &settings)?;
        Bench::new(remote, places, device, config)
    }

    /// Whether the other process was started for this measurement, and ends with it.
    #[must_use]
    pub fn has_second(&self) -> bool {
        self.remote.is_child()
    }

    fn new(remote: Remote, places: Places, device: Opened, config: Config) -> Result<Bench, Error> {
        let name = format!("bench-initiator-{}", std::process::id());
        let session = Session::new(config.with_name(name)?)?;
        let peer = session.add_peer(remote.connection_info())?;
        peer.connect(CONNECT_TIMEOUT)?;
        let mut bench = Bench {
            session,
            peer,
            remote,
            places,
            taken: Taken::default(),
            _device: device,
            streams: None,
            seed: 1,
        };
        bench.taken = bench.find_path()?;
        Ok(bench)
    }

    /// Moves a few bytes and finds out which path they took.
    fn find_path(&mut self) -> Result<Taken, Error> {
        let shape = Shape::new(Op::Write, PROBE_BYTES, 0, Layout::Ordered)?;
        let region = self.remote.prepare(shape)?;
        let memory = Memory::for_shape(&self.session, self.place(), &shape, None)?;
        let transfer = prepare(&self.session, &self.peer, &shape, &memory, &region)?;
        transfer.post()?;
        complete(&transfer, Waiting::Block)?;
        Ok(Taken::of(self.peer.same_host(), self.places))
    }

    /// Returns this side's session.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Returns the other side's session.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Returns the other process.
    pub fn remote(&mut self) -> &mut Remote {
        &mut self.remote
    }

    /// Returns the places of both sides' memory.
    pub fn places(&self) -> Places {
        self.places
    }

    /// Returns the path of the bytes, and why it is not a better one.
    pub fn taken(&self) -> &Taken {
        &self.taken
    }

    /// Returns the place of this side's memory.
    pub(crate) fn place(&self) -> Place {
        self.places.initiator
    }

    /// Returns the number of lanes of the engine, which is also that of the floor's streams.
    pub fn lanes(&self) -> usize {
        self.peer.lanes().len().max(1)
    }

    /// Measures the cases one after the other. If `progress` is interrupted, the current case ends
    /// after its current round and none follows.
    pub fn run(
        &mut self,
        cases: &[Case],
        extras: Extras,
        progress: &mut dyn Progress,
    ) -> Result<Vec<CaseResult>, Error> {
        let mut results = Vec::with_capacity(cases.len());
        for (index, case) in cases.iter().enumerate() {
            if progress.is_interrupted() {
                break;
            }
            progress.started(index, cases.len(), case);
            let result = self.run_case(case, extras, progress)?;
            progress.finished(&result);
            results.push(result);
        }
        Ok(results)
    }

    /// Measures one case.
    pub fn run_case(
        &mut self,
        case: &Case,
        mut extras: Extras,
        progress: &mut dyn Progress,
    ) -> Result<CaseResult, Error> {
        extras.floor &= self.taken.path == Path::Lanes;
        progress.step(Step::Verifying);
        let lanes = self.lanes();
        if extras.floor && self.streams.is_none() {
            self.streams = Some(self.remote.floor_streams(lanes, self.session.config())?);
        }
        let mut stage = Stage::new(self, case)?;
        if extras.verify {
            stage.verified(Contestant::Engine)?;
            if extras.floor {
                stage.verified(Contestant::Floor)?;
            }
        }

        progress.step(Step::WarmingUp);
        let warmup = stage.warm_up(case.workload.warmup, extras.floor)?;
        let rounds = stage.rounds(case.workload.limit, warmup, extras.floor, progress)?;
        if extras.verify {
            stage.verified(Contestant::Engine)?;
        }

        let bytes = case.workload.shape.total_bytes();
        let none = || Error::Protocol {
            what: "no iteration was measured".into(),
        };
        let engine = Measured::new(&rounds.engine, bytes).ok_or_else(none)?;
        let call_bytes = stage.tuning.call_bytes;
        let floor = Measured::new(&rounds.floor, bytes)
            .map(|measured| FloorResult::new(&engine, measured, call_bytes))
            .map(|floor| FloorResult {
                plugin: stage.is_plugged(),
                ..floor
            });
        Ok(CaseResult {
            name: case.name.clone(),
            group: case.group,
            shape: case.workload.shape,
            waiting: case.waiting,
            lanes,
            prepare_ms: stage.prepare.as_secs_f64() * 1e3,
            engine,
            floor,
            limit: rounds.observed.limit().to_string(),
            verified: extras.verify,
        })
    }
}

impl FloorResult {
    pub(crate) fn new(engine: &Measured, measured: Measured, call_bytes: usize) -> FloorResult {
        let pairs = || {
            engine
                .rounds
                .iter()
                .zip(&measured.rounds)
                .map(|(ours, raw)| ours / raw)
        };
        let ratio_range = (
            pairs().fold(f64::INFINITY, f64::min),
            pairs().fold(0.0, f64::max),
        );
        FloorResult {
            ratio: engine.gb_per_s / measured.gb_per_s,
            ratio_range,
            cpu_ratio: engine.cpu.total / measured.cpu.total,
            call_bytes,
            plugin: false,
            measured,
        }
    }
}

/// Returns settings of this side that the other must share: explicit ones, not defaults. Interface
/// names are left out, since they differ between machines.
pub(crate) fn shared_settings(config: &Config, same_machine: bool) -> Vec<(String, String)> {
    let rows = config
        .rows()
        .into_iter()
        .filter(|row| row.source != Source::Default);
    rows.filter(|row| SHARED_SETTINGS.contains(&row.key))
        .filter(|row| same_machine || row.key != "interfaces")
        .map(|row| (row.key.to_owned(), row.value))
        .collect()
}

/// Makes two processes of one machine connect over loopback, whatever other interfaces there are.
fn stay_on_loopback(config: &mut Config) -> Result<(), Error> {
    set_default(config, "interfaces", "lo")
}

/// Sets a value unless the user has chosen one.
fn set_default(config: &mut Config, key: &str, value: &str) -> Result<(), Error> {
    let chosen = |row: &tcpx::ConfigRow| row.key == key && row.source != Source::Default;
    if !config.rows().iter().any(chosen) {
        config.set(key, value)?;
    }
    Ok(())
}

fn is_loopback(host: &str) -> bool {
    use std::net::ToSocketAddrs;

    host.to_socket_addrs()
        .is_ok_and(|mut all| all.all(|address| address.ip().is_loopback()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::median;

    #[test]
    fn ratios_compare_medians_and_neighbours() {
        let measured = |rates: &[f64], cpu: f64| Measured {
            iterations: rates.len() as u64,
            gb_per_s: median(rates).unwrap(),
            gb_per_s_range: (0.0, 0.0),
            latency: crate::stats::Latency {
                min_us: 0.0,
                p50_us: 0.0,
                p99_us: 0.0,
                max_us: 0.0,
            },
            cpu: crate::stats::CpuPerGb {
                initiator: 0.0,
                target: cpu,
                total: cpu,
            },
            rounds: rates.to_vec(),
        };
        let engine = measured(&[3.0, 4.0, 5.0], 0.5);
        let floor = FloorResult::new(&engine, measured(&[6.0, 4.0, 5.0], 0.4), 1 << 20);
        assert_eq!(floor.ratio, 0.8);
        assert_eq!(floor.ratio_range, (0.5, 1.0));
        assert_eq!(floor.cpu_ratio, 1.25);
    }
}
