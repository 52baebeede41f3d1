//! `tcpx bench --trace`: the timeline of both processes in one file.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use tcpx::{Config, ConfigError};

/// The first and the last bytes of a trace.
const BEGIN: &[u8] = b"[\n";
const END: &[u8] = b"\n]\n";

/// The trace of a measurement.
pub(super) struct Timeline {
    file: PathBuf,
}

impl Timeline {
    pub(super) fn new(file: &Path) -> Self {
        let file = file.to_owned();
        Self { file }
    }

    /// Makes this process record to the file.
    pub(super) fn set(&self, config: Config) -> Result<Config, ConfigError> {
        config.with_trace(PathBuf::from(literal(&self.file)))
    }

    /// Returns the variable that makes the second process record to a file of its own.
    pub(super) fn of_second(&self) -> (OsString, OsString) {
        ("TCPX_TRACE".into(), literal(&self.second()))
    }

    fn second(&self) -> PathBuf {
        let mut name = self.file.clone().into_os_string();
        name.push(".second");
        name.into()
    }

    /// Moves the events of the second process into the file, after both processes have ended.
    pub(super) fn join(&self) -> io::Result<()> {
        let second = self.second();
        let more = fs::read(&second)?;
        let more = more.strip_prefix(BEGIN).filter(|more| more.ends_with(END));
        let more = more.ok_or_else(|| incomplete(&second))?;
        let mut file = OpenOptions::new().read(true).write(true).open(&self.file)?;
        let mut end = [0; END.len()];
        let start = file.seek(SeekFrom::End(-(END.len() as i64)))?;
        file.read_exact(&mut end)?;
        if end != END {
            return Err(incomplete(&self.file));
        }
        file.seek(SeekFrom::Start(start))?;
        file.write_all(b",\n")?;
        file.write_all(more)?;
        fs::remove_file(second)
    }
}

fn incomplete(file: &Path) -> io::Error {
    let what = format!("{} was not completed", file.display());
    io::Error::new(io::ErrorKind::UnexpectedEof, what)
}

/// Returns the setting for a file of exactly this name: percent signs are doubled.
fn literal(file: &Path) -> OsString {
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    let bytes = file.as_os_str().as_bytes().iter();
    let doubled = bytes.flat_map(|&byte| match byte {
        b'%' => vec![byte, byte],
        byte => vec![byte],
    });
    OsString::from_vec(doubled.collect())
}
