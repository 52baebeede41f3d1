use rustix::process::{DumpableBehavior, set_dumpable_behavior};

use super::super::error::ptrace_scope;
use super::*;

const NOBODY: u32 = 65534;

/// Drops to a user without capabilities, whose memory other processes of that user may access.
fn become_nobody() {
    // SAFETY: changes the user of this process, which has one thread.
    let results = unsafe {
        [
            libc::setgroups(0, std::ptr::null()),
            libc::setresgid(NOBODY, NOBODY, NOBODY),
            libc::setresuid(NOBODY, NOBODY, NOBODY),
        ]
    };
    assert_eq!(results, [0; 3]);
    set_dumpable_behavior(DumpableBehavior::Dumpable).unwrap();
}

fn refusal<T>(result: Result<T, Error>) -> Option<Refusal> {
    match result {
        Ok(_) => None,
        Err(Error::Refused(refusal)) => Some(refusal),
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn memory_of_another_user_is_refused() {
    if !is_root("memory_of_another_user_is_refused") {
        return;
    }
    let nonce = Nonce::new().unwrap();
    let (mut child, wire) = neighbour(|wire| {
        become_nobody();
        let parent = Neighbour::of(&wire).unwrap();
        let result = parent.read_nonce(nonce.address());
        say(&wire, "tried");
        let text = result.as_ref().map_err(ToString::to_string);
        let text = text.err().unwrap_or_default();
        refusal(result) == Some(Refusal::OtherUser { uid: 0, gid: 0 })
            && text.contains("user 0, group 0")
            && next(&wire).is_none()
    });
    // Root may, unless Yama forbids it to everybody.
    if ptrace_scope() < 3 {
        let process = Neighbour::of(&wire).unwrap();
        let bytes = process.read_nonce(nonce.address()).unwrap();
        assert_eq!(&bytes, nonce.bytes());
    }
    expect(&wire, "tried");
    drop(wire);
    assert!(child.wait());
}

#[test]
fn memory_of_a_protected_process_is_refused() {
    if !is_root("memory_of_a_protected_process_is_refused") {
        return;
    }
    for (behavior, expected) in [
        (DumpableBehavior::Dumpable, None),
        (DumpableBehavior::NotDumpable, Some(Refusal::Protected)),
    ] {
        let expected = match ptrace_scope() {
            0 => expected,
            scope => Some(Refusal::Yama { scope }),
        };
        let nonce = Nonce::new().unwrap();
        let (mut owner, to_owner) = neighbour(|wire| {
            become_nobody();
            set_dumpable_behavior(behavior).unwrap();
            let door = Door::open().unwrap();
            say(&wire, door.name());
            next(&wire).is_none()
        });
        let name = String::from_utf8(next(&to_owner).unwrap().0).unwrap();
        let mut user = Child::fork(|| {
            become_nobody();
            let wire = Wire::connect(&name).unwrap();
            let process = Neighbour::of(&wire).unwrap();
            refusal(process.read_nonce(nonce.address())) == expected
        });
        assert!(user.wait(), "{behavior:?}");
        drop(to_owner);
        assert!(owner.wait());
    }
}

/// Makes a system call of this process fail with `error` where its argument has that value.
fn filter(call: libc::c_long, argument: Option<(usize, u32)>, error: libc::c_int) {
    let step = |code: u32, jump_else, k| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: jump_else,
        k,
    };
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let is_equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let answer = libc::BPF_RET | libc::BPF_K;
    let fail = libc::SECCOMP_RET_ERRNO | error as u32;
    let (number, value) = argument.map_or((0, None), |(number, value)| (number, Some(value)));
    // `struct seccomp_data`: the call, and from byte 16 on its arguments, low halves first.
    let mut program = vec![
        step(load, 0, 0),
        step(is_equal, if value.is_some() { 3 } else { 1 }, call as u32),
    ];
    if let Some(value) = value {
        program.push(step(load, 0, 16 + 8 * number as u32));
        program.push(step(is_equal, 1, value));
    }
    program.push(step(answer, 0, fail));
    program.push(step(answer, 0, libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: the program outlives the calls, and affects this process only.
    let results = unsafe {
        [
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
            libc::prctl(
                libc::PR_SET_SECCOMP,
                libc::SECCOMP_MODE_FILTER,
                &raw const program,
            ),
        ]
    };
    assert_eq!(results, [0; 2]);
}

#[test]
fn a_filtered_system_call_is_told_from_a_missing_right() {
    for error in [libc::EPERM, libc::ENOSYS] {
        let nonce = Nonce::new().unwrap();
        let (mut child, _wire) = neighbour(|wire| {
            filter(libc::SYS_process_vm_readv, None, error);
            let process = Neighbour::of(&wire).unwrap();
            refusal(process.read_nonce(nonce.address())) == Some(Refusal::Filtered)
        });
        assert!(child.wait());
    }
}

/// Before Linux 6.5 a socket does not give a descriptor of its peer process.
#[test]
fn the_process_is_found_by_its_number_on_older_kernels() {
    let (mut child, wire) = neighbour(|wire| {
        let option = (2, libc::SO_PEERPIDFD as u32);
        filter(libc::SYS_getsockopt, Some(option), libc::ENOPROTOOPT);
        let parent = Neighbour::of(&wire).unwrap();
        let is_there = !parent.is_gone();
        say(&wire, "have it");
        let has_ended = next(&wire).is_none();
        // The wire has ended: the process id may have been reused.
        is_there && has_ended && matches!(Neighbour::of(&wire), Err(Error::Gone))
    });
    expect(&wire, "have it");
    drop(wire);
    assert!(child.wait());
}

#[test]
fn a_process_in_another_pid_namespace_is_refused() {
    let name = "a_process_in_another_pid_namespace_is_refused";
    if !is_root(name) {
        return;
    }
    let door = Door::open().unwrap();
    let mut child = Child::fork(|| {
        // SAFETY: affects only the process ids of this process's future children.
        if unsafe { libc::unshare(libc::CLONE_NEWPID) } != 0 {
            skipped(name, "a PID namespace cannot be made");
            return true;
        }
        let mut inner = Child::fork(|| {
            let wire = Wire::connect(door.name()).unwrap();
            let credentials = wire.credentials().unwrap();
            credentials.pid.is_none()
                && refusal(Neighbour::of(&wire)) == Some(Refusal::OtherNamespace)
        });
        inner.wait()
    });
    assert!(child.wait());
}

#[test]
fn every_refusal_says_what_to_do() {
    let yama = |scope| Refusal::Yama { scope }.to_string();
    assert!(yama(1).contains("ptrace_scope is 1. Set it to 0, give"));
    assert!(yama(1).contains("PR_SET_PTRACER"));
    assert!(yama(2).contains("CAP_SYS_PTRACE"));
    assert!(yama(3).contains("No process"));
    for (error, kind) in [
        (Error::Gone, std::io::ErrorKind::ConnectionReset),
        (
            Refusal::Filtered.into(),
            std::io::ErrorKind::PermissionDenied,
        ),
    ] {
        let text = error.to_string();
        let error = std::io::Error::from(error);
        assert_eq!((error.kind(), error.to_string()), (kind, text));
    }
}
