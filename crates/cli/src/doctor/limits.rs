//! Checks limits of the process: open files, locked memory.

use tcpx_bench::units::bytes;

use super::Finding;
use super::machine::Limit;
use crate::units::count;

/// Descriptors that a session needs besides those of its peers: listeners, pollers, wakers, logs.
const OWN_FILES: u64 = 64;
/// Number of peers below which the limit deserves a warning: one rack of eight-GPU machines.
const PEERS: u64 = 32;
/// Bytes that zero-copy sends of one session may pin at once: 8 lanes × 8 MiB in flight.
const PINNED: u64 = 64 << 20;

/// Checks open files. A peer costs one descriptor per lane, and one more while it connects.
pub(super) fn open_files(limit: Limit, lanes: usize) -> Finding {
    const ID: &str = "limits.nofile";
    let each = lanes as u64 + 1;
    let Some(soft) = limit.soft else {
        return Finding::ok(ID, "open files are not limited");
    };
    let room = soft.saturating_sub(OWN_FILES) / each;
    let wanted = OWN_FILES + PEERS * each;
    let found = format!(
        "{soft} open files: room for {room} peers of {}",
        count(lanes, "lane")
    );
    let advice = match limit.hard {
        Some(hard) if hard < wanted => format!(
            "raise the hard limit ({hard}) to {wanted} or more: `* - nofile {wanted}` in \
             /etc/security/limits.conf, or LimitNOFILE={wanted} in the service"
        ),
        _ => format!("run `ulimit -n {wanted}` before starting the application"),
    };
    match room {
        0 => Finding::fail(ID, found, advice),
        1..PEERS => Finding::warn(ID, found, advice),
        _ => Finding::ok(ID, found),
    }
}

/// Checks locked memory. Only zero-copy sends count: memory that CUDA pins for GPUs does not.
pub(super) fn locked_memory(limit: Limit) -> Finding {
    const ID: &str = "limits.memlock";
    match limit.soft {
        None => Finding::ok(ID, "locked memory is not limited"),
        Some(soft) if soft >= PINNED => Finding::ok(ID, format!("{} may be locked", bytes(soft))),
        Some(soft) => Finding::info(
            ID,
            format!(
                "{} may be locked; plain transfers lock nothing, zero-copy sends do (about {})",
                bytes(soft),
                bytes(PINNED)
            ),
        )
        .advise("run `ulimit -l unlimited` before starting an application that uses them"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    fn files(soft: u64, hard: u64) -> Finding {
        open_files(
            Limit {
                soft: Some(soft),
                hard: Some(hard),
            },
            7,
        )
    }

    #[test]
    fn files_are_counted_in_peers() {
        let finding = files(1024, 4096);
        assert_eq!(finding.level, Level::Ok);
        assert_eq!(
            finding.found,
            "1024 open files: room for 120 peers of 7 lanes"
        );
        assert_eq!(files(64 + 31 * 8, 4096).level, Level::Warn);
        assert_eq!(files(64 + 32 * 8, 4096).level, Level::Ok);
        assert_eq!(files(64 + 7, 4096).level, Level::Fail);
        assert_eq!(
            open_files(
                Limit {
                    soft: None,
                    hard: None
                },
                7
            )
            .level,
            Level::Ok
        );
    }

    #[test]
    fn advice_depends_on_the_hard_limit() {
        assert!(files(100, 4096).advice.unwrap().contains("ulimit -n 320"));
        assert!(files(100, 100).advice.unwrap().contains("limits.conf"));
    }

    #[test]
    fn little_locked_memory_is_no_obstacle() {
        let limit = |soft| locked_memory(Limit { soft, hard: None });
        assert_eq!(limit(Some(8 << 20)).level, Level::Info);
        assert_eq!(limit(Some(64 << 20)).level, Level::Ok);
        assert_eq!(limit(None).level, Level::Ok);
    }
}
