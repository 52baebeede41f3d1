//! Runs the binary.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Returns the binary under test, with an environment of its own: sessions stay on loopback.
pub(crate) fn tcpx(args: &[&str]) -> Command {
    in_environment(Command::new(env!("CARGO_BIN_EXE_tcpx")), args)
}

/// Prepares `command` with `args`, with no settings of the machine but `TCPX_INTERFACES=lo`.
pub(crate) fn in_environment(mut command: Command, args: &[&str]) -> Command {
    let inherited: Vec<_> = std::env::vars_os().map(|(name, _)| name).collect();
    for name in inherited {
        let text = name.to_string_lossy();
        if ["TCPX_", "NCCL_", "UCCL_"]
            .iter()
            .any(|prefix| text.starts_with(prefix))
        {
            command.env_remove(&name);
        }
    }
    command
        .env("TCPX_INTERFACES", "lo")
        .args(args)
        .stdin(Stdio::null());
    command
}

/// Returns an address where nobody listens, and a connection that has this address as its own,
/// which keeps others from listening there while it lives.
pub(crate) fn deaf_address() -> (SocketAddr, (TcpListener, TcpStream)) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (stream.local_addr().unwrap(), (listener, stream))
}

/// The result of a finished run.
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Run {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("{error} in:\n{}\n{}", self.stdout, self.stderr))
    }

    /// Fails the test, with everything that was printed, unless the exit status is `code`.
    #[track_caller]
    pub(crate) fn expect(self, code: i32) -> Self {
        assert_eq!(
            self.code, code,
            "stdout:\n{}\nstderr:\n{}",
            self.stdout, self.stderr
        );
        self
    }
}

impl From<Output> for Run {
    fn from(output: Output) -> Self {
        Run {
            code: output
                .status
                .code()
                .expect("the binary was killed by a signal"),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

/// Runs to the end.
pub(crate) fn run(args: &[&str]) -> Run {
    tcpx(args).output().expect("the binary runs").into()
}

/// A server in the background; killed when dropped.
pub(crate) struct Server {
    child: Child,
    stderr: BufReader<std::process::ChildStderr>,
    /// Where clients reach it.
    pub(crate) address: String,
}

impl Server {
    /// Starts `command` and waits until it prints its address.
    pub(crate) fn start(mut command: Command) -> Self {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary runs");
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        stderr.read_line(&mut line).unwrap();
        let address = line
            .strip_prefix("Waiting for a client on ")
            .and_then(|rest| rest.split_whitespace().next())
            .unwrap_or_else(|| panic!("unexpected first line {line:?}"))
            .to_owned();
        Server {
            child,
            stderr,
            address,
        }
    }

    /// Waits for it to exit.
    pub(crate) fn finish(mut self) -> Run {
        let deadline = Instant::now() + Duration::from_secs(30);
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status,
                None if Instant::now() > deadline => panic!("the server does not exit"),
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        let (mut stdout, mut stderr) = (String::new(), String::new());
        self.child
            .stdout
            .take()
            .unwrap()
            .read_to_string(&mut stdout)
            .unwrap();
        self.stderr.read_to_string(&mut stderr).unwrap();
        Run {
            code: status.code().unwrap_or(-1),
            stdout,
            stderr,
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reports a skipped test on the real stderr, which the test harness does not capture.
pub(crate) fn skip(test: &str, why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {test}: {why}");
}
