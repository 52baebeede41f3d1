//! Two processes, as on two nodes: the client reads scattered KV blocks from the server's memory,
//! then notifies the server. The server's application only waits.
//!
//! ```sh
//! cargo run --example kv_blocks -- server 127.0.0.1:18515
//! cargo run --example kv_blocks -- client 127.0.0.1:18515
//! ```
//!
//! The socket at the given address represents any channel that an application has for a few hundred
//! bytes: etcd, a scheduler, HTTP.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use tcpx::{Buffer, Config, Op, RemoteRegion, Segment, Session};

const BLOCK: usize = 16 << 10;
const BLOCKS: usize = 4096;
const PATIENCE: Duration = Duration::from_secs(30);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["server", address] => server(address),
        ["client", address] => client(address),
        _ => Err("usage: kv_blocks server|client HOST:PORT".into()),
    }
}

fn server(address: &str) -> Result<(), Box<dyn std::error::Error>> {
    let session = Session::new(Config::from_env()?.with_name("prefill")?)?;
    let cache = Buffer::new(BLOCKS * BLOCK);
    for block in 0..BLOCKS {
        cache.write(block * BLOCK, &[block as u8; BLOCK]);
    }
    let region = session.register(&cache)?;

    let listener = TcpListener::bind(address)?;
    // Port 0 takes any free port.
    println!(
        "server: listening on port {}",
        listener.local_addr()?.port()
    );
    let (mut bootstrap, _) = listener.accept()?;
    send(&mut bootstrap, &session.connection_info())?;
    send(&mut bootstrap, &region.descriptor().to_bytes())?;

    let note = session.wait_notification(PATIENCE)?;
    println!(
        "server: {} says {:?}",
        note.from,
        String::from_utf8_lossy(&note.message)
    );
    Ok(())
}

fn client(address: &str) -> Result<(), Box<dyn std::error::Error>> {
    let mut bootstrap = connect(address)?;
    let info = receive(&mut bootstrap)?;
    let theirs = RemoteRegion::from_bytes(&receive(&mut bootstrap)?)?;

    let session = Session::new(Config::from_env()?.with_name("decode")?)?;
    let peer = session.add_peer(&info)?;
    let cache = Buffer::new(BLOCKS * BLOCK);
    let mine = session.register(&cache)?;

    // Read the blocks in another order: a stride that visits each of them once.
    let place = |i: usize| i * 1001 % BLOCKS;
    let segments = (0..BLOCKS).map(|i| Segment {
        local: mine.at(i * BLOCK),
        remote: theirs.at(place(i) * BLOCK),
        len: BLOCK,
    });
    let transfer = session.prepare(Op::Read, &peer, segments)?;
    let start = Instant::now();
    transfer.post_with_notification(b"I have all blocks")?;
    transfer.wait(PATIENCE)?;
    let seconds = start.elapsed().as_secs_f64();

    let bytes = cache.to_vec();
    let right = (0..BLOCKS).all(|i| {
        bytes[i * BLOCK..(i + 1) * BLOCK]
            .iter()
            .all(|b| *b == place(i) as u8)
    });
    assert!(right, "every byte is where it belongs");
    let rate = bytes.len() as f64 / seconds / 1e9;
    println!("client: {BLOCKS} blocks of {BLOCK} bytes, all right, {rate:.2} GB/s");
    Ok(())
}

fn connect(address: &str) -> std::io::Result<TcpStream> {
    let start = Instant::now();
    loop {
        match TcpStream::connect(address) {
            Err(_) if start.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(50)),
            result => return result,
        }
    }
}

fn send(stream: &mut TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    stream.write_all(&(bytes.len() as u32).to_le_bytes())?;
    stream.write_all(bytes)
}

fn receive(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut len = [0; 4];
    stream.read_exact(&mut len)?;
    let mut bytes = vec![0; u32::from_le_bytes(len).min(1 << 20) as usize];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}
