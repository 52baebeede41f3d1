//! Transfers: plans, runs and their completion, independent of the transport.

mod chunk;
mod completion;
mod events;
mod message;
mod plan;
mod run;
mod tally;

pub(crate) use self::chunk::{ChunkRef, Offered};
pub use self::completion::TransferState;
pub(crate) use self::completion::{Completion, Watcher, deadline};
pub(crate) use self::events::Queue;
pub use self::events::{Events, Happened};
pub(crate) use self::message::{Announcement, Arrival};
pub(crate) use self::plan::{Limits, Pieces, Plan};
pub(crate) use self::run::{After, Conclusion, Run};
pub use tcpx_proto::lane::Op;
