//! Processes that fork: children do not use inherited objects, keep no resource of their parent
//! alive, and create sessions of their own.

use std::sync::atomic::{AtomicBool, Ordering};

use tcpx::{ErrorKind, Op};
use tcpx_testkit::forked::{self, MARK};
use tcpx_testkit::host::{fails, wait_for_traffic};
use tcpx_testkit::protocol::Command;
use tcpx_testkit::{Copy, Host, RemoteProcess, Setup, on_main_setups, wait_until};

const MIB: usize = 1 << 20;

on_main_setups!(
    children_leave_the_session_alone,
    a_dead_parent_is_noticed_while_its_child_lives,
    a_port_is_free_while_a_child_lives,
    programs_that_are_executed_keep_nothing,
);

/// Transfers go on in both directions while children are forked, so that locks are held in them.
fn children_leave_the_session_alone(setup: &Setup) {
    let setup = &setup.native();
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let (to_bob, traffic) = (alice.meets(&bob), alice.memory(MIB));
    let (there, target) = (bob.memory(MIB), bob.memory(100));
    // Bob's own, never posted again: an object to inherit.
    let write = bob.transfer(
        Op::Write,
        "alice",
        &there,
        &traffic.region.descriptor(),
        &[Copy::new(0, 0, 10)],
    );
    write.post().expect("posted");
    write.wait().expect("done");
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let busy = [Op::Write, Op::Read].map(|op| {
            let (alice, to_bob, there, over) = (&alice, &to_bob, &there, &over);
            scope.spawn(move || {
                let here = alice.memory(MIB);
                while !over.load(Ordering::Relaxed) {
                    alice.run(op, to_bob, &here, there, &[Copy::new(0, 0, MIB)]);
                }
            })
        });
        for _ in 0..40 {
            bob.poison(&target);
            let child: u32 = bob.expect(Command::Fork {
                region: target.region_id(),
            });
            let notice = bob.notification();
            assert_eq!(notice.from, format!("child-{child}"));
            assert_eq!(bob.bytes(&target), vec![MARK; 100]);
            bob.expect::<()>(Command::EndChild { child });
        }
        over.store(true, Ordering::Relaxed);
        for transfers in busy {
            transfers.join().expect("they do not notice");
        }
    });
    alice.verify_traffic(&to_bob, &bob, 1);
}

/// Only the end of its sockets can reveal it: nothing waits for the time limit.
fn a_dead_parent_is_noticed_while_its_child_lives(setup: &Setup) {
    let setup = &setup.native().with("peer_timeout", "600s");
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let peer = alice.meets(&bob);
    let (here, there) = (alice.memory(MIB), bob.memory(MIB));
    let endless = alice.endless(Op::Read, &peer, &here, &there.descriptor);
    endless.post().expect("posted");
    wait_for_traffic(&peer);
    let region = bob.memory(100).region_id();
    let child = Orphan(bob.expect(Command::Fork { region }));
    bob.kill();
    assert_eq!(fails(&endless).kind(), ErrorKind::Disconnected);
    wait_until("it shows", || !peer.is_connected());
    drop(child);
}

fn a_port_is_free_while_a_child_lives(setup: &Setup) {
    let setup = &setup.native();
    let bob = RemoteProcess::open("bob", setup);
    // Another program may take the port in between, but hardly every time.
    let is_free = |_| {
        bob.reopen(setup);
        let address = bob.addresses()[0];
        let region = bob.memory(100).region_id();
        let child: u32 = bob.expect(Command::Fork { region });
        bob.expect::<()>(Command::Close);
        bob.reopen(&setup.with("listen_port", address.port()));
        bob.expect::<()>(Command::EndChild { child });
        bob.addresses().contains(&address)
    };
    assert!((0..5).any(is_free));
}

fn programs_that_are_executed_keep_nothing(setup: &Setup) {
    let setup = &setup.native();
    let alice = Host::open("alice", setup);
    let bob = RemoteProcess::open("bob", setup);
    let carol = RemoteProcess::open("carol", setup);
    // One connection that bob has accepted, and one that he has made.
    alice.verify_traffic(&alice.knows(&bob), &bob, 1);
    bob.knows_info(&carol.info());
    bob.connect("carol").expect("connected");
    assert_eq!(bob.kept_on_exec(), [""; 0]);
}

/// A process whose parent has ended.
struct Orphan(u32);

impl Drop for Orphan {
    fn drop(&mut self) {
        forked::end(self.0);
    }
}
