//! Tests help, version, usage errors, and output that nobody reads.

use std::process::Stdio;

use crate::support::{run, tcpx};

#[test]
fn every_command_explains_itself() {
    let commands: [(&[&str], &str); 11] = [
        (&[], "Exit status:"),
        (&["devices"], "tcpx devices --json"),
        (&["doctor"], "Exits with 0 when transfers will work"),
        (&["config"], "TCPX_LANES=8 tcpx config"),
        (&["check"], "tcpx check client"),
        (&["check", "server"], "--keep"),
        (&["check", "client"], "HOST[:PORT]"),
        (&["bench"], "tcpx bench --report bench.html"),
        (&["top"], "the peer's receive window"),
        (&["bench", "server"], "--once"),
        (&["bench", "client"], "HOST[:PORT]"),
    ];
    for (command, expected) in commands {
        let help = run(&[command, &["--help"]].concat()).expect(0);
        assert!(
            help.stdout.contains(expected),
            "{command:?}:\n{}",
            help.stdout
        );
        assert!(
            help.stdout.contains("Usage: tcpx"),
            "{command:?}:\n{}",
            help.stdout
        );
        assert!(
            !help.stdout.contains('\x1b'),
            "colours without a terminal: {command:?}"
        );
        run(&[command, &["-h"]].concat()).expect(0);
    }
}

#[test]
fn the_version_is_printed() {
    let version = run(&["--version"]).expect(0);
    assert_eq!(
        version.stdout,
        format!("tcpx {}\n", env!("CARGO_PKG_VERSION"))
    );
}

#[test]
fn what_cannot_be_understood_is_a_usage_error() {
    let cases: [&[&str]; 12] = [
        &[],
        &["fly"],
        &["devices", "--fast"],
        &["check"],
        &["check", "client"],
        &["check", "client", "node:port"],
        &["check", "server", "--port", "99999"],
        &["doctor", "--log", "tcpx=loud"],
        &["config", "--set", "lanes"],
        &["bench", "--size", "huge"],
        &["bench", "--quick", "--full"],
        &["bench", "--case", "kv8k"],
    ];
    for arguments in cases {
        let refused = run(arguments).expect(2);
        assert!(!refused.stderr.is_empty(), "{arguments:?}");
    }
}

#[test]
fn settings_show_where_they_came_from() {
    let document = run(&["config", "--json", "--lanes", "3"]).expect(0).json();
    let rows = document["settings"].as_array().unwrap();
    let row = |key: &str| rows.iter().find(|row| row["key"] == key).unwrap();
    assert_eq!(row("lanes")["value"], "3");
    assert_eq!(row("interfaces")["value"], "lo");
    assert_eq!(row("interfaces")["source"], "environment (TCPX_INTERFACES)");
    assert_eq!(row("window")["source"], "default");
    assert!(run(&["config"]).expect(0).stdout.contains("TCPX_LANES"));
}

#[test]
fn a_bad_variable_is_named_with_its_value_and_what_was_expected() {
    for command in [&["config"][..], &["check", "server", "--port", "0"]] {
        let refused = tcpx(command).env("TCPX_LANES", "many").output().unwrap();
        assert_eq!(refused.status.code(), Some(2));
        let stderr = String::from_utf8(refused.stderr).unwrap();
        for expected in ["TCPX_LANES", "many", "expected", "1 to 64"] {
            assert!(stderr.contains(expected), "{expected} in {stderr}");
        }
    }
    let refused = run(&["config", "--json", "--set", "speed=fast"]).expect(2);
    assert!(
        refused.json()["error"]["message"]
            .as_str()
            .unwrap()
            .contains("speed")
    );
}

#[test]
fn a_variable_that_is_not_utf8_is_named() {
    use std::os::unix::ffi::OsStrExt;
    let bytes = std::ffi::OsStr::from_bytes(b"4\xff");
    let refused = tcpx(&["config"]).env("TCPX_LANES", bytes).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    let stderr = String::from_utf8(refused.stderr).unwrap();
    assert!(
        stderr.contains("TCPX_LANES") && stderr.contains("UTF-8"),
        "{stderr}"
    );
}

#[test]
fn a_closed_stdout_is_no_error() {
    for arguments in [&["devices"][..], &["config"], &["config", "--json"]] {
        let mut child = tcpx(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
        assert_eq!(
            String::from_utf8(output.stderr).unwrap(),
            "",
            "{arguments:?}"
        );
    }
}

#[test]
fn a_full_disk_is_an_error() {
    let full = std::fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let output = tcpx(&["config"]).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        String::from_utf8(output.stderr)
            .unwrap()
            .contains("No space left")
    );
}

#[test]
fn colours_can_be_forced() {
    let plain = run(&["devices"]).expect(0);
    assert!(!plain.stdout.contains('\x1b'), "{}", plain.stdout);
    let coloured = run(&["devices", "--color", "always"]).expect(0);
    assert!(coloured.stdout.contains('\x1b'), "{}", coloured.stdout);
}

#[test]
fn errors_are_json_documents_with_json() {
    for (words, kind) in [
        (&["config", "--json", "--set", "speed=fast"][..], "config"),
        (&["check", "client", "--json", "--speed"], "usage"),
        (&["--json", "dance"], "usage"),
        (
            &["bench", "client", "--json", "--faults", "127.0.0.1:1"],
            "usage",
        ),
    ] {
        let refused = run(words).expect(2);
        let error = &refused.json()["error"];
        assert_eq!(error["kind"], kind, "{error}");
        for key in ["message", "remedy"] {
            assert!(!error[key].as_str().unwrap().is_empty(), "{error}");
        }
        assert!(refused.stderr.contains("error:"), "{}", refused.stderr);
    }
    // Requested help is no error.
    let help = run(&["config", "--json", "--help"]).expect(0);
    assert!(help.stdout.contains("--json"), "{}", help.stdout);
}
