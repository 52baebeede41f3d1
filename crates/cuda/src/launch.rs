//! One launch of the copy kernels.

use std::ffi::{c_uint, c_void};

use crate::context::Context;
use crate::error::Error;
use crate::pair::Alike;
use crate::sys;
use crate::table::{Filled, Item};

/// Maximum items passed as kernel parameters, which have 4 KiB; or twice as many pairs.
pub(crate) const INLINE_ITEMS: usize = 248;

/// Bytes that one warp copies of an item, in two rounds.
const PIECE: c_uint = 8 << 10;

/// Threads of a block whose items are parameters. Few, so that a small launch uses many processors.
const INLINE_BLOCK: c_uint = 64;
/// Threads of a block whose items are in memory: it reads the items of its eight warps at once.
const TABLE_BLOCK: c_uint = 256;
const WARP: c_uint = 32;

/// Items passed as kernel parameters.
#[repr(C, align(16))]
pub(crate) struct Inline(pub(crate) [Item; INLINE_ITEMS]);

impl Inline {
    pub(crate) fn new() -> Box<Self> {
        Box::new(Self([Item::default(); INLINE_ITEMS]))
    }
}

/// The base addresses of the items.
#[derive(Clone, Copy)]
pub(crate) struct Bases {
    pub(crate) from: u64,
    pub(crate) to: u64,
}

impl Bases {
    /// Addresses are absolute.
    pub(crate) const NONE: Self = Self { from: 0, to: 0 };
}

/// The format of a launch's items.
pub(crate) enum Form {
    Items,
    Pairs(Alike),
}

impl Form {
    /// Returns the room that `count` of them take, in items.
    pub(crate) fn room(&self, count: usize) -> usize {
        match self {
            Self::Items => count,
            Self::Pairs(_) => room_of_pairs(count),
        }
    }
}

/// Returns the room of pairs: two take the room of an item.
pub(crate) fn room_of_pairs(count: usize) -> usize {
    count.div_ceil(2)
}

/// The location of a launch's items.
pub(crate) enum Items<'a> {
    Inline(&'a Inline),
    /// The address of memory that the device reads.
    Table(*const u8),
}

/// The parameters of a launch, except its items.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    count: c_uint,
    from: u64,
    to: u64,
    /// The length of all pairs; zero for items.
    all: c_uint,
    /// Upper bound of the length of an item.
    longest: u64,
    bytes: u64,
}

impl Launch {
    pub(crate) fn new(filled: Filled, form: &Form, bases: Bases) -> Self {
        let (from, to, all) = match form {
            Form::Items => (bases.from, bases.to, 0),
            Form::Pairs(alike) => (
                bases.from.wrapping_add(alike.from),
                bases.to.wrapping_add(alike.to),
                alike.len as c_uint,
            ),
        };
        Self {
            count: filled.items as c_uint,
            from,
            to,
            all,
            longest: filled.longest,
            bytes: filled.bytes,
        }
    }

    /// Queues the launch on a stream of the context, which must be current; does nothing if it is
    /// empty.
    ///
    /// # Safety
    /// The items were laid out for this launch; the memory they name may be copied, and a table
    /// stays unchanged, until the launch is done.
    pub(crate) unsafe fn start(
        mut self,
        context: &Context,
        items: &Items<'_>,
        stream: sys::Stream,
    ) -> Result<sys::Code, Error> {
        if self.bytes == 0 {
            return Ok(sys::SUCCESS);
        }
        let kernels = context.kernels()?;
        let (function, block, items): (_, _, *const c_void) = match items {
            Items::Inline(items) => (kernels.inline, INLINE_BLOCK, (&raw const **items).cast()),
            Items::Table(table) => (kernels.table, TABLE_BLOCK, (&raw const *table).cast()),
        };
        let mut piece = PIECE;
        let mut parameters: [*mut c_void; 6] = [
            items.cast_mut(),
            (&raw mut self.count).cast(),
            (&raw mut self.from).cast(),
            (&raw mut self.to).cast(),
            (&raw mut self.all).cast(),
            (&raw mut piece).cast(),
        ];
        let across = self.count.div_ceil(block / WARP);
        let down = self.longest.div_ceil(u64::from(piece)) as c_uint;
        // SAFETY: the parameters are those of the kernel, and the call copies and does not write
        // them. The caller is responsible for the memory that the items name.
        Ok(unsafe {
            (context.api.launch_kernel)(
                function,
                across,
                down,
                1,
                block,
                1,
                1,
                0,
                stream,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
    }
}
