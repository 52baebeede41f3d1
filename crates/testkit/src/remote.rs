//! The second process, as a test sees it.

use std::collections::HashMap;
use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};

use rustix::process::{Pid, Signal, kill_process};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tcpx::{ErrorKind, Op, RemoteRegion, TransferState};

use crate::host::Host;
use crate::pattern::{Content, Expected, Mismatch, REMOTE_POISON};
use crate::protocol::{
    Answer, Command, Copy, Failure, Hex, Lane, Notice, Opened, Piece, Question, Registered,
    state_named,
};
use crate::setup::Setup;
use crate::story::{GUARD, REMOTE_GUARD, wait_until};

type Reply = Result<Value, Failure>;
type Waiting = Arc<Mutex<HashMap<u64, mpsc::Sender<Reply>>>>;

/// A process with a session of its own. It is killed when this is dropped.
///
/// Commands are answered one after the other; [`RemoteProcess::begin`] does not wait for the answer, so that this
/// process can do something at the same time.
pub struct RemoteProcess {
    name: String,
    child: Mutex<Child>,
    stdin: Mutex<ChildStdin>,
    waiting: Waiting,
    next: AtomicU64,
    opened: Mutex<Option<Opened>>,
    alarm: Mutex<Option<PathBuf>>,
}

impl RemoteProcess {
    /// Starts a process and a session in it.
    #[must_use]
    pub fn open(name: &str, setup: &Setup) -> Self {
        let process = Self::spawn(name, std::process::Command::new(binary()));
        process.reopen(setup);
        process
    }

    /// Starts a process; `command` ends with [`binary`].
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn spawn(name: &str, mut command: std::process::Command) -> Self {
        // What the user has set up for real work is not for tests.
        for (variable, _) in std::env::vars_os() {
            let variable = variable.to_string_lossy().into_owned();
            let ours = ["TCPX_", "NCCL_", "UCCL_"];
            // What is to be seen, and how the emulated plugin behaves, is the same for all.
            let shared = variable == "TCPX_LOG" || variable.starts_with("TCPX_EMU_");
            if ours.iter().any(|p| variable.starts_with(p)) && !shared {
                command.env_remove(variable);
            }
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("cannot start {command:?}: {e}"));
        let stdin = child.stdin.take().expect("piped");
        let stdout = child.stdout.take().expect("piped");
        let waiting = Waiting::default();
        let answers = Arc::clone(&waiting);
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                let Ok(line) = line else { break };
                let answer: Answer = serde_json::from_str(&line)
                    .unwrap_or_else(|e| panic!("not an answer ({e}): {line}"));
                let asked = lock(&answers).remove(&answer.id);
                if let Some(asked) = asked {
                    // Whoever asked may have given up.
                    let _ = asked.send(answer.result);
                }
            }
            // Nothing comes any more: those who wait learn it from the closed channel.
            lock(&answers).clear();
        });
        Self {
            name: name.to_owned(),
            child: Mutex::new(child),
            stdin: Mutex::new(stdin),
            waiting,
            next: AtomicU64::new(0),
            opened: Mutex::default(),
            alarm: Mutex::default(),
        }
    }

    /// Starts a new session in place of the old one, which is closed.
    pub fn reopen(&self, setup: &Setup) {
        self.open_with(setup.pairs(&self.name));
    }

    /// As [`RemoteProcess::reopen`], with just these settings and the process's environment.
    pub fn open_with(&self, settings: Vec<(String, String)>) {
        let opened: Opened = self.expect(Command::Open { settings });
        *lock(&self.opened) = Some(opened);
    }

    /// The name of its session.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What one needs to connect to its session.
    ///
    /// # Panics
    /// When it has none.
    #[must_use]
    pub fn info(&self) -> Vec<u8> {
        lock(&self.opened).as_ref().expect("a session").info.clone()
    }

    /// Where its session listens.
    ///
    /// # Panics
    /// When it has none.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        let opened = lock(&self.opened);
        opened.as_ref().expect("a session").addresses.clone()
    }

    // ---- talking to it

    /// Sends a command without waiting for its answer.
    ///
    /// # Panics
    /// When the process has ended.
    pub fn begin<T: DeserializeOwned>(&self, command: Command) -> Pending<'_, T> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, answer) = mpsc::channel();
        lock(&self.waiting).insert(id, sender);
        let mut line = serde_json::to_string(&Question { id, command }).expect("JSON");
        let what: String = line.chars().take(200).collect();
        line.push('\n');
        let sent = lock(&self.stdin).write_all(line.as_bytes());
        if let Err(error) = sent {
            panic!("{self:?} does not take commands any more ({error}): {what}");
        }
        Pending {
            process: self,
            what,
            answer,
            kind: PhantomData,
        }
    }

    /// Has a command carried out.
    ///
    /// # Errors
    /// What the engine said to it.
    ///
    /// # Panics
    /// When the process has ended or hangs.
    pub fn call<T: DeserializeOwned>(&self, command: Command) -> Result<T, Failure> {
        self.begin(command).result()
    }

    /// As [`RemoteProcess::call`], where the engine must have no objection.
    #[track_caller]
    pub fn expect<T: DeserializeOwned>(&self, command: Command) -> T {
        self.begin(command).get()
    }

    // ---- peers

    /// Tells it of the session of this process.
    pub fn knows(&self, host: &Host) {
        self.knows_info(&host.session.connection_info());
    }

    /// Tells it of any session.
    pub fn knows_info(&self, info: &[u8]) {
        let info = info.to_vec();
        let _: String = self.expect(Command::AddPeer { info });
    }

    /// Makes it connect.
    ///
    /// # Errors
    /// It could not.
    pub fn connect(&self, peer: &str) -> Result<(), Failure> {
        let (peer, timeout) = (peer.to_owned(), REMOTE_GUARD);
        self.call(Command::Connect { peer, timeout })
    }

    /// The name of the next peer that has connected to it.
    pub fn accept(&self) -> String {
        self.expect(Command::Accept {
            timeout: REMOTE_GUARD,
        })
    }

    /// Makes it disconnect.
    pub fn disconnect(&self, peer: &str) {
        let peer = peer.to_owned();
        self.expect(Command::Disconnect { peer })
    }

    /// Whether it is connected. To somebody who is unknown it is not.
    ///
    /// # Panics
    /// When the engine has another objection.
    pub fn is_connected(&self, peer: &str) -> bool {
        let peer = peer.to_owned();
        match self.call(Command::IsConnected { peer }) {
            Ok(connected) => connected,
            Err(error) if error.kind() == ErrorKind::NotFound => false,
            Err(error) => panic!("{self:?}: {error}"),
        }
    }

    /// Its lanes to a peer; none to somebody who is unknown.
    ///
    /// # Panics
    /// When the engine has another objection.
    pub fn lanes(&self, peer: &str) -> Vec<Lane> {
        let peer = peer.to_owned();
        match self.call(Command::Lanes { peer }) {
            Ok(lanes) => lanes,
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            Err(error) => panic!("{self:?}: {error}"),
        }
    }

    // ---- memory

    /// Allocates and registers memory in it.
    pub fn memory(&self, len: usize) -> RemoteMemory {
        let registered: Registered = self.expect(Command::Allocate { len });
        RemoteMemory::new(registered, len)
    }

    /// Registers a part of its memory.
    pub fn register(&self, memory: &RemoteMemory, offset: usize, len: usize) -> RemoteMemory {
        let memory = memory.memory;
        let registered: Registered = self.expect(Command::Register {
            memory,
            offset,
            len,
        });
        RemoteMemory::new(registered, len)
    }

    /// Deregisters it; the memory stays.
    pub fn deregister(&self, memory: &RemoteMemory) {
        let region = memory.region;
        self.expect(Command::Deregister { region })
    }

    /// Fills all of it.
    pub fn fill(&self, memory: &RemoteMemory, content: Content) {
        self.begin_fill(memory, content).get();
    }

    /// As [`RemoteProcess::fill`], without waiting.
    pub fn begin_fill(&self, memory: &RemoteMemory, content: Content) -> Pending<'_, ()> {
        self.begin(Command::Put {
            memory: memory.memory,
            offset: 0,
            len: memory.len,
            content,
        })
    }

    /// Fills all of it with what nobody writes.
    pub fn poison(&self, memory: &RemoteMemory) {
        self.fill(memory, Content::Byte(REMOTE_POISON));
    }

    /// Writes these bytes to its start.
    pub fn set_bytes(&self, memory: &RemoteMemory, bytes: &[u8]) {
        let (memory, offset, bytes) = (memory.memory, 0, bytes.to_vec());
        self.expect(Command::SetBytes {
            memory,
            offset,
            bytes,
        })
    }

    /// All of its bytes.
    pub fn bytes(&self, memory: &RemoteMemory) -> Vec<u8> {
        let (memory, offset, len) = (memory.memory, 0, memory.len);
        let Hex(bytes) = self.expect(Command::Bytes {
            memory,
            offset,
            len,
        });
        bytes
    }

    /// Compares all of it.
    ///
    /// # Panics
    /// When a byte is not as expected.
    #[track_caller]
    pub fn check(&self, memory: &RemoteMemory, expected: &Expected) {
        self.begin_check(memory, expected).verify();
    }

    /// As [`RemoteProcess::check`], without waiting: [`Pending::verify`] does.
    pub fn begin_check(
        &self,
        memory: &RemoteMemory,
        expected: &Expected,
    ) -> Pending<'_, Option<Mismatch>> {
        let (memory, expected) = (memory.memory, expected.clone());
        self.begin(Command::Check { memory, expected })
    }

    // ---- transfers

    /// Plans a transfer between its memory and memory of a peer.
    pub fn transfer(
        &self,
        op: Op,
        peer: &str,
        memory: &RemoteMemory,
        target: &RemoteRegion,
        copies: &[Copy],
    ) -> RemoteTransfer<'_> {
        self.transfer_repeated(op, peer, memory, target, copies, 1)
    }

    /// Plans a transfer of `copies` over and over again, which ends only by interference.
    pub fn endless(
        &self,
        op: Op,
        peer: &str,
        memory: &RemoteMemory,
        target: &RemoteRegion,
        chunk_bytes: usize,
    ) -> RemoteTransfer<'_> {
        let len = memory.len.min(target.len());
        let repeat = (Setup::ENDLESS_CHUNKS * chunk_bytes).div_ceil(len);
        self.transfer_repeated(op, peer, memory, target, &[Copy::new(0, 0, len)], repeat)
    }

    fn transfer_repeated(
        &self,
        op: Op,
        peer: &str,
        memory: &RemoteMemory,
        target: &RemoteRegion,
        copies: &[Copy],
        repeat: usize,
    ) -> RemoteTransfer<'_> {
        let pieces = copies.iter().map(|copy| Piece {
            region: memory.region,
            descriptor: 0,
            copy: *copy,
        });
        let id = self.expect(Command::Prepare {
            write: op == Op::Write,
            peer: peer.to_owned(),
            descriptors: vec![Hex(target.to_bytes())],
            pieces: pieces.collect(),
            repeat,
        });
        RemoteTransfer { process: self, id }
    }

    /// Makes it send a tagged message.
    pub fn send(
        &self,
        peer: &str,
        memory: &RemoteMemory,
        offset: usize,
        len: usize,
        tag: u64,
    ) -> RemoteTransfer<'_> {
        let (peer, region) = (peer.to_owned(), memory.region);
        let id = self.expect(Command::Send {
            peer,
            region,
            offset,
            len,
            tag,
        });
        RemoteTransfer { process: self, id }
    }

    /// Makes it wait for a tagged message.
    pub fn recv(
        &self,
        peer: &str,
        memory: &RemoteMemory,
        offset: usize,
        len: usize,
        tag: u64,
    ) -> RemoteTransfer<'_> {
        let (peer, region) = (peer.to_owned(), memory.region);
        let id = self.expect(Command::Receive {
            peer,
            region,
            offset,
            len,
            tag,
        });
        RemoteTransfer { process: self, id }
    }

    // ---- notifications

    /// Makes it send a message on its own.
    pub fn notify(&self, peer: &str, message: &[u8]) {
        let (peer, message) = (peer.to_owned(), message.to_vec());
        self.expect(Command::Notify { peer, message })
    }

    /// The next notification that it gets.
    pub fn notification(&self) -> Notice {
        self.expect(Command::WaitNotification {
            timeout: REMOTE_GUARD,
        })
    }

    /// The next `count` notifications that it gets.
    pub fn next_notifications(&self, count: usize) -> Vec<Notice> {
        let mut all = Vec::new();
        wait_until("all notifications are there", || {
            all.extend(self.notifications());
            all.len() >= count
        });
        all
    }

    /// Whatever notifications it has got.
    pub fn notifications(&self) -> Vec<Notice> {
        self.expect(Command::TakeNotifications)
    }

    // ---- its life

    /// Its application does nothing at all from now on, not even listen to commands.
    ///
    /// # Panics
    /// When it is asleep already.
    pub fn fall_asleep(&self) {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let file = format!("tcpx-testkit-{}-{number}.wake", std::process::id());
        let file = std::env::temp_dir().join(file);
        // Left behind by an earlier process with the same number, perhaps.
        let _ = std::fs::remove_file(&file);
        let before = lock(&self.alarm).replace(file.clone());
        assert!(before.is_none(), "asleep already");
        self.expect(Command::SleepUntil { file })
    }

    /// Ends what [`RemoteProcess::fall_asleep`] began.
    ///
    /// # Panics
    /// When it is awake.
    pub fn wake_up(&self) {
        let file = lock(&self.alarm).take().expect("asleep");
        std::fs::write(&file, []).expect("a file in the temporary directory");
        // Once this is answered it has seen the file.
        self.expect::<()>(Command::Nothing);
        let _ = std::fs::remove_file(file);
    }

    /// How many files and sockets it has open.
    #[must_use]
    pub fn open_files(&self) -> usize {
        let files = format!("/proc/{}/fd", self.pid().as_raw_nonzero());
        std::fs::read_dir(files).map_or(0, Iterator::count)
    }

    /// Kills it, as `kill -9` does.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
        self.ended();
    }

    /// Makes it call `abort()`.
    pub fn crash(&self) {
        drop(self.begin::<()>(Command::Crash));
        self.ended();
    }

    /// Makes it exit with everything open.
    pub fn exit(&self) {
        self.expect::<()>(Command::Exit);
        self.ended();
    }

    /// Stops all its threads; returns once they have stopped.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
        let tasks = format!("/proc/{}/task", self.pid().as_raw_nonzero());
        wait_until("every thread has stopped", || {
            let Ok(tasks) = std::fs::read_dir(&tasks) else {
                return true;
            };
            tasks.flatten().all(|task| {
                let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
                // The name is in parentheses and may hold anything; the state follows.
                stat.rsplit(") ").next().is_none_or(|s| s.starts_with('T'))
            })
        });
    }

    /// Lets it go on after [`RemoteProcess::freeze`].
    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&lock(&self.child))
    }

    fn signal(&self, signal: Signal) {
        // It may be gone.
        let _ = kill_process(self.pid(), signal);
    }

    fn ended(&self) {
        wait_until("the process has ended", || {
            lock(&self.child).try_wait().is_ok_and(|s| s.is_some())
        });
    }
}

impl Drop for RemoteProcess {
    fn drop(&mut self) {
        let child = self.child.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = child.kill();
        let _ = child.wait();
        if let Some(file) = lock(&self.alarm).take() {
            let _ = std::fs::remove_file(file);
        }
    }
}

impl fmt::Debug for RemoteProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {:?}", self.name)
    }
}

/// An answer that has not been looked at yet.
#[must_use]
pub struct Pending<'a, T> {
    process: &'a RemoteProcess,
    what: String,
    answer: mpsc::Receiver<Reply>,
    kind: PhantomData<T>,
}

impl<T: DeserializeOwned> Pending<'_, T> {
    /// Waits for the answer.
    ///
    /// # Errors
    /// What the engine said.
    ///
    /// # Panics
    /// When the process has ended or hangs.
    #[track_caller]
    pub fn result(self) -> Result<T, Failure> {
        let (process, what) = (self.process, self.what);
        let value = match self.answer.recv_timeout(GUARD) {
            Ok(reply) => reply?,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                panic!("{process:?} hangs: no answer after {GUARD:?} to {what}")
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                panic!("{process:?} has ended without an answer to {what}")
            }
        };
        Ok(serde_json::from_value(value)
            .unwrap_or_else(|e| panic!("{process:?}: a strange answer to {what}: {e}")))
    }

    /// Waits for the answer, which must not be an error.
    ///
    /// # Panics
    /// When it is one.
    #[track_caller]
    pub fn get(self) -> T {
        let (process, what) = (self.process, self.what.clone());
        self.result()
            .unwrap_or_else(|e| panic!("{process:?}: {what}: {e}"))
    }
}

impl Pending<'_, Option<Mismatch>> {
    /// Waits for the answer, which must be that the memory is as expected.
    ///
    /// # Panics
    /// When it is not.
    #[track_caller]
    pub fn verify(self) {
        let process = self.process;
        if let Some(mismatch) = self.get() {
            panic!("the memory of {process:?} is wrong {mismatch}");
        }
    }
}

/// Registered memory of a [`RemoteProcess`].
#[derive(Clone, Debug)]
pub struct RemoteMemory {
    memory: u64,
    region: u64,
    /// What others need to address it.
    pub descriptor: RemoteRegion,
    /// Bytes in it.
    pub len: usize,
}

impl RemoteMemory {
    /// Names the memory in a [`Command`].
    #[must_use]
    pub fn id(&self) -> u64 {
        self.memory
    }

    /// Names its registration in a [`Command`].
    #[must_use]
    pub fn region_id(&self) -> u64 {
        self.region
    }

    /// From the answer to a [`Command`] that registered `len` bytes.
    ///
    /// # Panics
    /// When its descriptor is none.
    #[must_use]
    pub fn new(registered: Registered, len: usize) -> Self {
        let descriptor =
            RemoteRegion::from_bytes(&registered.descriptor).expect("the engine made it");
        Self {
            memory: registered.memory,
            region: registered.region,
            descriptor,
            len,
        }
    }
}

/// A transfer of a [`RemoteProcess`].
#[derive(Clone, Copy, Debug)]
pub struct RemoteTransfer<'a> {
    process: &'a RemoteProcess,
    id: u64,
}

impl<'a> RemoteTransfer<'a> {
    /// Posts it.
    ///
    /// # Errors
    /// What the engine said.
    pub fn post(&self) -> Result<(), Failure> {
        self.begin_post(None).result()
    }

    /// Posts it with a notification.
    ///
    /// # Errors
    /// What the engine said.
    pub fn post_with_notification(&self, message: &[u8]) -> Result<(), Failure> {
        self.begin_post(Some(message)).result()
    }

    /// Posts it without waiting for the answer.
    pub fn begin_post(&self, notification: Option<&[u8]>) -> Pending<'a, ()> {
        self.process.begin(Command::Post {
            transfer: self.id,
            notification: notification.map(|m| Hex(m.to_vec())),
        })
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// Why it failed.
    pub fn wait(&self) -> Result<(), Failure> {
        self.begin_wait().result()
    }

    /// Waits for its end, without waiting for the answer.
    pub fn begin_wait(&self) -> Pending<'a, ()> {
        let (transfer, timeout) = (self.id, REMOTE_GUARD);
        self.process.begin(Command::Wait { transfer, timeout })
    }

    /// Where it stands.
    pub fn state(&self) -> TransferState {
        let name: String = self.process.expect(Command::Poll { transfer: self.id });
        state_named(&name)
    }

    /// Gives it up.
    pub fn abort(&self) {
        self.process.expect(Command::Abort { transfer: self.id })
    }

    /// Drops it.
    pub fn release(self) {
        self.process.expect(Command::Release { transfer: self.id })
    }

    /// Bytes of the message that a tagged receive got.
    pub fn received(&self) -> u64 {
        self.process.expect(Command::Received { transfer: self.id })
    }
}

/// The program of the second process, which cargo has built beside the tests.
///
/// # Panics
/// When it is not there.
#[must_use]
pub fn binary() -> PathBuf {
    let test = std::env::current_exe().expect("a running program has a path");
    // target/debug/deps/test-0123 → target/debug/tcpx-testpeer
    let binary = test.ancestors().nth(2).map(|d| d.join("tcpx-testpeer"));
    let binary = binary.expect("tests are in target/…/deps");
    assert!(
        binary.exists(),
        "{} is missing: cargo test -p tcpx-testkit builds it",
        binary.display()
    );
    binary
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
