//! Pure: the sides of a copy, lists of places or bytes back to back, and what they add up to.

use crate::error::Error;
use crate::{Entry, Range};

/// Addresses have so many bits: in an item, the length of the range has the rest.
pub(crate) const ADDRESS_BITS: u32 = 48;

/// Places that are looked at together: a loop over as many as the compiler knows of is made of vectors only.
pub(crate) const BLOCK: usize = 64;

/// Which side of a list's elements is meant.
pub(crate) trait View {
    type Of: 'static;
    /// Whether places are worth an attempt at pairs.
    const CAN_PAIR: bool = true;
    fn start(of: &Self::Of) -> u64;
    fn len(of: &Self::Of) -> u64;
}

/// Ranges, as they are.
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
    /// Reading an entry costs more than writing half an item less.
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
    /// Reading an entry costs more than writing half an item less.
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

/// A list's sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Measure {
    pub(crate) bytes: u64,
    pub(crate) count: usize,
}

/// Adds a list up, and checks that every address fits an item.
pub(crate) fn measure<V: View>(list: &[V::Of]) -> Result<Measure, Error> {
    let (mut bytes, mut ends) = (0_u64, 0_u64);
    // So few lengths that fit an item cannot overflow; those that do not fit are refused below.
    for part in list.chunks(1 << 15) {
        let mut sum = 0_u64;
        for place in part {
            let (start, len) = (V::start(place), V::len(place));
            // The highest bit of all is the highest bit of any. An end that wraps has a high start or
            // length.
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

/// One side of a copy: a place to continue from.
pub(crate) trait Side {
    /// Whether it has no places of its own: it goes on for as long as the other side does.
    const IS_DENSE: bool;
    /// Whether [`pair_up`] is worth an attempt.
    const CAN_PAIR: bool;

    /// Where the next bytes are, and how many lie there together.
    fn next(&self) -> (u64, u64);
    /// Goes on by at most as many bytes as lie together.
    fn advance(&mut self, bytes: u64);
    /// An upper bound of the places left.
    fn places(&self) -> usize;

    /// How many places lie ahead whole.
    fn whole(&self) -> usize;
    /// The start and length of each of the next `count` of these. A dense side gives where it is.
    fn ahead(&self, count: usize) -> impl Iterator<Item = (u64, u64)>;

    /// Some of these, [`BLOCK`] together.
    type Block: Copy;
    /// The block that begins with place `first`. A dense side has places of `len`.
    fn block(&self, first: usize, len: u64) -> Self::Block;
    /// The start and length of one place of a block.
    fn of_block(block: Self::Block, i: usize) -> (u64, u64);
    /// Goes on by `count` of these, `bytes` in all.
    fn skip(&mut self, count: usize, bytes: u64);
}

/// A list of places, one after the other.
pub(crate) struct List<'a, V: View> {
    /// What is left of it; the first place is not empty.
    rest: &'a [V::Of],
    /// How much of the first place is done; less than its length.
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

/// Bytes that lie back to back: the pinned side.
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

    /// Where it begins, and how long each place is.
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
