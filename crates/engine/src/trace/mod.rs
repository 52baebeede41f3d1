//! Traces: a timeline of transfers, as a file for ui.perfetto.dev.
//!
//! | module | what it holds |
//! |---|---|
//! | `record` | one event: 64 bytes, without any text |
//! | `ring` | the records of one thread, until they are written |
//! | `tracer` | the state of sessions that share a file: rings, texts, names of tracks |
//! | `file` | the file: its name, its lock, its limit |
//! | `writer` | the thread that turns records into lines of the file |
//! | `json` | one record as trace events in JSON |
//!
//! A [`Trace`] is a handle that is off or on for the life of a session. Off, each event costs one
//! branch on an option that never changes. On, an event reads the clock and writes one record to
//! the ring of its own thread: no lock, no allocation, no system call. A record that finds its ring
//! full is dropped and counted; no thread waits for the file.

mod file;
mod json;
mod record;
mod ring;
#[cfg(test)]
mod tests;
mod tracer;
mod writer;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

pub(crate) use self::record::{End, Kind, Record, Text, Track, Value};
use self::tracer::Tracer;
use crate::config::Config;
use crate::error::Error;

/// A handle to the trace of a session. Clones are handles to the same trace.
#[derive(Clone, Default)]
pub(crate) struct Trace(Option<Arc<Traced>>);

/// One session in a trace.
pub(crate) struct Traced {
    tracer: Arc<Tracer>,
    /// A number that tells apart the transfers of sessions that share a file.
    session: u32,
}

/// Keeps a session's trace open. Dropping the last recording of a file completes the file.
pub(crate) struct Recording {
    trace: Trace,
}

impl Recording {
    /// Opens the trace that the configuration names, if any.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn start(config: &Config) -> Result<Self, Error> {
        let Some(path) = config.trace() else {
            let trace = Trace::default();
            return Ok(Self { trace });
        };
        let opened = tracer::open(path, config.trace_bytes() as u64);
        let (tracer, session) = opened.map_err(|(path, source)| Error::Trace {
            path,
            source: source.into(),
        })?;
        let trace = Trace(Some(Arc::new(Traced { tracer, session })));
        Ok(Self { trace })
    }

    /// Returns the handle to record with.
    pub(crate) fn trace(&self) -> &Trace {
        &self.trace
    }

    /// Writes the records made so far. Returns the file, while it can be written.
    pub(crate) fn flush(&self) -> Option<PathBuf> {
        let Trace(Some(traced)) = &self.trace else {
            return None;
        };
        traced.tracer.flush()
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if let Trace(Some(traced)) = &self.trace {
            tracer::close(&traced.tracer);
        }
    }
}

/// The start of a span, which is recorded when it ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Start(Instant);

impl Trace {
    /// Returns the trace if it is on. This is the branch that each event costs.
    #[inline]
    pub(crate) fn on(&self) -> Option<&Traced> {
        self.0.as_deref()
    }

    /// Notes the start of a span that [`Trace::span`] records.
    #[inline]
    pub(crate) fn start(&self) -> Option<Start> {
        self.on().map(|_| Start::now())
    }

    /// Records a span that began at `start` and ends now. Does nothing without a start.
    #[inline]
    pub(crate) fn span(&self, start: Option<Start>, record: impl FnOnce() -> Record) {
        if let (Some(start), Some(traced)) = (start, self.on()) {
            traced.span(start, Start::now(), record());
        }
    }
}

impl Start {
    pub(crate) fn now() -> Self {
        Self(Instant::now())
    }

    /// Makes a start from a time that was noted before.
    pub(crate) fn at(instant: Instant) -> Self {
        Self(instant)
    }
}

impl Traced {
    /// Records a span between two times.
    pub(crate) fn span(&self, start: Start, end: Start, record: Record) {
        self.tracer.push(record.between(
            self.session,
            self.tracer.nanos(start.0),
            self.tracer.nanos(end.0),
        ));
    }

    /// Records an event that happens now.
    pub(crate) fn event(&self, record: Record) {
        let now = Start::now();
        self.span(now, now, record);
    }

    /// Returns the number of a text, for records. Takes a lock: do not call it for each chunk.
    pub(crate) fn text(&self, text: &str) -> Text {
        self.tracer.text(text)
    }

    /// Makes a pair of tracks for a lane: one for each direction.
    pub(crate) fn new_track(&self) -> Track {
        self.tracer.new_track()
    }

    /// Names a pair of tracks.
    pub(crate) fn name_track(&self, track: Track, out: String, r#in: String) {
        self.tracer.name_track(track, out, r#in);
    }
}

/// Returns the result of a system call that moves bytes, for its record.
pub(crate) fn result_of(outcome: &io::Result<usize>) -> Value {
    match outcome {
        Ok(count) => Value::Bytes(*count as u64),
        Err(error) => Value::Errno(error.raw_os_error().unwrap_or(0)),
    }
}

/// One transfer in a trace, from its posting to its end.
pub(crate) struct TransferTrace {
    traced: Arc<Traced>,
    id: u64,
    name: Text,
}

impl std::fmt::Debug for TransferTrace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TransferTrace").finish_non_exhaustive()
    }
}

/// The names of a peer's transfers in a trace, such as `WRITE to bob`.
#[derive(Clone, Copy, Default)]
pub(crate) struct TransferNames {
    pub(crate) write: Text,
    pub(crate) read: Text,
    pub(crate) send: Text,
    pub(crate) receive: Text,
}

impl TransferNames {
    /// Makes the names of transfers to and from a peer.
    pub(crate) fn new(trace: &Trace, peer: &str) -> Self {
        let Some(traced) = trace.on() else {
            return Self::default();
        };
        Self {
            write: traced.text(&format!("WRITE to {peer}")),
            read: traced.text(&format!("READ from {peer}")),
            send: traced.text(&format!("SEND to {peer}")),
            receive: traced.text(&format!("RECEIVE from {peer}")),
        }
    }
}

impl TransferTrace {
    /// Records that a transfer was posted at a given time; none without a trace.
    pub(crate) fn posted(
        trace: &Trace,
        (id, name): (u64, Text),
        (bytes, chunks): (u64, usize),
        at: Instant,
    ) -> Option<Self> {
        let traced = Arc::clone(trace.0.as_ref()?);
        let at = Start::at(at);
        let record = Record::new(Kind::Posted)
            .chunk(id, chunks as u32)
            .bytes(bytes)
            .value(Value::Text(name));
        traced.span(at, at, record);
        Some(Self { traced, id, name })
    }

    /// Records the end of the transfer, and the error if it failed.
    pub(crate) fn ended(&self, end: End, error: Option<&Error>) {
        let cause = error.map_or(Text::default(), |e| self.traced.text(&e.to_string()));
        let record = Record::new(Kind::Ended)
            .chunk(self.id, 0)
            .end(end)
            .value(Value::Text(self.name))
            .text(cause);
        self.traced.event(record);
    }
}
