//! Checks that the load's kernels compute the right results.

use tcpx_cuda::{Load, Work};

use crate::Outcome;

/// Sizes that are no multiples of the kernels' tiles, and small enough to verify on a CPU.
const WORKS: [Work; 4] = [
    Work::Matmul { side: 200 },
    Work::Matmul { side: 384 },
    Work::Copy { bytes: 1_000_003 },
    Work::Decode {
        rows: 77,
        launches: 3,
    },
];

pub(crate) fn run(ordinal: u32) -> Outcome {
    for work in WORKS {
        let load = Load::new(ordinal, work)?;
        if load.is_right()? {
            return Err(format!("{work:?} is right before it was done").into());
        }
        for _ in 0..2 {
            load.start()?;
        }
        if !load.is_right()? {
            return Err(format!("{work:?} is wrong").into());
        }
    }
    println!("check: the kernels of the load are right");
    Ok(())
}
