//! The package's own classes.

mod machine;
mod peer;
mod region;
mod session;
mod transfer;

use pyo3::prelude::*;

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<session::Session>()?;
    module.add_class::<session::Notification>()?;
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
