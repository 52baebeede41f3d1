//! Many nodes: P prefill and D decode processes; every decode process reads KV blocks from every
//! prefill process, verifies each byte, and rank 0 prints a matrix of GB/s.
//!
//! ```sh
//! cargo run --release --example many_nodes -- --local # all processes on this machine
//! srun -n 4 many_nodes                                # with MASTER_ADDR set to the first node
//! ```
//!
//! The first P ranks are the prefill processes. Processes of the Python example
//! (`examples/python/many_nodes.py`) can take part, since both programs are equivalent.

mod rendezvous;

use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use rendezvous::{Failure, Rendezvous};
use tcpx::{Buffer, Config, Op, RemoteRegion, Segment, Session, Transfer};

const USAGE: &str = "usage: many_nodes [--prefill P] [--decode D] [--blocks N] [--block-size S] \
[--rounds R] [--timeout SECONDS] [--local]

  --prefill P        prefill processes (default 2)
  --decode D         decode processes (default 2)
  --blocks N         blocks of each cache (default 1024)
  --block-size S     bytes of a block, a multiple of 8 (default 65536)
  --rounds R         measured rounds, after one that is not (default 3)
  --timeout SECONDS  how long processes wait for each other (default 300)
  --local            start all processes on this machine

RANK and WORLD_SIZE (or those of Slurm and Kubernetes) say which process this is; MASTER_ADDR and
MASTER_PORT, or TCPX_RENDEZVOUS=file:///DIRECTORY with TCPX_RENDEZVOUS_RUN, where they meet.";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments
        .iter()
        .any(|word| word == "--help" || word == "-h")
    {
        println!("{USAGE}");
        return ExitCode::SUCCESS;
    }
    let plan = match Plan::parse(&arguments) {
        Ok(plan) => plan,
        Err(error) => {
            eprintln!("many_nodes: error: {error}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let result = if plan.is_local {
        run_here(&plan, &arguments)
    } else {
        Rendezvous::from_env(plan.timeout).and_then(|mut meeting| {
            let result = run(&plan, &mut meeting)
                .map_err(|error| Failure::from(format!("rank {}: {error}", meeting.rank)));
            meeting.leave(&result);
            result
        })
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("many_nodes: error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The parsed arguments.
struct Plan {
    prefill: usize,
    decode: usize,
    blocks: usize,
    block_size: usize,
    rounds: usize,
    timeout: Duration,
    is_local: bool,
}

impl Plan {
    fn parse(arguments: &[String]) -> Result<Self, Failure> {
        let mut plan = Self {
            prefill: 2,
            decode: 2,
            blocks: 1024,
            block_size: 64 << 10,
            rounds: 3,
            timeout: Duration::from_secs(300),
            is_local: false,
        };
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            if word == "--local" {
                plan.is_local = true;
                continue;
            }
            let number = words.next().and_then(|text| text.parse().ok());
            let number = number.filter(|number| *number > 0);
            let value = || number.ok_or_else(|| format!("{word}: a whole number from 1 is needed"));
            match word.as_str() {
                "--prefill" => plan.prefill = value()?,
                "--decode" => plan.decode = value()?,
                "--blocks" => plan.blocks = value()?,
                "--block-size" => plan.block_size = value()?,
                "--rounds" => plan.rounds = value()?,
                "--timeout" => plan.timeout = Duration::from_secs(value()? as u64),
                _ => return Err(format!("{word}: there is no such option").into()),
            }
        }
        match plan.block_size % 8 {
            0 => Ok(plan),
            _ => Err("--block-size: must be a multiple of 8".into()),
        }
    }

    /// Returns the arguments that all processes must have in common.
    fn text(&self) -> String {
        format!(
            "--prefill {} --decode {} --blocks {} --block-size {} --rounds {}",
            self.prefill, self.decode, self.blocks, self.block_size, self.rounds
        )
    }

    fn processes(&self) -> usize {
        self.prefill + self.decode
    }

    fn cache_bytes(&self) -> usize {
        self.blocks * self.block_size
    }

    fn steps(&self) -> usize {
        self.prefill.max(self.decode)
    }
}

fn run(plan: &Plan, meeting: &mut Rendezvous) -> Result<(), Failure> {
    agree(plan, meeting)?;
    let is_prefill = meeting.rank < plan.prefill;
    let (name, caches) = match is_prefill {
        true => (format!("prefill-{}", meeting.rank), 1),
        false => (
            format!("decode-{}", meeting.rank - plan.prefill),
            plan.prefill,
        ),
    };
    let memory = Buffer::new(plan.cache_bytes() * caches);
    if is_prefill {
        for block in 0..plan.blocks {
            memory.write(block * plan.block_size, &pattern(meeting.rank, block, plan));
        }
    }
    let session = Session::new(Config::from_env()?.with_name(&name)?)?;
    let region = session.register(&memory)?;
    let infos = meeting.exchange(&session.connection_info(), "info")?;
    let regions = meeting.exchange(&region.descriptor().to_bytes(), "cache")?;
    let mut seconds = Vec::new();
    if is_prefill {
        // Its memory is read while the program waits.
        for _ in 0..(plan.rounds + 1) * (plan.steps() + 1) {
            meeting.barrier("step")?;
        }
    } else {
        let mut sources = Vec::new();
        for rank in 0..plan.prefill {
            let peer = session.add_peer(&infos[rank])?;
            let unreachable =
                |error| format!("cannot connect to prefill-{rank} (rank {rank}): {error}");
            peer.connect(plan.timeout).map_err(unreachable)?;
            let theirs = RemoteRegion::from_bytes(&regions[rank])?;
            let segments = (0..plan.blocks).map(|block| Segment {
                local: region.at(rank * plan.cache_bytes() + block * plan.block_size),
                remote: theirs.at(place(block, plan) * plan.block_size),
                len: plan.block_size,
            });
            sources.push(session.prepare(Op::Read, &peer, segments)?);
        }
        seconds = Decode {
            plan,
            memory,
            sources,
        }
        .measure(meeting)?;
    }
    let words: Vec<String> = seconds
        .iter()
        .map(|second| format!("{second:.9}"))
        .collect();
    let results = meeting.exchange(words.join(" ").as_bytes(), "result")?;
    if meeting.rank == 0 {
        report(plan, &results[plan.prefill..])?;
    }
    Ok(())
}

/// Checks that every process was started with the same arguments.
fn agree(plan: &Plan, meeting: &mut Rendezvous) -> Result<(), Failure> {
    let mine = plan.text();
    if meeting.size != plan.processes() {
        return Err(format!(
            "{} processes were started, and {mine} needs {}",
            meeting.size,
            plan.processes()
        )
        .into());
    }
    let plans = meeting.exchange(mine.as_bytes(), "plan")?;
    match plans.iter().position(|other| other != mine.as_bytes()) {
        None => Ok(()),
        Some(rank) => {
            let theirs = String::from_utf8_lossy(&plans[rank]);
            Err(format!(
                "rank {rank} was started with {theirs}, rank {} with {mine}",
                meeting.rank
            )
            .into())
        }
    }
}

/// Returns a block of a prefill process: every word differs from all others of any process.
fn pattern(rank: usize, block: usize, plan: &Plan) -> Vec<u8> {
    let words = plan.block_size / 8;
    let word = |index: usize| {
        let number = (block * words + index) as u64 | (rank as u64) << 40;
        number.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_ne_bytes()
    };
    (0..words).flat_map(word).collect()
}

/// Returns the source block for a destination block: the order is reversed.
fn place(block: usize, plan: &Plan) -> usize {
    plan.blocks - 1 - block
}

/// Reads the cache of each prefill process into a separate part of its memory.
struct Decode<'a> {
    plan: &'a Plan,
    memory: Buffer,
    sources: Vec<Transfer>,
}

impl Decode<'_> {
    /// Returns the mean seconds for each prefill process, and for all of them at once.
    fn measure(&self, meeting: &mut Rendezvous) -> Result<Vec<f64>, Failure> {
        let index = meeting.rank - self.plan.prefill;
        let everyone: Vec<usize> = (0..self.plan.prefill).collect();
        let mut sums = vec![0.0; self.plan.prefill + 1];
        for round in 0..=self.plan.rounds {
            // The first round is a warm-up, which makes the connections.
            let share = if round == 0 {
                0.0
            } else {
                1.0 / self.plan.rounds as f64
            };
            for step in 0..self.plan.steps() {
                // Each process is in one pair at a time, as far as their numbers allow.
                let rank = (index + step) % self.plan.steps();
                let ranks = if rank < self.plan.prefill {
                    &everyone[rank..=rank]
                } else {
                    &[]
                };
                let seconds = self.read(ranks, meeting)?;
                if let [rank] = ranks {
                    sums[*rank] += seconds * share;
                }
            }
            sums[self.plan.prefill] += self.read(&everyone, meeting)? * share;
        }
        Ok(sums)
    }

    /// Reads from these prefill processes at once; verifies the bytes.
    fn read(&self, ranks: &[usize], meeting: &mut Rendezvous) -> Result<f64, Failure> {
        let plan = self.plan;
        self.memory.write(0, &vec![0; self.memory.len()]);
        meeting.barrier("step")?;
        let start = Instant::now();
        for rank in ranks {
            self.sources[*rank].post()?;
        }
        for rank in ranks {
            let lost = |error| format!("cannot read from prefill-{rank} (rank {rank}): {error}");
            self.sources[*rank].wait(plan.timeout).map_err(lost)?;
        }
        let seconds = start.elapsed().as_secs_f64();
        let mut bytes = vec![0; plan.block_size];
        for rank in ranks {
            for block in 0..plan.blocks {
                self.memory.read(
                    rank * plan.cache_bytes() + block * plan.block_size,
                    &mut bytes,
                );
                if bytes != pattern(*rank, place(block, plan), plan) {
                    return Err(format!("bytes of prefill-{rank} (rank {rank}) are wrong").into());
                }
            }
        }
        Ok(seconds)
    }
}

fn report(plan: &Plan, results: &[Vec<u8>]) -> Result<(), Failure> {
    let mut seconds: Vec<Vec<f64>> = Vec::new();
    for result in results {
        let words = std::str::from_utf8(result)?.split_whitespace();
        seconds.push(words.map(str::parse).collect::<Result<_, _>>()?);
    }
    println!(
        "GB/s, each process in one pair at a time; caches of {} blocks of {} bytes",
        plan.blocks, plan.block_size
    );
    let heads: String = (0..plan.decode)
        .map(|decode| format!("{:>12}", format!("decode-{decode}")))
        .collect();
    println!("{:12}{heads}", "");
    let rate = |bytes: usize, seconds: f64| bytes as f64 / seconds / 1e9;
    for prefill in 0..plan.prefill {
        let rates: String = seconds
            .iter()
            .map(|one| format!("{:12.2}", rate(plan.cache_bytes(), one[prefill])))
            .collect();
        println!("{:<12}{rates}", format!("prefill-{prefill}"));
    }
    let slowest = seconds
        .iter()
        .map(|one| one[plan.prefill])
        .fold(0.0, f64::max);
    let pairs = plan.prefill * plan.decode;
    println!(
        "all pairs at once: {:.2} GB/s in sum",
        rate(plan.cache_bytes() * pairs, slowest)
    );
    println!("all bytes of {pairs} pairs are right");
    Ok(())
}

/// Starts every process on this machine, with the variables of torchrun.
fn run_here(plan: &Plan, arguments: &[String]) -> Result<(), Failure> {
    let port = std::net::TcpListener::bind("127.0.0.1:0")?
        .local_addr()?
        .port();
    let mut processes = Vec::new();
    for rank in 0..plan.processes() {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(arguments.iter().filter(|word| *word != "--local"))
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", plan.processes().to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env_remove("TCPX_RENDEZVOUS");
        processes.push(command.spawn()?);
    }
    let mut failed = 0;
    for mut process in processes {
        failed += usize::from(!process.wait()?.success());
    }
    match failed {
        0 => Ok(()),
        _ => Err(format!("{failed} processes have failed").into()),
    }
}
