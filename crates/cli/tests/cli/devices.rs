//! `tcpx devices`.

use serde_json::Value;

use crate::support::{Run, run, tcpx};

fn row(document: &Value, name: &str) -> Value {
    let rows = document["interfaces"].as_array().unwrap();
    rows.iter()
        .find(|row| row["name"] == name)
        .expect("the interface is listed")
        .clone()
}

#[test]
fn loopback_is_listed_and_used_when_asked_for() {
    let document = run(&["devices", "--json"]).expect(0).json();
    let lo = row(&document, "lo");
    assert_eq!(lo["kind"], "loopback");
    assert_eq!(lo["usable"], false);
    assert!(lo["why_not"].as_str().unwrap().contains("loopback"));
    assert_eq!(lo["selected"], true);
    assert_eq!(lo["pci_address"], Value::Null);
    assert!(lo["mtu"].as_u64().unwrap() > 0);
    let first = &lo["addresses"][0];
    assert_eq!(
        (first["ip"].as_str(), first["prefix_length"].as_u64()),
        (Some("127.0.0.1"), Some(8))
    );
    assert_eq!(document["selection"]["selector"], "lo");
    assert_eq!(document["selection"]["error"], Value::Null);
}

#[test]
fn the_table_says_the_same() {
    let table = run(&["devices"]).expect(0).stdout;
    assert!(
        table.contains("127.0.0.1/8") && table.contains("in use"),
        "{table}"
    );
    assert!(
        table.contains("Lanes run over lo (asked for: lo)."),
        "{table}"
    );
}

#[test]
fn gpus_are_listed_or_their_absence_explained() {
    let document = run(&["devices", "--json"]).expect(0).json();
    let gpus = document["gpus"].as_array().unwrap();
    let table = run(&["devices"]).expect(0).stdout;
    match document["no_gpus"].as_str() {
        Some(why) => {
            assert!(gpus.is_empty() && why.contains("CUDA"), "{why}");
            assert!(table.contains("No GPUs: "), "{table}");
        }
        None => {
            assert!(gpus[0]["memory_bytes"].as_u64().unwrap() > 0);
            assert!(table.contains("COMPUTE"), "{table}");
        }
    }
}

#[test]
fn an_option_overrides_the_variable() {
    let run: Run = tcpx(&["devices", "--interfaces", "=lo", "--json"])
        .env("TCPX_INTERFACES", "nosuch")
        .output()
        .unwrap()
        .into();
    assert_eq!(run.expect(0).json()["selection"]["selector"], "=lo");
}

#[test]
fn a_selection_of_nothing_is_a_problem_that_lists_what_exists() {
    let run = run(&["devices", "--interfaces", "nosuch", "--json"]).expect(1);
    let error = run.json()["selection"]["error"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(error.contains("nosuch") && error.contains("lo"), "{error}");
    // The list is still printed: it helps to choose.
    assert_eq!(row(&run.json(), "lo")["selected"], false);
}
