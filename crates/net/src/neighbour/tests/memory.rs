use std::sync::atomic::{AtomicU8, Ordering};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::*;
use crate::pages::{Pages, page};
use crate::span::{Cursor, Span};

impl Pages {
    /// The bytes, which the other process may change at any time.
    fn bytes(&self) -> &[AtomicU8] {
        // SAFETY: mapped while `self` lives; tests do not look at pages that they have protected.
        unsafe { std::slice::from_raw_parts(self.address.cast(), self.count * page()) }
    }

    fn fill(&self, byte: impl Fn(usize) -> u8) {
        for (at, cell) in self.bytes().iter().enumerate() {
            cell.store(byte(at), Ordering::Relaxed);
        }
    }

    fn copy(&self) -> Vec<u8> {
        let bytes = self.bytes().iter();
        bytes.map(|byte| byte.load(Ordering::Relaxed)).collect()
    }

    fn span(&self, at: usize, len: usize) -> Span {
        assert!(at + len <= self.count * page());
        // SAFETY: the memory belongs to this value, and is otherwise accessed by atomics.
        unsafe { Span::new(self.address.wrapping_add(at), len) }
    }

    /// Returns the same range in the other process.
    fn remote(&self, at: usize, len: usize) -> Remote {
        let address = self.address.wrapping_add(at).addr() as u64;
        Remote { address, len }
    }
}

fn theirs(at: usize) -> u8 {
    (at * 7 + at / 256) as u8
}

fn start() -> Cursor {
    Cursor::default()
}

/// Ranges of three pages, by start and length: few or many, short or long, overlapping or empty.
fn ranges() -> impl Strategy<Value = Vec<(usize, usize)>> {
    let range = |most| (0..3 * page() - most, 0..=most);
    prop_oneof![
        prop::collection::vec(range(40), 0..900),
        prop::collection::vec(range(2 * page()), 0..6),
    ]
}

/// Lists which byte goes where, one by one, from one list of ranges to another.
fn steps(from: &[(usize, usize)], to: &[(usize, usize)]) -> Vec<(usize, usize)> {
    let each = |list: &[(usize, usize)]| {
        let bytes = list.iter().flat_map(|(at, len)| *at..at + len);
        bytes.collect::<Vec<_>>()
    };
    each(from).into_iter().zip(each(to)).collect()
}

#[test]
fn lists_are_moved_byte_for_byte_whatever_their_boundaries() {
    let pages = Pages::new(3);
    let (mut child, wire) = neighbour(|wire| {
        pages.fill(theirs);
        say(&wire, "filled");
        // The child compares its memory with what this process should have written to it.
        let (expected, _) = next(&wire).unwrap();
        pages.copy() == expected
    });
    expect(&wire, "filled");
    let process = Neighbour::of(&wire).unwrap();
    let mut runner = TestRunner::new(Config::with_cases(200));
    let all: Vec<u8> = (0..3 * page()).map(theirs).collect();
    let expected = std::cell::RefCell::new(all);
    let cases = (ranges(), ranges(), 0..50_usize);
    let property = |(there, here, skip): (Vec<_>, Vec<_>, usize)| {
        let mine = |at: usize| (at * 13 + skip) as u8;
        let spans: Vec<_> = here.iter().map(|(at, len)| pages.span(*at, *len)).collect();
        let remotes: Vec<_> = there
            .iter()
            .map(|(at, len)| pages.remote(*at, *len))
            .collect();
        // Begins in the middle of the local list.
        let mut cursor = start();
        let skip = skip.min(cursor.remaining(&spans));
        cursor.advance(&spans, skip);
        let here_steps = steps(&here, &here);
        let rest: Vec<_> = here_steps[skip..].iter().map(|(at, _)| (*at, 1)).collect();

        pages.fill(mine);
        let mut expected = expected.borrow_mut();
        let mut expected_here = pages.copy();
        let reads = steps(&there, &rest);
        for (from, to) in &reads {
            expected_here[*to] = expected[*from];
        }
        let read = process.read(&remotes, (&spans, cursor)).unwrap();
        prop_assert_eq!(read, reads.len());
        prop_assert!(pages.copy() == expected_here, "after reading");

        pages.fill(mine);
        let writes = steps(&rest, &there);
        for (from, to) in &writes {
            expected[*to] = mine(*from);
        }
        let written = process.write((&spans, cursor), &remotes).unwrap();
        prop_assert_eq!(written, writes.len());
        prop_assert!(pages.copy() == (0..3 * page()).map(mine).collect::<Vec<_>>());
        Ok(())
    };
    runner.run(&cases, property).unwrap();
    say(&wire, expected.into_inner());
    assert!(child.wait(), "the other process has other bytes");
}

fn fault(result: Result<usize, Error>) -> (Side, usize) {
    match result {
        Err(Error::Fault { side, at }) => (side, at),
        other => panic!("no fault: {other:?}"),
    }
}

#[test]
fn a_fault_in_the_middle_of_a_list_tells_whose_and_where() {
    let pages = Pages::new(4);
    let (_child, wire) = neighbour(|wire| {
        pages.protect(1, libc::PROT_NONE);
        pages.protect(3, libc::PROT_READ);
        say(&wire, "protected");
        next(&wire).is_none()
    });
    expect(&wire, "protected");
    let process = Neighbour::of(&wire).unwrap();
    let own = Pages::new(4);
    let local = [own.span(0, 5000), own.span(6000, 5000)];
    let there = Side::There;
    // 100 bytes, then 50, of which 20 precede the page that is not mapped.
    let list = [
        pages.remote(200, 100),
        pages.remote(page() - 20, 50),
        pages.remote(0, 10),
    ];
    assert_eq!(fault(process.read(&list, (&local, start()))), (there, 120));
    assert_eq!(fault(process.write((&local, start()), &list)), (there, 120));
    // A fault at the first byte, and at addresses where nothing can be mapped.
    for address in [list[1].address + 20, 8, u64::MAX - 4, 1 << 63] {
        let list = [Remote { address, len: 2 }];
        assert_eq!(fault(process.read(&list, (&local, start()))), (there, 0));
        assert_eq!(fault(process.write((&local, start()), &list)), (there, 0));
    }
    // Read-only memory.
    let list = [pages.remote(3 * page() - 9, 100)];
    assert_eq!(process.read(&list, (&local, start())).unwrap(), 100);
    assert_eq!(fault(process.write((&local, start()), &list)), (there, 9));

    let list = [pages.remote(2 * page(), page())];
    own.protect(2, libc::PROT_NONE);
    let local = [own.span(0, 30), own.span(2 * page() - 7, 50)];
    let here = Side::Here;
    assert_eq!(fault(process.read(&list, (&local, start()))), (here, 37));
    assert_eq!(fault(process.write((&local, start()), &list)), (here, 37));
    own.protect(2, libc::PROT_READ);
    assert_eq!(fault(process.read(&list, (&local, start()))), (here, 37));
    assert_eq!(process.write((&local, start()), &list).unwrap(), 80);
    // For this span the kernel refuses the whole list.
    // SAFETY: nothing in user space is mapped at this address.
    let odd = unsafe { Span::new(std::ptr::without_provenance_mut(1 << 63), 8) };
    let local = [own.span(0, 30), odd];
    assert_eq!(fault(process.read(&list, (&local, start()))).0, here);
    assert_eq!(fault(process.write((&local, start()), &list)).0, here);
}

#[test]
fn a_process_that_has_ended_is_gone() {
    let pages = Pages::new(1);
    let (mut child, wire) = neighbour(|wire| next(&wire).is_none());
    let process = Neighbour::of(&wire).unwrap();
    let (local, list) = ([pages.span(0, 100)], [pages.remote(0, 100)]);
    assert!(!process.is_gone());
    assert_eq!(process.read(&list, (&local, start())).unwrap(), 100);
    child.kill();
    wait_for(&process, PollFlags::IN);
    for is_reaped in [false, true] {
        if is_reaped {
            child.wait();
        }
        assert!(process.is_gone());
        let results = [
            process.read(&list, (&local, start())),
            process.write((&local, start()), &list),
        ];
        for result in results {
            assert!(matches!(result, Err(Error::Gone)), "{result:?}");
        }
        // No other process is taken for the one that connected.
        assert!(matches!(Neighbour::of(&wire), Err(Error::Gone)));
    }
}

/// The process id and the pidfd stay; the memory changes.
#[test]
fn a_process_that_executes_another_program_is_gone() {
    let pages = Pages::new(1);
    let (_child, wire) = neighbour(|wire| {
        expect(&wire, "execute");
        let (program, argument) = (c"sleep", c"1000");
        // SAFETY: both are terminated, and so is the list.
        unsafe {
            libc::execlp(
                program.as_ptr(),
                program.as_ptr(),
                argument.as_ptr(),
                std::ptr::null::<libc::c_char>(),
            )
        };
        false
    });
    let process = Neighbour::of(&wire).unwrap();
    say(&wire, "execute");
    wait_for(&wire, PollFlags::RDHUP);
    assert!(!process.is_gone(), "cannot execute");
    // An address that is mapped in every process of this program, or in none.
    let (local, list) = ([pages.span(0, 100)], [pages.remote(0, 100)]);
    let results = [
        process.write((&local, start()), &list),
        process.read(&[], (&local, start())),
        Neighbour::of(&wire).map(|_| 0),
    ];
    for result in results {
        assert!(matches!(result, Err(Error::Gone)), "{result:?}");
    }
}

/// The id of a process that has ended is reused, while a child that it made without fork handlers
/// keeps the socket open.
#[test]
fn a_number_that_is_given_out_anew_is_not_the_neighbour() {
    let name = "a_number_that_is_given_out_anew_is_not_the_neighbour";
    if !is_root(name) {
        return;
    }
    // SAFETY: the process ends at once.
    let end = || unsafe { libc::_exit(0) };
    alone(|| {
        let pages = Pages::new(1);
        let (mut child, wire) = neighbour(|wire| {
            // SAFETY: as with `fork`, for a child that only waits.
            let made = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
            if made == 0 {
                while next(&wire).is_some() {}
                end();
            }
            say(&wire, "ready");
            std::thread::park();
            false
        });
        expect(&wire, "ready");
        let process = Neighbour::of(&wire).unwrap();
        child.kill();
        child.wait();
        let (local, list) = ([pages.span(0, 100)], [pages.remote(0, 100)]);
        let pid = [child.pid];
        // `struct clone_args`: the exit signal, and the requested process id.
        let mut arguments = [0_u64; 10];
        arguments[4] = libc::SIGCHLD as u64;
        arguments[8] = pid.as_ptr().expose_provenance() as u64;
        arguments[9] = 1;
        let (at, len) = (arguments.as_ptr(), size_of_val(&arguments));
        // SAFETY: as with `fork`, for a child that only waits; the arguments outlive the call.
        let made = unsafe { libc::syscall(libc::SYS_clone3, at, len) };
        if made == 0 {
            std::thread::park();
            end();
        }
        if made < 0 {
            let error = std::io::Error::last_os_error();
            skipped(
                name,
                &format!("the number of a process cannot be chosen: {error}"),
            );
            return;
        }
        let _other = Child {
            pid: child.pid,
            is_reaped: false,
        };
        assert!(process.is_gone());
        assert!(matches!(
            process.write((&local, start()), &list),
            Err(Error::Gone)
        ));
        assert!(matches!(
            process.read(&list, (&local, start())),
            Err(Error::Gone)
        ));
    });
}

#[test]
fn a_nonce_is_read_in_the_other_process() {
    let (mut child, wire) = neighbour(|wire| {
        let parent = Neighbour::of(&wire).unwrap();
        let mine = Nonce::new().unwrap();
        say(&wire, mine.address().to_ne_bytes());
        let (address, _) = next(&wire).unwrap();
        let address = u64::from_ne_bytes(address.try_into().unwrap());
        say(&wire, parent.read_nonce(address).unwrap());
        next(&wire).unwrap().0 == mine.bytes()
    });
    let process = Neighbour::of(&wire).unwrap();
    assert_eq!(process.pid().as_raw_nonzero().get(), child.pid);
    let nonce = Nonce::new().unwrap();
    assert_ne!(nonce.bytes(), Nonce::new().unwrap().bytes());
    let address = next(&wire).unwrap().0;
    let address = u64::from_ne_bytes(address.try_into().unwrap());
    say(&wire, nonce.address().to_ne_bytes());
    assert_eq!(next(&wire).unwrap().0, nonce.bytes());
    say(&wire, process.read_nonce(address).unwrap());
    assert!(child.wait());
}
