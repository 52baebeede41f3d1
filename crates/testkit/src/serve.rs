//! The main loop of the second process: executes one command after the other. Between commands its
//! application sleeps, and the engine works alone.

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use serde_json::{Value, json};
use tcpx::stats::TransferKind;
use tcpx::{Config, Error, Events, Op, Peer, Region, RemoteRegion, Segment, Session, Transfer};

use crate::forked::{self, Inherited};
use crate::ledger::{Figures, Ledger, Tracked};
use crate::memory::Memory;
use crate::pattern::Content;
use crate::protocol::{
    Answer, Command, Hex, Lane, Notice, Opened, Piece, Question, Registered, op, state_name,
};

/// Serves commands from standard input until it ends.
pub fn serve() {
    // Read by a thread of its own, so that the process ends with the test even while it sleeps.
    let (lines, commands) = mpsc::channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let Ok(line) = line else { break };
            if lines.send(line).is_err() {
                break;
            }
        }
        // The test is over.
        std::process::exit(0);
    });
    let mut state = State::default();
    for line in commands {
        let question: Question = serde_json::from_str(&line).expect("a command");
        let id = question.id;
        let and_then = Aftermath::of(&question.command);
        let result = state.execute(question.command).map_err(Into::into);
        let answer = serde_json::to_string(&Answer { id, result }).expect("an answer is JSON");
        let mut out = std::io::stdout().lock();
        writeln!(out, "{answer}").expect("the test listens");
        out.flush().expect("the test listens");
        drop(out);
        and_then.happen();
    }
}

/// The action after an answer has been sent.
enum Aftermath {
    Nothing,
    Sleep(std::path::PathBuf),
    Exit,
}

impl Aftermath {
    fn of(command: &Command) -> Self {
        match command {
            Command::SleepUntil { file } => Self::Sleep(file.clone()),
            Command::Exit => Self::Exit,
            _ => Self::Nothing,
        }
    }

    fn happen(self) {
        match self {
            Self::Nothing => {}
            Self::Sleep(file) => {
                while !file.exists() {
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
            Self::Exit => std::process::exit(0),
        }
    }
}

#[derive(Default)]
struct State {
    // Transfers and regions come before the session: they are dropped first.
    transfers: HashMap<u64, Tracked>,
    ledger: Arc<Ledger>,
    regions: HashMap<u64, Region>,
    memory: HashMap<u64, Memory>,
    session: Option<Session>,
    /// The settings of the session.
    settings: Vec<(String, String)>,
    next: u64,
}

impl State {
    fn execute(&mut self, command: Command) -> Result<Value, Error> {
        Ok(match command {
            Command::Open { settings } => {
                self.close();
                self.settings = settings;
                let session = Session::new(self.config()?)?;
                let opened = Opened {
                    info: session.connection_info(),
                    addresses: session.addresses(),
                };
                self.session = Some(session);
                json!(opened)
            }
            Command::Close => {
                self.close();
                Value::Null
            }
            Command::AddPeer { info } => json!(self.session().add_peer(&info)?.name()),
            Command::RemovePeer { peer } => json!(self.session().remove_peer(&peer)?),
            Command::Connect { peer, timeout } => json!(self.peer(&peer)?.connect(timeout)?),
            Command::Accept { timeout } => json!(self.session().accept(timeout)?.name()),
            Command::Disconnect { peer } => json!(self.peer(&peer)?.disconnect()),
            Command::IsConnected { peer } => json!(self.peer(&peer)?.is_connected()),
            Command::Lanes { peer } => {
                let lanes = self.peer(&peer)?.lanes().into_iter();
                let lanes = lanes.map(|l| Lane {
                    local: l.local,
                    remote: l.remote,
                    bytes_sent: l.bytes_sent,
                    bytes_received: l.bytes_received,
                    is_up: l.is_up,
                    failovers: l.failovers,
                });
                json!(lanes.collect::<Vec<_>>())
            }
            Command::Allocate { len } => {
                json!(self.add_memory(Memory::new(len))?)
            }
            Command::Map { len } => json!(self.add_memory(Memory::mapped(len))?),
            Command::Allow {
                memory,
                access,
                offset,
                len,
            } => {
                self.memory[&memory].allow(access, offset, len);
                Value::Null
            }
            Command::Register {
                memory,
                offset,
                len,
            } => {
                let region = self.memory[&memory].register_range(self.session(), offset, len)?;
                json!(self.registered(memory, region))
            }
            Command::Deregister { region } => {
                json!(self.region(region).deregister()?)
            }
            Command::Put {
                memory,
                offset,
                len,
                content,
            } => {
                self.put(memory, offset, len, content);
                Value::Null
            }
            Command::SetBytes {
                memory,
                offset,
                bytes,
            } => {
                self.memory[&memory].set_bytes(offset, &bytes);
                Value::Null
            }
            Command::Bytes {
                memory,
                offset,
                len,
            } => {
                json!(Hex(self.memory[&memory].bytes(offset, len)))
            }
            Command::Check { memory, expected } => {
                json!(self.memory[&memory].check(&expected).err())
            }
            Command::Prepare {
                write,
                peer,
                descriptors,
                pieces,
                repeat,
            } => {
                let transfer = self.prepare(write, &peer, &descriptors, &pieces, repeat)?;
                let kind = match op(write) {
                    Op::Read => TransferKind::Read,
                    Op::Write => TransferKind::Write,
                };
                let transfer = Tracked::new(transfer, kind, &self.ledger);
                json!(self.keep(transfer))
            }
            Command::Send {
                peer,
                region,
                offset,
                len,
                tag,
            } => {
                let source = self.region(region).at(offset);
                let transfer = self.session().send(&self.peer(&peer)?, source, len, tag)?;
                let transfer = Tracked::started(transfer, TransferKind::Send, &self.ledger);
                json!(self.keep(transfer))
            }
            Command::Receive {
                peer,
                region,
                offset,
                len,
                tag,
            } => {
                let target = self.region(region).at(offset);
                let transfer = self.session().recv(&self.peer(&peer)?, target, len, tag)?;
                let transfer = Tracked::started(transfer, TransferKind::Receive, &self.ledger);
                json!(self.keep(transfer))
            }
            Command::Post {
                transfer,
                notification,
            } => match notification {
                None => json!(self.transfer(transfer).post()?),
                Some(Hex(m)) => json!(self.transfer(transfer).post_with_notification(&m)?),
            },
            Command::Poll { transfer } => json!(state_name(self.transfer(transfer).poll())),
            Command::Wait { transfer, timeout } => {
                json!(self.transfer(transfer).wait(timeout)?)
            }
            Command::Abort { transfer } => json!(self.transfer(transfer).abort()),
            Command::Received { transfer } => json!(self.transfer(transfer).received()),
            Command::Release { transfer } => {
                drop(self.transfers.remove(&transfer).expect("a transfer"));
                Value::Null
            }
            Command::Notify { peer, message } => {
                json!(self.session().notify(&self.peer(&peer)?, &message)?)
            }
            Command::NotifyOften {
                peer,
                message,
                count,
            } => {
                let peer = self.peer(&peer)?;
                for _ in 0..count {
                    self.session().notify(&peer, &message)?;
                }
                Value::Null
            }
            Command::TakeNotifications => {
                let taken = self.session().notifications().into_iter();
                json!(taken.map(Notice::from).collect::<Vec<_>>())
            }
            Command::WaitNotification { timeout } => {
                json!(Notice::from(self.session().wait_notification(timeout)?))
            }
            Command::Fork { region } => {
                let (child, said) = self.fork(region);
                if let Err(words) = &said {
                    forked::end(child);
                    panic!("a forked child: {words}");
                }
                json!(child)
            }
            Command::EndChild { child } => {
                forked::end(child);
                Value::Null
            }
            Command::Figures => {
                let stats = self.ledger.verify(|| self.session().stats());
                json!(Figures::of(&stats))
            }
            Command::Nothing | Command::SleepUntil { .. } | Command::Exit => Value::Null,
            Command::Crash => std::process::abort(),
        })
    }

    fn config(&self) -> Result<Config, Error> {
        let mut config = Config::from_env()?;
        for (key, value) in &self.settings {
            config.set(key, value)?;
        }
        Ok(config)
    }

    /// Forks a child that tries every call on inherited objects, drops them, and writes to a region
    /// from a session of its own.
    fn fork(&mut self, region: u64) -> (u32, Result<(), String>) {
        let peers = self.session().peers();
        let descriptor = self.region(region).descriptor();
        let events = Events::new().expect("a descriptor is free");
        forked::fork(|| {
            let inherited = Inherited {
                session: self.session(),
                peers: &peers,
                regions: self.regions.values().collect(),
                transfers: self.transfers.values().map(|t| &**t).collect(),
                events: &events,
            };
            inherited.refuses_everything()?;
            let info = self.session().connection_info();
            drop(peers);
            self.close();
            let config = self.config().and_then(|config| {
                let name = format!("child-{}", std::process::id());
                Ok(config.with_name(name)?.with("listen_port", 0)?)
            });
            config
                .and_then(|config| forked::write_to(&info, &descriptor, config))
                .map_err(|error| format!("on its own: {error}"))
        })
    }

    fn close(&mut self) {
        self.transfers.clear();
        self.regions.clear();
        self.memory.clear();
        if let Some(session) = self.session.take() {
            let ledger = std::mem::take(&mut self.ledger);
            if session.check().is_ok() {
                ledger.verify(|| session.stats());
            }
            session.close();
        }
    }

    fn put(&self, memory: u64, offset: usize, len: usize, content: Content) {
        self.memory[&memory].put(offset, len, content);
    }

    fn prepare(
        &self,
        write: bool,
        peer: &str,
        descriptors: &[Hex],
        pieces: &[Piece],
        repeat: usize,
    ) -> Result<Transfer, Error> {
        let remote: Result<Vec<_>, _> = descriptors
            .iter()
            .map(|d| RemoteRegion::from_bytes(&d.0))
            .collect();
        let remote = remote?;
        let pieces = (0..repeat).flat_map(|_| pieces);
        let segments = pieces.map(|piece| Segment {
            local: self.region(piece.region).at(piece.copy.local),
            remote: remote[piece.descriptor].at(piece.copy.remote),
            len: piece.copy.len,
        });
        self.session()
            .prepare(op(write), &self.peer(peer)?, segments)
    }

    fn add_memory(&mut self, memory: Memory) -> Result<Registered, Error> {
        let region = memory.register(self.session())?;
        let id = self.id();
        self.memory.insert(id, memory);
        Ok(self.registered(id, region))
    }

    fn registered(&mut self, memory: u64, region: Region) -> Registered {
        let descriptor = region.descriptor().to_bytes();
        let id = self.id();
        self.regions.insert(id, region);
        Registered {
            memory,
            region: id,
            descriptor,
        }
    }

    fn keep(&mut self, transfer: Tracked) -> u64 {
        let id = self.id();
        self.transfers.insert(id, transfer);
        id
    }

    fn id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn session(&self) -> &Session {
        self.session.as_ref().expect("a session was opened")
    }

    fn peer(&self, name: &str) -> Result<Peer, Error> {
        let found = self.session().peer(name);
        found.ok_or_else(|| Error::UnknownPeer(name.to_owned()))
    }

    fn region(&self, id: u64) -> &Region {
        &self.regions[&id]
    }

    fn transfer(&self, id: u64) -> &Tracked {
        &self.transfers[&id]
    }
}
