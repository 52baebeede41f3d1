//! The thread that turns records into lines of the file.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::file::{Batch, Finished, Output};
use super::json::{Clock, Json};
use super::tracer::{Pending, Tracer};
use crate::log::limited;

/// The longest time between two writes.
const INTERVAL: Duration = Duration::from_millis(100);

/// The number of bytes to write at once.
const BATCH_BYTES: usize = 256 << 10;

/// Runs the thread.
pub(super) fn run(tracer: &Tracer) {
    // `Tracer::finish` writes the last records.
    while !tracer.wait(INTERVAL) {
        tracer.write();
    }
}

/// Writes records to the file, until it is full or broken.
pub(super) struct Writer {
    /// None once the file is complete or broken.
    output: Option<Output>,
    json: Json,
    /// The number of records that are missing in the file.
    dropped: u64,
    is_full: bool,
}

/// The outcome of [`Writer::write`].
pub(super) struct Written {
    pub(super) is_full: bool,
    pub(super) is_broken: bool,
}

impl Writer {
    pub(super) fn new(output: Output, clock: Clock) -> Self {
        let mut writer = Self {
            output: Some(output),
            json: Json::new(clock),
            dropped: 0,
            is_full: false,
        };
        let start = writer.json.start();
        let mut batch = Batch::default();
        writer.add_lines(&mut batch, &start, 0);
        writer.append(&mut batch);
        writer
    }

    /// Returns the path of the file, while it can be written.
    pub(super) fn path(&self) -> Option<PathBuf> {
        self.output.as_ref().map(|output| output.path().to_owned())
    }

    /// Takes over the texts that the next records to be written may refer to.
    pub(super) fn learn(&mut self, texts: &[Arc<str>]) {
        self.json.names.learn(texts);
    }

    /// Writes records and names of tracks.
    pub(super) fn write(&mut self, pending: &Pending, unseated: u64, now: u64) -> Written {
        let mut batch = Batch::default();
        for (track, name) in &pending.names {
            let line = self.json.name(*track, name);
            self.add_lines(&mut batch, &line, 0);
        }
        let mut lost = unseated;
        for (ring, until) in &pending.rings {
            // Records added meanwhile wait for the next call: no thread delays the others.
            lost += ring.drain(*until, |record| {
                let mut lines = self.json.take_buffer();
                self.json.record(&record, ring.thread, &mut lines);
                self.add_lines(&mut batch, &lines, 1);
                self.json.give_buffer(lines);
                if batch.len() >= BATCH_BYTES {
                    self.append(&mut batch);
                }
            });
        }
        self.dropped += lost;
        if lost > 0 && !self.is_full {
            let line = self.json.lost(lost, now);
            self.add_lines(&mut batch, &line, 0);
        }
        self.append(&mut batch);
        Written {
            is_full: self.is_full,
            is_broken: self.output.is_none(),
        }
    }

    /// Adds the lines of `records` records to a batch.
    fn add_lines(&mut self, batch: &mut Batch, lines: &str, records: u64) {
        let Some(output) = self.output.as_ref().filter(|_| !self.is_full) else {
            self.dropped += records;
            return;
        };
        // Add all lines of a record, or none.
        if !output.add(batch, lines.as_bytes()) {
            self.is_full = true;
            self.dropped += records;
            limited!(
                WARN,
                file = %output.path().display(),
                bytes = output.limit(),
                remedy = "raise TCPX_TRACE_BYTES, or trace a shorter run",
                "the trace is full: later events are not recorded"
            );
        }
    }

    fn append(&mut self, batch: &mut Batch) {
        if batch.len() == 0 {
            return;
        }
        if let Some(output) = &mut self.output
            && let Err(error) = output.append(batch)
        {
            limited!(
                WARN,
                file = %output.path().display(),
                %error,
                remedy = "make room on the disk, then start the session again to record",
                "the trace ends here, transfers go on: it can no longer be written"
            );
            self.output = None;
        }
    }

    /// Completes the file.
    pub(super) fn finish(&mut self, now: u64) -> Option<Finished> {
        let mut batch = Batch::last();
        self.is_full = false;
        let line = self.json.end(self.dropped, now);
        self.add_lines(&mut batch, &line, 0);
        self.append(&mut batch);
        let output = self.output.take()?;
        let path = output.path().to_owned();
        if self.dropped > 0 {
            limited!(
                WARN,
                file = %path.display(),
                dropped = self.dropped,
                remedy = "raise TCPX_TRACE_BYTES, or trace a shorter run",
                "events are missing in the trace: it was full, or they came faster than they could \
                 be written"
            );
        }
        match output.finish() {
            Ok(finished) => {
                tracing::info!(file = %path.display(), "the trace is complete");
                Some(finished)
            }
            Err(error) => {
                limited!(
                    WARN,
                    file = %path.display(),
                    %error,
                    remedy = "make room on the disk; viewers can read what is there",
                    "the trace could not be completed"
                );
                None
            }
        }
    }
}
