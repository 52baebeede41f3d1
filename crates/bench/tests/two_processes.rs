//! Small measurements over two real processes on loopback. The second process is this test binary
//! again, which runs `peer_process` when an environment variable says so.

use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use tcpx::Config;
use tcpx_bench::Error;
use tcpx_bench::bootstrap::{BootstrapError, Channel};
use tcpx_bench::measure::{Bench, CaseResult, Extras, Progress, Step};
use tcpx_bench::path::Path;
use tcpx_bench::peer::{Program, Remote, Server, ServerEvent, serve_stdin};
use tcpx_bench::place::{Place, Places};
use tcpx_bench::report::Report;
use tcpx_bench::soak::SoakOptions;
use tcpx_bench::suite::{Case, Options, cases};
use tcpx_bench::workload::Op;

const MARK: &str = "TCPX_BENCH_TEST_PEER";

/// Runs the second process, when the binary is started as one; otherwise does nothing.
#[test]
fn peer_process() {
    if std::env::var_os(MARK).is_some() {
        serve_stdin(loopback()).unwrap();
    }
}

fn program() -> Program {
    let mut program = Program::same(["--exact", "peer_process", "--nocapture"]).unwrap();
    program.environment = vec![(MARK.into(), "1".into())];
    program
}

/// Returns a configuration that ignores the environment of the test run.
fn loopback() -> Config {
    let mut config = Config::defaults();
    config.set("interfaces", "lo").unwrap();
    config
}

fn small() -> Vec<Case> {
    let options = Options {
        sizes: vec![1, 4096, 1_000_003],
        block_sizes: vec![0, 1000],
        iterations: Some(12),
        warmup: Some(1),
        ..Options::default()
    };
    cases(&options).unwrap()
}

#[derive(Default)]
struct Log {
    started: usize,
    finished: usize,
    done: f64,
}

impl Progress for Log {
    fn started(&mut self, index: usize, count: usize, _: &Case) {
        assert!(index < count);
        self.started += 1;
    }

    fn step(&mut self, step: Step) {
        if let Step::Measuring { done, .. } = step {
            self.done = done;
        }
    }

    fn finished(&mut self, _: &CaseResult) {
        self.finished += 1;
        assert_eq!(self.done, 1.0);
    }
}

fn check(results: &[CaseResult]) {
    for result in results {
        let floor = result.floor.as_ref().expect("the floor was asked for");
        assert_eq!(result.engine.iterations, 12, "{}", result.name);
        assert_eq!(floor.measured.iterations, 12, "{}", result.name);
        assert!(result.verified && result.engine.gb_per_s > 0.0 && floor.ratio > 0.0);
        assert!(result.engine.latency.p50_us <= result.engine.latency.p99_us);
        assert!(result.engine.cpu.total > 0.0);
    }
}

#[test]
fn a_suite_a_report_and_the_extras_on_this_machine() {
    let mut config = loopback();
    config.set("lanes", "2").unwrap();
    let mut bench = Bench::spawn(&program(), Places::default(), config).unwrap();
    let cases = small();
    let mut log = Log::default();
    let results = bench.run(&cases, Extras::default(), &mut log).unwrap();
    assert_eq!((log.started, log.finished), (cases.len(), cases.len()));
    assert_eq!(results.len(), cases.len());
    check(&results);

    let mut report = Report::new(&mut bench, vec!["test".into()]);
    report.cases = results;
    report.prepare = bench.run_prepare(&[500]).unwrap();
    report.idle = Some(bench.run_idle(Duration::from_millis(100)).unwrap());
    report.idle_peers = Some(bench.run_idle_peers(3).unwrap());
    let options = SoakOptions {
        duration: Duration::from_millis(500),
        sample_every: Duration::from_millis(100),
    };
    let mut heard = 0;
    let never = AtomicBool::new(false);
    let soak = bench
        .run_soak(&options, &never, &mut |_| heard += 1)
        .unwrap();
    assert_eq!(heard, soak.samples.len());
    assert!(soak.transfers >= soak.verified && soak.verified > 0);
    report.soak = Some(soak);

    assert_eq!(report.lanes, 2);
    assert_eq!(report.target_machine, None, "both are on this machine");
    assert!(
        report
            .settings
            .iter()
            .any(|row| row.key == "lanes" && row.value == "2")
    );
    assert_eq!(Report::from_json(&report.to_json()).unwrap(), report);
    assert!(report.to_html().unwrap().contains("READ 4 KiB"));
}

#[test]
fn the_engine_can_be_measured_alone_and_for_a_time() {
    let mut bench = Bench::spawn(&program(), Places::default(), loopback()).unwrap();
    let options = Options {
        sizes: vec![100_000],
        ops: vec![Op::Write],
        duration: Some(Duration::from_millis(50)),
        ..Options::default()
    };
    let extras = Extras {
        floor: false,
        verify: false,
    };
    let results = bench
        .run(&cases(&options).unwrap(), extras, &mut ())
        .unwrap();
    assert!(results[0].floor.is_none() && !results[0].verified);
    assert!(results[0].engine.iterations > 0);
}

/// By default lanes carry the bytes beside the floor; an explicit choice applies to both processes.
#[test]
fn the_path_is_lanes_unless_direct_copies_are_asked_for() {
    let bench = Bench::spawn(&program(), Places::default(), loopback()).unwrap();
    assert_eq!(bench.taken().path, Path::Lanes);
    assert_eq!(bench.taken().why_not.as_deref(), Some("same_host is off"));
    for setting in [Path::SameHost.setting(), "auto"] {
        let mut config = loopback();
        config.set("same_host", setting).unwrap();
        let mut bench = Bench::spawn(&program(), Places::default(), config).unwrap();
        assert_eq!(bench.taken().path, Path::SameHost, "{:?}", bench.taken());
        assert_eq!(bench.taken().why_not, None);
        let results = bench.run(&small(), Extras::default(), &mut ()).unwrap();
        assert!(results.iter().all(|result| result.verified));
        let floors = results.iter().filter(|result| result.floor.is_some());
        assert_eq!(floors.count(), 0, "sockets have no part");
        let report = Report::new(&mut bench, Vec::new());
        assert_eq!(report.path, Path::SameHost);
    }
}

#[test]
fn a_server_outlives_its_clients_and_strangers() {
    let server = Server::bind("127.0.0.1:0".parse().unwrap(), loopback()).unwrap();
    let address = server.address().unwrap();
    let thread = std::thread::spawn(move || {
        let (mut finished, mut failed) = (0, 0);
        server.run(|event| {
            match event {
                ServerEvent::Finished(_) => finished += 1,
                ServerEvent::Failed(..) => failed += 1,
                _ => {}
            }
            finished < 2
        });
        (finished, failed)
    });
    // An unknown client, then two clients one after the other.
    let mut stranger = Channel::connect(&address.to_string(), Duration::from_secs(5)).unwrap();
    stranger.send(b"\"dance\"").unwrap();
    assert!(matches!(
        stranger.receive(),
        Err(BootstrapError::Closed { .. })
    ));
    for _ in 0..2 {
        let timeout = Duration::from_secs(10);
        let address = address.to_string();
        let mut config = loopback();
        config.set("same_host", "off").unwrap();
        let mut bench = Bench::connect(&address, timeout, Places::default(), config).unwrap();
        let results = bench
            .run(&small()[..2], Extras::default(), &mut ())
            .unwrap();
        check(&results);
    }
    assert_eq!(thread.join().unwrap(), (2, 1));
}

#[test]
fn unreachable_peers_and_invalid_options_are_explained() {
    // The local end of a connection: nobody listens there, and nobody else can while it lives.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let held = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let deaf = held.local_addr().unwrap();
    let refused =
        Remote::connect(&deaf.to_string(), Duration::from_secs(5), Place::Host, &[]).unwrap_err();
    assert!(
        matches!(
            refused,
            Error::Bootstrap(BootstrapError::Unreachable { .. })
        ),
        "{refused}"
    );

    let missing = Program {
        path: "/nonexistent/tcpx".into(),
        ..program()
    };
    let error = Remote::spawn(&missing, Place::Host, &[])
        .unwrap_err()
        .to_string();
    assert!(error.contains("/nonexistent/tcpx"), "{error}");

    let mut bench = Bench::spawn(&program(), Places::default(), loopback()).unwrap();
    let options = Options {
        sizes: vec![1 << 40],
        ops: vec![Op::Read],
        ..Options::default()
    };
    let cases = cases(&options).unwrap();
    let error = bench
        .run(&cases, Extras::default(), &mut ())
        .unwrap_err()
        .to_string();
    assert!(error.contains("memory"), "{error}");
}

/// Stages host memory as if it were on a GPU: compares every byte of every case, with and without
/// the floor beside it, and runs the soak in the same way.
#[test]
fn staged_memory_is_verified_too() {
    let mut config = loopback();
    for (key, value) in [
        ("staging", "always"),
        ("lanes", "2"),
        // Small enough that transfers use many slots and wait for them.
        ("chunk_bytes", "64K"),
        ("staging_bytes", "1M"),
    ] {
        config.set(key, value).unwrap();
    }
    let mut bench = Bench::spawn(&program(), Places::default(), config).unwrap();
    let mut cases = small();
    cases.extend(larger());
    let results = bench.run(&cases, Extras::default(), &mut ()).unwrap();
    check(&results);
    let options = SoakOptions {
        duration: Duration::from_millis(500),
        sample_every: Duration::from_millis(100),
    };
    let never = AtomicBool::new(false);
    let soak = bench.run_soak(&options, &never, &mut |_| ()).unwrap();
    assert!(soak.verified > 0);
    // The choices of this side apply to the other too.
    let report = Report::new(&mut bench, Vec::new());
    assert!(
        report
            .settings
            .iter()
            .any(|row| row.key == "staging" && row.value == "always")
    );
}

/// Cases larger than a slot, in blocks of odd sizes.
fn larger() -> Vec<Case> {
    let options = Options {
        sizes: vec![9_000_001],
        block_sizes: vec![0, 4099],
        iterations: Some(12),
        warmup: Some(1),
        ..Options::default()
    };
    cases(&options).unwrap()
}

/// Without a GPU both sides report what is missing, in the words of the driver's crate; with one,
/// device 4096 does not exist either.
#[test]
fn a_gpu_that_is_not_there_is_an_error_in_words() {
    let missing = Place::Vram(4096);
    let reason = tcpx::cuda::device(4096).unwrap_err().to_string();
    let places = |initiator, target| Places { initiator, target };
    let own = Bench::spawn(&program(), places(missing, Place::Host), loopback());
    assert_eq!(own.err().unwrap().to_string(), reason);
    let theirs = Bench::spawn(&program(), places(Place::Host, missing), loopback());
    assert_eq!(
        theirs.err().unwrap().to_string(),
        format!("the other side of the benchmark failed: {reason}")
    );
}

/// A client of another version gets an error about the version, not about a malformed message.
#[test]
fn another_version_is_refused_in_words() {
    let server = Server::bind("127.0.0.1:0".parse().unwrap(), loopback()).unwrap();
    let address = server.address().unwrap().to_string();
    let thread = std::thread::spawn(move || {
        server.run(|event| !matches!(event, ServerEvent::Finished(_)));
    });
    let mut client = Channel::connect(&address, Duration::from_secs(5)).unwrap();
    client
        .send(br#"{"hello":{"version":1,"settings":[]}}"#)
        .unwrap();
    let answer = String::from_utf8(client.receive().unwrap()).unwrap();
    assert!(answer.contains("version 1 of the benchmark"), "{answer}");
    client.send(b"\"quit\"").unwrap();
    thread.join().unwrap();
}

/// A spawned process whose parent is killed at any moment ends by itself.
#[test]
fn a_second_process_is_never_an_orphan() {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let program = program();
    let mut child = Command::new(&program.path)
        .args(&program.arguments)
        .envs(program.environment)
        .stdin(std::os::fd::OwnedFd::from(theirs))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    // The kernel closes the connection of a killed process in the same way.
    drop(ours);
    let deadline = Instant::now() + Duration::from_secs(30);
    while child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < deadline, "the second process lives on");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_process_that_was_not_spawned_by_us_says_so() {
    let program = program();
    let status = Command::new(&program.path)
        .args(&program.arguments)
        .envs(program.environment)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert!(!status.success());
}
