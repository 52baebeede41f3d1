//! Copies memory of another process on the same host.
//!
//! This process starts a second one, the owner, which allocates memory of every kind. This process
//! maps it, reads and writes it, and measures that.

mod owner;
mod rates;
mod wire;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use tcpx_cuda::{Description, Device, DeviceBuffer, Error, Mapped, Queue, Range, device, locate};

pub(crate) use owner::run as run_owner;
use wire::{receive, send};

use crate::Outcome;
use crate::bytes::{Random, expect_equal};

const MIB: usize = 1 << 20;
/// Number of bytes that are compared.
const CHECKED: usize = 12 * MIB;
const BLOCK: usize = 4096;

/// Options for starting the owner.
pub(crate) struct Options {
    /// Its device, if different from this process's.
    pub(crate) device: Option<u32>,
    /// `NAME=VALUE`, for its environment.
    pub(crate) environment: Vec<String>,
}

/// A request to the owner.
enum Request {
    Malloc {
        len: usize,
    },
    /// Virtual memory of physical pieces.
    Pieces {
        pieces: Vec<usize>,
        is_shareable: bool,
    },
    /// Virtual memory that maps one physical piece repeatedly.
    Repeated {
        len: usize,
        times: usize,
    },
    Pool {
        len: usize,
        is_shareable: bool,
    },
    DefaultPool {
        len: usize,
    },
    /// Compare the memory with [`written`].
    Check,
}

impl Request {
    fn encode(&self) -> Vec<u8> {
        let numbers = match self {
            Self::Malloc { len } => vec![0, *len],
            Self::Pieces {
                pieces,
                is_shareable,
            } => {
                let mut numbers = vec![1, usize::from(*is_shareable)];
                numbers.extend(pieces);
                numbers
            }
            Self::Pool { len, is_shareable } => vec![2, *len, usize::from(*is_shareable)],
            Self::DefaultPool { len } => vec![3, *len],
            Self::Check => vec![4],
            Self::Repeated { len, times } => vec![5, *len, *times],
        };
        numbers.into_iter().flat_map(usize::to_le_bytes).collect()
    }

    fn decode(bytes: &[u8]) -> Outcome<Self> {
        let (numbers, _) = bytes.as_chunks();
        let numbers: Vec<usize> = numbers.iter().map(|&n| usize::from_le_bytes(n)).collect();
        Ok(match numbers[..] {
            [0, len] => Self::Malloc { len },
            [1, flag, ref pieces @ ..] => Self::Pieces {
                pieces: pieces.to_vec(),
                is_shareable: flag != 0,
            },
            [2, len, flag] => Self::Pool {
                len,
                is_shareable: flag != 0,
            },
            [3, len] => Self::DefaultPool { len },
            [4] => Self::Check,
            [5, len, times] => Self::Repeated { len, times },
            _ => return Err("an unknown request".into()),
        })
    }
}

/// Returns the bytes that this process writes to the owner's memory.
fn written(len: usize) -> Vec<u8> {
    Random::new(len as u64 + 1).bytes(len)
}

struct Owner {
    process: Child,
    socket: UnixStream,
}

impl Owner {
    fn start(ordinal: u32, options: &Options) -> Outcome<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let environment = options.environment.iter();
        let process = Command::new(std::env::current_exe()?)
            .arg("--owner")
            .args(["--device", &options.device.unwrap_or(ordinal).to_string()])
            .envs(environment.filter_map(|word| word.split_once('=')))
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()?;
        Ok(Self {
            process,
            socket: ours,
        })
    }

    fn ask(&mut self, request: &Request) -> Outcome {
        send(&mut self.socket, &request.encode(), &[])?;
        match receive(&mut self.socket)?.0 {
            complaint if complaint.is_empty() => Ok(()),
            complaint => Err(String::from_utf8_lossy(&complaint).into()),
        }
    }

    /// Requests memory of a kind; returns its description: bytes and file descriptors.
    fn export(&mut self, request: &Request) -> Outcome<(Vec<u8>, Vec<OwnedFd>)> {
        self.ask(request)?;
        receive(&mut self.socket)
    }

    /// Checks that memory of a kind is refused with this reason.
    fn expect_refusal(&mut self, what: &str, request: &Request, reason: &str) -> Outcome {
        match self.ask(request) {
            Err(error) if error.to_string().contains(reason) => {
                println!("same host: {what} is refused: {error}");
                Ok(())
            }
            other => Err(format!("{what} gives {other:?} instead of {reason:?}").into()),
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // The owner ends when its socket closes.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        let _ = self.process.wait();
    }
}

pub(crate) fn run(ordinal: u32, options: &Options, check_only: bool) -> Outcome {
    let device = device(ordinal)?;
    own_memory(ordinal)?;
    let mut owner = Owner::start(ordinal, options)?;
    for (what, request) in kinds(CHECKED) {
        check(&mut owner, &device, what, &request)?;
        hostile(&mut owner, &device, what, &request)?;
    }
    let refused = "NotShareable";
    let len = CHECKED;
    let default = Request::DefaultPool { len };
    owner.expect_refusal(
        "the default pool",
        &default,
        "default pool (cudaMallocAsync) has no IPC",
    )?;
    let pieces = Request::Pieces {
        pieces: vec![2 * MIB, 2 * MIB],
        is_shareable: false,
    };
    owner.expect_refusal("private virtual memory", &pieces, refused)?;
    let pool = Request::Pool {
        len,
        is_shareable: false,
    };
    owner.expect_refusal("a private pool", &pool, refused)?;
    let many = Request::Repeated {
        len: 2 * MIB,
        times: tcpx_cuda::MAX_PIECES + 1,
    };
    owner.expect_refusal("memory of too many pieces", &many, "TooManyPieces")?;
    if !check_only {
        rates::run(&mut owner, &device)?;
    }
    Ok(())
}

/// Returns each kind of memory that can be shared.
fn kinds(len: usize) -> [(&'static str, Request); 3] {
    // Like PyTorch's expandable segments; the last piece takes the rest.
    let piece = if len > CHECKED { 20 * MIB } else { 4 * MIB };
    let mut pieces = vec![2 * MIB];
    let mut left = len - 2 * MIB;
    while left > 0 {
        pieces.push(piece.min(left));
        left -= piece.min(left);
    }
    [
        ("cudaMalloc", Request::Malloc { len }),
        (
            "virtual memory",
            Request::Pieces {
                pieces,
                is_shareable: true,
            },
        ),
        (
            "pool",
            Request::Pool {
                len,
                is_shareable: true,
            },
        ),
    ]
}

/// Checks that a process cannot map its own memory.
fn own_memory(ordinal: u32) -> Outcome {
    let buffer = DeviceBuffer::alloc(ordinal, MIB)?;
    let export = buffer.device().export(Range {
        address: buffer.address() + 1000,
        len: 1000,
    })?;
    let description = export.description();
    if description.base() != buffer.address() || description.len() < MIB {
        return Err(format!("{description:?} is not the whole of {buffer:?}").into());
    }
    for found in [
        tcpx_cuda::import(&description.encode(), export.fds()),
        buffer.device().import(description, export.fds()),
    ] {
        match found {
            Err(Error::OwnMemory) => {}
            other => return Err(format!("own memory gives {other:?}").into()),
        }
    }
    let past = Range {
        address: buffer.address(),
        len: description.len() + 1,
    };
    match buffer.device().export(past) {
        Err(Error::OutOfAllocation { .. }) => Ok(()),
        other => Err(format!("a range past its allocation gives {other:?}").into()),
    }
}

/// Imports memory, and checks that a refusal leaks nothing.
fn import(device: &Arc<dyn Device>, bytes: &[u8], fds: &[OwnedFd]) -> Outcome<Mapped> {
    let before = resources()?;
    let outcome = Description::decode(bytes).and_then(|found| device.import(&found, fds));
    match outcome {
        Err(error) if resources()? != before => {
            Err(format!("a failed import leaves something behind: {error}").into())
        }
        outcome => Ok(outcome?),
    }
}

/// Counts file descriptors and mapped bytes, as far as the fake driver makes them.
fn resources() -> Outcome<(usize, usize)> {
    let mut bytes = 0;
    for line in std::fs::read_to_string("/proc/self/maps")?.lines() {
        let Some((range, _)) = line.split_once(' ').filter(|_| line.contains("fake-cuda")) else {
            continue;
        };
        let (start, end) = range.split_once('-').ok_or("a mapping without a range")?;
        bytes += usize::from_str_radix(end, 16)? - usize::from_str_radix(start, 16)?;
    }
    match bytes {
        0 => Ok((0, 0)),
        bytes => Ok((std::fs::read_dir("/proc/self/fd")?.count(), bytes)),
    }
}

/// Returns the blocks of some memory in random order.
fn blocks(address: usize, len: usize, size: usize, seed: u64) -> Vec<Range> {
    let block = |i| Range {
        address: address + i * size,
        len: size,
    };
    let mut blocks: Vec<Range> = (0..len / size).map(block).collect();
    Random::new(seed).shuffle(&mut blocks);
    blocks
}

/// Copies in each available way.
struct Copier {
    queue: Box<dyn Queue>,
    device: Arc<dyn Device>,
    is_prepared: bool,
}

impl Copier {
    fn copy(&mut self, from: &[Range], to: &[Range]) -> Outcome {
        // SAFETY: callers keep the memory, which nothing else uses, until this returns.
        let ticket = unsafe {
            match self.is_prepared {
                // The prepared list is dropped before the copy is done.
                true => self.queue.run(&self.device.prepare(from, to)?)?,
                false => self.queue.copy(from, to)?,
            }
        };
        Ok(self.queue.wait(ticket)?)
    }
}

/// Reads and writes memory of the owner in all ways, and unmaps it.
fn check(owner: &mut Owner, device: &Arc<dyn Device>, what: &str, request: &Request) -> Outcome {
    let own = DeviceBuffer::alloc(device.ordinal(), CHECKED)?;
    let whole = |address| Range {
        address,
        len: CHECKED,
    };
    for is_prepared in [false, true] {
        let (bytes, fds) = owner.export(request)?;
        let mut copier = Copier {
            queue: device.queue()?,
            device: Arc::clone(device),
            is_prepared,
        };
        let before = resources()?;
        let mapped = import(device, &bytes, &fds)?;
        let description = Description::decode(&bytes)?;
        let theirs = Range {
            address: description.base(),
            len: CHECKED,
        };
        let Some(at) = mapped.range(theirs) else {
            return Err(format!("{what}: {mapped:?} has less than it should").into());
        };
        if mapped
            .range(whole(theirs.address + mapped.len() - CHECKED + 1))
            .is_some()
        {
            return Err(format!("{what}: {mapped:?} has more than it should").into());
        }
        if !mapped.device().is_same(&**device) {
            return Err(format!("{what}: {mapped:?} is another device's").into());
        }
        let inside = |address| Range { address, len: 1 };
        let found = mapped.range(inside(theirs.address + 100));
        if found != Some(inside(mapped.address() + 100)) {
            return Err(format!("{what}: byte 100 of {mapped:?} is at {found:?}").into());
        }
        if !matches!(request, Request::Pool { .. }) {
            // A second mapping, on the GPU of the memory. Unmapping one does not affect the other.
            let second = tcpx_cuda::import(&bytes, &fds)?;
            if second.len() != mapped.len() {
                return Err(format!("{what}: {second:?} differs from {mapped:?}").into());
            }
        }
        let expected = Random::new(CHECKED as u64).bytes(CHECKED);
        let expect = |how: &str, expected: &[u8]| -> Outcome {
            let mut found = vec![0; CHECKED];
            own.copy_to_host(0, &mut found)?;
            expect_equal(&format!("{how} of {what}"), &found, expected)
        };
        own.fill(0)?;
        copier.copy(&[at], &[whole(own.address())])?;
        expect("READ", &expected)?;

        // Both sides have the same order: blocks keep their positions.
        own.fill(0)?;
        let lists = |seed| {
            (
                blocks(at.address, CHECKED, BLOCK, seed),
                blocks(own.address(), CHECKED, BLOCK, seed),
            )
        };
        let (from, to) = lists(1);
        copier.copy(&from, &to)?;
        expect("READ of blocks", &expected)?;

        own.copy_from_host(0, &written(CHECKED))?;
        let (to, from) = lists(2);
        copier.copy(&from, &to)?;
        owner.ask(&Request::Check)?;

        let address = mapped.address();
        drop(mapped);
        if let Some(device) = locate(address, 1)? {
            return Err(format!("{what} is still on {device:?} after it was unmapped").into());
        }
        if resources()? != before {
            return Err(format!("{what} leaves something behind").into());
        }
        println!("same host: {what} is read and written, prepared: {is_prepared}");
    }
    Ok(())
}

/// Checks that wrong descriptions are refused, and that the device works afterwards.
fn hostile(owner: &mut Owner, device: &Arc<dyn Device>, what: &str, request: &Request) -> Outcome {
    let (bytes, fds) = owner.export(request)?;
    let refuse = |how: &str, bytes: &[u8], fds: &[OwnedFd]| -> Outcome {
        match import(device, bytes, fds) {
            Ok(mapped) => Err(format!("{what} {how} is mapped: {mapped:?}").into()),
            Err(error) => {
                println!("same host: {what} {how} is refused: {error}");
                // A leak is not a refusal.
                match error.downcast_ref::<Error>() {
                    Some(_) => Ok(()),
                    None => Err(error),
                }
            }
        }
    };
    const LEN: usize = 2 + 16 + 16 + 8;
    const REST: usize = LEN + 8;
    let number = |at: usize| u64::from_le_bytes(bytes[at..][..8].try_into().expect("eight bytes"));
    let longer = |at: &[usize], by: u64| {
        let mut longer = bytes.clone();
        for &at in at {
            longer[at..][..8].copy_from_slice(&(number(at) + by).to_le_bytes());
        }
        longer
    };
    // The last piece, and with it the whole, is described as longer than it is.
    let lengths = match request {
        Request::Pieces { .. } => vec![LEN, bytes.len() - 8],
        _ => vec![LEN],
    };
    refuse(
        "said to be longer",
        &longer(&lengths, 64 * MIB as u64),
        &fds,
    )?;
    refuse("with a changed UUID", &longer(&[2], 1), &fds)?;
    refuse("cut short", &bytes[..bytes.len() - 1], &fds)?;
    let null = || OwnedFd::from(std::fs::File::open("/dev/null").expect("/dev/null exists"));
    let others: Vec<OwnedFd> = fds.iter().map(|_| null()).collect();
    match fds.is_empty() {
        true => {
            let mut zeroed = bytes.clone();
            zeroed[REST..].fill(0);
            refuse("with another handle", &zeroed, &fds)?;
            refuse("with a file descriptor", &bytes, &[null()])?;
        }
        false => {
            refuse("with other files", &bytes, &others)?;
            refuse("without a file descriptor", &bytes, &fds[1..])?;
        }
    }
    drop(import(device, &bytes, &fds)?);
    Ok(())
}
