//! Lays the bytes of a chunk into pages.

use crate::faults::Random;
use crate::pages::PAGE;
use crate::ring::ENTRIES;
use crate::settings::Fragments;

/// The state of a message when its next fragment is laid out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Situation {
    /// Seed and number of the receive, which determine the fragments.
    pub(crate) seed: u64,
    pub(crate) receive: u64,
    /// Offset of the fragment in the message.
    pub(crate) offset: u32,
    /// Bytes of the chunk from there on; at least one.
    pub(crate) chunk_left: u32,
    /// Size of the chunk: the rest of the message is expected in such chunks.
    pub(crate) chunk_size: u32,
    /// Bytes of the message that have no fragment yet.
    pub(crate) message_left: u32,
    /// Entries that the message has used.
    pub(crate) entries: usize,
}

/// Position in a page: its start, and its length in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) start: u32,
    pub(crate) len: u32,
}

/// Lays out the next fragment.
pub(crate) fn place(kind: Fragments, situation: Situation) -> Place {
    let page = PAGE as u32;
    let full = Place {
        start: 0,
        len: page.min(situation.chunk_left),
    };
    if kind == Fragments::Full || tight(situation) {
        return full;
    }
    let mut random = Random::new(
        situation.seed ^ situation.receive.rotate_left(40) ^ u64::from(situation.offset),
    );
    let (start, len) = match kind {
        Fragments::Odd => (random.below(255) as u32 | 1, random.below(PAGE) as u32 | 1),
        _ => (
            16 * random.below(16) as u32,
            16 * (1 + random.below(256) as u32),
        ),
    };
    Place {
        start,
        len: len.min(page - start).min(situation.chunk_left),
    }
}

/// Returns whether shorter fragments could exhaust the entries of a message that fits otherwise.
fn tight(situation: Situation) -> bool {
    let pages = situation.message_left as usize / PAGE;
    let chunks = (situation.message_left / situation.chunk_size) as usize;
    situation.entries + pages + chunks + 2 >= ENTRIES
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lays out a whole message in chunks; returns the places.
    fn lay_out(kind: Fragments, total: u32, chunk: u32) -> Vec<Place> {
        let mut places = Vec::new();
        let mut offset = 0;
        while offset < total {
            let end = total.min(offset - offset % chunk + chunk);
            let situation = Situation {
                seed: 5,
                receive: 9,
                offset,
                chunk_left: end - offset,
                chunk_size: chunk,
                message_left: total - offset,
                entries: places.len(),
            };
            let place = place(kind, situation);
            assert!(place.len > 0 && place.start + place.len <= PAGE as u32);
            assert!(place.len <= end - offset);
            places.push(place);
            offset += place.len;
        }
        places
    }

    #[test]
    fn a_message_of_the_nominal_size_always_fits() {
        for kind in [Fragments::Full, Fragments::Short, Fragments::Odd] {
            for chunk in [5000, 8 << 10, 512 << 10] {
                let places = lay_out(kind, 4 << 20, chunk);
                assert!(
                    places.len() <= ENTRIES,
                    "{kind:?} {chunk}: {}",
                    places.len()
                );
            }
        }
    }

    #[test]
    fn each_kind_is_what_it_says() {
        let full = lay_out(Fragments::Full, 10_000, 512 << 10);
        assert_eq!(
            full.iter().map(|place| place.len).collect::<Vec<_>>(),
            [4096, 4096, 1808]
        );
        let short = lay_out(Fragments::Short, 1 << 20, 512 << 10);
        assert!(
            short
                .iter()
                .all(|place| place.len % 16 == 0 && place.start % 16 == 0)
        );
        assert!(short.iter().any(|place| place.start > 0));
        let odd = lay_out(Fragments::Odd, 1 << 20, 512 << 10);
        assert!(odd.iter().all(|place| place.start % 2 == 1));
        assert!(odd.iter().filter(|place| place.len % 2 == 1).count() > odd.len() / 4);
    }
}
