//! Checks GPUs: their distance from the interfaces, the room to stage their memory, and a transfer
//! of it. Reports nothing without GPUs: `presence` has done so.

use tcpx::Config;
use tcpx::cuda::{self, DeviceInfo};
use tcpx_bench::place::Place;
use tcpx_bench::units::bytes;
use tcpx_net::interfaces::Interface;
use tcpx_net::topology::{Choice, Distance};

use super::machine::{Limit, Machine};
use super::{Finding, Level, presence, transfer};
use crate::gpus;
use crate::units::count;

/// Runs all checks of GPUs. `transfers` is false if the settings allow no session.
pub(super) fn findings(
    machine: &Machine,
    chosen: &[Interface],
    config: &Config,
    transfers: bool,
) -> Vec<Finding> {
    let presence = presence::gpus(machine);
    let devices = match cuda::devices() {
        Ok(devices) => devices,
        // `presence` says the same if there is no device file either.
        Err(_) if presence.level == Level::Info => return vec![presence],
        Err(error) => return vec![presence, unusable(&error)],
    };
    let mut findings = vec![presence];
    for device in &devices {
        findings.push(described(device));
        let choice = Choice::among(&gpus::location(device), chosen);
        let names = choice.chosen().map(|index| chosen[index].name.as_str());
        findings.push(distance(
            device.ordinal,
            choice.least(),
            &names.collect::<Vec<_>>(),
        ));
    }
    findings.push(staging(config));
    findings.push(pinned(
        config.staging_bytes() as u64,
        available_bytes(machine),
        machine.locked_memory(),
    ));
    if transfers {
        let places = devices.iter().map(|device| Place::Vram(device.ordinal));
        findings.extend(places.map(|place| transfer::loopback(config, place)));
    }
    findings
}

fn unusable(error: &cuda::Error) -> Finding {
    Finding::warn(
        "gpu.devices",
        error.to_string(),
        "GPU memory cannot be registered; host memory is not affected",
    )
}

fn described(device: &DeviceInfo) -> Finding {
    let node = device.numa_node.map(|node| format!(", NUMA node {node}"));
    let (major, minor) = device.compute_capability;
    let (cuda_major, cuda_minor) = device.driver_version;
    Finding::ok(
        "gpu.devices",
        format!(
            "GPU {}: {}, {}, compute capability {major}.{minor}, CUDA {cuda_major}.{cuda_minor}, {}{}",
            device.ordinal,
            device.name,
            bytes(device.total_bytes),
            device.pci_bus_id,
            node.unwrap_or_default()
        ),
    )
}

fn distance(ordinal: u32, distance: Distance, names: &[&str]) -> Finding {
    const ID: &str = "gpu.distance";
    let found = format!(
        "GPU {ordinal}: nearest are {} ({distance})",
        names.join(", ")
    );
    match distance {
        Distance::Unknown => Finding::info(
            ID,
            format!("GPU {ordinal}: how far its interfaces are is not known on this machine"),
        ),
        Distance::OtherNode => Finding::warn(
            ID,
            found,
            "choose interfaces of the GPU's NUMA node with TCPX_INTERFACES; `tcpx devices` shows them",
        ),
        _ => Finding::ok(ID, found),
    }
}

/// Compares slots for all lanes to one peer, in both directions, with what may be pinned.
fn staging(config: &Config) -> Finding {
    const ID: &str = "gpu.staging";
    let slot = config.staging_slot_bytes() as u64;
    let slots = config.staging_slots_per_lane();
    let lanes = config.lanes();
    let peer = (slots * lanes) as u64 * slot;
    let most = config.staging_bytes() as u64;
    let found = format!(
        "staging_bytes is {}; a busy peer takes {} × {} slots of {} = {}",
        bytes(most),
        count(lanes, "lane"),
        slots,
        bytes(slot),
        bytes(peer)
    );
    if most < peer {
        return Finding::warn(
            ID,
            format!("{found}: lanes wait for each other's slots"),
            format!("TCPX_STAGING_BYTES={peer} or more, or fewer lanes"),
        );
    }
    let peers = usize::try_from(most / peer).unwrap_or(usize::MAX);
    Finding::ok(
        ID,
        format!("{found}: enough for {} at once", count(peers, "peer")),
    )
}

/// Checks that pinned memory, which cannot be swapped, fits beside everything else.
fn pinned(staging_bytes: u64, available: Option<u64>, locked: Limit) -> Finding {
    const ID: &str = "gpu.pinned";
    let limit = locked.soft.map_or("unlimited".to_owned(), bytes);
    let memlock = format!("`ulimit -l` ({limit}) does not bind what CUDA pins");
    let Some(available) = available else {
        return Finding::info(ID, memlock);
    };
    let found = format!(
        "up to {} is pinned for staging, {} of memory is available; {memlock}",
        bytes(staging_bytes),
        bytes(available)
    );
    if staging_bytes > available / 2 {
        return Finding::warn(ID, found, "a smaller TCPX_STAGING_BYTES");
    }
    Finding::ok(ID, found)
}

fn available_bytes(machine: &Machine) -> Option<u64> {
    let meminfo = machine.text("proc/meminfo")?;
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::super::machine::tests::Fake;
    use super::*;

    fn config(settings: &[(&str, &str)]) -> Config {
        let mut config = Config::defaults();
        for (key, value) in settings {
            config.set(key, value).unwrap();
        }
        config
    }

    #[test]
    fn staging_must_hold_the_slots_of_one_peer() {
        let chosen = [
            ("lanes", "8"),
            ("chunk_bytes", "2M"),
            ("staging_bytes", "256M"),
        ];
        let fine = staging(&config(&chosen));
        assert_eq!(fine.level, Level::Ok);
        assert_eq!(
            fine.found,
            "staging_bytes is 256 MiB; a busy peer takes 8 lanes × 6 slots of 2 MiB = 96 MiB: \
             enough for 2 peers at once"
        );
        let short = staging(&config(&[("lanes", "8"), ("staging_bytes", "32M")]));
        assert_eq!(short.level, Level::Warn);
        assert!(short.advice.unwrap().contains("TCPX_STAGING_BYTES="));
    }

    #[test]
    fn another_node_is_a_warning_and_an_unknown_place_is_not() {
        let of = |distance| super::distance(0, distance, &["eth1", "eth2"]);
        assert_eq!(of(Distance::SameSwitch).level, Level::Ok);
        assert_eq!(
            of(Distance::SameNode).found,
            "GPU 0: nearest are eth1, eth2 (same NUMA node)"
        );
        let far = of(Distance::OtherNode);
        assert_eq!(far.level, Level::Warn);
        assert!(far.advice.unwrap().contains("TCPX_INTERFACES"));
        assert_eq!(of(Distance::Unknown).level, Level::Info);
    }

    #[test]
    fn pinned_memory_must_fit() {
        let locked = Limit {
            soft: Some(8 << 20),
            hard: None,
        };
        let fine = pinned(256 << 20, Some(16 << 30), locked);
        assert_eq!(fine.level, Level::Ok);
        assert!(fine.found.contains("8 MiB"), "{}", fine.found);
        assert_eq!(pinned(16 << 30, Some(16 << 30), locked).level, Level::Warn);
        assert_eq!(pinned(1, None, locked).level, Level::Info);
    }

    #[test]
    fn available_memory_is_read_from_the_kernel() {
        let fake = Fake::new().file(
            "proc/meminfo",
            "MemTotal:  100 kB\nMemAvailable:   64 kB\nBuffers: 1 kB\n",
        );
        assert_eq!(available_bytes(&fake.machine()), Some(65536));
        assert_eq!(available_bytes(&Fake::new().machine()), None);
    }

    #[test]
    fn a_driver_that_fails_is_a_warning_with_its_words() {
        let finding = unusable(&cuda::Error::NoDevice);
        assert_eq!(finding.level, Level::Warn);
        assert!(finding.found.contains("nvidia-smi"), "{}", finding.found);
    }
}
