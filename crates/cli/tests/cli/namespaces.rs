//! `tcpx check` between two network namespaces joined by a veth pair, as between two machines.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::{Run, Server, in_environment, skip};

/// Two namespaces with a cable between them; removed when dropped, whatever happened meanwhile.
struct Pair {
    server: String,
    client: String,
}

impl Pair {
    /// Returns `None` if this process may not create namespaces.
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

    /// Waits for the carrier: the kernel notices a cable within a second, not at once.
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

    /// Returns the binary inside one of the namespaces, with the interfaces it discovers itself.
    fn tcpx(&self, namespace: &str, args: &[&str]) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", namespace, env!("CARGO_BIN_EXE_tcpx")]);
        let mut command = in_environment(command, args);
        command.env_remove("TCPX_INTERFACES");
        command
    }

    /// Returns a server and a client that reaches it at `host`.
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
            // The second may not exist.
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
    let rows = document["interfaces"].as_array().unwrap();
    let row = rows.iter().find(|row| row["name"] == "v0").unwrap();
    assert_eq!(row["usable"], true, "{row}");
    assert_eq!(row["why_not"], serde_json::Value::Null);
}

/// Opens the port of the command and that of its session: the floor needs no other.
#[test]
fn servers_need_two_ports() {
    let Some(pair) = Pair::new("ports") else {
        return;
    };
    let hole = "table inet hole {\nchain in {\ntype filter hook input priority 0; policy drop;\n\
         iif lo accept\nmeta l4proto ipv6-icmp accept\nct state established accept\n\
         tcp dport 18000-18002 accept\n}\n}\n";
    if let Err(why) = ip(&["netns", "exec", &pair.server, "nft", hole]) {
        return skip("servers_need_two_ports", &why);
    }
    for (ports, host) in [
        ("18001", "10.77.0.1:18000"),
        ("18000-18002", "[fd77::1]:18000"),
    ] {
        for command in ["bench", "check"] {
            let words = [command, "server", "--port", "18000"];
            let rest: &[&str] = match command {
                "bench" => &["--once"],
                _ => &["--wait", "60"],
            };
            let mut server = pair.tcpx(&pair.server, &[&words, rest].concat());
            server.env("TCPX_LISTEN_PORT", ports);
            let server = Server::start(server);
            let words = [command, "client", host, "--json"];
            let rest: &[&str] = match command {
                "bench" => &["--size", "64K", "--iterations", "3"],
                _ => &[],
            };
            let client = pair.tcpx(&pair.client, &[&words, rest].concat()).output();
            let document = Run::from(client.unwrap()).expect(0).json();
            server.finish().expect(0);
            if command == "bench" {
                let case = &document["cases"][0];
                assert!(case["floor"]["ratio"].as_f64().unwrap() > 0.0, "{case}");
            }
        }
    }
}

#[test]
fn a_server_is_found_at_a_link_local_address() {
    let Some(pair) = Pair::new("link") else {
        return;
    };
    let show = [
        "-n",
        &pair.server,
        "-6",
        "addr",
        "show",
        "dev",
        "v0",
        "scope",
        "link",
    ];
    let deadline = Instant::now() + Duration::from_secs(30);
    let settled = [&show[..], &["-tentative"]].concat();
    while !ip(&settled).unwrap().contains("fe80") {
        assert!(Instant::now() < deadline, "the address is not confirmed");
        std::thread::sleep(Duration::from_millis(50));
    }
    let text = ip(&show).unwrap();
    let address = text.split("inet6 ").nth(1).unwrap();
    let address = address.split('/').next().unwrap();
    let (client, server) = pair.check(&format!("[{address}%v0]"), &[]);
    assert_eq!(client.expect(0).json()["ok"], true);
    server.expect(0);
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

/// In a namespace, so that the query to a name server never leaves this machine.
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

/// Rules of nftables for packets that arrive at one of the namespaces.
impl Pair {
    /// Adds a rule for arriving packets; returns false, with a message, if nftables cannot be used.
    fn filter(&self, namespace: &str, rule: &str) -> bool {
        let table = "add table inet t; \
                     add chain inet t arriving { type filter hook input priority 0; }";
        let rules = format!("{table}; add rule inet t arriving {rule}");
        match ip(&["netns", "exec", namespace, "nft", &rules]) {
            Ok(_) => true,
            Err(why) => {
                skip("firewall", &format!("nftables is needed ({why})"));
                false
            }
        }
    }

    /// Does what [`Pair::check`] does, with a bootstrap port of its own, which the rules know, and
    /// a time limit.
    fn check_on(&self, seconds: &str, server: &[&str], client: &[&str]) -> (Run, Run) {
        let arguments = ["check", "server", "--port", BOOTSTRAP, "--wait", "30"];
        let limit = ["--timeout", seconds];
        let server =
            Server::start(self.tcpx(&self.server, &[&arguments[..], &limit, server].concat()));
        let host = format!("10.77.0.1:{BOOTSTRAP}");
        let arguments = ["check", "client", &host, "--json"];
        let arguments = [&arguments[..], &limit, client].concat();
        let run = self.tcpx(&self.client, &arguments).output().unwrap();
        (run.into(), server.finish())
    }
}

/// The port on which the two sides meet while lanes are filtered.
const BOOTSTRAP: &str = "17801";

/// All TCP but the bootstrap.
const LANES: &str = "tcp dport != 17801 tcp flags & (syn | ack) == syn";

/// Returns the message and the remedy of a check that failed.
#[track_caller]
fn told(run: Run) -> (String, String) {
    let error = run.expect(1).json()["error"].clone();
    let text = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
    (text("message"), text("remedy"))
}

#[track_caller]
fn contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} in {text:?}");
    }
}

/// The limit of the check is also the engine's own: the attempts are reported all the same.
#[test]
fn a_firewall_before_the_server_is_told_with_addresses_and_remedy() {
    let Some(pair) = Pair::new("drop") else {
        return;
    };
    if !pair.filter(&pair.server, &format!("{LANES} drop")) {
        return;
    }
    let (client, server) = pair.check_on("3", &[], &[]);
    let (message, remedy) = told(client);
    contains(&message, &["10.77.0.1:", "no answer in time"]);
    // The other direction is open.
    contains(&message, &["the server reaches this side at"]);
    contains(&remedy, &["let TCP to port", "TCPX_LISTEN_PORT"]);
    contains(&server.expect(1).stderr, &["no answer in time"]);
}

#[test]
fn a_firewall_that_closes_both_directions_is_told_for_both() {
    let Some(pair) = Pair::new("both") else {
        return;
    };
    for side in [&pair.server, &pair.client] {
        if !pair.filter(side, &format!("{LANES} drop")) {
            return;
        }
    }
    let (message, _) = told(pair.check_on("3", &[], &[]).0);
    contains(
        &message,
        &[
            "10.77.0.1:",
            "no answer in time",
            "the server does not reach this side: ",
        ],
    );
}

#[test]
fn a_firewall_that_rejects_is_told_from_one_that_drops() {
    let Some(pair) = Pair::new("reject") else {
        return;
    };
    if !pair.filter(&pair.server, &format!("{LANES} reject with tcp reset")) {
        return;
    }
    let (message, remedy) = told(pair.check_on("5", &[], &[]).0);
    contains(&message, &["10.77.0.1:", "Connection refused"]);
    contains(&remedy, &["instead of rejecting it"]);
}

/// Enough for transfers once the client has connected, and reported.
#[test]
fn a_client_that_cannot_be_reached_passes_with_a_warning() {
    let Some(pair) = Pair::new("oneway") else {
        return;
    };
    if !pair.filter(&pair.client, "tcp flags & (syn | ack) == syn drop") {
        return;
    }
    let (client, server) = pair.check_on("5", &[], &[]);
    let report = client.expect(0).json();
    server.expect(0);
    assert_eq!(report["ok"], true);
    assert_eq!(report["reverse"]["ok"], false, "{report}");
    let remedy = report["reverse"]["remedy"].as_str().unwrap();
    contains(remedy, &["of this side pass its firewall"]);
}

#[test]
fn a_firewall_before_the_bootstrap_port_names_the_port() {
    let Some(pair) = Pair::new("port") else {
        return;
    };
    if !pair.filter(&pair.server, "tcp dport 17777 drop") {
        return;
    }
    let arguments = ["check", "client", "10.77.0.1", "--timeout", "1", "--json"];
    let run = pair.tcpx(&pair.client, &arguments).output().unwrap();
    let (message, remedy) = told(run.into());
    contains(&message, &["cannot reach 10.77.0.1:17777", "timed out"]);
    contains(&remedy, &["let TCP to port 17777 pass the firewall"]);
}

/// Lanes on loopback cannot reach the peer: the server offers no other address.
#[test]
fn a_server_that_offers_the_wrong_interface_is_told_so() {
    let Some(pair) = Pair::new("iface") else {
        return;
    };
    let (message, remedy) = told(pair.check_on("5", &["--interfaces", "lo"], &[]).0);
    contains(&message, &["127.0.0.1:"]);
    contains(
        &remedy,
        &["loopback leads to this host alone", "TCPX_INTERFACES"],
    );
}

/// A path that silently drops large packets: everything but payload passes.
#[test]
fn a_path_that_drops_large_packets_is_suspected() {
    let Some(pair) = Pair::new("mtu") else { return };
    if !pair.filter(&pair.server, "meta length > 1400 drop") {
        return;
    }
    let (message, remedy) = told(pair.check_on("3", &[], &[]).0);
    contains(&message, &["drops large packets"]);
    contains(&remedy, &["MTU"]);
}

/// The cable of a pair that is slower than its interfaces say.
#[test]
fn a_slow_cable_is_said_to_be_what_limits() {
    let Some(pair) = Pair::new("slow") else {
        return;
    };
    let shape = "qdisc replace dev v0 root tbf rate 100mbit burst 64kb latency 30ms";
    for side in [&pair.server, &pair.client] {
        let words = ["netns", "exec", side, "tc"];
        let words: Vec<_> = words.into_iter().chain(shape.split(' ')).collect();
        if let Err(why) = ip(&words) {
            return skip("a_slow_cable", &format!("tc with tbf is needed ({why})"));
        }
    }
    // Something else may be what limits for a moment, on a busy machine.
    let mut said = Vec::new();
    for _ in 0..10 {
        let (client, server) = pair.check("10.77.0.1", &["--lanes", "2"]);
        let report = client.expect(0).json();
        server.expect(0);
        let speed = &report["speed"];
        let rate = speed["bytes_per_second"].as_f64().unwrap();
        assert!(rate > 0.0 && rate < 15e6, "{speed}");
        let words = speed["limit"].as_str().unwrap().to_owned();
        if words.starts_with("the network: 0.") {
            return;
        }
        said.push(words);
    }
    panic!("{said:?}");
}
