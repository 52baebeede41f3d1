//! Allocates room for work in a ring of memory. Pure.

/// Room in a ring of items: reserved at the head, freed at the tail, in order.
#[derive(Debug)]
pub(crate) struct Ring {
    capacity: u64,
    /// `tail <= head <= tail + capacity`; both only grow.
    head: u64,
    tail: u64,
}

impl Ring {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            capacity: capacity as u64,
            head: 0,
            tail: 0,
        }
    }

    /// Reserves `count` adjacent items and returns their position; `None` if there is no room.
    pub(crate) fn reserve(&mut self, count: usize) -> Option<usize> {
        let start = self.start_of(count)?;
        if self.is_empty() {
            self.tail = start;
        }
        self.head = start + whole(count);
        usize::try_from(start % self.capacity).ok()
    }

    /// Returns what [`Ring::reserve`] would return.
    pub(crate) fn next(&self, count: usize) -> Option<usize> {
        usize::try_from(self.start_of(count)? % self.capacity).ok()
    }

    /// Returns where `count` items would begin.
    fn start_of(&self, count: usize) -> Option<u64> {
        let count = whole(count);
        if count > self.capacity {
            return None;
        }
        if self.is_empty() {
            // Restarts at the beginning, which is more likely to be in the cache.
            return Some(self.head.next_multiple_of(self.capacity));
        }
        let at = self.head % self.capacity;
        let skipped = if at + count > self.capacity {
            self.capacity - at
        } else {
            0
        };
        let start = self.head + skipped;
        (start + count <= self.tail + self.capacity).then_some(start)
    }

    fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// Returns the unused end of the last reservation: keeps `used` of `reserved` items.
    pub(crate) fn trim(&mut self, reserved: usize, used: usize) {
        self.head -= whole(reserved) - whole(used);
    }

    /// Returns the position to free up to, once everything reserved so far is no longer used.
    pub(crate) fn position(&self) -> u64 {
        self.head
    }

    /// Frees everything reserved before `position`.
    pub(crate) fn free(&mut self, position: u64) {
        self.tail = self.tail.max(position);
    }
}

/// Rounds up: blocks of the kernel read eight items at once.
fn whole(count: usize) -> u64 {
    (count as u64).next_multiple_of(8)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_ring_never_gives_what_is_in_use(
            steps in proptest::collection::vec((1_usize..40, 0_usize..40, any::<bool>()), 1..200),
        ) {
            let mut ring = Ring::new(64);
            // Start, end and position of the reservations in use, oldest first.
            let mut used = std::collections::VecDeque::<(usize, usize, u64)>::new();
            for (wanted, trimmed, frees) in steps {
                if frees && let Some((_, _, position)) = used.pop_front() {
                    ring.free(position);
                }
                let next = ring.next(wanted);
                let reserved = ring.reserve(wanted);
                prop_assert_eq!(next, reserved);
                let Some(start) = reserved else {
                    prop_assert!(!used.is_empty(), "an empty ring refused {wanted}");
                    continue;
                };
                let kept = wanted - trimmed.min(wanted - 1);
                ring.trim(wanted, kept);
                let end = start + kept.next_multiple_of(8);
                prop_assert!(start % 8 == 0 && end <= 64);
                prop_assert!(used.iter().all(|&(from, to, _)| end <= from || to <= start));
                used.push_back((start, end, ring.position()));
            }
        }
    }
}
