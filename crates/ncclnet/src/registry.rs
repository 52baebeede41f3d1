//! Tracks the libraries that this process has initialised.
//!
//! Up to API version 10 `init` may be called only once in a process: GPUDirect-TCPX refuses the
//! second call. So the result of the first call, good or bad, is kept for ever under the library's
//! identity in the system's loader, which is the same whatever name the file was opened by. From
//! version 11 on each user has a context of its own, and nothing is kept.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard};

use libloading::os::unix::Library;

use crate::error::Error;
use crate::find::Opened;
use crate::plugin::Core;
use crate::sys::{ABIS, Abi};

type Outcomes = BTreeMap<usize, (u32, Result<Arc<Core>, Error>)>;

static REGISTRY: Mutex<Outcomes> = Mutex::new(BTreeMap::new());

/// Locks the registry. Serialises what NCCL serialises: `init`, `devices`, `finalize`.
pub(crate) fn lock() -> MutexGuard<'static, Outcomes> {
    // A panic while it was held cannot have left a partial entry.
    REGISTRY.lock().unwrap_or_else(|error| error.into_inner())
}

/// Returns the initialised plugin of an opened library: the newest version, or the requested one.
pub(crate) fn obtain(opened: Opened, version: Option<u32>) -> Result<Arc<Core>, Error> {
    let Opened {
        library,
        name,
        was_loaded,
    } = opened;
    let name = name.as_str();
    let (abi, table) = choose(&library, name, version)?;
    let (library, identity) = identify(library);

    let mut outcomes = lock();
    if let Some((in_use, outcome)) = outcomes.get(&identity) {
        // Drops the extra reference to the library; the entry keeps its own.
        if *in_use != abi.version {
            return Err(Error::VersionInUse {
                library: name.to_owned(),
                version: abi.version,
                in_use: *in_use,
            });
        }
        return outcome.clone();
    }

    // SAFETY: the table was found under this version's symbol; there is no entry, so the library
    // has not been initialised through this crate.
    let started = unsafe { Core::start(library, name, abi, table) };
    let started = started.map_err(|error| match error {
        Error::Call { .. } if was_loaded && !abi.has_contexts() => Error::InitialisedBefore {
            library: name.to_owned(),
            reason: error.to_string(),
        },
        error => error,
    });
    let mut useless = None;
    let outcome = started.and_then(|mut core| match core.find_devices() {
        Ok(()) => Ok(Arc::new(core)),
        Err(error) => {
            useless = Some(core);
            Err(error)
        }
    });
    if !abi.has_contexts() {
        outcomes.insert(identity, (abi.version, outcome.clone()));
    }
    // In this order, since dropping a core takes the lock.
    drop(outcomes);
    drop(useless);
    outcome
}

/// Returns the loader's handle: the same for the same file, whatever name it was opened by.
fn identify(library: Library) -> (Library, usize) {
    let raw = library.into_raw();
    // SAFETY: `raw` was just taken from a library and is owned once.
    (unsafe { Library::from_raw(raw) }, raw as usize)
}

/// Returns the table to use: the newest, or the requested version.
fn choose(
    library: &Library,
    name: &str,
    version: Option<u32>,
) -> Result<(&'static Abi, *const c_void), Error> {
    let found: Vec<_> = ABIS
        .iter()
        .filter_map(|abi| Some((*abi, table(library, abi)?)))
        .collect();
    let Some(newest) = found.first() else {
        return Err(Error::NotAPlugin {
            library: name.to_owned(),
            oldest: ABIS[ABIS.len() - 1].version,
            newest: ABIS[0].version,
        });
    };
    match version {
        None => Ok(*newest),
        Some(version) => found
            .iter()
            .find(|(abi, _)| abi.version == version)
            .copied()
            .ok_or_else(|| Error::VersionMissing {
                library: name.to_owned(),
                version,
                found: found.iter().map(|(abi, _)| abi.version).collect(),
            }),
    }
}

fn table(library: &Library, abi: &Abi) -> Option<*const c_void> {
    // SAFETY: the symbol is data, and only its address is taken: a pointer is a valid type for it.
    let symbol = unsafe { library.get::<*const c_void>(abi.symbol.to_bytes_with_nul()) };
    let address = *symbol.ok()?;
    (!address.is_null()).then_some(address)
}
