//! The file of a trace: its name, its lock and its limit.

use std::ffi::OsString;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Bytes kept free for the end of the file.
const RESERVED: u64 = 4 << 10;

/// The bytes before the first event, between events, and after the last one. Viewers read the file
/// without the last: a process that is killed leaves it so.
const BEGIN: &[u8] = b"[\n";
const BETWEEN: &[u8] = b",\n";
const END: &[u8] = b"\n]\n";

/// A completed file, and the offset at which its last event ends.
#[derive(Debug)]
pub(super) struct Finished {
    path: PathBuf,
    inode: (u64, u64),
    events_end: u64,
}

/// A file that events are appended to, one per line. Never longer than its limit.
pub(super) struct Output {
    file: File,
    path: PathBuf,
    limit: u64,
    /// The offset at which the last event ends.
    end: u64,
    is_empty: bool,
}

impl Output {
    /// Opens the file that a setting names, for this process alone. A file that this process had
    /// completed is continued; any other content of the file is lost.
    pub(super) fn open(
        asked: &Path,
        limit: u64,
        finished: Option<Finished>,
    ) -> Result<Self, (PathBuf, io::Error)> {
        let pid = std::process::id();
        let mut path = expand(asked, pid);
        let mut opened = lock(&path).map_err(|error| (path.clone(), error))?;
        if opened.is_none() {
            // Another process writes to the file: use a name with this process ID.
            path = insert(&path, pid);
            opened = lock(&path).map_err(|error| (path.clone(), error))?;
        }
        let in_use = || io::Error::from(io::ErrorKind::ResourceBusy);
        let file = opened.ok_or_else(|| (path.clone(), in_use()))?;
        let output = Self::resume(file, path.clone(), limit, finished);
        output.map_err(|error| (path, error))
    }

    fn resume(
        mut file: File,
        path: PathBuf,
        limit: u64,
        finished: Option<Finished>,
    ) -> io::Result<Self> {
        let found = file.metadata()?;
        let is_same = |known: &Finished| {
            known.path == path
                && known.inode == (found.dev(), found.ino())
                && known.events_end + END.len() as u64 == found.len()
        };
        let end = match finished.filter(is_same) {
            Some(known) => known.events_end,
            None => 0,
        };
        file.set_len(end)?;
        file.seek(SeekFrom::Start(end))?;
        let mut output = Self {
            file,
            path,
            limit,
            end,
            is_empty: end == 0,
        };
        if output.is_empty {
            output.file.write_all(BEGIN)?;
            output.end = BEGIN.len() as u64;
        }
        Ok(output)
    }

    /// Makes an output whose file cannot be written.
    #[cfg(test)]
    pub(super) fn broken(file: File) -> Self {
        Self {
            file,
            path: "broken".into(),
            limit: 1 << 20,
            end: 0,
            is_empty: true,
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    /// Adds an event to a batch; returns false if the file would exceed its limit.
    pub(super) fn add(&self, batch: &mut Batch, event: &[u8]) -> bool {
        let between = match self.is_empty && batch.bytes.is_empty() {
            true => &[][..],
            false => BETWEEN,
        };
        let after = self.end + (batch.bytes.len() + between.len() + event.len()) as u64;
        if after + RESERVED > self.limit && !batch.is_last {
            return false;
        }
        batch.bytes.extend_from_slice(between);
        batch.bytes.extend_from_slice(event);
        true
    }

    /// Appends a batch. If that fails, the file ends with the last event before the batch.
    pub(super) fn append(&mut self, batch: &mut Batch) -> io::Result<()> {
        let outcome = self.file.write_all(&batch.bytes);
        if outcome.is_ok() {
            self.end += batch.bytes.len() as u64;
            self.is_empty &= batch.bytes.is_empty();
        } else {
            // Truncating succeeds on a full disk, too.
            let _ = self.file.set_len(self.end);
            let _ = self.file.seek(SeekFrom::Start(self.end));
        }
        batch.bytes.clear();
        outcome
    }

    /// Completes the file.
    pub(super) fn finish(mut self) -> io::Result<Finished> {
        self.file.write_all(END)?;
        let found = self.file.metadata()?;
        Ok(Finished {
            path: self.path,
            inode: (found.dev(), found.ino()),
            events_end: self.end,
        })
    }
}

/// Events that are appended together.
#[derive(Default)]
pub(super) struct Batch {
    bytes: Vec<u8>,
    /// Whether the batch may use the reserved bytes.
    is_last: bool,
}

impl Batch {
    pub(super) fn last() -> Self {
        Self {
            is_last: true,
            ..Self::default()
        }
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }
}

/// Opens a file and locks it; returns none if another process holds the lock. A forked child that
/// inherited the file holds it, too.
fn lock(path: &Path) -> io::Result<Option<File>> {
    // Opening a pipe would block until another process reads it.
    if path.metadata().is_ok_and(|found| !found.is_file()) {
        let what = "it is there and is not a regular file";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    let mut options = OpenOptions::new();
    let file = options
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)?;
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => Ok(None),
        // Some file systems have no locks: another writer is not noticed there.
        Ok(()) | Err(TryLockError::Error(_)) => Ok(Some(file)),
    }
}

/// Replaces `%p` by the process ID, and `%%` by a percent sign.
pub(super) fn expand(asked: &Path, pid: u32) -> PathBuf {
    let mut name = Vec::new();
    let mut rest = asked.as_os_str().as_bytes();
    while let Some((&first, behind)) = rest.split_first() {
        match (first, behind.first()) {
            (b'%', Some(b'p')) => name.extend_from_slice(pid.to_string().as_bytes()),
            (b'%', Some(b'%')) => name.push(b'%'),
            _ => {
                name.push(first);
                rest = behind;
                continue;
            }
        }
        rest = &behind[1..];
    }
    OsString::from_vec(name).into()
}

/// Inserts the process ID before the extension of a name.
pub(super) fn insert(path: &Path, pid: u32) -> PathBuf {
    let mut name = path.file_stem().unwrap_or_default().to_owned();
    name.push(format!(".{pid}"));
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}
