//! Finds the processes that offer their statistics, and queries them.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use tcpx::stats::{FOLDER, ProcessStats};
use tcpx_net::Folder;

/// The largest answer, in bytes: enough for thousands of peers.
const MAX_ANSWER: u64 = 64 << 20;

/// The result of querying all processes.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    /// Processes that answered, each with the name of its socket, which is unique.
    pub(crate) processes: Vec<(String, ProcessStats)>,
    /// Processes that did not answer.
    pub(crate) silent: Vec<Silent>,
}

/// A process that could not be read.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Silent {
    /// The process ID, in the PID namespace of the process.
    pub(crate) pid: u32,
    /// Why the process could not be read.
    pub(crate) reason: String,
}

/// Folders to search, and which processes to query.
#[derive(Debug, Clone)]
pub(crate) struct Reader {
    places: Vec<PathBuf>,
    /// Query this process only.
    pid: Option<u32>,
    /// How long a process may take to answer.
    timeout: Duration,
}

impl Reader {
    /// Searches the folders of this user; for the superuser, those of all users.
    pub(crate) fn new(pid: Option<u32>, timeout: Duration) -> Self {
        let mut places = Folder::places(FOLDER);
        places.extend(Folder::places_of_others(FOLDER));
        places.sort();
        places.dedup();
        Self {
            places,
            pid,
            timeout,
        }
    }

    /// Queries every process. Removes sockets of processes that have ended.
    pub(crate) fn read(&self) -> Reading {
        let folders: Vec<_> = self
            .places
            .iter()
            .filter_map(|path| Folder::open(path).ok())
            .collect();
        let mut asked = Vec::new();
        for folder in &folders {
            for name in folder.names().unwrap_or_default() {
                let pid = name.split('-').next().and_then(|pid| pid.parse().ok());
                if pid.is_some() && (self.pid.is_none() || self.pid == pid) {
                    asked.push((folder, name, pid.unwrap_or_default()));
                }
            }
        }
        let ask = |folder: &Folder, name: &str| ask(folder, name, self.timeout);
        // Query all at once: a process that does not answer delays none of the others.
        let answers: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = asked
                .iter()
                .map(|(folder, name, _)| scope.spawn(move || ask(folder, name)))
                .collect();
            threads.into_iter().map(|thread| thread.join()).collect()
        });
        let mut reading = Reading::default();
        for ((folder, name, pid), answer) in asked.into_iter().zip(answers) {
            let answer = answer.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            match answer {
                Ok(process) => reading.processes.push((name, process)),
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    folder.remove(&name);
                }
                // The process has ended since the names were listed.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    let reason = reason(&error);
                    reading.silent.push(Silent { pid, reason });
                }
            }
        }
        reading
    }
}

fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "it does not answer".into(),
        io::ErrorKind::InvalidData => "it has another version of tcpx".into(),
        _ => error.to_string(),
    }
}

fn ask(folder: &Folder, name: &str, timeout: Duration) -> io::Result<ProcessStats> {
    let mut stream = folder.connect(name)?;
    let deadline = Instant::now() + timeout;
    stream.set_write_timeout(Some(timeout))?;
    stream.write_all(b"GET /stats HTTP/1.1\r\nHost: localhost\r\n\r\n")?;
    let answer = receive(&mut stream, deadline)?;
    let unreadable = || io::Error::from(io::ErrorKind::InvalidData);
    let end = answer.windows(4).position(|end| end == b"\r\n\r\n");
    let (head, body) = answer.split_at(end.ok_or_else(unreadable)?);
    if !head.starts_with(b"HTTP/1.1 200 ") {
        return Err(unreadable());
    }
    let mut process: ProcessStats = serde_json::from_slice(&body[4..]).map_err(|_| unreadable())?;
    make_printable(&mut process);
    Ok(process)
}

/// Reads to the end of the stream.
fn receive(stream: &mut UnixStream, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut answer = Vec::new();
    let mut buffer = [0; 64 << 10];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || answer.len() as u64 > MAX_ANSWER {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut buffer) {
            Ok(0) => return Ok(answer),
            Ok(count) => answer.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Replaces characters that move the cursor or reverse text: peers choose their own names.
fn make_printable(process: &mut ProcessStats) {
    printable(&mut process.command);
    printable(&mut process.version);
    for nic in &mut process.interfaces {
        printable(&mut nic.name);
    }
    for session in &mut process.sessions {
        printable(&mut session.stats.name);
        for peer in &mut session.stats.peers {
            printable(&mut peer.name);
        }
    }
}

fn printable(text: &mut String) {
    let turns = |c: char| matches!(c, '\u{200e}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let is_bad = |c: char| c.is_control() || turns(c);
    if text.contains(is_bad) {
        *text = text.replace(is_bad, "\u{fffd}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    fn reader(places: Vec<PathBuf>) -> Reader {
        Reader {
            places,
            pid: None,
            timeout: Duration::from_secs(30),
        }
    }

    #[test]
    fn names_cannot_steer_the_terminal() {
        let mut text = "a\x1b[2J\u{202e}b\n".to_owned();
        printable(&mut text);
        assert_eq!(text, "a\u{fffd}[2J\u{fffd}b\u{fffd}");
    }

    #[test]
    fn processes_that_are_gone_are_removed_and_others_are_named() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("tcpx");
        let folder = Folder::make(std::slice::from_ref(&path)).unwrap();
        drop(folder.listen("1-gone").unwrap());
        let other = UnixListener::bind(path.join("2-other.sock")).unwrap();
        let answer = std::thread::spawn(move || {
            let (mut stream, _) = other.accept().unwrap();
            let _ = stream.read(&mut [0; 1024]);
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n{\"pid\": \"two\"}");
        });
        let here = base.path().join("nothing");
        let reading = reader(vec![here, path]).read();
        answer.join().unwrap();
        assert!(reading.processes.is_empty());
        let reason = "it has another version of tcpx".into();
        assert_eq!(reading.silent, [Silent { pid: 2, reason }]);
        assert_eq!(folder.names().unwrap(), ["2-other.sock"]);
    }

    #[test]
    fn a_process_that_does_not_answer_is_given_up() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("tcpx");
        let folder = Folder::make(std::slice::from_ref(&path)).unwrap();
        let _silent = folder.listen("7-silent").unwrap();
        let mut reader = reader(vec![path]);
        reader.timeout = Duration::from_millis(50);
        let reason = "it does not answer".into();
        assert_eq!(reader.read().silent, [Silent { pid: 7, reason }]);
        reader.pid = Some(8);
        assert!(reader.read().silent.is_empty());
    }
}
