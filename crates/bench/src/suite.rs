//! Selects the cases to measure: named ones, a sweep over sizes, or cases from options.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::floor::Waiting;
use crate::workload::{Layout, Limit, Op, Shape, Workload};

/// Up to this size a transfer measures latency: the caller polls, and there are many iterations.
pub const LATENCY_BYTES: u64 = 64 << 10;

/// One case to measure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Case {
    /// Short and stable, such as `kv16k`.
    pub name: String,
    /// The transferred data, and how often.
    pub workload: Workload,
    /// The way the caller waits.
    pub waiting: Waiting,
    /// The group of the case.
    pub group: Group,
}

/// The reason a case is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Group {
    /// One of [`NAMED`].
    Named,
    /// A point of the sweep over sizes.
    Sweep,
    /// Requested by size.
    Custom,
}

/// A case with a well-known name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Named {
    /// Its name.
    pub name: &'static str,
    /// A description.
    pub about: &'static str,
    /// Bytes of one transfer.
    pub total_bytes: u64,
    /// Bytes of one block; 0 for a single block.
    pub block_bytes: u64,
    /// Default number of measured iterations.
    pub iterations: u32,
}

/// The default suite, by which the project's goals are measured.
pub const NAMED: [Named; 5] = [
    Named {
        name: "lat4k",
        about: "round trip of one small block",
        total_bytes: 4 << 10,
        block_bytes: 0,
        iterations: 20_000,
    },
    Named {
        name: "one64m",
        about: "one large block",
        total_bytes: 64 << 20,
        block_bytes: 0,
        iterations: 40,
    },
    Named {
        name: "one512m",
        about: "one very large block",
        total_bytes: 512 << 20,
        block_bytes: 0,
        iterations: 10,
    },
    Named {
        name: "kv16k",
        about: "a KV cache in scattered 16 KiB blocks",
        total_bytes: 64 << 20,
        block_bytes: 16 << 10,
        iterations: 40,
    },
    Named {
        name: "kv4k",
        about: "a KV cache in scattered 4 KiB blocks",
        total_bytes: 64 << 20,
        block_bytes: 4 << 10,
        iterations: 40,
    },
];

/// The sizes of the sweep: a factor of four each, and the largest.
pub const SWEEP_BYTES: [u64; 10] = [
    4 << 10,
    16 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
    64 << 20,
    256 << 20,
    512 << 20,
];

/// The options.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Names of [`NAMED`]. Empty, and no sizes: all of them.
    pub cases: Vec<String>,
    /// Sizes to measure (with each of the block sizes) instead of, or besides, named cases.
    pub sizes: Vec<u64>,
    /// Block sizes for `sizes`; 0 is a single block. Empty: a single block.
    pub block_sizes: Vec<u64>,
    /// The layout of the blocks.
    pub layout: Layout,
    /// The operations; empty: READ and WRITE.
    pub ops: Vec<Op>,
    /// Whether to measure [`SWEEP_BYTES`] too.
    pub sweep: bool,
    /// Number of measured iterations of every case.
    pub iterations: Option<u32>,
    /// Time for every case, instead of a number of iterations.
    pub duration: Option<Duration>,
    /// Number of iterations before measuring starts.
    pub warmup: Option<u32>,
    /// The way the caller waits; by default it polls up to [`LATENCY_BYTES`] and sleeps above.
    pub waiting: Option<Waiting>,
}

/// Returns the cases that the options select, in the order of measurement.
pub fn cases(options: &Options) -> Result<Vec<Case>, Error> {
    options.check()?;
    let mut cases = Vec::new();
    let all =
        options.cases.is_empty() && options.sizes.is_empty() && options.block_sizes.is_empty();
    for named in NAMED {
        if all || options.cases.iter().any(|name| name == named.name) {
            let blocks = (named.total_bytes, named.block_bytes);
            options.push(
                &mut cases,
                named.name,
                Group::Named,
                blocks,
                named.iterations,
            )?;
        }
    }
    for &total in options.custom_sizes() {
        for &block in or(&options.block_sizes, &[0]) {
            let name = custom_name(total, block);
            options.push(
                &mut cases,
                &name,
                Group::Custom,
                (total, block),
                iterations(total),
            )?;
        }
    }
    if options.sweep {
        for total in SWEEP_BYTES {
            let name = custom_name(total, 0);
            options.push(
                &mut cases,
                &name,
                Group::Sweep,
                (total, 0),
                iterations(total) / 2,
            )?;
        }
    }
    Ok(cases)
}

impl Options {
    fn check(&self) -> Result<(), Error> {
        let known = |name: &&String| NAMED.iter().any(|named| named.name == **name);
        if let Some(name) = self.cases.iter().find(|name| !known(name)) {
            let names = NAMED.map(|named| named.name).join(", ");
            let reason = format!("there is no such case; the cases are {names}");
            return Err(Error::Option {
                option: "case",
                value: name.clone(),
                reason,
            });
        }
        if self.iterations == Some(0) {
            let reason = "at least one iteration is needed".into();
            return Err(Error::Option {
                option: "iterations",
                value: "0".into(),
                reason,
            });
        }
        if self.duration == Some(Duration::ZERO) {
            let reason = "some time is needed".into();
            return Err(Error::Option {
                option: "duration",
                value: "0".into(),
                reason,
            });
        }
        Ok(())
    }

    /// Returns the sizes; block sizes without sizes mean 64 MiB of such blocks.
    fn custom_sizes(&self) -> &[u64] {
        if self.block_sizes.is_empty() {
            &self.sizes
        } else {
            or(&self.sizes, &[64 << 20])
        }
    }

    fn push(
        &self,
        cases: &mut Vec<Case>,
        name: &str,
        group: Group,
        (total, block): (u64, u64),
        iterations: u32,
    ) -> Result<(), Error> {
        let limit = match (self.duration, self.iterations) {
            (Some(duration), _) => Limit::Duration(duration),
            (None, Some(iterations)) => Limit::Iterations(iterations),
            (None, None) => Limit::Iterations(iterations),
        };
        let latency = total <= LATENCY_BYTES;
        // A few dozen small transfers wake up the CPUs, two large ones touch every page.
        let warmup = self.warmup.unwrap_or(if latency { 200 } else { 2 });
        let waiting = self.waiting.unwrap_or(if latency {
            Waiting::Poll
        } else {
            Waiting::Block
        });
        for &op in or(&self.ops, &[Op::Read, Op::Write]) {
            let shape = Shape::new(op, total, block, self.layout)?;
            let workload = Workload {
                shape,
                limit,
                warmup,
            };
            let gaps = match self.layout {
                Layout::Strided if shape.blocks() > 1 => " strided",
                Layout::Apart if shape.blocks() > 1 => " apart",
                _ => "",
            };
            cases.push(Case {
                name: format!("{name}{gaps}"),
                workload,
                waiting,
                group,
            });
        }
        Ok(())
    }
}

fn or<'v, T>(values: &'v [T], default: &'v [T]) -> &'v [T] {
    if values.is_empty() { default } else { values }
}

fn custom_name(total: u64, block: u64) -> String {
    let compact = |bytes| {
        crate::units::bytes(bytes)
            .replace(' ', "")
            .replace("iB", "")
    };
    match block {
        0 => compact(total),
        block if block >= total => compact(total),
        block => format!("{}/{}", compact(total), compact(block)),
    }
}

/// Returns the iterations for about 2 GiB of traffic, at least 10 and at most 10,000.
fn iterations(total_bytes: u64) -> u32 {
    ((2 << 30) / total_bytes.max(1)).clamp(10, 10_000) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_default_all_named_cases_both_ways() {
        let cases = cases(&Options::default()).unwrap();
        assert_eq!(cases.len(), 2 * NAMED.len());
        let latency = &cases[0];
        assert_eq!(
            (latency.name.as_str(), latency.waiting),
            ("lat4k", Waiting::Poll)
        );
        let scattered = cases.iter().find(|case| case.name == "kv4k").unwrap();
        assert_eq!(scattered.waiting, Waiting::Block);
        assert_eq!(scattered.workload.shape.blocks(), 16384);
        assert_eq!(scattered.workload.shape.layout(), Layout::Scattered);
    }

    #[test]
    fn names_sizes_and_blocks_are_options() {
        let names = |options: &Options| -> Vec<String> {
            cases(options)
                .unwrap()
                .into_iter()
                .map(|case| case.name)
                .collect()
        };
        let mut options = Options {
            cases: vec!["kv4k".into()],
            ops: vec![Op::Read],
            ..Options::default()
        };
        assert_eq!(names(&options), ["kv4k"]);
        options.sizes = vec![1 << 20, 4096];
        assert_eq!(names(&options), ["kv4k", "1M", "4K"]);
        options.cases.clear();
        options.block_sizes = vec![0, 16 << 10];
        assert_eq!(names(&options), ["1M", "1M/16K", "4K", "4K"]);
        options.layout = Layout::Apart;
        assert_eq!(names(&options), ["1M", "1M/16K apart", "4K", "4K"]);
        options.layout = Layout::Scattered;
        options.sizes.clear();
        options.block_sizes = vec![1000];
        assert_eq!(names(&options), ["64M/1000B"]);
        options.sweep = true;
        assert_eq!(names(&options).len(), 1 + SWEEP_BYTES.len());
    }

    #[test]
    fn limits_and_waiting_can_be_chosen() {
        let options = Options {
            sizes: vec![4096],
            ops: vec![Op::Write],
            iterations: Some(7),
            waiting: Some(Waiting::Block),
            warmup: Some(0),
            ..Options::default()
        };
        let case = cases(&options).unwrap().remove(0);
        assert_eq!(case.workload.limit, Limit::Iterations(7));
        assert_eq!((case.waiting, case.workload.warmup), (Waiting::Block, 0));
        let options = Options {
            duration: Some(Duration::from_secs(1)),
            ..options
        };
        let case = cases(&options).unwrap().remove(0);
        assert_eq!(case.workload.limit, Limit::Duration(Duration::from_secs(1)));
    }

    #[test]
    fn mistakes_are_named() {
        let wrong = |options: Options| cases(&options).unwrap_err().to_string();
        let name = wrong(Options {
            cases: vec!["kv8k".into()],
            ..Options::default()
        });
        assert!(name.contains("kv8k") && name.contains("kv16k"), "{name}");
        assert!(
            wrong(Options {
                iterations: Some(0),
                ..Options::default()
            })
            .contains("iterations")
        );
        assert!(
            wrong(Options {
                sizes: vec![0],
                ..Options::default()
            })
            .contains("0 bytes")
        );
    }
}
