//! `tcpx check` between two network namespaces joined by a veth pair, as between two machines.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::{Run, Server, in_environment, skip};

/// Two namespaces with a cable between them; gone when dropped, whatever happened meanwhile.
struct Pair {
    server: String,
    client: String,
}

impl Pair {
    /// `None` where this process may not make namespaces.
    fn new(test: &str) -> Option<Self> {
        let name = |side: &str| format!("tcpx-{}-{test}-{side}", std::process::id());
        let pair = Pair {
            server: name("s"),
            client: name("c"),
        };
        if let Err(why) = ip(&["netns", "add", &pair.server]) {
            skip(
                test,
                &format!("network namespaces need root and iproute2 ({why})"),
            );
            return None;
        }
        let set_up = pair.set_up();
        if let Err(why) = set_up {
            panic!("cannot set up the namespaces: {why}");
        }
        Some(pair)
    }

    fn set_up(&self) -> Result<(), String> {
        ip(&["netns", "add", &self.client])?;
        let link = "link add v0 netns SERVER type veth peer name v0 netns CLIENT";
        let link = link
            .replace("SERVER", &self.server)
            .replace("CLIENT", &self.client);
        ip(&link.split(' ').collect::<Vec<_>>())?;
        for (side, host) in [(&self.server, 1), (&self.client, 2)] {
            ip(&[
                "-n",
                side,
                "addr",
                "add",
                &format!("10.77.0.{host}/24"),
                "dev",
                "v0",
            ])?;
            ip(&[
                "-n",
                side,
                "addr",
                "add",
                &format!("fd77::{host}/64"),
                "dev",
                "v0",
                "nodad",
            ])?;
            ip(&["-n", side, "link", "set", "lo", "up"])?;
            ip(&["-n", side, "link", "set", "v0", "up"])?;
        }
        self.wait_for_carrier()
    }

    /// The kernel notices a cable within a second, not at once.
    fn wait_for_carrier(&self) -> Result<(), String> {
        let deadline = Instant::now() + Duration::from_secs(10);
        for side in [&self.server, &self.client] {
            while !ip(&["-n", side, "link", "show", "v0"])?.contains("state UP") {
                if Instant::now() > deadline {
                    return Err("no carrier on the veth pair".into());
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        Ok(())
    }

    /// The binary inside one of the namespaces, with the interfaces it finds by itself.
    fn tcpx(&self, namespace: &str, args: &[&str]) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", namespace, env!("CARGO_BIN_EXE_tcpx")]);
        let mut command = in_environment(command, args);
        command.env_remove("TCPX_INTERFACES");
        command
    }

    /// A server and a client that reaches it at `host`.
    fn check(&self, host: &str, extra: &[&str]) -> (Run, Run) {
        let arguments = ["check", "server", "--port", "0", "--wait", "30", "--json"];
        let server = Server::start(self.tcpx(&self.server, &[&arguments, extra].concat()));
        let port = server.address.rsplit(':').next().unwrap();
        let host = format!("{host}:{port}");
        let arguments = ["check", "client", &host, "--json"];
        let client: Run = self
            .tcpx(&self.client, &[&arguments, extra].concat())
            .output()
            .unwrap()
            .into();
        (client, server.finish())
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        for namespace in [&self.server, &self.client] {
            // The second may not have been made.
            let _ = ip(&["netns", "del", namespace]);
        }
    }
}

fn ip(args: &[&str]) -> Result<String, String> {
    let output = Command::new("ip")
        .args(args)
        .output()
        .map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(format!(
        "ip {}: {}",
        args.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    ))
}

#[test]
fn a_container_uses_its_virtual_interface() {
    let Some(pair) = Pair::new("devices") else {
        return;
    };
    let run: Run = pair
        .tcpx(&pair.client, &["devices", "--json"])
        .output()
        .unwrap()
        .into();
    let document = run.expect(0).json();
    assert_eq!(
        document["selection"]["interfaces"],
        serde_json::json!(["v0"])
    );
}

#[test]
fn lanes_run_over_ipv4() {
    let Some(pair) = Pair::new("v4") else { return };
    let (client, server) = pair.check("10.77.0.1", &["--lanes", "2"]);
    let (client, _) = (client.expect(0).json(), server.expect(0));
    for lane in client["lanes"].as_array().unwrap() {
        let text = lane.to_string();
        assert!(
            text.contains("10.77.0.") || text.contains("fd77::"),
            "{text}"
        );
        assert_eq!(lane["ok"], true);
    }
}

#[test]
fn the_bootstrap_runs_over_ipv6() {
    let Some(pair) = Pair::new("v6") else { return };
    let (client, server) = pair.check("[fd77::1]", &[]);
    assert_eq!(client.expect(0).json()["ok"], true);
    server.expect(0);
}

#[test]
fn a_cut_cable_is_reported_in_time() {
    let Some(pair) = Pair::new("cut") else { return };
    ip(&["-n", &pair.server, "link", "set", "v0", "down"]).unwrap();
    let arguments = ["check", "client", "10.77.0.1", "--timeout", "2"];
    let run: Run = pair.tcpx(&pair.client, &arguments).output().unwrap().into();
    let stderr = run.expect(1).stderr;
    assert!(stderr.contains("cannot reach 10.77.0.1:17777"), "{stderr}");
}

/// In a namespace, so that the question to a name server never leaves this machine.
#[test]
fn a_name_that_means_nothing_is_said_to_be_unknown() {
    let Some(pair) = Pair::new("name") else {
        return;
    };
    let arguments = ["check", "client", "nobody.invalid", "--timeout", "2"];
    let run: Run = pair.tcpx(&pair.client, &arguments).output().unwrap().into();
    let stderr = run.expect(1).stderr;
    assert!(
        stderr.contains("cannot find an address for `nobody.invalid:17777`"),
        "{stderr}"
    );
}
