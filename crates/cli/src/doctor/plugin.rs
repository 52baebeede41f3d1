//! Checks the NCCL net plugin that the settings choose: loads it.

use tcpx::Config;
use tcpx::ncclnet::{DeviceType, Error, Fault, Plugin, Properties};

use super::Finding;
use crate::error::chain;
use crate::units::count;

const ID: &str = "plugin.nccl_net";

/// Loads the plugin, as a session would.
pub(super) fn finding(config: &Config) -> Finding {
    let opened = match config.plugin_version() {
        0 => Plugin::open(config.plugin()),
        version => Plugin::open_version(config.plugin(), version),
    };
    match opened {
        Ok(plugin) => {
            let what = format!("{} (version {})", plugin.name(), plugin.api_version());
            judge(&what, plugin.devices())
        }
        Err(error) => failed(&error),
    }
}

fn judge(what: &str, devices: &[Properties]) -> Finding {
    let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
    let found = format!(
        "{what}: {}, {}",
        count(devices.len(), "device"),
        names.join(", ")
    );
    if devices
        .iter()
        .any(|device| device.device_type == DeviceType::Unpack)
    {
        return Finding::ok(
            ID,
            format!("{found}; received bytes are unpacked from bounce pages"),
        );
    }
    Finding::ok(ID, found)
}

fn failed(error: &Error) -> Finding {
    let advice = match error.fault() {
        Fault::Environment => {
            "check TCPX_PLUGIN, TCPX_PLUGIN_VERSION and LD_LIBRARY_PATH, and what the plugin itself needs (a GPU, \
             its interfaces, its receive manager); `tcpx doctor --log debug` shows what it says"
        }
        _ => "this plugin cannot be used; TCPX_TRANSPORT=tcp needs none",
    };
    Finding::fail(ID, format!("transport=plugin: {}", chain(error)), advice)
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    #[test]
    fn a_plugin_that_is_not_there_is_a_failure() {
        let config = Config::defaults().with("transport", "plugin").unwrap();
        let config = config.with("plugin", "/nowhere/libnccl-net-x.so").unwrap();
        let finding = finding(&config);
        assert_eq!(finding.level, Level::Fail);
        assert!(
            finding.found.contains("/nowhere/libnccl-net-x.so"),
            "{}",
            finding.found
        );
        assert!(finding.advice.unwrap().contains("TCPX_PLUGIN"));
    }
}
