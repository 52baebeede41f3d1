//! Memory: access rights and their revocation, and copies between places within this process.

mod buffer;
mod copy;
mod grant;
mod nearness;
mod region;
mod registry;
mod slots;
mod staging;

pub use self::buffer::Buffer;
pub(crate) use self::copy::{Copier, PendingCopy, ranges_of};
pub(crate) use self::grant::{Grant, Place};
#[cfg(test)]
pub(crate) use self::nearness::tests as nearness_tests;
pub(crate) use self::nearness::{InterfaceSet, Nearness};
pub use self::region::{LocalSlice, MemoryKind, Region, RemoteRegion, RemoteSlice, Segment};
pub(crate) use self::registry::{
    Memory, Refusal, Registry, Users, one_device, one_place, push_merged,
};
pub(crate) use self::slots::{Direction, Pool, Slot, SlotList};
pub(crate) use self::staging::{Staging, glance, is_same_place};
pub use crate::ids::MemId;
