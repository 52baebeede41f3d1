//! Loads the plugin as NCCL does, with a connected pair of comms and a reference unpacker.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::{CStr, CString, c_char, c_int, c_ulong, c_void};
use std::ptr::null_mut;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use nccl_net_tcpx_emu::counters::Counters;
use nccl_net_tcpx_emu::ring::{ENTRIES, Entry, RingLayout, SLOTS, UnpackHandle};
use nccl_net_tcpx_emu::tables::{
    DeviceHandle, HANDLE_BYTES, Logger, NetV6, NetV7, NetV8, memory_kind,
};

/// How long a test waits for something that must happen.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) type Request = *mut c_void;

/// Calls a member of a table.
macro_rules! net {
    ($table:expr, $member:ident($($arg:expr),* $(,)?)) => {{
        let function = $table.$member.expect(stringify!($member));
        // SAFETY: the test passes valid arguments, or violates the contract where the emulator
        // promises to detect it.
        unsafe { function($($arg),*) }
    }};
}
pub(crate) use net;

/// Everything the library exports.
pub(crate) struct Plugin {
    library: usize,
    pub(crate) v6: &'static NetV6,
    pub(crate) v7: &'static NetV7,
    pub(crate) v8: &'static NetV8,
    counters: unsafe extern "C" fn(*mut c_void, *mut Counters) -> c_int,
}

impl Plugin {
    /// Loads the library, once.
    pub(crate) fn load() -> &'static Self {
        static PLUGIN: OnceLock<Plugin> = OnceLock::new();
        PLUGIN.get_or_init(|| {
            let test = std::env::current_exe().expect("a test knows where it is");
            let path = test.with_file_name("libnccl_net_tcpx_emu.so");
            let name = CString::new(path.to_str().expect("a readable path")).expect("no NUL");
            // SAFETY: a terminated string.
            let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            assert!(!library.is_null(), "cannot load {}", path.display());
            let library = library as usize;
            // SAFETY: the symbols have these types, and the library stays loaded.
            unsafe {
                Self {
                    library,
                    v6: &*find(library, c"ncclNetPlugin_v6").cast(),
                    v7: &*find(library, c"ncclNetPlugin_v7").cast(),
                    v8: &*find(library, c"ncclNetPlugin_v8").cast(),
                    counters: std::mem::transmute::<
                        *mut c_void,
                        unsafe extern "C" fn(*mut c_void, *mut Counters) -> c_int,
                    >(find(library, c"tcpx_emu_counters")),
                }
            }
        })
    }

    /// Loads the library and initialises the v7 table.
    pub(crate) fn init() -> &'static Self {
        let plugin = Self::load();
        assert_eq!(net!(plugin.v7, init(Some(logger()))), 0);
        plugin
    }

    /// Returns whether the library exports such a symbol.
    pub(crate) fn exports(&self, name: &CStr) -> bool {
        // SAFETY: an open library and a terminated string.
        unsafe { !libc::dlsym(self.library as *mut c_void, name.as_ptr()).is_null() }
    }

    /// Returns the counters of the process, and of a comm unless it is null.
    pub(crate) fn counters(&self, comm: *mut c_void) -> Counters {
        let mut counters = Counters::default();
        // SAFETY: an open comm or null, and a place for the result.
        assert_eq!(unsafe { (self.counters)(comm, &raw mut counters) }, 0);
        counters
    }
}

fn find(library: usize, name: &CStr) -> *mut c_void {
    // SAFETY: an open library and a terminated string.
    let symbol = unsafe { libc::dlsym(library as *mut c_void, name.as_ptr()) };
    assert!(!symbol.is_null(), "{name:?} is not exported");
    symbol
}

static LINES: Mutex<Vec<(c_int, String)>> = Mutex::new(Vec::new());

/// Returns a logger that collects lines. Stable Rust cannot define a variadic function, but the
/// emulator passes exactly one string to its format, and on every Linux ABI that NCCL supports such
/// a call looks like one with six plain arguments.
pub(crate) fn logger() -> Logger {
    extern "C" fn collect(
        level: c_int,
        _flags: c_ulong,
        _file: *const c_char,
        _line: c_int,
        format: *const c_char,
        text: *const c_char,
    ) {
        // SAFETY: terminated strings.
        let (format, text) = unsafe { (CStr::from_ptr(format), CStr::from_ptr(text)) };
        assert_eq!(format, c"%s");
        let text = text.to_string_lossy().into_owned();
        // Shown when a test fails.
        eprintln!("{level} {text}");
        LINES
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((level, text));
    }
    type Plain = extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, *const c_char);
    // SAFETY: see above.
    unsafe { std::mem::transmute::<Plain, Logger>(collect as Plain) }
}

/// Returns whether a warning with this text was logged.
pub(crate) fn warned(text: &str) -> bool {
    let lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    lines
        .iter()
        .any(|(level, line)| *level == 2 && line.contains(text))
}

/// Waits until `condition` holds; fails the test otherwise.
pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "waited in vain for {what}");
    }
}

/// Page-aligned memory.
pub(crate) struct Buffer {
    pub(crate) data: *mut u8,
    len: usize,
}

impl Buffer {
    pub(crate) fn new(len: usize) -> Self {
        let len = len.next_multiple_of(4096).max(4096);
        // SAFETY: not empty.
        let data = unsafe { alloc_zeroed(Self::layout(len)) };
        assert!(!data.is_null());
        Self { data, len }
    }

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len, 4096).expect("a sane size")
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: allocated with this length and zeroed.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.len) }
    }

    pub(crate) fn at(&self, offset: usize) -> *mut c_void {
        assert!(offset <= self.len);
        self.data.wrapping_add(offset).cast()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`.
        unsafe { dealloc(self.data, Self::layout(self.len)) };
    }
}

/// Returns bytes that distinguish message `k` and position from all others.
pub(crate) fn pattern(k: u64, len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|i| {
            let word = (k << 40 | i >> 3)
                .wrapping_add(1)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (word >> (8 * (i % 8))) as u8
        })
        .collect()
}

/// Memory of one kind, registered on one comm.
pub(crate) struct Registered {
    pub(crate) buffer: Buffer,
    pub(crate) mhandle: *mut c_void,
}

/// One connection of the v7 table, both ends in this process.
pub(crate) struct Pair {
    pub(crate) plugin: &'static Plugin,
    pub(crate) send: *mut c_void,
    pub(crate) recv: *mut c_void,
    unpack: UnpackHandle,
    /// Number of receives unpacked: the next one's slot is this modulo 16.
    pub(crate) received: u64,
}

impl Pair {
    /// Initialises the plugin and connects.
    pub(crate) fn new() -> Self {
        Self::on(Plugin::init(), 0)
    }

    /// Connects over a device.
    pub(crate) fn on(plugin: &'static Plugin, dev: c_int) -> Self {
        let (send, recv, handle) = connect(plugin, dev);
        // SAFETY: the plugin filled in the address of its 24 bytes; in host mode they are readable.
        let unpack = unsafe { handle.handle.cast::<UnpackHandle>().read() };
        Self {
            plugin,
            send,
            recv,
            unpack,
            received: 0,
        }
    }

    pub(crate) fn register(&self, comm: *mut c_void, len: usize, kind: c_int) -> Registered {
        let buffer = Buffer::new(len);
        let mut mhandle = null_mut();
        let size = buffer.len() as c_int;
        let code = net!(
            self.plugin.v7,
            reg_mr(comm, buffer.at(0), size, kind, &raw mut mhandle)
        );
        assert_eq!(code, 0);
        Registered { buffer, mhandle }
    }

    /// Returns a buffer for sends, of the kind CUDA.
    pub(crate) fn source(&self, len: usize) -> Registered {
        self.register(self.send, len, memory_kind::CUDA)
    }

    /// Returns a buffer for receives, of the kind CUDA.
    pub(crate) fn target(&self, len: usize) -> Registered {
        self.register(self.recv, len, memory_kind::CUDA)
    }

    /// `isend`, once.
    pub(crate) fn try_isend(&self, from: &Registered, size: usize) -> Result<Request, c_int> {
        self.isend_at(from, 0, size)
    }

    pub(crate) fn isend_at(
        &self,
        from: &Registered,
        offset: usize,
        size: usize,
    ) -> Result<Request, c_int> {
        let mut request = null_mut();
        let (data, size) = (from.buffer.at(offset), size as c_int);
        let code = net!(
            self.plugin.v7,
            isend(self.send, data, size, 7, from.mhandle, &raw mut request)
        );
        if code == 0 { Ok(request) } else { Err(code) }
    }

    /// `irecv`, once.
    pub(crate) fn try_irecv(&self, to: &Registered, size: usize) -> Result<Request, c_int> {
        let mut request = null_mut();
        let (mut data, mut size, mut tag) = (to.buffer.at(0), size as c_int, 99);
        let mut mhandle = to.mhandle;
        let code = net!(
            self.plugin.v7,
            irecv(
                self.recv,
                1,
                &raw mut data,
                &raw mut size,
                &raw mut tag,
                &raw mut mhandle,
                &raw mut request
            )
        );
        if code == 0 { Ok(request) } else { Err(code) }
    }

    pub(crate) fn isend(&self, from: &Registered, size: usize) -> Request {
        let request = self.try_isend(from, size).expect("isend succeeds");
        assert!(!request.is_null());
        request
    }

    pub(crate) fn irecv(&self, to: &Registered, size: usize) -> Request {
        let request = self.try_irecv(to, size).expect("irecv succeeds");
        assert!(!request.is_null());
        request
    }

    /// Performs `test`: returns whether it is done, or the code.
    pub(crate) fn test(&self, request: Request) -> Result<bool, c_int> {
        let mut done = -1;
        match net!(self.plugin.v7, test(request, &raw mut done, null_mut())) {
            0 => Ok(done == 1),
            code => Err(code),
        }
    }

    /// Tests both ends until both are done.
    pub(crate) fn finish(&self, send: Request, recv: Request) {
        let (mut sent, mut received) = (false, false);
        until("a message", || {
            sent = sent || self.test(send).expect("the send goes well");
            received = received || self.test(recv).expect("the receive goes well");
            sent && received
        });
    }

    /// `irecvConsumed`.
    pub(crate) fn consume(&self, request: Request) -> c_int {
        net!(self.plugin.v7, irecv_consumed(self.recv, 1, request))
    }

    /// Returns the ring slot of receive `k`.
    pub(crate) fn entries(&self, k: u64) -> Vec<Entry> {
        let slot = (k % SLOTS as u64) as usize;
        let ring: *const RingLayout = self.unpack.meta;
        // SAFETY: the ring lives as long as the comm; host mode.
        unsafe {
            let count = (&raw const (*ring).count[slot]).read_volatile() as usize;
            assert!(count <= ENTRIES);
            (0..count)
                .map(|i| (&raw const (*ring).entries[slot][i]).read_volatile())
                .collect()
        }
    }

    /// Returns the bytes in the bounce pages that an entry describes.
    pub(crate) fn page_bytes(&self, entry: &Entry) -> Vec<u8> {
        // SAFETY: within the arena, as the plugin reports; host mode.
        unsafe {
            let from = self.unpack.bounce.add(entry.src_off as usize);
            std::slice::from_raw_parts(from, entry.len as usize).to_vec()
        }
    }

    /// Head of the unpack handle.
    pub(crate) fn unpack_head(&self) -> u64 {
        self.unpack.head
    }

    /// Rebuilds the next receive from ring and pages, as a reference unpacker, and checks that the
    /// entries cover every byte exactly once and stay within their pages.
    pub(crate) fn unpack(&mut self) -> Vec<u8> {
        let entries = self.entries(self.received);
        self.received += 1;
        let total = entries
            .iter()
            .map(|entry| u64::from(entry.len))
            .sum::<u64>();
        let mut message = vec![0; total as usize];
        let mut covered = vec![false; total as usize];
        for entry in &entries {
            assert!(entry.len > 0);
            let page = entry.src_off / 4096;
            assert_eq!(
                (entry.src_off + entry.len - 1) / 4096,
                page,
                "{entry:?} leaves its page"
            );
            let range = entry.dst_off as usize..entry.dst_off as usize + entry.len as usize;
            assert!(
                !covered[range.clone()].contains(&true),
                "{entry:?} overlaps another"
            );
            covered[range.clone()].fill(true);
            message[range].copy_from_slice(&self.page_bytes(entry));
        }
        assert!(!covered.contains(&false), "the entries leave a gap");
        message
    }

    /// Sends one message, receives, unpacks, verifies and consumes it.
    pub(crate) fn exchange(&mut self, from: &mut Registered, to: &Registered, size: usize) {
        let message = pattern(self.received, size);
        from.buffer.bytes()[..size].copy_from_slice(&message);
        let (recv, send) = (self.irecv(to, size), self.isend(from, size));
        self.finish(send, recv);
        assert!(
            self.unpack() == message,
            "message {} of {size} bytes differs",
            self.received - 1
        );
        assert_eq!(self.consume(recv), 0);
    }

    /// Closes both ends and checks that nothing is leaked.
    pub(crate) fn close(self) {
        assert_eq!(net!(self.plugin.v7, close_send(self.send)), 0);
        assert_eq!(net!(self.plugin.v7, close_recv(self.recv)), 0);
    }
}

/// Connects until both sides have their comm.
pub(crate) fn connect(
    plugin: &'static Plugin,
    dev: c_int,
) -> (*mut c_void, *mut c_void, DeviceHandle) {
    let mut handle = [0u8; HANDLE_BYTES];
    let (mut listen, mut send, mut recv) = (null_mut(), null_mut::<c_void>(), null_mut::<c_void>());
    let mut device_handle = DeviceHandle::ZERO;
    let raw = handle.as_mut_ptr().cast::<c_void>();
    assert_eq!(net!(plugin.v7, listen(dev, raw, &raw mut listen)), 0);
    until("a connection", || {
        if send.is_null() {
            let mut none = null_mut();
            assert_eq!(
                net!(plugin.v7, connect(dev, raw, &raw mut send, &raw mut none)),
                0
            );
        }
        if recv.is_null() {
            let mut inner = &raw mut device_handle;
            assert_eq!(
                net!(plugin.v7, accept(listen, &raw mut recv, &raw mut inner)),
                0
            );
        }
        !send.is_null() && !recv.is_null()
    });
    assert_eq!(net!(plugin.v7, close_listen(listen)), 0);
    (send, recv, device_handle)
}
