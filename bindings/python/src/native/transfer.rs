//! Transfers, and the segments that they are made of.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tcpx::{Op, Segment, TransferState};

use super::region::{Region, RemoteRegion};
use crate::blocking;
use crate::errors::exception;
use crate::owned::Owned;

/// A READ, a WRITE, a tagged send or a tagged receive. It keeps its regions registered.
#[pyclass(frozen, module = "tcpx")]
pub(crate) struct Transfer {
    // Dropped in this order: what is in flight is aborted before the regions can go.
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
    /// Starts the transfer and returns without waiting; once it has ended it may be started again at no set-up
    /// cost. With `notify` the peer receives that message once every byte is in place.
    #[pyo3(signature = (notify=None))]
    fn post(&self, py: Python<'_>, notify: Option<&[u8]>) -> PyResult<()> {
        self.start(py, notify)
    }

    /// Where the transfer stands. Never waits, and may move bytes itself.
    fn poll(&self, py: Python<'_>) -> PyResult<&'static str> {
        let transfer = self.transfer.get()?;
        Ok(match py.detach(|| transfer.poll()) {
            TransferState::Prepared => "prepared",
            TransferState::InProgress => "in progress",
            TransferState::Done => "done",
            TransferState::Failed => "failed",
            TransferState::Aborting => "aborting",
            TransferState::Aborted => "aborted",
        })
    }

    /// Whether every byte is where it belongs. Raises why not, when the transfer has failed.
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

    /// Waits until the transfer has ended; raises why, when it failed.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let timeout = blocking::seconds(timeout)?;
        let transfer = self.transfer.get()?;
        blocking::wait(py, timeout, |slice| transfer.wait(slice))
            .map_err(|ended| ended.into_exception(py))
    }

    /// Gives the transfer up. When this returns local memory is no longer read or written on its behalf.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let transfer = self.transfer.get()?;
        py.detach(|| transfer.abort());
        Ok(())
    }

    /// Bytes that it moves.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.transfer.facts().bytes()
    }

    /// Bytes of the message that a tagged receive got; 0 until that is known.
    #[getter]
    fn received(&self) -> PyResult<u64> {
        Ok(self.transfer.get()?.received())
    }

    /// How long a posting is going to take, judged by earlier ones, and how far off that may be; in seconds.
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

pub(super) fn op(name: &str) -> PyResult<Op> {
    match name {
        "read" => Ok(Op::Read),
        "write" => Ok(Op::Write),
        _ => Err(PyValueError::new_err(format!(
            "op is {name:?}: expected \"read\" or \"write\""
        ))),
    }
}

/// Pieces of a transfer as Python gives them.
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
    /// From rows of (local region, offset, remote region, offset, bytes).
    pub(super) fn from_rows(rows: &Bound<'py, PyAny>) -> PyResult<Self> {
        let mut pieces = Vec::with_capacity(rows.len().unwrap_or(0));
        for row in rows.try_iter()? {
            let (local, local_offset, remote, remote_offset, len): Row<'py> = row?.extract()?;
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

    /// Blocks of one size, in two regions.
    pub(super) fn from_blocks(
        local: &Bound<'py, Region>,
        local_offsets: &Bound<'py, PyAny>,
        remote: &Bound<'py, RemoteRegion>,
        remote_offsets: &Bound<'py, PyAny>,
        len: usize,
    ) -> PyResult<Self> {
        let (ours, theirs) = (offsets(local_offsets)?, offsets(remote_offsets)?);
        if ours.len() != theirs.len() {
            return Err(PyValueError::new_err(format!(
                "{} local offsets and {} remote ones: expected as many of each",
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

    /// The local regions, each once where its pieces follow each other.
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

/// Whole numbers from a list or anything alike; numpy arrays are turned into lists by themselves, which is many times faster than
/// asking for one element after the other.
fn offsets(numbers: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    match numbers.getattr_opt("tolist")? {
        Some(tolist) => tolist.call0()?.extract(),
        None => numbers.extract(),
    }
}
