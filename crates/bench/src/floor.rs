//! The floor: the throughput of this machine's sockets with nothing between them and the blocks.
//!
//! One blocking TCP stream per thread, `writev` from the source blocks and `readv` into the
//! destination blocks, no headers, no checks, no regions. It moves the same blocks, in the same
//! order and over as many streams as the engine has lanes. Any difference to the engine is the
//! engine's own cost.
//!
//! ```text
//!   WRITE   initiator ── blocks ──────────────► target       READ   initiator ── 1 byte ───► target
//!           initiator ◄───────────── 1 byte ── target               initiator ◄── blocks ── target
//! ```
//!
//! The initiator's clock runs from its first system call to the arrival of the last stream's last
//! byte. A measurement tries the call sizes in [`CALL_BYTES`] and uses the fastest, and the streams
//! use the congestion control of the engine's lanes: a feature that the kernel offers to everybody
//! must not count as the engine's merit.

mod blocks;
mod door;

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_tcp_congestion;
use serde::{Deserialize, Serialize};

pub use self::blocks::Blocks;
pub use self::door::{Door, Listener};
use crate::bootstrap::remaining;
use crate::plugin_floor::{self, Comms, Registered};
use crate::workload::Op;

/// Maximum streams of a floor.
pub const MAX_STREAMS: usize = 64;

/// Bytes offered to one system call: the candidates worth trying.
///
/// On loopback 64 and 128 KiB were clearly slower; these three were within the noise of each other.
/// `MSG_WAITALL` and fixed socket buffers won some runs and lost others, so they are left out.
pub const CALL_BYTES: [usize; 3] = [256 << 10, 512 << 10, 1 << 20];

/// The kernel's `UIO_MAXIOV`: entries of one vectored call.
const MAX_PIECES: usize = 1024;

/// Time without progress after which a stream counts as lost.
const STALL: Duration = Duration::from_secs(30);

/// Magic bytes of a floor stream, followed by the nonce of its listener and its index.
const MAGIC: [u8; 8] = *b"tcpx-flr";

/// Proves that a stream belongs to this measurement.
pub type Nonce = [u8; 16];

/// The way the initiator waits for the last byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Waiting {
    /// Blocked in the kernel (`Transfer::wait`, a blocking `readv`).
    Block,
    /// Polling (`Transfer::poll`, a non-blocking `readv`).
    Poll,
}

/// The parameters of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tuning {
    /// Bytes offered to one system call; at least one.
    pub call_bytes: usize,
    /// The way the initiator waits.
    pub waiting: Waiting,
}

/// The streams of one floor, connected.
#[derive(Debug)]
pub struct Streams {
    sockets: Vec<TcpStream>,
    /// The comms that carry the blocks instead, one per stream, if a plugin does.
    comms: Vec<Mutex<Comms>>,
}

impl Streams {
    /// Opens `count` streams to the [`Door`] of a [`Listener`].
    pub fn connect(
        address: SocketAddr,
        nonce: Nonce,
        count: usize,
        timeout: Duration,
    ) -> io::Result<Streams> {
        let deadline = Instant::now() + timeout;
        let mut sockets = Vec::with_capacity(count);
        for index in 0..count as u16 {
            let mut socket = TcpStream::connect_timeout(&address, remaining(deadline)?)?;
            configure(&socket)?;
            let mut hello = [0; 26];
            hello[..8].copy_from_slice(&MAGIC);
            hello[8..24].copy_from_slice(&nonce);
            hello[24..].copy_from_slice(&index.to_be_bytes());
            socket.write_all(&hello)?;
            sockets.push(socket);
        }
        Ok(Streams {
            sockets,
            comms: Vec::new(),
        })
    }

    /// Sets the congestion control of all streams. An unknown name is no error, as with the
    /// engine's lanes: the streams keep the system's default.
    pub fn set_congestion_control(&self, name: &str) {
        for socket in &self.sockets {
            let _ = set_tcp_congestion(socket, name);
        }
    }

    /// Lets a plugin carry the blocks, as on the lanes of a session with this configuration. Both
    /// sides call this at the same time; the streams still signal when a side is ready.
    ///
    /// # Errors
    /// The plugin's error.
    pub fn plug(&mut self, config: &tcpx::Config) -> io::Result<()> {
        let comms = plugin_floor::connect(config, &self.sockets)?;
        self.comms = comms.into_iter().map(Mutex::new).collect();
        Ok(())
    }

    /// Returns whether a plugin carries the blocks.
    pub fn is_plugged(&self) -> bool {
        !self.comms.is_empty()
    }

    fn comms(&self, index: usize) -> Option<&Mutex<Comms>> {
        self.comms.get(index)
    }

    /// Returns the number of streams.
    pub fn count(&self) -> usize {
        self.sockets.len()
    }

    /// Runs `iterations` as the initiator and returns how long each one took.
    pub fn initiate(
        &self,
        op: Op,
        memory: &mut [u8],
        blocks: &Blocks,
        iterations: u32,
        tuning: Tuning,
    ) -> io::Result<Vec<Duration>> {
        let shares = blocks.share(memory, self.count());
        let gate = Gate::new(shares.len());
        let run = |index: usize, socket: &TcpStream, blocks: Vec<&mut [u8]>| {
            let path = Path::new(socket, self.comms(index));
            initiate_one(path, op, blocks, iterations, tuning, &gate)
        };
        for socket in &self.sockets {
            socket.set_nonblocking(tuning.waiting == Waiting::Poll)?;
        }
        run_streams(&self.sockets, shares, run)
    }

    /// Runs `iterations` as the target.
    pub fn serve(
        &self,
        op: Op,
        memory: &mut [u8],
        blocks: &Blocks,
        iterations: u32,
        tuning: Tuning,
    ) -> io::Result<()> {
        let shares = blocks.share(memory, self.count());
        let run = |index: usize, socket: &TcpStream, blocks: Vec<&mut [u8]>| {
            let path = Path::new(socket, self.comms(index));
            serve_one(path, op, blocks, iterations, tuning)
        };
        run_streams(&self.sockets, shares, run)
    }
}

/// Runs one thread per stream, the first on the caller's; returns the first stream's result, or any
/// error.
fn run_streams<'scope, T: Send>(
    sockets: &'scope [TcpStream],
    mut shares: Vec<Vec<&'scope mut [u8]>>,
    run: impl Fn(usize, &TcpStream, Vec<&'scope mut [u8]>) -> io::Result<T> + Sync,
) -> io::Result<T> {
    let first = shares.remove(0);
    std::thread::scope(|scope| {
        let run = &run;
        let others: Vec<_> = sockets[1..]
            .iter()
            .zip(shares)
            .enumerate()
            .map(|(index, (socket, blocks))| scope.spawn(move || run(index + 1, socket, blocks)))
            .collect();
        let mut result = run(0, &sockets[0], first);
        for other in others {
            if let Err(error) = other.join().expect("a floor thread does not panic") {
                result = Err(error);
            }
        }
        result
    })
}

/// The carrier of one stream's blocks: its socket, or comms beside it.
struct Path<'a> {
    socket: &'a TcpStream,
    comms: Option<std::sync::MutexGuard<'a, Comms>>,
}

impl<'a> Path<'a> {
    fn new(socket: &'a TcpStream, comms: Option<&'a Mutex<Comms>>) -> Self {
        let lock = |comms: &'a Mutex<Comms>| comms.lock().unwrap_or_else(PoisonError::into_inner);
        Self {
            socket,
            comms: comms.map(lock),
        }
    }
}

fn initiate_one(
    mut path: Path<'_>,
    op: Op,
    mut blocks: Vec<&mut [u8]>,
    iterations: u32,
    tuning: Tuning,
    gate: &Gate,
) -> io::Result<Vec<Duration>> {
    let mut samples = Vec::with_capacity(iterations as usize);
    let mut byte = [0];
    let mut socket = path.socket;
    let mut carrier = Carrier::new(&mut path, &mut blocks, tuning.call_bytes)?;
    // The target's threads are running and waiting before the first clock starts.
    let mut result = retry(|| socket.read(&mut byte)).and_then(expect).map(drop);
    for _ in 0..iterations {
        gate.pass(&result)?;
        let start = Instant::now();
        result = result.and_then(|()| {
            match op {
                Op::Write => {
                    carrier.send()?;
                    expect(retry(|| socket.read(&mut byte))?)?;
                }
                Op::Read => {
                    expect(retry(|| socket.write(&byte))?)?;
                    carrier.receive()?;
                }
            }
            Ok(())
        });
        gate.pass(&result)?;
        samples.push(start.elapsed());
    }
    result.map(|()| samples)
}

fn serve_one(
    mut path: Path<'_>,
    op: Op,
    mut blocks: Vec<&mut [u8]>,
    iterations: u32,
    tuning: Tuning,
) -> io::Result<()> {
    let mut byte = [0];
    let mut socket = path.socket;
    let mut carrier = Carrier::new(&mut path, &mut blocks, tuning.call_bytes)?;
    socket.write_all(&byte)?;
    for _ in 0..iterations {
        match op {
            Op::Write => {
                carrier.receive()?;
                socket.write_all(&byte)?;
            }
            Op::Read => {
                socket.read_exact(&mut byte)?;
                carrier.send()?;
            }
        }
    }
    Ok(())
}

/// The blocks of one stream, and their path.
enum Carrier<'a, 'm> {
    Socket {
        socket: &'a TcpStream,
        blocks: &'a mut [&'m mut [u8]],
        call_bytes: usize,
    },
    Comms(Registered<'a, 'm>),
}

impl<'a, 'm> Carrier<'a, 'm> {
    fn new(
        path: &'a mut Path<'_>,
        blocks: &'a mut [&'m mut [u8]],
        call_bytes: usize,
    ) -> io::Result<Self> {
        match &mut path.comms {
            Some(comms) => Ok(Self::Comms(Registered::new(comms, blocks, call_bytes)?)),
            None => Ok(Self::Socket {
                socket: path.socket,
                blocks,
                call_bytes,
            }),
        }
    }

    fn send(&mut self) -> io::Result<()> {
        match self {
            Self::Socket {
                socket,
                blocks,
                call_bytes,
            } => send(socket, blocks, *call_bytes),
            Self::Comms(registered) => registered.send(),
        }
    }

    fn receive(&mut self) -> io::Result<()> {
        match self {
            Self::Socket {
                socket,
                blocks,
                call_bytes,
            } => receive(socket, blocks, *call_bytes),
            Self::Comms(registered) => registered.receive(),
        }
    }
}

/// The position of a vectored loop: the next byte is `blocks[block][offset]`.
#[derive(Clone, Copy)]
struct Cursor {
    block: usize,
    offset: usize,
}

impl Cursor {
    fn advance(&mut self, mut by: usize, len: impl Fn(usize) -> usize) {
        while by > 0 {
            let rest = len(self.block) - self.offset;
            if by < rest {
                self.offset += by;
                return;
            }
            by -= rest;
            *self = Cursor {
                block: self.block + 1,
                offset: 0,
            };
        }
    }
}

fn send(mut socket: &TcpStream, blocks: &[&mut [u8]], call_bytes: usize) -> io::Result<()> {
    let mut at = Cursor {
        block: 0,
        offset: 0,
    };
    let mut pieces = Vec::with_capacity(MAX_PIECES);
    while at.block < blocks.len() {
        pieces.clear();
        let (mut offset, mut room) = (at.offset, call_bytes);
        for block in blocks[at.block..].iter().take(MAX_PIECES) {
            let piece = &block[offset..][..room.min(block.len() - offset)];
            pieces.push(IoSlice::new(piece));
            room -= piece.len();
            offset = 0;
            if room == 0 {
                break;
            }
        }
        let sent = expect(retry(|| socket.write_vectored(&pieces))?)?;
        at.advance(sent, |block| blocks[block].len());
    }
    Ok(())
}

fn receive(mut socket: &TcpStream, blocks: &mut [&mut [u8]], call_bytes: usize) -> io::Result<()> {
    let mut at = Cursor {
        block: 0,
        offset: 0,
    };
    while at.block < blocks.len() {
        let mut pieces = Vec::with_capacity(MAX_PIECES);
        let (mut offset, mut room) = (at.offset, call_bytes);
        for block in blocks[at.block..].iter_mut().take(MAX_PIECES) {
            let end = block.len().min(offset + room);
            let piece = &mut block[offset..end];
            room -= piece.len();
            pieces.push(IoSliceMut::new(piece));
            offset = 0;
            if room == 0 {
                break;
            }
        }
        let received = expect(retry(|| socket.read_vectored(&mut pieces))?)?;
        at.advance(received, |block| blocks[block].len());
    }
    Ok(())
}

/// Repeats a call that was interrupted or, on a polling initiator, would block.
fn retry(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    let mut stalled = None;
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                // A blocking socket returns this after STALL, a polling one at once: check the
                // clock.
                if stalled.get_or_insert_with(Instant::now).elapsed() > STALL {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                std::hint::spin_loop();
            }
            other => return other,
        }
    }
}

fn expect(count: usize) -> io::Result<usize> {
    match count {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        count => Ok(count),
    }
}

fn configure(socket: &TcpStream) -> io::Result<()> {
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(STALL))?;
    socket.set_write_timeout(Some(STALL))
}

/// Lets the threads of one initiator begin and end every iteration together, also when one fails.
struct Gate {
    barrier: Option<Barrier>,
    failed: AtomicBool,
}

impl Gate {
    fn new(threads: usize) -> Gate {
        Gate {
            barrier: (threads > 1).then(|| Barrier::new(threads)),
            failed: AtomicBool::new(false),
        }
    }

    /// Waits for the others. A failure of any thread is an error for all.
    fn pass(&self, result: &io::Result<()>) -> io::Result<()> {
        if result.is_err() {
            self.failed.store(true, Ordering::Relaxed);
        }
        if let Some(barrier) = &self.barrier {
            barrier.wait();
        }
        if self.failed.load(Ordering::Relaxed) {
            let error = result.as_ref().err();
            return Err(error
                .map_or(io::ErrorKind::ConnectionAborted, io::Error::kind)
                .into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::workload::{Layout, Pattern, Shape, Side, verify};

    #[test]
    fn both_directions_deliver_every_byte() {
        for (op, total, block, streams, waiting) in [
            (Op::Write, 1_000_003, 1000, 3, Waiting::Block),
            (Op::Read, 1_000_003, 1000, 3, Waiting::Block),
            (Op::Write, 1, 1, 2, Waiting::Poll),
            (Op::Read, 8 << 20, 0, 2, Waiting::Poll),
        ] {
            let shape = Shape::new(op, total, block, Layout::Scattered).unwrap();
            let tuning = Tuning {
                call_bytes: 100_000,
                waiting,
            };
            let mut own = vec![0; total as usize];
            let mut theirs = vec![0; total as usize];
            let source = if op == Op::Write {
                &mut own
            } else {
                &mut theirs
            };
            Pattern::new(5).fill(0, source);

            let (listener, address) = listener();
            let wait = Duration::from_secs(10);
            // Both come before the streams: a stream of another floor is refused, a client waits
            // for its turn.
            let other = TcpStream::connect(address).unwrap();
            (&other)
                .write_all(&[&MAGIC[..], &[0x41; 18]].concat())
                .unwrap();
            let client = TcpStream::connect(address).unwrap();
            (&client).write_all(b"tcpx-bs\x01").unwrap();
            let samples = std::thread::scope(|scope| {
                scope.spawn(|| {
                    let accepted = listener.accept(streams, wait).unwrap();
                    let soon = Instant::now() + wait;
                    let (mut waiting, from) = listener.door.accept_client(soon).unwrap();
                    assert_eq!(from, client.local_addr().unwrap());
                    let mut greeting = [0; 8];
                    waiting.read_exact(&mut greeting).unwrap();
                    assert_eq!(&greeting, b"tcpx-bs\x01");
                    let blocks = Blocks::new(shape.spans(Side::Target));
                    accepted.serve(op, &mut theirs, &blocks, 4, tuning).unwrap();
                });
                let connected = Streams::connect(address, [9; 16], streams, wait).unwrap();
                let blocks = Blocks::new(shape.spans(Side::Initiator));
                connected
                    .initiate(op, &mut own, &blocks, 4, tuning)
                    .unwrap()
            });
            assert_eq!(samples.len(), 4);
            let destination = if op == Op::Write { &theirs } else { &own };
            assert_eq!(verify(&shape, Pattern::new(5), destination), Ok(()));
        }
    }

    fn listener() -> (Listener, SocketAddr) {
        let door = Door::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = door.address().unwrap();
        (Listener::at(Arc::new(door), [9; 16]), address)
    }

    #[test]
    fn a_dead_peer_is_an_error_on_every_stream() {
        let (listener, address) = listener();
        let wait = Duration::from_secs(10);
        let connected = Streams::connect(address, [9; 16], 3, wait).unwrap();
        drop(listener.accept(3, wait).unwrap());
        let shape = Shape::new(Op::Write, 1 << 20, 0, Layout::Scattered).unwrap();
        let blocks = Blocks::new(shape.spans(Side::Initiator));
        let tuning = Tuning {
            call_bytes: 1 << 20,
            waiting: Waiting::Block,
        };
        let mut memory = vec![0; 1 << 20];
        assert!(
            connected
                .initiate(Op::Write, &mut memory, &blocks, 2, tuning)
                .is_err()
        );
    }
}
