//! Configured failures, and the seeded random numbers.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::error::Error;

/// A table member that can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are those of the table's members")]
pub enum Call {
    Listen,
    Connect,
    Accept,
    RegMr,
    Isend,
    Irecv,
    Test,
    IrecvConsumed,
    /// Any other call; never made to fail.
    Other,
}

impl Call {
    const NAMES: [(&'static str, Self); 8] = [
        ("listen", Self::Listen),
        ("connect", Self::Connect),
        ("accept", Self::Accept),
        ("regMr", Self::RegMr),
        ("isend", Self::Isend),
        ("irecv", Self::Irecv),
        ("test", Self::Test),
        ("irecvConsumed", Self::IrecvConsumed),
    ];

    /// Returns the call of that name in the function table.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::NAMES
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, call)| *call)
    }
}

/// Makes the `nth` call of `call` in this process return `code`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InjectedError {
    /// The member.
    pub call: Call,
    /// Counted from 1.
    pub nth: u64,
    /// The result it returns, without doing anything.
    pub code: c_int,
}

/// Counts calls and decides which of them fail.
#[derive(Debug)]
pub(crate) struct Faults {
    errors: Vec<InjectedError>,
    calls: [AtomicU64; 9],
}

impl Faults {
    pub(crate) fn new(errors: Vec<InjectedError>) -> Self {
        Self {
            errors,
            calls: Default::default(),
        }
    }

    /// Returns the configured failure, if any. Call it once per call; costs one branch without
    /// failures.
    pub(crate) fn check(&self, call: Call) -> Result<(), Error> {
        if self.errors.is_empty() {
            return Ok(());
        }
        let nth = self.calls[call as usize].fetch_add(1, Relaxed) + 1;
        match self
            .errors
            .iter()
            .find(|error| error.call == call && error.nth == nth)
        {
            Some(error) => Err(Error::Injected {
                call,
                nth,
                code: error.code,
            }),
            None => Ok(()),
        }
    }
}

/// A small generator (SplitMix64): the same seed gives the same pages, fragments and orders.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `limit`, which is not 0.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for end in (1..items.len()).rev() {
            items.swap(end, self.below(end + 1));
        }
    }
}
