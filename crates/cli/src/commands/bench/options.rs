//! The options of a measurement, and their translation for the measuring library.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use tcpx_bench::floor::Waiting;
use tcpx_bench::measure::Extras;
use tcpx_bench::measure::beside::BesideOptions;
use tcpx_bench::path::Path;
use tcpx_bench::place::{Place, Places};
use tcpx_bench::suite::{self, Case};
use tcpx_bench::workload::{self, Layout};

use super::timeline::Timeline;
use crate::error::Failure;
use crate::units;

/// How long an idle session is observed.
pub(super) const IDLE: Duration = Duration::from_secs(5);
/// The number of idle peers that are connected to measure the cost of one.
pub(super) const IDLE_PEERS: usize = 32;
/// How often a soak samples both processes, unless it is short.
pub(super) const SOAK_SAMPLE: Duration = Duration::from_secs(5);

/// The cases of `--quick`: all but the largest, for a second each.
const QUICK_CASES: [&str; 4] = ["lat4k", "one64m", "kv16k", "kv4k"];
const QUICK_TIME: Duration = Duration::from_secs(1);

/// The sizes of `--beside-compute`: bytes of a transfer, its blocks, and the time for each load
/// with each of them.
const BESIDE_BYTES: u64 = 256 << 20;
const BESIDE_BLOCKS: [u64; 3] = [0, 16 << 10, 4 << 10];
const BESIDE_TIME: Duration = Duration::from_secs(2);
const QUICK_BESIDE_TIME: Duration = Duration::from_millis(500);

/// The options that choose what to measure.
#[derive(Debug, Args)]
#[command(next_help_heading = "Measurement")]
pub(super) struct Measurement {
    /// Where the memory lies: host, or vram:N for GPU N; two, with a comma, for this side and the
    /// other [default: host; with --beside-compute vram:0,host]
    #[arg(long = "mem", value_name = "PLACE[,PLACE]")]
    memory: Option<Places>,

    /// What carries the bytes [default: lanes on one machine; with `client`, what connecting decides]
    ///
    /// Sets TCPX_SAME_HOST in both processes; without this option, that variable decides where it
    /// is set. Direct copies have no floor, which is about sockets.
    #[arg(long, value_name = "PATH")]
    path: Option<Way>,

    /// Named cases to measure [default: all of them]
    #[arg(long = "case", value_name = "NAME,…", value_delimiter = ',')]
    cases: Vec<String>,

    /// Sizes of one transfer, such as 4K, 64M or 1G
    #[arg(long = "size", value_name = "BYTES,…", value_delimiter = ',', value_parser = units::parse_bytes)]
    sizes: Vec<u64>,

    /// Block sizes to cut the sizes into; 0 is one block [default: 0]
    #[arg(long = "block", value_name = "BYTES,…", value_delimiter = ',', value_parser = units::parse_bytes)]
    blocks: Vec<u64>,

    /// Keep blocks in order instead of scattering them
    #[arg(long)]
    ordered: bool,

    /// Leave a gap as long as a block between scattered blocks
    #[arg(long, conflicts_with = "ordered")]
    strided: bool,

    /// Leave gaps of several lengths between scattered blocks, so that nothing can join them
    #[arg(long, conflicts_with_all = ["ordered", "strided"])]
    apart: bool,

    /// What to do
    #[arg(long, value_name = "OP", default_value = "both")]
    op: Op,

    /// Also sweep over sizes from 4 KiB to 512 MiB
    #[arg(long)]
    sweep: bool,

    /// Transfers to measure in each case [default: depends on its size]
    #[arg(long, value_name = "N")]
    iterations: Option<u32>,

    /// Time to measure each case for, such as 5s, instead of a number of transfers
    #[arg(long, value_name = "TIME", value_parser = units::parse_time, conflicts_with = "iterations")]
    duration: Option<Duration>,

    /// Transfers before measuring starts [default: depends on the size]
    #[arg(long, value_name = "N")]
    warmup: Option<u32>,

    /// How the caller waits [default: polls up to 64 KiB, sleeps above]
    #[arg(long, value_name = "HOW")]
    wait: Option<Wait>,

    /// Leave the floor out
    #[arg(long)]
    no_floor: bool,

    /// Do not compare the bytes
    #[arg(long)]
    no_verify: bool,

    /// A second for each named case but the largest
    #[arg(long, conflicts_with_all = ["cases", "iterations", "duration", "full"])]
    quick: bool,

    /// All named cases, the sweep, and what preparing, an idle session and idle peers cost
    #[arg(long)]
    full: bool,

    /// Then move mixed transfers for this long, such as 10m, watching memory and descriptors
    ///
    /// Alone, without cases or sizes, nothing else is measured.
    #[arg(long, value_name = "TIME", value_parser = units::parse_time)]
    soak: Option<Duration>,

    /// Make faults beside the soak: kill, stop, flood, cut and fork at random
    ///
    /// Every byte is compared. Processes are killed and restarted, stopped and continued, flooded
    /// with connections of strangers, forked, and cut off from each other (`ss -K`, with root).
    /// Fails when a byte is wrong, when a transfer fails that no fault has touched, or when memory,
    /// descriptors or threads grow. On this machine only. Ctrl-C ends it early with its result.
    #[arg(long, requires = "soak")]
    pub(super) faults: bool,

    /// Measure what a model that computes on the GPU meanwhile keeps of its speed
    ///
    /// Built-in loads take the model's place: a large matmul (as prefill), a copy of 1 GiB within
    /// the GPU, and a CUDA graph of 64 short kernels (as decoding). Each runs alone and beside the
    /// transfer, in turns. Unless sizes or cases are chosen, the transfers are 256 MiB in one
    /// block, in 16 KiB blocks and in 4 KiB blocks, and in the same blocks with gaps between them
    /// (--apart), from or to host memory of the other side. Needs an NVIDIA GPU with 3 GiB of free
    /// memory. --duration is the time for each load with each transfer, --quick makes it half a
    /// second.
    #[arg(long, conflicts_with_all = ["sweep", "iterations", "warmup", "full", "soak"])]
    beside_compute: bool,

    /// Divide the size of the loads of --beside-compute, for machines without a GPU
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        hide = true,
        requires = "beside_compute"
    )]
    load_divisor: usize,

    /// Record what both processes do, for ui.perfetto.dev
    ///
    /// Recording costs time, so measure without. Choose few transfers: events beyond
    /// TCPX_TRACE_BYTES are not recorded. With `client`, this side is recorded; the server has its
    /// own TCPX_TRACE.
    #[arg(long, value_name = "FILE")]
    pub(super) trace: Option<PathBuf>,

    /// Write one self-contained page with plots
    ///
    /// Where no cases are chosen, everything is measured, as with --full.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Op {
    /// The other side's memory is read
    Read,
    /// The other side's memory is written
    Write,
    /// One after the other
    Both,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Way {
    /// Sockets, as between machines
    Lanes,
    /// Direct copies between two processes on one host; fails where they are impossible
    SameHost,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Wait {
    /// Awake: lowest latency
    Poll,
    /// Asleep in the kernel: lowest CPU time
    Block,
}

/// The measurements to make.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) cases: Vec<Case>,
    pub(super) extras: Extras,
    pub(super) full: bool,
    /// Measure the cases beside loads, and nothing else.
    pub(super) beside: Option<BesideOptions>,
    pub(super) soak: Option<Duration>,
    pub(super) page: Option<PathBuf>,
}

impl Measurement {
    /// Turns the options into a plan, and reports mistakes before anything is started.
    pub(super) fn plan(&self) -> Result<Plan, Failure> {
        let chosen = !(self.cases.is_empty() && self.sizes.is_empty() && self.blocks.is_empty());
        let open = !chosen && !self.quick && !self.sweep;
        let full = self.full
            || (self.report.is_some() && open && self.soak.is_none() && !self.beside_compute);
        let only_soak = self.soak.is_some() && open && !self.full;
        let cases = if only_soak {
            Vec::new()
        } else {
            self.select(full)?
        };
        for (option, file) in [("--report", &self.report), ("--trace", &self.trace)] {
            if let Some(folder) = file.as_deref().and_then(|path| path.parent())
                && !folder.as_os_str().is_empty()
                && !folder.is_dir()
            {
                let folder = folder.display();
                return Err(Failure::Usage(format!(
                    "{option}: there is no folder {folder}"
                )));
            }
        }
        Ok(Plan {
            cases,
            beside: self.beside_compute.then(|| BesideOptions {
                time: self.duration.unwrap_or(if self.quick {
                    QUICK_BESIDE_TIME
                } else {
                    BESIDE_TIME
                }),
                divisor: self.load_divisor,
                verify: !self.no_verify,
            }),
            extras: Extras {
                floor: !self.no_floor,
                verify: !self.no_verify,
            },
            full,
            soak: self.soak,
            page: self.report.clone(),
        })
    }

    /// Returns where the memory lies, as typed or as the measurement needs it.
    pub(super) fn places(&self) -> Places {
        let beside = Places {
            initiator: Place::Vram(0),
            target: Place::Host,
        };
        let default = if self.beside_compute {
            beside
        } else {
            Places::default()
        };
        self.memory.unwrap_or(default)
    }

    /// Returns the trace, if one was requested.
    pub(super) fn timeline(&self) -> Option<Timeline> {
        self.trace.as_deref().map(Timeline::new)
    }

    /// Returns the path, if one was requested.
    pub(super) fn path(&self) -> Option<Path> {
        self.path.map(|way| match way {
            Way::Lanes => Path::Lanes,
            Way::SameHost => Path::SameHost,
        })
    }

    /// Returns the cases to measure.
    fn select(&self, full: bool) -> Result<Vec<Case>, Failure> {
        if !self.beside_compute {
            return Ok(suite::cases(&self.options(full))?);
        }
        let mut cases = suite::cases(&self.beside_options(self.layout(), &BESIDE_BLOCKS))?;
        let is_open = self.cases.is_empty() && self.sizes.is_empty() && self.blocks.is_empty();
        if is_open && self.layout() == Layout::Scattered {
            let blocks = BESIDE_BLOCKS.iter().filter(|&&block| block > 0).copied();
            let apart = self.beside_options(Layout::Apart, &blocks.collect::<Vec<_>>());
            cases.extend(suite::cases(&apart)?);
        }
        Ok(cases)
    }

    fn options(&self, full: bool) -> suite::Options {
        let quick = |cases: &[&str]| cases.iter().map(|&name| name.to_owned()).collect();
        suite::Options {
            cases: if self.quick && self.sizes.is_empty() {
                quick(&QUICK_CASES)
            } else {
                self.cases.clone()
            },
            sizes: self.sizes.clone(),
            block_sizes: self.blocks.clone(),
            layout: self.layout(),
            ops: self.ops(),
            sweep: self.sweep || full,
            iterations: self.iterations,
            duration: self.duration.or(self.quick.then_some(QUICK_TIME)),
            warmup: self.warmup,
            waiting: self.waiting(),
        }
    }

    /// Returns the transfers beside loads: the chosen ones, or 256 MiB in blocks of several sizes.
    fn beside_options(&self, layout: Layout, blocks: &[u64]) -> suite::Options {
        let or = |typed: &[u64], default: &[u64]| match typed.is_empty() && self.cases.is_empty() {
            true => default.to_vec(),
            false => typed.to_vec(),
        };
        suite::Options {
            cases: self.cases.clone(),
            sizes: or(&self.sizes, &[BESIDE_BYTES]),
            block_sizes: or(&self.blocks, blocks),
            layout,
            ops: self.ops(),
            waiting: self.waiting(),
            ..suite::Options::default()
        }
    }

    fn layout(&self) -> Layout {
        match (self.ordered, self.strided, self.apart) {
            (true, ..) => Layout::Ordered,
            (_, true, _) => Layout::Strided,
            (.., true) => Layout::Apart,
            _ => Layout::Scattered,
        }
    }

    fn ops(&self) -> Vec<workload::Op> {
        match self.op {
            Op::Read => vec![workload::Op::Read],
            Op::Write => vec![workload::Op::Write],
            Op::Both => Vec::new(),
        }
    }

    fn waiting(&self) -> Option<Waiting> {
        self.wait.map(|wait| match wait {
            Wait::Poll => Waiting::Poll,
            Wait::Block => Waiting::Block,
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        measurement: Measurement,
    }

    fn plan(line: &str) -> Plan {
        let words = std::iter::once("bench").chain(line.split_whitespace());
        Line::parse_from(words).measurement.plan().unwrap()
    }

    #[test]
    fn alone_it_measures_the_named_cases() {
        let plan = plan("");
        assert_eq!(plan.cases.len(), 10);
        assert!(!plan.full && plan.soak.is_none());
        assert_eq!(plan.extras, Extras::default());
    }

    #[test]
    fn memory_is_of_the_host_unless_a_gpu_is_named() {
        let memory = |line: &str| {
            let words = std::iter::once("bench").chain(line.split_whitespace());
            Line::try_parse_from(words).map(|line| line.measurement.places())
        };
        assert_eq!(memory("").unwrap(), Places::default());
        assert_eq!(memory("--mem vram:1").unwrap().to_string(), "vram:1");
        assert_eq!(
            memory("--mem host,vram:0").unwrap().to_string(),
            "host,vram:0"
        );
        let error = memory("--mem gpu").unwrap_err().to_string();
        assert!(error.contains("vram:N"), "{error}");
    }

    #[test]
    fn beside_a_load_blocks_move_between_a_gpu_and_the_host() {
        let names = |line: &str| -> Vec<String> {
            let name = |case: Case| format!("{} {}", case.name, case.workload.shape.op());
            plan(line).cases.into_iter().map(name).collect()
        };
        let all = names("--beside-compute");
        assert_eq!(all.len(), 10);
        for name in [
            "256M",
            "256M/16K",
            "256M/4K",
            "256M/16K apart",
            "256M/4K apart",
        ] {
            for op in ["READ", "WRITE"] {
                assert!(all.contains(&format!("{name} {op}")), "{all:?}");
            }
        }
        assert_eq!(
            names("--beside-compute --op read --size 1M --block 4K"),
            ["1M/4K READ"]
        );
        assert_eq!(
            names("--beside-compute --op write --case kv4k"),
            ["kv4k WRITE"]
        );
        assert_eq!(
            names("--beside-compute --op write --size 1M --apart"),
            ["1M WRITE", "1M/16K apart WRITE", "1M/4K apart WRITE"]
        );
        assert_eq!(
            names("--op read --size 1M --block 4K --strided"),
            ["1M/4K strided READ"]
        );

        let beside = |line: &str| plan(line).beside.map(|options| options.time);
        assert_eq!(beside("--size 1M"), None);
        assert_eq!(beside("--beside-compute"), Some(BESIDE_TIME));
        assert_eq!(beside("--beside-compute --quick"), Some(QUICK_BESIDE_TIME));
        let second = Duration::from_secs(1);
        assert_eq!(beside("--beside-compute --duration 1s"), Some(second));
        assert!(!plan("--beside-compute --report out.html").full);

        let places = |line: &str| {
            let words = std::iter::once("bench").chain(line.split_whitespace());
            Line::parse_from(words).measurement.places().to_string()
        };
        assert_eq!(places("--beside-compute"), "vram:0,host");
        assert_eq!(places("--beside-compute --mem vram:1"), "vram:1");
    }

    #[test]
    fn quick_leaves_the_largest_out() {
        let plan = plan("--quick");
        assert_eq!(plan.cases.len(), 8);
        let limit = workload::Limit::Duration(QUICK_TIME);
        assert!(plan.cases.iter().all(|case| case.workload.limit == limit));
    }

    #[test]
    fn a_page_wants_everything_unless_cases_are_chosen() {
        assert!(plan("--report out.html").full);
        let chosen = plan("--report out.html --size 1M --op read");
        assert!(!chosen.full && chosen.cases.len() == 1);
        assert!(!plan("--report out.html --quick").full);
    }

    #[test]
    fn a_soak_comes_alone_unless_more_is_asked_for() {
        assert!(plan("--soak 10m").cases.is_empty());
        assert_eq!(plan("--soak 1s --case kv4k").cases.len(), 2);
    }

    #[test]
    fn mistakes_are_found_before_anything_is_started() {
        let wrong = |line: &str| {
            let words = std::iter::once("bench").chain(line.split_whitespace());
            Line::parse_from(words).measurement.plan().unwrap_err()
        };
        assert_eq!(wrong("--case kv8k").exit_code(), 2);
        assert_eq!(wrong("--size 0").exit_code(), 2);
        assert_eq!(wrong("--quick --report /nonexistent/x.html").exit_code(), 2);
    }
}
