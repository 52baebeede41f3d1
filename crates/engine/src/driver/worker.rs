//! Worker threads: they drive lanes that no caller drives, and sleep in the kernel when there is
//! nothing to do.
//!
//! A worker that finds work keeps looking for more for a short while (`spin`), because waking a
//! thread costs the peer more than looking costs us. A lane that a caller drives by polling is left
//! to that caller: the worker only checks once per millisecond that the caller still does.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tcpx_net::{Event, Poller, Stream, Waker};

use super::calls::Calls;
use super::seat::Seat;
use crate::link::desk::{Desk, Step};
use crate::link::{Caller, Drive, Driven};
use crate::log::limited;
use crate::sync::{Mutex, Rank};
use crate::trace::{Kind, Record, Trace};

/// Interval at which a worker checks whether a caller still drives a lane.
const WATCH: Duration = Duration::from_millis(1);

/// Interval at which a worker polls device copies or a plugin once it no longer spins:
/// nothing would wake it.
const STAGING_LOOK: Duration = Duration::from_micros(50);

/// Minimum spin time of a worker for a plugin with outstanding messages: many plugins move bytes
/// only when they are polled.
pub(super) const PLUGIN_SPIN: Duration = Duration::from_micros(500);

/// Fruitless polls in a row after which a worker yields once. Few: on a small machine the thread
/// that has to run next often waits for this core, and elsewhere a yield costs less than a poll.
const PATIENT_LOOKS: u32 = 4;

/// One worker thread and its lanes.
///
/// [`Worker::run`] drives the lanes that were called or that the kernel reports. Other threads use
/// the worker as a [`Caller`]: `add` a lane once, `call` it when there is work that the kernel does
/// not report, `remove` it at the end. No call is lost while the worker falls asleep ([`Calls`]).
pub(crate) struct Worker {
    poller: Poller,
    waker: Waker,
    lanes: Mutex<HashMap<u64, LaneRef>>,
    /// Lanes that are requested to be driven now.
    calls: Calls,
    /// Number of lanes.
    lane_count: AtomicUsize,
    next_token: AtomicU64,
    stop: AtomicBool,
    trace: Trace,
}

#[derive(Clone)]
struct LaneRef {
    driven: Arc<dyn Driven>,
    /// The callers' count when the worker went to sleep on this lane.
    attended: u64,
}

/// A lane that the worker drives or watches.
struct Active {
    token: u64,
    lane: LaneRef,
    /// The callers' count at the worker's last check.
    attended: u64,
}

impl Worker {
    pub(crate) fn new(trace: &Trace) -> std::io::Result<Arc<Self>> {
        let poller = Poller::new()?;
        Ok(Arc::new(Self {
            waker: poller.waker(),
            poller,
            lanes: Mutex::new(Rank::Worker, HashMap::new()),
            calls: Calls::new(),
            lane_count: AtomicUsize::new(0),
            next_token: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            trace: trace.clone(),
        }))
    }

    /// Makes the worker look for work.
    pub(crate) fn wake(&self) {
        if self.calls.rouse() {
            self.waker.wake();
        }
    }

    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.waker.wake();
    }

    /// Runs the thread. A bulk worker also copies the runs at the `desk`. `has_company` tells
    /// whether other threads are busy that would lose a core to spinning.
    pub(crate) fn run(
        &self,
        desk: Option<&Desk>,
        spin: Duration,
        staging_spin: Duration,
        seat: &mut Seat,
        has_company: impl Fn() -> bool,
    ) {
        tcpx_net::sleep_exactly();
        seat.follow();
        let mut driven: Vec<Active> = Vec::new();
        let mut watched: Vec<Active> = Vec::new();
        let mut events = Vec::new();
        let mut last_progress = Instant::now();
        let mut last_watch = last_progress;
        let mut looks = 0;
        while !self.stop.load(Ordering::SeqCst) {
            self.take_calls(&mut driven, &mut watched);
            // Also while other lanes keep the worker busy.
            if !watched.is_empty() && last_watch.elapsed() >= WATCH {
                last_watch = Instant::now();
                take_abandoned(&mut driven, &mut watched);
            }
            let copied = desk.map_or(Step::Over, Desk::step);
            let mut drive = Drive {
                progress: false,
                more: copied == Step::Copied,
            };
            let mut index = 0;
            while index < driven.len() {
                let active = &mut driven[index];
                if active.is_attended() {
                    watched.push(driven.swap_remove(index));
                    continue;
                }
                drive |= active.lane().work();
                if active.lane().is_dead() {
                    driven.swap_remove(index);
                } else {
                    index += 1;
                }
            }
            if drive.progress || drive.more {
                last_progress = Instant::now();
                looks = 0;
            }
            if drive.more {
                if driven.len() + watched.len() < self.lane_count.load(Ordering::Relaxed) {
                    // Other lanes must not wait until these have nothing to do.
                    self.collect(&mut events, &mut driven, &mut watched, Some(Duration::ZERO));
                }
                continue;
            }
            let is_copying = copied == Step::UnderWay;
            let staging = is_copying || driven.iter().any(|active| active.lane().is_staging());
            // A full send buffer empties in steps that are worth a sleep; polling meanwhile only
            // takes the socket's lock from the threads that empty it. The same holds for a large
            // payload from another machine. Other arrivals are worth polling for.
            let is_slow = |lane: &dyn Driven| lane.is_blocked() || lane.is_worth_a_sleep();
            let slow = driven.iter().all(|active| is_slow(active.lane()));
            let patience = if staging { staging_spin } else { spin };
            if !slow && last_progress.elapsed() < patience && !has_company() {
                looks += 1;
                let give_way = match looks {
                    1 => driven.iter().any(|active| active.lane().needs_this_core()),
                    _ => looks % PATIENT_LOOKS == 0,
                };
                if give_way {
                    std::thread::yield_now();
                }
                if driven.len() < self.lane_count.load(Ordering::Relaxed) {
                    // Other lanes must not wait for the end of the spin.
                    self.collect(&mut events, &mut driven, &mut watched, Some(Duration::ZERO));
                }
                continue;
            }
            self.rest(&mut driven);
            self.calls.doze();
            // The remaining lanes have something to send, or a copy in flight.
            let dirty = driven.iter().any(|active| !active.lane().is_staging());
            let has_copies = !is_copying && desk.is_some_and(Desk::is_busy);
            let timeout = if self.calls.is_waiting() || has_copies || dirty {
                Some(Duration::ZERO)
            } else if !driven.is_empty() || is_copying {
                Some(STAGING_LOOK)
            } else if watched.is_empty() {
                None
            } else {
                Some(WATCH)
            };
            self.collect(&mut events, &mut driven, &mut watched, timeout);
            self.calls.rise();
            seat.follow();
            // Polling for the end of a copy is no reason to spin.
            if timeout != Some(STAGING_LOOK) || self.calls.is_waiting() {
                last_progress = Instant::now();
            }
        }
    }

    /// Moves the called lanes to the driven ones.
    fn take_calls(&self, driven: &mut Vec<Active>, watched: &mut Vec<Active>) {
        for token in self.calls.take() {
            if driven.iter().any(|a| a.token == token) {
                continue;
            }
            if let Some(at) = watched.iter().position(|a| a.token == token) {
                let mut active = watched.swap_remove(at);
                active.attended = active.lane().attended();
                driven.push(active);
            } else if let Some(active) = self.active(token) {
                driven.push(active);
            }
        }
    }

    /// Returns a called lane, which is driven even if a caller drives it as well.
    fn active(&self, token: u64) -> Option<Active> {
        let lane = self.lanes.lock().get(&token).cloned()?;
        let attended = lane.driven.attended();
        Some(Active::new(token, attended, lane))
    }

    /// Stops driving idle lanes: from now on the kernel reports when they have work. Lanes that got
    /// something to send in the meantime stay.
    fn rest(&self, driven: &mut Vec<Active>) {
        driven.retain(|active| {
            let lane = active.lane();
            // Before the checks below: a caller that leaves the lane
            // unfinished after them calls the worker.
            lane.take_care(false);
            lane.prepare_sleep();
            if let Some(entry) = self.lanes.lock().get_mut(&active.token) {
                entry.attended = active.attended;
            }
            let armed = match (lane.is_paused(), lane.is_blocked()) {
                // The thread that ends the pause calls the worker.
                (true, false) => Ok(()),
                (true, true) => self.poller.arm_for_writing(lane.stream(), active.token),
                (false, is_blocked) => self.poller.arm(lane.stream(), active.token, is_blocked),
            };
            if armed.is_err() {
                // The connection has ended and was removed.
                return false;
            }
            // A thread that adds work after this check calls the worker; work added before is seen.
            let stays = (lane.is_dirty() && !lane.is_blocked()) || lane.is_staging();
            if stays {
                lane.take_care(true);
            }
            stays
        });
    }

    /// Waits for the kernel to report lanes. Lanes that a caller has driven since the worker left
    /// them are only watched.
    fn collect(
        &self,
        events: &mut Vec<Event>,
        driven: &mut Vec<Active>,
        watched: &mut Vec<Active>,
        timeout: Option<Duration>,
    ) {
        events.clear();
        let asleep = match timeout {
            Some(Duration::ZERO) => None,
            _ => self.trace.start(),
        };
        let waited = self.poller.wait(events, timeout);
        self.trace.span(asleep, || Record::new(Kind::Sleep));
        if let Err(error) = waited {
            limited!(
                ERROR,
                %error,
                remedy = "raise the limit of open files (ulimit -n); where that is not it, restart the process",
                "a worker cannot wait for its lanes"
            );
            std::thread::sleep(WATCH);
        }
        for event in events.drain(..) {
            let Event::Ready(token) = event else { continue };
            if driven
                .iter()
                .chain(watched.iter())
                .any(|a| a.token == token)
            {
                continue;
            }
            let Some(lane) = self.lanes.lock().get(&token).cloned() else {
                continue;
            };
            let mut active = Active::new(token, lane.attended, lane);
            if active.is_attended() {
                watched.push(active);
            } else {
                driven.push(active);
            }
        }
    }
}

impl Caller for Worker {
    fn add(&self, driven: Arc<dyn Driven>) -> std::io::Result<u64> {
        let token = self.next_token.fetch_add(1, Ordering::Relaxed);
        self.poller.add(driven.stream(), token)?;
        let lane = LaneRef {
            driven,
            attended: 0,
        };
        self.lanes.lock().insert(token, lane);
        self.lane_count.fetch_add(1, Ordering::Relaxed);
        Ok(token)
    }

    fn remove(&self, token: u64, stream: &Stream) {
        self.poller.remove(stream);
        if self.lanes.lock().remove(&token).is_some() {
            self.lane_count.fetch_sub(1, Ordering::Relaxed);
        }
        self.wake();
    }

    fn call(&self, token: u64) {
        if self.calls.call(token) {
            self.waker.wake();
        }
    }

    fn is_awake(&self) -> bool {
        self.calls.is_awake()
    }
}

/// Drives lanes again that their callers have left; the others stay watched.
fn take_abandoned(driven: &mut Vec<Active>, watched: &mut Vec<Active>) {
    let mut index = 0;
    while index < watched.len() {
        if watched[index].lane().is_dead() {
            watched.swap_remove(index);
        } else if watched[index].is_attended() {
            index += 1;
        } else {
            driven.push(watched.swap_remove(index));
        }
    }
}

impl Active {
    fn new(token: u64, attended: u64, lane: LaneRef) -> Self {
        lane.driven.take_care(true);
        Self {
            token,
            lane,
            attended,
        }
    }

    fn lane(&self) -> &dyn Driven {
        self.lane.driven.as_ref()
    }

    /// Returns whether a caller has driven the lane since the last check.
    fn is_attended(&mut self) -> bool {
        let attended = self.lane().attended();
        std::mem::replace(&mut self.attended, attended) != attended
    }
}

#[cfg(test)]
mod tests {
    use tcpx_net::{Cursor, Listener, SocketOptions};

    use std::path::Path;

    use super::*;
    use crate::Config;
    use crate::memory::Nearness;
    use crate::testing::{LONG, wait_until};

    /// A lane that counts its turns; a busy one never runs out of work.
    struct Fake {
        stream: Stream,
        is_busy: bool,
        is_worth_a_sleep: bool,
        turns: AtomicU64,
    }

    impl Driven for Fake {
        fn work(&self) -> Drive {
            self.turns.fetch_add(1, Ordering::Relaxed);
            Drive {
                progress: self.is_busy,
                more: self.is_busy,
            }
        }

        fn is_dead(&self) -> bool {
            false
        }

        fn stream(&self) -> &Stream {
            &self.stream
        }

        fn attended(&self) -> u64 {
            0
        }

        fn take_care(&self, _: bool) {}

        fn prepare_sleep(&self) {}

        fn is_dirty(&self) -> bool {
            self.is_busy
        }

        fn is_blocked(&self) -> bool {
            false
        }

        fn is_worth_a_sleep(&self) -> bool {
            self.is_worth_a_sleep
        }

        fn is_staging(&self) -> bool {
            false
        }

        fn is_paused(&self) -> bool {
            false
        }

        fn needs_this_core(&self) -> bool {
            false
        }
    }

    fn fake(is_busy: bool, is_worth_a_sleep: bool) -> (Arc<Fake>, Stream) {
        let options = SocketOptions {
            buffer_bytes: 0,
            dead_after: LONG,
        };
        let listener = Listener::bind(([127, 0, 0, 1], 0).into(), &options).unwrap();
        let stream = Stream::connect(listener.local_addr().unwrap(), None, &options).unwrap();
        let mut far = None;
        wait_until("the stream is connected", || {
            far = listener.accept().ok();
            far.is_some()
        });
        let turns = AtomicU64::new(0);
        let lane = Fake {
            stream,
            is_busy,
            is_worth_a_sleep,
            turns,
        };
        (Arc::new(lane), far.unwrap().0)
    }

    /// Returns the seat of a worker that stays where it is.
    fn seat() -> Seat {
        let nearness = Nearness::new(&Config::defaults(), &[], Path::new("/nowhere"));
        Seat::new(Arc::new(nearness), 1)
    }

    #[test]
    fn busy_lane_does_not_starve_others() {
        let worker = Worker::new(&Trace::default()).unwrap();
        let (busy, _far) = fake(true, false);
        let (quiet, far) = fake(false, false);
        let [busy_token, quiet_token] =
            [&busy, &quiet].map(|lane| worker.add(Arc::clone(lane) as _).unwrap());
        let thread = {
            let worker = Arc::clone(&worker);
            let spin = Duration::ZERO;
            std::thread::spawn(move || worker.run(None, spin, spin, &mut seat(), || false))
        };
        worker.call(quiet_token);
        wait_until("the worker sleeps", || {
            quiet.turns.load(Ordering::Relaxed) > 0 && !worker.is_awake()
        });
        worker.call(busy_token);
        wait_until("the worker is busy", || {
            busy.turns.load(Ordering::Relaxed) > 0
        });
        let before = quiet.turns.load(Ordering::Relaxed);
        far.send(b"x", &[], Cursor::default()).unwrap();
        wait_until("the other lane has its turn", || {
            quiet.turns.load(Ordering::Relaxed) > before
        });
        worker.stop();
        thread.join().unwrap();
    }

    #[test]
    fn worker_does_not_spin_for_a_lane_worth_a_sleep() {
        let worker = Worker::new(&Trace::default()).unwrap();
        let (lane, _far) = fake(false, true);
        let token = worker.add(Arc::clone(&lane) as _).unwrap();
        let thread = {
            let worker = Arc::clone(&worker);
            // Without a sleep the worker would spin for ever.
            let spin = Duration::MAX;
            std::thread::spawn(move || worker.run(None, spin, spin, &mut seat(), || false))
        };
        worker.call(token);
        wait_until("the worker sleeps", || {
            lane.turns.load(Ordering::Relaxed) > 0 && !worker.is_awake()
        });
        worker.stop();
        thread.join().unwrap();
    }
}
