//! The payload of a frame that is being received, and where it goes.

use std::sync::Arc;

use tcpx_cuda::Device;
use tcpx_net::Span;
use tcpx_proto::frame::{Header, Kind};

use super::may_land;
use crate::error::Error;
use crate::region::Refusal;
use crate::staging::Inbound;
use crate::transport::plugin::{Place, Target};
use crate::transport::tcp::grant::Grant;
use crate::transport::tcp::lane::Flying;
use crate::transport::tcp::{Connection, fail_run};

pub(super) struct Payload {
    pub(super) header: Header,
    pub(super) left: usize,
    pub(super) sink: Sink,
}

/// Where payload goes.
pub(super) enum Sink {
    /// A WRITE into our regions; the grant is in `Rx::grant`.
    Regions { notification: Option<Vec<u8>> },
    /// The answer to a READ of ours.
    Run(Flying),
    /// A message of the peer, kept until it is whole.
    Message { middle: Vec<u8>, bytes: Vec<u8> },
    /// Nowhere; for a WRITE, the reason is reported at the end.
    Nowhere(Option<Refusal>),
}

/// A payload that comes on the comm, or a frame that has to wait for one.
pub(in crate::transport::tcp) struct Coming {
    pub(super) payload: Payload,
    pub(super) grant: Grant,
}

impl Target for Coming {
    fn place(&mut self) -> Option<Place<'_>> {
        if matches!(self.payload.sink, Sink::Regions { .. }) && self.grant.has_dead_memory() {
            self.payload.sink = Sink::Nowhere(Some(Refusal::Revoked));
        }
        match &self.payload.sink {
            Sink::Regions { .. } => Some(self.grant.place()),
            Sink::Run(flying) if may_land(&flying.run) => {
                let plan = &flying.run.plan;
                Some(Place {
                    spans: plan.spans(flying.chunk()),
                    device: plan.device(flying.chunk()),
                    memory: plan.memory(),
                })
            }
            _ => None,
        }
    }

    fn is_dead(&self) -> bool {
        match &self.payload.sink {
            Sink::Regions { .. } => self.grant.has_dead_memory(),
            Sink::Run(flying) => !may_land(&flying.run),
            // It may have had a place before.
            _ => true,
        }
    }
}

impl Payload {
    /// Whether it may be dealt with only after what came before it on the lane: chunks are counted, and notifications
    /// and messages delivered, in order. So are pings answered, but for those that only ask for a sign of life.
    pub(super) fn waits_its_turn(&self) -> bool {
        match self.sink {
            Sink::Regions { .. } | Sink::Run(_) => true,
            Sink::Nowhere(_) | Sink::Message { .. } => match self.header.kind {
                Kind::Write | Kind::Notify | Kind::Send => true,
                Kind::Ping => self.header.transfer != 0,
                _ => false,
            },
        }
    }

    /// In the middle of it: its bytes cannot be brought to their device, and the rest of them goes nowhere.
    pub(super) fn give_up(
        &mut self,
        error: Error,
        inbound: &mut Inbound<Self>,
        connection: &Arc<Connection>,
    ) {
        inbound.forget();
        self.fail(error);
        if let Sink::Run(flying) = &self.sink {
            // Earlier parts may still be landing; the run must not end before they have.
            inbound.wait();
            connection.settle(&flying.run);
            self.sink = Sink::Nowhere(None);
        }
    }

    /// Its bytes have not reached their device.
    pub(super) fn fail(&mut self, error: Error) {
        match &self.sink {
            Sink::Regions { .. } => {
                tracing::warn!(%error, "a device failed, a peer's WRITE is refused");
                self.sink = Sink::Nowhere(Some(Refusal::Device));
            }
            // The chunk is still to be settled.
            Sink::Run(flying) => fail_run(&flying.run, error),
            _ => {}
        }
    }
}

impl Sink {
    /// The device that payload goes to, and where on it.
    pub(super) fn device<'a>(
        &'a self,
        grant: &'a Grant,
    ) -> Option<(&'a Arc<dyn Device>, &'a [Span])> {
        match self {
            Self::Regions { .. } => Some((grant.device.as_ref()?, &grant.spans)),
            Self::Run(flying) => {
                let plan = &flying.run.plan;
                Some((plan.device(flying.chunk())?, plan.spans(flying.chunk())))
            }
            Self::Message { .. } | Self::Nowhere(_) => None,
        }
    }
}
