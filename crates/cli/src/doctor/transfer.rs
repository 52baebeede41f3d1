//! The proof: two sessions in this process, 16 MiB written over loopback, every byte compared.

use std::time::{Duration, Instant};

use tcpx::{Buffer, Config, Op, Segment, Session};
use tcpx_bench::units::{bytes, gigabytes_per_second};
use tcpx_bench::workload::Pattern;
use tcpx_net::interfaces::{self, Interface};

use super::Finding;
use crate::error::chain;

/// Enough to use every lane, little enough to be done in a moment.
const BYTES: usize = 16 << 20;
/// A machine that needs longer has a problem.
const PATIENCE: Duration = Duration::from_secs(20);

/// Moves memory through the engine as an application would.
pub(super) fn loopback(config: &Config) -> Finding {
    const ID: &str = "transfer.loopback";
    let outcome = loopback_only(config.clone())
        .map_err(tcpx::Error::from)
        .and_then(|config| write_and_compare(&config));
    match outcome {
        Ok(Outcome::Verified(elapsed)) => Finding::ok(
            ID,
            format!(
                "wrote {} to another session and verified every byte ({:.1} GB/s)",
                bytes(BYTES as u64),
                gigabytes_per_second(BYTES as u64, elapsed)
            ),
        ),
        Ok(Outcome::Corrupt(offset)) => Finding::fail(
            ID,
            format!(
                "wrote {}, but byte {offset} arrived changed",
                bytes(BYTES as u64)
            ),
            "this must not happen: please report it with the output of `tcpx doctor --json`",
        ),
        Err(error) => Finding::fail(
            ID,
            chain(&error),
            "allow TCP connections over loopback; `tcpx doctor --log debug` shows each step",
        ),
    }
}

enum Outcome {
    Verified(Duration),
    Corrupt(usize),
}

/// The same settings, but nothing leaves this machine.
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
    // Two sessions cannot share one port.
    config.set("listen_port", "0")?;
    config.set("transport", "tcp")?;
    Ok(config)
}

fn exactly(interface: &Interface) -> String {
    format!("={}", interface.name)
}

fn write_and_compare(config: &Config) -> Result<Outcome, tcpx::Error> {
    let source = Session::new(config.clone().with_name("doctor-source")?)?;
    let target = Session::new(config.clone().with_name("doctor-target")?)?;
    let (from, to) = (Buffer::new(BYTES), Buffer::new(BYTES));
    let pattern = Pattern::new(0x0064_6f63_746f_7221);
    let mut expected = vec![0; BYTES];
    pattern.fill(0, &mut expected);
    from.write(0, &expected);

    let from = source.register(&from)?;
    let remote = target.register(&to)?;
    let descriptor = remote.descriptor();
    let peer = source.add_peer(&target.connection_info())?;
    peer.connect(PATIENCE)?;
    let segment = Segment {
        local: from.at(0),
        remote: descriptor.at(0),
        len: BYTES,
    };
    let transfer = source.prepare(Op::Write, &peer, [segment])?;
    let started = Instant::now();
    transfer.post()?;
    transfer.wait(PATIENCE)?;
    let elapsed = started.elapsed();
    Ok(match pattern.first_difference(0, &to.to_vec()) {
        None => Outcome::Verified(elapsed),
        Some(offset) => Outcome::Corrupt(offset),
    })
}
