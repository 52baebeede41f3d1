//! Tests lanes whose payload a NCCL net plugin carries: pairing, faults of the plugin, and memory
//! that it cannot use. Everything else about them is in the other files, which run on them too
//! (`TCPX_TEST_CONFIG`).
//!
//! The plugin is the emulator. It reads its own settings from the environment of its process, so
//! both sides of each story are processes of their own here. Receives into device memory, which the
//! emulator's plain versions do not support, are tested on the plugin of the loader's tests.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tcpx::{CommCause, Config, Error, ErrorKind, Features, Op, Session, Transfer};
use tcpx_testkit::pattern::{LOCAL_POISON, REMOTE_POISON};
use tcpx_testkit::protocol;
use tcpx_testkit::remote::binary;
use tcpx_testkit::{
    Content, Copy, Expected, GUARD, Host, RemoteMemory, RemoteProcess, Setup, story, wait_until,
};

const LEN: usize = 5 << 20;

/// Returns the emulator, which cargo builds beside the tests.
fn emulator() -> String {
    let test = std::env::current_exe().expect("a running program has a path");
    let file = "libnccl_net_tcpx_emu.so";
    let beside: Vec<PathBuf> = test
        .ancestors()
        .skip(1)
        .take(2)
        .map(|d| d.join(file))
        .collect();
    let found = beside.iter().find(|path| path.exists());
    let found = found.unwrap_or_else(|| panic!("none of {beside:?}: cargo build -p tcpx-emu"));
    found.to_string_lossy().into_owned()
}

fn setup(version: u32) -> Setup {
    Setup::lanes1_workers1()
        .with("transport", "plugin")
        .with("plugin", emulator())
        .with("plugin_version", version)
        .with("lanes", 2)
        .with("chunk_bytes", "1M")
        .with("staging", "auto")
}

/// Builds a plugin that writes to device memory, where its bytes are visible once they are flushed;
/// `name` is unique among the tests.
fn flushing(name: &str, version: u32, options: &[&str]) -> Setup {
    let source =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../ncclnet/tests/plugins/loop_plugin.c");
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("libnccl-net-{name}.so"));
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let status = Command::new(compiler)
        .args(["-shared", "-fPIC", "-O1", "-pthread"])
        .arg(format!("-DAPI_VERSION={version}"))
        .args(options)
        .args([source.as_os_str(), "-o".as_ref(), library.as_os_str()])
        .status();
    assert!(status.expect("these tests need a C compiler").success());
    setup(version)
        .with("plugin", library.to_string_lossy())
        .with("staging", "always")
}

/// Builds a CUDA driver made of ordinary memory, with two GPUs; returns its folder.
fn fake_driver() -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cuda/tests/fake/driver.cpp");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake-cuda");
    std::fs::create_dir_all(&folder).expect("a place for files of tests");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let status = Command::new(compiler)
        .args(["-std=c++17", "-O2", "-shared", "-fPIC"])
        .args(["-fno-strict-aliasing", "-w"])
        .args([source.as_os_str(), "-o".as_ref()])
        .arg(folder.join("libcuda.so.1"))
        .status();
    assert!(status.expect("these tests need a C++ compiler").success());
    folder
}

/// Returns a process whose emulator has these settings.
fn process(name: &str, setup: &Setup, emulator: &[(&str, &str)]) -> RemoteProcess {
    let mut command = Command::new(binary());
    for (key, value) in emulator {
        command.env(format!("TCPX_EMU_{key}"), value);
    }
    let process = RemoteProcess::spawn(name, command);
    process.reopen(setup);
    process
}

/// Two processes that know each other, with memory.
struct Stage {
    alice: RemoteProcess,
    bob: RemoteProcess,
    here: RemoteMemory,
    there: RemoteMemory,
}

impl Stage {
    fn new(alice: RemoteProcess, bob: RemoteProcess) -> Self {
        alice.knows_info(&bob.info());
        bob.knows_info(&alice.info());
        let (here, there) = (alice.memory(LEN), bob.memory(LEN));
        Self {
            alice,
            bob,
            here,
            there,
        }
    }

    fn with(setup: &Setup, emulator: &[(&str, &str)]) -> Self {
        Self::new(
            process("alice", setup, emulator),
            process("bob", setup, emulator),
        )
    }

    /// Moves `copies` and checks every byte of both sides if that succeeds; otherwise returns the
    /// error.
    fn attempt(&self, op: Op, copies: &[Copy], seed: u64) -> Result<(), protocol::Failure> {
        let content = Content::pattern(seed);
        let mut expected = match op {
            Op::Write => {
                self.alice.fill(&self.here, content);
                self.bob.poison(&self.there);
                Expected::untouched(REMOTE_POISON)
            }
            Op::Read => {
                self.bob.fill(&self.there, content);
                self.alice.fill(&self.here, Content::Byte(LOCAL_POISON));
                Expected::untouched(LOCAL_POISON)
            }
        };
        for copy in copies {
            let (from, to) = match op {
                Op::Write => (copy.local, copy.remote),
                Op::Read => (copy.remote, copy.local),
            };
            expected.put(to, copy.len, content.skip(from));
        }
        let transfer = self
            .alice
            .transfer(op, "bob", &self.here, &self.there.descriptor, copies);
        transfer.post()?;
        transfer.wait()?;
        match op {
            Op::Write => self.bob.check(&self.there, &expected),
            Op::Read => self.alice.check(&self.here, &expected),
        }
        Ok(())
    }

    /// Tries every way of moving bytes, while `outcome` returns true.
    fn everything(&self, mut outcome: impl FnMut(Result<(), protocol::Failure>, &str) -> bool) {
        let whole = vec![Copy::new(0, 0, LEN)];
        let odd = vec![Copy::new(13, 7777, LEN - 10_000)];
        let blocks: Vec<_> = (0..128)
            .map(|i| Copy::new(i * (16 << 10), ((i * 77) % 128) * (40 << 10), 16 << 10))
            .collect();
        let ragged: Vec<_> = (0..400)
            .map(|i| Copy::new(i * 9001, i * 9001 + 1, 8192 + i % 700))
            .collect();
        let small = vec![Copy::new(5, 6, 7000)];
        let lists = [
            ("whole", whole),
            ("odd", odd),
            ("blocks", blocks),
            ("ragged", ragged),
            ("small", small),
        ];
        for (seed, (name, copies)) in lists.iter().enumerate() {
            for op in [Op::Write, Op::Read] {
                let result = self.attempt(op, copies, seed as u64 + 1);
                if !outcome(result, &format!("{op:?} {name}")) {
                    return;
                }
            }
        }
    }
}

/// Checks that everything is moved correctly, whatever the plugin does.
fn works(setup: &Setup, emulator: &[(&str, &str)]) {
    let stage = Stage::with(setup, emulator);
    stage.everything(|outcome, what| {
        outcome.unwrap_or_else(|e| panic!("{what} with {emulator:?}: {e:?}"));
        true
    });
    assert_eq!(stage.alice.lanes("bob").len(), 2);
}

/// Checks that everything is moved correctly although lanes are lost, and that they come back.
fn recovers(setup: &Setup, emulator: &[(&str, &str)]) {
    let stage = Stage::with(setup, emulator);
    for _ in 0..2 {
        stage.everything(|outcome, what| {
            outcome.unwrap_or_else(|e| panic!("{what} with {emulator:?}: {e:?}"));
            true
        });
    }
    let lost = stage.alice.figures().peer("bob").lanes_lost;
    assert!(
        lost > 0,
        "{emulator:?} has done no harm: the test tests nothing"
    );
    wait_until("all lanes are back", || stage.alice.lanes("bob").len() == 2);
}

/// Checks that each transfer is done and right, or has failed, and that no process hangs or dies.
fn survives(setup: &Setup, emulator: &[(&str, &str)]) {
    let setup = setup
        .with("peer_timeout", "1s")
        .with("connect_timeout", "5s");
    let stage = Stage::with(&setup, emulator);
    let mut failed = 0;
    for _ in 0..2 {
        // Some faults take a second to be noticed: a few transfers are enough.
        stage.everything(|outcome, _| {
            failed += usize::from(outcome.is_err());
            failed < 4
        });
    }
    assert!(
        failed > 0,
        "{emulator:?} has done no harm: the test tests nothing"
    );
    // Both processes still work.
    let (one, other) = (stage.alice.memory(100), stage.bob.memory(100));
    stage.alice.deregister(&one);
    stage.bob.deregister(&other);
}

#[test]
fn every_version_moves_every_byte() {
    for version in [6, 7, 8] {
        story(move || works(&setup(version), &[]));
    }
}

#[test]
fn fragments_may_be_odd_and_in_any_order() {
    story(|| {
        works(
            &setup(7),
            &[("FRAG", "odd"), ("REORDER", "2"), ("STALE_CNT", "1")],
        )
    });
    story(|| {
        works(
            &setup(7),
            &[
                ("FRAG", "short"),
                ("REORDER", "1"),
                ("NSOCKS", "4"),
                ("CHUNK", "8192"),
            ],
        )
    });
}

#[test]
fn a_slow_and_reluctant_plugin_is_waited_for() {
    for version in [6, 7, 8] {
        let settings = [
            ("NULL_REQ_EVERY", "3"),
            ("DELAY_US", "200"),
            ("SOCKET_BUFFER", "65536"),
            ("PENDING_CALLS", "20"),
            ("PENDING_MS", "300"),
        ];
        story(move || works(&setup(version), &settings));
    }
}

#[test]
fn few_bounce_pages_are_enough() {
    story(|| works(&setup(7), &[("PAGES", "300"), ("FRAG", "short")]));
}

#[test]
fn memory_of_devices_is_unpacked_by_them() {
    for version in [6, 7, 8] {
        let setup = setup(version).with("staging", "always");
        story(move || works(&setup, &[("FRAG", "odd"), ("REORDER", "2")]));
    }
}

#[test]
fn comms_are_made_for_the_gpu_that_memory_lies_on() {
    story(|| {
        // Like the real plugin, the emulator has its bounce pages on the GPU that is current where
        // it is called. It refuses memory of another GPU as memory of the current one.
        let driver = fake_driver();
        let log = driver.join("log");
        let file = std::fs::File::create(&log).expect("a place for files of tests");
        let process = |name| {
            let mut command = Command::new(binary());
            command
                .env("LD_LIBRARY_PATH", &driver)
                .env(tcpx_testkit::memory::PLACES, "vram:1")
                .env("TCPX_EMU_DEVMEM", "cuda")
                .env("TCPX_LOG", "tcpx::carrier::comm=debug")
                .env("NO_COLOR", "1")
                .stderr(file.try_clone().expect("it is open"));
            let process = RemoteProcess::spawn(name, command);
            process.reopen(&setup(7));
            process
        };
        let stage = Stage::new(process("alice"), process("bob"));
        stage.everything(|outcome, what| {
            outcome.unwrap_or_else(|e| panic!("{what}: {e:?}"));
            true
        });
        let log = std::fs::read_to_string(&log).expect("written");
        let pages = log.matches("bounce pages").count();
        assert_eq!(pages, 4, "two lanes on two sides:\n{log}");
        assert_eq!(log.matches("bounce pages gpu=1").count(), pages, "{log}");
        assert!(!log.contains("goes through slots"), "{log}");
    });
}

#[test]
fn a_comm_that_is_still_connecting_is_not_closed() {
    story(|| {
        // The plugin returns comms at once and connects them on threads, a little later; it aborts
        // if one is closed before.
        let setup = flushing("eager", 6, &["-DEAGER"]);
        let stage = Stage::new(process("alice", &setup, &[]), process("bob", &setup, &[]));
        let copies = [Copy::new(0, 0, LEN)];
        let there = &stage.there.descriptor;
        let transfer = stage
            .alice
            .transfer(Op::Write, "bob", &stage.here, there, &copies);
        transfer.post().expect("posted");
        // By then the comms are returned. If they were not, or were already connected, this would
        // test nothing.
        std::thread::sleep(Duration::from_millis(150));
        stage.bob.kill();
        // Bob is gone; on a busy machine, only after everything had arrived.
        let _ = transfer.wait();
        // Alice is not.
        let _memory = stage.alice.memory(100);
    });
    story(|| works(&flushing("eager-at-work", 6, &["-DEAGER"]), &[]));
}

#[test]
fn memory_of_devices_is_received_into_and_flushed() {
    for version in 4..=12 {
        // Bytes that are read before they are flushed are missing.
        story(move || works(&flushing(&format!("flushed-{version}"), version, &[]), &[]));
    }
    // More messages than requests: receives keep theirs until they are consumed, and leave one for
    // the flush.
    for (name, option) in [
        ("flushed-kept", "-DKEEPS"),
        ("flushed-freed", "-DNO_CONSUME"),
    ] {
        let options = ["-DMAX_P2P=32768", option];
        story(move || works(&flushing(name, 9, &options), &[]));
    }
}

#[test]
fn a_flush_that_fails_ends_a_lane_and_no_transfer() {
    for version in [4, 8, 12] {
        let name = format!("once-unflushed-{version}");
        story(move || recovers(&flushing(&name, version, &["-DFAIL_FLUSH=10"]), &[]));
    }
}

/// No chunk ever arrives: the plugin is given up.
#[test]
fn flushes_that_always_fail_end_transfers_and_nothing_else() {
    for version in [4, 8, 12] {
        let name = format!("unflushed-{version}");
        story(move || survives(&flushing(&name, version, &["-DFAIL_FLUSH=1"]), &[]));
    }
}

#[test]
fn many_lanes_share_few_devices() {
    story(|| {
        let setup = setup(7).with("lanes", 5).with("workers", 2);
        let stage = Stage::with(&setup, &[]);
        stage.everything(|outcome, what| {
            outcome.unwrap_or_else(|e| panic!("{what}: {e:?}"));
            true
        });
        assert_eq!(stage.alice.lanes("bob").len(), 5);
    });
}

#[test]
fn every_device_has_a_lane() {
    story(|| {
        let settings = [("transport", "plugin".to_owned()), ("plugin", emulator())];
        let open = |name: &str| {
            let mut command = Command::new(binary());
            command.env("TCPX_EMU_NDEV", "3");
            let process = RemoteProcess::spawn(name, command);
            let all = settings.iter().map(|(k, v)| ((*k).to_owned(), v.clone()));
            let name = ("name".to_owned(), name.to_owned());
            let lo = ("interfaces".to_owned(), "lo".to_owned());
            process.open_with(all.chain([name, lo]).collect());
            process
        };
        let stage = Stage::new(open("alice"), open("bob"));
        stage
            .attempt(Op::Write, &[Copy::new(0, 0, LEN)], 1)
            .expect("moved");
        assert!(stage.alice.lanes("bob").len() >= 3);
    });
}

#[test]
fn calls_that_fail_end_a_lane_and_no_transfer() {
    for version in [6, 7, 8] {
        for call in ["isend:5", "irecv:9", "test:9:2", "test:40:6"] {
            story(move || recovers(&setup(version), &[("ERROR", call)]));
        }
    }
    story(|| recovers(&setup(7), &[("ERROR", "irecvConsumed:4")]));
}

#[test]
fn comms_that_are_reset_end_a_lane_and_no_transfer() {
    for version in [6, 7, 8] {
        // Messages that were sent just before are lost with the comm: some must have arrived.
        let nth = if version == 7 { "12" } else { "6" };
        story(move || recovers(&setup(version), &[("RESET", nth)]));
    }
}

#[test]
fn a_plugin_that_only_fails_is_given_up() {
    story(|| {
        let stage = Stage::with(&setup(7), &[("RESET", "1")]);
        for op in [Op::Write, Op::Read] {
            let error = stage.attempt(op, &[Copy::new(0, 0, LEN)], 1);
            let error = error.expect_err("no message arrives");
            assert_eq!(error.kind(), ErrorKind::Disconnected, "{error:?}");
            // The plugin's message, of this side or told by the other.
            assert!(error.text.contains(" failed: "), "{error:?}");
        }
        // Payload that needs no comm still arrives.
        stage
            .attempt(Op::Write, &[Copy::new(5, 6, 7000)], 2)
            .expect("moved");
    });
}

#[test]
fn memory_that_is_refused_goes_another_way() {
    for version in [6, 8] {
        story(move || works(&setup(version), &[("ERROR", "regMr:1")]));
    }
    // The first registrations are those of the buffers that receives are posted on.
    story(|| works(&setup(7), &[("ERROR", "regMr:3")]));
    // If those cannot be registered, receives use host memory.
    story(|| works(&setup(7), &[("ERROR", "regMr:1")]));
}

#[test]
fn connections_that_break_end_transfers_and_nothing_else() {
    for version in [6, 7, 8] {
        story(move || survives(&setup(version), &[("SHORT_RECV", "4")]));
        story(move || survives(&setup(version), &[("DATA_LOSS", "hang:3000000")]));
    }
}

#[test]
fn what_cannot_be_connected_is_an_error_that_says_why() {
    story(|| {
        for (settings, call) in [
            (("FAIL_CONNECT", "all"), "connect"),
            (("ERROR", "listen:1"), "listen"),
            (("ERROR", "accept:2"), "accept"),
        ] {
            // The dialling side learns it, whichever side has failed.
            for (ours, theirs) in [(&[settings][..], &[][..]), (&[], &[settings])] {
                let (alice, bob) = (
                    process("alice", &setup(7), ours),
                    process("bob", &setup(7), theirs),
                );
                let stage = Stage::new(alice, bob);
                let error = stage.alice.connect("bob").expect_err("no comms");
                assert_eq!(error.kind(), ErrorKind::Disconnected, "{error:?}");
                // The other side's half of the same connection may fail first.
                let told = [call, "connect"].map(|call| format!("{call} failed"));
                assert!(
                    told.iter().any(|told| error.text.contains(told)),
                    "{error:?}"
                );
            }
        }
        // Too slow to connect.
        let settings = [("PENDING_MS", "60000")];
        let setup = setup(7).with("connect_timeout", "3s");
        let stage = Stage::new(
            process("alice", &setup, &settings),
            process("bob", &setup, &[]),
        );
        let error = stage.alice.connect("bob").expect_err("not in time");
        assert!(error.text.contains("in time"), "{error:?}");
    });
}

#[test]
fn a_connect_that_blocks_is_given_up_in_time() {
    story(|| {
        let setup = flushing("blocks", 4, &["-DBLOCKS"]).with("connect_timeout", "2s");
        let stage = Stage::new(process("alice", &setup, &[]), process("bob", &setup, &[]));
        let error = stage.alice.connect("bob").expect_err("it takes a minute");
        assert!(error.text.contains("in time"), "{error:?}");
    });
}

#[test]
fn a_plugin_that_takes_no_more_messages_is_noticed() {
    story(|| {
        let setup = flushing("stuck", 8, &["-DSTUCK"]).with("peer_timeout", "2s");
        let setup = setup.with("staging", "auto").with("lanes", 1);
        let stage = Stage::new(process("alice", &setup, &[]), process("bob", &setup, &[]));
        let transfer =
            stage
                .alice
                .endless(Op::Write, "bob", &stage.here, &stage.there.descriptor, LEN);
        transfer.post().expect("posted");
        let error = transfer.wait().expect_err("it is never sent");
        assert_eq!(error.kind(), ErrorKind::Disconnected, "{error:?}");
    });
}

#[test]
fn notifications_do_not_overtake_payload_for_ever() {
    story(|| {
        // So slow that payload still waits when the stream is full, and the peer reads no more of
        // the stream before the payload has come.
        const LEN: usize = 64 << 20;
        let setup = setup(7).with("lanes", 1).with("chunk_bytes", "4M");
        // The notifications are not taken meanwhile.
        let setup = setup.with("queue_bytes", "256M");
        let slow = [("DELAY_US", "20000")];
        let stage = Stage::new(
            process("alice", &setup, &slow),
            process("bob", &setup, &slow),
        );
        let (here, there) = (stage.alice.memory(LEN), stage.bob.memory(LEN));
        stage.alice.fill(&here, Content::pattern(5));
        let target = &there.descriptor;
        let copies = [Copy::new(0, 0, LEN)];
        let write = stage
            .alice
            .transfer(Op::Write, "bob", &here, target, &copies);
        write.post().expect("posted");
        let count = 30_000;
        stage.alice.expect::<()>(protocol::Command::NotifyOften {
            peer: "bob".into(),
            message: vec![7; 1000],
            count,
        });
        write.wait().expect("written");
        let mut heard = 0;
        wait_until("all have come", || {
            heard += stage.bob.notifications().len();
            heard == count
        });
        stage
            .bob
            .check(&there, &Expected::only(Content::pattern(5)));
    });
}

#[test]
fn memory_is_deregistered_when_the_plugin_is_done_with_it() {
    story(|| {
        // The plugin aborts otherwise. It sends so slowly that requests are always outstanding.
        let setup = flushing("slow", 8, &["-DSLOW"]).with("lanes", 1);
        let setup = setup.with("staging", "auto");
        let bob = process("bob", &setup, &[]);
        let there = bob.memory(LEN);
        let alice = Host::open("alice", &setup);
        let peer = alice.meets(&bob);
        for _ in 0..5 {
            let (one, other) = (alice.memory(LEN), alice.memory(LEN));
            let copies = [Copy::new(0, 0, LEN)];
            let [first, second] =
                [&one, &other].map(|here| alice.transfer(Op::Write, &peer, here, &there, &copies));
            first.post().expect("posted");
            second.post().expect("posted");
            std::thread::sleep(Duration::from_millis(5));
            // Aborting the first waits only for the first; meanwhile the memory of the second is
            // revoked.
            std::thread::scope(|scope| {
                let first: &Transfer = &first;
                scope.spawn(|| first.abort());
                scope.spawn(|| other.region.deregister().expect("registered until now"));
            });
            let _ = second.wait(GUARD);
        }
        // Queued after the aborted messages, for which closing would not wait.
        alice.verify_traffic(&peer, &bob, 1);
    });
}

#[test]
fn sides_that_do_not_fit_leave_nothing_behind() {
    story(|| {
        let stage = Stage::new(
            process("alice", &setup(7).with("lanes", 4), &[]),
            process("bob", &setup(8).with("lanes", 4), &[]),
        );
        let connect = || stage.alice.connect("bob").expect_err("they do not fit");
        connect();
        let sides = [&stage.alice, &stage.bob];
        let before = sides.map(RemoteProcess::open_files);
        for _ in 0..20 {
            connect();
        }
        wait_until("as many files are open as before", || {
            let now = sides.map(RemoteProcess::open_files);
            now.iter().zip(before).all(|(now, before)| *now <= before)
        });
    });
}

#[test]
fn sides_that_do_not_fit_say_so() {
    story(|| {
        let stage = Stage::new(
            process("alice", &setup(6), &[]),
            process("bob", &setup(8), &[]),
        );
        let error = stage.alice.connect("bob").expect_err("they do not fit");
        assert_eq!(error.kind(), ErrorKind::Disconnected, "{error:?}");
        let expected = Error::PluginNotConnected {
            peer: "bob".into(),
            cause: CommCause::PluginsDiffer {
                ours: "Socket_v6".into(),
                theirs: "Socket_v8".into(),
            },
        };
        assert!(error.is(&expected), "{error:?}");
    });
}

/// Dials a side with another transport. `lacks` is what the dialling side reports of the peer and
/// of itself, `logged` the peer's log line, in the file `log`.
fn transports_differ(ours: &Setup, theirs: &Setup, lacks: [Features; 2], logged: &str, log: &str) {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(log);
    let file = std::fs::File::create(&path).expect("a place for files of tests");
    let mut command = Command::new(binary());
    command
        .env("TCPX_LOG", "tcpx=warn")
        .env("NO_COLOR", "1")
        .stderr(file);
    let bob = RemoteProcess::spawn("bob", command);
    bob.reopen(theirs);
    let alice = Host::open("alice", ours);
    let error = alice.meets(&bob).connect(GUARD).expect_err("they differ");
    assert_eq!(error.kind(), ErrorKind::NotSupported, "{error}");
    let Error::Incompatible {
        peer,
        peer_lacks,
        session_lacks,
    } = error
    else {
        panic!("{error}");
    };
    assert_eq!((peer.as_str(), [peer_lacks, session_lacks]), ("bob", lacks));
    wait_until("bob has said so too", || {
        let log = std::fs::read_to_string(&path).expect("written");
        log.contains(&format!(
            "error=peer \"alice\" {logged}: set TCPX_TRANSPORT"
        ))
    });
}

#[test]
fn a_dialler_that_requires_a_plugin_learns_that_the_peer_has_none() {
    story(|| {
        let setup = setup(7).with("lanes", 4);
        transports_differ(
            &setup,
            &setup.native(),
            [Features::COMMS, Features::NONE],
            "requires comms of a plugin (transport=plugin) and this session offers native lanes \
             only (transport=tcp)",
            "plugin-dials.log",
        );
    });
}

#[test]
fn a_dialler_without_a_plugin_learns_that_the_peer_requires_one() {
    story(|| {
        let setup = setup(7).with("lanes", 4);
        transports_differ(
            &setup.native(),
            &setup,
            [Features::NONE, Features::COMMS],
            "offers native lanes only (transport=tcp) and this session requires comms of a plugin \
             (transport=plugin)",
            "native-dials.log",
        );
    });
}

#[test]
fn a_plugin_that_is_not_there_is_an_error_that_names_it() {
    let open = |plugin: &str, version: u32| {
        let config = Config::defaults().with("interfaces", "lo").unwrap();
        let config = config.with("transport", "plugin").unwrap();
        let config = config.with("plugin", plugin).unwrap();
        Session::new(config.with("plugin_version", version).unwrap())
    };
    let error = open("/nowhere/libnccl-net-nothing.so", 0).expect_err("not there");
    assert_eq!(error.kind(), ErrorKind::Environment);
    assert!(
        error
            .to_string()
            .contains("/nowhere/libnccl-net-nothing.so"),
        "{error}"
    );
    let error = open(&emulator(), 12).expect_err("no such version");
    assert!(error.to_string().contains("ncclNetPlugin_v12"), "{error}");
}
