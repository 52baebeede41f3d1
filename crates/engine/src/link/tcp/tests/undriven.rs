//! Connections that only a test drives.

use std::sync::Arc;

use tcpx_net::{Listener, SocketOptions, Stream};
use tcpx_proto::frame::down::StreamId;

use super::super::{Connection, Lane, Windows};
use crate::carrier::comm::RawLane;
use crate::link::Caller;
use crate::testing::{LONG, Pair, connection, wait_until};

/// Makes a connection with one lane that only the test drives, with these bytes already received,
/// and the other end of the stream.
pub(super) fn undriven(pair: &Pair, early: Vec<u8>) -> (Arc<Connection>, Stream) {
    let worker = Arc::clone(&connection(pair.alice.core()).lanes.load()[0].worker);
    let (connection, mut far) = undriven_lanes(pair, vec![early], worker);
    (connection, far.remove(0))
}

/// Makes a connection with one bulk lane, and an express lane if there are two, that only the test
/// drives, each with these bytes already received; and the other ends of the streams.
pub(super) fn undriven_lanes(
    pair: &Pair,
    early: Vec<Vec<u8>>,
    worker: Arc<dyn Caller>,
) -> (Arc<Connection>, Vec<Stream>) {
    let of = connection(pair.alice.core());
    let options = SocketOptions {
        buffer_bytes: 64 << 10,
        dead_after: LONG,
    };
    let listener = Listener::bind(([127, 0, 0, 1], 0).into(), &options).unwrap();
    let windows = Windows::new(&of.context, &of.established, 1);
    let make = |(lane, early)| {
        let stream = Stream::connect(listener.local_addr().unwrap(), None, &options).unwrap();
        let mut far = None;
        wait_until("the lane is connected", || {
            far = listener.accept().ok();
            far.is_some()
        });
        let id = StreamId {
            lane,
            generation: 0,
        };
        let raw = RawLane { stream, early };
        let lane = Lane::new(id, raw, None, windows, Arc::clone(&worker), &of.context);
        (lane.unwrap(), far.unwrap().0)
    };
    let (lanes, far) = (0..).zip(early).map(make).unzip();
    // Never started.
    let connection = Connection::new(
        Arc::clone(&of.context),
        Arc::clone(&of.above),
        of.established.clone(),
        windows,
        lanes,
    );
    (connection, far)
}
