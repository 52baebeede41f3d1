//! Messages of a connection: notifications, tagged messages, and what is said of lost lanes.
//!
//! They travel on one lane at a time, the *carrier*, which keeps them in order. Each is kept until the
//! peer has it: when the carrier is lost, all that the peer may not have go out again on another lane.
//! The receiver drops what it has.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tcpx_proto::connection::{Inbox, Outbox};
use tcpx_proto::frame::down::{self, Ending, StreamId};
use tcpx_proto::frame::{Header, Kind};

use super::Connection;
use super::event::Message;
use super::lane::Lane;
use super::receive::Ended;
use crate::error::{Error, LostCause};
use crate::sync::{Mutex, Rank};

/// The messages of a connection, in both directions.
pub(super) struct Messages {
    /// Held while a message is delivered: two lanes may bring the same ones.
    inbox: Mutex<Inbox>,
    out: Mutex<Out>,
    /// The lane of the carrier, or of the last one; for those who need no more than a hint.
    carrier: AtomicUsize,
}

struct Out {
    outbox: Outbox,
    carrier: Option<Arc<Lane>>,
    closed: bool,
}

impl Messages {
    /// `first` is the lane that carries them.
    pub(super) fn new(first: &Arc<Lane>) -> Self {
        Self {
            inbox: Mutex::new(Rank::Messages, Inbox::default()),
            out: Mutex::new(
                Rank::Outbox,
                Out {
                    outbox: Outbox::default(),
                    carrier: Some(Arc::clone(first)),
                    closed: false,
                },
            ),
            carrier: AtomicUsize::new(first.index()),
        }
    }

    /// The lane that messages travel on; it may be lost.
    pub(super) fn carrier(&self) -> usize {
        self.carrier.load(Ordering::Relaxed)
    }

    /// Bytes of messages that the peer may not have.
    pub(super) fn kept(&self) -> usize {
        self.out.lock().outbox.bytes()
    }

    /// Queues a message, whose number is put in. Returns the bytes of those that the peer may not have.
    fn push(&self, encode: impl FnOnce(&mut Vec<u8>)) -> usize {
        let mut out = self.out.lock();
        if out.closed {
            return 0;
        }
        let Out {
            outbox, carrier, ..
        } = &mut *out;
        let frame = outbox.push(|number, frame| {
            encode(frame);
            Header::set_number(frame, number);
        });
        if let Some(lane) = carrier {
            // Where the lane was closed meanwhile, whoever closed it sends the message again.
            lane.push_control(|queue| queue.extend_from_slice(frame));
        }
        outbox.bytes()
    }

    /// Says that this side has let go of a stream, on `next` where the stream carried messages: then
    /// all go out again.
    pub(super) fn tell_down(&self, stream: StreamId, endings: &[Ending], next: Option<Arc<Lane>>) {
        self.push(|frame| down::encode(frame, stream, 0, endings));
        let mut out = self.out.lock();
        let is_carrier = |lane: &Arc<Lane>| lane.id() == stream;
        if out.carrier.take_if(|lane| is_carrier(lane)).is_some() || out.carrier.is_none() {
            self.elect(&mut out, next);
        }
    }

    /// A lane has a new stream, which carries messages if none does, or if it is the one that is kept
    /// for them: the peer drops those that it has from the other.
    pub(super) fn rejoined(&self, lane: &Arc<Lane>, is_express: bool) {
        let mut out = self.out.lock();
        if out.carrier.is_none() || is_express {
            self.elect(&mut out, Some(Arc::clone(lane)));
        }
    }

    fn elect(&self, out: &mut Out, next: Option<Arc<Lane>>) {
        let Some(lane) = next else { return };
        if out.closed {
            return;
        }
        self.carrier.store(lane.index(), Ordering::Relaxed);
        lane.push_control(|queue| {
            out.outbox
                .messages()
                .for_each(|frame| queue.extend_from_slice(frame));
        });
        out.carrier = Some(lane);
    }

    /// Forgets everything, once the connection has ended.
    pub(super) fn close(&self) {
        let mut out = self.out.lock();
        out.closed = true;
        out.carrier = None;
        out.outbox.close();
    }
}

impl Connection {
    /// Queues a message and sends it if that is possible at once.
    pub(super) fn message(&self, encode: impl FnOnce(&mut Vec<u8>)) {
        self.messages.push(encode);
        self.send_messages();
    }

    /// As [`Connection::message`], for one that the peer causes and that cannot be refused. A peer that
    /// never reads such messages loses its connection.
    pub(super) fn message_owed(&self, encode: impl FnOnce(&mut Vec<u8>)) {
        let bytes = self.messages.push(encode);
        // Twice what an application is allowed, which must not use up the room of these.
        if bytes > 2 * self.context.quota.of_a_peer() {
            let peer = self.above.name().to_owned();
            let cause = LostCause::NotReading { bytes };
            self.end_with(Error::PeerLost { peer, cause });
        }
        self.send_messages();
    }

    pub(super) fn send_messages(&self) {
        self.context.control.stay_awake();
        let lanes = self.lanes.load();
        let Some(lane) = lanes.get(self.messages.carrier()) else {
            return;
        };
        self.pump(lane, 1);
        // What was waiting before it may have begun to move.
        if lane.is_unfinished() {
            lane.call_worker();
        }
    }

    pub(super) fn send_notify(&self, transfer: u64, message: &[u8]) {
        let header = Header {
            payload: message.len() as u64,
            ..Header::new(Kind::Notify, transfer)
        };
        let encode = |out: &mut Vec<u8>| {
            header.encode(out);
            out.extend_from_slice(message);
        };
        if transfer == 0 {
            // Its application was told when too many of them waited.
            self.message(encode);
        } else {
            self.message_owed(encode);
        }
    }

    /// Delivers a message, unless it has come on another lane before.
    pub(super) fn deliver_message(&self, lane: &Lane, number: u32, bytes: usize, what: Message) {
        let mut inbox = self.messages.inbox.lock();
        match inbox.handle_message(number, bytes) {
            Ok(true) => self.deliver_new(what),
            Ok(false) => {}
            Err(violation) => {
                drop(inbox);
                return self.lane_ended(lane, Ended::misbehaved(violation));
            }
        }
        let received = inbox.poll_received(false);
        drop(inbox);
        self.tell_received(lane, received);
    }

    /// Tells the peer which messages are here, as it asks for a sign of life.
    pub(super) fn tell_received_now(&self, lane: &Lane) {
        let received = self.messages.inbox.lock().poll_received(true);
        self.tell_received(lane, received);
    }

    fn tell_received(&self, lane: &Lane, received: Option<u32>) {
        if let Some(next) = received {
            let header = Header {
                seq: next,
                ..Header::new(Kind::Received, 0)
            };
            lane.push_control(|out| header.encode(out));
        }
    }

    /// The peer has the messages before `next`.
    pub(super) fn received(&self, lane: &Lane, next: u32) {
        let handled = self.messages.out.lock().outbox.handle_received(next);
        if let Err(violation) = handled {
            self.lane_ended(lane, Ended::misbehaved(violation));
        }
    }
}
