//! A store in a directory that all processes share: `DIRECTORY/RUN/FOLDER/RANK`.

use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use super::{Failure, Gathered, Ranked, Store};

pub(super) struct FileStore {
    root: PathBuf,
}

impl FileStore {
    pub(super) fn open(directory: &str, run: &str) -> Result<Self, Failure> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "_.-~".contains(c);
        if run.is_empty() || !run.chars().all(is_plain) {
            return Err(
                "TCPX_RENDEZVOUS_RUN must tell this run from others, in letters, digits, \
                `_`, `.`, `-` and `~`"
                    .into(),
            );
        }
        Ok(Self {
            root: Path::new(directory).join(run),
        })
    }

    /// Writes a file atomically.
    fn put(&self, folder: &str, rank: usize, value: &[u8]) -> Result<(), Failure> {
        let (folder, fresh) = (self.folder(folder)?, format!("{rank}.new"));
        let mut options = fs::OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let mut file = options.open(folder.join(&fresh))?;
        file.write_all(value)?;
        file.sync_all()?;
        fs::rename(folder.join(fresh), folder.join(rank.to_string()))?;
        Ok(())
    }

    fn values(&self, folder: &str) -> Result<Ranked, Failure> {
        let path = self.root.join(folder);
        // Changing the directory makes an NFS client ask the server instead of its cache.
        let touched = fs::File::open(&path).and_then(|file| file.set_modified(SystemTime::now()));
        match touched {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Ranked::new()),
            other => other?,
        }
        let mut values = Ranked::new();
        for entry in fs::read_dir(&path)? {
            let entry = entry?;
            if let Ok(rank) = entry.file_name().to_string_lossy().parse() {
                values.insert(rank, fs::read(entry.path())?);
            }
        }
        Ok(values)
    }

    fn folder(&self, folder: &str) -> std::io::Result<PathBuf> {
        let path = self.root.join(folder);
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&path)?;
        Ok(path)
    }

    fn look(&self, folder: &str, size: usize) -> Result<Option<Gathered>, Failure> {
        // Read in this order: a process that has left or failed by then stores nothing more.
        let (left, mut failed) = (self.values("left")?, self.values("failed")?);
        let values = self.values(folder)?;
        if values.len() == size {
            return Ok(Some(Gathered {
                values,
                ..Gathered::default()
            }));
        }
        let gone = left.into_keys().filter(|rank| !values.contains_key(rank));
        failed.extend(gone.map(|rank| (rank, b"it has left".to_vec())));
        Ok((!failed.is_empty()).then_some(Gathered {
            values,
            failed,
            members: Ranked::new(),
        }))
    }
}

impl Store for FileStore {
    fn claim(&mut self, rank: usize, value: &[u8]) -> Result<bool, Failure> {
        let claim = self.folder("members")?.join(format!("{rank}.claim"));
        match fs::File::create_new(claim) {
            Ok(_) => self.put("members", rank, value).map(|()| true),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn gather(
        &mut self,
        folder: &str,
        rank: usize,
        value: &[u8],
        size: usize,
        deadline: Instant,
    ) -> Result<Gathered, Failure> {
        self.put(folder, rank, value)?;
        let mut pause = Duration::from_millis(10);
        loop {
            if let Some(gathered) = self.look(folder, size)? {
                return Ok(gathered);
            }
            if Instant::now() >= deadline {
                return Ok(Gathered {
                    values: self.values(folder)?,
                    failed: Ranked::new(),
                    members: self.values("members")?,
                });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(500));
        }
    }

    fn leave(&mut self, rank: usize, size: usize, failure: &str) {
        let folder = if failure.is_empty() { "left" } else { "failed" };
        let _ = self.put(folder, rank, failure.as_bytes());
        let gone = |folder| self.values(folder).map_or(0, |ranks| ranks.len());
        // No process reads any more once all have left.
        if gone("left") + gone("failed") >= size {
            let _ = fs::remove_dir_all(&self.root);
        }
    }
}
