//! Sessions.

use std::time::Duration;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict};
use tcpx::{Config, MemoryKind};

use super::machine::{self, Setting};
use super::peer::Peer;
use super::region::Region;
use super::region::RemoteRegion;
use super::transfer::{self, Pieces, Transfer};
use crate::errors::exception;
use crate::owned::Owned;
use crate::{blocking, log};

/// Registers memory, knows peers, makes transfers. It listens, and serves its memory, from its start to
/// `close`, whether or not Python does anything.
#[pyclass(frozen, module = "tcpx")]
pub(crate) struct Session {
    session: Owned<tcpx::Session>,
}

/// A message from a peer.
#[pyclass(frozen, module = "tcpx")]
pub(crate) struct Notification {
    notification: tcpx::Notification,
}

#[pymethods]
impl Notification {
    /// What the sending session calls itself.
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

/// Starts a session with the settings of the environment, then those given.
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
        name: Option<&str>,
        env: bool,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let wrong = |error: tcpx::ConfigError| exception(py, &error.into());
        let mut config = match env {
            true => Config::from_env().map_err(wrong)?,
            false => Config::defaults(),
        };
        if let Some(name) = name {
            config.set("name", name).map_err(wrong)?;
        }
        for (key, value) in settings.into_iter().flatten() {
            let (key, value) = (key.str()?, value.str()?);
            config
                .set(&key.to_string_lossy(), &value.to_string_lossy())
                .map_err(wrong)?;
        }
        Ok(Self {
            session: Owned::waiting(start(py, config)?),
        })
    }

    /// What this session calls itself.
    #[getter]
    fn name(&self) -> &str {
        self.session.facts().name()
    }

    /// Where it listens.
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

    /// What a peer needs to connect to this session. It contains the session's secret: whoever has it may
    /// connect, nobody else can.
    #[getter]
    fn connection_info<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.session.facts().connection_info())
    }

    /// Makes a peer known by its connection info; connecting happens with the first transfer or by
    /// `Peer.connect`.
    fn add_peer(&self, py: Python<'_>, info: &[u8]) -> PyResult<Peer> {
        let peer = self.session.get()?.add_peer(info);
        peer.map(Peer::new).map_err(|error| exception(py, &error))
    }

    /// The peer of that name: one that was added or has connected to us; None when there is none.
    fn peer(&self, name: &str) -> PyResult<Option<Peer>> {
        Ok(self.session.get()?.peer(name).map(Peer::new))
    }

    /// Every peer that was added or has connected to us.
    #[getter]
    fn peers(&self) -> PyResult<Vec<Peer>> {
        let peers = self.session.get()?.peers().into_iter();
        Ok(peers.map(Peer::new).collect())
    }

    /// The peer that stands for this session itself.
    #[getter]
    fn own_peer(&self) -> PyResult<Peer> {
        Ok(Peer::new(self.session.get()?.own_peer()))
    }

    /// Forgets a peer and ends its connections; its transfers fail.
    fn remove_peer(&self, py: Python<'_>, peer: &Peer) -> PyResult<()> {
        let (session, peer) = (self.session.get()?, peer.peer.get()?);
        py.detach(|| session.remove(peer))
            .map_err(|error| exception(py, &error))
    }

    /// Waits for the next peer that has connected to us.
    #[pyo3(signature = (timeout=None))]
    fn accept(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Peer> {
        let timeout = blocking::seconds(timeout)?;
        let session = self.session.get()?;
        blocking::wait(py, timeout, |slice| session.accept(slice))
            .map(Peer::new)
            .map_err(|ended| ended.into_exception(py))
    }

    /// Registers memory: a numpy array, a torch tensor, a bytearray or any other writable buffer, an object with
    /// `__cuda_array_interface__`; or an address with `nbytes`.
    #[pyo3(signature = (memory, nbytes=None))]
    fn register(
        &self,
        py: Python<'_>,
        memory: &Bound<'_, PyAny>,
        nbytes: Option<usize>,
    ) -> PyResult<Region> {
        let session = self.session.get()?;
        static RESOLVE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let resolve = RESOLVE.import(py, "tcpx._memory", "resolve")?;
        let (address, len, owner): (usize, usize, Py<PyAny>) =
            resolve.call1((memory, nbytes))?.extract()?;
        // SAFETY: the memory belongs to `owner`, which the region keeps alive until its registration has ended, or
        // was given as an address, in which case it is the caller's to keep, as documented.
        let region = unsafe { session.register_raw(address as *mut u8, len, MemoryKind::Host) };
        let region = region.map_err(|error| exception(py, &error))?;
        Ok(Region::new(region, owner))
    }

    /// Plans a transfer over rows of (local region, offset, remote region, offset, bytes); `op` is "read" or
    /// "write". Nothing moves until it is posted.
    fn prepare(
        &self,
        py: Python<'_>,
        op: &str,
        peer: &Peer,
        segments: &Bound<'_, PyAny>,
    ) -> PyResult<Transfer> {
        self.plan(py, op, peer, &Pieces::from_rows(segments)?)
    }

    /// Plans a transfer of blocks of one size between two regions.
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn prepare_blocks(
        &self,
        py: Python<'_>,
        op: &str,
        peer: &Peer,
        local: &Bound<'_, Region>,
        local_offsets: &Bound<'_, PyAny>,
        remote: &Bound<'_, RemoteRegion>,
        remote_offsets: &Bound<'_, PyAny>,
        nbytes: usize,
    ) -> PyResult<Transfer> {
        let pieces = Pieces::from_blocks(local, local_offsets, remote, remote_offsets, nbytes)?;
        self.plan(py, op, peer, &pieces)
    }

    /// Starts reading from the peer's memory into ours; see `prepare`.
    #[pyo3(signature = (peer, segments, *, notify=None))]
    fn read(
        &self,
        py: Python<'_>,
        peer: &Peer,
        segments: &Bound<'_, PyAny>,
        notify: Option<&[u8]>,
    ) -> PyResult<Transfer> {
        let transfer = self.prepare(py, "read", peer, segments)?;
        transfer.start(py, notify)?;
        Ok(transfer)
    }

    /// Starts writing from our memory into the peer's; see `prepare`.
    #[pyo3(signature = (peer, segments, *, notify=None))]
    fn write(
        &self,
        py: Python<'_>,
        peer: &Peer,
        segments: &Bound<'_, PyAny>,
        notify: Option<&[u8]>,
    ) -> PyResult<Transfer> {
        let transfer = self.prepare(py, "write", peer, segments)?;
        transfer.start(py, notify)?;
        Ok(transfer)
    }

    /// Starts sending bytes of a region under a tag; done when the peer has received them.
    #[pyo3(signature = (peer, region, tag, *, offset=0, nbytes=None))]
    fn send(
        &self,
        py: Python<'_>,
        peer: &Peer,
        region: &Bound<'_, Region>,
        tag: u64,
        offset: usize,
        nbytes: Option<usize>,
    ) -> PyResult<Transfer> {
        let (session, peer) = (self.session.get()?, peer.peer.get()?);
        let source = region.get().region.get()?;
        let len = nbytes.unwrap_or(source.len().saturating_sub(offset));
        py.detach(|| session.send(peer, source.at(offset), len, tag))
            .map(|sent| Transfer::new(sent, vec![region.clone().unbind()]))
            .map_err(|error| exception(py, &error))
    }

    /// Starts receiving the next message that the peer sends under a tag.
    #[pyo3(signature = (peer, region, tag, *, offset=0, nbytes=None))]
    fn recv(
        &self,
        py: Python<'_>,
        peer: &Peer,
        region: &Bound<'_, Region>,
        tag: u64,
        offset: usize,
        nbytes: Option<usize>,
    ) -> PyResult<Transfer> {
        let (session, peer) = (self.session.get()?, peer.peer.get()?);
        let target = region.get().region.get()?;
        let len = nbytes.unwrap_or(target.len().saturating_sub(offset));
        py.detach(|| session.recv(peer, target.at(offset), len, tag))
            .map(|posted| Transfer::new(posted, vec![region.clone().unbind()]))
            .map_err(|error| exception(py, &error))
    }

    /// Sends a message on its own; messages to one peer arrive in order.
    fn notify(&self, py: Python<'_>, peer: &Peer, message: &[u8]) -> PyResult<()> {
        let (session, peer) = (self.session.get()?, peer.peer.get()?);
        py.detach(|| session.notify(peer, message))
            .map_err(|error| exception(py, &error))
    }

    /// Takes every notification that has arrived, oldest first. Never waits.
    fn notifications(&self) -> PyResult<Vec<Notification>> {
        let all = self.session.get()?.notifications().into_iter();
        Ok(all
            .map(|notification| Notification { notification })
            .collect())
    }

    /// Waits for the next notification.
    #[pyo3(signature = (timeout=None))]
    fn wait_notification(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Notification> {
        let timeout = blocking::seconds(timeout)?;
        let session = self.session.get()?;
        let wait = |slice: Duration| session.wait_notification(slice);
        blocking::wait(py, timeout, wait)
            .map(|notification| Notification { notification })
            .map_err(|ended| ended.into_exception(py))
    }

    /// Ends connections and threads; transfers in flight fail. Also at the end of a `with` block. Waits until the peers have
    /// their notifications, at most 5 seconds (or `peer_timeout` where that is less; on a plugin, a connection that is being
    /// made for them has `connect_timeout` first). In a forked child it does nothing.
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
        peer: &Peer,
        pieces: &Pieces<'_>,
    ) -> PyResult<Transfer> {
        let op = transfer::op(op)?;
        let (session, peer) = (self.session.get()?, peer.peer.get()?);
        let planned = session.prepare(op, peer, pieces.segments());
        planned
            .map(|planned| Transfer::new(planned, pieces.regions()))
            .map_err(|error| exception(py, &error))
    }
}
