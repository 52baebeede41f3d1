//! The floor: what the sockets of this machine carry when nothing stands between them and the
//! blocks.
//!
//! One blocking TCP stream a thread, `writev` out of the source blocks and `readv` into the
//! destination blocks, no headers, no checks, no regions. The same blocks, in the same order and
//! over as many streams as the engine has lanes. Whatever the engine loses against this is the
//! engine's own cost.
//!
//! ```text
//!   WRITE   initiator ── blocks ──────────────► target       READ   initiator ── 1 byte ───► target
//!           initiator ◄───────────── 1 byte ── target               initiator ◄── blocks ── target
//! ```
//!
//! The initiator's clock runs from its first system call to the arrival of the last stream's last
//! byte. [`CALL_BYTES`] are the call sizes that a measurement tries before it settles on the
//! fastest, and the streams use the congestion control of the engine's lanes: what the kernel
//! offers to everybody must not count as the engine's merit.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_tcp_congestion;
use serde::{Deserialize, Serialize};

use crate::bootstrap::{accept_until, remaining};
use crate::plugin_floor::{self, Comms, Registered};
use crate::workload::{Op, Span};

/// The most streams a floor may have.
pub const MAX_STREAMS: usize = 64;

/// Bytes offered to one system call: the candidates worth trying.
///
/// On loopback 64 and 128 KiB were clearly slower; these three were within the noise of each other.
/// `MSG_WAITALL` and fixed socket buffers won some runs and lost others, so they are left out.
pub const CALL_BYTES: [usize; 3] = [256 << 10, 512 << 10, 1 << 20];

/// Below this a further stream costs more than it carries: small totals use fewer streams.
const MIN_BYTES_PER_STREAM: usize = 64 << 10;

/// Cuts between streams fall on multiples of this, so that no page is split.
const CUT_ALIGNMENT: usize = 4 << 10;

/// The kernel's `UIO_MAXIOV`: entries of one vectored call.
const MAX_PIECES: usize = 1024;

/// A stream that makes no progress for this long has lost its peer.
const STALL: Duration = Duration::from_secs(30);

/// First bytes of a floor stream, then the nonce of its listener and its index.
const MAGIC: [u8; 8] = *b"tcpx-flr";

/// Proof that a stream belongs to this measurement, not to a passer-by.
pub type Nonce = [u8; 16];

/// How the initiator waits for the last byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Waiting {
    /// Asleep in the kernel (`Transfer::wait`, a blocking `readv`).
    Block,
    /// Awake (`Transfer::poll`, a `readv` that does not block).
    Poll,
}

/// How a round is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tuning {
    /// Bytes offered to one system call; at least one.
    pub call_bytes: usize,
    /// How the initiator waits.
    pub waiting: Waiting,
}

/// The streams of one floor, connected.
#[derive(Debug)]
pub struct Streams {
    sockets: Vec<TcpStream>,
    /// The comms that carry the blocks instead, one a stream, if a plugin does.
    comms: Vec<Mutex<Comms>>,
}

/// Where the target of a floor waits for its streams.
#[derive(Debug)]
pub struct Listener {
    listener: TcpListener,
    nonce: Nonce,
}

impl Listener {
    /// Listens on any free port of `address`. The nonce must be unpredictable.
    pub fn bind(address: IpAddr, nonce: Nonce) -> io::Result<Listener> {
        let listener = TcpListener::bind(SocketAddr::new(address, 0))?;
        Ok(Listener { listener, nonce })
    }

    /// The port to tell the initiator.
    pub fn port(&self) -> io::Result<u16> {
        Ok(self.listener.local_addr()?.port())
    }

    /// Takes `count` streams; whatever else connects is dropped.
    pub fn accept(&self, count: usize, timeout: Duration) -> io::Result<Streams> {
        let deadline = Instant::now() + timeout;
        let mut sockets: Vec<Option<TcpStream>> = Vec::new();
        sockets.resize_with(count, || None);
        while sockets.iter().any(Option::is_none) {
            let (mut socket, _) = accept_until(&self.listener, deadline)?;
            socket.set_read_timeout(Some(remaining(deadline)?.min(Duration::from_secs(2))))?;
            let mut hello = [0; 26];
            if socket.read_exact(&mut hello).is_err() {
                continue;
            }
            let index = usize::from(u16::from_be_bytes([hello[24], hello[25]]));
            let ours = hello[..8] == MAGIC && hello[8..24] == self.nonce;
            if let (true, Some(slot)) = (ours, sockets.get_mut(index)) {
                configure(&socket)?;
                *slot = Some(socket);
            }
        }
        Ok(Streams {
            sockets: sockets.into_iter().flatten().collect(),
            comms: Vec::new(),
        })
    }
}

impl Streams {
    /// Opens `count` streams to a [`Listener`].
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

    /// Gives all streams a congestion control of this kernel. A name it does not have is no error,
    /// as with the engine's lanes: the streams keep the system's.
    pub fn set_congestion_control(&self, name: &str) {
        for socket in &self.sockets {
            let _ = set_tcp_congestion(socket, name);
        }
    }

    /// Lets a plugin carry the blocks, as on the lanes of a session of this configuration. Both sides do this at the same
    /// time; the streams keep saying when a side is ready.
    ///
    /// # Errors
    /// What the plugin says.
    pub fn plug(&mut self, config: &tcpx::Config) -> io::Result<()> {
        let comms = plugin_floor::connect(config, &self.sockets)?;
        self.comms = comms.into_iter().map(Mutex::new).collect();
        Ok(())
    }

    /// Whether a plugin carries the blocks.
    pub fn is_plugged(&self) -> bool {
        !self.comms.is_empty()
    }

    fn comms(&self, index: usize) -> Option<&Mutex<Comms>> {
        self.comms.get(index)
    }

    /// How many there are.
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

/// One thread a stream, the first of them the caller's; the first stream's result, or any error.
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

/// What carries the blocks of one stream: its socket, or comms beside it.
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
    // The target's threads are up and waiting before the first clock starts.
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

/// The blocks of one stream, and the way they go.
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

/// Where a vectored loop stands: the next byte is `blocks[block][offset]`.
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

/// Repeats a call that was interrupted or, on a polling initiator, had nothing to do yet.
fn retry(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    let mut stalled = None;
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                // A blocking socket says this after STALL, a polling one at once: look at the
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

    /// Waits for the others. Everyone leaves by the same gate: a failure anywhere is an error for
    /// all.
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

/// The blocks of one side, ready to be borrowed from its buffer.
#[derive(Clone, Debug)]
pub struct Blocks {
    /// In the order in which they are moved.
    spans: Vec<Span>,
    /// Indices into `spans` by ascending offset. Sorted once: a round must not pay for it.
    by_offset: Vec<usize>,
}

impl Blocks {
    /// The blocks at these spans, which must not overlap.
    pub fn new(spans: Vec<Span>) -> Blocks {
        let mut by_offset: Vec<usize> = (0..spans.len()).collect();
        by_offset.sort_unstable_by_key(|&index| spans[index].offset);
        Blocks { spans, by_offset }
    }

    /// Borrows the blocks, in order, as one list a stream of about equal bytes; a block is cut
    /// where the border between two streams falls. Fewer lists for small totals, never an empty
    /// one.
    fn share<'m>(&self, memory: &'m mut [u8], streams: usize) -> Vec<Vec<&'m mut [u8]>> {
        let total: usize = self.spans.iter().map(|span| span.len).sum();
        let streams = streams.min(total.div_ceil(MIN_BYTES_PER_STREAM)).max(1);
        let each = total.div_ceil(streams).next_multiple_of(CUT_ALIGNMENT);
        let list = || Vec::with_capacity(self.spans.len() / streams + 2);
        let (mut shares, mut current, mut room) = (Vec::with_capacity(streams), list(), each);
        for mut block in self.borrow(memory) {
            while block.len() > room {
                let (head, tail) = block.split_at_mut(room);
                if !head.is_empty() {
                    current.push(head);
                }
                shares.push(std::mem::replace(&mut current, list()));
                (block, room) = (tail, each);
            }
            room -= block.len();
            current.push(block);
        }
        shares.push(current);
        shares
    }

    fn borrow<'m>(&self, memory: &'m mut [u8]) -> Vec<&'m mut [u8]> {
        let mut blocks: Vec<&'m mut [u8]> = Vec::new();
        blocks.resize_with(self.spans.len(), Default::default);
        let (mut rest, mut at) = (memory, 0);
        for &index in &self.by_offset {
            let Span { offset, len } = self.spans[index];
            let (block, after) = rest.split_at_mut(offset - at).1.split_at_mut(len);
            blocks[index] = block;
            (rest, at) = (after, offset + len);
        }
        blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Pattern, Shape, Side, verify};

    #[test]
    fn shares_hold_every_byte_once_and_in_order() {
        for (total, block, streams) in [
            (1, 1, 4),
            (100_000, 0, 3),
            (1 << 20, 4096, 1),
            (1_000_003, 999, 4),
            (200_000, 7, 8),
        ] {
            let shape = Shape::new(Op::Write, total, block, true).unwrap();
            let spans = shape.spans(Side::Initiator);
            let mut memory = vec![0; total as usize];
            Pattern::new(1).fill(0, &mut memory);
            let expected: Vec<u8> = spans
                .iter()
                .flat_map(|s| &memory[s.offset..s.offset + s.len])
                .copied()
                .collect();
            let blocks = Blocks::new(spans);
            let shares = blocks.share(&mut memory, streams);
            assert!(shares.len() <= streams);
            assert!(shares.iter().flatten().all(|block| !block.is_empty()));
            let found: Vec<u8> = shares
                .iter()
                .flatten()
                .flat_map(|b| b.iter())
                .copied()
                .collect();
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn both_directions_deliver_every_byte() {
        for (op, total, block, streams, waiting) in [
            (Op::Write, 1_000_003, 1000, 3, Waiting::Block),
            (Op::Read, 1_000_003, 1000, 3, Waiting::Block),
            (Op::Write, 1, 1, 2, Waiting::Poll),
            (Op::Read, 8 << 20, 0, 2, Waiting::Poll),
        ] {
            let shape = Shape::new(op, total, block, true).unwrap();
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

            let listener = Listener::bind([127, 0, 0, 1].into(), [9; 16]).unwrap();
            let address = SocketAddr::new([127, 0, 0, 1].into(), listener.port().unwrap());
            let wait = Duration::from_secs(10);
            let samples = std::thread::scope(|scope| {
                scope.spawn(|| {
                    // A stranger is turned away.
                    let stranger = TcpStream::connect(address).unwrap();
                    (&stranger).write_all(&[0x41; 26]).unwrap();
                    let accepted = listener.accept(streams, wait).unwrap();
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

    #[test]
    fn a_dead_peer_is_an_error_on_every_stream() {
        let listener = Listener::bind([127, 0, 0, 1].into(), [9; 16]).unwrap();
        let address = SocketAddr::new([127, 0, 0, 1].into(), listener.port().unwrap());
        let wait = Duration::from_secs(10);
        let connected = Streams::connect(address, [9; 16], 3, wait).unwrap();
        drop(listener.accept(3, wait).unwrap());
        let shape = Shape::new(Op::Write, 1 << 20, 0, true).unwrap();
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
