use std::io::{ErrorKind, IoSlice, Read, pipe};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::*;
use crate::poller::{Event, Poller};

#[test]
fn a_door_is_entered_by_its_name_until_it_is_dropped() {
    let door = Door::open().unwrap();
    let other = Door::open().unwrap();
    assert_ne!(door.name(), other.name());
    assert_eq!(door.name().len(), "tcpx-".len() + 32);
    assert!(door.accept().unwrap().is_none(), "nobody is there");
    let near = Wire::connect(door.name()).unwrap();
    let far = door.accept().unwrap().unwrap();
    assert!(door.accept().unwrap().is_none());
    say(&near, "hello");
    expect(&far, "hello");
    let name = door.name().to_owned();
    let unaccepted = Wire::connect(&name).unwrap();
    drop(door);
    let refused = Wire::connect(&name).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    assert!(next(&unaccepted).is_none());
    say(&far, "accepted wires stay");
    expect(&near, "accepted wires stay");
}

#[test]
fn a_full_door_refuses_connections() {
    let door = Door::open().unwrap();
    let mut wires = vec![Wire::connect(door.name()).unwrap()];
    for socket in [door.as_fd(), wires[0].as_fd()] {
        let flags = rustix::fs::fcntl_getfl(socket).unwrap();
        assert!(flags.contains(rustix::fs::OFlags::NONBLOCK), "it waits");
    }
    let full = loop {
        assert!(wires.len() < 1000, "no end");
        match Wire::connect(door.name()) {
            Ok(wire) => wires.push(wire),
            Err(error) => break error,
        }
    };
    assert_eq!(full.kind(), ErrorKind::WouldBlock);
    assert!(door.accept().unwrap().is_some());
    assert!(Wire::connect(door.name()).is_ok());
}

/// A name from a peer must not lead to sockets of other programs.
#[test]
fn only_names_of_doors_are_connected_to() {
    let door = Door::open().unwrap();
    let upper = door.name().to_uppercase();
    let long = format!("{}0", door.name());
    let odd = format!("tcpx-{}\0", &door.name()[6..]);
    for name in ["", "tcpx-", &upper, &long, &odd, &door.name()[1..]] {
        let refused = Wire::connect(name).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidInput, "{name:?}");
    }
}

#[test]
fn messages_keep_their_boundaries_and_carry_descriptors() {
    let (near, far) = pair();
    let mut buffer = vec![0; MAX_MESSAGE];
    assert!(matches!(far.receive(&mut buffer), Ok(Received::Nothing)));
    let file = tempfile::tempfile().unwrap();
    let all = [file.as_fd(); MAX_FDS];
    let long: Vec<u8> = (0..MAX_MESSAGE).map(|i| (i % 251) as u8).collect();
    assert!(near.send(b"one", &all[..1]).unwrap());
    assert!(near.send(&long, &all).unwrap());
    assert!(near.send(b"three", &[]).unwrap());
    let (bytes, fds) = next(&far).unwrap();
    assert_eq!((bytes.as_slice(), fds.len()), (&b"one"[..], 1));
    let sent = rustix::fs::fstat(&file).unwrap();
    let got = rustix::fs::fstat(&fds[0]).unwrap();
    assert_eq!((sent.st_dev, sent.st_ino), (got.st_dev, got.st_ino));
    let flags = rustix::io::fcntl_getfd(&fds[0]).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    let (bytes, fds) = next(&far).unwrap();
    assert!(bytes == long && fds.len() == MAX_FDS);
    let (bytes, fds) = next(&far).unwrap();
    assert_eq!((bytes.as_slice(), fds.len()), (&b"three"[..], 0));
}

#[test]
fn what_a_wire_does_not_carry_is_not_sent() {
    let (near, far) = pair();
    let file = tempfile::tempfile().unwrap();
    let many = [file.as_fd(); MAX_FDS + 1];
    let long = vec![0; MAX_MESSAGE + 1];
    for (bytes, fds) in [(&[][..], &[][..]), (&long, &[]), (b"x", &many)] {
        let refused = near.send(bytes, fds).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidInput);
    }
    assert!(matches!(far.receive(&mut [0; 8]), Ok(Received::Nothing)));
}

/// A peer may send messages that [`Wire::send`] refuses.
#[test]
fn what_a_wire_does_not_carry_is_refused_and_its_descriptors_are_closed() {
    let send = |wire: &Wire, bytes: &[u8], fds: &[BorrowedFd<'_>]| {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(200))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(fds)));
        let (bytes, flags) = ([IoSlice::new(bytes)], SendFlags::empty());
        sendmsg(wire, &bytes, &mut ancillary, flags).unwrap();
    };
    // In a process of its own, where nothing else keeps a descriptor.
    alone(|| {
        for (len, fds, fits) in [
            (10, MAX_FDS, true),
            (10, MAX_FDS + 1, false),
            (10, MAX_FDS + 2, false),
            (10, 200, false),
            (11, 1, false),
        ] {
            let (near, far) = pair();
            let (mut reader, writer) = pipe().unwrap();
            send(&near, &vec![7; len], &vec![writer.as_fd(); fds]);
            drop(writer);
            say(&near, "next");
            match far.receive(&mut [0; 10]) {
                Ok(Received::Message { len: 10, fds: got }) if fits => assert_eq!(got.len(), fds),
                Err(error) if !fits => assert_eq!(error.kind(), ErrorKind::InvalidData),
                other => panic!("{len} bytes, {fds} descriptors: {other:?}"),
            }
            // Returns 0 only when no copy of the writer is left.
            assert_eq!(reader.read(&mut [0]).unwrap(), 0);
            expect(&far, "next");
        }
    });
}

#[test]
fn a_full_wire_refuses_messages() {
    let (near, far) = pair();
    let bytes = vec![1; MAX_MESSAGE];
    let mut count = 0;
    while near.send(&bytes, &[]).unwrap() {
        count += 1;
        assert!(count < 10_000, "no end");
    }
    assert!(count > 0);
    for _ in 0..count {
        assert_eq!(next(&far).unwrap().0.len(), MAX_MESSAGE);
    }
    assert!(near.send(&bytes, &[]).unwrap());
}

/// Holds also if the closing side has not read everything, or still uses its socket.
#[test]
fn a_closed_wire_yields_what_was_sent_and_then_ends() {
    let (near, far) = pair();
    let _holds_the_socket = Neighbour::of(&near).unwrap();
    say(&near, "last words");
    drop(near);
    expect(&far, "last words");
    for _ in 0..2 {
        assert!(matches!(far.receive(&mut [0; 8]), Ok(Received::Closed)));
    }
    let refused = far.send(b"x", &[]).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::BrokenPipe);

    let (near, far) = pair();
    say(&near, "last words");
    say(&far, "never read");
    drop(near);
    expect(&far, "last words");
    assert!(matches!(far.receive(&mut [0; 8]), Ok(Received::Closed)));
}

#[test]
fn the_kernel_names_the_process_at_the_other_end() {
    let (child, wire) = neighbour(|wire| {
        let parent = wire.credentials().unwrap().pid;
        say(&wire, format!("{parent:?}"));
        next(&wire).is_none()
    });
    let found = wire.credentials().unwrap();
    assert_eq!(
        found.pid.map(|pid| pid.as_raw_nonzero().get()),
        Some(child.pid)
    );
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    assert_eq!((found.uid, found.gid), (uid.as_raw(), gid.as_raw()));
    expect(&wire, &format!("{:?}", Some(rustix::process::getpid())));
}

#[test]
fn a_poller_reports_doors_wires_and_the_end_of_processes() {
    let poller = Poller::new().unwrap();
    let ready = |wait| {
        let mut events = Vec::new();
        poller.wait(&mut events, wait).unwrap();
        events
    };
    let none = Some(Duration::ZERO);
    let door = Door::open().unwrap();
    poller.add_armed(&door, 1).unwrap();
    assert_eq!(ready(none), []);
    let child = Child::fork(|| {
        let wire = Wire::connect(door.name()).unwrap();
        expect(&wire, "speak");
        say(&wire, "hello");
        next(&wire).is_none()
    });
    assert_eq!(ready(None), [Event::Ready(1)]);
    let wire = door.accept().unwrap().unwrap();
    let process = Neighbour::of(&wire).unwrap();
    poller.add_armed(&wire, 2).unwrap();
    assert_eq!(ready(none), []);
    say(&wire, "speak");
    assert_eq!(ready(None), [Event::Ready(2)]);
    poller.add_armed(&process, 3).unwrap();
    assert_eq!(ready(none), []);
    child.kill();
    assert_eq!(ready(None), [Event::Ready(3)]);
    assert!(process.is_gone());
}
