//! The sides of a copy: lists of places or contiguous bytes, and their totals. Pure.

use crate::error::Error;
use crate::{Entry, Range};

/// Number of address bits: in an item, the length of the range has the rest.
pub(crate) const ADDRESS_BITS: u32 = 48;

/// Number of places processed together: the compiler vectorises a loop of known length completely.
pub(crate) const BLOCK: usize = 64;

/// Selects one side of a list's elements.
pub(crate) trait View {
    type Of: 'static;
    /// Whether laying out pairs is worth an attempt.
    const CAN_PAIR: bool = true;
    fn start(of: &Self::Of) -> u64;
    fn len(of: &Self::Of) -> u64;
}

/// Ranges themselves.
pub(crate) struct Ranges;
/// The sources of entries.
pub(crate) struct Sources;
/// The targets of entries.
pub(crate) struct Targets;

impl View for Ranges {
    type Of = Range;
    #[inline]
    fn start(of: &Range) -> u64 {
        of.address as u64
    }
    #[inline]
    fn len(of: &Range) -> u64 {
        of.len as u64
    }
}

impl View for Sources {
    type Of = Entry;
    /// Reading an entry costs more than the shorter output saves.
    const CAN_PAIR: bool = false;
    #[inline]
    fn start(of: &Entry) -> u64 {
        u64::from(of.from)
    }
    #[inline]
    fn len(of: &Entry) -> u64 {
        u64::from(of.len)
    }
}

impl View for Targets {
    type Of = Entry;
    /// Reading an entry costs more than the shorter output saves.
    const CAN_PAIR: bool = false;
    #[inline]
    fn start(of: &Entry) -> u64 {
        of.to
    }
    #[inline]
    fn len(of: &Entry) -> u64 {
        u64::from(of.len)
    }
}

/// The total of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Measure {
    pub(crate) bytes: u64,
    pub(crate) count: usize,
}

/// Adds up a list, and checks that every address fits an item.
pub(crate) fn measure<V: View>(list: &[V::Of]) -> Result<Measure, Error> {
    let (mut bytes, mut ends) = (0_u64, 0_u64);
    // So few lengths that fit an item cannot overflow; others are refused below.
    for part in list.chunks(1 << 15) {
        let mut sum = 0_u64;
        for place in part {
            let (start, len) = (V::start(place), V::len(place));
            // The highest bit of all is the highest bit of any. An end that wraps has a high start
            // or length.
            ends |= start | len | start.wrapping_add(len);
            sum = sum.wrapping_add(len);
        }
        bytes = bytes.saturating_add(sum);
    }
    if ends >> ADDRESS_BITS != 0 {
        return Err(Error::BadAddress { end: ends });
    }
    Ok(Measure {
        bytes,
        count: list.len(),
    })
}

/// One side of a copy, with a current position.
pub(crate) trait Side {
    /// Whether it has no places of its own: it extends as far as the other side.
    const IS_DENSE: bool;
    /// Whether [`pair_up`] is worth an attempt.
    const CAN_PAIR: bool;

    /// Returns the address of the next bytes, and how many are contiguous.
    fn next(&self) -> (u64, u64);
    /// Advances by at most as many bytes as are contiguous.
    fn advance(&mut self, bytes: u64);
    /// Returns an upper bound of the places left.
    fn places(&self) -> usize;

    /// Returns the number of complete places ahead.
    fn whole(&self) -> usize;
    /// Returns the start and length of each of the next `count` complete places. A dense side
    /// returns its position.
    fn ahead(&self, count: usize) -> impl Iterator<Item = (u64, u64)>;

    /// [`BLOCK`] complete places together.
    type Block: Copy;
    /// Returns the block that begins with place `first`. A dense side has places of `len`.
    fn block(&self, first: usize, len: u64) -> Self::Block;
    /// Returns the start and length of one place of a block.
    fn of_block(block: Self::Block, i: usize) -> (u64, u64);
    /// Advances by `count` complete places, `bytes` in all.
    fn skip(&mut self, count: usize, bytes: u64);
}

/// A list of places in order.
pub(crate) struct List<'a, V: View> {
    /// The rest of the list; its first place is not empty.
    rest: &'a [V::Of],
    /// Progress in the first place; less than its length.
    offset: u64,
}

impl<'a, V: View> List<'a, V> {
    pub(crate) fn new(list: &'a [V::Of]) -> Self {
        let mut side = Self {
            rest: list,
            offset: 0,
        };
        side.skip(0, 0);
        side
    }
}

impl<'a, V: View> Side for List<'a, V> {
    const IS_DENSE: bool = false;
    const CAN_PAIR: bool = V::CAN_PAIR;

    #[inline]
    fn next(&self) -> (u64, u64) {
        match self.rest.first() {
            Some(place) => (V::start(place) + self.offset, V::len(place) - self.offset),
            None => (0, 0),
        }
    }

    #[inline]
    fn advance(&mut self, bytes: u64) {
        self.offset += bytes;
        if self
            .rest
            .first()
            .is_none_or(|place| V::len(place) == self.offset)
        {
            self.skip(1, 0);
        }
    }

    fn places(&self) -> usize {
        self.rest.len()
    }

    #[inline]
    fn whole(&self) -> usize {
        if self.offset == 0 { self.rest.len() } else { 0 }
    }

    #[inline]
    fn ahead(&self, count: usize) -> impl Iterator<Item = (u64, u64)> {
        let places = self.rest[..count].iter();
        places.map(|place| (V::start(place), V::len(place)))
    }

    type Block = &'a [V::Of; BLOCK];

    #[inline(always)]
    fn block(&self, first: usize, _: u64) -> Self::Block {
        let (block, _) = self.rest[first..]
            .split_first_chunk()
            .expect("asked for places that lie ahead whole");
        block
    }

    #[inline(always)]
    fn of_block(block: Self::Block, i: usize) -> (u64, u64) {
        (V::start(&block[i]), V::len(&block[i]))
    }

    #[inline]
    fn skip(&mut self, count: usize, _: u64) {
        self.offset = 0;
        self.rest = self.rest.get(count..).unwrap_or_default();
        while let [place, rest @ ..] = self.rest
            && V::len(place) == 0
        {
            self.rest = rest;
        }
    }
}

/// Contiguous bytes: the pinned side.
pub(crate) struct Dense(pub(crate) u64);

impl Side for Dense {
    const IS_DENSE: bool = true;
    const CAN_PAIR: bool = true;

    #[inline]
    fn next(&self) -> (u64, u64) {
        (self.0, u64::MAX)
    }
    #[inline]
    fn advance(&mut self, bytes: u64) {
        self.0 += bytes;
    }
    fn places(&self) -> usize {
        0
    }
    #[inline]
    fn whole(&self) -> usize {
        usize::MAX
    }
    #[inline]
    fn ahead(&self, _: usize) -> impl Iterator<Item = (u64, u64)> {
        std::iter::repeat((self.0, u64::MAX))
    }

    /// The start, and the length of each place.
    type Block = (u64, u64);

    #[inline(always)]
    fn block(&self, first: usize, len: u64) -> Self::Block {
        (self.0.wrapping_add((first as u64).wrapping_mul(len)), len)
    }

    #[inline(always)]
    fn of_block((start, len): Self::Block, i: usize) -> (u64, u64) {
        (start.wrapping_add((i as u64).wrapping_mul(len)), len)
    }

    #[inline]
    fn skip(&mut self, _: usize, bytes: u64) {
        self.0 += bytes;
    }
}
