//! Transfers 16 MiB over loopback between two sessions in this process and compares every byte;
//! from host memory to host memory, and from each GPU to itself.

use std::time::{Duration, Instant};

use tcpx::{Config, Op, Segment, Session};
use tcpx_bench::memory::Placed;
use tcpx_bench::place::Place;
use tcpx_bench::units::{bytes, gigabytes_per_second};
use tcpx_bench::workload::Pattern;
use tcpx_net::interfaces::{self, Interface};

use super::Finding;
use crate::error::chain;

/// Enough to use every lane, little enough to be done in a moment.
const BYTES: usize = 16 << 20;
/// Time limit: a machine that needs longer has a problem.
const PATIENCE: Duration = Duration::from_secs(35);

/// Moves memory through the engine as an application would, between two parts of the same place.
pub(super) fn loopback(config: &Config, place: Place) -> Finding {
    let (id, where_from) = match place {
        Place::Host => ("transfer.loopback", String::new()),
        Place::Vram(ordinal) => ("gpu.transfer", format!(" of GPU memory (vram:{ordinal})")),
    };
    let outcome = loopback_only(config.clone())
        .map_err(tcpx::Error::from)
        .and_then(|config| write_and_compare(&config, place));
    let advice = "allow TCP connections over loopback; `tcpx doctor --log debug` shows each step";
    match outcome {
        Ok(Outcome::Verified(elapsed)) => Finding::ok(
            id,
            format!(
                "wrote {}{where_from} to another session and verified every byte ({:.1} GB/s)",
                bytes(BYTES as u64),
                gigabytes_per_second(BYTES as u64, elapsed)
            ),
        ),
        Ok(Outcome::Corrupt(offset)) => Finding::fail(
            id,
            format!(
                "wrote {}{where_from}, but byte {offset} arrived changed",
                bytes(BYTES as u64)
            ),
            "this must not happen: please report it with the output of `tcpx doctor --json`",
        ),
        Err(error) if place.is_host() => Finding::fail(id, chain(&error), advice),
        // Transfers of host memory work without a GPU.
        Err(error) => Finding::warn(
            id,
            format!("memory of {place} does not move: {}", chain(&error)),
            advice,
        ),
    }
}

enum Outcome {
    Verified(Duration),
    Corrupt(usize),
}

/// Returns the same settings, restricted to this machine.
fn loopback_only(mut config: Config) -> Result<Config, tcpx::ConfigError> {
    let found = interfaces::discover().unwrap_or_default();
    if let Some(lo) = found
        .iter()
        .find(|i| i.is_loopback() && i.up && !i.addresses.is_empty())
    {
        for key in ["interfaces", "control_interface"] {
            config.set(key, &exactly(lo))?;
        }
    }
    // Two sessions cannot share one port, or the address that is mapped to it.
    config.set("listen_port", "0")?;
    config.set("advertise", "")?;
    config.set("transport", "tcp")?;
    Ok(config)
}

fn exactly(interface: &Interface) -> String {
    format!("={}", interface.name)
}

fn write_and_compare(config: &Config, place: Place) -> Result<Outcome, tcpx::Error> {
    let source = Session::new(config.clone().with_name("doctor-source")?)?;
    let target = Session::new(config.clone().with_name("doctor-target")?)?;
    let from = Placed::new(&source, place, BYTES)?;
    let to = Placed::new(&target, place, BYTES)?;
    let pattern = Pattern::new(0x0064_6f63_746f_7221);
    let mut content = vec![0; BYTES];
    pattern.fill(0, &mut content);
    from.write(&content)?;

    let descriptor = to.region().descriptor();
    let peer = source.add_peer(&target.connection_info())?;
    peer.connect(PATIENCE)?;
    let segment = Segment {
        local: from.region().at(0),
        remote: descriptor.at(0),
        len: BYTES,
    };
    let transfer = source.prepare(Op::Write, &peer, [segment])?;
    let mut elapsed = Duration::ZERO;
    // The second round counts: by then pages are mapped and memory is pinned.
    for poison in [1, 2] {
        Pattern::new(poison).fill(0, &mut content);
        to.write(&content)?;
        let started = Instant::now();
        transfer.post()?;
        transfer.wait(PATIENCE)?;
        elapsed = started.elapsed();
        to.read(&mut content)?;
        if let Some(offset) = pattern.first_difference(0, &content) {
            return Ok(Outcome::Corrupt(offset));
        }
    }
    Ok(Outcome::Verified(elapsed))
}
