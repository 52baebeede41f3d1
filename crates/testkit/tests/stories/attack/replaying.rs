//! Clients that replay what they have overheard.

use std::io::{Read, Write};
use std::net::TcpStream;

use tcpx_proto::frame::Kind;
use tcpx_proto::handshake::Client;
use tcpx_testkit::attack::{Scene, Target, ask, plain};
use tcpx_testkit::raw::{closed, shout};
use tcpx_testkit::{Content, story};

const BAD_PROOF: &[u8] = b"TCPX\x05\0\x02\0\x03\0";

/// Reads one message of a handshake.
fn message(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = vec![0; 8];
    stream.read_exact(&mut bytes).expect("a message");
    let len = usize::from(u16::from_le_bytes([bytes[6], bytes[7]]));
    bytes.resize(8 + len, 0);
    stream.read_exact(&mut bytes[8..]).expect("its body");
    bytes
}

/// Processes the victim's hello and returns the proof for it.
fn proof(client: &mut Client, stream: &mut TcpStream) -> Vec<u8> {
    let hello = message(stream);
    assert_eq!(client.handle(&hello).expect("honest"), hello.len());
    client.poll_transmit().expect("a proof")
}

/// The recorded bytes of a whole lane, sent a second time, prove nothing.
#[test]
fn a_recorded_lane_opens_nothing() {
    story(|| {
        let scene = Scene::new();
        let Target { key, address, .. } = scene.granted();
        let mut stream = scene.dial();
        let mut client = scene.stranger().client(&scene.info());
        let hello = client.poll_transmit().expect("a hello");
        stream.write_all(&hello).expect("taken");
        let proof = proof(&mut client, &mut stream);
        stream.write_all(&proof).expect("taken");
        let ready = message(&mut stream);
        assert_eq!(client.handle(&ready).expect("honest"), ready.len());
        assert!(client.established().is_some());
        let mut honest = scene.accepted(vec![stream]);
        let mut frames = ask(Kind::Write, (1, 0), &[key], &[(address, 8, 0)]);
        frames.extend([0x44; 8]);
        frames.extend(plain(Kind::Notify, (0, 0), b"once"));
        honest.send(&frames);
        assert_eq!(honest.frame().header.kind, Kind::Ack);
        assert!(honest.sync().is_empty());
        scene.holds(&[(0, 8, Content::Byte(0x44))]);
        assert_eq!(scene.victim.notification().message, b"once");
        scene.poison();

        // During the connection, and afterwards: all at once, and message by message.
        for over in [false, true] {
            if over {
                honest.lanes.clear();
            }
            let mut stream = scene.dial();
            shout(&mut stream, &[&hello[..], &proof, &frames].concat());
            let said = closed(&mut stream);
            // If unread bytes follow it, the Reject may be lost in a reset.
            assert!(said.is_empty() || !said.ends_with(b"TCPX\x04\0\0\0"));
            let mut stream = scene.dial();
            shout(&mut stream, &hello);
            message(&mut stream);
            shout(&mut stream, &proof);
            assert_eq!(closed(&mut stream), BAD_PROOF);
            if !over {
                assert!(
                    honest.sync().is_empty(),
                    "the lane that was recorded goes on"
                );
            }
        }
        scene.unharmed();
        assert!(scene.victim.session.notifications().is_empty());
        assert!(
            scene
                .victim
                .session
                .accept(std::time::Duration::ZERO)
                .is_err()
        );
        scene.honest_peer_goes_on();
    });
}

/// A proof is valid for one hello of the victim: not for another handshake, even at the same moment
/// and for the same client.
#[test]
fn a_proof_for_another_nonce_opens_nothing() {
    story(|| {
        let scene = Scene::new();
        let stranger = scene.stranger();
        let info = scene.info();
        let mut begun = [(); 2].map(|()| {
            let mut stream = scene.dial();
            let mut client = stranger.client(&info);
            shout(&mut stream, &client.poll_transmit().expect("a hello"));
            let proof = proof(&mut client, &mut stream);
            (stream, proof)
        });
        assert_ne!(begun[0].1, begun[1].1, "the victim repeats its nonce");
        let proofs = begun.each_ref().map(|(_, proof)| proof.clone());
        for ((stream, _), proof) in begun.iter_mut().zip(proofs.iter().rev()) {
            shout(stream, proof);
            assert_eq!(closed(stream), BAD_PROOF);
        }
        assert!(
            scene
                .victim
                .session
                .accept(std::time::Duration::ZERO)
                .is_err()
        );
        scene.honest_peer_goes_on();
    });
}

/// The victim's own tags, sent back to it, are not accepted as a client's.
#[test]
fn the_victims_own_words_prove_nothing() {
    story(|| {
        let scene = Scene::new();
        let mut stream = scene.dial();
        let hello = scene.stranger().client(&scene.info()).poll_transmit();
        shout(&mut stream, &hello.expect("a hello"));
        let answer = message(&mut stream);
        // docs/wire-protocol.md: the tag is the last 32 bytes of a ServerHello.
        let tag = &answer[answer.len() - 32..];
        let mut proof = b"TCPX\x03\0\x40\0".to_vec();
        proof.extend_from_slice(tag);
        proof.extend_from_slice(tag);
        shout(&mut stream, &proof);
        assert_eq!(closed(&mut stream), BAD_PROOF);
        assert!(
            scene
                .victim
                .session
                .accept(std::time::Duration::ZERO)
                .is_err()
        );
        scene.honest_peer_goes_on();
    });
}

/// An overheard handshake with one session is useless for another.
#[test]
fn a_proof_for_one_session_opens_no_other() {
    story(|| {
        let (scene, other) = (Scene::new(), Scene::new());
        let (info, others) = (scene.info(), other.info());
        // A client of both gives its proof for one to the other.
        let mut stream = other.dial();
        let hello = scene.stranger().client(&others).poll_transmit();
        shout(&mut stream, &hello.expect("a hello"));
        message(&mut stream);
        let mut client = scene.stranger().client(&info);
        let mut honest = scene.dial();
        shout(&mut honest, &client.poll_transmit().expect("a hello"));
        shout(&mut stream, &proof(&mut client, &mut honest));
        assert_eq!(closed(&mut stream), BAD_PROOF);
        other.honest_peer_goes_on();
        scene.honest_peer_goes_on();
    });
}
