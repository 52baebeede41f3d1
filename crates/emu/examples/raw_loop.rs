//! The raw loop over loopback: this process receives, a second one sends.
//!
//! ```sh
//! cargo run --release -p tcpx-emu --example raw_loop -- [comms] [message bytes] [GiB]
//! ```

use std::error::Error;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::time::Instant;

use nccl_net_tcpx_emu::ncclNetPlugin_v7;
use nccl_net_tcpx_emu::raw_loop;
use nccl_net_tcpx_emu::tables::{HANDLE_BYTES, NetV7};

const WINDOW: usize = 16;

/// Parameters that both processes must agree on.
#[derive(Clone, Copy)]
struct Workload {
    comms: usize,
    bytes: usize,
    messages: usize,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1).peekable();
    let sending = args.next_if(|arg| arg == "send").is_some();
    let comms = args.next().map_or(Ok(1), |arg| arg.parse())?;
    let bytes = args.next().map_or(Ok(512 << 10), |arg| arg.parse())?;
    let gib: f64 = args.next().map_or(Ok(8.0), |arg| arg.parse())?;
    let messages = ((gib * (1u64 << 30) as f64) / (comms * bytes) as f64).ceil() as usize;
    let workload = Workload {
        comms,
        bytes,
        messages,
    };
    let table = &ncclNetPlugin_v7;
    // SAFETY: no logger is allowed.
    let code = table.init.map(|init| unsafe { init(None) });
    if code != Some(0) {
        return Err(format!("init returned {code:?}").into());
    }
    if sending {
        send(table, workload)
    } else {
        receive(table, workload, gib)
    }
}

fn receive(table: &'static NetV7, workload: Workload, gib: f64) -> Result<(), Box<dyn Error>> {
    let Workload {
        comms,
        bytes,
        messages,
    } = workload;
    let mut sender = Command::new(std::env::current_exe()?)
        .args([
            "send",
            &comms.to_string(),
            &bytes.to_string(),
            &gib.to_string(),
        ])
        .stdin(Stdio::piped())
        .spawn()?;
    let mut pipe = sender.stdin.take().ok_or("no pipe to the sender")?;
    let buffers: Vec<_> = (0..comms).map(|_| Pages::new(bytes)).collect();
    let mut receivers = Vec::new();
    for buffer in &buffers {
        let listening = raw_loop::listen(table, 0)?;
        pipe.write_all(&listening.handle)?;
        pipe.flush()?;
        // SAFETY: the buffers outlive the receivers.
        receivers.push(unsafe { listening.accept(buffer.memory(), std::thread::yield_now)? });
    }
    // SAFETY: each buffer has room for one message.
    unsafe { raw_loop::receive_all(&mut receivers, bytes, (messages / 10).max(1), WINDOW)? };
    let start = Instant::now();
    // SAFETY: as above.
    let total = unsafe { raw_loop::receive_all(&mut receivers, bytes, messages, WINDOW)? };
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "{comms} comms, {bytes} bytes a message: {:.2} GB/s, {:.2} µs a message",
        total as f64 / seconds / 1e9,
        seconds * 1e6 / (messages * comms) as f64,
    );
    drop(pipe);
    sender.wait()?;
    receivers
        .into_iter()
        .try_for_each(raw_loop::Receiver::close)?;
    Ok(())
}

fn send(table: &'static NetV7, workload: Workload) -> Result<(), Box<dyn Error>> {
    let Workload {
        comms,
        bytes,
        messages,
    } = workload;
    let mut pipe = std::io::stdin();
    let buffers: Vec<_> = (0..comms).map(|_| Pages::new(bytes)).collect();
    let mut senders = Vec::new();
    for buffer in &buffers {
        let mut handle = [0; HANDLE_BYTES];
        pipe.read_exact(&mut handle)?;
        // SAFETY: the buffers outlive the senders.
        senders.push(unsafe {
            raw_loop::connect(table, 0, &handle, buffer.memory(), std::thread::yield_now)?
        });
    }
    raw_loop::send_all(&mut senders, bytes, (messages / 10).max(1), WINDOW)?;
    raw_loop::send_all(&mut senders, bytes, messages, WINDOW)?;
    // The receiver closes the pipe when it has received everything.
    pipe.read_to_end(&mut Vec::new())?;
    senders.into_iter().try_for_each(raw_loop::Sender::close)?;
    Ok(())
}

/// Page-aligned memory.
struct Pages {
    pages: Vec<Page>,
}

#[derive(Clone)]
#[repr(align(4096))]
struct Page(#[expect(dead_code, reason = "only its size matters")] [u8; 4096]);

impl Pages {
    fn new(bytes: usize) -> Self {
        Self {
            pages: vec![Page([0x11; 4096]); bytes.div_ceil(4096).max(1)],
        }
    }

    fn memory(&self) -> (*mut u8, usize) {
        (
            self.pages.as_ptr().cast_mut().cast(),
            self.pages.len() * 4096,
        )
    }
}
