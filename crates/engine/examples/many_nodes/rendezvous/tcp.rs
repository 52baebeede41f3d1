//! A store that rank 0 serves. `bindings/python/python/tcpx/rendezvous/_tcp.py` describes the
//! protocol.

use std::collections::{BTreeSet, HashMap};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::{Failure, Gathered, Ranked, Store};

/// Limits the bytes of a frame: a request, and a reply with values of all ranks.
const MAX_REQUEST: usize = (1 << 20) + 4096;
const MAX_REPLY: usize = u32::MAX as usize;

/// Additional time for an answer beyond the requested limit.
const GRACE: Duration = Duration::from_secs(30);

/// Limits how long a connection may take to identify itself.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Client of the store; in rank 0 it also has the server.
pub(super) struct TcpStore {
    stream: TcpStream,
    run: String,
    server: Option<Arc<Server>>,
}

impl TcpStore {
    pub(super) fn open(
        address: &str,
        run: &str,
        rank: usize,
        deadline: Instant,
    ) -> Result<Self, Failure> {
        let address = address.split('?').next().unwrap_or_default();
        let server = match rank {
            0 => Some(Server::start(address, run)?),
            _ => None,
        };
        let stream = match &server {
            Some(server) => TcpStream::connect(server.address)?,
            None => connect(address, deadline)?,
        };
        stream.set_nodelay(true)?;
        let run = run.to_owned();
        Ok(Self {
            stream,
            run,
            server,
        })
    }

    fn ask(&mut self, request: &[&[u8]], patience: Duration) -> Result<Vec<Vec<u8>>, Failure> {
        let lost = |error| format!("rank 0, which serves the store, does not answer: {error}");
        self.stream.set_read_timeout(Some(patience))?;
        send(&mut self.stream, request).map_err(lost)?;
        Ok(receive(&mut self.stream, MAX_REPLY).map_err(lost)?)
    }
}

impl Store for TcpStore {
    fn claim(&mut self, rank: usize, value: &[u8]) -> Result<bool, Failure> {
        let (run, rank) = (self.run.clone(), rank.to_string());
        let reply = self.ask(&[b"join", run.as_bytes(), rank.as_bytes(), value], GRACE)?;
        match reply.first().map(Vec::as_slice) {
            Some(b"ok") => Ok(true),
            Some(b"taken") => Ok(false),
            _ => Err("the store at this address is that of another run: use another port".into()),
        }
    }

    fn gather(
        &mut self,
        folder: &str,
        _rank: usize,
        value: &[u8],
        size: usize,
        deadline: Instant,
    ) -> Result<Gathered, Failure> {
        let remaining = deadline.saturating_duration_since(Instant::now());
        let (size, limit) = (size.to_string(), remaining.as_millis().to_string());
        let request = [
            b"gather",
            folder.as_bytes(),
            value,
            size.as_bytes(),
            limit.as_bytes(),
        ];
        let reply = self.ask(&request, remaining + GRACE)?;
        let mut gathered = Gathered::default();
        for triple in reply[1..].chunks_exact(3) {
            let rank = String::from_utf8_lossy(&triple[1]).parse()?;
            let values = match triple[0].as_slice() {
                b"value" => &mut gathered.values,
                b"failed" => &mut gathered.failed,
                _ => &mut gathered.members,
            };
            values.insert(rank, triple[2].clone());
        }
        Ok(gathered)
    }

    fn leave(&mut self, _rank: usize, _size: usize, failure: &str) {
        // If rank 0 has already left, there is no server to tell.
        let _ = self.ask(&[b"leave", failure.as_bytes()], GRACE);
        if let Some(server) = &self.server {
            server.close();
        }
    }
}

/// Serves the values of one run, with a thread for each connection.
struct Server {
    address: SocketAddr,
    run: String,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    members: Ranked,
    failed: Ranked,
    left: BTreeSet<usize>,
    folders: HashMap<String, Ranked>,
    /// Requests whose reply is not sent yet.
    busy: usize,
    is_closing: bool,
}

impl Server {
    fn start(address: &str, run: &str) -> Result<Arc<Self>, Failure> {
        let listener = listen(address)
            .map_err(|e| format!("rank 0 cannot serve the store at {address}: {e}"))?;
        let mut address = listener.local_addr()?;
        if address.ip().is_unspecified() {
            address.set_ip(match address {
                SocketAddr::V4(_) => IpAddr::from([127, 0, 0, 1]),
                SocketAddr::V6(_) => IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1]),
            });
        }
        let server = Arc::new(Self {
            address,
            run: run.to_owned(),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let accepting = Arc::clone(&server);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let server = Arc::clone(&accepting);
                std::thread::spawn(move || server.serve(stream));
            }
        });
        Ok(server)
    }

    /// Waits until pending replies have been sent, because the process then ends.
    fn close(&self) {
        let mut state = self.lock();
        state.is_closing = true;
        self.changed.notify_all();
        let limit = Duration::from_secs(5);
        drop(
            self.changed
                .wait_timeout_while(state, limit, |state| state.busy > 0),
        );
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics with the lock")
    }

    fn serve(&self, mut stream: TcpStream) {
        let joined = self.join(&mut stream);
        let Ok(Some(rank)) = joined else { return };
        while let Ok(request) = receive(&mut stream, MAX_REQUEST) {
            self.lock().busy += 1;
            let reply = self.answer(rank, &request);
            let reply: Vec<&[u8]> = reply.iter().map(Vec::as_slice).collect();
            let is_sent = !reply.is_empty() && send(&mut stream, &reply).is_ok();
            self.lock().busy -= 1;
            self.changed.notify_all();
            if !is_sent {
                break;
            }
        }
        let mut state = self.lock();
        if !state.left.contains(&rank) && !state.is_closing {
            let why = b"its connection to the store ended".to_vec();
            state.failed.entry(rank).or_insert(why);
            self.changed.notify_all();
        }
    }

    fn join(&self, stream: &mut TcpStream) -> std::io::Result<Option<usize>> {
        stream.set_read_timeout(Some(HELLO_TIMEOUT))?;
        let request = receive(stream, MAX_REQUEST)?;
        let [operation, run, rank, value] = &request[..] else {
            return Ok(None);
        };
        let Some(rank) = number(rank).filter(|_| operation == b"join") else {
            return Ok(None);
        };
        if run != self.run.as_bytes() {
            send(stream, &[b"other", self.run.as_bytes()])?;
            return Ok(None);
        }
        let taken = {
            let mut state = self.lock();
            let taken = state.members.get(&rank).cloned();
            state.members.entry(rank).or_insert_with(|| value.clone());
            taken
        };
        if let Some(other) = taken {
            send(stream, &[b"taken", &other])?;
            return Ok(None);
        }
        send(stream, &[b"ok"])?;
        stream.set_read_timeout(None)?;
        Ok(Some(rank))
    }

    /// Returns the reply; empty if the request is invalid.
    fn answer(&self, rank: usize, request: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let words: Vec<&[u8]> = request.iter().map(Vec::as_slice).collect();
        match words[..] {
            [b"members"] => triples(&[(b"member", &self.lock().members)]),
            [b"gather", folder, value, size, limit] => match (number(size), number(limit)) {
                (Some(size), Some(limit)) => self.gather(
                    &String::from_utf8_lossy(folder),
                    rank,
                    value,
                    size,
                    Duration::from_millis(limit as u64),
                ),
                _ => Vec::new(),
            },
            [b"leave", why] => {
                let mut state = self.lock();
                state.left.insert(rank);
                if !why.is_empty() {
                    state.failed.insert(rank, why.to_vec());
                }
                self.changed.notify_all();
                triples(&[])
            }
            _ => Vec::new(),
        }
    }

    fn gather(
        &self,
        name: &str,
        rank: usize,
        value: &[u8],
        size: usize,
        limit: Duration,
    ) -> Vec<Vec<u8>> {
        let gone = |state: &State| -> Ranked {
            let absent = |rank: &&usize| !state.folders[name].contains_key(rank);
            let left = state.left.iter().filter(absent);
            let mut gone: Ranked = left.map(|rank| (*rank, b"it has left".to_vec())).collect();
            gone.extend(state.failed.clone());
            gone
        };
        let mut state = self.lock();
        let folder = state.folders.entry(name.to_owned()).or_default();
        folder.insert(rank, value.to_vec());
        if folder.len() == size {
            self.changed.notify_all();
        }
        let is_open = |state: &mut State| {
            state.folders[name].len() < size && !state.is_closing && gone(state).is_empty()
        };
        let (state, _) = self
            .changed
            .wait_timeout_while(state, limit, is_open)
            .expect("no thread panics with the lock");
        let values = &state.folders[name];
        if values.len() == size {
            return triples(&[(b"value", values)]);
        }
        let failed = gone(&state);
        triples(&[
            (b"value", values),
            (b"failed", &failed),
            (b"member", &state.members),
        ])
    }
}

/// Listens only at the given address, or at all addresses for a name: a machine's own name often
/// resolves to loopback, which other machines cannot reach.
fn listen(address: &str) -> std::io::Result<TcpListener> {
    if let Ok(exact) = address.parse::<SocketAddr>() {
        return TcpListener::bind(exact);
    }
    let port = address
        .rsplit(':')
        .next()
        .and_then(|port| port.parse().ok());
    let port: u16 = port.ok_or(ErrorKind::InvalidInput)?;
    TcpListener::bind(("::", port)).or_else(|_| TcpListener::bind(("0.0.0.0", port)))
}

/// Connects to rank 0, which may still be starting, and whose name may not resolve yet.
fn connect(address: &str, deadline: Instant) -> Result<TcpStream, Failure> {
    loop {
        let attempt = address.to_socket_addrs().and_then(|addresses| {
            let mut last = ErrorKind::NotFound.into();
            for address in addresses {
                match TcpStream::connect_timeout(&address, Duration::from_secs(5)) {
                    Ok(stream) => return Ok(stream),
                    Err(error) => last = error,
                }
            }
            Err(last)
        });
        match attempt {
            Ok(stream) => return Ok(stream),
            Err(error) if Instant::now() > deadline => {
                return Err(format!(
                    "rank 0, which serves the store, was not found at {address} in time ({error}): \
                     is it running there, and does a firewall allow the port?"
                )
                .into());
            }
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

fn triples(groups: &[(&[u8], &Ranked)]) -> Vec<Vec<u8>> {
    let mut items = vec![b"ok".to_vec()];
    for (kind, values) in groups {
        for (rank, value) in *values {
            items.extend([kind.to_vec(), rank.to_string().into_bytes(), value.clone()]);
        }
    }
    items
}

fn number(text: &[u8]) -> Option<usize> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

fn send(stream: &mut TcpStream, items: &[&[u8]]) -> std::io::Result<()> {
    let mut body = Vec::new();
    for item in items {
        body.extend((item.len() as u32).to_be_bytes());
        body.extend(*item);
    }
    let mut frame = (body.len() as u32).to_be_bytes().to_vec();
    frame.extend(body);
    stream.write_all(&frame)
}

fn receive(stream: &mut TcpStream, limit: usize) -> std::io::Result<Vec<Vec<u8>>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_be_bytes(length);
    if length as usize > limit {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut body = Vec::new();
    stream.take(u64::from(length)).read_to_end(&mut body)?;
    if body.len() < length as usize {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    let (mut items, mut rest) = (Vec::new(), &body[..]);
    while let Some((length, behind)) = rest.split_first_chunk::<4>() {
        let length = u32::from_be_bytes(*length) as usize;
        let Some((item, behind)) = behind.split_at_checked(length) else {
            return Err(ErrorKind::InvalidData.into());
        };
        items.push(item.to_vec());
        rest = behind;
    }
    Ok(items)
}
