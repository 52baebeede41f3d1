//! Endpoints of this user on this host, found without their metadata.
//!
//! `connect_local` names a peer by its GPU only. Each endpoint stores its metadata, which has the
//! secret, in a file that only its user can read, in a folder that nobody else can enter. Files of
//! processes that have ended are removed by the next process that searches the folder.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use super::metadata::Metadata;

/// Numbers the endpoints of this process.
static NEXT: AtomicU32 = AtomicU32::new(0);

/// The metadata of an endpoint, stored where processes of the same user find it until this is
/// dropped.
pub(super) struct Published {
    path: PathBuf,
}

impl Published {
    /// Publishes the metadata of an endpoint on this GPU. Returns `None` if it cannot be stored:
    /// then peers connect by metadata only.
    pub(super) fn new(gpu: i32, metadata: &[u8]) -> Option<Self> {
        let published = Self::write(gpu, metadata);
        published
            .inspect_err(|error| {
                tracing::debug!(target: "tcpx", "peers find this endpoint by its metadata only: {error}");
            })
            .ok()
    }

    fn write(gpu: i32, metadata: &[u8]) -> io::Result<Self> {
        let folder = folder()?;
        sweep(&folder);
        let (space, process) = (process_space()?, std::process::id());
        let started = started(process)?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!("{space}.{process}.{started}.{number}"));
        let unfinished = path.with_extension("new");
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&unfinished)?;
        file.write_all(&gpu.to_le_bytes())?;
        file.write_all(metadata)?;
        // Renamed, so that the file appears complete.
        fs::rename(&unfinished, &path)?;
        Ok(Self { path })
    }
}

impl Drop for Published {
    fn drop(&mut self) {
        // If this fails, the next process that searches the folder removes the file.
        let _ = fs::remove_file(&self.path);
    }
}

/// Finds the newest endpoint on this host whose GPU number and metadata satisfy `fits`.
pub(super) fn find(fits: impl Fn(i32, &Metadata) -> bool) -> Option<Metadata> {
    let folder = folder().ok()?;
    sweep(&folder);
    let space = process_space().ok()?;
    let mut newest = None;
    for (path, owner) in entries(&folder) {
        // Processes of other containers, which may share the folder, do not count as on this host.
        if owner.is_none_or(|owner| owner.space != space) {
            continue;
        }
        let found = || {
            let bytes = fs::read(&path).ok()?;
            let (gpu, metadata) = bytes.split_first_chunk()?;
            let metadata = Metadata::decode(metadata)?;
            let modified = fs::metadata(&path).ok()?.modified().ok()?;
            fits(i32::from_le_bytes(*gpu), &metadata).then_some((modified, metadata))
        };
        if let Some((modified, metadata)) = found()
            && newest.as_ref().is_none_or(|(known, _)| *known < modified)
        {
            newest = Some((modified, metadata));
        }
    }
    newest.map(|(_, metadata)| metadata)
}

/// Returns the folder of this user; creates it if needed.
fn folder() -> io::Result<PathBuf> {
    let user = fs::metadata("/proc/self")?.uid();
    let shared = Path::new("/dev/shm");
    let parent = match shared.is_dir() {
        true => shared.to_owned(),
        false => std::env::temp_dir(),
    };
    let folder = parent.join(format!("tcpx-{user}"));
    match DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    // Does not follow links: a link that another user has put there is no folder.
    let found = fs::symlink_metadata(&folder)?;
    if !found.is_dir() || found.uid() != user || found.mode() & 0o077 != 0 {
        let text = format!("{} is not a private folder of this user", folder.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    Ok(folder)
}

/// The process that owns a file.
struct Owner {
    /// Its PID namespace.
    space: u64,
    process: u32,
    started: u64,
}

/// Lists the files in the folder, with their owners if the name tells.
fn entries(folder: &Path) -> impl Iterator<Item = (PathBuf, Option<Owner>)> {
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    files.map(|file| {
        let name = file.file_name();
        let owner = || {
            let mut parts = name.to_str()?.split('.');
            let owner = Owner {
                space: parts.next()?.parse().ok()?,
                process: parts.next()?.parse().ok()?,
                started: parts.next()?.parse().ok()?,
            };
            // Other names are unfinished files.
            parts.next()?.parse::<u32>().ok()?;
            parts.next().is_none().then_some(owner)
        };
        (file.path(), owner())
    })
}

/// Removes files of processes that have ended.
fn sweep(folder: &Path) {
    let Ok(space) = process_space() else {
        return;
    };
    for (path, owner) in entries(folder) {
        let is_left = owner.is_some_and(|owner| {
            owner.space == space
                && started(owner.process).map_or(true, |started| started != owner.started)
        });
        if is_left {
            let _ = fs::remove_file(path);
        }
    }
}

/// Identifies the PID namespace of this container: process ids are unique only within it.
fn process_space() -> io::Result<u64> {
    Ok(fs::metadata("/proc/self/ns/pid")?.ino())
}

/// Returns the start time of a process, which distinguishes it from another one with the same id.
fn started(process: u32) -> io::Result<u64> {
    let line = fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The program's name, in parentheses, may contain anything; 19 fields lie between it and this
    // one.
    let field = line
        .rsplit_once(')')
        .and_then(|(_, rest)| rest.split_whitespace().nth(19)?.parse().ok());
    field.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}
