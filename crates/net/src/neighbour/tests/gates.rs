use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::*;

fn copy_of(gates: &Gates) -> OwnedFd {
    gates.descriptor().try_clone_to_owned().unwrap()
}

/// Both ends in this process, mapped at two addresses.
fn both(count: usize) -> (Gates, Gates) {
    let owner = Gates::create(count).unwrap();
    let user = Gates::open(copy_of(&owner), count).unwrap();
    (owner, user)
}

#[test]
fn a_gate_counts_its_users_until_it_is_closed() {
    let (owner, user) = both(3);
    let user = Arc::new(user);
    let first = user.enter(1).unwrap();
    let second = user.enter_owned(1).unwrap();
    assert_eq!([0, 1, 2].map(|index| owner.users(index)), [0, 2, 0]);
    drop(first);
    owner.close(1);
    assert!(user.enter(1).is_none() && user.enter_owned(1).is_none());
    assert!(user.enter(0).is_some() && user.enter(2).is_some());
    assert_eq!(owner.users(1), 1);
    assert!(!owner.reopen(1), "somebody is inside");
    assert!(user.enter(1).is_none());
    // An owned pass keeps the gates alive.
    drop(user);
    assert_eq!(owner.users(1), 1);
    drop(second);
    assert_eq!(owner.users(1), 0);
    let user = Gates::open(copy_of(&owner), 3).unwrap();
    assert!(user.enter(1).is_none(), "still closed");
    assert!(owner.reopen(1));
    assert!(user.enter(1).is_some());
    assert!(user.enter(3).is_none() && user.enter(usize::MAX).is_none());
}

#[test]
fn nobody_is_inside_once_a_closed_gate_has_no_users() {
    const ROUNDS: usize = 20_000;
    let (owner, user) = both(ROUNDS);
    let free: Vec<_> = (0..ROUNDS).map(|_| AtomicBool::new(false)).collect();
    // Number of gates that each user has finished with.
    let done = [const { AtomicUsize::new(0) }; 2];
    std::thread::scope(|scope| {
        for done in &done {
            let (user, free) = (&user, &free);
            scope.spawn(move || {
                for (index, free) in free.iter().enumerate() {
                    while let Some(pass) = user.enter(index) {
                        let before = free.load(Ordering::SeqCst);
                        std::hint::spin_loop();
                        let after = free.load(Ordering::SeqCst);
                        assert!(!before && !after, "inside gate {index}, which is free");
                        drop(pass);
                    }
                    done.store(index + 1, Ordering::SeqCst);
                }
            });
        }
        scope.spawn(|| {
            for (index, free) in free.iter().enumerate() {
                // Closes each gate at a different moment of its users' loops.
                for _ in 0..index % 97 {
                    std::hint::spin_loop();
                }
                owner.close(index);
                let is_left = || done.iter().all(|done| done.load(Ordering::SeqCst) > index);
                while owner.users(index) != 0 && !is_left() {
                    std::thread::yield_now();
                }
                free.store(true, Ordering::SeqCst);
            }
        });
    });
    assert!((0..ROUNDS).all(|index| owner.users(index) == 0));
}

#[test]
fn a_process_that_was_killed_inside_stays_counted_and_is_gone() {
    let owner = Gates::create(2).unwrap();
    let (child, wire) = neighbour(|wire| {
        let (_, mut fds) = next(&wire).unwrap();
        let user = Gates::open(fds.pop().unwrap(), 2).unwrap();
        let _pass = user.enter(1).unwrap();
        say(&wire, "inside");
        next(&wire).is_none()
    });
    let process = Neighbour::of(&wire).unwrap();
    assert!(wire.send(b"gates", &[owner.descriptor()]).unwrap());
    expect(&wire, "inside");
    owner.close(1);
    assert_eq!(owner.users(1), 1);
    assert!(!process.is_gone());
    child.kill();
    wait_for(&process, PollFlags::IN);
    assert!(process.is_gone());
    assert_eq!(owner.users(1), 1);
}

#[test]
fn forked_children_neither_enter_nor_leave() {
    let (owner, user) = both(1);
    let user = Arc::new(user);
    let mut borrowed = user.enter(0);
    let mut owned = user.enter_owned(0);
    let mut child = Child::fork(|| {
        drop((borrowed.take(), owned.take()));
        user.enter(0).is_none() && user.enter_owned(0).is_none()
    });
    assert!(child.wait());
    assert_eq!(owner.users(0), 2);
    drop((borrowed, owned));
    assert_eq!(owner.users(0), 0);
}

/// The other process can write any value.
#[test]
fn any_value_in_a_gate_is_harmless() {
    for users in [u32::MAX, u32::MAX - 1, 1 << 31, 0] {
        for closed in [0, 1, 1 << 31, u32::MAX] {
            let (owner, user) = both(2);
            let mut gate = users.to_ne_bytes().to_vec();
            gate.extend(closed.to_ne_bytes());
            gate.resize(128, 0xee);
            rustix::io::pwrite(owner.descriptor(), &gate, 0).unwrap();
            assert_eq!(owner.users(0), users);
            let passes = [user.enter(0), user.enter(0)];
            let entered = passes.iter().flatten().count();
            assert_eq!(entered, if closed == 0 { 2 } else { 0 });
            assert_eq!(owner.users(0), users.wrapping_add(entered as u32));
            owner.close(0);
            drop(passes);
            assert_eq!(owner.users(0), users);
            assert!(user.enter(0).is_none(), "no count opens a gate");
            assert_eq!(owner.reopen(0), users == 0);
            assert_eq!(user.enter(0).is_some(), users == 0);
        }
    }
}

#[test]
fn only_sealed_memory_of_the_right_size_is_opened() {
    let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let memory = |bytes, seals| {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = memfd_create(c"test", flags).unwrap();
        ftruncate(&memory, bytes).unwrap();
        fcntl_add_seals(&memory, seals).unwrap();
        memory
    };
    assert_eq!(Gates::open(memory(640, all), 10).unwrap().count(), 10);
    let (reader, _writer) = std::io::pipe().unwrap();
    for (memory, what) in [
        (memory(640, SealFlags::empty()), "not sealed"),
        (memory(640, all - SealFlags::SHRINK), "could shrink"),
        (memory(640, all - SealFlags::GROW), "could grow"),
        (memory(640, all - SealFlags::SEAL), "could be sealed"),
        (memory(0, all), "empty"),
        (memory(639, all), "too short"),
        (memory(4096, all), "too long"),
        (tempfile::tempfile().unwrap().into(), "a file"),
        (reader.into(), "a pipe"),
    ] {
        let refused = Gates::open(memory, 10).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidData, "{what}");
    }
    for count in [0, usize::MAX, usize::MAX / 64, isize::MAX as usize / 64 + 1] {
        let refused = Gates::create(count).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidInput, "{count}");
        let refused = Gates::open(memory(640, all), count).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidInput, "{count}");
    }
    // Neither end can change the size any more.
    let gates = Gates::create(10).unwrap();
    for bytes in [0, 639, 641] {
        assert!(ftruncate(gates.descriptor().as_fd(), bytes).is_err());
    }
}
