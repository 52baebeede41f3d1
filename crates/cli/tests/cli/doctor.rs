//! `tcpx doctor`.

use serde_json::Value;

use crate::support::{Run, run, tcpx};

fn finding(document: &Value, id: &str) -> Value {
    let findings = document["findings"].as_array().unwrap();
    findings
        .iter()
        .find(|finding| finding["id"] == id)
        .unwrap_or_else(|| panic!("no {id}"))
        .clone()
}

#[test]
fn every_subject_is_looked_at_and_a_transfer_is_made() {
    let document = run(&["doctor", "--json"]).expect(0).json();
    assert_eq!(document["transfers_work"], true);
    for id in [
        "config.settings",
        "limits.nofile",
        "limits.memlock",
        "kernel.version",
        "kernel.zerocopy",
        "kernel.devmem",
        "machine.cores",
        "machine.hugepages",
        "network.interfaces",
        "network.congestion",
        "gpu.cuda",
        "plugin.nccl_net",
    ] {
        let finding = finding(&document, id);
        assert_ne!(finding["level"], "fail", "{finding}");
        assert!(!finding["found"].as_str().unwrap().is_empty(), "{finding}");
    }
    let transfer = finding(&document, "transfer.loopback");
    assert_eq!(transfer["level"], "ok", "{transfer}");
    assert!(
        transfer["found"].as_str().unwrap().contains("16 MiB"),
        "{transfer}"
    );
}

#[test]
fn the_text_ends_with_a_verdict() {
    let text = run(&["doctor"]).expect(0).stdout;
    assert!(text.contains("Transfers will work."), "{text}");
    assert!(text.contains("limits.nofile"), "{text}");
}

#[test]
fn a_bad_setting_is_a_failure_by_name() {
    let run: Run = tcpx(&["doctor", "--json"])
        .env("TCPX_LANES", "many")
        .output()
        .unwrap()
        .into();
    let document = run.expect(1).json();
    assert_eq!(document["transfers_work"], false);
    let settings = finding(&document, "config.settings");
    assert_eq!(settings["level"], "fail");
    let found = settings["found"].as_str().unwrap();
    assert!(
        found.contains("TCPX_LANES") && found.contains("many"),
        "{found}"
    );
    assert!(settings["advice"].is_string());
}

#[test]
fn an_interface_that_does_not_exist_is_a_failure() {
    let document = run(&["doctor", "--json", "--interfaces", "nosuch"])
        .expect(1)
        .json();
    let interfaces = finding(&document, "network.interfaces");
    assert_eq!(interfaces["level"], "fail");
    assert!(
        interfaces["found"]
            .as_str()
            .unwrap()
            .contains("this machine has")
    );
}

/// Every command that reads settings reports a misspelt variable, and works.
#[test]
fn a_misspelt_variable_is_found_with_what_was_meant() {
    const WORDS: &str = "TCPX_LANE is not a setting: did you mean TCPX_LANES?";
    let misspelt = |args: &[&str]| -> Run {
        let output = tcpx(args).env("TCPX_LANE", "3").output();
        output.unwrap().into()
    };
    let doctor = misspelt(&["doctor", "--json"]).expect(0);
    let finding = finding(&doctor.json(), "config.unknown");
    assert_eq!(finding["level"], "warn");
    assert_eq!(finding["found"], WORDS);
    // The sessions that it starts warn too, once.
    assert_eq!(doctor.stderr.matches(WORDS).count(), 1, "{}", doctor.stderr);

    let config = misspelt(&["config", "--json"]).expect(0).json();
    assert_eq!(config["unknown"][0]["variable"], "TCPX_LANE");
    assert_eq!(config["unknown"][0]["suggestion"], "TCPX_LANES");
    let config = misspelt(&["config"]).expect(0).stdout;
    assert!(config.contains(WORDS), "{config}");
}
