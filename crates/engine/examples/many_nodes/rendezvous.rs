//! Lets the processes of one run find each other and exchange a few bytes, as the Python module
//! `tcpx.rendezvous` does: in a shared directory, or through a store that rank 0 serves. Both
//! languages use the same files and the same protocol, so a run may mix processes of both.

mod file;
mod tcp;

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use self::file::FileStore;
use self::tcp::TcpStore;

/// An error that ends the program with its text.
pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Values by rank.
pub(crate) type Ranked = BTreeMap<usize, Vec<u8>>;

/// Values of all ranks; or the values so far, the failed ranks with their reasons, and all members.
#[derive(Default)]
pub(crate) struct Gathered {
    pub(crate) values: Ranked,
    pub(crate) failed: Ranked,
    pub(crate) members: Ranked,
}

/// Stores the values of one run. A process claims its rank, gathers any number of times, and
/// leaves.
trait Store {
    /// Adds a member; returns false if the rank is taken.
    fn claim(&mut self, rank: usize, value: &[u8]) -> Result<bool, Failure>;

    /// Stores a value and waits until all ranks have stored theirs, a member fails, or time is up.
    fn gather(
        &mut self,
        folder: &str,
        rank: usize,
        value: &[u8],
        size: usize,
        deadline: Instant,
    ) -> Result<Gathered, Failure>;

    /// Records that a member has left, or why it has failed.
    fn leave(&mut self, rank: usize, size: usize, failure: &str);
}

/// A process of a run. Every process makes the same calls in the same order.
pub(crate) struct Rendezvous {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    timeout: Duration,
    store: Box<dyn Store>,
    counts: HashMap<String, usize>,
}

impl Rendezvous {
    /// Joins the processes that a launcher has started with this one.
    pub(crate) fn from_env(timeout: Duration) -> Result<Self, Failure> {
        let (rank, size) = identity()?;
        if rank >= size {
            return Err(format!("rank {rank} is not from 0 to {}", size - 1).into());
        }
        let deadline = Instant::now() + timeout;
        let mut store = open(rank, deadline)?;
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let nonce = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos();
        let member = format!("{size} {} {nonce} {}", std::process::id(), host.trim());
        if !store.claim(rank, member.as_bytes())? {
            return Err(format!("rank {rank} is taken: give this run another name").into());
        }
        Ok(Self {
            rank,
            size,
            timeout,
            store,
            counts: HashMap::new(),
        })
    }

    /// Shares a value with every process; returns the values of all processes, by rank.
    pub(crate) fn exchange(&mut self, value: &[u8], name: &str) -> Result<Vec<Vec<u8>>, Failure> {
        let count = self.counts.entry(name.to_owned()).or_default();
        *count += 1;
        let folder = format!("{name}-{count}");
        let deadline = Instant::now() + self.timeout;
        let gathered = self
            .store
            .gather(&folder, self.rank, value, self.size, deadline)?;
        if gathered.values.len() == self.size {
            return Ok(gathered.values.into_values().collect());
        }
        if let Some((rank, why)) = gathered.failed.first_key_value() {
            return Err(format!("rank {rank} failed: {}", String::from_utf8_lossy(why)).into());
        }
        let missing: Vec<String> = (0..self.size)
            .filter(|rank| !gathered.values.contains_key(rank))
            .map(|rank| match gathered.members.contains_key(&rank) {
                true => format!("rank {rank} came and did not reach it"),
                false => format!("rank {rank} never came"),
            })
            .collect();
        Err(format!(
            "{name}: {} of {} processes are here after {:?}; {}",
            gathered.values.len(),
            self.size,
            self.timeout,
            missing.join("; ")
        )
        .into())
    }

    /// Waits until every process has reached this barrier.
    pub(crate) fn barrier(&mut self, name: &str) -> Result<(), Failure> {
        self.exchange(b"", name).map(drop)
    }

    /// Leaves the run; reports an error to the others.
    pub(crate) fn leave(mut self, result: &Result<(), Failure>) {
        let failure = result.as_ref().err().map(ToString::to_string);
        self.store
            .leave(self.rank, self.size, &failure.unwrap_or_default());
    }
}

/// Returns rank and size from the variables of torchrun, Kubernetes' indexed jobs or Slurm.
fn identity() -> Result<(usize, usize), Failure> {
    for (rank, size) in [
        ("RANK", "WORLD_SIZE"),
        ("JOB_COMPLETION_INDEX", "WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
    ] {
        if let Some(text) = variable(rank) {
            let total = variable(size).ok_or_else(|| format!("{rank} is set and {size} is not"))?;
            return Ok((number(rank, &text)?, number(size, &total)?));
        }
    }
    Err("cannot tell which process of how many this is: set RANK and WORLD_SIZE for each".into())
}

/// Opens the store that TCPX_RENDEZVOUS names, or MASTER_ADDR and MASTER_PORT.
fn open(rank: usize, deadline: Instant) -> Result<Box<dyn Store>, Failure> {
    let run = variable("TCPX_RENDEZVOUS_RUN").unwrap_or_default();
    let url = match (variable("TCPX_RENDEZVOUS"), variable("MASTER_ADDR")) {
        (Some(url), _) => url,
        (None, Some(host)) => {
            let port = variable("MASTER_PORT").unwrap_or_else(|| "29500".into());
            format!("tcp://{host}:{port}")
        }
        (None, None) => {
            return Err(
                "cannot tell where the processes meet: set MASTER_ADDR and MASTER_PORT, or \
                TCPX_RENDEZVOUS to file:///SHARED/DIRECTORY or tcp://HOST:PORT"
                    .into(),
            );
        }
    };
    if let Some(directory) = url.strip_prefix("file://") {
        return Ok(Box::new(FileStore::open(directory, &run)?));
    }
    match url.strip_prefix("tcp://") {
        Some(address) => Ok(Box::new(TcpStore::open(address, &run, rank, deadline)?)),
        None => Err(format!("{url} is neither file:///DIRECTORY nor tcp://HOST:PORT").into()),
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn number(name: &str, text: &str) -> Result<usize, Failure> {
    text.parse()
        .map_err(|_| format!("{name} is {text:?}: a whole number is needed").into())
}
