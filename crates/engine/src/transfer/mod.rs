//! What is to move, and how it ended. Knows no transport.

mod chunk;
mod completion;
mod message;
mod plan;
mod run;

pub(crate) use self::chunk::{ChunkRef, Offered};
pub use self::completion::TransferState;
pub(crate) use self::completion::{Completion, deadline};
pub(crate) use self::message::{Announcement, Arrival};
pub(crate) use self::plan::{Limits, Pieces, Plan};
pub(crate) use self::run::{After, Conclusion, Run};
pub use tcpx_proto::lane::Op;
