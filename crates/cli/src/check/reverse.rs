//! Tests whether the server can connect to the client: a firewall may allow one direction only.
//!
//! A connection serves both sides, whichever made it. An application whose server side posts the
//! first transfer needs this direction. If no lane can be established, the result shows which
//! direction is closed.

use std::fmt;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tcpx::proto::info::ConnectionInfo;

/// The limit for addresses that a server tries.
const MAX_ADDRESSES: usize = 64;

/// The addresses at which the server tried to connect to the client, and the results.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Reverse {
    /// Whether the server reached an address.
    pub(crate) ok: bool,
    /// What to do if it reached none.
    pub(crate) remedy: Option<String>,
    pub(crate) attempts: Vec<Attempt>,
}

/// One address of the client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Attempt {
    pub(crate) address: SocketAddr,
    /// The error of the system, unless it connected.
    pub(crate) problem: Option<String>,
}

impl Reverse {
    pub(super) fn new(attempts: Vec<Attempt>) -> Self {
        let ok = attempts.iter().any(|attempt| attempt.problem.is_none());
        let remedy = (!ok).then(|| {
            let mut ports: Vec<_> = attempts.iter().map(|a| a.address.port()).collect();
            ports.sort_unstable();
            ports.dedup();
            let ports: Vec<_> = ports.iter().map(u16::to_string).collect();
            format!(
                "let TCP to port {} of this side pass its firewall (TCPX_LISTEN_PORT fixes the \
                 port), or have TCPX_INTERFACES here name an interface that the server reaches",
                ports.join(", ")
            )
        });
        Self {
            ok,
            remedy,
            attempts,
        }
    }
}

impl fmt::Display for Reverse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reached = self.attempts.iter().find(|a| a.problem.is_none());
        if let Some(Attempt { address, .. }) = reached {
            return write!(f, "the server reaches this side at {address}");
        }
        f.write_str("the server does not reach this side")?;
        for (index, Attempt { address, problem }) in self.attempts.iter().enumerate() {
            let comma = if index == 0 { ": " } else { "; " };
            write!(
                f,
                "{comma}{address}: {}",
                problem.as_deref().unwrap_or_default()
            )?;
        }
        Ok(())
    }
}

/// Tries all addresses of a connection info at once.
pub(super) fn probe(info: &[u8], limit: Duration) -> Vec<Attempt> {
    let Ok(info) = ConnectionInfo::decode(info) else {
        return Vec::new();
    };
    let addresses = info.addresses().iter().take(MAX_ADDRESSES);
    std::thread::scope(|scope| {
        let attempts: Vec<_> = addresses
            .map(|&address| scope.spawn(move || attempt(address, limit)))
            .collect();
        let joined = attempts.into_iter().filter_map(|thread| thread.join().ok());
        joined.collect()
    })
}

fn attempt(address: SocketAddr, limit: Duration) -> Attempt {
    let connected = TcpStream::connect_timeout(&address, limit);
    Attempt {
        address,
        problem: connected.err().map(|error| error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempt(address: &str, problem: Option<&str>) -> Attempt {
        Attempt {
            address: address.parse().unwrap(),
            problem: problem.map(str::to_owned),
        }
    }

    #[test]
    fn one_address_that_answers_is_enough() {
        let reverse = Reverse::new(vec![
            attempt("10.0.0.1:7", Some("timed out")),
            attempt("10.0.1.1:8", None),
        ]);
        assert!(reverse.ok && reverse.remedy.is_none());
        assert_eq!(
            reverse.to_string(),
            "the server reaches this side at 10.0.1.1:8"
        );
    }

    #[test]
    fn a_closed_way_is_told_with_ports() {
        let reverse = Reverse::new(vec![
            attempt("10.0.0.1:7", Some("timed out")),
            attempt("10.0.1.1:7", Some("refused")),
        ]);
        assert!(!reverse.ok);
        assert_eq!(
            reverse.to_string(),
            "the server does not reach this side: 10.0.0.1:7: timed out; 10.0.1.1:7: refused"
        );
        assert!(reverse.remedy.unwrap().contains("port 7 of this side"));
    }
}
