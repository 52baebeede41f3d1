//! Descriptors for event loops, and their events.

use std::os::fd::{AsRawFd, RawFd};

use pyo3::prelude::*;

use crate::arguments;
use crate::errors::exception;
use crate::owned::Owned;

/// A descriptor that becomes readable when a transfer has ended or a notification has arrived, for
/// event loops other than asyncio's: `selectors`, trio, libuv.
///
/// Arm transfers with `Transfer.arm`, subscribe to notifications with `Session.subscribe`, wait
/// until `fileno()` is readable, then call `take()`. Do not read from the descriptor.
#[pyclass(frozen, module = "tcpx")]
pub(crate) struct Events {
    pub(super) events: Owned<tcpx::Events>,
}

#[pymethods]
impl Events {
    #[new]
    pub(super) fn new(py: Python<'_>) -> PyResult<Self> {
        let events = tcpx::Events::new().map_err(|error| exception(py, &error))?;
        Ok(Self {
            events: Owned::new(events),
        })
    }

    /// Returns the descriptor. It belongs to this object: wait for it, and neither read from it nor
    /// close it.
    pub(super) fn fileno(&self) -> PyResult<RawFd> {
        Ok(self.events.get()?.as_raw_fd())
    }

    /// Takes the events since the last call, at most `limit` ended transfers, and makes the
    /// descriptor unreadable unless more are left. Never blocks.
    #[pyo3(signature = (limit=None))]
    fn take(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::limit)] limit: Option<usize>,
    ) -> PyResult<Happened> {
        let taken = self.events.get()?.take(limit.unwrap_or(usize::MAX));
        let taken = taken.map_err(|error| exception(py, &error))?;
        Ok(Happened {
            ended: taken.ended,
            notified: taken.notified,
            closed: taken.closed,
            more: taken.more,
        })
    }

    fn __repr__(&self) -> String {
        match self.fileno() {
            Ok(descriptor) => format!("<tcpx.Events on descriptor {descriptor}>"),
            Err(_) => "<tcpx.Events of another process>".to_owned(),
        }
    }
}

/// The result of `Events.take`.
#[pyclass(frozen, get_all, module = "tcpx")]
pub(crate) struct Happened {
    /// The keys of armed transfers that have ended, in order.
    ended: Vec<u64>,
    /// Whether a notification has arrived; it may have been taken since.
    notified: bool,
    /// Whether a subscribed session was closed.
    closed: bool,
    /// Whether more transfers have ended: the descriptor stays readable.
    more: bool,
}

#[pymethods]
impl Happened {
    fn __repr__(&self) -> String {
        let word = |yes, no| if yes { "True" } else { no };
        format!(
            "<tcpx.Happened ended={:?} notified={} closed={} more={}>",
            self.ended,
            word(self.notified, "False"),
            word(self.closed, "False"),
            word(self.more, "False"),
        )
    }
}
