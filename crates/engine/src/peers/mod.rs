//! State of a session's peers, and data exchanged with them: links, tagged messages, notifications.

mod aborted;
mod estimate;
mod figures;
mod inbox;
mod mailbox;
mod peer;
mod routes;
mod shared;
mod tagged;

pub use self::estimate::Estimate;
pub use self::inbox::Notification;
pub(crate) use self::mailbox::{Command, Mailbox};
pub(crate) use self::peer::{PeerShared, Waiting};
pub(crate) use self::routes::{LocalAddress, Role, Route, Routes};
pub(crate) use self::shared::{Crew, Parts, SessionCore};
pub(crate) use self::tagged::{Reading, TaggedReceive, TaggedSend, post as post_receive};
