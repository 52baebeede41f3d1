//! A data socket of a receive comm: its announced chunks, and the destination of the current one.

use std::collections::VecDeque;

use crate::error::Error;
use crate::fragment::{self, Situation};
use crate::log::info;
use crate::pages::PAGE;
use crate::receive::Unpack;
use crate::ring::{ENTRIES, Entry};
use crate::settings::Settings;
use crate::slot::Slot;
use crate::socket::{Progress, Socket};

/// A part of a message that arrives on one socket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chunk {
    pub(crate) receive: u64,
    pub(crate) offset: u32,
    pub(crate) size: u32,
}

impl Chunk {
    pub(crate) fn new(receive: u64, offset: u32, size: u32) -> Self {
        Self {
            receive,
            offset,
            size,
        }
    }
}

/// Whether to continue reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Read {
    /// A chunk was read to its end; there may be more.
    Chunk,
    /// Nothing more for now.
    Drained,
}

/// One data socket.
#[derive(Debug)]
pub(crate) struct DataSocket {
    socket: Socket,
    chunks: VecDeque<Chunk>,
    /// Destinations of the first chunk's bytes, in order.
    pieces: Vec<libc::iovec>,
    /// Number of full pieces.
    full: usize,
    /// Number of bytes that the pieces cover, and of bytes that have arrived.
    laid_out: u32,
    arrived: u32,
    /// The fragments among the pieces, and their pages.
    entries: Vec<Entry>,
    pages: Vec<u32>,
    /// Bytes ever read.
    received: u64,
    /// Whether it broke or ended.
    dead: bool,
}

impl DataSocket {
    pub(crate) fn new(socket: Socket) -> Self {
        Self {
            socket,
            chunks: VecDeque::with_capacity(64),
            pieces: Vec::with_capacity(256),
            full: 0,
            laid_out: 0,
            arrived: 0,
            entries: Vec::with_capacity(256),
            pages: Vec::with_capacity(256),
            received: 0,
            dead: false,
        }
    }

    pub(crate) fn queue(&mut self, chunk: Chunk) {
        self.chunks.push_back(chunk);
    }

    /// Returns the chunk whose bytes come next, unless the socket broke.
    pub(crate) fn current(&self) -> Option<Chunk> {
        self.chunks.front().copied().filter(|_| !self.dead)
    }

    /// Returns the bytes ever read.
    pub(crate) fn received(&self) -> u64 {
        self.received
    }

    /// Returns the pages of the current chunk.
    pub(crate) fn pages(&self) -> &[u32] {
        &self.pages
    }

    /// Returns whether all pieces are full, although the chunk has more bytes.
    pub(crate) fn needs_pieces(&self) -> bool {
        self.full == self.pieces.len()
    }

    /// Lets the current chunk land in one piece.
    pub(crate) fn land_at(&mut self, data: *mut u8) {
        let size = self.chunks.front().map_or(0, |chunk| chunk.size);
        self.laid_out = size;
        self.pieces.push(libc::iovec {
            iov_base: data.cast(),
            iov_len: size as usize,
        });
    }

    /// Lays as much of the rest of the current chunk into pages as there are pages. Returns false
    /// if there is none: then nothing is read, and TCP holds back the sender.
    pub(crate) fn lay_out(
        &mut self,
        settings: &Settings,
        unpack: &Unpack,
        slot: &mut Slot,
        total: u32,
    ) -> Result<bool, Error> {
        let Some(chunk) = self.current() else {
            return Ok(false);
        };
        let pool = &unpack.pool;
        let before = self.laid_out;
        while self.laid_out < chunk.size {
            let first = self.pages.len();
            pool.take(
                (chunk.size - self.laid_out).div_ceil(PAGE as u32) as usize,
                &mut self.pages,
            );
            if self.pages.len() == first {
                break;
            }
            self.fill_pages(settings, unpack, slot, total, chunk, first)?;
        }
        if self.laid_out == before && !slot.told_empty {
            slot.told_empty = true;
            info!("the bounce pool is empty: nothing is read until a receive is consumed");
        }
        Ok(self.laid_out > before)
    }

    /// Creates one fragment for each page from `first` on.
    fn fill_pages(
        &mut self,
        settings: &Settings,
        unpack: &Unpack,
        slot: &mut Slot,
        total: u32,
        chunk: Chunk,
        first: usize,
    ) -> Result<(), Error> {
        for &page in &self.pages[first..] {
            if slot.planned_entries == ENTRIES {
                if settings.exit_on_overflow {
                    crate::log::warning!("more than {ENTRIES} fragments in one receive: exiting");
                    std::process::exit(1);
                }
                return Err(Error::RingOverflow { size: total });
            }
            let situation = Situation {
                seed: settings.seed,
                receive: chunk.receive,
                offset: chunk.offset + self.laid_out,
                chunk_left: chunk.size - self.laid_out,
                chunk_size: chunk.size,
                message_left: total - slot.planned_bytes,
                entries: slot.planned_entries,
            };
            let place = fragment::place(settings.fragments, situation);
            let src_off = page * PAGE as u32 + place.start;
            let dst_off = u64::from(situation.offset);
            self.entries.push(Entry {
                src_off,
                len: place.len,
                dst_off,
            });
            // SAFETY: within the arena, which has this page.
            let base = unsafe { unpack.pool.landing().add(src_off as usize) };
            self.pieces.push(libc::iovec {
                iov_base: base.cast(),
                iov_len: place.len as usize,
            });
            self.laid_out += place.len;
            slot.planned_bytes += place.len;
            slot.planned_entries += 1;
        }
        Ok(())
    }

    /// Reads into the pieces once. The error says how the socket ended; it stays dead.
    pub(crate) fn read(&mut self) -> Result<(usize, Read), String> {
        let wanted = (self.laid_out - self.arrived) as usize;
        // SAFETY: the pieces are pages that belong to this socket, or the posted buffer, which the
        // plugin may use until the receive is done.
        let outcome = unsafe { self.socket.receive_pieces(&self.pieces[self.full..]) };
        let moved = match outcome {
            Ok(Progress::Moved(n)) => n,
            Ok(Progress::Blocked) => return Ok((0, Read::Drained)),
            Ok(Progress::Closed) => return Err(self.die("the peer closed it".to_owned())),
            Err(error) => return Err(self.die(error.to_string())),
        };
        self.arrived += moved as u32;
        self.received += moved as u64;
        self.fill(moved);
        // A short read has drained the socket: another read would only confirm it.
        Ok((
            moved,
            if moved == wanted {
                Read::Chunk
            } else {
                Read::Drained
            },
        ))
    }

    fn die(&mut self, why: String) -> String {
        self.dead = true;
        why
    }

    /// Moves the start of the pieces past `bytes`.
    fn fill(&mut self, mut bytes: usize) {
        while bytes > 0 {
            let piece = &mut self.pieces[self.full];
            if bytes < piece.iov_len {
                // SAFETY: within the piece.
                piece.iov_base = unsafe { piece.iov_base.cast::<u8>().add(bytes) }.cast();
                piece.iov_len -= bytes;
                return;
            }
            bytes -= piece.iov_len;
            self.full += 1;
        }
    }

    /// Returns the fragments of the current chunk once all its bytes have arrived.
    pub(crate) fn finished_chunk(&self) -> Option<&[Entry]> {
        let chunk = self.chunks.front()?;
        (self.arrived == chunk.size).then_some(&self.entries)
    }

    /// Advances to the next chunk; the pages of this one now belong to its receive.
    pub(crate) fn next_chunk(&mut self) {
        self.chunks.pop_front();
        self.pieces.clear();
        self.entries.clear();
        self.pages.clear();
        (self.full, self.laid_out, self.arrived) = (0, 0, 0);
    }
}
