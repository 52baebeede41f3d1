//! The devices of a NCCL net plugin, for `tcpx devices`.

use serde::Serialize;
use tcpx::ncclnet::{DeviceType, Plugin, Properties};

use crate::error::{Failure, chain};
use crate::output::{Output, Tone};
use crate::units;

/// A plugin's description of itself, or why it cannot be used.
#[derive(Debug, Serialize)]
pub(super) struct Section {
    /// The requested plugin.
    asked: String,
    library: Option<String>,
    name: Option<String>,
    api_version: Option<u32>,
    /// Maximum outstanding requests of a connection.
    slots: Option<usize>,
    devices: Vec<Device>,
    pub(super) error: Option<String>,
}

#[derive(Debug, Serialize)]
struct Device {
    index: usize,
    name: String,
    pci_path: Option<String>,
    speed_mbps: Option<u32>,
    host_memory: bool,
    cuda_memory: bool,
    dmabuf: bool,
    /// The way received bytes reach their memory: `host` or `unpack`.
    receives: &'static str,
    max_message_bytes: usize,
}

impl Section {
    /// Loads the plugin: foreign code runs in this process.
    pub(super) fn load(asked: &str, version: u32) -> Section {
        let opened = match version {
            0 => Plugin::open(asked),
            version => Plugin::open_version(asked, version),
        };
        match opened {
            Ok(plugin) => Section {
                asked: asked.to_owned(),
                library: Some(plugin.library().to_owned()),
                name: Some(plugin.name().to_owned()),
                api_version: Some(plugin.api_version()),
                slots: Some(plugin.slots()),
                devices: plugin
                    .devices()
                    .iter()
                    .enumerate()
                    .map(Device::of)
                    .collect(),
                error: None,
            },
            Err(error) => Section {
                asked: asked.to_owned(),
                library: None,
                name: None,
                api_version: None,
                slots: None,
                devices: Vec::new(),
                error: Some(chain(&error)),
            },
        }
    }

    pub(super) fn print(&self, output: &mut Output) -> Result<(), Failure> {
        if let Some(error) = &self.error {
            let line = format_args!("The plugin {:?} cannot be used: {error}.", self.asked);
            let line = output.paint(Tone::Bad, line);
            output.line(line)?;
            return Ok(output.line("")?);
        }
        let mut table = output.table();
        table.set_header(output.header(&[
            "PLUGIN DEVICE",
            "NAME",
            "SPEED",
            "MEMORY",
            "RECEIVES",
            "MESSAGE",
            "PCI",
        ]));
        for device in &self.devices {
            table.add_row(device.cells().map(|text| output.cell(Tone::Plain, text)));
        }
        output.show(table)?;
        let of = |text: &Option<String>| text.clone().unwrap_or_default();
        output.line(format_args!(
            "{}, version {} of the API, {} requests per connection, from {}.",
            of(&self.name),
            self.api_version.unwrap_or_default(),
            self.slots.unwrap_or_default(),
            of(&self.library),
        ))?;
        Ok(output.line("")?)
    }
}

impl Device {
    fn of((index, properties): (usize, &Properties)) -> Device {
        Device {
            index,
            name: properties.name.clone(),
            pci_path: properties.pci_path.clone(),
            speed_mbps: u32::try_from(properties.speed_mbps)
                .ok()
                .filter(|mbps| *mbps > 0),
            host_memory: properties.host_memory,
            cuda_memory: properties.cuda_memory,
            dmabuf: properties.dmabuf,
            receives: match properties.device_type {
                DeviceType::Host => "host",
                DeviceType::Unpack => "unpack",
            },
            max_message_bytes: properties.max_message_bytes,
        }
    }

    fn cells(&self) -> [String; 7] {
        let kinds = [
            ("host", self.host_memory),
            ("CUDA", self.cuda_memory),
            ("dma-buf", self.dmabuf),
        ];
        let kinds = kinds.iter().filter(|(_, has)| *has).map(|(kind, _)| *kind);
        let unknown = || "-".to_owned();
        [
            self.index.to_string(),
            self.name.clone(),
            self.speed_mbps
                .map_or_else(unknown, |mbps| units::megabits_per_second(mbps.into())),
            kinds.collect::<Vec<_>>().join(", "),
            self.receives.to_owned(),
            tcpx_bench::units::bytes(self.max_message_bytes as u64),
            self.pci_path.clone().unwrap_or_else(unknown),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plugin_that_is_not_there_is_a_reason() {
        let section = Section::load("/nowhere/libnccl-net.so", 0);
        assert!(section.error.unwrap().contains("/nowhere/libnccl-net.so"));
        assert!(section.devices.is_empty());
    }

    #[test]
    fn the_table_says_what_memory_a_device_takes() {
        let device = Device {
            index: 1,
            name: "eth1".into(),
            pci_path: None,
            speed_mbps: Some(200_000),
            host_memory: true,
            cuda_memory: true,
            dmabuf: false,
            receives: "unpack",
            max_message_bytes: 1 << 30,
        };
        let cells = device.cells();
        assert_eq!(
            (cells[3].as_str(), cells[4].as_str()),
            ("host, CUDA", "unpack")
        );
        assert_eq!((cells[5].as_str(), cells[6].as_str()), ("1 GiB", "-"));
    }
}
