//! The second process, as a test sees it.

mod life;
mod memory;
mod peers;
mod transfer;

use std::collections::HashMap;
use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};

use serde::de::DeserializeOwned;
use serde_json::Value;

pub use self::life::ExhaustedFiles;
pub use self::memory::RemoteMemory;
pub use self::transfer::RemoteTransfer;
use crate::pattern::Mismatch;
use crate::protocol::{Answer, Command, Failure, Opened, Question};
use crate::setup::Setup;
use crate::story::GUARD;

type Reply = Result<Value, Failure>;
type Waiting = Arc<Mutex<HashMap<u64, mpsc::Sender<Reply>>>>;

/// A process with a session of its own. It is killed when this is dropped.
///
/// Commands are answered one after the other; [`RemoteProcess::begin`] does not wait for the
/// answer, so that this process can do something at the same time.
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
        // Settings of the user's environment must not affect tests.
        for (variable, _) in std::env::vars_os() {
            let variable = variable.to_string_lossy().into_owned();
            let ours = ["TCPX_", "NCCL_", "UCCL_"];
            // The log filter and the plugin's own settings are the same for all processes.
            let shared = variable == "TCPX_LOG"
                || variable == crate::memory::PLACES
                || variable.starts_with("TCPX_EMU_")
                || variable.starts_with("NCCL_") && Setup::names_a_plugin();
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
                    // The caller may have given up.
                    let _ = asked.send(answer.result);
                }
            }
            // No more answers come: the closed channel tells the waiting callers.
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

    /// Starts a new session, replacing the old one, which is closed.
    pub fn reopen(&self, setup: &Setup) {
        self.open_with(setup.pairs(&self.name));
    }

    /// Does what [`RemoteProcess::reopen`] does, with only these settings and the process's
    /// environment.
    pub fn open_with(&self, settings: Vec<(String, String)>) {
        let opened: Opened = self.expect(Command::Open { settings });
        *lock(&self.opened) = Some(opened);
    }

    /// Returns the name of its session.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the connection info of its session.
    ///
    /// # Panics
    /// When it has none.
    #[must_use]
    pub fn info(&self) -> Vec<u8> {
        lock(&self.opened).as_ref().expect("a session").info.clone()
    }

    /// Returns the addresses of its session.
    ///
    /// # Panics
    /// When it has none.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        let opened = lock(&self.opened);
        opened.as_ref().expect("a session").addresses.clone()
    }

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

    /// Executes a command and waits for its answer.
    ///
    /// # Errors
    /// The engine's error.
    ///
    /// # Panics
    /// When the process has ended or hangs.
    pub fn call<T: DeserializeOwned>(&self, command: Command) -> Result<T, Failure> {
        self.begin(command).result()
    }

    /// Does what [`RemoteProcess::call`] does, for a command that must succeed.
    #[track_caller]
    pub fn expect<T: DeserializeOwned>(&self, command: Command) -> T {
        self.begin(command).get()
    }
}

impl fmt::Debug for RemoteProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {:?}", self.name)
    }
}

/// An answer that was not awaited yet.
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
    /// The engine's error.
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
    /// Waits for the answer, which must confirm the expected memory.
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

/// Returns the program of the second process, which cargo has built beside the tests.
///
/// # Panics
/// When it is missing.
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
