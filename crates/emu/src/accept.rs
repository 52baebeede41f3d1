//! `listen` and `accept`. A listen comm gives one connection.

use std::ffi::c_int;

use crate::comm::Link;
use crate::connect::{ACCEPTED, Gate};
use crate::device;
use crate::emulator::{Emulator, Flavor};
use crate::error::{Error, Misuse};
use crate::log::warning;
use crate::settings::Settings;
use crate::socket::{Listener, Progress, Socket};
use crate::wire::{GREETING_BYTES, Greeting, Handle};

/// The result of `listen`.
#[derive(Debug)]
pub(crate) struct ListenComm {
    pub(crate) flavor: Flavor,
    pub(crate) device: usize,
    listener: Listener,
    sockets: usize,
    state: State,
}

#[derive(Debug)]
enum State {
    /// `accept` was not called.
    Listening,
    Accepting(Accepting),
    /// The listener has returned its connection, or failed.
    Ended,
}

#[derive(Debug)]
struct Accepting {
    gate: Gate,
    /// Sockets with an incomplete greeting.
    arriving: Vec<Arriving>,
    /// The connection that came first; others are refused.
    connection: Option<u64>,
    /// By index: control, then data.
    ready: Vec<Option<Socket>>,
    /// Whether the other side was told.
    complete: bool,
}

#[derive(Debug)]
struct Arriving {
    socket: Socket,
    greeting: [u8; GREETING_BYTES],
    filled: usize,
}

impl ListenComm {
    pub(crate) fn new(emulator: &Emulator, flavor: Flavor, dev: c_int) -> Result<Self, Error> {
        let device = device::find(&emulator.devices, dev)?;
        let listener = Listener::bind(device.address, emulator.settings.socket_buffer)
            .map_err(|error| Error::system("listen", &error))?;
        Ok(Self {
            flavor,
            device: dev as usize,
            listener,
            sockets: emulator.settings.sockets,
            state: State::Listening,
        })
    }

    /// Returns the handle that the other side needs.
    pub(crate) fn handle(&self) -> Result<Handle, Error> {
        let address = self
            .listener
            .address()
            .map_err(|error| Error::system("listen", &error))?;
        Ok(Handle {
            address,
            sockets: self.sockets,
        })
    }

    /// Performs one call of `accept`: returns the link once it is established.
    pub(crate) fn accept(&mut self, settings: &Settings) -> Result<Option<Link>, Error> {
        if matches!(self.state, State::Ended) {
            return Err(Misuse::AcceptAgain.into());
        }
        if matches!(self.state, State::Listening) {
            self.state = State::Accepting(Accepting {
                gate: Gate::new(),
                arriving: Vec::new(),
                connection: None,
                ready: (0..=self.sockets).map(|_| None).collect(),
                complete: false,
            });
        }
        let State::Accepting(accepting) = &mut self.state else {
            return Ok(None);
        };
        let outcome = accepting.step(&self.listener, self.flavor, settings);
        if !matches!(outcome, Ok(None)) {
            self.state = State::Ended;
        }
        outcome
    }

    /// Returns whether an accept is in progress.
    pub(crate) fn pending(&self) -> bool {
        matches!(self.state, State::Accepting(_))
    }
}

impl Accepting {
    fn step(
        &mut self,
        listener: &Listener,
        flavor: Flavor,
        settings: &Settings,
    ) -> Result<Option<Link>, Error> {
        let open = self.gate.open(settings);
        while let Some(socket) = listener
            .accept()
            .map_err(|error| Error::system("accept", &error))?
        {
            self.arriving.push(Arriving {
                socket,
                greeting: [0; GREETING_BYTES],
                filled: 0,
            });
        }
        self.read_greetings(flavor);
        if !self.complete && self.ready.iter().all(Option::is_some) {
            self.confirm(flavor)?;
            self.complete = true;
        }
        if !(open && self.complete) {
            return Ok(None);
        }
        let mut sockets = self.ready.drain(..).flatten();
        Ok(sockets.next().map(|control| Link {
            control,
            data: sockets.collect(),
        }))
    }

    fn read_greetings(&mut self, flavor: Flavor) {
        for mut arriving in std::mem::take(&mut self.arriving) {
            let rest = &mut arriving.greeting[arriving.filled..];
            match arriving.socket.receive(rest) {
                Ok(Progress::Moved(n)) => arriving.filled += n,
                Ok(Progress::Blocked) => {}
                // A client that hangs up without a greeting was not a peer.
                Ok(Progress::Closed) | Err(_) => continue,
            }
            if arriving.filled < GREETING_BYTES {
                self.arriving.push(arriving);
            } else if let Err(why) = self.place(arriving, flavor) {
                warning!("turned a connection away: {why}");
            }
        }
    }

    /// Assigns a socket to the place in its greeting.
    fn place(&mut self, arrived: Arriving, flavor: Flavor) -> Result<(), &'static str> {
        let greeting = Greeting::decode(&arrived.greeting).ok_or("not a greeting")?;
        if greeting.plain != (flavor == Flavor::Plain) {
            return Err("it comes from a table of another kind (v7 against v6 or v8)");
        }
        if greeting.sockets as usize + 1 != self.ready.len() {
            return Err("it has another number of sockets");
        }
        if *self.connection.get_or_insert(greeting.connection) != greeting.connection {
            return Err("another connection came first");
        }
        match &mut self.ready[greeting.index as usize] {
            place @ None => *place = Some(arrived.socket),
            Some(_) => return Err("its place is taken"),
        }
        Ok(())
    }

    /// Tells a waiting connector that all its sockets have arrived.
    fn confirm(&self, flavor: Flavor) -> Result<(), Error> {
        let (Flavor::Tcpx, Some(Some(control))) = (flavor, self.ready.first()) else {
            return Ok(());
        };
        match control.send(&ACCEPTED) {
            Ok(Progress::Moved(4)) => Ok(()),
            Ok(_) => Err(Error::System {
                what: "answering a connect",
                errno: libc::EIO,
            }),
            Err(error) => Err(Error::system("answering a connect", &error)),
        }
    }
}
