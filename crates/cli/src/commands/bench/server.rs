//! `tcpx bench server`: the other end of measurements by clients.

use clap::Args;
use tcpx_bench::peer::{Server, ServerEvent};

use crate::Verdict;
use crate::error::{Failure, chain};
use crate::listen::Listen;
use crate::output::Output;
use crate::settings::Settings;

#[derive(Debug, Args)]
pub(super) struct ServerArguments {
    #[command(flatten)]
    listen: Listen,

    /// Exit after the first client
    #[arg(long)]
    once: bool,

    #[command(flatten)]
    settings: Settings,
}

pub(super) fn run(args: &ServerArguments, output: &mut Output) -> Result<Verdict, Failure> {
    let config = args.settings.load()?;
    let server = args
        .listen
        .with(|address| Server::bind(address, config.clone()))?;
    output.note(format_args!(
        "Waiting for a client on {} …",
        server.address()?
    ));
    let mut verdict = Verdict::Fine;
    server.run(|event| {
        let done = match event {
            ServerEvent::Connected(client) => {
                output.note(format_args!("{client} measures."));
                false
            }
            ServerEvent::Finished(client) => {
                output.note(format_args!("{client} is done."));
                verdict = Verdict::Fine;
                true
            }
            // A failed client does not end the server: any program may connect to the port.
            ServerEvent::Failed(client, error) => {
                let client = client.map_or("A client".to_owned(), |client| client.to_string());
                output.note(format_args!("{client} failed: {}", chain(error)));
                verdict = Verdict::Problem;
                false
            }
            _ => false,
        };
        !(done && args.once)
    });
    Ok(verdict)
}
