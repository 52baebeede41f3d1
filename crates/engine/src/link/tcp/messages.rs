//! Messages of a connection: notifications, tagged messages, and reports of lost lanes.
//!
//! Messages travel on one lane at a time, the *carrier*, which keeps them in order. Each message is
//! kept until the peer has received it: when the carrier is lost, all messages that the peer may
//! not have received are sent again on another lane. The receiver drops duplicates.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tcpx_proto::connection::{Inbox, Outbox};
use tcpx_proto::frame::down::{self, Ending, StreamId};
use tcpx_proto::frame::{Header, Kind};

use super::Connection;
use super::ended::Ended;
use super::event::Message;
use super::lane::Lane;
use crate::error::{Error, LostCause};
use crate::sync::{Mutex, Rank};

/// The messages of a connection, in both directions.
pub(super) struct Messages {
    /// Held while a message is delivered: two lanes may bring the same message.
    inbox: Mutex<Inbox>,
    out: Mutex<Out>,
    /// Index of the current or last carrier, as a hint that needs no lock.
    carrier: AtomicUsize,
}

/// What became of a queued message.
#[derive(Default)]
struct Queued {
    /// True if it waits for other frames, which take it along.
    waits: bool,
    /// Bytes of messages that the peer may not have received.
    kept: usize,
}

struct Out {
    outbox: Outbox,
    carrier: Option<Arc<Lane>>,
    closed: bool,
}

impl Messages {
    /// Makes the state of a connection whose messages travel on lane `first`.
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

    /// Returns the lane on which messages travel; it may be lost.
    pub(super) fn carrier(&self) -> usize {
        self.carrier.load(Ordering::Relaxed)
    }

    /// Returns the stream on which messages travel, unless it is lost.
    pub(super) fn live_carrier(&self) -> Option<StreamId> {
        let out = self.out.lock();
        let live = out.carrier.as_ref().filter(|lane| !lane.is_down());
        live.map(|lane| lane.id())
    }

    /// Returns the bytes of messages that the peer may not have received.
    pub(super) fn kept(&self) -> usize {
        self.out.lock().outbox.bytes()
    }

    /// Queues a message and inserts its number. If messages travel on the lane `patient`, this one
    /// waits there for other frames; otherwise it must be sent.
    fn push(&self, patient: Option<&Lane>, encode: impl FnOnce(&mut Vec<u8>)) -> Queued {
        let mut out = self.out.lock();
        if out.closed {
            return Queued::default();
        }
        let Out {
            outbox, carrier, ..
        } = &mut *out;
        let frame = outbox.push(|number, frame| {
            encode(frame);
            Header::set_number(frame, number);
        });
        let carrier = carrier.as_deref();
        let waits = carrier.is_some_and(|lane| patient.is_some_and(|own| ptr::eq(lane, own)));
        if let Some(lane) = carrier {
            // If the lane was closed meanwhile, the closing thread sends the message again.
            let encode = |queue: &mut Vec<u8>| queue.extend_from_slice(frame);
            match waits {
                true => lane.push_patient(encode),
                false => lane.push_control(encode),
            }
        }
        Queued {
            waits,
            kept: outbox.bytes(),
        }
    }

    /// Reports that this side has taken a stream apart. If the stream carried messages, `next`
    /// becomes the carrier, and all messages are sent again.
    pub(super) fn tell_down(&self, stream: StreamId, endings: &[Ending], next: Option<Arc<Lane>>) {
        self.push(None, |frame| down::encode(frame, stream, 0, endings));
        let mut out = self.out.lock();
        let is_carrier = |lane: &Arc<Lane>| lane.id() == stream;
        if out.carrier.take_if(|lane| is_carrier(lane)).is_some() || out.carrier.is_none() {
            self.elect(&mut out, next);
        }
    }

    /// Handles the new stream of a lane, which becomes the carrier if there is none, or if it is
    /// the express lane: the peer drops the duplicates.
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

    /// Drops all messages, once the connection has ended.
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
        self.messages.push(None, encode);
        self.send_messages();
    }

    /// Like [`Connection::message`], for a message that the peer causes and that cannot be refused.
    /// A peer that never reads such messages loses its connection.
    pub(super) fn message_owed(&self, encode: impl FnOnce(&mut Vec<u8>)) {
        self.queue_owed(None, encode);
        self.send_messages();
    }

    /// Queues a message that the peer causes; returns whether it waits for other frames.
    fn queue_owed(&self, patient: Option<&Lane>, encode: impl FnOnce(&mut Vec<u8>)) -> bool {
        let Queued { waits, kept: bytes } = self.messages.push(patient, encode);
        // Twice the limit for applications, which must not use up the room of these messages.
        if bytes > 2 * self.context.quota.of_a_peer() {
            let peer = self.above.name().to_owned();
            let cause = LostCause::NotReading { bytes };
            self.end_with(Error::PeerLost { peer, cause });
        }
        waits
    }

    pub(super) fn send_messages(&self) {
        self.context.control.stay_awake();
        let lanes = self.lanes.load();
        let Some(lane) = lanes.get(self.messages.carrier()) else {
            return;
        };
        self.pump(lane, 1);
        // Frames queued before may have begun to move.
        if lane.is_unfinished() {
            lane.call_worker();
        }
    }

    /// Sends a notification, of a transfer or (0) without one.
    pub(super) fn send_notify(&self, transfer: u64, message: &[u8]) {
        self.queue_notify(transfer, message, None);
        self.send_messages();
    }

    /// Queues a notification; returns whether it waits for other frames of the lane `patient`. If
    /// not, it must be sent.
    pub(super) fn queue_notify(
        &self,
        transfer: u64,
        message: &[u8],
        patient: Option<&Lane>,
    ) -> bool {
        self.above.counters().notified(message.len());
        let header = Header {
            payload: message.len() as u64,
            ..Header::new(Kind::Notify, transfer)
        };
        let encode = |out: &mut Vec<u8>| {
            header.encode(out);
            out.extend_from_slice(message);
        };
        let waits = if transfer == 0 {
            // The application was told when too many notifications were queued.
            self.messages.push(patient, encode).waits
        } else {
            self.queue_owed(patient, encode)
        };
        if waits {
            self.context.note_patient(self.this.clone());
        }
        waits
    }

    /// Delivers a message, unless it was already delivered from another lane.
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

    /// Tells the peer which messages have arrived, in reply to a ping.
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

    /// Removes the messages before `next`, which the peer has received.
    pub(super) fn received(&self, lane: &Lane, next: u32) {
        let handled = self.messages.out.lock().outbox.handle_received(next);
        if let Err(violation) = handled {
            self.lane_ended(lane, Ended::misbehaved(violation));
        }
    }
}
