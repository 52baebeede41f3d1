//! The bytes that let a peer connect.
//!
//! Metadata begins as the interface requires, so that programs which parse it find their fields,
//! and ends with what a session needs:
//!
//! ```text
//! address (4 or 16)  port (2, big endian)  n (1)  PCI address of the GPU (n)  zeros  connection info (m)
//! bytes of the address (1)  m (2, big endian)  "TCPX"
//! ```
//!
//! The zeros fill up to a multiple of [`STEP`]: programs exchange metadata through buffers of the
//! length of their own, so the metadata of two machines must have the same length, however many
//! interfaces they have.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use parking_lot::Mutex;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tcpx::{Config, ConfigError, interfaces};

const STEP: usize = 512;
const MAGIC: &[u8; 4] = b"TCPX";
const TRAILER: usize = 3 + MAGIC.len();

/// Parsed metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Metadata {
    pub(super) address: SocketAddr,
    /// The PCI address of the peer's GPU; empty when it has none.
    pub(super) bdf: String,
    /// The connection info; empty if the peer does not run tcpx.
    pub(super) info: Vec<u8>,
}

impl Metadata {
    pub(super) fn encode(&self) -> Vec<u8> {
        let ip = match self.address.ip() {
            IpAddr::V4(v4) => v4.octets().to_vec(),
            IpAddr::V6(v6) => v6.octets().to_vec(),
        };
        let bdf = &self.bdf.as_bytes()[..self.bdf.len().min(255)];
        let mut bytes = ip.clone();
        bytes.extend(self.address.port().to_be_bytes());
        bytes.push(bdf.len() as u8);
        bytes.extend(bdf);
        let end = bytes.len() + self.info.len() + TRAILER;
        bytes.resize(end.next_multiple_of(STEP) - self.info.len() - TRAILER, 0);
        bytes.extend(&self.info);
        bytes.push(ip.len() as u8);
        // Connection info is at most a few KiB.
        bytes.extend((self.info.len() as u16).to_be_bytes());
        bytes.extend(MAGIC);
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        match bytes.strip_suffix(MAGIC) {
            Some(rest) => {
                let (rest, tail) = rest.split_at_checked(rest.len().checked_sub(3)?)?;
                let info_len = usize::from(u16::from_be_bytes([tail[1], tail[2]]));
                let (head, info) = rest.split_at_checked(rest.len().checked_sub(info_len)?)?;
                Self::head(head, usize::from(tail[0])).map(|(mut metadata, _)| {
                    metadata.info = info.to_vec();
                    metadata
                })
            }
            // As other implementations write it: the length determines the address family.
            None => [4, 16].into_iter().find_map(|ip_len| {
                let (metadata, used) = Self::head(bytes, ip_len)?;
                (used == bytes.len()).then_some(metadata)
            }),
        }
    }

    /// Parses the part that the interface defines; returns it with its length.
    fn head(bytes: &[u8], ip_len: usize) -> Option<(Self, usize)> {
        let ip = bytes.get(..ip_len)?;
        let ip: IpAddr = match ip_len {
            4 => <[u8; 4]>::try_from(ip).ok()?.into(),
            16 => <[u8; 16]>::try_from(ip).ok()?.into(),
            _ => return None,
        };
        let port = u16::from_be_bytes(bytes.get(ip_len..ip_len + 2)?.try_into().ok()?);
        let at = ip_len + 3;
        let end = at + usize::from(*bytes.get(ip_len + 2)?);
        let bdf = std::str::from_utf8(bytes.get(at..end)?).ok()?.to_owned();
        let metadata = Self {
            address: SocketAddr::new(ip, port),
            bdf,
            info: Vec::new(),
        };
        Some((metadata, end))
    }

    pub(super) fn read(bytes: &[u8]) -> PyResult<Self> {
        let metadata = Self::decode(bytes).ok_or_else(|| {
            PyRuntimeError::new_err(format!(
                "these {} bytes are no endpoint metadata",
                bytes.len()
            ))
        })?;
        if !metadata.info.is_empty() {
            seen().lock().push(metadata.clone());
        }
        Ok(metadata)
    }
}

/// Metadata that this process has parsed, by the two keys that calls without metadata use for a
/// peer. `connect` and `connect_local` name a peer's location but cannot prove that they may
/// connect; its connection info can.
#[derive(Default)]
pub(super) struct Seen {
    by_address: HashMap<SocketAddr, Metadata>,
    by_bdf: HashMap<String, Metadata>,
}

impl Seen {
    fn push(&mut self, metadata: Metadata) {
        self.by_bdf.insert(metadata.bdf.clone(), metadata.clone());
        self.by_address.insert(metadata.address, metadata);
    }

    pub(super) fn at(&self, ip: &str, port: i64) -> Option<Metadata> {
        let ip: IpAddr = ip.parse().ok()?;
        match u16::try_from(port) {
            Ok(port) => self.by_address.get(&SocketAddr::new(ip, port)).cloned(),
            Err(_) => {
                let mut on_host = self.by_address.values().filter(|m| m.address.ip() == ip);
                let only = on_host.next()?;
                on_host.next().is_none().then(|| only.clone())
            }
        }
    }

    pub(super) fn on_gpu(&self, bdf: &str) -> Option<Metadata> {
        self.by_bdf.get(bdf).cloned()
    }
}

pub(super) fn seen() -> &'static Mutex<Seen> {
    static SEEN: std::sync::LazyLock<Mutex<Seen>> = std::sync::LazyLock::new(Mutex::default);
    &SEEN
}

/// Returns the configuration of the environment, including the interface's variable for the control
/// interface.
pub(super) fn config() -> Result<Config, tcpx::Error> {
    let mut config = Config::from_env()?;
    const VARIABLE: &str = "UCCL_SOCKET_IFNAME";
    if let Some(interface) = std::env::var_os(VARIABLE)
        && !interface.is_empty()
        && std::env::var_os("TCPX_CONTROL_INTERFACE").is_none()
    {
        let interface = interface
            .into_string()
            .map_err(|raw| ConfigError::BadValue {
                name: VARIABLE.into(),
                value: raw.to_string_lossy().into_owned(),
                expected: "UTF-8, the name of an interface".into(),
            })?;
        config.set("control_interface", &interface)?;
    }
    Ok(config)
}

/// Returns the address that peers are told: of the control interface, else of the first that
/// carries data.
pub(super) fn own_ip(config: &Config) -> Option<IpAddr> {
    let found = interfaces::discover().ok()?;
    let selector = match config.control_interface().is_default() {
        true => config.interfaces(),
        false => config.control_interface(),
    };
    let addresses: Vec<IpAddr> = selector
        .select(&found)
        .ok()?
        .iter()
        .flat_map(|interface| interface.lane_addresses())
        .collect();
    let v4 = addresses.iter().find(|ip| ip.is_ipv4());
    v4.or(addresses.first()).copied()
}

/// Returns the address of this machine that peers are told.
#[pyfunction]
pub(super) fn get_oob_ip() -> PyResult<String> {
    let config = config().map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
    own_ip(&config).map(|ip| ip.to_string()).ok_or_else(|| {
        PyRuntimeError::new_err("no network interface can be used: see TCPX_INTERFACES")
    })
}
