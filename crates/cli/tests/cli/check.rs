//! `tcpx check` between two processes over loopback, and every way to miss the other side.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::Command;

use serde_json::Value;

use crate::beside::fake_driver;
use crate::support::{Run, Server, deaf_address, run, tcpx};

fn server(extra: &[&str]) -> Server {
    let base = [
        "check",
        "server",
        "--bind",
        "127.0.0.1",
        "--port",
        "0",
        "--wait",
        "30",
    ];
    Server::start(tcpx(&[&base, extra].concat()))
}

#[test]
fn every_lane_is_verified_on_both_sides() {
    let server = server(&["--json"]);
    let address = server.address.clone();
    let client = run(&["check", "client", &address, "--lanes", "3", "--json"])
        .expect(0)
        .json();
    let server = server.finish().expect(0).json();

    assert_eq!(client["ok"], true);
    let lanes = client["lanes"].as_array().unwrap();
    assert_eq!(lanes.len(), 3);
    for lane in lanes {
        assert_eq!(lane["ok"], true, "{lane}");
        assert!(
            lane["local"].as_str().unwrap().starts_with("127.0.0.1:"),
            "{lane}"
        );
        assert!(lane["round_trip_seconds"].as_f64().unwrap() > 0.0, "{lane}");
        assert!(lane["bytes_sent"].as_u64().unwrap() > 16 << 10, "{lane}");
        assert!(
            lane["bytes_received"].as_u64().unwrap() > 16 << 10,
            "{lane}"
        );
    }
    assert_eq!(server["ok"], true);
    assert_eq!(server["lanes"].as_array().unwrap().len(), 3);
    assert_eq!(server["local"]["name"], client["remote"]["name"]);
    assert_eq!(server["remote"]["name"], client["local"]["name"]);
}

/// Lanes carry payload in any case; what else would carry memory is tried beside them.
#[test]
fn on_one_host_the_path_of_memory_is_named_with_the_reason() {
    let check = |here: &str, there: &str| {
        let server = server(&["--set", &format!("TCPX_SAME_HOST={there}")]);
        let client = ["check", "client", &server.address, "--json"];
        let setting = format!("TCPX_SAME_HOST={here}");
        let report = run(&[&client[..], &["--set", &setting]].concat()).expect(0);
        server.finish().expect(0);
        let path = &report.json()["paths"][0];
        assert_eq!(path["memory"], "host");
        (path["path"].clone(), path["why_not"].clone())
    };
    let direct = (Value::from("same-host"), Value::Null);
    assert_eq!(check("auto", "auto"), direct);
    assert_eq!(check("require", "require"), direct);
    let lanes = |reason: &str| (Value::from("lanes"), Value::from(reason));
    assert_eq!(check("off", "auto"), lanes("same_host is off"));
    assert_eq!(check("auto", "off"), lanes("the peer does not offer it"));
}

/// With a CUDA driver made of ordinary memory.
#[test]
fn memory_of_a_gpu_has_a_path_of_its_own() {
    let driver = fake_driver("check", &[]);
    let with_driver = |mut command: Command| {
        command.env("LD_LIBRARY_PATH", &driver);
        command
    };
    let words = ["check", "server", "--bind", "127.0.0.1", "--port", "0"];
    let server = Server::start(with_driver(tcpx(&words)));
    let client = tcpx(&["check", "client", &server.address, "--json"]);
    let report: Run = with_driver(client).output().unwrap().into();
    let report = report.expect(0).json();
    server.finish().expect(0);
    assert_eq!(report["paths"][1]["memory"], "gpu", "{report}");
    assert_eq!(report["paths"][1]["path"], "same-host", "{report}");
    assert_eq!(report["paths"][1]["why_not"], Value::Null);

    // The server has no GPU.
    let server = Server::start(tcpx(&words));
    let client = tcpx(&["check", "client", &server.address]);
    let run: Run = with_driver(client).output().unwrap().into();
    let text = run.expect(0).stdout;
    server.finish().expect(0);
    assert!(text.contains("Host memory is copied directly"), "{text}");
    assert!(
        text.contains("GPU memory goes over lanes: the peer has none"),
        "{text}"
    );
}

/// Each side chooses its own memory; a GPU that is not there is found before anybody is bothered.
#[test]
fn memory_of_a_gpu_that_is_not_there_is_a_failure_that_says_what_is_missing() {
    for role in [
        &["check", "server", "--port", "0"][..],
        &["check", "client", "127.0.0.1:1"],
    ] {
        let refused = run(&[role, &["--mem", "vram:4096"]].concat()).expect(1);
        assert!(refused.stderr.contains("CUDA"), "{}", refused.stderr);
        let word = run(&[role, &["--mem", "vram"]].concat()).expect(2);
        assert!(word.stderr.contains("vram:N"), "{}", word.stderr);
    }
}

#[test]
fn people_get_a_readable_verdict() {
    let server = server(&[]);
    let address = server.address.clone();
    let client = run(&["check", "client", &address]).expect(0).stdout;
    for expected in [
        "this side",
        "other side",
        "LANE",
        "127.0.0.1:",
        "The connection works:",
    ] {
        assert!(client.contains(expected), "{expected} in:\n{client}");
    }
    let server = server.finish().expect(0).stdout;
    assert!(server.contains("The connection works:"), "{server}");
}

#[test]
fn a_server_that_stays_serves_the_next_client() {
    let server = server(&["--keep"]);
    for _ in 0..3 {
        run(&["check", "client", &server.address]).expect(0);
    }
}

#[test]
fn strangers_do_not_end_a_server() {
    let server = server(&["--timeout", "20"]);
    let mut stranger = std::net::TcpStream::connect(&server.address).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let _ = stranger.read(&mut [0; 16]);
    drop(std::net::TcpStream::connect(&server.address).unwrap());
    run(&["check", "client", &server.address]).expect(0);
    assert!(
        server
            .finish()
            .expect(0)
            .stderr
            .contains("no client of `tcpx check`")
    );
}

#[test]
fn nobody_there_is_refused() {
    let (address, _held) = deaf_address();
    let refused = run(&["check", "client", &address.to_string(), "--json"]).expect(1);
    let error = &refused.json()["error"];
    let message = error["message"].as_str().unwrap();
    assert!(
        message.contains("refused") && message.contains(&address.to_string()),
        "{error}"
    );
    assert_eq!(error["kind"], "bootstrap");
    let remedy = error["remedy"].as_str().unwrap();
    assert!(remedy.contains("start the server there"), "{error}");
    assert!(refused.stderr.contains("error:"), "{}", refused.stderr);
}

#[test]
fn silence_ends_with_a_timeout() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let silent = run(&["check", "client", &address, "--timeout", "0.5"]).expect(1);
    assert!(silent.stderr.contains("no answer"), "{}", silent.stderr);
}

#[test]
fn something_else_on_the_port_is_recognised() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"SSH-2.0-OpenSSH_9.6\r\n").unwrap();
        let _ = stream.read(&mut [0; 1024]);
    });
    let wrong = run(&["check", "client", &address, "--timeout", "5"]).expect(1);
    assert!(
        wrong
            .stderr
            .contains("does not speak the tcpx bootstrap protocol"),
        "{}",
        wrong.stderr
    );
    thread.join().unwrap();
}

#[test]
fn a_taken_port_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let taken = run(&["check", "server", "--bind", "127.0.0.1", "--port", &port]).expect(1);
    assert!(
        taken.stderr.contains("cannot listen on 127.0.0.1:"),
        "{}",
        taken.stderr
    );
}

#[test]
fn a_server_gives_up_when_told_to() {
    let tired = run(&[
        "check",
        "server",
        "--bind",
        "127.0.0.1",
        "--port",
        "0",
        "--wait",
        "0.2",
    ]);
    assert!(tired.expect(1).stderr.contains("nobody connected"));
}
