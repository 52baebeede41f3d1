//! Maps device memory of another process on the same host.
//!
//! There are three kinds of memory, each shared in its own way: an allocation of `cudaMalloc` has
//! an IPC handle, virtual memory has a file descriptor for each physical piece behind it, and
//! memory of a pool has the pool's file descriptor. [`Export`] describes any of them, and
//! [`Mapped`] is the memory in the process that mapped it.

mod description;

use std::ffi::{c_int, c_void};
use std::hash::{BuildHasher, RandomState};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Arc, OnceLock};

pub use description::{Description, Gpu, MAX_PIECES};
use description::{OPAQUE, Way};

use crate::context::{Context, log};
use crate::error::Error;
use crate::locate::extent;
use crate::sys::{self, Api};
use crate::{Device, Range, info};

/// Device memory that another process may map, made by [`Device::export`]: an encoded description,
/// and file descriptors to be passed with it, in order.
///
/// The file descriptors give access to the memory. Closing them, by dropping this value, ends no
/// existing mapping. Memory of `cudaMalloc` and of pools must not be freed before the other
/// processes have unmapped it.
#[derive(Debug)]
pub struct Export {
    description: Description,
    fds: Vec<OwnedFd>,
}

impl Export {
    /// Returns the description by which the memory is mapped.
    #[must_use]
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// Returns the file descriptors, as many as the description's [`Description::fd_count`].
    #[must_use]
    pub fn fds(&self) -> &[OwnedFd] {
        &self.fds
    }

    /// Splits the export into its two parts.
    #[must_use]
    pub fn into_parts(self) -> (Description, Vec<OwnedFd>) {
        (self.description, self.fds)
    }
}

/// Device memory of another process, mapped into one context of this one. Unmapped when dropped:
/// keep it until the copies that use it are done.
#[derive(Debug)]
pub struct Mapped {
    context: Arc<Context>,
    /// Zero until it is mapped.
    address: sys::DevicePtr,
    description: Description,
    how: How,
}

/// The kind of mapping, which determines how to undo it.
#[derive(Debug)]
enum How {
    Ipc,
    /// A reservation as long as the memory, and the lengths of the pieces mapped into it.
    Pieces(Vec<usize>),
    /// The address of an imported pool.
    Pool(usize),
}

impl Mapped {
    /// Returns the address of the first byte, in this process.
    #[must_use]
    pub fn address(&self) -> usize {
        self.address as usize
    }

    /// Returns the length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.description.len
    }

    /// Returns the device whose queues copy to and from the memory.
    #[must_use]
    pub fn device(&self) -> Arc<dyn Device> {
        self.context.arc()
    }

    /// Returns the description that was imported.
    #[must_use]
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// Translates a range of the other process into this one; `None` unless all of it is mapped.
    #[must_use]
    pub fn range(&self, theirs: Range) -> Option<Range> {
        self.description.contains(theirs).then(|| Range {
            address: self.address() + (theirs.address - self.description.base),
            len: theirs.len,
        })
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // A destroyed context has ended its IPC mappings; other mappings belong to the process.
        let scope = self.context.enter();
        let api = self.context.api;
        let unmapping = "unmapping another process's memory";
        match &self.how {
            How::Ipc if self.address != 0 && scope.is_ok() => {
                // SAFETY: opened by `map_handle`; users of the memory keep this value until their
                // copies are done.
                let code = unsafe { (api.ipc_close_mem_handle)(self.address) };
                log(api, code, unmapping);
            }
            How::Ipc => {}
            How::Pieces(pieces) => {
                let mut at = self.address;
                for &len in pieces {
                    // SAFETY: mapped by `map_pieces`; as above.
                    let code = unsafe { (api.mem_unmap)(at, len) };
                    log(api, code, unmapping);
                    at += len as u64;
                }
                if self.address != 0 {
                    // SAFETY: reserved by `map_pieces` with this length, and empty.
                    let code = unsafe { (api.mem_address_free)(self.address, self.len()) };
                    log(api, code, "freeing a range of addresses");
                }
            }
            &How::Pool(pool) => {
                if self.address != 0 {
                    // SAFETY: imported by `map_pool`; as above.
                    let code = unsafe { (api.mem_free)(self.address) };
                    log(api, code, unmapping);
                }
                let pool = std::ptr::with_exposed_provenance_mut(pool);
                // SAFETY: imported by `map_pool`, and its only memory has been freed.
                let code = unsafe { (api.mem_pool_destroy)(pool) };
                log(api, code, "closing another process's pool");
            }
        }
    }
}

/// Maps memory of another process on the GPU where it is, in the device's primary context.
/// [`Device::import`] maps it for another context, or another GPU.
///
/// `bytes` and `fds` are the two parts of an [`Export`]; they may be anything.
///
/// # Errors
/// As for [`Device::import`], and [`Error::BadDescription`].
pub fn import(bytes: &[u8], fds: &[OwnedFd]) -> Result<Mapped, Error> {
    let description = Description::decode(bytes)?;
    refuse_own(&description)?;
    let api = sys::initialised()?;
    let ordinal = find(api, description.gpu)?;
    map(&Context::primary(api, ordinal)?, &description, fds)
}

/// Identifies this process among all that may have exported memory, including processes with the
/// same id in another PID namespace.
fn process() -> [u8; 16] {
    static NAME: OnceLock<[u8; 16]> = OnceLock::new();
    *NAME.get_or_init(|| {
        // The keys are random bytes from the system.
        let random = RandomState::new();
        let half = |which: u8| random.hash_one(which).to_le_bytes();
        let mut name = [0; 16];
        name[..8].copy_from_slice(&half(0));
        name[8..].copy_from_slice(&half(1));
        name
    })
}

fn refuse_own(description: &Description) -> Result<(), Error> {
    match description.owner == process() {
        true => Err(Error::OwnMemory),
        false => Ok(()),
    }
}

/// Returns the UUID of a device.
fn gpu_of(api: &Api, device: sys::Device) -> Result<Gpu, Error> {
    let mut uuid = [0; 16];
    // SAFETY: stores 16 bytes.
    let code = unsafe { (api.device_get_uuid)(&mut uuid, device) };
    api.check(code, "asking for the UUID of a device")?;
    Ok(Gpu(uuid))
}

/// Returns the ordinal of a GPU in this process.
fn find(api: &Api, gpu: Gpu) -> Result<u32, Error> {
    for ordinal in 0..info::count(api)? {
        if gpu_of(api, info::raw_device(api, ordinal)?)? == gpu {
            return Ok(ordinal);
        }
    }
    Err(Error::GpuNotVisible { gpu })
}

/// The driver's description of an address.
struct Kind {
    is_device: bool,
    ordinal: u32,
    has_ipc_handle: bool,
    /// Bits of `CUmemAllocationHandleType`.
    handle_types: u64,
    pool: sys::MemPool,
}

impl Kind {
    fn of(api: &Api, address: usize) -> Result<Self, Error> {
        let attributes = [
            sys::POINTER_MEMORY_TYPE,
            sys::POINTER_IS_MANAGED,
            sys::POINTER_DEVICE_ORDINAL,
            sys::POINTER_IS_LEGACY_IPC_CAPABLE,
            sys::POINTER_ALLOWED_HANDLE_TYPES,
            sys::POINTER_MEMPOOL_HANDLE,
        ];
        let [kind, is_managed, ordinal, is_legacy, handle_types, pool] = api
            .pointer_attributes(address, attributes)
            .map_err(|code| api.error(code, "asking what kind of memory lies at an address"))?;
        Ok(Self {
            is_device: kind == u64::from(sys::MEMORY_TYPE_DEVICE) && is_managed == 0,
            ordinal: ordinal as u32,
            has_ipc_handle: is_legacy != 0,
            handle_types,
            pool: pool as sys::MemPool,
        })
    }

    /// Returns whether it was created to be exported as a file descriptor.
    fn has_fd(&self) -> bool {
        self.handle_types & sys::HANDLE_POSIX_FD as u64 != 0
    }
}

/// Describes the allocations behind a range of a context's device.
pub(crate) fn export(context: &Context, range: Range) -> Result<Export, Error> {
    let api = context.api;
    let _scope = context.enter()?;
    let refused = |reason| Error::NotShareable {
        address: range.address,
        reason,
    };
    let kind = Kind::of(api, range.address)?;
    let found = extent(api, range.address);
    let (base, end) = match found {
        Some(found) if kind.is_device => found,
        _ => return Err(refused("it is not memory of a GPU")),
    };
    let (reached, way, fds) = if kind.has_ipc_handle {
        (end, Way::Ipc(ipc_handle(api, base)?), Vec::new())
    } else if Handle::at(api, base).is_ok() {
        let pieces = pieces_of(api, (base, end), range)?;
        let fds = export_pieces(api, &kind, base, &pieces)?;
        let reached = base + pieces.iter().sum::<usize>();
        (reached, Way::Pieces(pieces), fds)
    } else if !kind.pool.is_null() {
        let (fd, pointer) = export_pool(api, &kind, base)?;
        (end, Way::Pool(pointer), vec![fd])
    } else {
        return Err(refused("the driver has no handle for its kind of memory"));
    };
    if reached < range.address.saturating_add(range.len) {
        return Err(Error::OutOfAllocation {
            address: range.address,
            len: range.len,
            base,
            size: reached - base,
        });
    }
    let description = Description {
        gpu: gpu_of(api, info::raw_device(api, kind.ordinal)?)?,
        owner: process(),
        base,
        len: reached - base,
        way,
    };
    Ok(Export { description, fds })
}

fn ipc_handle(api: &Api, base: usize) -> Result<[u8; OPAQUE], Error> {
    let mut handle = sys::Opaque([0; OPAQUE]);
    // SAFETY: stores 64 bytes.
    let code = unsafe { (api.ipc_get_mem_handle)(&mut handle, base as sys::DevicePtr) };
    api.check(code, "asking for the IPC handle of device memory")?;
    Ok(handle.0)
}

/// A reference to a piece of physical memory.
struct Handle<'a>(&'a Api, sys::MemHandle);

impl<'a> Handle<'a> {
    /// Returns the piece mapped at an address. Fails if it is not virtual memory.
    fn at(api: &'a Api, address: usize) -> Result<Self, Error> {
        let mut handle = 0;
        let address = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: stores a handle; the driver only looks the address up.
        let code = unsafe { (api.mem_retain_allocation_handle)(&mut handle, address) };
        api.check(
            code,
            "asking which piece of virtual memory lies at an address",
        )?;
        Ok(Self(api, handle))
    }

    /// Imports a piece of another process.
    fn import(api: &'a Api, fd: &OwnedFd) -> Result<Self, Error> {
        let mut handle = 0;
        // SAFETY: stores a handle; the driver refuses a descriptor that is not one of its own, and
        // does not keep it.
        let code = unsafe {
            (api.mem_import_from_shareable_handle)(&mut handle, os_handle(fd), sys::HANDLE_POSIX_FD)
        };
        api.check(code, "importing another process's memory")?;
        Ok(Self(api, handle))
    }

    fn export(&self) -> Result<OwnedFd, Error> {
        let mut fd: RawFd = -1;
        // SAFETY: stores a file descriptor.
        let code = unsafe {
            (self.0.mem_export_to_shareable_handle)(&mut fd, self.1, sys::HANDLE_POSIX_FD, 0)
        };
        self.0.check(code, "exporting a piece of virtual memory")?;
        Ok(own(fd))
    }
}

impl Drop for Handle<'_> {
    fn drop(&mut self) {
        // SAFETY: releases one reference. Existing mappings stay.
        let code = unsafe { (self.0.mem_release)(self.1) };
        log(self.0, code, "releasing a piece of virtual memory");
    }
}

/// Returns a file descriptor in the driver's format.
fn os_handle(fd: &OwnedFd) -> *mut c_void {
    std::ptr::without_provenance_mut(fd.as_raw_fd() as usize)
}

/// Takes ownership of a file descriptor that the driver has made.
fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: the descriptor is new, and nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: sets a flag of an owned descriptor: started programs do not inherit it.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) };
    fd
}

/// Returns the lengths of the adjacent pieces that contain a range, of which the first is given.
fn pieces_of(api: &Api, first: (usize, usize), range: Range) -> Result<Vec<usize>, Error> {
    let end = range.address.saturating_add(range.len);
    let (mut start, mut reached) = first;
    let mut pieces = vec![reached - start];
    while reached < end {
        (start, reached) = match extent(api, reached) {
            Some(next) if next.0 == reached && next.1 > next.0 => next,
            _ => break,
        };
        if pieces.len() == MAX_PIECES {
            return Err(Error::TooManyPieces {
                address: range.address,
                len: range.len,
                most: MAX_PIECES,
            });
        }
        pieces.push(reached - start);
    }
    Ok(pieces)
}

/// Exports the descriptors of adjacent pieces from `base` on.
fn export_pieces(
    api: &Api,
    kind: &Kind,
    base: usize,
    pieces: &[usize],
) -> Result<Vec<OwnedFd>, Error> {
    let mut at = base;
    let mut fds = Vec::with_capacity(pieces.len());
    for len in pieces {
        let fd = Handle::at(api, at).and_then(|handle| handle.export());
        fds.push(fd.map_err(|error| match kind.has_fd() {
            true => error,
            false => Error::NotShareable {
                address: base,
                reason: "it is virtual memory that was created without a shareable handle type: \
                         create it with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, or allocate it \
                         with cudaMalloc (PyTorch: without expandable_segments)",
            },
        })?);
        at += len;
    }
    Ok(fds)
}

/// Exports the descriptor of a pool, and the identifier of an allocation in it.
fn export_pool(api: &Api, kind: &Kind, base: usize) -> Result<(OwnedFd, [u8; OPAQUE]), Error> {
    let mut fd: RawFd = -1;
    // SAFETY: stores a file descriptor.
    let code = unsafe {
        (api.mem_pool_export_to_shareable_handle)(&mut fd, kind.pool, sys::HANDLE_POSIX_FD, 0)
    };
    if code != sys::SUCCESS && !kind.has_fd() {
        let mut default = std::ptr::null_mut();
        let device = info::raw_device(api, kind.ordinal)?;
        // SAFETY: stores a handle.
        unsafe { (api.device_get_default_mem_pool)(&mut default, device) };
        return Err(Error::NotShareable {
            address: base,
            reason: if kind.pool == default {
                "memory of the device's default pool (cudaMallocAsync) has no IPC handle: allocate \
                 it with cudaMalloc, or from a pool that is created with \
                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"
            } else {
                "it is memory of a pool that was created without a shareable handle type: create \
                 the pool with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, or use cudaMalloc"
            },
        });
    }
    api.check(code, "exporting a memory pool")?;
    let fd = own(fd);
    let mut pointer = sys::Opaque([0; OPAQUE]);
    // SAFETY: stores 64 bytes.
    let code = unsafe { (api.mem_pool_export_pointer)(&mut pointer, base as sys::DevicePtr) };
    api.check(code, "exporting memory of a pool")?;
    Ok((fd, pointer.0))
}

/// Maps another process's memory into a context.
pub(crate) fn map(
    context: &Arc<Context>,
    description: &Description,
    fds: &[OwnedFd],
) -> Result<Mapped, Error> {
    refuse_own(description)?;
    if fds.len() != description.fd_count() {
        return Err(Error::BadDescription {
            reason: "its number of file descriptors differs from the number received",
        });
    }
    let _scope = context.enter()?;
    check_reach(context, description.gpu)?;
    match &description.way {
        Way::Ipc(handle) => map_handle(context, description, handle),
        Way::Pieces(pieces) => map_pieces(context, description, pieces, fds),
        Way::Pool(pointer) => map_pool(context, description, pointer, &fds[0]),
    }
}

/// Checks that a context's device can access the memory of a GPU.
fn check_reach(context: &Context, gpu: Gpu) -> Result<(), Error> {
    let api = context.api;
    if gpu_of(api, context.device())? == gpu {
        return Ok(());
    }
    let owner = find(api, gpu)?;
    let mut can: c_int = 0;
    let owner_device = info::raw_device(api, owner)?;
    // SAFETY: stores a number.
    let code = unsafe { (api.device_can_access_peer)(&mut can, context.device(), owner_device) };
    api.check(code, "asking for peer access between GPUs")?;
    match can {
        0 => Err(Error::NoPeerAccess {
            device: context.ordinal(),
            owner,
        }),
        _ => Ok(()),
    }
}

impl Mapped {
    /// From here on `drop` undoes the mapping.
    fn new(context: &Arc<Context>, description: &Description, how: How) -> Self {
        Self {
            context: Arc::clone(context),
            address: 0,
            description: description.clone(),
            how,
        }
    }

    /// Checks that the memory is as long as its description: a copy past its end would end the
    /// context.
    fn check_extent(self) -> Result<Self, Error> {
        let start = self.address();
        let mapped = extent(self.context.api, start).map_or(0, |(_, end)| end - start);
        if mapped < self.len() {
            return Err(Error::MappedShort {
                described: self.len(),
                mapped,
            });
        }
        Ok(self)
    }
}

fn map_handle(
    context: &Arc<Context>,
    description: &Description,
    handle: &[u8; OPAQUE],
) -> Result<Mapped, Error> {
    let api = context.api;
    let mut mapped = Mapped::new(context, description, How::Ipc);
    let flags = sys::IPC_LAZY_ENABLE_PEER_ACCESS;
    // SAFETY: stores an address; the driver refuses a handle that is none.
    let code =
        unsafe { (api.ipc_open_mem_handle)(&mut mapped.address, sys::Opaque(*handle), flags) };
    if code != sys::SUCCESS {
        mapped.address = 0;
    }
    api.check(code, "opening the IPC handle of another process's memory")?;
    mapped.check_extent()
}

fn map_pieces(
    context: &Arc<Context>,
    description: &Description,
    pieces: &[usize],
    fds: &[OwnedFd],
) -> Result<Mapped, Error> {
    let api = context.api;
    let mut mapped = Mapped::new(context, description, How::Pieces(Vec::new()));
    // SAFETY: stores an address.
    let code = unsafe { (api.mem_address_reserve)(&mut mapped.address, description.len, 0, 0, 0) };
    if code != sys::SUCCESS {
        mapped.address = 0;
    }
    api.check(code, "reserving a range of addresses")?;
    let mut at = mapped.address;
    for (&len, fd) in pieces.iter().zip(fds) {
        let handle = Handle::import(api, fd)?;
        // SAFETY: a part of the reservation above; the driver refuses more than the piece has.
        let code = unsafe { (api.mem_map)(at, len, 0, handle.1, 0) };
        api.check(code, "mapping a piece of another process's memory")?;
        if let How::Pieces(pieces) = &mut mapped.how {
            pieces.push(len);
        }
        at += len as u64;
    }
    let access = sys::AccessDescription::read_write(context.device());
    // SAFETY: all of the range was mapped just now.
    let code = unsafe { (api.mem_set_access)(mapped.address, description.len, &access, 1) };
    api.check(code, "getting access to another process's memory")?;
    Ok(mapped)
}

fn map_pool(
    context: &Arc<Context>,
    description: &Description,
    pointer: &[u8; OPAQUE],
    fd: &OwnedFd,
) -> Result<Mapped, Error> {
    let api = context.api;
    let mut pool: sys::MemPool = std::ptr::null_mut();
    // SAFETY: stores a handle; the driver refuses a descriptor that is not one of its own, and does
    // not keep it.
    let code = unsafe {
        (api.mem_pool_import_from_shareable_handle)(
            &mut pool,
            os_handle(fd),
            sys::HANDLE_POSIX_FD,
            0,
        )
    };
    api.check(code, "importing another process's pool")?;
    let mut mapped = Mapped::new(context, description, How::Pool(pool.expose_provenance()));
    if gpu_of(api, context.device())? != description.gpu {
        let access = sys::AccessDescription::read_write(context.device());
        // SAFETY: the pool was imported above.
        let code = unsafe { (api.mem_pool_set_access)(pool, &access, 1) };
        api.check(code, "getting access to another process's pool")?;
    }
    let mut pointer = sys::Opaque(*pointer);
    // SAFETY: stores an address; the driver refuses an identifier that is not of the pool.
    let code = unsafe { (api.mem_pool_import_pointer)(&mut mapped.address, pool, &mut pointer) };
    if code != sys::SUCCESS {
        mapped.address = 0;
    }
    api.check(code, "mapping memory of another process's pool")?;
    mapped.check_extent()
}
