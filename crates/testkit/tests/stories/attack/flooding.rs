//! Peers that send much of little use.

use tcpx_proto::frame::{FrameError, Kind};
use tcpx_testkit::attack::{Scene, Target, ask, plain};
use tcpx_testkit::raw::dial;
use tcpx_testkit::{Host, RemoteProcess, Setup, story, wait_until};

/// A frame of an unknown kind ends the connection, and nothing after it is processed.
#[test]
fn nothing_behind_an_unknown_kind_is_looked_at() {
    story(|| {
        let scene = Scene::new();
        let Target { key, address, .. } = scene.granted();
        let mut good = ask(Kind::Write, (1, 0), &[key], &[(address, 8, 0)]);
        good.extend([0x66; 8]);
        good.extend(plain(Kind::Notify, (0, 0), b"never"));
        for kind in [0, 16, 17, 84, 128, 255] {
            let mut bytes = [kind].repeat(32);
            bytes[1..].fill(0);
            let flood = [bytes, good.clone()].concat().repeat(500);
            let mut flooder = scene.insider();
            flooder.send(&flood);
            flooder.is_ended_for(FrameError::UnknownKind(kind));
            scene.unharmed();
        }
        assert!(scene.victim.session.notifications().is_empty());
        scene.honest_peer_goes_on();
    });
}

/// Frames that carry nothing cost other peers nothing.
#[test]
fn empty_frames_do_not_affect_other_peers() {
    story(|| {
        const ROUNDS: usize = 50;
        const EACH: usize = 200;
        let scene = Scene::new();
        let mut flooder = scene.insider();
        let mut notified = 0;
        for round in 0..ROUNDS {
            let flood = [
                // Unrequested answers.
                plain(Kind::Pong, (0, 0), &[]),
                plain(Kind::Pong, (u64::MAX - 1, 0), &[]),
                plain(Kind::SendDone, (u64::MAX, 0), &[]),
                plain(Kind::Notify, (0, 0), &[]),
                plain(Kind::Ping, (0, 0), &[]),
            ];
            flooder.send(&flood.concat().repeat(EACH));
            let answers = flooder.sync();
            assert_eq!(answers.len(), EACH, "one Pong for each Ping");
            assert!(answers.iter().all(|frame| frame.header.kind == Kind::Pong));
            notified += scene.victim.session.notifications().len();
            assert_eq!(notified, (round + 1) * EACH);
            if round % 10 == 0 {
                scene.honest_peer_goes_on();
            }
        }
        scene.unharmed();
        scene.honest_peer_goes_on();
    });
}

/// Insiders that repeatedly connect and break the protocol leave no state behind.
#[test]
fn breaking_the_protocol_again_and_again_is_in_vain() {
    story(|| {
        let scene = Scene::new();
        for _ in 0..100 {
            let mut flooder = scene.insider();
            flooder.send(&[0xFF; 4096]);
            flooder.is_ended_for(FrameError::UnknownKind(0xFF));
        }
        let known = scene.victim.session.peers();
        assert!(known.len() <= 2, "peers that are gone are kept: {known:?}");
        scene.unharmed();
        scene.honest_peer_goes_on();
    });
}

/// Clients hold connections without sending anything. The victim keeps a bounded number of them and
/// still accepts honest peers.
#[test]
fn silent_connections_are_not_kept_without_limit() {
    story(|| {
        const SILENT: usize = 1600;
        const LIMIT: usize = 1200;
        let setup = Setup::lanes1_workers1().native();
        let victim = RemoteProcess::open("victim", &setup);
        let files = victim.open_files();
        let silent: Vec<_> = (0..SILENT).map(|_| dial(victim.addresses()[0])).collect();
        // Connects after all of them: once it is connected, each of them has been accepted.
        let alice = Host::open("alice", &setup);
        let peer = alice.knows(&victim);
        alice.verify_traffic(&peer, &victim, 1);
        let held = victim.open_files().saturating_sub(files);
        assert!(held < LIMIT, "{held} descriptors for {SILENT} strangers");
        drop(silent);
        wait_until("the sockets are gone", || {
            // One lane of alice for bulk, and one for small transfers.
            victim.open_files() <= files + 2
        });
        alice.verify_traffic(&peer, &victim, 2);
    });
}
