//! The tally of a run's chunks.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;

#[path = "../../crates/engine/src/transfer/tally.rs"]
mod tally;

use tally::Tally;

/// A run whose chunks are moved by the threads of a model.
struct Run {
    tally: Tally,
    /// How often each chunk was moved; loom detects accesses that are not ordered.
    moved: Vec<UnsafeCell<u32>>,
    concluded: AtomicU32,
}

// SAFETY: the tally gives each chunk to one thread at a time, which the models check.
unsafe impl Sync for Run {}
// SAFETY: nothing in it belongs to a thread.
unsafe impl Send for Run {}

impl Run {
    fn new(chunks: u32) -> Arc<Self> {
        Arc::new(Self {
            tally: Tally::new(chunks),
            moved: (0..chunks).map(|_| UnsafeCell::new(0)).collect(),
            concluded: AtomicU32::new(0),
        })
    }

    fn move_chunk(&self, index: usize) {
        // SAFETY: loom fails the model if another access is in progress.
        self.moved[index].with_mut(|count| unsafe { *count += 1 });
    }

    /// Takes and settles chunks until there are none.
    fn drive(&self) {
        while let Some(index) = self.tally.take() {
            self.move_chunk(index);
            self.conclude_if(self.tally.settle(1));
        }
    }

    /// Reads every chunk, as the thread that concludes a run may: nothing else uses them any more.
    fn conclude_if(&self, is_last: bool) {
        if is_last {
            for count in &self.moved {
                // SAFETY: as in `move_chunk`.
                assert!(count.with(|count| unsafe { *count }) <= 1, "moved twice");
            }
            self.concluded.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn assert_concluded_once(&self) {
        assert_eq!(self.concluded.load(Ordering::Relaxed), 1);
        assert_eq!(self.tally.take(), None);
    }
}

/// Two lanes and a failure: one of them concludes the run, after everything else.
pub fn one_call_concludes_a_run() {
    loom::model(|| {
        let run = Run::new(2);
        let lanes = [(); 2].map(|()| {
            let run = Arc::clone(&run);
            thread::spawn(move || run.drive())
        });
        run.conclude_if(run.tally.close());
        for lane in lanes {
            lane.join().unwrap();
        }
        run.assert_concluded_once();
    });
}

/// A lane is lost while the run is closed and another lane takes chunks.
pub fn a_chunk_given_back_is_settled_once() {
    loom::model(|| {
        let run = Run::new(2);
        let lost = run.tally.take().unwrap();
        let gives_back = {
            let run = Arc::clone(&run);
            thread::spawn(move || run.conclude_if(run.tally.give_back(lost)))
        };
        let drives = {
            let run = Arc::clone(&run);
            thread::spawn(move || run.drive())
        };
        run.conclude_if(run.tally.close());
        gives_back.join().unwrap();
        drives.join().unwrap();
        run.assert_concluded_once();
    });
}
