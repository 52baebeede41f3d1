//! Receiving. `irecv` only queues; `test` reads the control records, then the data sockets.
//!
//! Receives match sends in order. Receive k passes through these states, each visible in one
//! counter:
//!
//! ```text
//!   posted ──first record──► begun ──all records──► announced ──all bytes──► complete
//!          ──test says done──► finished ──irecvConsumed──► released
//! ```

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use crate::comm::{Context, Counts, Link};
use crate::control::ControlSocket;
use crate::cuda::Stream;
use crate::emulator::{Emulator, Flavor};
use crate::error::{Error, Misuse};
use crate::inbound::{Chunk, DataSocket, Read};
use crate::log::warning;
use crate::memory::Memory;
use crate::pages::Pool;
use crate::registration::Buffer;
use crate::request::{OP_RECEIVE, Order, PLAIN_REQUESTS, Request, Requests, TCPX_REQUESTS};
use crate::ring::Ring;
use crate::slot::Slot;
use crate::tables::memory_kind::{CUDA, HOST};
use crate::wire::Record;

/// The receiving end of a connection.
#[derive(Debug)]
pub(crate) struct ReceiveComm {
    context: Context,
    pub(crate) requests: Requests,
    control: ControlSocket,
    /// Number of receives whose records were all read; the next record belongs to this receive.
    announced: u64,
    /// Number of announced bytes of that receive, once its first record was read.
    begun: Option<u32>,
    sockets: Vec<DataSocket>,
    unpack: Option<Unpack>,
    /// The part of each request that callers do not see.
    slots: Vec<Slot>,
}

/// State of a TCPX comm with a device handle in addition to a plain one.
#[derive(Debug)]
pub(crate) struct Unpack {
    pub(crate) ring: Ring,
    pub(crate) pool: Arc<Pool>,
    pub(crate) stream: Option<Stream>,
}

impl Unpack {
    fn new(emulator: &Emulator, device: usize, memory: Memory) -> Result<Self, Error> {
        let pool = emulator.devices[device].pool(memory, &emulator.settings)?;
        let stream = match memory {
            Memory::Host => None,
            Memory::Cuda(gpu) => Some(Stream::new(gpu)?),
        };
        Ok(Self {
            ring: Ring::new(&memory, pool.base())?,
            pool,
            stream,
        })
    }
}

impl ReceiveComm {
    /// Creates a comm on `link`; with a ring if `ring` says so.
    pub(crate) fn new(
        emulator: &'static Emulator,
        flavor: Flavor,
        device: usize,
        link: Link,
        ring: bool,
    ) -> Result<Self, Error> {
        let (memory, slots) = match flavor {
            Flavor::Tcpx => (Memory::current(emulator.settings.memory)?, TCPX_REQUESTS),
            Flavor::Plain => (Memory::Host, PLAIN_REQUESTS),
        };
        let unpack = match ring {
            true => Some(Unpack::new(emulator, device, memory)?),
            false => None,
        };
        Ok(Self {
            context: Context::new(emulator, flavor, memory),
            requests: Requests::new(slots),
            control: ControlSocket::new(link.control),
            announced: 0,
            begun: None,
            sockets: link.data.into_iter().map(DataSocket::new).collect(),
            unpack,
            slots: (0..slots).map(|_| Slot::default()).collect(),
        })
    }

    pub(crate) fn flavor(&self) -> Flavor {
        self.context.flavor
    }

    pub(crate) fn counts(&self) -> Counts {
        self.context.counts
    }

    pub(crate) fn unpack(&self) -> Option<&Unpack> {
        self.unpack.as_ref()
    }

    fn slot(&mut self, k: u64) -> &mut Slot {
        let slots = self.slots.len() as u64;
        &mut self.slots[(k % slots) as usize]
    }

    /// Queues a receive; `None` if the caller has to try again.
    pub(crate) fn post(
        &mut self,
        comm: *mut c_void,
        buffer: Buffer,
    ) -> Result<Option<*mut Request>, Error> {
        self.context.check()?;
        if self.context.flavor == Flavor::Tcpx && self.unpack.is_none() {
            return Err(Misuse::NoRing.into());
        }
        let k = self.requests.vacant()?;
        if self.context.null_request() {
            return Ok(None);
        }
        if self.context.flavor == Flavor::Tcpx && buffer.kind == HOST {
            warning!(
                "receive into host memory: it works here, but is slow or fails on a real device"
            );
        }
        self.slot(k).begin(buffer.size);
        let request = &mut self.requests[k];
        request.comm = comm;
        request.data = buffer.data;
        request.op = OP_RECEIVE;
        request.mem_type = buffer.kind;
        request.offset = 0;
        request.size = buffer.size;
        request.size_pending = buffer.size;
        request.gpu_mem_fd = -1;
        request.gpu_mem_off = buffer.offset;
        request.unpack_slot.active = true;
        request.unpack_slot.idx = k;
        // Only this field is cleared: the others keep the values of the last receive.
        request.unpack_slot.cnt = std::ptr::null_mut();
        self.requests.posted += 1;
        Ok(Some(self.requests.pointer(k)))
    }

    /// Moves what can be moved; returns the size once `request` is done.
    pub(crate) fn test(&mut self, request: *mut Request) -> Result<Option<c_int>, Error> {
        let strict = self.context.emulator.settings.strict;
        let k = match self.requests.check_order(request, strict)? {
            Order::Oldest(k) => k,
            // SAFETY: `check_order` found it among this comm's requests.
            Order::Done => return Ok(Some(unsafe { (*request).size } as c_int)),
        };
        self.context.check()?;
        let _entered = self.context.memory.enter()?;
        if let Err(error) = self.progress(k) {
            return Err(self.context.fail(error));
        }
        if !self.complete(k) || !self.landed()? || !self.context.may_report() {
            return Ok(None);
        }
        self.publish(k);
        self.requests.finished += 1;
        if self.context.flavor == Flavor::Plain {
            self.requests.released += 1;
        }
        Ok(Some(self.requests[k].size as c_int))
    }

    fn complete(&self, k: u64) -> bool {
        self.announced > k && self.requests[k].size_pending == 0
    }

    /// Returns whether the bytes have reached the device.
    fn landed(&self) -> Result<bool, Error> {
        self.unpack
            .as_ref()
            .and_then(|unpack| unpack.stream.as_ref())
            .map_or(Ok(true), Stream::idle)
    }

    fn progress(&mut self, oldest: u64) -> Result<(), Error> {
        // A lost control socket matters as soon as any receive waits for a record, even if the
        // tested one has all its bytes.
        while self.announced < self.requests.posted {
            match self.control.record(self.sockets.len(), &self.context)? {
                Some(record) => self.announce(record)?,
                None => break,
            }
        }
        for index in 0..self.sockets.len() {
            while !self.complete(oldest) {
                match self.read(index, oldest)? {
                    Read::Chunk => {}
                    Read::Drained => break,
                }
            }
        }
        Ok(())
    }

    /// Processes a record: a chunk is in flight.
    fn announce(&mut self, record: Record) -> Result<(), Error> {
        let k = self.announced;
        let announced = match self.begun {
            Some(announced) => announced,
            None => {
                self.begin(k, record.total)?;
                0
            }
        };
        if record.total != self.requests[k].size || record.offset != announced {
            return Err(Error::Record {
                what: "a chunk that does not continue its message",
            });
        }
        if record.size > 0 {
            let chunk = Chunk::new(k, record.offset, record.size);
            self.sockets[usize::from(record.socket)].queue(chunk);
            self.context.counts.chunks += 1;
        }
        let announced = announced + record.size;
        if announced == record.total {
            self.announced += 1;
            self.begun = None;
        } else {
            self.begun = Some(announced);
        }
        Ok(())
    }

    /// Processes the first record of receive `k`, which has its true size.
    fn begin(&mut self, k: u64, total: u32) -> Result<(), Error> {
        let strict = self.context.emulator.settings.strict;
        let posted = self.slot(k).posted;
        let request = &mut self.requests[k];
        // Never past the end of host memory; the ring of a GPU receive may describe more bytes than
        // were posted, as the real plugin's does.
        if total > posted && (strict || request.mem_type != CUDA) {
            return Err(Error::Truncated {
                sent: total,
                posted,
            });
        }
        request.size = total;
        request.size_pending = total;
        if let Some(unpack) = &self.unpack {
            request.unpack_slot.mem = unpack.ring.entries(k);
            request.unpack_slot.cnt = unpack.ring.count(k);
            unpack.ring.publish(k, 0);
        }
        Ok(())
    }

    fn read(&mut self, index: usize, oldest: u64) -> Result<Read, Error> {
        let socket = &mut self.sockets[index];
        // Pages go to the oldest receive only: if later ones took some, a pool that is large enough
        // for one message could still be too small for it.
        let Some(chunk) = socket.current().filter(|chunk| chunk.receive == oldest) else {
            return Ok(Read::Drained);
        };
        let settings = &self.context.emulator.settings;
        let loss = settings.data_loss_after.filter(|_| index == 0);
        let (k, offset) = (chunk.receive, chunk.offset);
        let slots = self.slots.len() as u64;
        let slot = &mut self.slots[(k % slots) as usize];
        let request = &mut self.requests[k];
        let unpack = self.unpack.as_ref().filter(|_| request.mem_type == CUDA);
        if socket.needs_pieces() {
            match unpack {
                // SAFETY: the posted buffer has room for `total` (checked in `begin`).
                None => socket.land_at(unsafe { request.data.add(offset as usize) }),
                Some(unpack) => {
                    if !socket.lay_out(settings, unpack, slot, request.size)? {
                        self.context.counts.stalls += 1;
                        return Ok(Read::Drained);
                    }
                }
            }
        }
        if loss.is_some_and(|limit| socket.received() >= limit) {
            return Ok(Read::Drained);
        }
        let (moved, read) = match socket.read() {
            Ok(outcome) => outcome,
            Err(what) => {
                warning!("data socket {index} of a receive comm broke: {what}");
                return match self.context.flavor {
                    Flavor::Tcpx => Ok(Read::Drained),
                    Flavor::Plain => Err(self.context.lost("a data socket ended")),
                };
            }
        };
        self.context.counts.bytes += moved as u64;
        if let Some(entries) = socket.finished_chunk() {
            if let Some(unpack) = unpack {
                unpack.pool.upload(entries, unpack.stream.as_ref())?;
                slot.append(&unpack.ring, k, entries);
            }
            request.size_pending -= chunk.size;
            socket.next_chunk();
        }
        Ok(read)
    }

    /// Publishes the entries of a complete receive to the consumer.
    fn publish(&mut self, k: u64) {
        let settings = &self.context.emulator.settings;
        let short = settings.short_receive == k + 1 && self.requests[k].size > 0;
        let slots = self.slots.len() as u64;
        let slot = &mut self.slots[(k % slots) as usize];
        let request = &mut self.requests[k];
        if short {
            warning!(
                "receive {} is one byte short as TCPX_EMU_SHORT_RECV requires",
                k + 1
            );
            request.size -= 1;
        }
        if let Some(unpack) = &mut self.unpack {
            let count = slot.publish(&mut unpack.ring, k, short, settings);
            request.unpack_slot.cnt_cache = count;
        }
    }

    /// Performs `irecvConsumed`: the bytes were unpacked, the pages are free again.
    pub(crate) fn consume(&mut self, request: *mut Request) -> Result<(), Error> {
        let _entered = self.context.memory.enter()?;
        let settings = &self.context.emulator.settings;
        let k = self.requests.released;
        if k == self.requests.finished || request != self.requests.pointer(k) {
            return Err(Misuse::ConsumeOrder.into());
        }
        let slots = self.slots.len() as u64;
        let slot = &mut self.slots[(k % slots) as usize];
        if let Some(unpack) = &self.unpack {
            slot.release(unpack, k, settings)?;
        }
        self.requests[k].unpack_slot.active = false;
        self.requests.released += 1;
        Ok(())
    }
}

impl Drop for ReceiveComm {
    fn drop(&mut self) {
        let unconsumed = self.requests.finished - self.requests.released;
        if unconsumed > 0 {
            warning!("a receive comm was closed with {unconsumed} receives that were not consumed");
        }
        let Some(unpack) = &self.unpack else { return };
        if let Some(stream) = &unpack.stream
            && let Ok(_entered) = self.context.memory.enter()
        {
            let _ = stream.finish();
        }
        for slot in &self.slots {
            unpack.pool.give(&slot.pages);
        }
        for socket in &self.sockets {
            unpack.pool.give(socket.pages());
        }
    }
}
