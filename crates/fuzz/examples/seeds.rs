//! Writes `fuzz/seeds` from honest messages, so that the fuzzer starts past the first checks.

use std::fs;
use std::path::Path;

use tcpx_fuzz::handshake::{EDITS, FAULTY_CLIENT, FAULTY_SERVER, NOISE, run};
use tcpx_fuzz::lane::{Action, HOSTILE, PAIR};
use tcpx_proto::descriptor::{Memory, RegionDescriptor, RegionKey};
use tcpx_proto::frame::down::{self, Ending, StreamId};
use tcpx_proto::frame::{Entry, FLAG_INLINE, FLAG_NOTIFY, Header, Kind, Status, TAG_BYTES};
use tcpx_proto::info::{ConnectionInfo, Name, Secret, SessionId};
use tcpx_proto::lane::ChunkId;

fn main() -> std::io::Result<()> {
    for (target, seeds) in [
        ("connection_info", connection_infos()),
        ("frame", frames()),
        ("handshake", handshakes()),
        ("lane", lanes()),
        ("session", sessions()),
    ] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../fuzz/seeds")
            .join(target);
        fs::create_dir_all(&folder)?;
        for (name, bytes) in seeds {
            fs::write(folder.join(name), bytes)?;
        }
    }
    Ok(())
}

type Seeds = Vec<(&'static str, Vec<u8>)>;

fn connection_infos() -> Seeds {
    let info = |name: &str, addresses: &[&str]| {
        ConnectionInfo::new(
            Name::new(name).unwrap(),
            SessionId([0x11; 16]),
            Secret::new([0x22; 32]),
            addresses
                .iter()
                .map(|address| address.parse().unwrap())
                .collect(),
        )
        .unwrap()
        .encode()
    };
    let region = |memory| {
        RegionDescriptor::new(0x7f00_0000_0000, 1 << 30, RegionKey([0x33; 16]), memory)
            .unwrap()
            .encode()
            .to_vec()
    };
    let mixed = info("prefill-0", &["10.1.2.3:7000", "[fe80::1%5]:7001"]);
    // The target adds the checksum to a second copy of its input.
    let unsealed = mixed[..mixed.len() - 8].to_vec();
    vec![
        ("info-v4", info("é", &["127.0.0.1:1"])),
        ("info-mixed", mixed),
        ("info-without-checksum", unsealed),
        ("region-host", region(Memory::Host)),
        ("region-cuda", region(Memory::Cuda { device: 3 })),
    ]
}

fn frames() -> Seeds {
    let frame = |header: Header, entries: &[Entry]| {
        let mut out = Vec::new();
        header.encode(&mut out);
        out.resize(out.len() + 16 * usize::from(header.regions), 0x44);
        entries.iter().for_each(|entry| entry.encode(&mut out));
        out
    };
    let plain = |kind| frame(Header::new(kind, 1), &[]);
    let entries = [
        Entry {
            address: 0x1000,
            len: 4096,
            region: 0,
        },
        Entry {
            address: u64::MAX - 100,
            len: 100,
            region: 1,
        },
    ];
    let table = Header {
        regions: 2,
        entries: 2,
        payload: 4196,
        ..Header::new(Kind::Write, 9)
    };
    let notify = Header {
        flags: FLAG_NOTIFY,
        extra: 12,
        ..table
    };
    let tagged = Header {
        kind: Kind::Send,
        extra: TAG_BYTES as u32,
        ..table
    };
    let inline = Header {
        flags: FLAG_INLINE,
        ..tagged
    };
    vec![
        ("write", frame(table, &entries)),
        ("write-notify", frame(notify, &entries)),
        (
            "read",
            frame(
                Header {
                    kind: Kind::Read,
                    ..table
                },
                &entries,
            ),
        ),
        (
            "send",
            frame(
                Header {
                    payload: 0,
                    ..tagged
                },
                &entries,
            ),
        ),
        ("send-inline", frame(inline, &entries)),
        (
            "data",
            frame(
                Header {
                    payload: 4196,
                    ..Header::new(Kind::Data, 9)
                },
                &[],
            ),
        ),
        ("ack", plain(Kind::Ack)),
        ("write-error", plain(Kind::WriteError)),
        ("read-error", plain(Kind::ReadError)),
        ("notify", plain(Kind::Notify)),
        ("ping", plain(Kind::Ping)),
        ("pong", plain(Kind::Pong)),
        ("send-done", plain(Kind::SendDone)),
        ("goodbye", plain(Kind::Goodbye)),
        ("received", plain(Kind::Received)),
        ("lane-down", lane_down(1, &[(3, None), (4, Some("no"))])),
    ]
}

/// Returns a LaneDown frame without a number, for the stream in `transfer`, with the outcomes of
/// chunks of transfer 1.
fn lane_down(transfer: u64, endings: &[(u32, Option<&str>)]) -> Vec<u8> {
    let endings = endings.iter().map(|(seq, refusal)| Ending {
        id: ChunkId {
            transfer: 1,
            seq: *seq,
        },
        refusal: refusal.map(|text| (Status::OutOfBounds, text.into())),
    });
    let mut frame = Vec::new();
    let stream = StreamId::from_transfer(transfer);
    down::encode(&mut frame, stream, 0, &endings.collect::<Vec<_>>());
    frame
}

fn handshakes() -> Seeds {
    let mut messages = Vec::new();
    assert_eq!(run(|_, bytes| messages.push(bytes.clone())), (true, true));
    let [hello, answer, proof, ready] = &messages[..] else {
        unreachable!("four messages")
    };
    let reject = b"TCPX\x05\0\x02\0\x04\0";
    let unfit = b"TCPX\x05\0\x0a\0\x07\0\x02\0\0\0\x20\0\0\0";
    // The same hellos, of sides that require everything they offer.
    let demanding = |hello: &[u8], offer: usize| {
        let mut hello = hello.to_vec();
        hello.copy_within(offer..offer + 4, offer + 4);
        hello
    };
    let (demanding_server, demanding_client) = (demanding(answer, 10), demanding(hello, 66));

    let noise = |sizes: &[u8], stream: &[&[u8]]| {
        [&[NOISE, sizes.len() as u8], sizes, &stream.concat()].concat()
    };
    vec![
        ("noise-client", noise(&[], &[hello, proof])),
        ("noise-client-bytewise", noise(&[1; 120], &[hello, proof])),
        ("noise-server", noise(&[8, 40], &[answer, ready])),
        ("noise-reject", noise(&[9], &[reject])),
        ("noise-reject-requirement", noise(&[9], &[unfit])),
        ("edits-none", vec![EDITS]),
        ("edits-xor", vec![EDITS, 0, 60, 0, 0, 1]),
        ("edits-insert", vec![EDITS, 1, 50, 0, 1, 1]),
        ("edits-remove", vec![EDITS, 2, 9, 0, 2, 0, 2, 9, 0, 1, 0]),
        ("edits-truncate", vec![EDITS, 3, 7, 0, 3, 0]),
        (
            "faulty-server",
            [&[FAULTY_SERVER], &answer[8..answer.len() - 32]].concat(),
        ),
        (
            "faulty-server-unfit",
            [
                &[FAULTY_SERVER],
                &demanding_server[8..demanding_server.len() - 32],
            ]
            .concat(),
        ),
        ("faulty-client", [&[FAULTY_CLIENT], &hello[8..]].concat()),
        (
            "faulty-client-unfit",
            [&[FAULTY_CLIENT], &demanding_client[8..]].concat(),
        ),
    ]
}

fn lanes() -> Seeds {
    use Action::*;
    // An action of the first side or of the second, with its parameter bits.
    let first = |action: Action, bits: u8| action as u8 | bits << 4;
    let second = |action: Action, bits: u8| first(action, bits) | 8;
    let pair = |lanes: u8, steps: &[&[u8]]| [&[PAIR, 0x21, lanes], &steps.concat()[..]].concat();
    let sent = [first(Poll, 3), second(Deliver, 0), second(Land, 0)];
    let told = [second(Flush, 0), first(Deliver, 0)];
    let answered = [second(Poll, 3), first(Deliver, 0), first(Land, 0)];
    let late = [
        first(Poll, 3),
        first(Poll, 3),
        second(Deliver, 0),
        second(Deliver, 0),
    ];

    let record = |action: u8, header: Header| {
        let mut out = vec![action];
        header.encode(&mut out);
        out
    };
    let hostile = |records: &[Vec<u8>]| [&[HOSTILE, 0x11], &records.concat()[..]].concat();
    let named = |kind, transfer, seq, payload| Header {
        seq,
        payload,
        ..Header::new(kind, transfer)
    };
    let table = |kind, seq| Header {
        regions: 1,
        entries: 1,
        ..named(kind, 9, seq, 1)
    };
    vec![
        ("pair-write", pair(0, &[&[first(Post, 0)], &sent, &told])),
        (
            "pair-write-cut",
            pair(0x80, &[&[first(Post, 4)], &sent, &sent]),
        ),
        ("pair-read", pair(1, &[&[first(Post, 3)], &sent, &answered])),
        (
            "pair-order",
            pair(
                0,
                &[&[first(Post, 2)], &late, &[first(Say, 0), first(Say, 1)]],
            ),
        ),
        (
            "pair-withdraw-kill",
            pair(
                2,
                &[&[
                    second(Post, 4),
                    second(Poll, 7),
                    second(Kill, 0),
                    second(Ping, 0),
                ]],
            ),
        ),
        (
            "hostile-settle",
            hostile(&[
                record(7, named(Kind::Data, 2, 0, 1)),
                record(7, named(Kind::ReadError, 2, 1, 0)),
                record(3, named(Kind::Notify, 0, 0, 0)),
                record(0, named(Kind::ReadError, 2, 2, 0)),
            ]),
        ),
        (
            "hostile-messages",
            hostile(&[
                record(7, named(Kind::LaneDown, 1 << 16, 1, 0)),
                record(7, named(Kind::Received, 0, 2, 0)),
                record(0, named(Kind::SendDone, 3, 2, 0)),
            ]),
        ),
        (
            "hostile-write",
            hostile(&[
                record(0, table(Kind::Write, 0)),
                record(40, table(Kind::Write, 1)),
                record(56, table(Kind::Write, 2)),
                record(0, table(Kind::Write, 3)),
                record(0, table(Kind::Write, 4)),
            ]),
        ),
        (
            "hostile-read",
            hostile(&[
                record(0, table(Kind::Read, 0)),
                record(0, table(Kind::Read, 1)),
                record(0, table(Kind::Read, 2)),
            ]),
        ),
    ]
}

fn sessions() -> Seeds {
    use tcpx_fuzz::session::Action as Do;
    // Two ranges inside, one that begins before the region, one that ends after it.
    let inside = [10, 0, 20, 0, 100, 0, 30, 0];
    let before = [0xFF, 0xFF, 8, 0];
    let behind = [0xFF, 0x0F, 2, 0];
    let ask = |action: Do, key: u8, flags: u8, ranges: &[u8]| {
        let count = (ranges.len() / 4 - 1) as u8;
        [&[action as u8, key, flags, count], ranges].concat()
    };
    let plain = |kind: Kind, transfer: u8, payload: u8| {
        let action = Do::Plain as u8;
        vec![action, kind as u8, transfer, 0, 0, payload, 0]
    };
    let numbered = |kind: Kind, number: u8| vec![Do::Plain as u8, kind as u8, 0, number, 0, 0, 0];
    let whole = |bytes: Vec<u8>| [vec![Do::Bytes as u8, bytes.len() as u8], bytes].concat();
    let sync = || vec![Do::Sync as u8];
    let begin = |op: u8| vec![Do::Begin as u8, op, 99, 0];
    let settle = |which: u8, kind: u8, delta: u8| vec![Do::Settle as u8, which, kind, delta];
    let mut header = vec![Do::Header as u8];
    let tagged = Header {
        extra: TAG_BYTES as u32,
        flags: FLAG_INLINE,
        ..Header::new(Kind::Send, 3)
    };
    tagged.encode(&mut header);
    let joined = |parts: &[Vec<u8>]| parts.concat();
    vec![
        (
            "write-read",
            joined(&[
                ask(Do::Write, 2, 1, &inside),
                ask(Do::Read, 2, 0, &inside),
                ask(Do::Write, 2, 0, &inside[..4]),
                sync(),
            ]),
        ),
        (
            "refused",
            joined(&[
                ask(Do::Write, 2, 0, &before),
                ask(Do::Read, 2, 0, &behind),
                ask(Do::Write, 0, 0, &inside),
                ask(Do::Read, 1, 0, &inside),
            ]),
        ),
        (
            "deregister",
            joined(&[
                ask(Do::Write, 2, 3, &inside),
                vec![Do::Deregister as u8],
                ask(Do::Write, 2, 3, &inside),
                ask(Do::Read, 2, 0, &inside),
            ]),
        ),
        (
            "settle",
            joined(&[
                begin(0),
                begin(1),
                settle(0, 7, 1),
                settle(1, 7, 1),
                sync(),
                settle(1, 7, 1),
            ]),
        ),
        ("wrong-length", joined(&[begin(1), settle(0, 2, 8)])),
        (
            "refused-ours",
            joined(&[begin(0), begin(1), settle(0, 1, 1), settle(1, 3, 1)]),
        ),
        (
            "messages",
            joined(&[
                plain(Kind::Notify, 0, 5),
                plain(Kind::Ping, 7, 0),
                plain(Kind::Pong, 7, 0),
                plain(Kind::SendDone, 7, 3),
                header,
                sync(),
            ]),
        ),
        (
            "numbered",
            joined(&[
                numbered(Kind::Notify, 1),
                numbered(Kind::SendDone, 2),
                numbered(Kind::Notify, 1),
                sync(),
                numbered(Kind::Notify, 4),
            ]),
        ),
        (
            "never-sent",
            joined(&[numbered(Kind::Received, 1), numbered(Kind::Received, 2)]),
        ),
        (
            "lane-never-there",
            joined(&[
                whole(lane_down(1 << 16, &[])),
                sync(),
                numbered(Kind::Received, 2),
                whole(lane_down(1 << 16, &[])),
                sync(),
            ]),
        ),
        (
            "lane-lost",
            joined(&[begin(0), begin(1), whole(lane_down(0, &[(1, None)]))]),
        ),
        ("lane-beyond", whole(lane_down(1, &[]))),
        (
            "goodbye",
            joined(&[plain(Kind::Goodbye, 0, 4), plain(Kind::Ping, 1, 0)]),
        ),
        ("half", [vec![Do::Bytes as u8, 3], vec![7, 0, 0]].concat()),
    ]
}
