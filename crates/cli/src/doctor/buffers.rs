//! Compares socket buffers with the bytes that a lane keeps in flight: bandwidth × round trip.

use std::time::Duration;

use tcpx::Config;
use tcpx_bench::units::bytes;
use tcpx_net::interfaces::Interface;

use super::Finding;
use super::machine::Machine;
use crate::units::{count, megabits_per_second};

/// A round trip that no data-centre network exceeds under load.
const ROUND_TRIP: Duration = Duration::from_millis(1);
/// The speed assumed for an interface that does not report it, as in virtual machines.
const ASSUMED_MBPS: u64 = 25_000;

/// Runs all checks of buffers; none of them matters on loopback.
pub(super) fn findings(machine: &Machine, chosen: &[Interface], config: &Config) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some(path) = Path::over(chosen, config.lanes()) {
        for buffer in [RECEIVE, SEND] {
            findings.extend(
                machine
                    .sysctl_most(buffer.sysctl)
                    .map(|most| buffer.judge(most, path)),
            );
        }
    }
    let fixed = config.socket_buffer_bytes() as u64;
    for (id, name) in [
        ("buffers.core_receive", "net.core.rmem_max"),
        ("buffers.core_send", "net.core.wmem_max"),
    ] {
        let most = machine.sysctl_number(&name.replace('.', "/"));
        findings.extend(most.map(|most| core(id, name, most, fixed)));
    }
    findings
}

/// The total load of all lanes to one peer.
#[derive(Debug, Clone, Copy)]
struct Path {
    mbps: u64,
    assumed: bool,
    lanes: usize,
}

impl Path {
    /// Returns the sum of the interfaces that leave this machine, if any does.
    fn over(chosen: &[Interface], lanes: usize) -> Option<Self> {
        let real: Vec<&Interface> = chosen.iter().filter(|i| !i.is_loopback()).collect();
        let speed = |interface: &&Interface| interface.speed_mbps.map_or(ASSUMED_MBPS, u64::from);
        (!real.is_empty()).then(|| Path {
            mbps: real.iter().map(speed).sum(),
            assumed: real.iter().any(|interface| interface.speed_mbps.is_none()),
            lanes: lanes.max(1),
        })
    }

    /// Returns the bytes in flight on one lane when all of them are busy.
    fn in_flight(self) -> u64 {
        let per_second = u128::from(self.mbps) * 1_000_000 / 8;
        let in_flight = per_second * ROUND_TRIP.as_micros() / 1_000_000 / self.lanes as u128;
        u64::try_from(in_flight).unwrap_or(u64::MAX)
    }

    /// Returns the buffer needed: the kernel counts its own overhead, about as much again.
    fn needed(self) -> u64 {
        self.in_flight().saturating_mul(2)
    }

    /// Returns the arithmetic, for the report.
    fn shown(self) -> String {
        format!(
            "{}{} × {} ms ÷ {} = {} in flight on each, twice that in buffer",
            megabits_per_second(self.mbps),
            if self.assumed { " (assumed)" } else { "" },
            ROUND_TRIP.as_millis(),
            count(self.lanes, "lane"),
            bytes(self.in_flight())
        )
    }
}

/// A buffer the kernel sizes itself, up to a limit.
struct Autotuned {
    id: &'static str,
    sysctl: &'static str,
    /// The first two numbers of the sysctl, which the advice repeats.
    usual: &'static str,
}

const RECEIVE: Autotuned = Autotuned {
    id: "buffers.receive",
    sysctl: "net/ipv4/tcp_rmem",
    usual: "4096 131072",
};
const SEND: Autotuned = Autotuned {
    id: "buffers.send",
    sysctl: "net/ipv4/tcp_wmem",
    usual: "4096 16384",
};

impl Autotuned {
    fn judge(&self, most: u64, path: Path) -> Finding {
        let name = self.sysctl.replace('/', ".");
        let short_name = self.sysctl.rsplit('/').next().unwrap_or(self.sysctl);
        let found = format!("{short_name} grows to {}; {}", bytes(most), path.shown());
        if most >= path.needed() {
            return Finding::ok(self.id, found);
        }
        let wanted = path.needed().next_power_of_two();
        let advice = format!(
            "`sysctl -w {name}=\"{} {wanted}\"`, or more lanes",
            self.usual
        );
        Finding::warn(self.id, found, advice)
    }
}

/// Checks the cap on buffers of fixed size; autotuned ones ignore it.
fn core(id: &'static str, name: &str, most: u64, fixed: u64) -> Finding {
    let found = format!("{name} is {}", bytes(most));
    if fixed == 0 {
        return Finding::ok(
            id,
            format!("{found}; not used, the kernel sizes the buffers"),
        );
    }
    if most >= fixed {
        return Finding::ok(
            id,
            format!("{found}, enough for the {} asked for", bytes(fixed)),
        );
    }
    Finding::warn(
        id,
        format!("{found}: the {} asked for are cut to that", bytes(fixed)),
        format!("`sysctl -w {name}={fixed}`, or unset TCPX_SOCKET_BUFFER_BYTES"),
    )
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    #[test]
    fn the_arithmetic_is_bandwidth_times_round_trip() {
        let path = Path {
            mbps: 200_000,
            assumed: false,
            lanes: 8,
        };
        // 25 GB/s × 1 ms ÷ 8
        assert_eq!(path.in_flight(), 3_125_000);
        assert_eq!(
            path.shown(),
            "200 Gbit/s × 1 ms ÷ 8 lanes = 3.0 MiB in flight on each, twice that in buffer"
        );
    }

    #[test]
    fn a_limit_below_it_is_a_warning_with_the_command_to_run() {
        let path = Path {
            mbps: 200_000,
            assumed: false,
            lanes: 8,
        };
        assert_eq!(RECEIVE.judge(6_291_456, path).level, Level::Ok);
        let short = RECEIVE.judge(212_992, path);
        assert_eq!(short.level, Level::Warn);
        assert_eq!(
            short.advice.unwrap(),
            "`sysctl -w net.ipv4.tcp_rmem=\"4096 131072 8388608\"`, or more lanes"
        );
    }

    #[test]
    fn fixed_buffers_are_held_against_the_core_limits() {
        assert_eq!(core("b", "net.core.rmem_max", 212_992, 0).level, Level::Ok);
        assert_eq!(
            core("b", "net.core.rmem_max", 1 << 20, 1 << 20).level,
            Level::Ok
        );
        let cut = core("b", "net.core.rmem_max", 212_992, 1 << 20);
        assert_eq!(cut.level, Level::Warn);
        assert_eq!(
            cut.found,
            "net.core.rmem_max is 208 KiB: the 1 MiB asked for are cut to that"
        );
    }

    #[test]
    fn loopback_needs_no_arithmetic() {
        assert!(Path::over(&[], 4).is_none());
    }
}
