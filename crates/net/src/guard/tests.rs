use super::*;
use crate::pages::{Pages, page};

/// The ways by which a copy reports faults, each with its name.
type Copier = fn(*const u8, *mut u8, usize) -> Result<(), Fault>;

const WAYS: [(&str, Copier); 2] = [
    // SAFETY: the tests own all memory that is mapped where they copy.
    ("usual", |from, to, count| unsafe { copy(from, to, count) }),
    ("system call", by_system_call),
];

#[test]
fn a_copy_reports_memory_that_is_gone() {
    let pages = Pages::new(3);
    let mut own = vec![7; 3 * page()];
    for protection in [libc::PROT_NONE, libc::PROT_READ] {
        pages.protect(1, protection);
        for (name, copy) in WAYS {
            for (at, len) in [
                (0, 1),
                (100, page()),
                (page(), 1),
                (page() - 1, 2),
                (1, 3 * page() - 1),
                (2 * page(), 9),
            ] {
                let is_whole = at + len <= page() || at >= 2 * page();
                let expected = if is_whole { Ok(()) } else { Err(Fault) };
                let into = copy(own.as_ptr(), pages.at(at), len);
                assert_eq!(into, expected, "{name}: {len} bytes to {at}");
                let out = copy(pages.at(at), own.as_mut_ptr(), len);
                let expected = if protection == libc::PROT_READ {
                    Ok(())
                } else {
                    expected
                };
                assert_eq!(out, expected, "{name}: {len} bytes from {at}");
            }
        }
    }
}

#[test]
fn a_file_that_has_become_shorter_is_a_fault() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(2 * page() as u64).unwrap();
    let pages = Pages::new(2);
    // SAFETY: the mapping replaces pages of this test.
    let mapped = unsafe {
        libc::mmap(
            pages.address.cast(),
            2 * page(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_FIXED,
            std::os::fd::AsRawFd::as_raw_fd(&file),
            0,
        )
    };
    assert_eq!(mapped, pages.address.cast());
    let bytes = [1; 64];
    for (name, copy) in WAYS {
        assert_eq!(copy(bytes.as_ptr(), pages.at(page()), 64), Ok(()), "{name}");
    }
    file.set_len(page() as u64).unwrap();
    for (name, copy) in WAYS {
        assert_eq!(
            copy(bytes.as_ptr(), pages.at(page()), 64),
            Err(Fault),
            "{name}"
        );
        assert_eq!(copy(bytes.as_ptr(), pages.at(0), 64), Ok(()), "{name}");
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_probe_looks_at_every_page() {
    let pages = Pages::new(4);
    for gone in 0..4 {
        pages.protect(gone, libc::PROT_NONE);
        for (first, last) in [(0, 0), (0, 3), (1, 2), (3, 3), (2, 3)] {
            let (at, end) = (first * page() + page() - 1, (last + 1) * page());
            let expected = match (first..=last).contains(&gone) {
                true => Err(Fault),
                false => Ok(()),
            };
            assert_eq!(
                probe(pages.at(at), end - at),
                expected,
                "{gone} of {first}..={last}"
            );
        }
        pages.protect(gone, libc::PROT_READ);
    }
    assert_eq!(probe(std::ptr::null(), 0), Ok(()));
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_streamed_copy_reports_memory_that_is_gone() {
    let pages = Pages::new(2);
    let own = vec![7; 2 * page()];
    pages.protect(1, libc::PROT_NONE);
    // SAFETY: both ranges belong to this test; a page is aligned.
    unsafe {
        assert_eq!(stream(own.as_ptr(), pages.at(0), page() / 64), Ok(()));
        assert_eq!(
            stream(own.as_ptr(), pages.at(0), page() / 64 + 1),
            Err(Fault)
        );
        assert_eq!(stream(pages.at(page()), pages.at(0), 1), Err(Fault));
    }
}

#[test]
fn overlapping_ranges_are_copied_as_if_through_a_buffer() {
    let original: Vec<u8> = (0..20_000u32).map(|i| (i % 251) as u8).collect();
    for (from, to, len) in [
        (0, 1, 19_000),
        (1, 0, 19_000),
        (0, 5000, 15_000),
        (5000, 0, 15_000),
        (7, 7, 9000),
        (0, 10_000, 10_000),
    ] {
        let (mut found, mut expected) = (original.clone(), original.clone());
        expected.copy_within(from..from + len, to);
        let start = found.as_mut_ptr();
        // SAFETY: both ranges lie inside the vector.
        let copied = unsafe { copy(start.wrapping_add(from), start.wrapping_add(to), len) };
        assert_eq!(copied, Ok(()));
        assert!(found == expected, "{len} bytes from {from} to {to}");
    }
}

/// Runs a test of this file in a process of its own, since it changes process-wide state.
fn alone(name: &str, body: impl FnOnce()) -> Option<std::process::ExitStatus> {
    const ALONE: &str = "TCPX_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        body();
        return None;
    }
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            &format!("guard::tests::{name}"),
            "--test-threads=1",
        ])
        .env(ALONE, "1")
        .output()
        .unwrap();
    Some(child.status)
}

fn fault_on_purpose() {
    let pages = Pages::new(1);
    pages.protect(0, libc::PROT_NONE);
    // SAFETY: none; the fault is the purpose of this test.
    unsafe { pages.at(0).write_volatile(1) };
}

#[test]
fn other_faults_go_to_the_handler_before() {
    use std::os::unix::process::ExitStatusExt;
    extern "C" fn handler(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
        // SAFETY: `_exit` is async-signal-safe.
        unsafe { libc::_exit(if (*info).si_addr().is_null() { 1 } else { 42 }) }
    }
    let status = alone("other_faults_go_to_the_handler_before", || {
        // SAFETY: a handler that ends the process.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigaction(libc::SIGSEGV, &raw const action, std::ptr::null_mut());
        }
        assert_eq!(probe(std::ptr::without_provenance(64), 1), Err(Fault));
        fault_on_purpose();
    });
    if let Some(status) = status {
        assert_eq!((status.code(), status.signal()), (Some(42), None));
    }
}

#[test]
fn other_faults_end_the_process_by_default() {
    use std::os::unix::process::ExitStatusExt;
    let status = alone("other_faults_end_the_process_by_default", || {
        // SAFETY: the default needs no handler.
        unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
        assert_eq!(probe(std::ptr::without_provenance(64), 1), Err(Fault));
        fault_on_purpose();
    });
    if let Some(status) = status {
        assert_eq!(status.signal(), Some(libc::SIGSEGV));
    }
}

#[test]
fn a_handler_that_replaces_ours_is_noticed() {
    let status = alone("a_handler_that_replaces_ours_is_noticed", || {
        let nowhere = std::ptr::without_provenance(64);
        assert_eq!(probe(nowhere, 1), Err(Fault));
        // SAFETY: the default needs no handler.
        let ours = unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
        check_handlers();
        assert_eq!(way(), BY_SYSTEM_CALL);
        assert_eq!(probe(nowhere, 1), Err(Fault));
        // SAFETY: restores the previous handler.
        unsafe { libc::signal(libc::SIGBUS, ours) };
        check_handlers();
        assert_eq!(way() == BY_HANDLER, handlers::EXIST);
    });
    if let Some(status) = status {
        assert!(status.success());
    }
}

#[test]
fn a_thread_that_blocks_the_signals_is_not_ended_by_a_fault() {
    std::thread::spawn(|| {
        // SAFETY: the set is a local, and the mask that of this thread alone.
        unsafe {
            let mut set = std::mem::zeroed();
            libc::sigfillset(&raw mut set);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut());
        }
        assert_eq!(probe(std::ptr::without_provenance(64), 1), Err(Fault));
    })
    .join()
    .unwrap();
}
