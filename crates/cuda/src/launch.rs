//! One launch of the copy kernels.

use std::ffi::{c_uint, c_void};

use crate::context::Context;
use crate::error::Error;
use crate::pair::Alike;
use crate::sys;
use crate::table::{Filled, Item};

/// Items that fit a launch's parameters, of which there can be 4 KiB; or twice as many pairs.
pub(crate) const INLINE_ITEMS: usize = 248;

/// What one warp copies of an item: in two rounds it is done.
const PIECE: c_uint = 8 << 10;

/// Threads of a block whose items are parameters. Few, so that a small launch spreads out.
const INLINE_BLOCK: c_uint = 64;
/// Threads of a block whose items are in memory: it reads the items of its eight warps at once.
const TABLE_BLOCK: c_uint = 256;
const WARP: c_uint = 32;

/// Items as parameters.
#[repr(C, align(16))]
pub(crate) struct Inline(pub(crate) [Item; INLINE_ITEMS]);

impl Inline {
    pub(crate) fn new() -> Box<Self> {
        Box::new(Self([Item::default(); INLINE_ITEMS]))
    }
}

/// What the items' addresses are relative to.
#[derive(Clone, Copy)]
pub(crate) struct Bases {
    pub(crate) from: u64,
    pub(crate) to: u64,
}

impl Bases {
    /// Addresses are what they are.
    pub(crate) const NONE: Self = Self { from: 0, to: 0 };
}

/// How the items of a launch are written.
pub(crate) enum Form {
    Items,
    Pairs(Alike),
}

impl Form {
    /// The room for `count` of them, in items.
    pub(crate) fn room(&self, count: usize) -> usize {
        match self {
            Self::Items => count,
            Self::Pairs(_) => room_of_pairs(count),
        }
    }
}

/// Two take the room of an item.
pub(crate) fn room_of_pairs(count: usize) -> usize {
    count.div_ceil(2)
}

/// Where the items of a launch are.
pub(crate) enum Items<'a> {
    Inline(&'a Inline),
    /// The address of memory that the device reads.
    Table(*const u8),
}

/// The parameters of a launch, apart from its items.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    count: c_uint,
    from: u64,
    to: u64,
    /// The length of all pairs; zero for items.
    all: c_uint,
    /// No item is longer.
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

    /// Puts the launch on a stream of the context, which must be current; nothing if it is empty.
    ///
    /// # Safety
    /// The items are those that were laid out for it; whatever they name may be copied, and a table
    /// stays as it is, until the launch is over.
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
        // SAFETY: the parameters are those of the kernel, and copied by the call, which does not
        // write them. The caller answers for what the items name.
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
