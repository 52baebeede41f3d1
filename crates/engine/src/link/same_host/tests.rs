use std::sync::Arc;

use tcpx_net::{Door, Gates, Wire};
use tcpx_proto::descriptor::{RegionDescriptor, RegionKey};
use tcpx_proto::frame::Status;
use tcpx_proto::info::{Secret, SessionId};
use tcpx_proto::neighbour::{Message, Side, tag};

use crate::link::same_host::Join;
use crate::link::tcp::Connection;
use crate::testing::{LONG, Pair, connection};
use crate::{Buffer, Config, Error, Op, Region, RemoteRegion, Segment, Session};

const LEN: usize = 8 << 20;
const BLOCK: usize = 64 << 10;

fn filled(session: &Session, seed: usize) -> (Buffer, Region) {
    let buffer = Buffer::new(LEN);
    let bytes: Vec<u8> = (0..LEN).map(|i| (i * 31 + seed + i / 251) as u8).collect();
    buffer.write(0, &bytes);
    let region = session.register(&buffer).unwrap();
    (buffer, region)
}

fn bytes_on_lanes(link: &Arc<Connection>) -> u64 {
    use crate::link::Link;
    link.lane_infos().iter().map(|lane| lane.bytes_sent).sum()
}

#[test]
fn blocks_are_copied_in_both_directions_without_lanes() {
    let pair = Pair::on_same_host();
    let (mine, here) = filled(&pair.alice, 1);
    let (theirs, there) = filled(&pair.bob, 2);
    let descriptor = there.descriptor();
    for op in [Op::Write, Op::Read] {
        let blocks = LEN / BLOCK;
        let segments = (0..blocks).map(|i| Segment {
            local: here.at(i * BLOCK),
            remote: descriptor.at((i * 7 % blocks) * BLOCK),
            len: BLOCK,
        });
        let transfer = pair.alice.prepare(op, &pair.to_bob, segments).unwrap();
        transfer.post_with_notification(b"done").unwrap();
        transfer.wait(LONG).unwrap();
        let note = pair.bob.wait_notification(LONG).unwrap();
        assert_eq!(note.message, b"done");
        let (mine, theirs) = (mine.to_vec(), theirs.to_vec());
        for i in 0..blocks {
            let at = (i * 7 % blocks) * BLOCK;
            assert!(
                mine[i * BLOCK..][..BLOCK] == theirs[at..][..BLOCK],
                "block {i}"
            );
        }
    }
    let sent = bytes_on_lanes(&connection(pair.alice.core()));
    assert!(sent < BLOCK as u64, "{sent} bytes on lanes");
}

/// A copier has streams and pinned memory: making one for each chunk would take longer than copying.
#[test]
fn copier_of_a_device_is_kept_for_the_next_chunk() {
    let staged = |name| {
        let settings = [
            ("interfaces", "lo"),
            ("same_host", "require"),
            ("staging", "always"),
        ];
        let set = |config: Config, (key, value)| config.with(key, value).unwrap();
        let config = settings.into_iter().fold(Config::defaults(), set);
        Session::new(config.with("name", name).unwrap()).unwrap()
    };
    let pair = Pair::of(staged("alice"), staged("bob"));
    let (mine, here) = filled(&pair.alice, 1);
    let (theirs, there) = filled(&pair.bob, 2);
    let descriptor = there.descriptor();
    let write = pair
        .alice
        .prepare(Op::Write, &pair.to_bob, whole(&here, &descriptor, LEN))
        .unwrap();
    // Workers and this thread copy.
    let threads = pair.alice.core().context().config.workers() + 1;
    for _ in 0..3 {
        write.post().unwrap();
        write.wait(LONG).unwrap();
        assert!(mine.to_vec() == theirs.to_vec());
        let link = connection(pair.alice.core());
        let kept = link.same_host().copiers.lock().len();
        assert!((1..=threads).contains(&kept), "{kept} copiers");
    }
}

fn whole<'a>(here: &'a Region, there: &'a RemoteRegion, len: usize) -> [Segment<'a>; 1] {
    [Segment {
        local: here.at(0),
        remote: there.at(0),
        len,
    }]
}

#[test]
fn wrong_key_and_wrong_bounds_are_refused() {
    let pair = Pair::on_same_host();
    let (_, here) = filled(&pair.alice, 1);
    let (theirs, there) = filled(&pair.bob, 2);
    let before = theirs.to_vec();
    let genuine = RegionDescriptor::decode(&there.descriptor().to_bytes()).unwrap();
    let forge = |address, len, key| {
        let forged = RegionDescriptor::new(address, len, key, genuine.memory()).unwrap();
        RemoteRegion::from_bytes(&forged.encode()).unwrap()
    };
    let (address, len, key) = (genuine.address(), genuine.len(), genuine.key());
    let cases = [
        (
            forge(address, len, RegionKey([7; 16])),
            Status::UnknownRegion,
        ),
        (forge(address, 2 * len, key), Status::OutOfBounds),
        (forge(address - 1, len, key), Status::OutOfBounds),
    ];
    for (forged, expected) in cases {
        // One chunk, so that no other chunk of the transfer lands inside the region. The second
        // descriptor reaches past the end of the region, the third before its start.
        let segment = Segment {
            local: here.at(0),
            remote: forged.at(forged.len() - LEN),
            len: BLOCK,
        };
        let write = pair
            .alice
            .prepare(Op::Write, &pair.to_bob, [segment])
            .unwrap();
        write.post().unwrap();
        match write.wait(LONG) {
            Err(Error::PeerRefused { status, .. }) => assert_eq!(status, expected),
            other => panic!("{expected:?} was expected: {other:?}"),
        }
    }
    assert!(theirs.to_vec() == before);
}

#[test]
fn reregistered_memory_is_opened_again() {
    let pair = Pair::on_same_host();
    let (mine, here) = filled(&pair.alice, 1);
    let (theirs, there) = filled(&pair.bob, 2);
    let descriptor = there.descriptor();
    let segments = whole(&here, &descriptor, LEN);
    let write = pair
        .alice
        .prepare(Op::Write, &pair.to_bob, segments)
        .unwrap();
    write.post().unwrap();
    write.wait(LONG).unwrap();
    there.deregister().unwrap();
    write.post().unwrap();
    let refused = write.wait(LONG).unwrap_err();
    assert_eq!(refused.kind(), crate::ErrorKind::Refused, "{refused}");
    theirs.write(0, &vec![0; LEN]);
    let again = pair.bob.register(&theirs).unwrap();
    assert_eq!(again.descriptor(), descriptor);
    write.post().unwrap();
    write.wait(LONG).unwrap();
    assert!(mine.to_vec() == theirs.to_vec());
}

/// Gates are reused: their number limits the regions open at the same time, not in total.
#[test]
fn gates_of_deregistered_regions_are_reused() {
    let pair = Pair::on_same_host();
    let (_, here) = filled(&pair.alice, 1);
    let theirs = Buffer::new(3 * super::GATES / 2 * 64);
    for round in 0..2 {
        for first in 0..super::GATES / 2 + 100 {
            let regions = [0, 64].map(|at| {
                let address = (theirs.address() + first * 128 + at) as *mut u8;
                // SAFETY: inside the buffer, which outlives the region.
                unsafe { pair.bob.register_raw(address, 64, crate::MemoryKind::Host) }.unwrap()
            });
            for region in &regions {
                let descriptor = region.descriptor();
                let segments = whole(&here, &descriptor, 64);
                let write = pair
                    .alice
                    .prepare(Op::Write, &pair.to_bob, segments)
                    .unwrap();
                write.post().unwrap();
                write
                    .wait(LONG)
                    .unwrap_or_else(|e| panic!("round {round}, {first}: {e}"));
            }
        }
    }
}

/// A neighbour without the session's secret, or with an invalid message, is refused.
#[test]
fn strangers_are_refused() {
    let secret = Secret::new([1; 32]);
    let client = SessionId([9; SessionId::LEN]);
    let gates = Gates::create(super::GATES).unwrap();
    let join = |secret: &Secret| {
        let mut bytes = Vec::new();
        let connection = 1;
        Message::Join {
            client,
            connection,
            tag: tag(secret, Side::Client, client, connection),
            nonce_at: 1,
        }
        .encode(&mut bytes);
        bytes
    };
    let door = Door::open().unwrap();
    let receive = |bytes: &[u8], fds: &[_]| {
        let wire = Wire::connect(door.name()).unwrap();
        assert!(wire.send(bytes, fds).unwrap());
        Join::receive(door.accept().unwrap().unwrap(), &secret)
    };
    let right = join(&secret);
    assert!(matches!(receive(&right, &[gates.descriptor()]), Ok(Ok(_))));
    let wrong = join(&Secret::new([2; 32]));
    let other = [3];
    for bytes in [&wrong[..], b"nonsense", &right[..40], &other] {
        assert!(receive(bytes, &[gates.descriptor()]).is_err());
    }
    let too_many = [gates.descriptor(), gates.descriptor()];
    assert!(receive(&right, &[]).is_err() && receive(&right, &too_many).is_err());
}
