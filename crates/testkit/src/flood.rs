//! Floods of connections from processes of their own: `tcpx-testpeer flood ADDRESS HELD [CORE]`.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};

use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, ipproto, socket_with, sockopt};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::remote::binary;

/// A process that connects repeatedly and sends nothing. It is killed when this is dropped.
#[derive(Debug)]
pub struct Flooder(Child);

impl Flooder {
    /// Floods an address, with `held` open connections at any time, on one core if given.
    ///
    /// # Panics
    /// When the process cannot be started.
    #[must_use]
    pub fn start(address: SocketAddr, held: usize, core: Option<usize>) -> Self {
        Self::start_by(Command::new(binary()), address, held, core)
    }

    /// Does what [`Flooder::start`] does; `command` ends with [`binary`].
    ///
    /// # Panics
    /// When the process cannot be started.
    #[must_use]
    pub fn start_by(
        mut command: Command,
        address: SocketAddr,
        held: usize,
        core: Option<usize>,
    ) -> Self {
        command.args(["flood", &address.to_string(), &held.to_string()]);
        command.args(core.map(|core| core.to_string()));
        let child = command.stdin(Stdio::null()).spawn();
        Self(child.expect("a flooder can be started"))
    }
}

impl Drop for Flooder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The main function of the flooding process; never returns.
///
/// # Panics
/// When the arguments are wrong.
pub fn flood(mut arguments: impl Iterator<Item = String>) -> ! {
    let address: SocketAddr = arguments
        .next()
        .and_then(|a| a.parse().ok())
        .expect("ADDRESS");
    let held: usize = arguments.next().and_then(|a| a.parse().ok()).expect("HELD");
    if let Some(core) = arguments.next().map(|c| c.parse().expect("CORE")) {
        let mut cores = CpuSet::new();
        cores.set(core);
        sched_setaffinity(None, &cores).expect("that core");
        // On schedulers that share cores among sessions of processes, the flood gets its own share.
        let _ = rustix::process::setsid();
    }
    let mut open: VecDeque<OwnedFd> = VecDeque::new();
    loop {
        if open.len() >= held.max(1) {
            open.pop_front();
        }
        // If ports or descriptors run out, the flood continues.
        if let Ok(socket) = dial(address) {
            open.push_back(socket);
        } else {
            open.pop_front();
        }
    }
}

/// Begins to connect. Connections are closed by a reset, which frees the port.
fn dial(address: SocketAddr) -> rustix::io::Result<OwnedFd> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
    sockopt::set_socket_linger(&socket, Some(std::time::Duration::ZERO))?;
    match connect(&socket, &address) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(socket),
        Err(error) => Err(error),
    }
}
