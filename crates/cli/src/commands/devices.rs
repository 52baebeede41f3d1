//! `tcpx devices`: lists the interfaces of this machine, and which of them carry lanes.
//!
//! GPUs are in `gpus`, the devices of a NCCL net plugin in `plugin`.

mod gpus;
mod plugin;

use std::fmt::Display;

use clap::Args;
use serde::Serialize;
use tcpx::TransportKind;
use tcpx_net::interfaces::{self, Interface, InterfaceSelector};

use crate::Verdict;
use crate::error::{Failure, chain};
use crate::output::{Output, Tone};
use crate::settings::Settings;
use crate::units;

const LONG: &str = "\
Lists every network interface of this machine, whether transfers may use it or why not, and which \
ones the current settings choose; then the GPUs that this process sees, and the interfaces that \
transfers of their memory use: the nearest ones, unless all are equally near or TCPX_GPU_LOCALITY \
is off.

Chosen are, unless TCPX_INTERFACES or --interfaces says otherwise, all interfaces with a device \
behind them that are up and have an address (bonds and bridges over a device included); in a \
container, its virtual interface; where there is neither, a tunnel; then loopback. Bridges of \
containers, such as docker0, are used by name only.";

const EXAMPLES: &str = "\
\x1b[1m\x1b[4mExamples:\x1b[0m
  tcpx devices
  tcpx devices --interfaces ^docker,eth0    What would be left?
  tcpx devices --plugin libnccl-net.so      What does this plugin offer?
  tcpx devices --json | jq -r '.interfaces[] | select(.selected) | .name'
  tcpx devices --json | jq '.gpus[] | {ordinal, name, nearest}'

Exits with 1 when the settings choose no interface, or the plugin cannot be used.";

/// List network interfaces and GPUs: speed, NUMA node, PCI path, usable or why not, nearest
#[derive(Debug, Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Load this NCCL net plugin, a path or a name, and list its devices too
    ///
    /// Defaults to TCPX_PLUGIN if TCPX_TRANSPORT=plugin.
    #[arg(long, value_name = "PLUGIN")]
    plugin: Option<String>,

    #[command(flatten)]
    settings: Settings,
}

pub(crate) fn run(args: &Arguments, output: &mut Output) -> Result<Verdict, Failure> {
    let found = interfaces::discover()?;
    let config = args.settings.load();
    let plugin = match (&args.plugin, &config) {
        (Some(asked), Ok(config)) => Some((asked.as_str(), config.plugin_version())),
        (Some(asked), Err(_)) => Some((asked.as_str(), 0)),
        (None, Ok(config)) if config.transport() == TransportKind::Plugin => {
            Some((config.plugin(), config.plugin_version()))
        }
        (None, _) => None,
    };
    let plugin = plugin.map(|(asked, version)| plugin::Section::load(asked, version));
    let (selection, chosen) = match &config {
        Ok(config) => Selection::of(config.interfaces(), &found),
        Err(error) => {
            let selection = Selection {
                selector: None,
                interfaces: vec![],
                error: Some(chain(error)),
            };
            (selection, vec![])
        }
    };
    let report = Report {
        interfaces: found
            .iter()
            .map(|interface| Row::of(interface, &found, &selection))
            .collect(),
        selection,
        gpus: gpus::Section::find(&chosen, config.as_ref().ok()),
        plugin,
    };
    if output.is_json() {
        output.document(&report)?;
    } else {
        report.print(output)?;
    }
    let plugin_failed = report.plugin.as_ref().is_some_and(|p| p.error.is_some());
    Ok(if report.selection.error.is_none() && !plugin_failed {
        Verdict::Fine
    } else {
        Verdict::Problem
    })
}

#[derive(Debug, Serialize)]
struct Report {
    interfaces: Vec<Row>,
    selection: Selection,
    #[serde(flatten)]
    gpus: gpus::Section,
    plugin: Option<plugin::Section>,
}

/// The interfaces that the settings choose.
#[derive(Debug, Serialize)]
struct Selection {
    selector: Option<String>,
    interfaces: Vec<String>,
    error: Option<String>,
}

impl Selection {
    /// Returns the choice of the selector, also as interfaces.
    fn of(selector: &InterfaceSelector, found: &[Interface]) -> (Self, Vec<Interface>) {
        let (chosen, error) = match selector.select(found) {
            Ok(chosen) => (chosen, None),
            Err(error) => (vec![], Some(chain(&error))),
        };
        let selection = Selection {
            selector: Some(selector.to_string()),
            interfaces: chosen.iter().map(|i| i.name.clone()).collect(),
            error,
        };
        (selection, chosen)
    }
}

#[derive(Debug, Serialize)]
struct Row {
    name: String,
    index: u32,
    kind: String,
    up: bool,
    running: bool,
    addresses: Vec<Address>,
    speed_mbps: Option<u32>,
    mtu: u32,
    numa_node: Option<u32>,
    pci_address: Option<String>,
    /// The path from the PCI root to the device, or to each of the devices below a bond and the
    /// like.
    pci_paths: Vec<Vec<String>>,
    driver: Option<String>,
    usable: bool,
    why_not: Option<String>,
    selected: bool,
}

#[derive(Debug, Serialize)]
struct Address {
    ip: String,
    prefix_length: u8,
    link_local: bool,
}

impl Row {
    fn of(interface: &Interface, found: &[Interface], selection: &Selection) -> Self {
        let why_not = interface.usable_among(found).err();
        Row {
            name: interface.name.clone(),
            index: interface.index,
            kind: interface.kind.to_string(),
            up: interface.up,
            running: interface.running,
            addresses: interface.addresses.iter().map(Address::of).collect(),
            speed_mbps: interface.speed_mbps,
            mtu: interface.mtu,
            numa_node: interface.numa_node,
            pci_address: interface.pci_address.clone(),
            pci_paths: interface
                .locations
                .iter()
                .map(|location| location.pci_path.clone())
                .collect(),
            driver: interface.driver.clone(),
            usable: why_not.is_none(),
            why_not: why_not.map(|why| why.to_string()),
            selected: selection.interfaces.contains(&interface.name),
        }
    }
}

impl Address {
    fn of(address: &interfaces::InterfaceAddress) -> Self {
        Address {
            ip: address.ip.to_string(),
            prefix_length: address.prefix_len,
            link_local: address.link_local,
        }
    }
}

impl Report {
    fn print(&self, output: &mut Output) -> Result<(), Failure> {
        let mut table = output.table();
        table.set_header(output.header(&[
            "INTERFACE",
            "KIND",
            "ADDRESSES",
            "SPEED",
            "MTU",
            "NUMA",
            "PCI",
            "DRIVER",
            "LANES",
            "USABLE",
        ]));
        for row in &self.interfaces {
            let usable = match &row.why_not {
                None => output.cell(Tone::Good, "yes"),
                Some(why) => output.cell(Tone::Dim, format!("no: {why}")),
            };
            let lanes = if row.selected { "in use" } else { "-" };
            let tone = if row.selected { Tone::Good } else { Tone::Dim };
            table.add_row(vec![
                output.cell(Tone::Strong, &row.name),
                output.cell(Tone::Plain, &row.kind),
                output.cell(Tone::Plain, row.address_lines()),
                output.cell(Tone::Plain, optional(row.speed())),
                output.cell(Tone::Plain, row.mtu),
                output.cell(Tone::Plain, optional(row.numa_node)),
                output.cell(Tone::Plain, row.pci()),
                output.cell(Tone::Plain, optional(row.driver.as_ref())),
                output.cell(tone, lanes),
                usable,
            ]);
        }
        output.show(table)?;
        output.line("")?;
        self.gpus.print(output)?;
        if let Some(plugin) = &self.plugin {
            plugin.print(output)?;
        }
        self.print_selection(output)
    }

    fn print_selection(&self, output: &mut Output) -> Result<(), Failure> {
        let asked = match self.selection.selector.as_deref() {
            Some("") | None => String::new(),
            Some(selector) => format!(" (asked for: {selector})"),
        };
        let line = match &self.selection.error {
            None => format!(
                "Lanes run over {}{asked}.",
                self.selection.interfaces.join(", ")
            ),
            Some(error) => output.paint(Tone::Bad, format_args!("No lanes: {error}.")),
        };
        Ok(output.line(line)?)
    }
}

impl Row {
    fn speed(&self) -> Option<String> {
        self.speed_mbps
            .map(|speed| units::megabits_per_second(speed.into()))
    }

    fn pci(&self) -> String {
        let known = self.pci_paths.iter().filter(|path| !path.is_empty());
        let lines: Vec<String> = known.map(|path| pci_lines(path)).collect();
        optional(Some(lines.join("\n")).filter(|lines| !lines.is_empty()))
    }

    fn address_lines(&self) -> String {
        let lines = self.addresses.iter().map(|address| {
            let note = if address.link_local {
                " (link-local)"
            } else {
                ""
            };
            format!("{}/{}{note}", address.ip, address.prefix_length)
        });
        optional(Some(lines.collect::<Vec<_>>().join("\n")).filter(|lines| !lines.is_empty()))
    }
}

/// Formats a PCI device for a table: its address, and below it the path from the root.
fn pci_lines(path: &[String]) -> String {
    match path {
        [way @ .., address] if !way.is_empty() => format!("{address}\nin {}", way.join("/")),
        _ => path.concat(),
    }
}

fn optional(value: Option<impl Display>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpus::tests::{Tree, nic};

    fn row(interface: &Interface) -> Row {
        let selector = InterfaceSelector::every_usable();
        let found = std::slice::from_ref(interface);
        let (selection, chosen) = Selection::of(&selector, found);
        assert_eq!(chosen.len(), 1);
        Row::of(interface, found, &selection)
    }

    #[test]
    fn an_interface_has_its_node_and_its_way_from_the_root() {
        let tree = Tree::new();
        let (nics, _) = tree.a3();
        let eth3 = row(&nics[2]);
        assert_eq!(
            eth3.pci(),
            "0000:35:00.0\nin pci0000:30/0000:30:01.0/0000:31:00.0/0000:32:02.0"
        );
        let document = serde_json::to_value(&eth3).unwrap();
        assert_eq!(document["numa_node"], 1);
        assert_eq!(document["pci_paths"][0][4], "0000:35:00.0");
        // A bond has the locations of all devices below it.
        let locations = nics[..2].iter().flat_map(|nic| nic.locations.clone());
        let bond = row(&nic("bond0", locations.collect()));
        assert_eq!(bond.pci().lines().count(), 4);
        assert_eq!(row(&nic("ens4", Vec::new())).pci(), "-");
    }
}
