//! Unix sockets of one user, in a folder that nobody else can enter.
//!
//! A process listens under a name of its own, and other processes of the same user list the names
//! and connect. The folder is made with mode 0700; one that is a symbolic link, that belongs to
//! another user, or that others can enter is refused. Sockets are made and opened relative to the
//! folder's descriptor, so that a folder which is replaced meanwhile is not used.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, fstat, mkdir, openat, renameat, statat, unlinkat,
};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Uid, geteuid};

use crate::fork::Private;
use crate::stream::Listener;

/// The suffix of the name of every socket.
const SUFFIX: &str = ".sock";

/// The first character of a socket's name until other processes can connect to it.
const UNFINISHED: char = '.';

/// How long a process may take from making a socket until others can connect to it.
const TO_FINISH: Duration = Duration::from_secs(60);

/// A folder of sockets.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    owner: Uid,
    descriptor: Private<OwnedFd>,
}

impl Folder {
    /// Lists the possible folders of this user, the best first: `$XDG_RUNTIME_DIR/NAME`,
    /// `/run/user/UID/NAME`, `/tmp/NAME-UID`. Processes of one user may use different ones, because
    /// services have no `XDG_RUNTIME_DIR`.
    #[must_use]
    pub fn places(name: &str) -> Vec<PathBuf> {
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        places(name, runtime.filter(|path| path.is_absolute()), geteuid())
    }

    /// Lists the folders of all users of this machine, if this is the superuser, who may enter
    /// them.
    #[must_use]
    pub fn places_of_others(name: &str) -> Vec<PathBuf> {
        if !geteuid().is_root() {
            return Vec::new();
        }
        let entries = |of: &str| std::fs::read_dir(of).into_iter().flatten().flatten();
        let runtime = entries("/run/user").map(|user| user.path().join(name));
        let prefix = format!("{name}-");
        let is_ours = |file: &OsStr| {
            let number = file.to_str().and_then(|file| file.strip_prefix(&prefix));
            number.is_some_and(|number| number.parse::<u32>().is_ok())
        };
        let others = entries("/tmp").filter(|entry| is_ours(&entry.file_name()));
        runtime.chain(others.map(|entry| entry.path())).collect()
    }

    /// Makes the folder at the first possible place, or opens the one that exists.
    ///
    /// # Errors
    /// No place can be used. The error is that of the last one.
    pub fn make(places: &[PathBuf]) -> io::Result<Self> {
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for path in places {
            let made = match mkdir(path, Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => Self::open(path),
                Err(error) => Err(error.into()),
            };
            match made {
                // Even the superuser adds no sockets to another user's folder.
                Ok(folder) if folder.owner == geteuid() => return Ok(folder),
                Ok(_) => last = refused("it belongs to another user"),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Opens a folder.
    ///
    /// # Errors
    /// The folder does not exist, others than its owner can enter it, or it belongs to another user
    /// and this is not the superuser.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
        let descriptor = Private::new(|| openat(CWD, path, flags, Mode::empty()))?;
        let found = fstat(&*descriptor)?;
        let (owner, user) = (Uid::from_raw(found.st_uid), geteuid());
        if owner != user && !user.is_root() {
            return Err(refused("it belongs to another user"));
        }
        if found.st_mode & 0o077 != 0 {
            return Err(refused("others than its owner can enter it"));
        }
        Ok(Self {
            path: path.to_owned(),
            owner,
            descriptor,
        })
    }

    /// Returns the path of the folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Lists the names of the sockets in the folder.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let all = self.entries()?;
        let is_name = |name: &String| name.ends_with(SUFFIX) && !name.starts_with(UNFINISHED);
        Ok(all.into_iter().filter(is_name).collect())
    }

    fn entries(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&*self.descriptor)? {
            let entry = entry?;
            if matches!(entry.file_type(), FileType::Socket | FileType::Unknown)
                && let Ok(name) = entry.file_name().to_str()
            {
                names.push(name.to_owned());
            }
        }
        Ok(names)
    }

    /// Listens under a name, which is `stem` with a suffix. The name appears once others can
    /// connect: a name that refuses connections belongs to a process that has ended.
    ///
    /// # Errors
    /// The system is out of a resource.
    pub fn listen(&self, stem: &str) -> io::Result<(Listener, String)> {
        let name = format!("{stem}{SUFFIX}");
        let unfinished = format!("{UNFINISHED}{name}");
        let listener = Listener::bind_path(&self.way_to(&unfinished))?;
        let folder = &*self.descriptor;
        renameat(folder, unfinished.as_str(), folder, name.as_str()).inspect_err(|_| {
            self.remove(&unfinished);
        })?;
        Ok((listener, name))
    }

    /// Connects to the socket of this name, without waiting for its process.
    ///
    /// # Errors
    /// `ConnectionRefused` if its process has ended, `WouldBlock` if it is too busy to accept,
    /// `PermissionDenied` if the process does not belong to the folder's owner.
    pub fn connect(&self, name: &str) -> io::Result<UnixStream> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(self.way_to(name))?)?;
        if rustix::net::sockopt::socket_peercred(&socket)?.uid != self.owner {
            return Err(refused("its process is of another user"));
        }
        let stream = UnixStream::from(socket);
        stream.set_nonblocking(false)?;
        Ok(stream)
    }

    /// Removes a name.
    pub fn remove(&self, name: &str) {
        // Ignore failures: another process was faster.
        let _ = unlinkat(&*self.descriptor, name, AtFlags::empty());
    }

    /// Removes names of processes that have ended.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn sweep(&self) -> io::Result<()> {
        for name in self.entries()? {
            let refuses = |error: &io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
            let is_gone = match name.starts_with(UNFINISHED) {
                true => self.is_old(&name),
                false => self.connect(&name).is_err_and(|error| refuses(&error)),
            };
            if is_gone {
                self.remove(&name);
            }
        }
        Ok(())
    }

    fn is_old(&self, name: &str) -> bool {
        let found = statat(&*self.descriptor, name, AtFlags::SYMLINK_NOFOLLOW);
        let Ok(found) = found else { return false };
        let made = SystemTime::UNIX_EPOCH + Duration::from_secs(found.st_mtime.unsigned_abs());
        made.elapsed().is_ok_and(|age| age > TO_FINISH)
    }

    /// Returns a path through the descriptor, which is also short enough for a socket address.
    fn way_to(&self, name: &str) -> PathBuf {
        let folder = self.descriptor.as_raw_fd();
        PathBuf::from(format!("/proc/self/fd/{folder}/{name}"))
    }
}

fn places(name: &str, runtime: Option<PathBuf>, user: Uid) -> Vec<PathBuf> {
    let user = user.as_raw();
    let usual = PathBuf::from(format!("/run/user/{user}"));
    let mut places: Vec<_> = runtime.into_iter().collect();
    if !places.contains(&usual) {
        places.push(usual);
    }
    let mut places: Vec<_> = places.into_iter().map(|base| base.join(name)).collect();
    places.push(format!("/tmp/{name}-{user}").into());
    places
}

fn refused(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

#[cfg(test)]
mod tests;
