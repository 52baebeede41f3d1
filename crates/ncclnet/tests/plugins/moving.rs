//! Moves bytes with every version.

use tcpx_ncclnet::{DeviceType, MemoryKind, Plugin, Properties};

use crate::build::{self, Counters, VERSIONS};
use crate::wire::{connect, move_all};

/// Lists sizes of empty, tiny, odd and large messages, more of them than any ring holds.
fn sizes() -> Vec<usize> {
    let mut sizes = vec![0, 1, 17, 4096, 65_537, 0, 3 << 20, 5];
    sizes.extend((0..40).map(|n| n * 131));
    sizes
}

#[test]
fn every_version_moves_bytes_both_ways_and_leaves_nothing_behind() {
    for version in VERSIONS {
        let library = build::plugin(&format!("moves-{version}"), version, &[]);
        let counters = Counters::of(&library);
        {
            let plugin = Plugin::open(build::path(&library)).unwrap();
            assert_eq!(plugin.api_version(), version);
            assert_eq!(plugin.name(), format!("Loop_v{version}"));
            assert_eq!(plugin.library(), build::path(&library));
            assert_eq!(plugin.needs_consume(), version >= 7);
            check_properties(version, plugin.devices());

            let (mut send, mut recv) = connect(&plugin, 0, 1);
            let (mut back_send, mut back_recv) = connect(&plugin, 1, 0);
            assert_eq!((send.device(), recv.device()), (0, 1));
            let completions = move_all(&mut send, &mut recv, &sizes());
            for (completion, size) in completions.iter().zip(sizes()) {
                let expected = (size > 0).then_some(size);
                assert_eq!(completion.reported_bytes, expected, "version {version}");
            }
            move_all(&mut back_send, &mut back_recv, &sizes());
            // A comm outlives its plugin.
            drop(plugin);
            move_all(&mut send, &mut recv, &[1000]);
        }
        assert_eq!(counters.live(), 0, "version {version}");
        assert_eq!(counters.inits(), 1, "version {version}");
    }
}

fn check_properties(version: u32, devices: &[Properties]) {
    assert_eq!(devices.len(), 2);
    for (index, device) in devices.iter().enumerate() {
        assert_eq!(device.name, format!("loop{index}"));
        let pci_path = (index == 1).then_some("/sys/devices/loop1");
        assert_eq!(device.pci_path.as_deref(), pci_path);
        assert_eq!(device.guid, 0x1000 + index as u64);
        assert!(device.reaches(MemoryKind::Host) && device.reaches(MemoryKind::Cuda));
        assert_eq!(device.dmabuf, version >= 6);
        assert_eq!(device.reg_is_global, version >= 8);
        assert_eq!(device.force_flush, version >= 9);
        assert_eq!(device.speed_mbps, 12345);
        assert_eq!(device.port, 3);
        assert_eq!(device.latency_us, if version >= 5 { 1.5 } else { 0.0 });
        assert_eq!(device.max_comms, 77);
        assert_eq!(device.max_recvs, 1);
        assert_eq!(device.device_type, DeviceType::Host);
        let largest = if version >= 9 { 8 << 20 } else { 1 << 30 };
        assert_eq!(device.max_message_bytes, largest);
        let registration = if version >= 8 {
            usize::MAX
        } else {
            i32::MAX as usize
        };
        assert_eq!(device.max_registration_bytes, registration);
    }
}

#[test]
fn plugins_without_handles_sizes_or_consume_work_too() {
    let options = ["-DMHANDLES=0", "-DSIZES=0", "-DNO_CONSUME"];
    let library = build::plugin("sparse", 8, &options);
    let plugin = Plugin::open(build::path(&library)).unwrap();
    assert!(!plugin.needs_consume());
    let (mut send, mut recv) = connect(&plugin, 0, 0);
    let completions = move_all(&mut send, &mut recv, &sizes());
    assert!(completions.iter().all(|c| c.reported_bytes.is_none()));
}

#[test]
fn a_table_may_be_filled_in_by_init() {
    let library = build::plugin("late", 9, &["-DFILL_IN_INIT"]);
    let plugin = Plugin::open(build::path(&library)).unwrap();
    assert_eq!(plugin.name(), "Loop");
    let (mut send, mut recv) = connect(&plugin, 0, 1);
    move_all(&mut send, &mut recv, &[100, 200]);
}

#[test]
fn comms_are_used_from_threads_of_their_own() {
    let library = build::plugin("threads", 7, &[]);
    let plugin = Plugin::open(build::path(&library)).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            // Created here, used on another thread.
            let (mut send, mut recv) = connect(&plugin, 0, 1);
            scope.spawn(move || move_all(&mut send, &mut recv, &sizes()));
        }
    });
}

#[test]
fn an_unpack_device_hands_out_its_device_handle() {
    for version in 7..=12 {
        let library = build::plugin(&format!("unpack-{version}"), version, &["-DDEVICE_TYPE=1"]);
        let plugin = Plugin::open(build::path(&library)).unwrap();
        assert_eq!(plugin.devices()[0].device_type, DeviceType::Unpack);
        let (mut send, mut recv) = connect(&plugin, 0, 1);
        let handle = recv.device_handle().unwrap();
        assert_eq!(handle.device_type, DeviceType::Unpack);
        assert_eq!((handle.version, handle.size), (7, 24));
        assert!(handle.needs_proxy_progress);
        // SAFETY: this plugin's handle is three numbers.
        assert_eq!(unsafe { *handle.handle.cast::<[u64; 3]>() }, [1, 2, 3]);
        move_all(&mut send, &mut recv, &sizes());
    }
}
