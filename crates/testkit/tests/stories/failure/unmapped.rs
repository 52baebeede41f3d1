//! Memory is unmapped or protected while it is registered: each access to it fails with the right
//! status, and nothing else fails.

use tcpx::{Error, ErrorKind, Op, Status};
use tcpx_testkit::host::{done, fails};
use tcpx_testkit::pattern::REMOTE_POISON;
use tcpx_testkit::story::skipped;
use tcpx_testkit::{
    Access, Content, Copy, Expected, Host, RemoteMemory, RemoteProcess, Setup, on_every_setup,
    on_main_setups,
};

use super::MIB;

on_every_setup!(
    the_target_unmaps_what_is_used,
    a_part_of_a_large_write_is_unmapped,
);

mod own {
    use super::*;

    on_main_setups!(
        the_initiator_unmaps_what_it_uses,
        a_message_meets_memory_that_is_gone,
        a_session_that_writes_to_itself_meets_memory_that_is_gone,
    );
}

const PAGE: usize = 4096;

/// On a plugin the access fails inside the plugin, which ends the connection.
const LARGEST_ON_STREAM: usize = 8 << 10;

/// Transfers of 1 B to 1 MiB, in one piece and in scattered blocks.
fn shapes(setup: &Setup) -> Vec<Vec<Copy>> {
    let sizes = [1, 100, PAGE, 8 << 10, 17_001, 64 << 10, MIB];
    let whole = sizes.map(|len| vec![Copy::new(0, 0, len)]);
    let blocks = [(64, 20), (PAGE, 2), (PAGE, 100)].map(|(len, count)| {
        let block = |index: usize| Copy::new(2 * index * len, 2 * index * len, len);
        (0..count).map(block).collect()
    });
    let bytes = |shape: &Vec<Copy>| shape.iter().map(|copy| copy.len).sum::<usize>();
    let all = whole.into_iter().chain(blocks);
    all.filter(|shape| !setup.is_plugin() || bytes(shape) <= LARGEST_ON_STREAM)
        .collect()
}

#[track_caller]
fn assert_refused(error: &Error) {
    let is_fault = matches!(
        error,
        Error::PeerRefused {
            status: Status::Memory,
            ..
        }
    );
    assert!(is_fault, "{error:?}");
}

/// Returns the ports of a connection's lanes, which identify the connection.
fn ports(peer: &tcpx::Peer) -> Vec<std::net::SocketAddr> {
    peer.lanes().iter().map(|lane| lane.local).collect()
}

fn the_target_unmaps_what_is_used(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.meets(&bob);
    let here = alice.memory(2 * MIB);
    let (there, other) = (bob.mapped(2 * MIB), bob.memory(2 * MIB));
    here.memory.fill(Content::pattern(1));
    alice.run(Op::Write, &peer, &here, &there, &[Copy::new(0, 0, MIB)]);
    let lanes = ports(&peer);
    for access in [Access::Unmapped, Access::None, Access::Read] {
        bob.allow(&there, access, 0, 2 * MIB);
        for shape in shapes(setup) {
            let write = alice.transfer(Op::Write, &peer, &here, &there, &shape);
            write.post_with_notification(b"never").expect("posted");
            assert_refused(&fails(&write));
            let read = alice.transfer(Op::Read, &peer, &here, &there, &shape);
            read.post().expect("posted");
            match access {
                Access::Read => done(&read),
                _ => assert_refused(&fails(&read)),
            }
            alice.run(Op::Write, &peer, &here, &other, &shape);
            alice.run(Op::Read, &peer, &here, &other, &shape);
        }
    }
    // Together with accesses that succeed, all at once.
    let shape = shapes(setup).pop().expect("there are some");
    let both: Vec<_> = (0..50)
        .map(|index| {
            let target = [&there, &other][index % 2];
            let transfer = alice.transfer(Op::Write, &peer, &here, target, &shape);
            transfer.post().expect("posted");
            transfer
        })
        .collect();
    for (index, transfer) in both.iter().enumerate() {
        match index % 2 {
            0 => assert_refused(&fails(transfer)),
            _ => done(transfer),
        }
    }
    // Remapped memory is usable again.
    bob.allow(&there, Access::All, 0, 2 * MIB);
    bob.poison(&there);
    here.memory.fill(Content::pattern(2));
    alice.run(Op::Write, &peer, &here, &there, &[Copy::new(0, 0, MIB)]);
    let arrived = Expected::untouched(REMOTE_POISON).with(0..MIB, Content::pattern(2));
    bob.check(&there, &arrived);
    assert_eq!(ports(&peer), lanes, "the connection is the same");
    assert!(bob.notifications().is_empty());
    alice.verify_traffic(&peer, &bob, 3);
}

/// In the middle, so that the first bytes of a payload have landed before the fault.
fn a_part_of_a_large_write_is_unmapped(setup: &Setup) {
    if setup.is_plugin() {
        return skipped("a plugin carries payload of this size");
    }
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.meets(&bob);
    let here = alice.memory(MIB);
    let there = bob.mapped(MIB);
    here.memory.fill(Content::pattern(1));
    alice.run(Op::Write, &peer, &here, &there, &[Copy::new(0, 0, MIB)]);
    let lanes = ports(&peer);
    let whole = [Copy::new(0, 0, MIB)];
    let blocks: Vec<_> = (0..MIB / PAGE)
        .map(|index| Copy::new(index * PAGE, MIB - (index + 1) * PAGE, PAGE))
        .collect();
    // 4 KiB on x86-64, up to 64 KiB on aarch64.
    let page_bytes = rustix::param::page_size();
    let last = MIB / page_bytes - 1;
    for page in [0, 1, last / 2, last] {
        let at = page * page_bytes;
        bob.allow(&there, Access::Unmapped, at, page_bytes);
        for shape in [&whole[..], &blocks] {
            let write = alice.transfer(Op::Write, &peer, &here, &there, shape);
            write.post_with_notification(b"never").expect("posted");
            assert_refused(&fails(&write));
        }
        bob.allow(&there, Access::All, at, page_bytes);
        alice.run(Op::Write, &peer, &here, &there, &whole);
        bob.check(&there, &Expected::only(Content::pattern(1)));
    }
    assert_eq!(ports(&peer), lanes, "the connection is the same");
    assert!(bob.notifications().is_empty());
}

fn the_initiator_unmaps_what_it_uses(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.meets(&bob);
    let (here, fine) = (alice.mapped(2 * MIB), alice.memory(2 * MIB));
    let there = bob.memory(2 * MIB);
    alice.run(Op::Write, &peer, &here, &there, &[Copy::new(0, 0, MIB)]);
    let lanes = ports(&peer);
    for access in [Access::Unmapped, Access::None, Access::Read] {
        here.memory.allow(access, 0, 2 * MIB);
        for shape in shapes(setup) {
            let read = alice.transfer(Op::Read, &peer, &here, &there, &shape);
            read.post_with_notification(b"never").expect("posted");
            assert_eq!(fails(&read), Error::MemoryFault);
            let write = alice.transfer(Op::Write, &peer, &here, &there, &shape);
            match access {
                Access::Read => {
                    write.post().expect("posted");
                    done(&write);
                }
                _ => {
                    write.post_with_notification(b"never").expect("posted");
                    assert_eq!(fails(&write), Error::MemoryFault);
                }
            }
            alice.run(Op::Write, &peer, &fine, &there, &shape);
            alice.run(Op::Read, &peer, &fine, &there, &shape);
        }
    }
    assert_eq!(ports(&peer), lanes, "the connection is the same");
    assert!(bob.notifications().is_empty());
    alice.verify_traffic(&peer, &bob, 3);
}

fn a_message_meets_memory_that_is_gone(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.meets(&bob);
    let (gone, fine) = (alice.mapped(MIB), alice.memory(MIB));
    let (bobs_gone, bobs): (RemoteMemory, _) = (bob.mapped(MIB), bob.memory(MIB));
    gone.memory.allow(Access::Unmapped, 0, MIB);
    bob.allow(&bobs_gone, Access::None, 0, MIB);
    let lens: &[usize] = match setup.is_plugin() {
        true => &[1, 4000],
        false => &[1, 4000, 100_000],
    };
    for (tag, len) in lens.iter().copied().enumerate() {
        // Out of unmapped memory.
        let send = alice
            .session
            .send(&peer, gone.region.at(0), len, tag as u64);
        let receive = bob.recv("alice", &bobs, 0, len, tag as u64);
        let error = receive.wait().expect_err("nothing to receive");
        assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
        let error = fails(&send.expect("posted"));
        assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
        // Into unmapped memory.
        let send = alice
            .session
            .send(&peer, fine.region.at(0), len, tag as u64);
        let receive = bob.recv("alice", &bobs_gone, 0, len, tag as u64);
        let error = receive.wait().expect_err("nowhere to receive it");
        assert_eq!(error.kind(), ErrorKind::NotAllowed, "{error}");
        assert_refused(&fails(&send.expect("posted")));
        // Between mapped memory.
        let send = alice
            .session
            .send(&peer, fine.region.at(0), len, tag as u64);
        let receive = bob.recv("alice", &bobs, 0, len, tag as u64);
        receive.wait().expect("received");
        done(&send.expect("posted"));
    }
}

fn a_session_that_writes_to_itself_meets_memory_that_is_gone(setup: &Setup) {
    let alice = Host::open("alice", setup);
    let me = alice.session.add_peer(&alice.session.connection_info());
    let me = me.expect("a session is its own peer");
    let (gone, fine) = (alice.mapped(2 * MIB), alice.memory(2 * MIB));
    gone.memory.allow(Access::Unmapped, 0, 2 * MIB);
    for shape in shapes(setup) {
        for (local, remote) in [(&gone, &fine), (&fine, &gone)] {
            for op in [Op::Write, Op::Read] {
                let there = remote.region.descriptor();
                let transfer = alice.transfer_to(op, &me, local, &there, &shape);
                transfer.post().expect("posted");
                let error = fails(&transfer);
                let kinds = [ErrorKind::Refused, ErrorKind::NotAllowed];
                assert!(kinds.contains(&error.kind()), "{error:?}");
            }
        }
        let there = fine.region.descriptor();
        let transfer = alice.transfer_to(Op::Write, &me, &fine, &there, &shape);
        transfer.post().expect("posted");
        done(&transfer);
    }
}
