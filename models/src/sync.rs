//! The parts of the engine's `sync` that the modules use, made of loom's types.

use loom::sync::MutexGuard;

/// The rank of a lock; the order of locking is checked elsewhere.
pub(crate) enum Rank {
    Leaf,
    Worker,
}

/// Mutual exclusion.
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(_: Rank, value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().expect("no thread panics in a model")
    }
}

/// Atomics with sequentially consistent accesses.
///
/// Loom treats `SeqCst` accesses as acquire and release ones and implements sequential consistency
/// only by fences. A fence after each such store and each such read-modify-write orders it before
/// later loads, which is what a compiler for POWER emits for the same accesses. Loom also leaves
/// the order of stores open where a read-modify-write of another thread decides it: such a store is
/// a swap here. A swap also acquires, so that a model may pass where the access that it overwrites
/// is weaker than `SeqCst`.
pub(crate) mod atomic {
    pub(crate) use loom::sync::atomic::Ordering;
    use loom::sync::atomic::fence;

    /// Returns the ordering that loom supports, for a load, a store, and a read-modify-write.
    fn known(order: Ordering) -> [Ordering; 3] {
        match order {
            Ordering::SeqCst => [Ordering::Acquire, Ordering::Release, Ordering::AcqRel],
            order => [order; 3],
        }
    }

    fn after<T>(order: Ordering, value: T) -> T {
        if order == Ordering::SeqCst {
            fence(Ordering::SeqCst);
        }
        value
    }

    macro_rules! atomic {
        ($name:ident, $value:ty) => {
            pub(crate) struct $name(loom::sync::atomic::$name);

            impl $name {
                pub(crate) fn new(value: $value) -> Self {
                    Self(loom::sync::atomic::$name::new(value))
                }

                pub(crate) fn load(&self, order: Ordering) -> $value {
                    self.0.load(known(order)[0])
                }

                pub(crate) fn store(&self, value: $value, order: Ordering) {
                    if order == Ordering::SeqCst {
                        self.swap(value, order);
                    } else {
                        self.0.store(value, order);
                    }
                }

                pub(crate) fn swap(&self, value: $value, order: Ordering) -> $value {
                    after(order, self.0.swap(value, known(order)[2]))
                }

                pub(crate) fn fetch_update(
                    &self,
                    order: Ordering,
                    failed: Ordering,
                    change: impl FnMut($value) -> Option<$value>,
                ) -> Result<$value, $value> {
                    let result = self
                        .0
                        .fetch_update(known(order)[2], known(failed)[0], change);
                    after(order, result)
                }
            }
        };
    }

    macro_rules! number {
        ($name:ident, $value:ty) => {
            atomic!($name, $value);

            impl $name {
                pub(crate) fn fetch_add(&self, value: $value, order: Ordering) -> $value {
                    after(order, self.0.fetch_add(value, known(order)[2]))
                }

                pub(crate) fn fetch_sub(&self, value: $value, order: Ordering) -> $value {
                    after(order, self.0.fetch_sub(value, known(order)[2]))
                }
            }
        };
    }

    atomic!(AtomicBool, bool);
    number!(AtomicU32, u32);
    number!(AtomicUsize, usize);
}
