//! Parses `HOST[:PORT]`.

use std::net::Ipv6Addr;

use crate::listen::DEFAULT_PORT;

/// Appends the default port if `host` has none: `node7` → `node7:17777`, `::1` → `[::1]:17777`.
pub(crate) fn with_port(host: &str) -> Result<String, String> {
    let host = host.trim();
    if host.is_empty() {
        return Err("expected HOST or HOST:PORT".into());
    }
    // A link-local address may name its interface.
    let address = host.split_once('%').map_or(host, |(address, _)| address);
    if address.parse::<Ipv6Addr>().is_ok() {
        return Ok(format!("[{host}]:{DEFAULT_PORT}"));
    }
    let (name, given) = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((name, "")) => (name, None),
        Some((name, rest)) => (name, Some(rest.strip_prefix(':').unwrap_or(rest))),
        None => match host.rsplit_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (host, None),
        },
    };
    let bracketed = host.starts_with('[');
    if name.is_empty() || (name.contains(':') && !bracketed) {
        return Err(format!(
            "{host:?} is not a host; expected HOST, HOST:PORT or [IPV6]:PORT"
        ));
    }
    let port = match given {
        None => DEFAULT_PORT,
        Some(text) => match text.parse::<u16>() {
            Ok(port) if port > 0 => port,
            _ => {
                return Err(format!(
                    "{text:?} is not a port; expected a number from 1 to 65535"
                ));
            }
        },
    };
    Ok(if bracketed {
        format!("[{name}]:{port}")
    } else {
        format!("{name}:{port}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_appended_where_none_is_named() {
        let ok = |host| with_port(host).unwrap();
        assert_eq!(ok("node7"), "node7:17777");
        assert_eq!(ok("fe80::1%eth0"), "[fe80::1%eth0]:17777");
        assert_eq!(ok("[fe80::1%eth0]:9"), "[fe80::1%eth0]:9");
        assert_eq!(ok("node7:80"), "node7:80");
        assert_eq!(ok("10.0.0.1"), "10.0.0.1:17777");
        assert_eq!(ok("::1"), "[::1]:17777");
        assert_eq!(ok("[::1]"), "[::1]:17777");
        assert_eq!(ok("[fd00::1]:9"), "[fd00::1]:9");
    }

    #[test]
    fn what_is_no_host_is_refused() {
        for host in [
            "",
            ":80",
            "node7:",
            "node7:http",
            "node7:0",
            "node7:70000",
            "a:b:1",
            "[::1]x",
        ] {
            assert!(with_port(host).is_err(), "{host}");
        }
    }
}
