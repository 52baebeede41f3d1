//! Turns records into events of the Trace Event Format, which ui.perfetto.dev and chrome://tracing
//! read.
//!
//! | track | what is on it |
//! |---|---|
//! | a thread of the process | what the thread does: complete events (`X`) |
//! | two for each lane, with numbers that no thread has | what the lane sends, receives and waits for (`X`) |
//! | asynchronous (`b`, `n`, `e`) | transfers, this session's chunks in flight, copies by devices: they overlap |
//!
//! Flows (`s`, `t`) lead from the posting of a transfer to its chunks on lanes, in order.

use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::record::{End, Kind, Record, Text, Track, Value};
use super::tracer::TrackId;

/// The first track number of lanes, above any thread ID: Linux has none above 2²².
const FIRST_LANE: u32 = 1 << 23;

/// The texts that records refer to by number.
#[derive(Default)]
pub(super) struct Names {
    texts: Vec<Arc<str>>,
}

impl Names {
    pub(super) fn learn(&mut self, texts: &[Arc<str>]) {
        self.texts.extend_from_slice(&texts[self.texts.len()..]);
    }

    fn text(&self, text: Text) -> &str {
        let known = self.texts.get(text.0 as usize);
        known.map_or("", |text| text)
    }
}

/// The start of a trace on the machine's clocks.
#[derive(Clone, Copy)]
pub(super) struct Clock {
    /// The monotonic clock, which all processes of a machine share: their traces fit together.
    pub(super) monotonic: Duration,
    pub(super) unix: Duration,
}

impl Clock {
    pub(super) fn now() -> Self {
        Self {
            monotonic: tcpx_net::process::monotonic(),
            unix: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default(),
        }
    }
}

/// Writes events.
pub(super) struct Json {
    pid: u32,
    clock: Clock,
    pub(super) names: Names,
    /// The number of device copies written so far, which numbers them.
    copies: u64,
    buffer: String,
}

impl Json {
    pub(super) fn new(clock: Clock) -> Self {
        Self {
            pid: std::process::id(),
            clock,
            names: Names::default(),
            copies: 0,
            buffer: String::new(),
        }
    }

    pub(super) fn take_buffer(&mut self) -> String {
        std::mem::take(&mut self.buffer)
    }

    pub(super) fn give_buffer(&mut self, mut buffer: String) {
        buffer.clear();
        self.buffer = buffer;
    }

    /// Returns the first events: the name of the process, and when the trace was opened.
    pub(super) fn start(&self) -> String {
        let pid = self.pid;
        let program = std::env::args_os().next().unwrap_or_default();
        let program = std::path::Path::new(&program).file_name();
        let program = program.unwrap_or_default().to_string_lossy();
        let host = tcpx_net::host_name();
        let name = escaped(&format!("{program} on {host}"));
        let version = env!("CARGO_PKG_VERSION");
        format!(
            "{{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":{pid},\"args\":{{\"name\":\"{name}\"}}}},\n\
             {{\"name\":\"trace opened\",\"ph\":\"i\",\"s\":\"p\",\"pid\":{pid},\"tid\":0,\"ts\":{},\
             \"args\":{{\"version\":\"{version}\",\"unix_us\":{}}}}}",
            micros(self.clock.monotonic.as_nanos() as u64),
            self.clock.unix.as_micros(),
        )
    }

    /// Returns the events that name a track.
    pub(super) fn name(&self, track: TrackId, name: &str) -> String {
        let (pid, tid, name) = (self.pid, number(track), escaped(name));
        let order = match track {
            TrackId::Thread(_) => 0,
            TrackId::Out(_) | TrackId::In(_) => tid,
        };
        format!(
            "{{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":{pid},\"tid\":{tid},\"args\":{{\"name\":\"{name}\"}}}},\n\
             {{\"name\":\"thread_sort_index\",\"ph\":\"M\",\"pid\":{pid},\"tid\":{tid},\"args\":{{\"sort_index\":{order}}}}}"
        )
    }

    /// Returns an event that counts the records dropped since the last such event.
    pub(super) fn lost(&self, count: u64, now: u64) -> String {
        self.note("events dropped", count, now)
    }

    /// Returns the last event, which counts the records that are missing in the file.
    pub(super) fn end(&self, dropped: u64, now: u64) -> String {
        self.note("trace closed", dropped, now)
    }

    fn note(&self, name: &str, dropped: u64, now: u64) -> String {
        let (pid, ts) = (self.pid, self.time(now));
        format!(
            "{{\"name\":\"{name}\",\"ph\":\"i\",\"s\":\"p\",\"pid\":{pid},\"tid\":0,\"ts\":{ts},\
             \"args\":{{\"dropped\":{dropped}}}}}"
        )
    }

    /// Appends the events of a record that a thread has made.
    pub(super) fn record(&mut self, record: &Record, thread: u32, out: &mut String) {
        // Ignore results: writing to a string does not fail.
        let _ = match Shape::of(record.kind) {
            Shape::OfThread(name) => self.complete(record, name, thread, out),
            Shape::Out(name) => {
                self.complete(record, name, number(TrackId::Out(record.track)), out)
            }
            Shape::In(name) => self.complete(record, name, number(TrackId::In(record.track)), out),
            Shape::Instant(name) => self.instant(record, name, thread, out),
            Shape::Copy(name) => self.copy(record, name, thread, out),
            Shape::Transfer => self.transfer(record, thread, out),
            Shape::Chunk => self.chunk(record, thread, out),
        };
    }

    fn complete(
        &self,
        record: &Record,
        name: &str,
        tid: u32,
        out: &mut String,
    ) -> std::fmt::Result {
        let (pid, ts, dur) = (self.pid, self.time(record.start), micros(record.nanos));
        write!(
            out,
            "{{\"name\":\"{name}\",\"ph\":\"X\",\"pid\":{pid},\"tid\":{tid},\"ts\":{ts},\"dur\":{dur}"
        )?;
        self.args(record, out)?;
        out.push('}');
        let phase = match record.kind {
            Kind::Post => "s",
            Kind::SendWrite | Kind::ReceiveAnswer | Kind::CopyChunk => "t",
            _ => return Ok(()),
        };
        // Perfetto reads plain hexadecimal numbers only.
        let flow = u64::from(record.session) << 44 | record.transfer;
        write!(
            out,
            ",\n{{\"name\":\"chunks of a transfer\",\"cat\":\"flow {pid}\",\"ph\":\"{phase}\",\"bp\":\"e\",\
             \"id\":\"{flow:x}\",\"pid\":{pid},\"tid\":{tid},\"ts\":{ts}}}"
        )?;
        // Mark the same moment on the chunk: it was prepared or requested before, and moves from
        // here on. There is no mark at the end: another thread may see the peer's acknowledgement
        // first.
        let begins = match record.kind {
            Kind::SendWrite => "its frame begins",
            Kind::ReceiveAnswer => "its answer begins",
            _ => return Ok(()),
        };
        out.push_str(",\n");
        let id = chunk_id(record);
        self.asynchronous(("chunk", &id), (begins, "n"), ts, tid, out)?;
        out.push('}');
        Ok(())
    }

    fn instant(
        &self,
        record: &Record,
        name: &str,
        thread: u32,
        out: &mut String,
    ) -> std::fmt::Result {
        let tid = match record.track {
            Track(0) => thread,
            track => number(TrackId::Out(track)),
        };
        let (pid, ts) = (self.pid, self.time(record.start));
        write!(
            out,
            "{{\"name\":\"{name}\",\"ph\":\"i\",\"s\":\"t\",\"pid\":{pid},\"tid\":{tid},\"ts\":{ts}"
        )?;
        self.args(record, out)?;
        out.push('}');
        Ok(())
    }

    fn copy(
        &mut self,
        record: &Record,
        name: &str,
        thread: u32,
        out: &mut String,
    ) -> std::fmt::Result {
        self.copies += 1;
        let id = format!("{}", self.copies);
        let [start, end] = [record.start, record.start + record.nanos].map(|at| self.time(at));
        self.asynchronous(("copy", &id), (name, "b"), start, thread, out)?;
        self.args(record, out)?;
        out.push_str("},\n");
        self.asynchronous(("copy", &id), (name, "e"), end, thread, out)?;
        out.push('}');
        Ok(())
    }

    fn transfer(&self, record: &Record, thread: u32, out: &mut String) -> std::fmt::Result {
        let id = format!("{}.{}", record.session, record.transfer);
        let name = match record.value {
            Value::Text(text) => escaped(self.names.text(text)),
            _ => "waits to start".into(),
        };
        let phase = match record.kind {
            Kind::Posted => "b",
            Kind::Ended => "e",
            _ => "n",
        };
        let ts = self.time(record.start);
        self.asynchronous(("transfer", &id), (&name, phase), ts, thread, out)?;
        self.args(record, out)?;
        out.push('}');
        Ok(())
    }

    fn chunk(&self, record: &Record, thread: u32, out: &mut String) -> std::fmt::Result {
        let (id, ts) = (chunk_id(record), self.time(record.start));
        let phase = if record.kind == Kind::Taken { "b" } else { "e" };
        self.asynchronous(("chunk", &id), ("chunk in flight", phase), ts, thread, out)?;
        self.args(record, out)?;
        out.push('}');
        if record.kind == Kind::Taken && record.seq == 0 {
            let id = format!("{}.{}", record.session, record.transfer);
            out.push_str(",\n");
            self.asynchronous(("transfer", &id), ("first chunk", "n"), ts, thread, out)?;
            out.push('}');
        }
        Ok(())
    }

    /// Appends an asynchronous event without its arguments and its closing brace.
    fn asynchronous(
        &self,
        (category, id): (&str, &str),
        (name, phase): (&str, &str),
        ts: Micros,
        tid: u32,
        out: &mut String,
    ) -> std::fmt::Result {
        let pid = self.pid;
        write!(
            out,
            "{{\"name\":\"{name}\",\"cat\":\"{category}\",\"ph\":\"{phase}\",\
             \"id2\":{{\"local\":\"{id}\"}},\"pid\":{pid},\"tid\":{tid},\"ts\":{ts}"
        )
    }

    fn args(&self, record: &Record, out: &mut String) -> std::fmt::Result {
        let mut args = Args {
            out,
            is_first: true,
        };
        let kind = record.kind;
        if record.transfer != 0 {
            args.number("transfer", record.transfer)?;
            match kind {
                Kind::Posted => args.number("chunks", record.seq.into())?,
                Kind::Post | Kind::Queued | Kind::Ended | Kind::CopyOnDevice => {}
                _ => args.number("chunk", record.seq.into())?,
            }
        }
        if record.bytes != 0 {
            args.number("bytes", record.bytes)?;
        }
        if matches!(kind, Kind::Taken) && record.track != Track(0) {
            args.number("lane_track", number(TrackId::Out(record.track)).into())?;
        }
        match record.value {
            Value::Bytes(bytes) => args.number("result", bytes)?,
            Value::Errno(errno) => {
                let error = std::io::Error::from_raw_os_error(errno).to_string();
                args.text("error", &error)?;
            }
            Value::Text(text) if matches!(kind, Kind::LaneLost | Kind::LaneBack) => {
                args.text("cause", self.names.text(text))?;
            }
            Value::Text(_) | Value::Nothing => {}
        }
        match (record.end, kind) {
            (End::Done, Kind::Ended) => args.text("end", "done")?,
            (End::Done, _) => {}
            (End::Failed, _) => args.text("end", "failed")?,
            (End::Aborted, _) => args.text("end", "aborted")?,
            (End::LaneLost, _) => args.text("end", "lane lost")?,
        }
        if record.text != Text(0) {
            args.text("cause", self.names.text(record.text))?;
        }
        args.close();
        Ok(())
    }

    /// Returns a time of the trace in microseconds of the machine's monotonic clock.
    fn time(&self, nanos: u64) -> Micros {
        micros(self.clock.monotonic.as_nanos() as u64 + nanos)
    }
}

/// How records of a kind are shown.
enum Shape {
    OfThread(&'static str),
    Out(&'static str),
    In(&'static str),
    Instant(&'static str),
    Copy(&'static str),
    Transfer,
    Chunk,
}

impl Shape {
    fn of(kind: Kind) -> Self {
        match kind {
            Kind::Post => Self::OfThread("post"),
            Kind::Sendmsg => Self::OfThread("sendmsg"),
            Kind::Recvmsg => Self::OfThread("recvmsg"),
            Kind::ProcessVmReadv => Self::OfThread("process_vm_readv"),
            Kind::ProcessVmWritev => Self::OfThread("process_vm_writev"),
            Kind::CopyChunk => Self::OfThread("copy chunk"),
            Kind::CpuCopy => Self::OfThread("copy by the CPU"),
            Kind::Sleep => Self::OfThread("sleep"),
            Kind::SendWrite => Self::Out("send WRITE"),
            Kind::SendAnswer => Self::Out("answer READ"),
            Kind::WaitSocket => Self::Out("wait: socket"),
            Kind::WaitWindow => Self::Out("wait: window"),
            Kind::WaitStaging => Self::Out("wait: device copy"),
            Kind::ReceiveAnswer => Self::In("receive READ"),
            Kind::ReceiveWrite => Self::In("receive WRITE"),
            Kind::WaitSlot => Self::In("wait: slot"),
            Kind::WaitRoom => Self::In("wait: application"),
            Kind::Posted | Kind::Queued | Kind::Ended => Self::Transfer,
            Kind::Taken | Kind::Settled => Self::Chunk,
            Kind::CopyToHost => Self::Copy("device to host"),
            Kind::CopyToDevice => Self::Copy("host to device"),
            Kind::CopyOnDevice => Self::Copy("device to device"),
            Kind::NoSlot => Self::Instant("no slot is free"),
            Kind::LaneLost => Self::Instant("lane lost"),
            Kind::LaneBack => Self::Instant("lane back"),
        }
    }
}

/// The arguments of an event.
struct Args<'a> {
    out: &'a mut String,
    is_first: bool,
}

impl Args<'_> {
    fn key(&mut self, key: &str) -> std::fmt::Result {
        let before = if self.is_first { ",\"args\":{" } else { "," };
        self.is_first = false;
        write!(self.out, "{before}\"{key}\":")
    }

    fn number(&mut self, key: &str, number: u64) -> std::fmt::Result {
        self.key(key)?;
        write!(self.out, "{number}")
    }

    fn text(&mut self, key: &str, text: &str) -> std::fmt::Result {
        self.key(key)?;
        write!(self.out, "\"{}\"", escaped(text))
    }

    fn close(self) {
        if !self.is_first {
            self.out.push('}');
        }
    }
}

/// Returns the number of a track in the file.
fn number(track: TrackId) -> u32 {
    match track {
        TrackId::Thread(id) => id,
        TrackId::Out(Track(track)) => FIRST_LANE + 2 * track,
        TrackId::In(Track(track)) => FIRST_LANE + 2 * track + 1,
    }
}

/// Returns the ID of this session's chunk, unique in the file.
fn chunk_id(record: &Record) -> String {
    format!("{}.{}.{}", record.session, record.transfer, record.seq)
}

/// A time in microseconds, to the nanosecond.
#[derive(Clone, Copy)]
struct Micros(u64);

impl std::fmt::Display for Micros {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{:03}", self.0 / 1000, self.0 % 1000)
    }
}

fn micros(nanos: u64) -> Micros {
    Micros(nanos)
}

/// Escapes text for a JSON string.
pub(super) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '"' | '\\' => out.extend(['\\', char]),
            char if char < ' ' => _ = write!(out, "\\u{:04x}", char as u32),
            char => out.push(char),
        }
    }
    out
}
