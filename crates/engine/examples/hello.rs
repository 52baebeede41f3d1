//! The smallest transfer: one session writes "Hello" into another's memory and notifies it.
//!
//! Run: `cargo run --example hello`. Both sessions are in this process; `kv_blocks` has two.

use std::time::Duration;

use tcpx::{Buffer, Config, Op, Segment, Session};

const PATIENCE: Duration = Duration::from_secs(10);

fn main() -> Result<(), tcpx::Error> {
    let config = |name: &str| {
        Config::from_env()?
            .with_name(name)?
            .with("interfaces", "lo")
    };
    let (alice, bob) = (
        Session::new(config("alice")?)?,
        Session::new(config("bob")?)?,
    );

    let mailbox = Buffer::new(64);
    let bobs = bob.register(&mailbox)?;
    let letter = Buffer::from_bytes(b"Hello");
    let alices = alice.register(&letter)?;

    let peer = alice.add_peer(&bob.connection_info())?;
    let remote = bobs.descriptor();
    let segment = Segment {
        local: alices.at(0),
        remote: remote.at(0),
        len: letter.len(),
    };
    let transfer = alice.prepare(Op::Write, &peer, [segment])?;
    transfer.post_with_notification(b"you have mail")?;
    transfer.wait(PATIENCE)?;

    let note = bob.wait_notification(PATIENCE)?;
    let text = String::from_utf8_lossy(&mailbox.to_vec()[..5]).into_owned();
    println!(
        "{} told bob {:?}: {text}",
        note.from,
        String::from_utf8_lossy(&note.message)
    );
    assert_eq!(text, "Hello");
    Ok(())
}
