//! Errors of reaching the memory of another process.

use std::io;

/// One of the two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The process that is running.
    Here,
    /// The neighbour.
    There,
}

/// Reports why the memory of a neighbour could not be reached.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The process has ended, executes another program, or one side has closed the wire.
    #[error("the other process has ended or has closed its socket")]
    Gone,
    /// This process may not reach the other's memory.
    #[error("this process may not reach the memory of the other: {0}")]
    Refused(#[from] Refusal),
    /// Memory is not mapped, or not for this access.
    #[error(
        "memory of {} is not mapped, or not for this access, after {at} bytes",
        match side { Side::Here => "this process", Side::There => "the other process" }
    )]
    Fault {
        /// The process whose memory it is.
        side: Side,
        /// Number of bytes moved before the fault.
        at: usize,
    },
    /// The kernel refuses for another reason.
    #[error("cannot reach the memory of the other process: {0}")]
    System(#[from] io::Error),
}

/// The permission that a process lacks to reach the memory of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// This process cannot reach even its own memory: the system call is missing or filtered.
    #[error(
        "process_vm_readv is not available here. Containers forbid it by seccomp unless they have \
         CAP_SYS_PTRACE or a newer profile"
    )]
    Filtered,
    /// The other process has no process id in this PID namespace.
    #[error("it is in another PID namespace. Let both containers share one")]
    OtherNamespace,
    /// The other process runs as another user or group.
    #[error(
        "it runs as user {uid}, group {gid}. Run both as the same user, or this one with \
         CAP_SYS_PTRACE"
    )]
    OtherUser {
        /// The user of the other process.
        uid: u32,
        /// Its group.
        gid: u32,
    },
    /// The security module Yama forbids it.
    #[error(
        "kernel.yama.ptrace_scope is {scope}. {}",
        match scope {
            1 => "Set it to 0, give this process CAP_SYS_PTRACE, or let the other one call \
                  prctl(PR_SET_PTRACER)",
            2 => "Set it to 0, or give this process CAP_SYS_PTRACE",
            _ => "No process may, until the machine is rebooted with a lower value",
        }
    )]
    Yama {
        /// The value of `kernel.yama.ptrace_scope`.
        scope: u32,
    },
    /// The other process is protected.
    #[error(
        "it has capabilities that this process lacks, or is not dumpable. Give this process \
         CAP_SYS_PTRACE"
    )]
    Protected,
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        let kind = match error {
            Error::Gone => io::ErrorKind::ConnectionReset,
            Error::Refused(_) => io::ErrorKind::PermissionDenied,
            Error::Fault { .. } => io::ErrorKind::Other,
            Error::System(error) => return error,
        };
        Self::new(kind, error)
    }
}

/// Returns the value of `kernel.yama.ptrace_scope`, 0 where there is none.
pub(super) fn ptrace_scope() -> u32 {
    let text = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
    text.ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(0)
}
