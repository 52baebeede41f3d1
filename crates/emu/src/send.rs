//! Sending. `isend` only queues; `test` cuts chunks, announces them and feeds the sockets.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};

use crate::comm::{Context, Counts, Link};
use crate::cuda::Stream;
use crate::emulator::{Emulator, Flavor};
use crate::error::Error;
use crate::log::warning;
use crate::memory::{Block, Memory};
use crate::registration::Buffer;
use crate::request::{OP_SEND, Order, PLAIN_REQUESTS, Request, Requests, TCPX_REQUESTS};
use crate::socket::{Progress, Socket};
use crate::tables::memory_kind::CUDA;
use crate::wire::{RECORD_BYTES, Record};

/// Maximum chunks that wait on one data socket.
const CHUNKS_PER_SOCKET: usize = 6;

/// The sending end of a connection.
#[derive(Debug)]
pub(crate) struct SendComm {
    context: Context,
    pub(crate) requests: Requests,
    /// Number of requests that `test` has examined; later ones only wait.
    active: u64,
    /// Number of requests whose chunks were all passed to a socket.
    scheduled: u64,
    control: Socket,
    /// Records that are not sent yet.
    records: Vec<u8>,
    /// Number of requests whose records were all sent.
    announced: u64,
    sockets: Vec<DataSocket>,
    next_socket: usize,
    staging: Option<Staging>,
}

#[derive(Debug)]
struct DataSocket {
    socket: Socket,
    chunks: VecDeque<Chunk>,
    /// Number of chunks ever queued: selects the staging buffer.
    queued: usize,
    /// Whether it broke. A TCPX comm does not report it: it hangs.
    dead: bool,
}

/// Bytes that wait for a socket.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    request: u64,
    data: *mut u8,
    len: usize,
}

/// Pinned memory for sends from a GPU: one chunk for each place in a socket's queue.
#[derive(Debug)]
struct Staging {
    memory: Block,
    stream: Stream,
}

impl SendComm {
    pub(crate) fn new(
        emulator: &'static Emulator,
        flavor: Flavor,
        link: Link,
    ) -> Result<Self, Error> {
        let settings = &emulator.settings;
        let memory = match flavor {
            Flavor::Tcpx => Memory::current(settings.memory)?,
            Flavor::Plain => Memory::Host,
        };
        let staging = match memory {
            Memory::Host => None,
            Memory::Cuda(gpu) => {
                let bytes = link.data.len() * CHUNKS_PER_SOCKET * settings.chunk as usize;
                let memory = memory.mapped(bytes, "staging for sends")?;
                Some(Staging {
                    memory,
                    stream: Stream::new(gpu)?,
                })
            }
        };
        let slots = match flavor {
            Flavor::Tcpx => TCPX_REQUESTS,
            Flavor::Plain => PLAIN_REQUESTS,
        };
        Ok(Self {
            context: Context::new(emulator, flavor, memory),
            requests: Requests::new(slots),
            active: 0,
            scheduled: 0,
            control: link.control,
            records: Vec::with_capacity(64 * RECORD_BYTES),
            announced: 0,
            sockets: link
                .data
                .into_iter()
                .map(|socket| DataSocket {
                    socket,
                    chunks: VecDeque::with_capacity(CHUNKS_PER_SOCKET),
                    queued: 0,
                    dead: false,
                })
                .collect(),
            next_socket: 0,
            staging,
        })
    }

    pub(crate) fn flavor(&self) -> Flavor {
        self.context.flavor
    }

    pub(crate) fn counts(&self) -> Counts {
        self.context.counts
    }

    /// Queues a send; `None` if the caller has to try again.
    pub(crate) fn post(
        &mut self,
        comm: *mut c_void,
        buffer: Buffer,
    ) -> Result<Option<*mut Request>, Error> {
        self.context.check()?;
        let k = self.requests.vacant()?;
        if self.context.null_request() {
            return Ok(None);
        }
        let request = &mut self.requests[k];
        request.comm = comm;
        request.data = buffer.data;
        request.op = OP_SEND;
        request.mem_type = buffer.kind;
        request.offset = 0;
        request.size = buffer.size;
        request.size_pending = buffer.size;
        request.gpu_mem_fd = -1;
        request.gpu_mem_off = buffer.offset;
        self.requests.posted += 1;
        Ok(Some(self.requests.pointer(k)))
    }

    /// Moves what can be moved; returns the size once `request` is done.
    pub(crate) fn test(&mut self, request: *mut Request) -> Result<Option<c_int>, Error> {
        let strict = self.context.emulator.settings.strict;
        let Order::Oldest(k) = self.requests.check_order(request, strict)? else {
            return Ok(None);
        };
        self.context.check()?;
        let _entered = self.context.memory.enter()?;
        if let Err(error) = self.progress(k) {
            return Err(self.context.fail(error));
        }
        let complete = self.announced > k && self.requests[k].size_pending == 0;
        if !(complete && self.context.may_report()) {
            return Ok(None);
        }
        self.requests.finished += 1;
        self.requests.released += 1;
        Ok(Some(self.requests[k].size as c_int))
    }

    fn progress(&mut self, oldest: u64) -> Result<(), Error> {
        if self.active < self.requests.posted {
            self.active += 1;
        }
        let reset = self.context.emulator.settings.reset_after;
        if reset != 0 && oldest + 1 >= reset && self.active > oldest {
            return Err(self.reset());
        }
        if self.scheduled < self.active {
            self.schedule()?;
        }
        self.send_records()?;
        for index in 0..self.sockets.len() {
            self.feed(index)?;
        }
        Ok(())
    }

    /// Passes chunks of one request to the sockets, in turn.
    fn schedule(&mut self) -> Result<(), Error> {
        let k = self.scheduled;
        let limit = self.context.emulator.settings.chunk;
        let request = &mut self.requests[k];
        if request.size == 0 {
            self.records.extend_from_slice(&Record::EMPTY.encode());
        }
        while request.offset < request.size {
            let index = self.next_socket;
            let socket = &mut self.sockets[index];
            if socket.chunks.len() == CHUNKS_PER_SOCKET {
                return Ok(());
            }
            let size = limit.min(request.size - request.offset);
            // SAFETY: within the buffer that was posted.
            let mut data = unsafe { request.data.add(request.offset as usize) };
            if let Some(staging) = self.staging.as_ref().filter(|_| request.mem_type == CUDA) {
                let place = index * CHUNKS_PER_SOCKET + socket.queued % CHUNKS_PER_SOCKET;
                // SAFETY: the place is within staging, and free: the chunk that had it has left,
                // since no more than so many chunks wait on a socket. The source is registered
                // memory of the GPU.
                unsafe {
                    let pinned = staging.memory.host().add(place * limit as usize);
                    staging.stream.to_host(pinned, data as u64, size as usize)?;
                    data = pinned;
                }
            }
            let record = Record {
                socket: index as u16,
                size,
                offset: request.offset,
                total: request.size,
            };
            self.records.extend_from_slice(&record.encode());
            socket.chunks.push_back(Chunk {
                request: k,
                data,
                len: size as usize,
            });
            socket.queued = socket.queued.wrapping_add(1);
            request.offset += size;
            self.next_socket = (index + 1) % self.sockets.len();
            request.next_sock_id = self.next_socket as c_int;
            request.next_size = limit.min(request.size - request.offset) as c_int;
            self.context.counts.chunks += 1;
        }
        self.scheduled += 1;
        Ok(())
    }

    fn send_records(&mut self) -> Result<(), Error> {
        if !self.records.is_empty() {
            match self.control.send(&self.records) {
                Ok(Progress::Moved(n)) => {
                    self.records.drain(..n);
                }
                Ok(Progress::Blocked) => {}
                Ok(Progress::Closed) => return Err(self.context.lost("cannot send to it")),
                Err(error) => {
                    warning!("sending a control record: {error}");
                    return Err(self.context.lost("cannot send to it"));
                }
            }
        }
        if self.records.is_empty() {
            self.announced = self.scheduled;
        }
        Ok(())
    }

    /// Passes to the kernel as much as it accepts of the chunks that wait on one socket.
    fn feed(&mut self, index: usize) -> Result<(), Error> {
        let DataSocket {
            socket,
            chunks,
            dead,
            ..
        } = &mut self.sockets[index];
        if chunks.is_empty() || *dead {
            return Ok(());
        }
        let mut pieces = [libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        }; CHUNKS_PER_SOCKET];
        for (piece, chunk) in pieces.iter_mut().zip(chunks.iter()) {
            *piece = libc::iovec {
                iov_base: chunk.data.cast(),
                iov_len: chunk.len,
            };
        }
        // SAFETY: the buffers were posted and may be used until the request is done; staging
        // belongs to the comm.
        let outcome = unsafe { socket.send_pieces(&mut pieces[..chunks.len()]) };
        let mut moved = match outcome {
            Ok(Progress::Moved(n)) => n,
            Ok(Progress::Blocked) => return Ok(()),
            Ok(Progress::Closed) | Err(_) => {
                *dead = true;
                warning!("data socket {index} of a send comm broke: {outcome:?}");
                return match self.context.flavor {
                    Flavor::Tcpx => Ok(()),
                    Flavor::Plain => Err(self.context.lost("a data socket broke")),
                };
            }
        };
        self.context.counts.bytes += moved as u64;
        while let Some(chunk) = chunks.front_mut() {
            let taken = moved.min(chunk.len);
            self.requests[chunk.request].size_pending -= taken as u32;
            if taken < chunk.len {
                // SAFETY: within the chunk.
                chunk.data = unsafe { chunk.data.add(taken) };
                chunk.len -= taken;
                break;
            }
            moved -= taken;
            chunks.pop_front();
        }
        Ok(())
    }

    /// Resets the connection, as a crashing host would.
    fn reset(&mut self) -> Error {
        warning!("resetting a connection as TCPX_EMU_RESET requires");
        self.control.reset();
        for data in &self.sockets {
            data.socket.reset();
        }
        self.context.lost("it was reset on purpose")
    }
}
