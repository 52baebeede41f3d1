//! Errors of interfaces, of selecting among them and of listing them.

use std::fmt;
use std::io;

use super::Interface;
use super::select::{InterfaceSelector, NAME_MAX};

/// The kernel did not list the interfaces.
#[derive(Debug, thiserror::Error)]
#[error("cannot list the network interfaces: the kernel refused to report {what}")]
pub struct DiscoverError {
    pub(super) what: &'static str,
    pub(super) source: io::Error,
}

/// The reason an interface is not used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WhyNot {
    /// The interface was not switched on.
    #[error("is down")]
    Down,
    /// The link has no carrier: nothing answers at its other end.
    #[error("has no carrier")]
    NoCarrier,
    /// The interface has no address, or its addresses are not confirmed yet.
    #[error("has no address")]
    NoAddress,
    /// The interface has link-local addresses only.
    #[error("has link-local addresses only, used by name or when nothing else is usable")]
    OnlyLinkLocal,
    /// Loopback carries lanes only when asked for by name, or when nothing else can.
    #[error("is loopback, used only by name or when nothing else is usable")]
    Loopback,
    /// Virtual interfaces carry lanes only when asked for by name, or when no real one can.
    #[error("is virtual ({kind}), used only by name or when no real interface is usable")]
    Virtual {
        /// The kernel's name for its kind.
        kind: String,
    },
}

/// A text that is no valid [`InterfaceSelector`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseSelectorError {
    /// A comma too many, or a modifier with nothing behind it.
    #[error("an interface name is empty; names are separated by single commas")]
    EmptyName,
    /// `^` or `=` in front of a later name.
    #[error("{name:?}: ^ and = stand once, at the front, and hold for the whole list")]
    MisplacedModifier {
        /// The name with its modifier.
        name: String,
    },
    /// A name no interface can have.
    #[error("{name:?} is longer than an interface name can be ({NAME_MAX} bytes)")]
    TooLong {
        /// The name.
        name: String,
    },
    /// A character no interface name can have.
    #[error("{name:?} contains {character:?}, which no interface name can")]
    BadCharacter {
        /// The name.
        name: String,
        /// The first such character.
        character: char,
    },
}

/// An interface that was considered, and why it was not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// The interface's name.
    pub name: String,
    /// The reason it was not taken.
    pub why: WhyNot,
}

impl Candidate {
    pub(super) fn unready(interface: &Interface) -> Option<Self> {
        let why = interface.ready().err()?;
        Some(Candidate {
            name: interface.name.clone(),
            why,
        })
    }

    pub(super) fn unusable(interface: &Interface) -> Option<Self> {
        let why = interface.usable().err()?;
        Some(Candidate {
            name: interface.name.clone(),
            why,
        })
    }
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.why)
    }
}

/// No interface could be chosen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SelectError {
    /// A name that fits no interface of this machine.
    #[error("no interface matches {name:?}; this machine has {}", list(existing))]
    NoMatch {
        /// The name or prefix that was asked for.
        name: String,
        /// Every interface of this machine.
        existing: Vec<String>,
    },
    /// Interfaces match, but none can carry a connection.
    #[error("the interfaces that match {name:?} are not ready: {}", list(found))]
    NotReady {
        /// The name or prefix that was asked for.
        name: String,
        /// The interfaces that match, each with what is missing.
        found: Vec<Candidate>,
    },
    /// No interface is usable, not even loopback.
    #[error("no usable interface{}: {}", after(selector), list(found))]
    NothingUsable {
        /// The selector that was asked for.
        selector: InterfaceSelector,
        /// The interfaces considered, each with the reason it was not taken.
        found: Vec<Candidate>,
    },
}

fn list<T: ToString>(items: &[T]) -> String {
    let items: Vec<String> = items.iter().map(T::to_string).collect();
    if items.is_empty() {
        "none".into()
    } else {
        items.join(", ")
    }
}

fn after(selector: &InterfaceSelector) -> String {
    if selector.is_default() {
        String::new()
    } else {
        format!(" is left by {selector}")
    }
}
