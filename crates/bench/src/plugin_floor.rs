//! The floor of plugin lanes: the throughput of a NCCL net plugin with nothing between it and the
//! blocks.
//!
//! A raw `isend`/`irecv` loop over as many comms as the engine has lanes: each block is one
//! message, large ones are cut, as many are outstanding as a comm holds, the memory is registered
//! beforehand, and both sides know the order. On an unpack device the receiver copies the bytes
//! from the bounce pages to their block, as it must.

use std::collections::VecDeque;
use std::io;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{Ordering, fence};
use std::task::Poll;
use std::time::{Duration, Instant};

use tcpx::ncclnet::{
    self, DeviceType, Handle, MemoryHandle, MemoryKind, Plugin, RecvComm, Request, SendComm,
};
use tcpx::{Buffer, Config};

/// Time without completions after which the peer counts as lost.
const STALL: Duration = Duration::from_secs(30);
/// Time limit for connecting.
const CONNECT: Duration = Duration::from_secs(30);
/// The largest message on an unpack device, as in the engine.
const UNPACK_BYTES: usize = 512 << 10;

/// The comms of one stream of the floor.
#[derive(Debug)]
pub struct Comms {
    // Dropped before the memory that they use.
    send: SendComm,
    recv: RecvComm,
    landing: Option<Landing>,
}

/// The buffer for receives of an unpack device; the plugin never writes to it.
#[derive(Debug)]
struct Landing {
    handle: MemoryHandle,
    _memory: Buffer,
    ring: usize,
    bounce: usize,
}

/// Sets up the comms of one floor, using the streams to carry their handles; both sides at the same
/// time.
///
/// # Errors
/// An error of the plugin or the streams.
pub fn connect(config: &Config, streams: &[TcpStream]) -> io::Result<Vec<Comms>> {
    let plugin = match config.plugin_version() {
        0 => Plugin::open(config.plugin()),
        version => Plugin::open_version(config.plugin(), version),
    };
    let plugin = plugin.map_err(other)?;
    let mut comms = Vec::new();
    for (index, mut stream) in streams.iter().enumerate() {
        let device = index % plugin.devices().len();
        let mut listener = plugin.listen(device).map_err(other)?;
        let mut handle = [0; Handle::MAX_BYTES];
        let own = *listener.handle();
        handle[..own.as_bytes().len()].copy_from_slice(own.as_bytes());
        stream.write_all(&handle)?;
        stream.read_exact(&mut handle)?;
        let peer = Handle::from_bytes(&handle[..own.as_bytes().len()]).map_err(other)?;
        let mut connecting = plugin.connect(device, &peer).map_err(other)?;
        // Some plugins block in `accept` until the peer has connected.
        let accepting = std::thread::spawn(move || {
            let deadline = Instant::now() + CONNECT;
            poll(deadline, || listener.accept())
        });
        let send = poll(Instant::now() + CONNECT, || connecting.poll())?;
        let accepted = accepting.join();
        let mut recv = accepted.map_err(|_| io::Error::other("accepting panicked"))??;
        let landing = Landing::new(&mut recv)?;
        comms.push(Comms {
            send,
            recv,
            landing,
        });
    }
    Ok(comms)
}

fn poll<T>(
    deadline: Instant,
    mut attempt: impl FnMut() -> Poll<Result<T, ncclnet::Error>>,
) -> io::Result<T> {
    loop {
        if let Poll::Ready(result) = attempt() {
            return result.map_err(other);
        }
        if Instant::now() > deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn other(error: ncclnet::Error) -> io::Error {
    io::Error::other(error)
}

/// One entry of the ring.
#[repr(C)]
struct Fragment {
    source: u32,
    len: u32,
    target: u64,
}

impl Landing {
    fn new(comm: &mut RecvComm) -> io::Result<Option<Self>> {
        let Some(device) = comm.device_handle() else {
            return Ok(None);
        };
        let not_here = || io::Error::other("the plugin's bounce pages are on a GPU");
        let on_host = |address: usize, len: usize| {
            tcpx::cuda::locate(address, len).is_ok_and(|device| device.is_none())
        };
        if device.size != 24 || !on_host(device.handle as usize, 24) {
            return Err(not_here());
        }
        // SAFETY: the plugin reports that these 24 bytes exist, and they are in host memory.
        let [ring, bounce, _] = unsafe { device.handle.cast::<[usize; 3]>().read_unaligned() };
        if !on_host(bounce, 1) {
            return Err(not_here());
        }
        let memory = Buffer::new(UNPACK_BYTES + 4096);
        let start = memory.address().next_multiple_of(4096) as *mut u8;
        // SAFETY: inside the buffer, which is dropped after the comm.
        let handle = unsafe { comm.register(start, UNPACK_BYTES, MemoryKind::Cuda) };
        Ok(Some(Self {
            handle: handle.map_err(other)?,
            _memory: memory,
            ring,
            bounce,
        }))
    }

    /// Copies the bytes of receive `number` to `to`.
    fn unpack(&self, number: u64, to: &mut [u8]) -> io::Result<()> {
        let slot = (number % 16) as usize;
        let mut copied = 0;
        // SAFETY: the slot and the pages do not change between `test` and `consume`.
        unsafe {
            let count = ((self.ring + 524_288 + slot * 8) as *const u64).read_volatile();
            fence(Ordering::Acquire);
            let entries = (self.ring + slot * 32_768) as *const Fragment;
            for entry in std::slice::from_raw_parts(entries, count.min(2048) as usize) {
                let (from, len) = (self.bounce + entry.source as usize, entry.len as usize);
                let target = usize::try_from(entry.target)
                    .ok()
                    .and_then(|at| to.get_mut(at..at + len));
                let target = target.ok_or(io::ErrorKind::InvalidData)?;
                target.copy_from_slice(std::slice::from_raw_parts(from as *const u8, len));
                copied += len;
            }
        }
        if copied == to.len() {
            Ok(())
        } else {
            Err(io::ErrorKind::InvalidData.into())
        }
    }
}

/// Blocks of registered memory that a round moves.
pub struct Registered<'a, 'm> {
    comms: &'a mut Comms,
    send: Option<MemoryHandle>,
    recv: Option<MemoryHandle>,
    base: usize,
    blocks: &'a mut [&'m mut [u8]],
    call_bytes: usize,
}

impl<'a, 'm> Registered<'a, 'm> {
    /// Registers the memory that contains the blocks.
    ///
    /// # Errors
    /// The plugin's error.
    pub fn new(
        comms: &'a mut Comms,
        blocks: &'a mut [&'m mut [u8]],
        call_bytes: usize,
    ) -> io::Result<Self> {
        let start = |block: &&mut [u8]| block.as_ptr() as usize;
        let base = blocks.iter().map(start).min().unwrap_or_default();
        let end = blocks.iter().map(|block| start(block) + block.len()).max();
        let (data, bytes) = (base as *mut u8, end.unwrap_or(base) - base);
        let unpacks = comms.recv.properties().device_type == DeviceType::Unpack;
        // SAFETY: the blocks are borrowed for as long as this lives, and dropping it undoes the
        // registration; all of them are in one allocation.
        let send = unsafe { comms.send.register(data, bytes, MemoryKind::Host) }.map_err(other)?;
        let mut recv = None;
        if !unpacks {
            // SAFETY: as above.
            let handle = unsafe { comms.recv.register(data, bytes, MemoryKind::Host) };
            recv = Some(handle.map_err(other)?);
        }
        let limit = comms.send.properties().max_message_bytes;
        let limit = if unpacks {
            limit.min(UNPACK_BYTES)
        } else {
            limit
        };
        Ok(Self {
            comms,
            send: Some(send),
            recv,
            base,
            blocks,
            call_bytes: call_bytes.min(limit),
        })
    }

    /// Sends all blocks.
    ///
    /// # Errors
    /// The plugin's error, or no completion in time.
    pub fn send(&mut self) -> io::Result<()> {
        let comm = &mut self.comms.send;
        let memory = self.send.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        let mut pieces = Pieces::new(self.call_bytes);
        let mut posted: VecDeque<Request> = VecDeque::with_capacity(comm.slots());
        let mut patience = Patience::default();
        loop {
            while let Some((block, offset, len)) = pieces.peek(self.blocks) {
                let at = self.blocks[block].as_ptr() as usize + offset - self.base;
                match comm.isend(memory, at, len, 0).map_err(other)? {
                    Some(request) => posted.push_back(request),
                    None => break,
                }
                pieces.next(self.blocks);
            }
            let Some(oldest) = posted.front() else {
                return Ok(());
            };
            let done = comm.test(*oldest).map_err(other)?.is_some();
            if done {
                posted.pop_front();
            }
            patience.wait(done)?;
        }
    }

    /// Receives all blocks.
    ///
    /// # Errors
    /// As for [`Registered::send`].
    pub fn receive(&mut self) -> io::Result<()> {
        let comm = &mut self.comms.recv;
        let mut ahead = Pieces::new(self.call_bytes);
        let mut pieces = Pieces::new(self.call_bytes);
        let mut posted: VecDeque<Request> = VecDeque::with_capacity(comm.slots());
        let mut patience = Patience::default();
        loop {
            while let Some((block, offset, len)) = ahead.peek(self.blocks) {
                let request = match (&self.comms.landing, &self.recv) {
                    (Some(landing), _) => comm.irecv(&landing.handle, 0, len, 0),
                    (None, Some(memory)) => {
                        let at = self.blocks[block].as_ptr() as usize + offset - self.base;
                        comm.irecv(memory, at, len, 0)
                    }
                    (None, None) => return Err(io::ErrorKind::NotConnected.into()),
                };
                match request.map_err(other)? {
                    Some(request) => posted.push_back(request),
                    None => break,
                }
                ahead.next(self.blocks);
            }
            let Some(oldest) = posted.front().copied() else {
                return Ok(());
            };
            let done = comm.test(oldest).map_err(other)?.is_some();
            if done {
                if let (Some(landing), Some((block, offset, len))) =
                    (&self.comms.landing, pieces.peek(self.blocks))
                {
                    landing.unpack(
                        oldest.number(),
                        &mut self.blocks[block][offset..offset + len],
                    )?;
                }
                pieces.next(self.blocks);
                comm.consume(oldest).map_err(other)?;
                posted.pop_front();
            }
            patience.wait(done)?;
        }
    }
}

impl Drop for Registered<'_, '_> {
    fn drop(&mut self) {
        // A failed comm keeps the registration only until its own end, which is near.
        if let Some(memory) = self.send.take() {
            let _ = self.comms.send.deregister(memory);
        }
        if let Some(memory) = self.recv.take() {
            let _ = self.comms.recv.deregister(memory);
        }
    }
}

/// The position of a loop over the pieces of all blocks.
#[derive(Clone, Copy)]
struct Pieces {
    block: usize,
    offset: usize,
    call_bytes: usize,
}

impl Pieces {
    fn new(call_bytes: usize) -> Self {
        Self {
            block: 0,
            offset: 0,
            call_bytes,
        }
    }

    fn peek(&self, blocks: &[&mut [u8]]) -> Option<(usize, usize, usize)> {
        let left = blocks.get(self.block)?.len() - self.offset;
        Some((self.block, self.offset, left.min(self.call_bytes)))
    }

    fn next(&mut self, blocks: &[&mut [u8]]) {
        if let Some((_, _, len)) = self.peek(blocks) {
            self.offset += len;
            if self.offset == blocks[self.block].len() {
                (self.block, self.offset) = (self.block + 1, 0);
            }
        }
    }
}

/// Detects a plugin that completes nothing.
#[derive(Default)]
struct Patience {
    looks: u32,
    since: Option<Instant>,
}

impl Patience {
    fn wait(&mut self, moved: bool) -> io::Result<()> {
        if moved {
            *self = Self::default();
            return Ok(());
        }
        self.looks += 1;
        // Several comms may have to share a core.
        if self.looks.is_multiple_of(8) {
            std::thread::yield_now();
        }
        if self.looks.is_multiple_of(4096)
            && self.since.get_or_insert_with(Instant::now).elapsed() > STALL
        {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(())
    }
}
