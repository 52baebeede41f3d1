//! Transfers and their segments.

use std::time::{Duration, Instant};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;
use tcpx::{Op, Segment, TransferState};

use super::events::Events;
use super::region::{Region, RemoteRegion};
use crate::arguments::{self, Bytes, describe, offsets};
use crate::blocking;
use crate::errors::exception;
use crate::owned::Owned;

/// How long `await` polls a transfer that may end at any moment before the event loop waits for it,
/// whose wake-up costs about as much.
const SPIN: Duration = Duration::from_micros(50);

/// A READ, a WRITE, a tagged send or a tagged receive. It keeps its regions registered.
///
/// `await transfer` waits in asyncio until it has ended, and raises its error if it failed.
/// Cancelling the waiting task aborts the transfer and waits until nothing of it is in flight.
#[pyclass(frozen, module = "tcpx")]
pub(crate) struct Transfer {
    // Dropped in this order: a transfer in flight is aborted before the regions can go.
    transfer: Owned<tcpx::Transfer>,
    _regions: Vec<Py<Region>>,
}

impl Transfer {
    pub(super) fn new(transfer: tcpx::Transfer, regions: Vec<Py<Region>>) -> Self {
        Self {
            transfer: Owned::new(transfer),
            _regions: regions,
        }
    }

    pub(super) fn start(&self, py: Python<'_>, notify: Option<&[u8]>) -> PyResult<()> {
        let transfer = self.transfer.get()?;
        py.detach(|| match notify {
            Some(message) => transfer.post_with_notification(message),
            None => transfer.post(),
        })
        .map_err(|error| exception(py, &error))
    }
}

#[pymethods]
impl Transfer {
    /// Starts the transfer and returns without waiting; once it has ended it may be started again
    /// at no set-up cost. With `notify` the peer receives that message once every byte is in place.
    #[pyo3(signature = (notify=None))]
    fn post(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::notify)] notify: Option<Bytes<'_>>,
    ) -> PyResult<()> {
        self.start(py, notify.as_deref())
    }

    /// Returns the state of the transfer. Never blocks, and may move bytes itself.
    fn poll(&self, py: Python<'_>) -> PyResult<&'static str> {
        let transfer = self.transfer.get()?;
        Ok(state_name(py.detach(|| transfer.poll())))
    }

    /// Reports the end of the transfer to `events`, with `key`, and returns its state. No event
    /// comes if it has already ended or was never posted. From here on no polling is needed.
    #[pyo3(signature = (events, key=0))]
    fn arm(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::events)] events: Bound<'_, Events>,
        #[pyo3(from_py_with = arguments::key)] key: u64,
    ) -> PyResult<&'static str> {
        let (transfer, events) = (self.transfer.get()?, events.get().events.get()?);
        let state = py.detach(|| transfer.arm(events, key));
        state.map(state_name).map_err(|error| exception(py, &error))
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let (py, transfer) = (slf.py(), slf.get().transfer.get()?);
        let alone = is_alone(py)?;
        let ended = py.detach(|| match transfer.poll() {
            TransferState::Prepared => Err(tcpx::Error::NotPosted),
            state if state.is_terminal() => Ok(true),
            _ => Ok(alone && poll_shortly(transfer, true) == Some(true)),
        });
        if ended.map_err(|error| exception(py, &error))? {
            slf.get().done(py)?;
            // Nothing to wait for.
            return Ok(PyTuple::empty(py).try_iter()?.into_any());
        }
        static WAIT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let wait = WAIT.import(py, "tcpx._aio", "wait")?;
        wait.call1((slf, !alone))?.call_method0("__await__")
    }

    /// Polls once, or for a moment with `spin`, and returns whether the transfer has ended; None if
    /// it has not and is not likely to do so soon.
    fn _poll_shortly(&self, py: Python<'_>, spin: bool) -> PyResult<Option<bool>> {
        let transfer = self.transfer.get()?;
        Ok(py.detach(|| poll_shortly(transfer, spin)))
    }

    /// Returns whether every byte is in place. Raises the error of a failed transfer.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        let transfer = self.transfer.get()?;
        match py.detach(|| transfer.poll()) {
            TransferState::Done => Ok(true),
            TransferState::Prepared | TransferState::InProgress => Ok(false),
            _ => {
                let error = transfer.error().unwrap_or(tcpx::Error::Aborted);
                Err(exception(py, &error))
            }
        }
    }

    /// Waits until the transfer has ended; raises its error if it failed.
    #[pyo3(signature = (timeout=None))]
    fn wait(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::timeout)] timeout: Option<f64>,
    ) -> PyResult<()> {
        let timeout = blocking::seconds(timeout)?;
        let transfer = self.transfer.get()?;
        blocking::wait(py, timeout, |slice| transfer.wait(slice))
            .map_err(|ended| ended.into_exception(py))
    }

    /// Aborts the transfer. When this returns local memory is no longer read or written for it.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let transfer = self.transfer.get()?;
        py.detach(|| transfer.abort());
        Ok(())
    }

    /// The number of bytes that it moves.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.transfer.facts().bytes()
    }

    /// The length of the message that a tagged receive got; 0 until it is known.
    #[getter]
    fn received(&self) -> PyResult<u64> {
        Ok(self.transfer.get()?.received())
    }

    /// Estimates the duration of a posting from earlier ones, with the error of the estimate; in
    /// seconds.
    fn estimate(&self) -> PyResult<(f64, f64)> {
        let estimate = self.transfer.get()?.estimate();
        Ok((
            estimate.duration.as_secs_f64(),
            estimate.margin.as_secs_f64(),
        ))
    }

    fn __repr__(&self) -> String {
        format!("<tcpx.{:?}>", self.transfer.facts())
    }
}

fn state_name(state: TransferState) -> &'static str {
    match state {
        TransferState::Prepared => "prepared",
        TransferState::InProgress => "in progress",
        TransferState::Done => "done",
        TransferState::Failed => "failed",
        TransferState::Aborting => "aborting",
        TransferState::Aborted => "aborted",
    }
}

/// Returns whether no other task of the event loop is ready to run. asyncio's loops report it; for
/// other loops true is assumed.
fn is_alone(py: Python<'_>) -> PyResult<bool> {
    static RUNNING: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let running = RUNNING
        .import(py, "asyncio", "_get_running_loop")?
        .call0()?;
    match running.getattr_opt("_ready")? {
        Some(ready) => Ok(!ready.is_truthy()?),
        None => Ok(true),
    }
}

/// Polls once, or with `spin` for up to [`SPIN`], if that may be enough; returns whether the
/// transfer has ended. `None` if it has not and is not likely to do so soon.
fn poll_shortly(transfer: &tcpx::Transfer, spin: bool) -> Option<bool> {
    if transfer.poll().is_terminal() {
        return Some(true);
    }
    if transfer.estimate().duration > 2 * SPIN {
        return None;
    }
    let until = Instant::now() + SPIN;
    while spin && Instant::now() < until {
        if transfer.poll().is_terminal() {
            return Some(true);
        }
    }
    Some(false)
}

pub(super) fn op(name: &str) -> PyResult<Op> {
    match name {
        "read" => Ok(Op::Read),
        "write" => Ok(Op::Write),
        _ => Err(PyValueError::new_err(format!(
            "op is {name:?}: expected \"read\" or \"write\""
        ))),
    }
}

/// Pieces of a transfer, converted from Python.
#[derive(Default)]
pub(super) struct Pieces<'py> {
    pieces: Vec<Piece<'py>>,
}

struct Piece<'py> {
    local: Bound<'py, Region>,
    local_offset: usize,
    remote: Bound<'py, RemoteRegion>,
    remote_offset: usize,
    len: usize,
}

type Row<'py> = (
    Bound<'py, Region>,
    usize,
    Bound<'py, RemoteRegion>,
    usize,
    usize,
);

impl<'py> Pieces<'py> {
    /// Converts rows of (local region, offset, remote region, offset, bytes).
    pub(super) fn from_rows(rows: &Bound<'py, PyAny>) -> PyResult<Self> {
        let mut pieces = Vec::with_capacity(rows.len().unwrap_or(0));
        let expected = "(local Region, offset, RemoteRegion, offset, nbytes)";
        let items = rows.try_iter().map_err(|_| {
            let got = describe(rows);
            PyTypeError::new_err(format!(
                "segments: expected a sequence of {expected}, got {got}"
            ))
        })?;
        for (index, row) in items.enumerate() {
            let row = row?;
            let unfit = |why: PyErr| {
                let got = describe(&row);
                let text = format!("segments[{index}]: expected {expected}, got {got}: {why}");
                PyTypeError::new_err(text)
            };
            let (local, local_offset, remote, remote_offset, len): Row<'py> =
                row.extract().map_err(unfit)?;
            pieces.push(Piece {
                local,
                local_offset,
                remote,
                remote_offset,
                len,
            });
        }
        Ok(Self { pieces })
    }

    /// Creates blocks of one size, in two regions.
    pub(super) fn from_blocks(
        local: &Bound<'py, Region>,
        local_offsets: &Bound<'py, PyAny>,
        remote: &Bound<'py, RemoteRegion>,
        remote_offsets: &Bound<'py, PyAny>,
        len: usize,
    ) -> PyResult<Self> {
        let ours = offsets("local_offsets", local_offsets)?;
        let theirs = offsets("remote_offsets", remote_offsets)?;
        if ours.len() != theirs.len() {
            return Err(PyValueError::new_err(format!(
                "local_offsets has {} items and remote_offsets {}: expected as many of each",
                ours.len(),
                theirs.len()
            )));
        }
        let pieces = ours.into_iter().zip(theirs);
        let pieces = pieces.map(|(local_offset, remote_offset)| Piece {
            local: local.clone(),
            local_offset,
            remote: remote.clone(),
            remote_offset,
            len,
        });
        Ok(Self {
            pieces: pieces.collect(),
        })
    }

    pub(super) fn segments(&self) -> impl Iterator<Item = Segment<'_>> {
        self.pieces.iter().map(|piece| Segment {
            local: piece.local.get().region.facts().at(piece.local_offset),
            remote: piece.remote.get().region.at(piece.remote_offset),
            len: piece.len,
        })
    }

    /// Returns the local regions, adjacent repetitions removed.
    pub(super) fn regions(&self) -> Vec<Py<Region>> {
        let mut regions: Vec<Py<Region>> = Vec::new();
        for piece in &self.pieces {
            if !regions.last().is_some_and(|last| last.is(&piece.local)) {
                regions.push(piece.local.clone().unbind());
            }
        }
        regions
    }
}
