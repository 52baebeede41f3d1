//! The GPUs of this machine, for `tcpx devices`.

use serde::Serialize;
use tcpx::Config;
use tcpx::cuda::{self, DeviceInfo};
use tcpx_bench::units::bytes;
use tcpx_net::interfaces::Interface;

use crate::error::Failure;
use crate::gpus::{self, Nearest};
use crate::output::{Output, Tone};

/// The GPUs, or why there are none.
#[derive(Debug, Serialize)]
pub(super) struct Section {
    gpus: Vec<Gpu>,
    /// The reason there are none, if so.
    no_gpus: Option<String>,
}

#[derive(Debug, Serialize)]
struct Gpu {
    /// The number used in `vram:N` and in the library.
    ordinal: u32,
    name: String,
    pci_address: String,
    numa_node: Option<u32>,
    memory_bytes: u64,
    compute_capability: String,
    /// The newest CUDA version that the driver supports.
    cuda_version: String,
    /// The path from the PCI root to the GPU.
    pci_path: Vec<String>,
    /// The interfaces that its memory uses, if the settings choose some.
    nearest: Option<Nearest>,
}

impl Section {
    /// Returns the GPUs that this process sees, and which of `interfaces`, those that carry lanes,
    /// their memory uses.
    pub(super) fn find(interfaces: &[Interface], config: Option<&Config>) -> Section {
        match cuda::devices() {
            Ok(devices) => {
                let of = |device| Gpu::of(device, interfaces, config);
                Section {
                    gpus: devices.iter().map(of).collect(),
                    no_gpus: None,
                }
            }
            Err(error) => Section {
                gpus: Vec::new(),
                no_gpus: Some(error.to_string()),
            },
        }
    }

    pub(super) fn print(&self, output: &mut Output) -> Result<(), Failure> {
        if let Some(why) = &self.no_gpus {
            let line = output.paint(Tone::Dim, format_args!("No GPUs: {why}."));
            output.line(line)?;
            return Ok(output.line("")?);
        }
        let mut table = output.table();
        table.set_header(output.header(&[
            "GPU", "NAME", "PCI", "NUMA", "MEMORY", "COMPUTE", "CUDA", "USES",
        ]));
        for gpu in &self.gpus {
            table.add_row(gpu.cells().map(|text| output.cell(Tone::Plain, text)));
        }
        output.show(table)?;
        Ok(output.line("")?)
    }
}

impl Gpu {
    /// Returns its table cells.
    fn cells(&self) -> [String; 8] {
        let unknown = || "-".to_owned();
        [
            self.ordinal.to_string(),
            self.name.clone(),
            match self.pci_path.is_empty() {
                true => self.pci_address.clone(),
                false => super::pci_lines(&self.pci_path),
            },
            self.numa_node.map_or_else(unknown, |node| node.to_string()),
            bytes(self.memory_bytes),
            self.compute_capability.clone(),
            self.cuda_version.clone(),
            self.nearest.as_ref().map_or_else(unknown, Nearest::lines),
        ]
    }

    fn of(device: &DeviceInfo, interfaces: &[Interface], config: Option<&Config>) -> Gpu {
        let location = gpus::location(device);
        let nearest = config.and_then(|config| Nearest::choose(&location, interfaces, config));
        let version = |(major, minor): (u32, u32)| format!("{major}.{minor}");
        Gpu {
            ordinal: device.ordinal,
            name: device.name.clone(),
            pci_address: device.pci_bus_id.clone(),
            numa_node: device.numa_node,
            memory_bytes: device.total_bytes,
            compute_capability: version(device.compute_capability),
            cuda_version: version(device.driver_version),
            pci_path: location.pci_path,
            nearest,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpus::tests::Tree;

    fn gpu(nearest: Option<Nearest>) -> Gpu {
        Gpu {
            ordinal: 1,
            name: "NVIDIA H200".into(),
            pci_address: "0000:0a:00.0".into(),
            numa_node: None,
            memory_bytes: 141 << 30,
            compute_capability: "9.0".into(),
            cuda_version: "13.0".into(),
            pci_path: Vec::new(),
            nearest,
        }
    }

    #[test]
    fn the_table_and_the_document_say_what_is_near() {
        let tree = Tree::new();
        let (nics, gpus) = tree.a3();
        let nearest = Nearest::choose(&gpus[0], &nics, &Config::defaults());
        let near = Gpu {
            pci_path: gpus[0].pci_path.clone(),
            ..gpu(nearest)
        };
        let cells = near.cells();
        assert_eq!(cells[4], "141 GiB");
        assert_eq!(
            cells[2],
            "0000:13:00.0\nin pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0"
        );
        assert!(
            cells[7].starts_with("eth1\nsame PCI switch; "),
            "{}",
            cells[7]
        );
        let section = Section {
            gpus: vec![near],
            no_gpus: None,
        };
        let document = serde_json::to_value(section).unwrap();
        let nearest = &document["gpus"][0]["nearest"];
        assert_eq!(nearest["distance"], "same_switch");
        assert_eq!(nearest["interfaces"][0], "eth1");
        assert_eq!(document["gpus"][0]["pci_path"][0], "pci0000:10");
    }

    #[test]
    fn what_is_not_known_is_a_dash() {
        let cells = gpu(None).cells();
        assert_eq!((cells[3].as_str(), cells[7].as_str()), ("-", "-"));
    }
}
