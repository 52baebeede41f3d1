//! `connect`: a state machine whose state pointer is in the caller's handle, at byte 80.
//!
//! ```text
//!   NULL ──first call──► state pointer ──connected──► USED_UP
//!                                      └──error─────► USED_UP
//! ```

use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::comm::Link;
use crate::emulator::{Emulator, Flavor};
use crate::error::{Error, Misuse};
use crate::log::warning;
use crate::settings::{FailConnect, Settings};
use crate::socket::{Progress, Socket};
use crate::tables::HANDLE_BYTES;
use crate::wire::{Greeting, Handle, STATE_AT};

/// The acceptor's answer on the control socket once it has all sockets.
pub(crate) const ACCEPTED: [u8; 4] = 0i32.to_le_bytes();

/// How long a refused connect waits before the next attempt.
const RETRY_AFTER: Duration = Duration::from_millis(1);

/// Replaces the state pointer once the handle has connected or failed.
const USED_UP: usize = usize::MAX;

/// Delays the outcome as the settings require.
#[derive(Debug)]
pub(crate) struct Gate {
    calls: u64,
    since: Instant,
}

impl Gate {
    pub(crate) fn new() -> Self {
        Self {
            calls: 0,
            since: Instant::now(),
        }
    }

    /// Returns whether the outcome may be reported. Call it once per call of the plugin.
    pub(crate) fn open(&mut self, settings: &Settings) -> bool {
        self.calls += 1;
        self.calls > settings.pending_calls && self.since.elapsed() >= settings.pending
    }
}

/// Progress of one connect.
#[derive(Debug)]
struct Connecting {
    /// The address of the buffer of the first call.
    home: usize,
    gate: Gate,
    flavor: Flavor,
    handle: Handle,
    from: IpAddr,
    connection: u64,
    fail: bool,
    retries: u32,
    retry_at: Option<Instant>,
    attempt: Option<Socket>,
    /// Connected and greeted: control, then data.
    ready: Vec<Socket>,
    answer: [u8; 4],
    answered: usize,
    /// Whether it is connected, though not reported yet.
    complete: bool,
}

/// Every connect in progress: a pointer from a handle is looked up here, never dereferenced.
static PENDING: Mutex<Vec<(usize, Box<Connecting>)>> = Mutex::new(Vec::new());

fn pending() -> MutexGuard<'static, Vec<(usize, Box<Connecting>)>> {
    PENDING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Performs one call of `connect`: returns the link once it is established.
///
/// # Safety
/// `handle` points to 128 bytes that this call may read and write.
pub(crate) unsafe fn connect(
    emulator: &'static Emulator,
    flavor: Flavor,
    from: IpAddr,
    handle: *mut u8,
) -> Result<Option<Link>, Error> {
    // SAFETY: within the caller's 128 bytes.
    let state_at = unsafe { handle.add(STATE_AT) }.cast::<usize>();
    // SAFETY: as above; the buffer may be unaligned.
    let state = unsafe { state_at.read_unaligned() };
    let mut connecting = match state {
        0 => {
            // SAFETY: as above.
            let bytes = unsafe { handle.cast::<[u8; HANDLE_BYTES]>().read_unaligned() };
            let handle_value = Handle::decode(&bytes)?;
            Box::new(Connecting::begin(
                emulator,
                flavor,
                from,
                handle as usize,
                handle_value,
            ))
        }
        USED_UP => return Err(Misuse::HandleUsed.into()),
        id => take(id, handle as usize, emulator.settings.strict)?,
    };
    let outcome = connecting.step(&emulator.settings);
    let next = match outcome {
        Ok(None) => {
            let id = &raw const *connecting as usize;
            pending().push((id, connecting));
            id
        }
        _ => USED_UP,
    };
    // SAFETY: as above.
    unsafe { state_at.write_unaligned(next) };
    outcome
}

/// Removes a connect in progress from the list.
fn take(id: usize, home: usize, strict: bool) -> Result<Box<Connecting>, Error> {
    let mut pending = pending();
    let Some(at) = pending.iter().position(|(known, _)| *known == id) else {
        // It has ended: this is a copy of the handle made meanwhile.
        return Err(Misuse::HandleUsed.into());
    };
    if strict && pending[at].1.home != home {
        return Err(Misuse::MovedHandle.into());
    }
    Ok(pending.swap_remove(at).1)
}

impl Connecting {
    fn begin(
        emulator: &Emulator,
        flavor: Flavor,
        from: IpAddr,
        home: usize,
        handle: Handle,
    ) -> Self {
        let nth = emulator.connects.fetch_add(1, Relaxed) + 1;
        let fail = match emulator.settings.fail_connect {
            FailConnect::Never => false,
            FailConnect::Always => true,
            FailConnect::Nth(n) => n == nth,
        };
        Self {
            home,
            gate: Gate::new(),
            flavor,
            handle,
            from,
            connection: connection_number(),
            fail,
            retries: 0,
            retry_at: None,
            attempt: None,
            ready: Vec::with_capacity(1 + handle.sockets),
            answer: [0xff; 4],
            answered: 0,
            complete: false,
        }
    }

    fn step(&mut self, settings: &Settings) -> Result<Option<Link>, Error> {
        let open = self.gate.open(settings);
        if self.fail {
            return if open {
                Err(Error::FailConnect)
            } else {
                Ok(None)
            };
        }
        if !self.complete {
            self.complete = self.dial(settings)? && self.confirmed()?;
        }
        if !(open && self.complete) {
            return Ok(None);
        }
        let data = self.ready.split_off(1);
        Ok(self.ready.pop().map(|control| Link { control, data }))
    }

    /// Connects and greets the sockets, one after the other: returns true when all are ready.
    fn dial(&mut self, settings: &Settings) -> Result<bool, Error> {
        while self.ready.len() <= self.handle.sockets {
            if self.retry_at.is_some_and(|at| Instant::now() < at) {
                return Ok(false);
            }
            self.retry_at = None;
            let outcome = match self.attempt.take() {
                Some(socket) => Ok(socket),
                None => Socket::connect(self.handle.address, self.from, settings.socket_buffer),
            };
            match outcome.and_then(|socket| Ok((socket.connected()?, socket))) {
                Ok((true, socket)) => {
                    self.greet(&socket)?;
                    self.ready.push(socket);
                }
                Ok((false, socket)) => {
                    self.attempt = Some(socket);
                    return Ok(false);
                }
                Err(error) => self.retry(&error, settings.connect_retries)?,
            }
        }
        Ok(true)
    }

    /// Retries a refused connect; everything else is an error.
    fn retry(&mut self, error: &io::Error, limit: u32) -> Result<(), Error> {
        if error.kind() != ErrorKind::ConnectionRefused || self.retries >= limit {
            return Err(Error::system("connect", error));
        }
        if self.retries == 0 {
            warning!("connect to {}: {error}; trying again", self.handle.address);
        }
        self.retries += 1;
        self.retry_at = Some(Instant::now() + RETRY_AFTER);
        Ok(())
    }

    fn greet(&self, socket: &Socket) -> Result<(), Error> {
        let greeting = Greeting {
            connection: self.connection,
            index: self.ready.len() as u32,
            sockets: self.handle.sockets as u32,
            plain: self.flavor == Flavor::Plain,
        }
        .encode();
        // A new socket has room for all of it.
        match socket.send(&greeting) {
            Ok(Progress::Moved(n)) if n == greeting.len() => Ok(()),
            Ok(_) => Err(Error::System {
                what: "sending a greeting",
                errno: libc::EIO,
            }),
            Err(error) => Err(Error::system("sending a greeting", &error)),
        }
    }

    /// Returns whether the other side has accepted. Plain comms are usable before that.
    fn confirmed(&mut self) -> Result<bool, Error> {
        if self.flavor == Flavor::Plain {
            return Ok(true);
        }
        let what = "waiting for the other side to accept";
        match self.ready[0].receive(&mut self.answer[self.answered..]) {
            Ok(Progress::Moved(n)) => self.answered += n,
            Ok(Progress::Blocked) => {}
            Ok(Progress::Closed) => {
                return Err(Error::System {
                    what,
                    errno: libc::ECONNRESET,
                });
            }
            Err(error) => return Err(Error::system(what, &error)),
        }
        match self.answered == self.answer.len() {
            true if self.answer == ACCEPTED => Ok(true),
            true => Err(Error::System {
                what,
                errno: libc::EPROTO,
            }),
            false => Ok(false),
        }
    }
}

/// Distinguishes the connections that arrive at one listener.
fn connection_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    u64::from(std::process::id()) << 32 | NEXT.fetch_add(1, Relaxed)
}
