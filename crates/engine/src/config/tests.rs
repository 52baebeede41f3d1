//! Tests of the configuration.

use super::*;
use proptest::prelude::*;

fn from(pairs: &[(&str, &str)]) -> Result<Config, ConfigError> {
    Config::from_variables(|name| {
        pairs
            .iter()
            .find(|(n, _)| *n == name)
            .map(|(_, v)| (*v).to_owned())
    })
}

#[test]
fn the_environment_overrides_defaults_and_is_remembered() {
    let config = from(&[("TCPX_LANES", "3"), ("TCPX_CHUNK_BYTES", "512K")]).unwrap();
    assert_eq!((config.lanes(), config.chunk_bytes()), (3, 512 << 10));
    let row = config
        .rows()
        .into_iter()
        .find(|r| r.key == "lanes")
        .unwrap();
    assert_eq!(row.source, Source::Environment("TCPX_LANES".into()));
}

#[test]
fn older_names_apply_only_if_the_new_name_is_unset() {
    assert_eq!(from(&[("UCCL_TCPX_NUM_CHANNELS", "5")]).unwrap().lanes(), 5);
    let both = from(&[("TCPX_LANES", "2"), ("UCCL_TCPX_NUM_CHANNELS", "5")]).unwrap();
    assert_eq!(both.lanes(), 2);
    let empty = from(&[("TCPX_LANES", ""), ("UCCL_TCPX_NUM_CHANNELS", "5")]).unwrap();
    assert_eq!(empty.lanes(), 5);
}

#[test]
fn a_bad_value_names_variable_value_and_expectation() {
    let error = from(&[("TCPX_LANES", "many")]).unwrap_err().to_string();
    assert!(error.contains("TCPX_LANES") && error.contains("many") && error.contains("1 to 64"));
    for (key, value) in [
        ("TCPX_WINDOW", "0"),
        ("TCPX_CHUNK_BYTES", "1T"),
        ("TCPX_CHUNK_BYTES", "99999999999999999999"),
        ("TCPX_PEER_TIMEOUT", "1ms"),
        ("TCPX_PEER_TIMEOUT", "-1"),
        ("TCPX_TRANSPORT", "rdma"),
        ("TCPX_LISTEN_PORT", "65536"),
    ] {
        assert!(from(&[(key, value)]).is_err(), "{key}={value}");
    }
}

#[test]
fn unknown_keys_list_the_known_ones() {
    let error = Config::defaults().set("lane", "1").unwrap_err().to_string();
    assert!(
        error.contains("\"lane\"") && error.contains("lanes"),
        "{error}"
    );
}

#[test]
fn usual_lanes_leave_cores_to_the_application() {
    for (cores, lanes) in [(1, 1), (2, 1), (4, 2), (8, 4), (16, 7), (32, 8), (192, 8)] {
        assert_eq!(rows::usual_lanes(cores), lanes, "{cores} cores");
    }
}

#[test]
fn workers_follow_lanes_until_they_are_set() {
    let config = Config::defaults().with("lanes", 1).unwrap();
    assert_eq!(config.workers(), 1);
    let config = config.with("workers", 7).unwrap().with("lanes", 2).unwrap();
    assert_eq!(config.workers(), 7);
}

#[test]
fn every_displayed_default_can_be_set() {
    let mut config = Config::defaults();
    for row in Config::defaults().rows() {
        config
            .set(row.key, &row.value)
            .unwrap_or_else(|e| panic!("{e}"));
    }
}

#[test]
fn a_variable_that_is_not_utf8_is_an_error() {
    use std::os::unix::ffi::OsStringExt;
    for (row, variable) in ROWS
        .iter()
        .flat_map(|r| r.variables().iter().map(move |v| (r, *v)))
    {
        let raw = || OsString::from_vec(b"eth\xff".to_vec());
        let error = Config::from_environment(|name| (name == variable).then(raw)).unwrap_err();
        let ConfigError::BadValue { name, expected, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!(name, variable);
        assert!(expected.contains("UTF-8") && expected.contains(&row.expected()));
    }
}

#[test]
fn ranges_end_at_their_documented_limits() {
    for (key, outside, inside) in [
        ("lanes", ["0", "65"], ["1", "64"]),
        ("chunk_bytes", ["16383", "268435457"], ["16K", "256M"]),
        ("window", ["0", "1025"], ["1", "1024"]),
        ("workers", ["0", "65"], ["1", "64"]),
        ("plugin_version", ["3", "13"], ["4", "12"]),
        ("plugin_version", ["1", "-1"], ["0", "8"]),
        ("staging_bytes", ["1048575", "65G"], ["1M", "64G"]),
        ("device_bytes", ["1048575", "1025M"], ["0", "1G"]),
        ("queue_bytes", ["1048575", "65G"], ["1M", "64G"]),
        ("peer_timeout", ["99ms", "3601s"], ["100ms", "1h"]),
        ("connect_timeout", ["99ms", "3601s"], ["0.1", "60m"]),
        ("max_connections", ["0", "1048577"], ["1", "1048576"]),
        (
            "max_connections_per_peer",
            ["1", "1048577"],
            ["2", "1048576"],
        ),
        ("spin_us", ["100001", "1ms"], ["0", "100000"]),
        ("socket_buffer_bytes", ["1", "4095"], ["0", "4K"]),
        ("socket_buffer_bytes", ["-1", "1073741825"], ["4096", "1G"]),
        ("listen_port", ["-1", "65536"], ["0", "65535"]),
        ("listen_port", ["2-1", "0-9"], ["1-65535", "18000-18015"]),
        ("advertise", ["0.0.0.0", "a:0"], ["", "+node:30000-30015"]),
    ] {
        for value in outside {
            assert!(
                Config::defaults().with(key, value).is_err(),
                "{key}={value}"
            );
        }
        for value in inside {
            assert!(Config::defaults().with(key, value).is_ok(), "{key}={value}");
        }
    }
}

/// A key, its value as text, and the typed setter for the same value.
type Both = (
    &'static str,
    &'static str,
    fn(Config) -> Result<Config, ConfigError>,
);

#[test]
fn typed_setters_match_text_setters() {
    let good: [Both; 30] = [
        ("name", " a name ", |c| c.with_name(" a name ")),
        ("lanes", "3", |c| c.with_lanes(3)),
        ("chunk_bytes", "65536", |c| c.with_chunk_bytes(64 << 10)),
        ("window", "7", |c| c.with_window(7)),
        ("workers", "5", |c| c.with_workers(5)),
        ("interfaces", "=eth7", |c| {
            c.with_interfaces("=eth7".parse().unwrap())
        }),
        ("control_interface", "^lo", |c| {
            c.with_control_interface("^lo".parse().unwrap())
        }),
        ("transport", "plugin", |c| {
            c.with_transport(TransportKind::Plugin)
        }),
        ("plugin", "fast", |c| c.with_plugin("fast")),
        ("plugin_version", "8", |c| c.with_plugin_version(8)),
        ("same_host", "off", |c| c.with_same_host(SameHostKind::Off)),
        ("staging", "always", |c| c.with_staging(StagingKind::Always)),
        ("staging_bytes", "33554432", |c| {
            c.with_staging_bytes(32 << 20)
        }),
        ("device_bytes", "0", |c| c.with_device_bytes(0)),
        ("gpu_locality", "off", |c| {
            c.with_gpu_locality(GpuLocality::Off)
        }),
        ("queue_bytes", "67108864", |c| c.with_queue_bytes(64 << 20)),
        ("peer_timeout", "2.5s", |c| {
            c.with_peer_timeout(Duration::from_millis(2500))
        }),
        ("connect_timeout", "3s", |c| {
            c.with_connect_timeout(Duration::from_secs(3))
        }),
        ("max_connections", "9", |c| c.with_max_connections(9)),
        ("max_connections_per_peer", "3", |c| {
            c.with_max_connections_per_peer(3)
        }),
        ("spin_us", "70", |c| c.with_spin(Duration::from_micros(70))),
        ("socket_buffer_bytes", "8192", |c| {
            c.with_socket_buffer_bytes(8 << 10)
        }),
        ("congestion", "system", |c| c.with_congestion("system")),
        ("listen_port", "700", |c| c.with_listen_port(700)),
        ("advertise", "+node:7", |c| {
            c.with_advertise("+node:7".parse().unwrap())
        }),
        ("metrics", "127.0.0.1:9400", |c| {
            c.with_metrics("9400".parse::<MetricsAddress>().ok())
        }),
        ("top", "off", |c| c.with_top(false)),
        ("trace", "/tmp/t-%p.json", |c| {
            c.with_trace(PathBuf::from("/tmp/t-%p.json"))
        }),
        ("trace_bytes", "1048576", |c| c.with_trace_bytes(1 << 20)),
        ("log", "debug", |c| c.with_log("debug")),
    ];
    let mut keys: Vec<_> = good.iter().map(|(key, ..)| *key).collect();
    keys.dedup();
    assert_eq!(keys, ROWS.iter().map(|row| row.key()).collect::<Vec<_>>());
    for (key, text, set) in good {
        let by_text = Config::defaults().with(key, text).unwrap();
        let by_type = set(Config::defaults()).unwrap();
        assert_eq!(format!("{by_type:?}"), format!("{by_text:?}"), "{key}");
        let row = by_type
            .rows()
            .into_iter()
            .find(|row| row.key == key)
            .unwrap();
        assert_eq!((row.value.as_str(), row.source), (text, Source::Explicit));
    }
    let bad: [Both; 14] = [
        ("name", "", |c| c.with_name("")),
        ("lanes", "0", |c| c.with_lanes(0)),
        ("chunk_bytes", "1", |c| c.with_chunk_bytes(1)),
        ("window", "2000", |c| c.with_window(2000)),
        ("workers", "65", |c| c.with_workers(65)),
        ("plugin_version", "3", |c| c.with_plugin_version(3)),
        ("staging_bytes", "0", |c| c.with_staging_bytes(0)),
        ("device_bytes", "1", |c| c.with_device_bytes(1)),
        ("queue_bytes", "0", |c| c.with_queue_bytes(0)),
        ("peer_timeout", "1ms", |c| {
            c.with_peer_timeout(Duration::from_millis(1))
        }),
        ("connect_timeout", "7200s", |c| {
            c.with_connect_timeout(Duration::from_secs(7200))
        }),
        ("spin_us", "1000000", |c| {
            c.with_spin(Duration::from_secs(1))
        }),
        ("socket_buffer_bytes", "5", |c| {
            c.with_socket_buffer_bytes(5)
        }),
        ("congestion", "no such", |c| c.with_congestion("no such")),
    ];
    for (key, text, set) in bad {
        let by_text = Config::defaults().with(key, text).unwrap_err();
        assert_eq!(set(Config::defaults()).unwrap_err(), by_text, "{key}");
    }
}

#[test]
fn plugins_have_a_longer_connect_timeout_by_default() {
    let config = Config::defaults()
        .with_transport(TransportKind::Plugin)
        .unwrap();
    assert_eq!(config.connect_timeout(), Duration::from_secs(30));
    let set = config.with_connect_timeout(Duration::from_secs(4)).unwrap();
    assert_eq!(set.connect_timeout(), Duration::from_secs(4));
    assert_eq!(
        Config::defaults().connect_timeout(),
        Duration::from_secs(10)
    );
}

#[test]
fn every_path_has_a_lane_unless_the_number_is_set() {
    let mut config = Config::defaults();
    let usual = config.lanes();
    assert_eq!(config.lanes_for(0), usual);
    assert_eq!(config.lanes_for(usual + 3), usual + 3);
    assert_eq!(config.lanes_for(1000), MAX_LANES);
    let set = config.clone().with_lanes(1).unwrap();
    assert_eq!(set.lanes_for(5), 1);
    // A GPU that uses some of the interfaces has as many lanes there as over all of them.
    assert_eq!(config.lanes_over(4, 1), usual.max(4));
    assert_eq!(config.lanes_over(2, 3), (3 * usual).min(MAX_LANES));
    assert_eq!(config.lanes_over(100, 2), MAX_LANES);
    assert_eq!(set.lanes_over(4, 4), 1);
    // Connections within a machine have no pairs of interfaces.
    assert_eq!(config.lanes_over(0, 4), usual);
    let workers = config.workers();
    config.raise_lanes(usual + 1);
    assert_eq!((config.lanes(), config.workers()), (usual + 1, workers));
}

#[test]
fn texts_follow_the_constants() {
    let config = Config::defaults();
    let rows = config.rows();
    let row = |key| rows.iter().find(|row| row.key == key).unwrap();
    let slots = config.staging_slots_per_lane();
    let lane = slots * config.staging_slot_bytes();
    let help = &row("staging_bytes").help;
    assert!(help.contains(&format!("{slots} slots")), "{help}");
    assert!(
        help.contains(&format!("{} MiB in all", lane >> 20)),
        "{help}"
    );
    let reason = &row("staging_bytes").reason;
    let peers = config.staging_bytes() / (8 * lane);
    assert!(
        reason.contains(&format!("8 lanes to {peers} peers")),
        "{reason}"
    );
    let help = &row("chunk_bytes").help;
    let factor = config.staging_slot_bytes() / config.chunk_bytes();
    assert!(
        help.contains(&format!("{factor} times as many for GPU")),
        "{help}"
    );
}

#[test]
fn metrics_are_served_on_loopback_by_default() {
    for (text, shown) in [
        ("", "off"),
        ("off", "off"),
        ("0", "127.0.0.1:0"),
        ("9400", "127.0.0.1:9400"),
        ("9400-9415", "127.0.0.1:9400-9415"),
        ("0.0.0.0:1", "0.0.0.0:1"),
        ("[::1]:9400-9401", "[::1]:9400-9401"),
    ] {
        let config = Config::defaults().with("metrics", text).unwrap();
        let rows = config.rows();
        let row = rows.iter().find(|row| row.key == "metrics").unwrap();
        assert_eq!(row.value, shown, "{text}");
    }
    for text in [
        "x",
        "65536",
        "9-8",
        "::1",
        "::1:80",
        "[::1]",
        "1.2.3.4",
        "[1.2.3.4]:1",
        "1-",
    ] {
        assert!(Config::defaults().with("metrics", text).is_err(), "{text}");
    }
}

proptest! {
    #[test]
    fn no_value_panics(key in 0..ROWS.len(), value in ".{0,40}") {
        let _ = Config::defaults().set(ROWS[key].key(), &value);
    }
}
