//! Resolves the addresses of a name, within a time limit.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::mpsc;
use std::time::Duration;

/// Finds the addresses of `name:port`. The resolver has limits of its own, which may be longer: if
/// it takes too long, its thread is abandoned.
pub(super) fn resolve(host: &str, limit: Duration) -> io::Result<Vec<SocketAddr>> {
    let (sender, receiver) = mpsc::channel();
    let name = host.to_owned();
    std::thread::Builder::new()
        .name("resolve".into())
        .spawn(move || {
            // Fails only if the caller has stopped waiting.
            let _ = sender.send(look_up(&name));
        })?;
    let found = receiver.recv_timeout(limit);
    match found.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?? {
        none if none.is_empty() => Err(io::ErrorKind::NotFound.into()),
        addresses => Ok(addresses),
    }
}

/// Asks the system's resolver. The name in brackets may be an address with the name of its
/// interface, such as `[fe80::1%eth0]`, which only that resolver understands.
fn look_up(host: &str) -> io::Result<Vec<SocketAddr>> {
    let bracketed = host.strip_prefix('[').and_then(|h| h.split_once("]:"));
    let addresses = match bracketed {
        Some((name, port)) if name.contains('%') => {
            let port = port.parse::<u16>().map_err(io::Error::other)?;
            (name, port).to_socket_addrs()?.collect()
        }
        _ => host.to_socket_addrs()?.collect(),
    };
    Ok(addresses)
}
