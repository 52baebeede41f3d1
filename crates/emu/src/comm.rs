//! Comms: established connections.

use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use crate::emulator::{Emulator, Flavor};
use crate::error::{Error, Misuse};
use crate::memory::Memory;
use crate::receive::ReceiveComm;
use crate::request::Request;
use crate::send::SendComm;
use crate::socket::Socket;

/// The sockets of a connection.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) control: Socket,
    pub(crate) data: Vec<Socket>,
}

/// The value behind `sendComm` and `recvComm`.
#[derive(Debug)]
pub(crate) enum Comm {
    Send(Box<SendComm>),
    Receive(Box<ReceiveComm>),
}

impl Comm {
    /// Passes ownership of the comm to the caller.
    pub(crate) fn into_raw(self, emulator: &Emulator) -> *mut c_void {
        emulator.comms.fetch_add(1, Relaxed);
        Box::into_raw(Box::new(self)).cast()
    }

    /// Returns the comm behind a pointer of the caller.
    ///
    /// # Safety
    /// Null, or an open comm that no other call uses until `'a` ends: the caller serialises data
    /// calls on one comm.
    pub(crate) unsafe fn from_raw<'a>(comm: *mut c_void) -> Result<&'a mut Self, Misuse> {
        // SAFETY: guaranteed by the caller.
        unsafe { comm.cast::<Self>().as_mut() }.ok_or(Misuse::Null { what: "the comm" })
    }

    /// Takes ownership of the comm back and closes it.
    ///
    /// # Safety
    /// As [`Comm::from_raw`], and it is never used again.
    pub(crate) unsafe fn close(emulator: &Emulator, comm: *mut c_void) {
        if !comm.is_null() {
            // SAFETY: guaranteed by the caller.
            drop(unsafe { Box::from_raw(comm.cast::<Self>()) });
            emulator.comms.fetch_sub(1, Relaxed);
        }
    }

    pub(crate) fn sender(&mut self, call: &'static str) -> Result<&mut SendComm, Misuse> {
        match self {
            Self::Send(comm) => Ok(comm),
            Self::Receive(_) => Err(Misuse::WrongDirection { call }),
        }
    }

    pub(crate) fn receiver(&mut self, call: &'static str) -> Result<&mut ReceiveComm, Misuse> {
        match self {
            Self::Receive(comm) => Ok(comm),
            Self::Send(_) => Err(Misuse::WrongDirection { call }),
        }
    }

    pub(crate) fn flavor(&self) -> Flavor {
        match self {
            Self::Send(comm) => comm.flavor(),
            Self::Receive(comm) => comm.flavor(),
        }
    }

    /// Performs `test`: returns the size once the request is done.
    pub(crate) fn test(&mut self, request: *mut Request) -> Result<Option<c_int>, Error> {
        match self {
            Self::Send(comm) => comm.test(request),
            Self::Receive(comm) => comm.test(request),
        }
    }
}

/// Common state of send and receive comms.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) emulator: &'static Emulator,
    pub(crate) flavor: Flavor,
    pub(crate) memory: Memory,
    /// Number of calls of isend or irecv, for `TCPX_EMU_NULL_REQ_EVERY`.
    posts: u64,
    /// The first failure, which is final.
    failed: Option<Error>,
    /// When the oldest request became complete, for `TCPX_EMU_DELAY_US`.
    complete_since: Option<Instant>,
    pub(crate) counts: Counts,
}

/// Statistics of a comm.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) bytes: u64,
    pub(crate) chunks: u64,
    pub(crate) null_requests: u64,
    pub(crate) stalls: u64,
}

impl Context {
    pub(crate) fn new(emulator: &'static Emulator, flavor: Flavor, memory: Memory) -> Self {
        Self {
            emulator,
            flavor,
            memory,
            posts: 0,
            failed: None,
            complete_since: None,
            counts: Counts::default(),
        }
    }

    /// Returns whether this isend or irecv must return without a request.
    pub(crate) fn null_request(&mut self) -> bool {
        let every = self.emulator.settings.null_request_every;
        self.posts += 1;
        let null = every != 0 && self.posts.is_multiple_of(every);
        self.counts.null_requests += u64::from(null);
        null
    }

    /// Returns the error that ended this comm, if one did.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Records an error that ends the comm.
    pub(crate) fn fail(&mut self, error: Error) -> Error {
        self.failed = Some(error.clone());
        error
    }

    /// Returns whether a completed request may be reported: after the configured delay.
    pub(crate) fn may_report(&mut self) -> bool {
        let delay = self.emulator.settings.delay;
        if delay.is_zero() {
            return true;
        }
        let since = *self.complete_since.get_or_insert_with(Instant::now);
        let due = since.elapsed() >= delay;
        if due {
            self.complete_since = None;
        }
        due
    }

    /// Returns the error for a peer that hung up, or a broken connection.
    pub(crate) fn lost(&self, what: &'static str) -> Error {
        match self.flavor {
            Flavor::Tcpx => Error::ControlLost { what },
            Flavor::Plain => Error::RemoteClosed { what },
        }
    }
}
