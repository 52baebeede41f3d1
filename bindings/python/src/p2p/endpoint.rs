//! The class: construction, connections.

use std::time::Duration;

use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tcpx::{Error, ErrorKind, Peer, Session};

use super::arguments::Word;
use super::connections::{Connections, Way};
use super::memory::Registry;
use super::metadata::{self, Metadata};
use super::pending::Pending;
use crate::blocking::{self, Ended};
use crate::log;
use crate::owned::Owned;

/// How long to leave a peer alone that cannot be reached.
const RETRY: Duration = Duration::from_millis(100);

/// One end of transfers: registers memory, connects, reads and writes.
#[pyclass(frozen, module = "tcpx.p2p")]
pub(super) struct Endpoint {
    inside: Owned<Inside>,
    metadata: Vec<u8>,
}

/// What only the process that made the endpoint uses.
pub(super) struct Inside {
    // Dropped in this order: transfers in flight are aborted while there is a session.
    pub(super) pending: Pending,
    pub(super) memory: Registry,
    pub(super) connections: Connections,
    pub(super) session: Session,
    gpu: i32,
    bdf: String,
}

impl Endpoint {
    /// Raises `ForkedError` in another process.
    pub(super) fn inside(&self) -> PyResult<&Inside> {
        self.inside.get()
    }
}

/// Something that a call names does not exist: said on stderr, and by its result.
pub(super) fn unknown(what: &str, id: u64) {
    tracing::warn!(target: "tcpx", "there is no {what} {id}");
}

/// A call failed: why, on stderr.
pub(super) fn failed(what: &str, error: &Error) {
    tracing::warn!(target: "tcpx", "{what} failed: {error}");
}

#[pymethods]
impl Endpoint {
    /// Starts an endpoint that listens. `local_gpu_idx` names the GPU that peers are told; memory of any device, and of the
    /// host, may be registered. `num_cpus` is there for older programs and ignored.
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
        // Peers are told apart by name: the default (host and process) would be the same for two endpoints of a process, and in
        // two containers.
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
                .ok_or_else(|| PyRuntimeError::new_err("the session listens nowhere"))?,
            bdf: bdf.clone(),
            info: session.connection_info(),
        };
        Ok(Self {
            inside: Owned::waiting(Inside {
                pending: Pending::default(),
                memory: Registry::default(),
                connections: Connections::default(),
                session,
                gpu,
                bdf,
            }),
            metadata: metadata.encode(),
        })
    }

    /// What a peer needs to connect to this endpoint; it contains a secret. Always the same bytes.
    fn get_metadata<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.metadata)
    }

    /// A peer's address, port, and the PCI address of its GPU.
    #[staticmethod]
    fn parse_metadata(metadata: &Bound<'_, PyBytes>) -> PyResult<(String, u16, String)> {
        let found = Metadata::read(metadata.as_bytes())?;
        let (ip, port) = (found.address.ip().to_string(), found.address.port());
        Ok((ip, port, found.bdf))
    }

    /// Connects to a peer whose metadata this process has parsed; tries again for as long as nobody is there.
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
                "nothing is known of a peer at {remote_ip_addr} port {remote_port}: connecting needs the secret in its \
                 metadata, so call Endpoint.parse_metadata (or add_remote_endpoint) with it first"
            ))
        })?;
        this.connect_to(py, &found, Way::Network)
    }

    /// Connects to a peer by its metadata; the same metadata again gives the same number.
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

    /// Forgets a connection; adding the peer again gives a new number.
    fn remove_remote_endpoint(&self, py: Python<'_>, conn_id: Word) -> PyResult<bool> {
        let this = self.inside()?;
        Ok(py.detach(|| this.connections.remove(&this.session, conn_id.0)))
    }

    /// Waits for the next peer that connects: its address, its GPU, the connection's number.
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

    /// Lets peers connect without `accept` being called. They can anyway; this only says that nobody will.
    fn start_passive_accept(&self) -> PyResult<bool> {
        let this = self.inside()?;
        this.connections.be_passive();
        Ok(true)
    }

    /// Connects to a peer on this host by its GPU, where this process has parsed its metadata.
    #[pyo3(signature = (remote_gpu_bdf=None, *, remote_gpu_idx=None))]
    fn connect_local(
        &self,
        py: Python<'_>,
        remote_gpu_bdf: Option<&str>,
        remote_gpu_idx: Option<Word>,
    ) -> PyResult<(bool, u64)> {
        let this = self.inside()?;
        let bdf = match (remote_gpu_bdf, remote_gpu_idx) {
            (Some(bdf), _) => bdf.to_owned(),
            (None, Some(Word(index))) => gpu_address(py, index)?,
            (None, None) => {
                return Err(PyTypeError::new_err("connect_local() needs remote_gpu_bdf"));
            }
        };
        let found = metadata::seen().lock().on_gpu(&bdf);
        match found {
            Some(found) => this.connect_to(py, &found, Way::Local),
            None => {
                tracing::warn!(target: "tcpx", "no metadata of an endpoint on GPU {bdf:?} was parsed");
                Ok((false, 0))
            }
        }
    }

    /// Waits for the next peer that connects with `connect_local`: its GPU, the connection's number.
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

    /// Nobody is known by rank: always 2**64 - 1.
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

impl Inside {
    fn connect_to(&self, py: Python<'_>, peer: &Metadata, way: Way) -> PyResult<(bool, u64)> {
        if peer.info.is_empty() {
            return Err(PyRuntimeError::new_err(format!(
                "the endpoint at {} is no tcpx: both sides must run it",
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

    /// Connects; a peer that is not there (yet) is tried again.
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

/// The PCI address of a GPU; empty on machines that have none.
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
