//! Tests opening: which libraries are found, which are refused, and how often `init` runs.

use tcpx_ncclnet::{Code, Error, Fault, Plugin};

use crate::build::{self, Counters};
use crate::wire::{connect, move_all};

fn refused(name: &str, version: u32, options: &[&str]) -> Error {
    Plugin::open(build::path(&build::plugin(name, version, options))).unwrap_err()
}

#[test]
fn the_newest_version_wins_unless_another_is_asked_for() {
    let library = build::plugins("several", &[4, 6, 8], &[]);
    let path = build::path(&library);
    let error = Plugin::open_version(path, 7).unwrap_err();
    assert_eq!(
        error,
        Error::VersionMissing {
            library: path.to_owned(),
            version: 7,
            found: vec![8, 6, 4],
        }
    );
    let plugin = Plugin::open(path).unwrap();
    assert_eq!(plugin.api_version(), 8);

    let library = build::plugins("forced", &[4, 6, 8], &[]);
    let path = build::path(&library);
    let plugin = Plugin::open_version(path, 6).unwrap();
    assert_eq!(plugin.api_version(), 6);
    let (mut send, mut recv) = connect(&plugin, 0, 1);
    move_all(&mut send, &mut recv, &[1, 2, 3]);
    // The library runs under that version now.
    let error = Plugin::open(path).unwrap_err();
    assert_eq!(
        error,
        Error::VersionInUse {
            library: path.to_owned(),
            version: 8,
            in_use: 6,
        }
    );
}

#[test]
fn init_runs_once_however_often_and_under_whatever_name_a_library_is_opened() {
    let library = build::plugin("once", 10, &[]);
    let counters = Counters::of(&library);
    let link = build::output("once-by-another-name.so");
    let _ = std::fs::remove_file(&link);
    std::os::unix::fs::symlink(&library, &link).unwrap();
    let opened: Vec<Plugin> = std::thread::scope(|scope| {
        let threads: Vec<_> = [&library, &link, &library, &link]
            .map(|path| scope.spawn(|| Plugin::open(build::path(path)).unwrap()))
            .into_iter()
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(counters.inits(), 1);
    drop(opened);
    Plugin::open(build::path(&library)).unwrap();
    assert_eq!(counters.inits(), 1);
}

#[test]
fn from_version_11_on_each_opening_has_a_context_that_ends_with_its_last_user() {
    for version in [11, 12] {
        let library = build::plugin(&format!("contexts-{version}"), version, &[]);
        let counters = Counters::of(&library);
        let one = Plugin::open(build::path(&library)).unwrap();
        let two = Plugin::open(build::path(&library)).unwrap();
        assert_eq!((counters.inits(), counters.live()), (2, 2));
        drop(one.clone());
        assert_eq!(counters.live(), 2);
        let comms = connect(&one, 0, 1);
        drop(one);
        // Two contexts and two comms.
        assert_eq!(counters.live(), 4);
        drop(comms);
        assert_eq!(counters.live(), 1);
        drop(two);
        assert_eq!(counters.live(), 0);
    }
}

#[test]
fn a_library_of_version_11_is_unloaded_with_its_last_user_and_can_be_opened_again() {
    let library = build::plugin("unloaded", 11, &[]);
    let loaded = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.contains("libnccl-net-unloaded.so")
    };
    for _ in 0..3 {
        let plugin = Plugin::open(build::path(&library)).unwrap();
        let (mut send, mut recv) = connect(&plugin, 0, 1);
        move_all(&mut send, &mut recv, &[10_000]);
        assert!(loaded());
        drop((plugin, send, recv));
        assert!(!loaded());
    }
}

#[test]
fn a_failed_init_says_why_and_is_not_repeated() {
    for (version, expected_calls) in [(7, 1), (12, 2)] {
        let library = build::plugin(&format!("fails-{version}"), version, &["-DFAIL_INIT"]);
        let path = build::path(&library);
        let error = Plugin::open(path).unwrap_err();
        let counters = Counters::of(&library);
        assert_eq!(
            error,
            Error::Call {
                call: "init",
                code: Code(3),
                warning: Some("no network of the kind loop".into()),
            }
        );
        assert_eq!(error.fault(), Fault::Plugin);
        assert_eq!(Plugin::open(path).unwrap_err(), error);
        assert_eq!(counters.inits(), expected_calls);
    }
}

#[test]
fn a_library_loaded_by_others_is_distinguished_from_a_broken_one() {
    for (version, is_once) in [(7, true), (12, false)] {
        let library = build::plugin(&format!("taken-{version}"), version, &["-DFAIL_INIT"]);
        // As NCCL may do in the same process.
        let _other = Counters::of(&library);
        let error = Plugin::open(build::path(&library)).unwrap_err();
        let says_so = matches!(error, Error::InitialisedBefore { .. });
        assert_eq!(says_so, is_once, "{error}");
        assert!(
            error.to_string().contains("no network of the kind loop"),
            "{error}"
        );
    }
}

#[test]
fn plugins_that_cannot_be_used_are_refused_and_say_so() {
    for version in [4, 7, 12] {
        let error = refused(&format!("no-devices-{version}"), version, &["-DNO_DEVICES"]);
        assert!(matches!(error, Error::NoDevices { count: 0, .. }));
        assert_eq!(error.fault(), Fault::Environment);

        let error = refused(&format!("no-isend-{version}"), version, &["-DNO_ISEND"]);
        assert!(
            matches!(
                error,
                Error::Incomplete {
                    member: "isend",
                    ..
                }
            ),
            "{error}"
        );
    }
    for (device_type, device_version) in [(2, 0), (1, 6), (1, 0), (-1, 7)] {
        let options = [
            format!("-DDEVICE_TYPE={device_type}"),
            format!("-DDEVICE_VERSION={device_version}"),
        ];
        let error = refused(
            &format!("device-{device_type}-{device_version}"),
            11,
            &options.each_ref().map(String::as_str),
        );
        let Error::DeviceType {
            device: 0,
            device_type: found_type,
            device_version: found_version,
            ..
        } = error
        else {
            panic!("{error}");
        };
        assert_eq!((found_type, found_version), (device_type, device_version));
    }
}

#[test]
fn a_context_of_a_plugin_that_is_refused_is_finalised() {
    let library = build::plugin("refused-context", 12, &["-DNO_DEVICES"]);
    let counters = Counters::of(&library);
    Plugin::open(build::path(&library)).unwrap_err();
    assert_eq!((counters.inits(), counters.live()), (1, 0));
}

#[test]
fn what_is_not_a_plugin_is_told_apart() {
    let library = build::ordinary_library("ordinary");
    let error = Plugin::open(build::path(&library)).unwrap_err();
    assert!(matches!(
        error,
        Error::NotAPlugin {
            oldest: 4,
            newest: 12,
            ..
        }
    ));

    let text = build::output("text.so");
    std::fs::write(&text, "not a library at all\n".repeat(1000)).unwrap();
    let Error::NoneUsable { tried } = Plugin::open(build::path(&text)).unwrap_err() else {
        panic!("it cannot be opened");
    };
    assert_eq!(tried.len(), 1);
    assert!(tried[0].reason.contains("invalid ELF header"), "{tried:?}");

    let error = Plugin::open("/no/such/file.so").unwrap_err().to_string();
    assert!(
        error.contains("/no/such/file.so (") && error.contains("No such file"),
        "{error}"
    );
    assert_eq!(Plugin::open("None").unwrap_err(), Error::Disabled);
}

#[test]
fn a_list_gives_the_first_plugin_that_works_or_all_reasons() {
    let good = build::plugin("list-good", 9, &[]);
    let bad = build::plugin("list-bad", 9, &["-DFAIL_INIT"]);
    let ordinary = build::ordinary_library("list-ordinary");
    let list = format!(
        "no-such-plugin,{},{},{}",
        build::path(&ordinary),
        build::path(&bad),
        build::path(&good)
    );
    let plugin = Plugin::open(&list).unwrap();
    assert_eq!(plugin.library(), build::path(&good));

    let list = format!(
        "no-such-plugin,{},{}",
        build::path(&ordinary),
        build::path(&bad)
    );
    let Error::NoneUsable { tried } = Plugin::open(&list).unwrap_err() else {
        panic!("nothing in it works");
    };
    let names: Vec<&str> = tried.iter().map(|tried| tried.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "no-such-plugin",
            "libnccl-net-no-such-plugin.so",
            build::path(&ordinary),
            build::path(&bad)
        ]
    );
    assert!(tried[2].reason.contains("is not a net plugin"));
    assert!(tried[3].reason.contains("no network of the kind loop"));
}
