//! Frames that wait for earlier payloads.

use tcpx_proto::frame::{Header, Kind};

use crate::link::tcp::event::Event;
use crate::link::tcp::payload::{Incoming, Sink};
use crate::testing::{LONG, Pair, connection, wait_until};

/// Payloads to a device land after their frames.
#[test]
fn numbered_ping_waits_for_earlier_payloads() {
    const NUMBER: u64 = 7;
    let pair = Pair::new();
    let (ours, theirs) = (connection(pair.alice.core()), connection(pair.bob.core()));
    let lanes = theirs.lanes.load();
    let lane = &lanes[0];
    let receiver = lane.receiver.try_lock_for(LONG);
    let mut receiver = receiver.expect("no thread holds the receiver for long");
    let before = receiver.landing.reserve();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ours.lanes.load()[0].push_control(|out| Header::new(Kind::Ping, NUMBER).encode(out));
            ours.lanes.load()[0].call_worker();
        });
    });
    let mut events = Vec::new();
    let is_answered = |events: &[Event]| {
        let is_it = |event: &Event| matches!(event, Event::Ping(NUMBER));
        events.iter().any(is_it)
    };
    wait_until("the ping has arrived", || {
        assert!(receiver.step(lane, &theirs, &mut events).is_ok());
        receiver.landing.len() == 2 || is_answered(&events)
    });
    assert!(!is_answered(&events));
    let landed = Incoming {
        header: Header::new(Kind::Pong, 0),
        left: 0,
        sink: Sink::Nowhere(None),
        way: None,
        held: None,
    };
    receiver.landing.complete(before, landed);
    assert!(receiver.land(lane, &theirs, &mut events).is_ok());
    assert!(is_answered(&events));
}
