//! The port that a session listens on: the same number at all of its addresses.
//!
//! The sessions of a host may share a range without knowing of each other: each takes the first
//! port that is free at all of its addresses. All sessions bind their addresses in the same order,
//! so that of two sessions that want the same port one gets it at all addresses.

use std::io::{Error as IoError, ErrorKind};
use std::net::SocketAddr;
use std::time::Duration;

use tcpx_net::{Listener, SocketOptions};

use super::random;
use crate::config::PortRange;
use crate::error::Error;
use crate::log::limited;
use crate::peers::LocalAddress;

/// Limits how often the kernel is asked for another port when
/// its choice for one address is taken at the next.
const FREE_PORTS: usize = 64;

/// Limits the passes through a range before all of it counts as taken. A port that another session
/// is about to release looks taken; so does a port, to both, on which two sessions begin to listen
/// at the same moment.
const PASSES: u32 = 5;

/// Pause after the first pass; doubled after each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(20);

/// Why an address cannot be listened on at a port.
enum Failure {
    /// The port is in use, by a listener or a connection.
    Taken(SocketAddr),
    /// Another error, at every address.
    Other(IoError),
}

/// Listens on one port at all addresses; skips addresses that cannot be bound for other reasons.
/// Returns listeners in the order of the addresses.
pub(super) fn listen(
    local: &[LocalAddress],
    ports: PortRange,
    options: &SocketOptions,
) -> Result<(Vec<Listener>, Vec<SocketAddr>), Error> {
    let mut bind = |address| {
        let listener = Listener::bind(address, options)?;
        Ok((listener.local_addr()?, listener))
    };
    let mut pause = |pass: u32| {
        let pause = FIRST_PAUSE * 2u32.pow(pass);
        let [byte] = random().unwrap_or([0]);
        std::thread::sleep(pause + pause * u32::from(byte) / 512);
    };
    let bound = bind_all(local, ports, &mut bind, &mut pause);
    match bound {
        Ok(bound) => Ok(bound.into_iter().map(|(a, listener)| (listener, a)).unzip()),
        Err(Failure::Taken(address)) => Err(Error::PortsTaken { ports, address }),
        Err(Failure::Other(error)) => Err(Error::io("cannot listen on any interface", error)),
    }
}

/// A function that listens: `Listener::bind`, or a stand-in.
type Bind<'a, L> = &'a mut dyn FnMut(SocketAddr) -> std::io::Result<(SocketAddr, L)>;

fn bind_all<L>(
    local: &[LocalAddress],
    ports: PortRange,
    bind: Bind<'_, L>,
    pause: &mut dyn FnMut(u32),
) -> Result<Vec<(SocketAddr, L)>, Failure> {
    let passes = if ports.is_any() { 1 } else { PASSES };
    let tries = if ports.is_any() { FREE_PORTS } else { 1 };
    let mut taken = None;
    for pass in 0..passes {
        if pass > 0 {
            pause(pass - 1);
        }
        for port in ports.ports() {
            for _ in 0..tries {
                match bind_port(local, port, bind) {
                    Err(Failure::Taken(address)) => taken = Some(Failure::Taken(address)),
                    result => return result,
                }
            }
        }
    }
    let nothing = || Failure::Other(ErrorKind::AddrNotAvailable.into());
    Err(taken.unwrap_or_else(nothing))
}

/// Listens on a port at all addresses, or at none;
/// port 0 means the kernel's choice for the first address.
fn bind_port<L>(
    local: &[LocalAddress],
    port: u16,
    bind: Bind<'_, L>,
) -> Result<Vec<(SocketAddr, L)>, Failure> {
    let mut order: Vec<usize> = (0..local.len()).collect();
    order.sort_by_key(|&index| (local[index].ip, local[index].interface));
    let mut bound: Vec<(usize, (SocketAddr, L))> = Vec::new();
    let mut other = IoError::from(ErrorKind::AddrNotAvailable);
    let mut port = port;
    for index in order {
        let address = local[index].with_port(port);
        match bind(address) {
            Ok(listener) => {
                port = listener.0.port();
                bound.push((index, listener));
            }
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                return Err(Failure::Taken(address));
            }
            Err(error) => {
                limited!(
                    WARN,
                    %address,
                    %error,
                    remedy = "leave the interface out of TCPX_INTERFACES, or see why it is not usable",
                    "cannot listen at an address: peers cannot use it"
                );
                other = error;
            }
        }
    }
    if bound.is_empty() {
        return Err(Failure::Other(other));
    }
    bound.sort_by_key(|(index, _)| *index);
    Ok(bound.into_iter().map(|(_, listener)| listener).collect())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;
    use crate::peers::Role;

    /// Ports of a host that are taken.
    type Host = Rc<RefCell<Vec<SocketAddr>>>;

    /// A listener of a host that is released when dropped.
    struct Held(Host, SocketAddr);

    impl Drop for Held {
        fn drop(&mut self) {
            self.0.borrow_mut().retain(|address| *address != self.1);
        }
    }

    fn addresses(list: &[&str]) -> Vec<LocalAddress> {
        let address = |(ip, interface): (&&str, u32)| LocalAddress {
            ip: ip.parse().unwrap(),
            prefix_len: 24,
            role: Role::Data,
            interface,
        };
        list.iter().zip(1..).map(address).collect()
    }

    fn take(host: &Host, address: SocketAddr) -> std::io::Result<(SocketAddr, Held)> {
        let mut address = address;
        if address.port() == 0 {
            address.set_port(40000 + host.borrow().len() as u16);
        }
        if host.borrow().contains(&address) {
            return Err(ErrorKind::AddrInUse.into());
        }
        host.borrow_mut().push(address);
        Ok((address, Held(Rc::clone(host), address)))
    }

    fn open(host: &Host, list: &[&str], ports: &str) -> Result<Vec<Held>, String> {
        let mut bind = |address| take(host, address);
        let ports = ports.parse().unwrap();
        match bind_all(&addresses(list), ports, &mut bind, &mut |_| {}) {
            Ok(bound) => Ok(bound.into_iter().map(|(_, held)| held).collect()),
            Err(Failure::Taken(address)) => Err(address.to_string()),
            Err(Failure::Other(error)) => Err(error.to_string()),
        }
    }

    fn texts(held: &[Held]) -> Vec<String> {
        held.iter().map(|held| held.1.to_string()).collect()
    }

    #[test]
    fn each_session_takes_one_port_for_all_its_addresses() {
        let host = Host::default();
        let both = ["10.0.2.1", "10.0.1.1"];
        let first = open(&host, &both, "700-702").unwrap();
        assert_eq!(texts(&first), ["10.0.2.1:700", "10.0.1.1:700"]);
        let second = open(&host, &both, "700-702").unwrap();
        assert_eq!(texts(&second), ["10.0.2.1:701", "10.0.1.1:701"]);
        let third = open(&host, &both[..1], "700-702").unwrap();
        assert_eq!(texts(&third), ["10.0.2.1:702"]);
        let Err(taken) = open(&host, &both, "700-702") else {
            panic!("702 is taken at one of the addresses");
        };
        assert_eq!(taken, "10.0.2.1:702");
        // Listeners on a port that is taken at another address are released.
        assert_eq!(host.borrow().len(), 5);
        drop(second);
        let again = open(&host, &both, "700-702").unwrap();
        assert_eq!(texts(&again), ["10.0.2.1:701", "10.0.1.1:701"]);
    }

    #[test]
    fn a_free_port_is_the_same_at_all_addresses() {
        let host = Host::default();
        // The kernel's first choice is taken at the second address.
        let _taken = take(&host, "10.0.2.1:40001".parse().unwrap()).unwrap();
        let calls = RefCell::new(0);
        let mut bind = |mut address: SocketAddr| {
            if address.port() == 0 {
                *calls.borrow_mut() += 1;
                address.set_port(40000 + *calls.borrow());
            }
            take(&host, address)
        };
        let local = addresses(&["10.0.1.1", "10.0.2.1"]);
        let bound = bind_all(&local, PortRange::ANY, &mut bind, &mut |_| {});
        let Ok(bound) = bound else {
            panic!("there are free ports");
        };
        assert!(bound.iter().all(|(address, _)| address.port() == 40002));
    }

    #[test]
    fn port_released_during_the_search_is_found() {
        let host = Host::default();
        let held = RefCell::new(Some(take(&host, "10.0.1.1:700".parse().unwrap()).unwrap()));
        let mut bind = |address| take(&host, address);
        let mut pause = |pass| {
            if pass == 1 {
                held.borrow_mut().take();
            }
        };
        let local = addresses(&["10.0.1.1"]);
        let bound = bind_all(&local, 700.into(), &mut bind, &mut pause);
        assert!(bound.is_ok());
    }

    #[test]
    fn unavailable_address_is_skipped() {
        let mut bind = |address: SocketAddr| match address.ip().to_string().as_str() {
            "10.0.1.1" => Err(ErrorKind::AddrNotAvailable.into()),
            _ => Ok((address, ())),
        };
        let local = addresses(&["10.0.1.1", "10.0.2.1"]);
        let bound = bind_all(&local, 700.into(), &mut bind, &mut |_| {});
        assert!(bound.is_ok_and(|bound| bound.len() == 1));
        let bound = bind_all(&local[..1], 700.into(), &mut bind, &mut |_| {});
        assert!(matches!(bound, Err(Failure::Other(_))));
    }
}
