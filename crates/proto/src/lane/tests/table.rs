//! Every state against every frame, as the document prints it: a changed meaning is a changed line.

use alloc::format;
use alloc::string::String;

use super::*;

const DOCUMENT: &str = include_str!("../../../../../docs/wire-protocol.md");

/// The chunk that every frame of the table names.
const NAMED: ChunkId = ChunkId {
    transfer: 1,
    seq: 0,
};
const BYTES: u64 = 10;

const FRAMES: [(&str, Kind, u64); 16] = [
    ("Write", Kind::Write, BYTES),
    ("Ack", Kind::Ack, 0),
    ("WriteError", Kind::WriteError, 0),
    ("Read", Kind::Read, BYTES),
    ("Data", Kind::Data, BYTES),
    ("Data, other length", Kind::Data, BYTES - 1),
    ("ReadError", Kind::ReadError, 0),
    ("Notify", Kind::Notify, 0),
    ("Ping", Kind::Ping, 0),
    ("Pong", Kind::Pong, 0),
    ("Send", Kind::Send, 0),
    ("SendDone", Kind::SendDone, 0),
    ("Goodbye", Kind::Goodbye, 0),
    ("Comm", Kind::Comm, 0),
    ("LaneDown", Kind::LaneDown, 0),
    ("Received", Kind::Received, 0),
];

/// Returns a lane that allows one chunk each way, and may have sent the named chunk.
fn lane(op: Option<Op>) -> Alone {
    let mut lane = Alone::new(1, 1, 1);
    if let Some(op) = op {
        lane.offer(Run::new(op, NAMED.transfer, &[BYTES])).unwrap();
        lane.poll_transmit(&mut { ROOM }).unwrap();
    }
    lane
}

fn after(mut lane: Alone, headers: &[Header]) -> Alone {
    for header in headers {
        if let Meaning::Request(_) = lane.handle_frame(header).unwrap() {
            lane.handle_request(0);
        }
    }
    lane
}

/// Brings a lane into a state.
type Story = fn() -> Alone;

const STATES: [(&str, Story); 8] = [
    ("never sent", || lane(None)),
    ("WRITE in flight", || lane(Some(Op::Write))),
    ("READ in flight", || lane(Some(Op::Read))),
    ("WRITE settled", || {
        after(lane(Some(Op::Write)), &[frame(Kind::Ack, NAMED, 0)])
    }),
    ("READ settled", || {
        after(lane(Some(Op::Read)), &[frame(Kind::Data, NAMED, BYTES)])
    }),
    ("window of WRITEs", || {
        // A chunk that has landed and whose Ack was not sent counts.
        let mut lane = after(lane(None), &[frame(Kind::Write, chunk(9, 0), 1)]);
        lane.handle_landed(chunk(9, 0), None);
        lane
    }),
    ("window of READs", || {
        after(lane(None), &[frame(Kind::Read, chunk(9, 0), 1)])
    }),
    ("pings", || {
        after(lane(None), &[Header::new(Kind::Ping, 1); MAX_PINGS])
    }),
];

fn outcome(result: Result<Meaning<Piece>, Violation>) -> &'static str {
    match result {
        Ok(Meaning::Write(_)) => "land",
        Ok(Meaning::Request(_)) => "answer",
        Ok(Meaning::Data(_) | Meaning::Acknowledged(_)) => "settle",
        Ok(Meaning::Refused(..)) => "settle as failed",
        Ok(Meaning::Message) => "deliver",
        Ok(Meaning::Ping(_)) => "Pong",
        Ok(Meaning::Pong(_) | Meaning::Received(_)) => "–",
        Err(Violation::NotInFlight { .. }) => "✗¹",
        Err(Violation::WrongLength { .. }) => "✗²",
        Err(Violation::TooManyRequests { .. }) => "✗³",
        Err(Violation::TooManyWrites { .. } | Violation::TooManyPings) => "✗³",
        Err(Violation::LateComm) => "✗⁴",
        // Detected by the connection, not by a lane.
        Err(
            Violation::MessageMissing { .. }
            | Violation::MessageNotSent { .. }
            | Violation::NoSuchLane { .. },
        ) => unreachable!(),
    }
}

#[test]
fn every_state_meets_every_frame() {
    let mut table = String::from("| frame |");
    STATES
        .iter()
        .for_each(|(state, _)| table += &format!(" {state} |"));
    table += "\n|---|";
    STATES.iter().for_each(|_| table += "---|");
    for (name, kind, payload) in FRAMES {
        table += &format!("\n| {name} |");
        for (_, state) in STATES {
            let result = state().handle_frame(&frame(kind, NAMED, payload));
            table += &format!(" {} |", outcome(result));
        }
    }
    assert!(
        DOCUMENT.contains(&format!("\n\n{table}\n\n")),
        "not in the document:\n\n{table}\n"
    );
}
