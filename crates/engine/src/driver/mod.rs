//! The threads of a session.
//!
//! [`worker`] threads drive lanes. The [`control`] thread handles everything except for data: it
//! accepts and makes connections, takes dead links apart and detects silent peers.

mod addresses;
mod calls;
mod control;
mod listening;
mod seat;
mod worker;
mod workers;

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use tcpx_net::Poller;
use tcpx_net::topology::SYSFS;
use tcpx_proto::handshake::Identity;
use tcpx_proto::info::{ConnectionInfo, Name, Secret, SessionId};

use self::addresses::{
    choose_interfaces, interface_names, lane_addresses, published, socket_options,
};
use self::control::ControlLoop;
use self::listening::listen;
use self::seat::Seat;
use self::worker::PLUGIN_SPIN;
use self::workers::Workers;
use crate::carrier::comm::Net;
use crate::config::{Config, ConfigError, TransportKind};
use crate::error::Error;
use crate::link::desk::Desk;
use crate::link::{Context, Control};
use crate::memory::{Nearness, Registry, Staging};
use crate::peers::{Crew, Mailbox, Parts, SessionCore};
use crate::trace::Trace;

/// Makes a session and starts its threads.
pub(crate) fn start(
    mut config: Config,
    trace: &Trace,
) -> Result<(Arc<SessionCore>, Vec<JoinHandle<()>>), Error> {
    let chosen = choose_interfaces(&config)?;
    let nearness = Nearness::new(&config, chosen.data(), Path::new(SYSFS));
    let staging = Staging::new(&config, nearness, trace);
    let net = match config.transport() {
        TransportKind::Tcp => None,
        TransportKind::Plugin => Some(Net::open(&config, &staging)?),
    };
    if let Some(net) = &net {
        // Each network device has a lane.
        config.raise_lanes(net.devices());
    }
    let local_addresses = lane_addresses(&chosen);
    let options = socket_options(&config);
    let (listeners, addresses) = listen(&local_addresses, config.listen_port(), &options)?;
    let identity = new_identity(&config)?;
    let (told, names) = published(&config, &addresses)?;
    let info = ConnectionInfo::with_names(
        identity.name.clone(),
        identity.id,
        identity.secret.clone(),
        told,
        names,
    )
    .map_err(Error::BadConnectionInfo)?;
    let no_poller = |error| Error::io("cannot make a poller", error);
    let poller = Poller::new().map_err(no_poller)?;
    let workers = Workers::new(config.workers(), trace).map_err(no_poller)?;
    let mailbox = Arc::new(Mailbox::new(&poller));
    let slow_connect = net.as_ref().map(|_| config.connect_timeout());
    let control = Arc::clone(&mailbox) as Arc<dyn Control>;
    let callers = Arc::clone(&workers);
    let desk = Desk::new(Box::new(move |count| callers.wake(count)));
    let registry = Registry::new(random()?);
    let context = Context::new(config, registry, staging, control, desk, trace);
    let core = SessionCore::new(Parts {
        context,
        identity,
        control: mailbox,
        crew: Arc::clone(&workers) as Arc<dyn Crew>,
        local_addresses,
        interface_names: interface_names(&chosen),
        addresses,
        info: info.encode(),
        slow_connect,
    });
    let mut threads = Vec::new();
    let control = ControlLoop::new(
        Arc::clone(&core),
        Arc::clone(&workers),
        net,
        poller,
        listeners,
    );
    if let Err(error) = control.and_then(|control| spawn(&core, control, &workers, &mut threads)) {
        core.begin_close();
        core.end();
        return Err(Error::io("cannot start the session's threads", error));
    }
    Ok((core, threads))
}

fn spawn(
    core: &Arc<SessionCore>,
    control: ControlLoop,
    workers: &Arc<Workers>,
    threads: &mut Vec<JoinHandle<()>>,
) -> std::io::Result<()> {
    let config = &core.context().config;
    let spin = config.spin();
    let staging_spin = match config.transport() {
        TransportKind::Tcp => spin,
        TransportKind::Plugin => spin.max(PLUGIN_SPIN),
    };
    let nearness = &core.context().staging.nearness;
    let count = workers.bulk().len() + 1;
    let builder = |name: String| std::thread::Builder::new().name(name);
    threads.push(builder("tcpx-control".into()).spawn(move || control.run())?);
    for (index, worker) in workers.bulk().iter().enumerate() {
        let (context, worker) = (Arc::clone(core.context()), Arc::clone(worker));
        let thread = builder(format!("tcpx-worker-{index}"));
        let mut seat = Seat::new(Arc::clone(nearness), count);
        let run = move || worker.run(Some(&context.desk), spin, staging_spin, &mut seat, || false);
        threads.push(thread.spawn(run)?);
    }
    if config.transport() == TransportKind::Tcp {
        let workers = Arc::clone(workers);
        let thread = builder("tcpx-express".into());
        let mut seat = Seat::new(Arc::clone(nearness), count);
        let run = move || {
            let has_bulk = || workers.is_bulk_moving();
            let worker = workers.express();
            worker.run(None, spin, staging_spin, &mut seat, has_bulk);
        };
        threads.push(thread.spawn(run)?);
    }
    Ok(())
}

fn new_identity(config: &Config) -> Result<Identity, Error> {
    let name = Name::new(config.name()).map_err(|_| {
        Error::Config(ConfigError::BadValue {
            name: "name".into(),
            value: config.name().into(),
            expected: "1 to 255 bytes of text".into(),
        })
    })?;
    Ok(Identity {
        name,
        id: SessionId(random()?),
        secret: Secret::new(random()?),
    })
}

fn random<const N: usize>() -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|e| Error::io("cannot get random bytes", std::io::Error::other(e)))?;
    Ok(bytes)
}
