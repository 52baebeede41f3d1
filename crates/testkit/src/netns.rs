//! Simulates two machines: network namespaces with cables between them.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::remote::{RemoteProcess, binary};
use crate::story::{skipped, wait_until};

const PREFIX: &str = "tcpx-test";

/// The address family of the cables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// 10.201.0.0/16
    V4,
    /// fd00:201::/32
    V6,
}

/// One of the two machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    /// The first.
    Left,
    /// The second.
    Right,
}

/// Two network namespaces joined by cables: `cable0`, `cable1` and so on, each a network of its
/// own. They are removed when this is dropped.
#[derive(Debug)]
pub struct TwoMachines {
    left: String,
    right: String,
    family: Family,
    cables: usize,
}

impl TwoMachines {
    /// Builds them with `cables` cables; returns `None`, with a message, if that is not possible.
    #[must_use]
    pub fn build(family: Family, cables: usize) -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        remove_leftovers();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = |side| format!("{PREFIX}-{}-{number}-{side}", std::process::id());
        // From here on dropping it cleans up.
        let machines = Self {
            left: name("l"),
            right: name("r"),
            family,
            cables,
        };
        match machines.wire() {
            Ok(()) => Some(machines),
            Err(why) => {
                skipped(&format!("network namespaces cannot be made here: {why}"));
                None
            }
        }
    }

    fn wire(&self) -> Result<(), String> {
        for machine in [&self.left, &self.right] {
            ip(&["netns", "add", machine])?;
            ip(&["-n", machine, "link", "set", "lo", "up"])?;
        }
        for cable in 0..self.cables {
            let name = format!("cable{cable}");
            let (left, right) = (self.left.as_str(), self.right.as_str());
            ip(&[
                "-n", left, "link", "add", &name, "type", "veth", "peer", "name", &name, "netns",
                right,
            ])?;
            for machine in [Machine::Left, Machine::Right] {
                let (ns, address) = (self.name(machine), self.address(machine, cable));
                let with_prefix = match self.family {
                    Family::V4 => format!("{address}/24"),
                    Family::V6 => format!("{address}/64"),
                };
                let mut add = vec!["-n", ns, "address", "add", &with_prefix, "dev", &name];
                if self.family == Family::V6 {
                    // Usable at once, without duplicate address detection.
                    add.push("nodad");
                }
                ip(&add)?;
                ip(&["-n", ns, "link", "set", &name, "up"])?;
            }
        }
        for cable in 0..self.cables {
            self.wait_for_carrier(cable);
        }
        Ok(())
    }

    /// Waits for the carrier, which the kernel reports with a delay.
    fn wait_for_carrier(&self, cable: usize) {
        let name = format!("cable{cable}");
        for machine in [&self.left, &self.right] {
            wait_until("the cable has a carrier", || {
                let link = ip(&["-n", machine, "link", "show", &name, "up"]);
                let is_up = link.is_ok_and(|link| link.contains("state UP"));
                if !is_up {
                    std::thread::sleep(Duration::from_millis(20));
                }
                is_up
            });
        }
    }

    /// Returns the address of a machine on a cable.
    #[must_use]
    pub fn address(&self, machine: Machine, cable: usize) -> IpAddr {
        let host = match machine {
            Machine::Left => 1,
            Machine::Right => 2,
        };
        let text = match self.family {
            Family::V4 => format!("10.201.{cable}.{host}"),
            Family::V6 => format!("fd00:201:{cable}::{host}"),
        };
        text.parse().expect("an address")
    }

    /// Delays packets that leave either machine; returns false, with a message, if that is not
    /// possible.
    #[must_use]
    pub fn delay(&self, one_way: Duration) -> bool {
        let delay = format!("{}us", one_way.as_micros());
        for machine in [Machine::Left, Machine::Right] {
            for cable in 0..self.cables {
                let cable = format!("cable{cable}");
                let mut command = Command::new("ip");
                command.args([
                    "netns",
                    "exec",
                    self.name(machine),
                    "tc",
                    "qdisc",
                    "add",
                    "dev",
                ]);
                command.args([&cable, "root", "netem", "delay", &delay, "limit", "100000"]);
                let output = command.stdin(Stdio::null()).output();
                if !output.is_ok_and(|output| output.status.success()) {
                    skipped("packets cannot be delayed here: tc has no netem");
                    return false;
                }
            }
        }
        true
    }

    /// Returns a command that runs the second process on a machine; arguments may follow.
    #[must_use]
    pub fn command(&self, machine: Machine) -> Command {
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", self.name(machine)])
            .arg(binary());
        command
    }

    /// Starts a process on a machine, with these environment variables; it has no session yet.
    #[must_use]
    pub fn spawn(&self, machine: Machine, name: &str, variables: &[(&str, &str)]) -> RemoteProcess {
        let mut command = Command::new("ip");
        let envs = variables.iter().copied();
        command
            .args(["netns", "exec", self.name(machine), "env"])
            .args(envs.map(|(key, value)| format!("{key}={value}")))
            .arg(binary());
        RemoteProcess::spawn(name, command)
    }

    /// Pulls a cable out.
    ///
    /// # Panics
    /// When that fails.
    pub fn cut(&self, cable: usize) {
        let name = format!("cable{cable}");
        ip(&["-n", &self.left, "link", "set", &name, "down"]).expect("the cable can be cut");
    }

    /// Plugs it back in.
    ///
    /// # Panics
    /// When that fails.
    pub fn mend(&self, cable: usize) {
        let name = format!("cable{cable}");
        ip(&["-n", &self.left, "link", "set", &name, "up"]).expect("the cable can be mended");
        self.wait_for_carrier(cable);
        if self.family == Family::V6 {
            // IPv6 addresses are removed with their interface's link.
            let address = format!("{}/64", self.address(Machine::Left, cable));
            let _ = ip(&[
                "-n", &self.left, "address", "add", &address, "dev", &name, "nodad",
            ]);
        }
    }

    /// Limits the rate of a cable, such as `1gbit`, in both directions.
    ///
    /// # Panics
    /// When that fails.
    pub fn limit(&self, cable: usize, rate: &str) {
        let cable = format!("cable{cable}");
        for machine in [Machine::Left, Machine::Right] {
            let shape = ["tc", "qdisc", "replace", "dev", &cable, "root", "tbf"];
            let arguments = ["rate", rate, "burst", "256kb", "latency", "20ms"];
            self.exec(machine, &[&shape[..], &arguments].concat())
                .expect("the cable can be limited");
        }
    }

    /// Ends every TCP stream of a machine, as a reset by the network does.
    ///
    /// # Panics
    /// When that fails.
    pub fn reset_streams(&self, machine: Machine) {
        self.exec(machine, &["ss", "-K", "-t", "state", "established"])
            .expect("streams can be reset");
    }

    /// Ends the TCP stream of a machine whose left end has this port, as a reset by the network
    /// does.
    ///
    /// # Panics
    /// When that fails.
    pub fn reset_stream(&self, machine: Machine, port: u16) {
        let way = match machine {
            Machine::Left => "sport",
            Machine::Right => "dport",
        };
        let port = format!(":{port}");
        let command = ["ss", "-K", "-t", "state", "established", way, "=", &port];
        self.exec(machine, &command).expect("a stream can be reset");
    }

    /// Removes or restores the address of a machine on a cable.
    ///
    /// # Panics
    /// When that fails.
    pub fn set_address(&self, machine: Machine, cable: usize, is_there: bool) {
        let prefix = match self.family {
            Family::V4 => 24,
            Family::V6 => 64,
        };
        let address = format!("{}/{prefix}", self.address(machine, cable));
        let cable = format!("cable{cable}");
        let action = if is_there { "add" } else { "del" };
        let mut arguments = vec!["-n", self.name(machine), "address", action, &address];
        arguments.extend(["dev", &cable]);
        if is_there && self.family == Family::V6 {
            arguments.push("nodad");
        }
        ip(&arguments).expect("the address can be changed");
    }

    /// Loads a chain of packet filters on a machine, such as `type filter hook input priority 0;`,
    /// replacing the previous one. Returns false, with a message, if that is not possible.
    #[must_use]
    pub fn filter(&self, machine: Machine, chain: &str, rules: &[&str]) -> bool {
        let _ = self.exec(machine, &["nft", "delete table ip tcpxfilter"]);
        let rules = rules.join("\n");
        let table = format!("table ip tcpxfilter {{\nchain it {{\n{chain}\n{rules}\n}}\n}}\n");
        match self.exec(machine, &["nft", &table]) {
            Ok(_) => true,
            Err(why) => {
                skipped(&format!("packets cannot be filtered here: {why}"));
                false
            }
        }
    }

    /// Sets `/etc/hosts` for processes started on a machine from now on, and uses no name server.
    /// Processes started after the first call see later changes.
    ///
    /// # Panics
    /// When that fails.
    pub fn set_hosts(&self, machine: Machine, hosts: &str) {
        let folder = etc(self.name(machine));
        std::fs::create_dir_all(&folder).expect("a folder below /etc/netns");
        // Written in place: processes have the files mounted.
        for (file, text) in [("hosts", hosts), ("resolv.conf", "nameserver 127.0.0.1\n")] {
            std::fs::write(folder.join(file), text).expect("a file below /etc/netns");
        }
    }

    /// Runs `ip` with these arguments, separated by spaces, on a machine.
    ///
    /// # Panics
    /// When that fails.
    pub fn ip(&self, machine: Machine, arguments: &str) {
        let arguments: Vec<_> = arguments.split(' ').collect();
        ip(&[&["-n", self.name(machine)], &arguments[..]].concat())
            .expect("the machine can be changed");
    }

    /// Drops packets that leave a machine and match the rule, such as `tcp sport 7000`, until
    /// [`TwoMachines::let_through`]. Returns false, with a message, if that is not possible.
    #[must_use]
    pub fn swallow(&self, machine: Machine, rule: &str) -> bool {
        let table = format!(
            "table inet tcpxtest {{\nchain out {{\ntype filter hook output priority 0;\n{rule} drop\n}}\n}}\n"
        );
        match self.exec(machine, &["nft", &table]) {
            Ok(_) => true,
            Err(why) => {
                skipped(&format!("packets cannot be dropped here: {why}"));
                false
            }
        }
    }

    /// Ends what [`TwoMachines::swallow`] has begun.
    pub fn let_through(&self, machine: Machine) {
        let _ = self.exec(machine, &["nft", "delete table inet tcpxtest"]);
    }

    /// Runs a program on a machine and returns its output.
    ///
    /// # Errors
    /// Its output when it fails.
    pub fn exec(&self, machine: Machine, command: &[&str]) -> Result<String, String> {
        ip(&[&["netns", "exec", self.name(machine)], command].concat())
    }

    fn name(&self, machine: Machine) -> &str {
        match machine {
            Machine::Left => &self.left,
            Machine::Right => &self.right,
        }
    }
}

impl Drop for TwoMachines {
    fn drop(&mut self) {
        for name in [&self.left, &self.right] {
            // The cables are removed with them.
            let _ = ip(&["netns", "delete", name]);
            let _ = std::fs::remove_dir_all(etc(name));
        }
    }
}

/// Removes the namespaces of killed tests.
fn remove_leftovers() {
    let Ok(list) = ip(&["netns", "list"]) else {
        return;
    };
    for name in list.lines().filter_map(|l| l.split_whitespace().next()) {
        let owner = name
            .strip_prefix(PREFIX)
            .and_then(|rest| rest.split('-').nth(1))
            .filter(|pid| pid.chars().all(|c| c.is_ascii_digit()));
        if let Some(pid) = owner
            && !std::path::Path::new(&format!("/proc/{pid}")).exists()
        {
            let _ = ip(&["netns", "delete", name]);
            let _ = std::fs::remove_dir_all(etc(name));
        }
    }
}

/// Returns the folder whose files `ip netns exec` mounts over those in `/etc`.
fn etc(name: &str) -> PathBuf {
    Path::new("/etc/netns").join(name)
}

fn ip(arguments: &[&str]) -> Result<String, String> {
    let said = |e: &dyn std::fmt::Display| format!("ip {}: {e}", arguments.join(" "));
    let output = Command::new("ip")
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(|e| said(&e))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(said(&String::from_utf8_lossy(&output.stderr).trim()))
    }
}
