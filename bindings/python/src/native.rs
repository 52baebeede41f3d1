//! The package's own classes.

mod events;
mod machine;
mod peer;
mod region;
mod session;
mod stats;
mod transfer;

use pyo3::prelude::*;

pub(crate) use self::events::Events;
pub(crate) use self::peer::Peer;
pub(crate) use self::region::{Region, RemoteRegion};

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<session::Session>()?;
    module.add_class::<session::Notification>()?;
    module.add_class::<events::Events>()?;
    module.add_class::<events::Happened>()?;
    module.add_class::<peer::Peer>()?;
    module.add_class::<peer::Lane>()?;
    module.add_class::<peer::SameHost>()?;
    module.add_class::<region::Region>()?;
    module.add_class::<region::RemoteRegion>()?;
    module.add_class::<transfer::Transfer>()?;
    module.add_class::<machine::Interface>()?;
    module.add_class::<machine::Setting>()?;
    module.add_function(wrap_pyfunction!(machine::interfaces, module)?)?;
    module.add_function(wrap_pyfunction!(machine::settings, module)?)
}
