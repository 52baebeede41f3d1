//! `tcpx top`: what it prints, and what a real terminal shows.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{Run, run, skip, tcpx};

/// How long something may take to happen, on a machine however busy.
const PATIENCE: Duration = Duration::from_secs(120);

/// Two processes that move bytes until this is dropped: `tcpx bench`, which starts the second one.
struct Load {
    child: Child,
}

impl Load {
    fn start() -> Self {
        let words = ["bench", "--size", "16M", "--block", "0", "--op", "write"];
        let mut command = tcpx(&[&words[..], &["--duration", "1h", "--no-floor"]].concat());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().expect("the binary runs");
        Self { child }
    }

    fn pid(&self) -> String {
        self.child.id().to_string()
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until `look` finds something.
#[track_caller]
fn until<T>(what: &str, mut look: impl FnMut() -> Result<T, String>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match look() {
            Ok(found) => return found,
            Err(last) if Instant::now() > deadline => panic!("{what}: {last}"),
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

/// The session of a process, once it sends.
fn sending(pid: &str) -> Value {
    until("bytes are moved", || {
        let words = ["top", "--json", "--pid", pid, "--interval", "300ms"];
        let document = run(&words).expect(0).json();
        let session = document["sessions"][0].clone();
        match session["sent_bytes_per_second"].as_f64() {
            Some(rate) if rate > 0.0 => Ok(session),
            _ => Err(document.to_string()),
        }
    })
}

#[test]
fn a_process_shows_its_sessions_peers_and_lanes() {
    let load = Load::start();
    let session = sending(&load.pid());
    let name = format!("bench-initiator-{}", load.pid());
    assert_eq!(session["name"], name);
    assert_eq!(session["command"], "tcpx bench");
    assert_eq!(session["version"], env!("CARGO_PKG_VERSION"));
    assert!(session["limit"].is_string(), "{session}");
    let peer = &session["peers"][0];
    assert_eq!(peer["is_connected"], true, "{session}");
    assert_eq!(peer["path"], "loopback", "{session}");
    let lanes = peer["lanes"].as_array().unwrap();
    assert!(lanes.iter().all(|lane| lane["is_up"] == true), "{session}");
    // The other process says the same of this one.
    let other = until("the other process is found", || {
        let document = run(&["top", "--json", "--interval", "300ms"])
            .expect(0)
            .json();
        let sessions = document["sessions"].as_array().unwrap().clone();
        let is_other = |session: &&Value| {
            let peers = session["peers"].as_array().unwrap();
            let from = peers.iter().find(|peer| peer["name"] == *name);
            from.is_some_and(|peer| peer["received_bytes_per_second"].as_f64() > Some(0.0))
        };
        let found = sessions.iter().find(is_other).cloned();
        found.ok_or_else(|| document.to_string())
    });
    assert_ne!(other["pid"], session["pid"]);

    let words = ["top", "--once", "--pid", &load.pid(), "--interval", "300ms"];
    let text = run(&words).expect(0).stdout;
    for word in ["SESSION", "WHAT LIMITS", &name, "loopback"] {
        assert!(text.contains(word), "{word} in:\n{text}");
    }
}

#[test]
fn without_sessions_it_says_how_to_get_some() {
    // No process has this number.
    let text = run(&["top", "--once", "--pid", "4194305"]).expect(0).stdout;
    assert!(text.contains("No tcpx session"), "{text}");
    assert!(text.contains("tcpx bench"), "{text}");
    let document = run(&["top", "--json", "--pid", "4194305"]).expect(0).json();
    assert_eq!(document["sessions"], serde_json::json!([]));
}

#[test]
fn the_live_view_needs_a_terminal() {
    let refused = run(&["top"]).expect(2);
    assert!(refused.stderr.contains("--once"), "{}", refused.stderr);
    run(&["top", "--interval", "1ms"]).expect(2);
}

/// The folder is made by the first session and empty after the last; none is made where that is off.
#[test]
fn sockets_end_with_their_sessions_and_can_be_turned_off() {
    let measure = |folder: &Path, setting: &str| {
        let words = ["bench", "--size", "64K", "--iterations", "3", "--no-floor"];
        let mut command = tcpx(&words);
        command
            .env("XDG_RUNTIME_DIR", folder)
            .env("TCPX_TOP", setting);
        Run::from(command.output().unwrap()).expect(0);
    };
    let folder = tempfile::tempdir().unwrap();
    measure(folder.path(), "off");
    assert_eq!(folder.path().read_dir().unwrap().count(), 0);
    measure(folder.path(), "on");
    let sockets = folder.path().join("tcpx").read_dir().unwrap();
    let left: Vec<_> = sockets.map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// A terminal of its own: a tmux server that nobody else knows.
struct Terminal {
    name: String,
}

impl Terminal {
    /// None where there is no tmux.
    fn open(test: &str, command: &str) -> Option<Self> {
        let name = format!("tcpx-{test}-{}", std::process::id());
        let terminal = Self { name };
        let size = ["-x", "120", "-y", "30"];
        let begin = ["-u", "-f", "/dev/null", "new-session", "-d"];
        match terminal.tmux(&[&begin[..], &size, &[command]].concat()) {
            Ok(_) => Some(terminal),
            Err(why) => {
                skip(test, &format!("tmux is needed ({why})"));
                None
            }
        }
    }

    fn tmux(&self, words: &[&str]) -> Result<String, String> {
        let output = Command::new("tmux")
            .args(["-L", &self.name])
            .args(words)
            .env_remove("TMUX")
            .output()
            .map_err(|error| error.to_string())?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        }
    }

    fn press(&self, key: &str) {
        self.tmux(&["send-keys", key]).unwrap();
    }

    /// Waits until the screen shows all of these.
    #[track_caller]
    fn shows(&self, words: &[&str]) -> String {
        until(&format!("{words:?} on the screen"), || {
            let screen = self.tmux(&["capture-pane", "-p"]).unwrap();
            match words.iter().all(|word| screen.contains(word)) {
                true => Ok(screen),
                false => Err(format!("\n{screen}")),
            }
        })
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.tmux(&["kill-server"]);
    }
}

/// `tcpx top` in a shell that says how it has ended, and whether lines are edited as before.
fn in_shell(pid: &str) -> String {
    let tcpx = env!("CARGO_BIN_EXE_tcpx");
    let top = format!("'{tcpx}' top --interval 300ms --pid {pid}");
    format!("sh -c \"{top}; echo status=$?; stty -a | grep -ow -e '-*icanon'; sleep 600\"")
}

#[test]
fn a_terminal_shows_who_moves_what_and_is_given_back() {
    let load = Load::start();
    let Some(terminal) = Terminal::open("top", &in_shell(&load.pid())) else {
        return;
    };
    let name = format!("bench-initiator-{}", load.pid());
    terminal.shows(&[&name, "loopback", "B/s", "█", "limits", "q quit"]);
    terminal.press("Enter");
    terminal.shows(&["▸ peers", "connected", "bench-target"]);
    terminal.press("Enter");
    terminal.shows(&["▸ lanes", "127.0.0.1:", "ROUND TRIP"]);
    terminal.press("?");
    terminal.shows(&["Help", "Ctrl-C"]);
    terminal.press("x");
    terminal.press("BSpace");
    terminal.shows(&["▸ peers"]);
    drop(load);
    terminal.shows(&["No tcpx session"]);
    terminal.press("q");
    let screen = terminal.shows(&["status=0", "icanon"]);
    assert!(!screen.contains("-icanon"), "{screen}");
    assert!(!screen.contains("No tcpx session"), "{screen}");
}

#[test]
fn a_signal_gives_the_terminal_back() {
    let Some(terminal) = Terminal::open("signal", &in_shell("4194305")) else {
        return;
    };
    terminal.shows(&["No tcpx session"]);
    let shell = terminal.tmux(&["display-message", "-p", "#{pane_pid}"]);
    let shell = shell.unwrap();
    let children = format!("/proc/{0}/task/{0}/children", shell.trim());
    let top = std::fs::read_to_string(children).unwrap();
    let killed = Command::new("kill").args(top.split_whitespace()).status();
    assert!(killed.unwrap().success(), "{top}");
    let screen = terminal.shows(&["status=0", "icanon"]);
    assert!(!screen.contains("-icanon"), "{screen}");
}

#[test]
fn top_ends_with_its_terminal() {
    // Also where nothing tells the process: signals are ignored, as below `nohup`.
    let tcpx = env!("CARGO_BIN_EXE_tcpx");
    let top = format!("sh -c \"trap '' HUP; exec '{tcpx}' top --pid 4194305\"");
    let Some(terminal) = Terminal::open("gone", &top) else {
        return;
    };
    terminal.shows(&["No tcpx session"]);
    let pid = terminal.tmux(&["display-message", "-p", "#{pane_pid}"]);
    let process = Path::new("/proc").join(pid.unwrap().trim());
    assert!(process.exists());
    drop(terminal);
    until("the process ends", || match process.exists() {
        true => Err(String::from("it runs")),
        false => Ok(()),
    });
}
