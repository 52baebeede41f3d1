//! The class `Endpoint`: construction and connections.

use std::time::{Duration, Instant};

use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tcpx::{Error, ErrorKind, Peer, Session};

use super::arguments::Word;
use super::connections::{Connections, Way};
use super::memory::Registry;
use super::metadata::{self, Metadata};
use super::nearby::{self, Published};
use super::pending::Pending;
use crate::blocking::{self, Ended};
use crate::log;
use crate::owned::Owned;

/// Pause before another attempt to reach a peer.
const RETRY: Duration = Duration::from_millis(100);

/// How long `connect_local` looks for an endpoint that may still be starting, and how often.
const LOOK_FOR: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(10);

/// One end of transfers: registers memory, connects, reads and writes.
#[pyclass(frozen, module = "tcpx.p2p")]
pub(super) struct Endpoint {
    inside: Owned<Inside>,
    metadata: Vec<u8>,
}

/// State that only the process that created the endpoint uses.
pub(super) struct Inside {
    // Dropped in this order: first others stop finding it, then transfers in flight are aborted
    // while there is a session.
    _published: Option<Published>,
    pub(super) pending: Pending,
    pub(super) memory: Registry,
    pub(super) connections: Connections,
    pub(super) session: Session,
    gpu: i32,
    bdf: String,
}

impl Endpoint {
    /// Returns the state. Raises `ForkedError` in another process.
    pub(super) fn inside(&self) -> PyResult<&Inside> {
        self.inside.get()
    }
}

/// Reports on stderr that an object which a call names does not exist. The call returns a failure.
pub(super) fn unknown(what: &str, id: u64) {
    tracing::warn!(target: "tcpx", "there is no {what} {id}");
}

/// Reports on stderr why a call failed.
pub(super) fn failed(what: &str, error: &Error) {
    tracing::warn!(target: "tcpx", "{what} failed: {error}");
}

#[pymethods]
impl Endpoint {
    /// Starts an endpoint that listens. `local_gpu_idx` selects the GPU that peers are told; memory
    /// of any device, and of the host, may be registered. `num_cpus` is accepted for older programs
    /// and ignored.
    #[new]
    #[pyo3(signature = (local_gpu_idx=None, num_cpus=None))]
    fn new(py: Python<'_>, local_gpu_idx: Option<Word>, num_cpus: Option<Word>) -> PyResult<Self> {
        let _ = num_cpus;
        let wrong = |error: Error| PyRuntimeError::new_err(error.to_string());
        let (gpu, bdf) = match local_gpu_idx {
            Some(Word(index)) => (
                i32::try_from(index).unwrap_or(i32::MAX),
                gpu_address(py, index)?,
            ),
            None => (0, String::new()),
        };
        let config = metadata::config().map_err(wrong)?;
        log::start(config.log())?;
        // Peers are distinguished by name: the default (host and process) would be the same for two
        // endpoints of a process, and in two containers.
        let mut random = [0; 4];
        getrandom::fill(&mut random).map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        let name = format!("{}-{:08x}", config.name(), u32::from_le_bytes(random));
        let name = name
            .get(name.len().saturating_sub(64)..)
            .unwrap_or("endpoint");
        let ip = metadata::own_ip(&config);
        let config = config
            .with_name(name)
            .map_err(|error| wrong(error.into()))?;
        let session = py.detach(|| Session::new(config)).map_err(wrong)?;

        let addresses = session.addresses();
        let chosen = addresses.iter().find(|address| Some(address.ip()) == ip);
        let address = chosen.or(addresses.first()).copied();
        let metadata = Metadata {
            address: address
                .ok_or_else(|| PyRuntimeError::new_err("the session has no address"))?,
            bdf: bdf.clone(),
            info: session.connection_info(),
        };
        let metadata = metadata.encode();
        Ok(Self {
            inside: Owned::waiting(Inside {
                _published: Published::new(gpu, &metadata),
                pending: Pending::default(),
                memory: Registry::default(),
                connections: Connections::default(),
                session,
                gpu,
                bdf,
            }),
            metadata,
        })
    }

    /// Returns the metadata that a peer needs to connect; it contains a secret. Always the same
    /// bytes.
    fn get_metadata<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.metadata)
    }

    /// Returns a peer's address, port, and the PCI address of its GPU.
    #[staticmethod]
    fn parse_metadata(metadata: &Bound<'_, PyBytes>) -> PyResult<(String, u16, String)> {
        let found = Metadata::read(metadata.as_bytes())?;
        let (ip, port) = (found.address.ip().to_string(), found.address.port());
        Ok((ip, port, found.bdf))
    }

    /// Connects to a peer whose metadata this process has parsed; retries for as long as nobody
    /// listens.
    #[pyo3(signature = (remote_ip_addr, remote_gpu_bdf=None, remote_port=-1, *, remote_gpu_idx=None))]
    fn connect(
        &self,
        py: Python<'_>,
        remote_ip_addr: &str,
        remote_gpu_bdf: Option<&Bound<'_, PyAny>>,
        remote_port: i64,
        remote_gpu_idx: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<(bool, u64)> {
        let this = self.inside()?;
        if remote_gpu_bdf.or(remote_gpu_idx).is_none() {
            return Err(PyTypeError::new_err("connect() needs remote_gpu_bdf"));
        }
        let found = metadata::seen().lock().at(remote_ip_addr, remote_port);
        let found = found.ok_or_else(|| {
            PyRuntimeError::new_err(format!(
                "no peer is known at {remote_ip_addr} port {remote_port}: connecting needs the secret in its \
                 metadata, so call Endpoint.parse_metadata (or add_remote_endpoint) with it first"
            ))
        })?;
        this.connect_to(py, &found, Way::Network)
    }

    /// Connects to a peer by its metadata; the same metadata again returns the same number.
    fn add_remote_endpoint(
        &self,
        py: Python<'_>,
        metadata_bytes: &Bound<'_, PyBytes>,
    ) -> PyResult<(bool, u64)> {
        let this = self.inside()?;
        let bytes = metadata_bytes.as_bytes();
        if let Some(id) = this.connections.cached(bytes) {
            return Ok((true, id));
        }
        let (ok, id) = this.connect_to(py, &Metadata::read(bytes)?, Way::Network)?;
        if ok {
            this.connections.cache(bytes, id);
        }
        Ok((ok, id))
    }

    /// Removes a connection; adding the peer again returns a new number.
    fn remove_remote_endpoint(&self, py: Python<'_>, conn_id: Word) -> PyResult<bool> {
        let this = self.inside()?;
        Ok(py.detach(|| this.connections.remove(&this.session, conn_id.0)))
    }

    /// Waits for the next peer that connects; returns its address, its GPU, the connection's
    /// number.
    fn accept(&self, py: Python<'_>) -> PyResult<(bool, String, i32, u64)> {
        let this = self.inside()?;
        let accept = |slice| this.connections.accept(&this.session, Way::Network, slice);
        match blocking::wait(py, None, accept) {
            Ok(accepted) => {
                let ip = accepted.ip.to_string();
                Ok((true, ip, accepted.hello.gpu, accepted.id))
            }
            Err(Ended::Raised(raised)) => Err(raised),
            Err(Ended::Engine(error)) => {
                failed("accept", &error);
                Ok((false, String::new(), 0, 0))
            }
        }
    }

    /// Lets peers connect without `accept`. They can anyway; this only declares that it will not be
    /// called.
    fn start_passive_accept(&self) -> PyResult<bool> {
        let this = self.inside()?;
        this.connections.be_passive();
        Ok(true)
    }

    /// Connects to a peer on this host by its GPU: one whose metadata this process has parsed, or
    /// else one of the same user, which may start up to 2 seconds later.
    #[pyo3(signature = (remote_gpu_bdf=None, *, remote_gpu_idx=None))]
    fn connect_local(
        &self,
        py: Python<'_>,
        remote_gpu_bdf: Option<Gpu>,
        remote_gpu_idx: Option<Word>,
    ) -> PyResult<(bool, u64)> {
        let this = self.inside()?;
        let by_index = |Word(index)| Ok::<_, PyErr>((gpu_address(py, index)?, Some(index)));
        let (bdf, index) = match (remote_gpu_bdf, remote_gpu_idx) {
            (Some(Gpu::Bdf(bdf)), _) => (bdf, None),
            (Some(Gpu::Index(index)), _) | (None, Some(index)) => by_index(index)?,
            (None, None) => {
                return Err(PyTypeError::new_err("connect_local() needs remote_gpu_bdf"));
            }
        };
        match this.look_for(py, &bdf, index)? {
            Some(found) => this.connect_to(py, &found, Way::Local),
            None => {
                let gpu = index.map_or_else(|| format!("{bdf:?}"), |index| index.to_string());
                tracing::warn!(
                    target: "tcpx",
                    "connect_local: no endpoint of this user on this host is on GPU {gpu}, and no metadata of one was parsed"
                );
                Ok((false, 0))
            }
        }
    }

    /// Waits for the next peer that connects with `connect_local`; returns its GPU and the
    /// connection's number.
    fn accept_local(&self, py: Python<'_>) -> PyResult<(bool, String, u64)> {
        let this = self.inside()?;
        let accept = |slice| this.connections.accept(&this.session, Way::Local, slice);
        match blocking::wait(py, None, accept) {
            Ok(accepted) => Ok((true, accepted.hello.bdf, accepted.id)),
            Err(Ended::Raised(raised)) => Err(raised),
            Err(Ended::Engine(error)) => {
                failed("accept_local", &error);
                Ok((false, String::new(), 0))
            }
        }
    }

    /// Peers have no ranks: always returns 2**64 - 1.
    fn conn_id_of_rank(&self, rank: i64) -> u64 {
        let _ = rank;
        u64::MAX
    }

    fn __repr__(&self) -> String {
        let name = self.inside.facts().session.name();
        match self.inside() {
            Ok(this) => format!(
                "<tcpx.p2p.Endpoint {name:?} with {} connections>",
                this.connections.len()
            ),
            Err(_) => format!("<tcpx.p2p.Endpoint {name:?} of another process>"),
        }
    }
}

/// A GPU as programs name it: by its PCI address, or by its number.
#[derive(FromPyObject)]
enum Gpu {
    Bdf(String),
    Index(Word),
}

impl Inside {
    /// Looks for another endpoint on a GPU of this host. Without GPUs the requested number
    /// distinguishes endpoints.
    fn look_for(
        &self,
        py: Python<'_>,
        bdf: &str,
        index: Option<u64>,
    ) -> PyResult<Option<Metadata>> {
        let own = self.session.connection_info();
        let number = index.filter(|_| bdf.is_empty());
        let fits = |gpu: i32, peer: &Metadata| {
            let is_number = number.is_none_or(|number| u64::try_from(gpu) == Ok(number));
            peer.bdf == bdf && is_number && peer.info != own
        };
        let parsed = || {
            let parsed = metadata::seen().lock().on_gpu(bdf);
            parsed.filter(|peer| number.is_none() && peer.info != own)
        };
        let until = Instant::now() + LOOK_FOR;
        loop {
            let found = parsed().or_else(|| py.detach(|| nearby::find(fits)));
            if found.is_some() || Instant::now() >= until {
                return Ok(found);
            }
            py.check_signals()?;
            py.detach(|| std::thread::sleep(LOOK));
        }
    }

    fn connect_to(&self, py: Python<'_>, peer: &Metadata, way: Way) -> PyResult<(bool, u64)> {
        if peer.info.is_empty() {
            return Err(PyRuntimeError::new_err(format!(
                "the endpoint at {} does not run tcpx: both sides must",
                peer.address
            )));
        }
        let opened = || -> Result<u64, Ended> {
            let peer = self.session.add_peer(&peer.info).map_err(Ended::Engine)?;
            self.reach(py, &peer)?;
            py.detach(|| {
                self.connections
                    .open(&self.session, peer, way, self.gpu, &self.bdf)
            })
            .map_err(Ended::Engine)
        };
        match opened() {
            Ok(id) => Ok((true, id)),
            Err(Ended::Raised(raised)) => Err(raised),
            Err(Ended::Engine(error)) => {
                failed("connecting", &error);
                Ok((false, 0))
            }
        }
    }

    /// Connects; retries while the peer is not there (yet).
    fn reach(&self, py: Python<'_>, peer: &Peer) -> Result<(), Ended> {
        loop {
            match blocking::wait(py, None, |slice| peer.connect(slice)) {
                Err(Ended::Engine(error)) if error.kind() == ErrorKind::Disconnected => {
                    py.detach(|| std::thread::sleep(RETRY));
                    py.check_signals().map_err(Ended::Raised)?;
                }
                ended => return ended,
            }
        }
    }
}

/// Returns the PCI address of a GPU; empty on machines without any.
fn gpu_address(py: Python<'_>, index: u64) -> PyResult<String> {
    let Ok(devices) = py.detach(tcpx_cuda::devices) else {
        return Ok(String::new());
    };
    let found = devices.iter().find(|d| u64::from(d.ordinal) == index);
    found
        .map(|device| device.pci_bus_id.to_ascii_lowercase())
        .ok_or_else(|| {
            PyRuntimeError::new_err(format!(
                "there is no GPU {index}: this process sees {}",
                devices.len()
            ))
        })
}
