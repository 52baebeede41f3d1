//! Traces: where the time of a transfer went, as a file for ui.perfetto.dev.
//!
//! | module | what it holds |
//! |---|---|
//! | `record` | what one event is: 64 bytes, without any text |
//! | `ring` | the records of one thread, until they are written |
//! | `tracer` | what the sessions of a process that share a file share: rings, texts, names of tracks |
//! | `file` | the file: its name, its lock, its limit |
//! | `writer` | the thread that turns records into lines of the file |
//! | `json` | one record as trace events in JSON |
//!
//! A [`Trace`] is a handle that is off or on for the life of a session. Off, each event site costs
//! one branch on an option that never changes. On, a site reads the clock and writes one record to
//! the ring of its own thread: no lock, no allocation, no system call. Records that find their ring
//! full are counted and lost; nobody waits for the file.

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
    /// Tells the transfers of sessions apart that share a file.
    session: u32,
}

/// Keeps a session's trace open. Dropping it completes the file, unless other sessions of the
/// process use the same one.
pub(crate) struct Recording {
    trace: Trace,
}

impl Recording {
    /// Opens the trace that the configuration asks for, if it does.
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

    /// The handle for all that records.
    pub(crate) fn trace(&self) -> &Trace {
        &self.trace
    }

    /// Writes what was recorded until now.
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

/// The start of something that is recorded when it ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Start(Instant);

impl Trace {
    /// The trace, where there is one. This is the branch that each event site pays.
    #[inline]
    pub(crate) fn on(&self) -> Option<&Traced> {
        self.0.as_deref()
    }

    /// Notes the time where something begins that [`Trace::span`] records.
    #[inline]
    pub(crate) fn start(&self) -> Option<Start> {
        self.on().map(|_| Start::now())
    }

    /// Records what began at `start` and ends now. Without a start there is no trace.
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

    /// The moment of an event that was noted before.
    pub(crate) fn at(instant: Instant) -> Self {
        Self(instant)
    }
}

impl Traced {
    /// Records something that began at one moment and ended at another.
    pub(crate) fn span(&self, start: Start, end: Start, record: Record) {
        self.tracer.push(record.between(
            self.session,
            self.tracer.nanos(start.0),
            self.tracer.nanos(end.0),
        ));
    }

    /// Records something that happens now.
    pub(crate) fn event(&self, record: Record) {
        let now = Start::now();
        self.span(now, now, record);
    }

    /// Keeps a text, to name it in records. Takes a lock: not for each chunk.
    pub(crate) fn text(&self, text: &str) -> Text {
        self.tracer.text(text)
    }

    /// Makes a pair of tracks: what a lane sends, and what it receives.
    pub(crate) fn new_track(&self) -> Track {
        self.tracer.new_track()
    }

    /// Names a pair of tracks.
    pub(crate) fn name_track(&self, track: Track, out: String, r#in: String) {
        self.tracer.name_track(track, out, r#in);
    }
}

/// The result of a system call that moves bytes, for its record.
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

/// What a transfer is called in a trace: `what` to a peer.
#[derive(Clone, Copy, Default)]
pub(crate) struct TransferNames {
    pub(crate) write: Text,
    pub(crate) read: Text,
    pub(crate) send: Text,
    pub(crate) receive: Text,
}

impl TransferNames {
    /// The names of transfers to and from a peer.
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
    /// Records that a transfer was posted at a moment; nothing where there is no trace.
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

    /// Records the end of the transfer, with why it has failed if it has.
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
