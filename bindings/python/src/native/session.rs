//! Sessions.

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyList};
use tcpx::stats::openmetrics;
use tcpx::{Config, MemoryKind};

use super::events::Events;
use super::machine::{self, Setting};
use super::peer::Peer;
use super::region::Region;
use super::region::RemoteRegion;
use super::stats;
use super::transfer::{self, Pieces, Transfer};
use crate::arguments::{self, Bytes};
use crate::errors::exception;
use crate::owned::Owned;
use crate::{blocking, log};

/// Registers memory, knows peers, makes transfers. A session listens, and serves its memory, from
/// its creation to `close`, without any action of Python code.
#[pyclass(frozen, module = "tcpx")]
pub(crate) struct Session {
    session: Owned<tcpx::Session>,
    /// Notifications taken and given back, oldest first: they come before new ones.
    given_back: Owned<Mutex<VecDeque<tcpx::Notification>>>,
    /// The descriptor that `fileno` returns, once requested.
    events: PyOnceLock<Py<Events>>,
}

/// A message from a peer.
#[pyclass(frozen, module = "tcpx")]
pub(crate) struct Notification {
    notification: tcpx::Notification,
}

#[pymethods]
impl Notification {
    /// The name of the sending session.
    #[getter]
    fn sender(&self) -> &str {
        &self.notification.from
    }

    /// Any bytes, possibly none.
    #[getter]
    fn message<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.notification.message)
    }

    fn __repr__(&self) -> String {
        let text = String::from_utf8_lossy(&self.notification.message);
        format!("<tcpx.Notification from {:?}: {text:?}>", self.sender())
    }
}

/// Starts a session with the settings of the environment, overridden by those given.
pub(crate) fn start(py: Python<'_>, config: Config) -> PyResult<tcpx::Session> {
    log::start(config.log())?;
    py.detach(|| tcpx::Session::new(config))
        .map_err(|error| exception(py, &error))
}

#[pymethods]
impl Session {
    #[new]
    #[pyo3(signature = (name=None, *, env=true, **settings))]
    fn new(
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::optional_name)] name: Option<String>,
        env: bool,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let wrong = |error: tcpx::ConfigError| exception(py, &error.into());
        let mut config = match env {
            true => Config::from_env().map_err(wrong)?,
            false => Config::defaults(),
        };
        if let Some(name) = name {
            config.set("name", &name).map_err(wrong)?;
        }
        for (key, value) in settings.into_iter().flatten() {
            let (key, value) = (key.str()?, value.str()?);
            config
                .set(&key.to_string_lossy(), &value.to_string_lossy())
                .map_err(wrong)?;
        }
        Ok(Self {
            session: Owned::waiting(start(py, config)?),
            given_back: Owned::new(Mutex::default()),
            events: PyOnceLock::new(),
        })
    }

    /// The name of this session.
    #[getter]
    fn name(&self) -> &str {
        self.session.facts().name()
    }

    /// The addresses on which it listens.
    #[getter]
    fn addresses(&self) -> Vec<String> {
        let addresses = self.session.facts().addresses();
        addresses.iter().map(ToString::to_string).collect()
    }

    /// The settings in force.
    #[getter]
    fn settings(&self) -> Vec<Setting> {
        machine::rows(self.session.facts().config())
    }

    /// The connection info that a peer needs to connect. It contains the session's secret: its
    /// holders may connect, nobody else can.
    #[getter]
    fn connection_info<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.session.facts().connection_info())
    }

    /// Adds a peer by its connection info; connecting happens with the first transfer or by
    /// `Peer.connect`.
    fn add_peer(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::info)] info: Bytes<'_>,
    ) -> PyResult<Peer> {
        let peer = self.session.get()?.add_peer(&info);
        peer.map(Peer::new).map_err(|error| exception(py, &error))
    }

    /// Returns the peer of that name: added before, or connected to this session; None if there is
    /// none.
    fn peer(&self, #[pyo3(from_py_with = arguments::name)] name: String) -> PyResult<Option<Peer>> {
        Ok(self.session.get()?.peer(&name).map(Peer::new))
    }

    /// Every peer that was added or has connected to this session.
    #[getter]
    fn peers(&self) -> PyResult<Vec<Peer>> {
        let peers = self.session.get()?.peers().into_iter();
        Ok(peers.map(Peer::new).collect())
    }

    /// The peer that represents this session itself.
    #[getter]
    fn own_peer(&self) -> PyResult<Peer> {
        Ok(Peer::new(self.session.get()?.own_peer()))
    }

    /// Removes a peer and ends its connections; its transfers fail.
    fn remove_peer(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::peer)] peer: Bound<'_, Peer>,
    ) -> PyResult<()> {
        let (session, peer) = (self.session.get()?, peer.get().peer.get()?);
        py.detach(|| session.remove(peer))
            .map_err(|error| exception(py, &error))
    }

    /// Waits for the next peer that connects to this session.
    #[pyo3(signature = (timeout=None))]
    fn accept(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::timeout)] timeout: Option<f64>,
    ) -> PyResult<Peer> {
        let timeout = blocking::seconds(timeout)?;
        let session = self.session.get()?;
        blocking::wait(py, timeout, |slice| session.accept(slice))
            .map(Peer::new)
            .map_err(|ended| ended.into_exception(py))
    }

    /// Registers memory: a numpy array, a torch tensor, a bytearray or any other writable buffer,
    /// an object with `__cuda_array_interface__`; or an address with `nbytes`.
    #[pyo3(signature = (memory, nbytes=None))]
    fn register(
        &self,
        py: Python<'_>,
        memory: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::optional_nbytes)] nbytes: Option<usize>,
    ) -> PyResult<Region> {
        let session = self.session.get()?;
        static RESOLVE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let resolve = RESOLVE.import(py, "tcpx._memory", "resolve")?;
        let (address, len, owner): (usize, usize, Py<PyAny>) =
            resolve.call1((memory, nbytes))?.extract()?;
        // SAFETY: the memory belongs to `owner`, which the region keeps alive until its
        // registration has ended, or was given as an address, in which case the caller must keep
        // it, as documented.
        let region = unsafe { session.register_raw(address as *mut u8, len, MemoryKind::Host) };
        let region = region.map_err(|error| exception(py, &error))?;
        Ok(Region::new(region, owner))
    }

    /// Prepares a transfer over rows of (local region, offset, remote region, offset, bytes); `op`
    /// is "read" or "write". Nothing moves until it is posted.
    fn prepare(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::op)] op: String,
        #[pyo3(from_py_with = arguments::peer)] peer: Bound<'_, Peer>,
        segments: &Bound<'_, PyAny>,
    ) -> PyResult<Transfer> {
        self.plan(py, &op, &peer, &Pieces::from_rows(segments)?)
    }

    /// Prepares a transfer of blocks of one size between two regions.
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn prepare_blocks(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::op)] op: String,
        #[pyo3(from_py_with = arguments::peer)] peer: Bound<'_, Peer>,
        #[pyo3(from_py_with = arguments::local)] local: Bound<'_, Region>,
        local_offsets: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::remote)] remote: Bound<'_, RemoteRegion>,
        remote_offsets: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::nbytes)] nbytes: usize,
    ) -> PyResult<Transfer> {
        let pieces = Pieces::from_blocks(&local, local_offsets, &remote, remote_offsets, nbytes)?;
        self.plan(py, &op, &peer, &pieces)
    }

    /// Starts reading from the peer's memory into local memory; see `prepare`.
    #[pyo3(signature = (peer, segments, *, notify=None))]
    fn read(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::peer)] peer: Bound<'_, Peer>,
        segments: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::notify)] notify: Option<Bytes<'_>>,
    ) -> PyResult<Transfer> {
        let transfer = self.plan(py, "read", &peer, &Pieces::from_rows(segments)?)?;
        transfer.start(py, notify.as_deref())?;
        Ok(transfer)
    }

    /// Starts writing from local memory into the peer's; see `prepare`.
    #[pyo3(signature = (peer, segments, *, notify=None))]
    fn write(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::peer)] peer: Bound<'_, Peer>,
        segments: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::notify)] notify: Option<Bytes<'_>>,
    ) -> PyResult<Transfer> {
        let transfer = self.plan(py, "write", &peer, &Pieces::from_rows(segments)?)?;
        transfer.start(py, notify.as_deref())?;
        Ok(transfer)
    }

    /// Starts sending bytes of a region under a tag; done when the peer has received them.
    #[pyo3(signature = (peer, region, tag, *, offset=0, nbytes=None))]
    fn send(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::peer)] peer: Bound<'_, Peer>,
        #[pyo3(from_py_with = arguments::region)] region: Bound<'_, Region>,
        #[pyo3(from_py_with = arguments::tag)] tag: u64,
        #[pyo3(from_py_with = arguments::offset)] offset: usize,
        #[pyo3(from_py_with = arguments::optional_nbytes)] nbytes: Option<usize>,
    ) -> PyResult<Transfer> {
        let (session, peer) = (self.session.get()?, peer.get().peer.get()?);
        let source = region.get().region.get()?;
        let len = nbytes.unwrap_or(source.len().saturating_sub(offset));
        py.detach(|| session.send(peer, source.at(offset), len, tag))
            .map(|sent| Transfer::new(sent, vec![region.clone().unbind()]))
            .map_err(|error| exception(py, &error))
    }

    /// Starts receiving the peer's next message under a tag.
    #[pyo3(signature = (peer, region, tag, *, offset=0, nbytes=None))]
    fn recv(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::peer)] peer: Bound<'_, Peer>,
        #[pyo3(from_py_with = arguments::region)] region: Bound<'_, Region>,
        #[pyo3(from_py_with = arguments::tag)] tag: u64,
        #[pyo3(from_py_with = arguments::offset)] offset: usize,
        #[pyo3(from_py_with = arguments::optional_nbytes)] nbytes: Option<usize>,
    ) -> PyResult<Transfer> {
        let (session, peer) = (self.session.get()?, peer.get().peer.get()?);
        let target = region.get().region.get()?;
        let len = nbytes.unwrap_or(target.len().saturating_sub(offset));
        py.detach(|| session.recv(peer, target.at(offset), len, tag))
            .map(|posted| Transfer::new(posted, vec![region.clone().unbind()]))
            .map_err(|error| exception(py, &error))
    }

    /// Sends a notification; notifications to one peer arrive in order.
    fn notify(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::peer)] peer: Bound<'_, Peer>,
        #[pyo3(from_py_with = arguments::message)] message: Bytes<'_>,
    ) -> PyResult<()> {
        let (session, peer) = (self.session.get()?, peer.get().peer.get()?);
        let message: &[u8] = &message;
        py.detach(|| session.notify(peer, message))
            .map_err(|error| exception(py, &error))
    }

    /// Takes every notification that has arrived, oldest first: a list. Never blocks.
    ///
    /// `async for note in session.notifications()` yields these and then each one that arrives,
    /// until the session is closed; those that the loop does not reach stay with the session.
    fn notifications<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let (py, this) = (slf.py(), slf.get());
        let session = this.session.get()?;
        let mut all = std::mem::take(&mut *this.given_back.get()?.lock());
        all.extend(session.notifications());
        let all = all
            .into_iter()
            .map(|notification| Bound::new(py, Notification { notification }))
            .collect::<PyResult<Vec<_>>>()?;
        static CLASS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let class = CLASS.import(py, "tcpx._notifications", "Notifications")?;
        class.call1((slf, PyList::new(py, all)?))
    }

    /// Takes the oldest notification; None if there is none.
    fn _take_notification(&self) -> PyResult<Option<Notification>> {
        let session = self.session.get()?;
        let given_back = self.given_back.get()?.lock().pop_front();
        let found = given_back.or_else(|| session.wait_notification(Duration::ZERO).ok());
        Ok(found.map(|notification| Notification { notification }))
    }

    /// Puts notifications back in front of all others.
    fn _give_back(&self, notifications: Vec<Bound<'_, Notification>>) -> PyResult<()> {
        let mut given_back = self.given_back.get()?.lock();
        for notification in notifications.into_iter().rev() {
            given_back.push_front(notification.get().notification.clone());
        }
        Ok(())
    }

    /// Reports each notification that arrives from now on, and the end of the session, to `events`.
    /// Call `notifications` afterwards for those that have already arrived.
    fn subscribe(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::events)] events: Bound<'_, Events>,
    ) -> PyResult<()> {
        let subscribed = self.session.get()?.subscribe(events.get().events.get()?);
        subscribed.map_err(|error| exception(py, &error))
    }

    /// The session's own `Events`, subscribed to its notifications; `fileno` returns its
    /// descriptor.
    #[getter]
    fn events(&self, py: Python<'_>) -> PyResult<Py<Events>> {
        self.session.get()?;
        let made = self.events.get_or_try_init(py, || {
            let events = Events::new(py)?;
            let events = Bound::new(py, events)?;
            self.subscribe(py, events.clone())?;
            Ok::<_, PyErr>(events.unbind())
        })?;
        Ok(made.clone_ref(py))
    }

    /// Returns the descriptor of `events`, for `selectors` and other event loops: readable when a
    /// notification has arrived, or a transfer armed with `transfer.arm(session.events)` has ended.
    /// Call `session.events.take()` when it is readable.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.events(py)?.get().fileno()
    }

    /// Waits for the next notification.
    #[pyo3(signature = (timeout=None))]
    fn wait_notification(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::timeout)] timeout: Option<f64>,
    ) -> PyResult<Notification> {
        let timeout = blocking::seconds(timeout)?;
        let session = self.session.get()?;
        if let Some(notification) = self.given_back.get()?.lock().pop_front() {
            return Ok(Notification { notification });
        }
        let wait = |slice: Duration| session.wait_notification(slice);
        blocking::wait(py, timeout, wait)
            .map(|notification| Notification { notification })
            .map_err(|ended| ended.into_exception(py))
    }

    /// Returns the session's statistics since its creation, per peer, path and lane; with
    /// `kernel=True` also the kernel's statistics of each lane.
    #[pyo3(signature = (*, kernel=false))]
    fn stats<'py>(&self, py: Python<'py>, kernel: bool) -> PyResult<Bound<'py, PyDict>> {
        let session = self.session.get()?;
        let read = py.detach(|| match kernel {
            true => session.stats_with_kernel(),
            false => session.stats(),
        });
        stats::session(py, &read)
    }

    /// Returns the statistics as OpenMetrics text.
    fn metrics(&self, py: Python<'_>) -> PyResult<String> {
        let session = self.session.get()?;
        Ok(py.detach(|| openmetrics(&[session.stats_with_kernel()])))
    }

    /// Ends connections and threads; transfers in flight fail. Called at the end of a `with` block.
    /// Waits until the peers have their notifications, at most 5 seconds (or `peer_timeout` if that
    /// is less; on a plugin, a connection being made for them has `connect_timeout` first). Does
    /// nothing in a forked child.
    fn close(&self, py: Python<'_>) {
        let session = self.session.facts();
        py.detach(|| session.close());
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        let addresses = self.addresses().join(", ");
        format!("<tcpx.Session {:?} listening on {addresses}>", self.name())
    }
}

impl Session {
    fn plan(
        &self,
        py: Python<'_>,
        op: &str,
        peer: &Bound<'_, Peer>,
        pieces: &Pieces<'_>,
    ) -> PyResult<Transfer> {
        let op = transfer::op(op)?;
        let (session, peer) = (self.session.get()?, peer.get().peer.get()?);
        let planned = session.prepare(op, peer, pieces.segments());
        planned
            .map(|planned| Transfer::new(planned, pieces.regions()))
            .map_err(|error| exception(py, &error))
    }
}
