//! The state of sessions of one process that write to the same trace.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::file::{Finished, Output};
use super::json::Clock;
use super::record::{Record, Text, Track};
use super::ring::{RECORDS, Ring};
use super::writer::{self, Writer};

/// The limit for rings: 64 MiB in all. Events of further threads are counted and not recorded.
const MAX_RINGS: usize = 64;

/// The limit for texts. Names of peers and causes of failures repeat, so few are needed.
const MAX_TEXTS: usize = 16 << 10;

/// How long to wait for the list of traces. Its lock is held while a file is opened or completed; a
/// child that was forked meanwhile inherits a lock that stays taken.
const LIST_TIME: Duration = Duration::from_secs(10);

/// The traces of this process.
static TRACES: Mutex<Traces> = Mutex::new(Traces {
    open: Vec::new(),
    finished: Vec::new(),
});

struct Traces {
    open: Vec<Open>,
    /// Completed files, which a later session of this process continues.
    finished: Vec<(u32, PathBuf, Finished)>,
}

/// A trace that sessions are writing to.
struct Open {
    /// The process that started the thread. A forked child has none of its parent's threads.
    process: u32,
    /// The path as the setting names it.
    asked: PathBuf,
    tracer: Arc<Tracer>,
    sessions: usize,
    thread: JoinHandle<()>,
}

/// Opens a trace for a session, or finds the one that other sessions of this process write to.
/// Returns the session's number in the trace.
pub(super) fn open(asked: &Path, limit: u64) -> Result<(Arc<Tracer>, u32), (PathBuf, io::Error)> {
    static NEXT_SESSION: AtomicU32 = AtomicU32::new(1);
    let failed = |error| (asked.to_owned(), error);
    let mut traces = TRACES.try_lock_for(LIST_TIME).ok_or_else(|| {
        failed(io::Error::other(
            "another trace is being opened or completed",
        ))
    })?;
    let session = NEXT_SESSION.fetch_add(1, Ordering::Relaxed);
    let process = std::process::id();
    let mut open = traces.open.iter_mut();
    if let Some(open) = open.find(|open| open.process == process && open.asked == asked) {
        open.sessions += 1;
        return Ok((Arc::clone(&open.tracer), session));
    }
    let is_same = |(of, known, _): &(u32, PathBuf, Finished)| *of == process && known == asked;
    let finished = traces.finished.iter().position(is_same);
    let finished = finished.map(|at| traces.finished.swap_remove(at).2);
    let output = Output::open(asked, limit, finished)?;
    let tracer = Arc::new(Tracer::new(output));
    let written = Arc::clone(&tracer);
    let thread = std::thread::Builder::new()
        .name("tcpx-trace".into())
        .spawn(move || writer::run(&written))
        .map_err(failed)?;
    traces.open.push(Open {
        process,
        asked: asked.to_owned(),
        tracer: Arc::clone(&tracer),
        sessions: 1,
        thread,
    });
    Ok((tracer, session))
}

/// Ends a session's use of a trace. The last session completes the file.
pub(super) fn close(tracer: &Arc<Tracer>) {
    let Some(mut traces) = TRACES.try_lock_for(LIST_TIME) else {
        return;
    };
    let mut open = traces.open.iter();
    let Some(at) = open.position(|open| Arc::ptr_eq(&open.tracer, tracer)) else {
        return;
    };
    traces.open[at].sessions -= 1;
    if traces.open[at].sessions > 0 {
        return;
    }
    let open = traces.open.swap_remove(at);
    tracer.request(|requested| requested.is_over = true);
    if open.thread.thread().id() != std::thread::current().id() {
        let _ = open.thread.join();
    }
    if let Some(finished) = tracer.finish() {
        let entry = (open.process, open.asked, finished);
        traces.finished.push(entry);
    }
}

/// The state of a trace, which decides what happens to records.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum State {
    Recording,
    /// The file has reached its limit: records are counted only.
    Full,
    /// The file is complete, or cannot be written any more.
    Over,
}

/// A trace that is being recorded.
pub(super) struct Tracer {
    /// A number that no other trace of this process has or had.
    serial: u64,
    epoch: Instant,
    state: AtomicU8,
    /// Records of threads without a ring.
    unseated: AtomicU64,
    next_track: AtomicU32,
    shared: Mutex<Shared>,
    requested: Mutex<Requested>,
    changed: Condvar,
    /// The writer. Lock it before `shared`.
    writer: Mutex<Writer>,
}

/// Data besides records that recording threads leave for the writer.
#[derive(Default)]
pub(super) struct Shared {
    pub(super) rings: Vec<Arc<Ring>>,
    /// Texts by number; number 0 is none.
    pub(super) texts: Vec<Arc<str>>,
    numbers: HashMap<Arc<str>, u32>,
    /// Names of tracks that are not in the file yet.
    pub(super) names: Vec<(TrackId, String)>,
}

/// A track of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TrackId {
    Thread(u32),
    Out(Track),
    In(Track),
}

/// Records and names that are to be written.
pub(super) struct Pending {
    /// The rings, each with the number of its records that may be written: the writer knows the
    /// texts of these.
    pub(super) rings: Vec<(Arc<Ring>, u64)>,
    /// The rings of threads that have ended. They have no other records.
    over: Vec<Arc<Ring>>,
    pub(super) names: Vec<(TrackId, String)>,
}

#[derive(Default)]
struct Requested {
    is_over: bool,
    /// Set when a ring is getting full.
    is_urgent: bool,
}

impl Tracer {
    pub(super) fn new(output: Output) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let (epoch, clock) = (Instant::now(), Clock::now());
        Self {
            serial: NEXT.fetch_add(1, Ordering::Relaxed),
            epoch,
            state: AtomicU8::new(State::Recording as u8),
            unseated: AtomicU64::new(0),
            next_track: AtomicU32::new(1),
            shared: Mutex::new(Shared {
                texts: vec!["".into()],
                ..Shared::default()
            }),
            requested: Mutex::new(Requested::default()),
            changed: Condvar::new(),
            writer: Mutex::new(Writer::new(output, clock)),
        }
    }

    /// Returns the nanoseconds from the opening of the trace to a time; 0 for an earlier one.
    #[inline]
    pub(super) fn nanos(&self, at: Instant) -> u64 {
        let since = at.saturating_duration_since(self.epoch);
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Adds a record to the ring of this thread.
    pub(super) fn push(&self, record: Record) {
        let state = self.state.load(Ordering::Relaxed);
        if state == State::Over as u8 {
            return;
        }
        let pushed = SEATS.try_with(|seats| {
            let mut seats = seats.try_borrow_mut().ok()?;
            let ring = match seats.iter().find(|seat| seat.tracer == self.serial) {
                Some(seat) => &seat.ring,
                None => self.sit(&mut seats),
            };
            let ring = ring.as_ref()?;
            Some(match state == State::Full as u8 {
                true => ring.skip(),
                false => ring.push(&record),
            })
        });
        match pushed {
            Ok(Some(true)) => self.request(|requested| requested.is_urgent = true),
            Ok(Some(false)) => {}
            Ok(None) | Err(_) => _ = self.unseated.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// Gives this thread a ring, unless the limit is reached.
    fn sit<'a>(&self, seats: &'a mut Vec<Seat>) -> &'a Option<Arc<Ring>> {
        // Drop the seats of traces that are over: nobody else holds their rings.
        let is_used = |ring: &Arc<Ring>| Arc::strong_count(ring) > 1;
        seats.retain(|seat| seat.ring.as_ref().is_some_and(is_used));
        let mut shared = self.shared.lock();
        let may_have = shared.rings.len() < MAX_RINGS;
        let ring = may_have.then(|| {
            let id = tcpx_net::process::thread_id();
            let name = std::thread::current().name().unwrap_or("thread").to_owned();
            let ring = Arc::new(Ring::new(id, RECORDS));
            shared.rings.push(Arc::clone(&ring));
            shared.names.push((TrackId::Thread(id), name));
            ring
        });
        drop(shared);
        let tracer = self.serial;
        seats.push(Seat { tracer, ring });
        &seats[seats.len() - 1].ring
    }

    /// Returns the number of a text, which is kept if it is new.
    pub(super) fn text(&self, text: &str) -> Text {
        let mut shared = self.shared.lock();
        if let Some(number) = shared.numbers.get(text) {
            return Text(*number);
        }
        if shared.texts.len() >= MAX_TEXTS {
            return Text::default();
        }
        let (number, text) = (shared.texts.len() as u32, Arc::<str>::from(text));
        shared.texts.push(Arc::clone(&text));
        shared.numbers.insert(text, number);
        Text(number)
    }

    pub(super) fn new_track(&self) -> Track {
        Track(self.next_track.fetch_add(1, Ordering::Relaxed))
    }

    pub(super) fn name_track(&self, track: Track, out: String, r#in: String) {
        if self.state.load(Ordering::Relaxed) == State::Recording as u8 {
            let names = [(TrackId::Out(track), out), (TrackId::In(track), r#in)];
            self.shared.lock().names.extend(names);
        }
    }

    /// Writes the records made so far. Returns the file, while it can be written.
    pub(super) fn flush(&self) -> Option<PathBuf> {
        self.write();
        self.writer.lock().path()
    }

    fn request(&self, change: impl FnOnce(&mut Requested)) {
        change(&mut self.requested.lock());
        self.changed.notify_one();
    }

    /// Sleeps until it is time to write, for at most `time`. Returns whether the trace is over.
    pub(super) fn wait(&self, time: Duration) -> bool {
        // A ring that filled up again while it was being written does not request a second time.
        let is_behind = self.shared.lock().rings.iter().any(|r| r.is_filling());
        let mut requested = self.requested.lock();
        if !requested.is_over && !requested.is_urgent && !is_behind {
            self.changed.wait_for(&mut requested, time);
        }
        requested.is_urgent = false;
        requested.is_over
    }

    /// Writes the records made so far.
    pub(super) fn write(&self) {
        let mut writer = self.writer.lock();
        let pending = self.take(&mut writer);
        self.write_pending(&mut writer, &pending);
    }

    /// Takes what is to be written, and lets the writer learn the texts of these records.
    fn take(&self, writer: &mut Writer) -> Pending {
        let mut shared = self.shared.lock();
        // Check before counting: the records that an ended thread has now are its last.
        let is_over = |ring: &&Arc<Ring>| ring.is_over();
        let over = shared.rings.iter().filter(is_over).cloned().collect();
        // Count while the lock is held: a thread adds a text before it makes a record of it, so the
        // texts of the counted records are there. Those of later records may not be.
        let count = |ring: &Arc<Ring>| (Arc::clone(ring), ring.added());
        let rings = shared.rings.iter().map(count).collect();
        writer.learn(&shared.texts);
        Pending {
            rings,
            over,
            names: std::mem::take(&mut shared.names),
        }
    }

    fn write_pending(&self, writer: &mut Writer, pending: &Pending) {
        let unseated = self.unseated.swap(0, Ordering::Relaxed);
        let goes_on = writer.write(pending, unseated, self.nanos(Instant::now()));
        if goes_on.is_full {
            // Keep the state `Over`.
            let (from, to) = (State::Recording as u8, State::Full as u8);
            let relaxed = Ordering::Relaxed;
            let _ = self.state.compare_exchange(from, to, relaxed, relaxed);
        }
        if goes_on.is_broken {
            self.state.store(State::Over as u8, Ordering::Relaxed);
        }
        if !pending.over.is_empty() {
            let over = &pending.over;
            let is_left = |ring: &Arc<Ring>| !over.iter().any(|gone| Arc::ptr_eq(gone, ring));
            self.shared.lock().rings.retain(is_left);
        }
    }

    /// Completes the file.
    pub(super) fn finish(&self) -> Option<Finished> {
        self.state.store(State::Over as u8, Ordering::Relaxed);
        self.write();
        self.shared.lock().rings.clear();
        self.writer.lock().finish(self.nanos(Instant::now()))
    }
}

/// A thread's ring in one trace; none if there were too many rings.
struct Seat {
    tracer: u64,
    ring: Option<Arc<Ring>>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        if let Some(ring) = &self.ring {
            ring.finish();
        }
    }
}

thread_local! {
    /// The seats of this thread, usually one.
    static SEATS: RefCell<Vec<Seat>> = const { RefCell::new(Vec::new()) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Kind, Value};

    #[test]
    fn a_text_that_is_added_while_records_are_written_is_not_missing() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("trace.json");
        let opened = Output::open(&path, 1 << 20, None);
        let tracer = Tracer::new(opened.map_err(|(_, error)| error).expect("a file"));
        let push = |text: &str| {
            let record = Record::new(Kind::Posted);
            tracer.push(record.value(Value::Text(tracer.text(text))));
        };
        let mut writer = tracer.writer.lock();
        push("WRITE to early");
        let pending = tracer.take(&mut writer);
        push("WRITE to late");
        tracer.write_pending(&mut writer, &pending);
        drop(writer);
        let written = || std::fs::read_to_string(&path).expect("the file");
        assert!(written().contains("\"name\":\"WRITE to early\""));
        assert!(!written().contains("\"name\":\"\""), "{}", written());
        tracer.finish().expect("complete");
        assert!(written().contains("\"name\":\"WRITE to late\""));
        assert!(!written().contains("\"name\":\"\""), "{}", written());
    }
}
