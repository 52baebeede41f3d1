//! Every state against every event, as one table: a changed transition is a changed line here.

use alloc::format;
use alloc::string::String;

use super::*;
use crate::handshake::message;

/// Describes the effect of one event: the new state and the queued message, or the error.
fn outcome(result: Result<usize, HandshakeError>, state: &str, out: Option<Vec<u8>>) -> String {
    let result = match result {
        Ok(0) => "ignored",
        Ok(_) => state,
        Err(HandshakeError::PeerMessageMalformed(_)) => "PeerMessageMalformed",
        Err(HandshakeError::PeerMessageUnexpected { .. }) => "PeerMessageUnexpected",
        Err(HandshakeError::PeerRejected { .. }) => "PeerRejected",
        Err(HandshakeError::PeerProofWrong) => "PeerProofWrong",
        Err(HandshakeError::PeerIncompatible { .. }) => "PeerIncompatible",
        Err(HandshakeError::CallerRejected { .. }) => "CallerRejected",
        Err(HandshakeError::CallerAcceptedUnproven) => "CallerAcceptedUnproven",
        Err(error) => panic!("{error}"),
    };
    let sent = match out.as_ref().and_then(|bytes| bytes.get(4)) {
        None => "",
        Some(1) => " > ClientHello",
        Some(2) => " > ServerHello",
        Some(3) => " > ClientProof",
        Some(4) => " > ServerReady",
        Some(5) => " > Reject",
        Some(_) => panic!("unknown message"),
    };
    let code = match out {
        Some(bytes) if bytes[4] == 5 => match reject_code(Some(bytes)) {
            // `negotiation` tests which one.
            RejectCode::Requirement(_) => "(Requirement)".into(),
            code => format!("({code:?})"),
        },
        _ => String::new(),
    };
    format!("{result}{sent}{code}")
}

/// Returns a client that requires a feature which the server of the tables does not offer.
fn unfit_client() -> Client {
    client_with(
        &info_of(&identity(SERVER)),
        0xc1,
        offer(0b0011_0010, 0b0010_0000),
    )
}

/// Columns of both tables. "Wrong" is the honest message with a broken tag, "unfit" a message that
/// leaves a requirement unmet.
fn messages() -> Vec<(&'static str, Vec<u8>)> {
    let honest = Honest::new();
    let mut unfit_server = server_with(identity(SERVER), 0x51, offer(0b0100_0000, 0b0100_0000));
    unfit_server.handle(&honest.hello).unwrap();
    let wrong = |bytes: &[u8]| {
        let mut bytes = bytes.to_vec();
        *bytes.last_mut().unwrap() ^= 1;
        bytes
    };
    vec![
        ("ClientHello", honest.hello),
        (
            "ClientHello, unfit",
            unfit_client().poll_transmit().unwrap(),
        ),
        ("ServerHello", honest.server_hello.clone()),
        ("ServerHello, unfit", unfit_server.poll_transmit().unwrap()),
        ("ServerHello, wrong", wrong(&honest.server_hello)),
        ("ClientProof", honest.proof.clone()),
        ("ClientProof, wrong", wrong(&honest.proof)),
        ("ServerReady", honest.ready),
        ("Reject", message::reject(RejectCode::Closing)),
        ("garbage", b"GET /".to_vec()),
    ]
}

fn client_state(client: &Client) -> &'static str {
    // The state is private to its file; Debug shows its name first.
    let text = format!("{client:?}");
    ["AwaitHello", "AwaitReady", "Failed", "Established"]
        .into_iter()
        .find(|name| text.contains(&format!("state: {name}")))
        .expect("a known state")
}

fn server_state(server: &Server) -> &'static str {
    let text = format!("{server:?}");
    ["AwaitHello", "AwaitProof", "Proven", "Accepted", "Failed"]
        .into_iter()
        .find(|name| text.contains(&format!("state: {name}")))
        .expect("a known state")
}

#[test]
fn every_client_state_meets_every_message() {
    let honest = Honest::new();
    let mut await_hello = client();
    await_hello.poll_transmit().unwrap();
    let mut await_ready = await_hello.clone();
    await_ready.handle(&honest.server_hello).unwrap();
    await_ready.poll_transmit().unwrap();
    let mut established = await_ready.clone();
    established.handle(&honest.ready).unwrap();
    let mut failed = await_hello.clone();
    failed.handle(b"GET").unwrap_err();
    failed.poll_transmit().unwrap();

    let mut table = String::new();
    for client in [await_hello, await_ready, established, failed] {
        table += &format!("{}\n", client_state(&client));
        for (name, bytes) in messages() {
            let mut client = client.clone();
            let result = client.handle(&bytes);
            let out = client.poll_transmit();
            table += &format!(
                "  {name:18} {}\n",
                outcome(result, client_state(&client), out)
            );
        }
    }
    assert_eq!(table, CLIENT_TABLE, "\n{table}");
}

#[test]
fn every_server_state_meets_every_event() {
    let honest = Honest::new();
    let await_hello = server();
    let mut await_proof = await_hello.clone();
    await_proof.handle(&honest.hello).unwrap();
    await_proof.poll_transmit().unwrap();
    let mut proven = await_proof.clone();
    proven.handle(&honest.proof).unwrap();
    let mut accepted = proven.clone();
    accepted.accept().unwrap();
    accepted.poll_transmit().unwrap();
    let mut failed = await_hello.clone();
    failed.handle(b"GET").unwrap_err();
    failed.poll_transmit().unwrap();

    let (mut unfit, mut client) = (await_hello.clone(), unfit_client());
    unfit.handle(&client.poll_transmit().unwrap()).unwrap();
    client.handle(&unfit.poll_transmit().unwrap()).unwrap_err();
    unfit.handle(&client.poll_transmit().unwrap()).unwrap();

    let mut table = String::new();
    for (note, server) in [
        ("", await_hello),
        ("", await_proof),
        ("", proven),
        (", unfit", unfit),
        ("", accepted),
        ("", failed),
    ] {
        table += &format!("{}{note}\n", server_state(&server));
        for (name, bytes) in messages() {
            let mut server = server.clone();
            let result = server.handle(&bytes);
            let out = server.poll_transmit();
            table += &format!(
                "  {name:18} {}\n",
                outcome(result, server_state(&server), out)
            );
        }
        let mut accept = server.clone();
        let result = accept.accept().map(|()| 1);
        let out = accept.poll_transmit();
        table += &format!(
            "  {:18} {}\n",
            "accept()",
            outcome(result, server_state(&accept), out)
        );
        let mut reject = server.clone();
        reject.reject(RejectCode::TooMany);
        let out = reject.poll_transmit();
        table += &format!(
            "  {:18} {}\n",
            "reject()",
            outcome(Ok(1), server_state(&reject), out)
        );
    }
    assert_eq!(table, SERVER_TABLE, "\n{table}");
}

const CLIENT_TABLE: &str = "\
AwaitHello
  ClientHello        PeerMessageUnexpected > Reject(BadMessage)
  ClientHello, unfit PeerMessageUnexpected > Reject(BadMessage)
  ServerHello        AwaitReady > ClientProof
  ServerHello, unfit PeerIncompatible > ClientProof
  ServerHello, wrong PeerProofWrong > Reject(BadProof)
  ClientProof        PeerMessageUnexpected > Reject(BadMessage)
  ClientProof, wrong PeerMessageUnexpected > Reject(BadMessage)
  ServerReady        PeerMessageUnexpected > Reject(BadMessage)
  Reject             PeerRejected
  garbage            PeerMessageMalformed > Reject(BadMessage)
AwaitReady
  ClientHello        PeerMessageUnexpected > Reject(BadMessage)
  ClientHello, unfit PeerMessageUnexpected > Reject(BadMessage)
  ServerHello        PeerMessageUnexpected > Reject(BadMessage)
  ServerHello, unfit PeerMessageUnexpected > Reject(BadMessage)
  ServerHello, wrong PeerMessageUnexpected > Reject(BadMessage)
  ClientProof        PeerMessageUnexpected > Reject(BadMessage)
  ClientProof, wrong PeerMessageUnexpected > Reject(BadMessage)
  ServerReady        Established
  Reject             PeerRejected
  garbage            PeerMessageMalformed > Reject(BadMessage)
Established
  ClientHello        ignored
  ClientHello, unfit ignored
  ServerHello        ignored
  ServerHello, unfit ignored
  ServerHello, wrong ignored
  ClientProof        ignored
  ClientProof, wrong ignored
  ServerReady        ignored
  Reject             ignored
  garbage            ignored
Failed
  ClientHello        PeerMessageMalformed
  ClientHello, unfit PeerMessageMalformed
  ServerHello        PeerMessageMalformed
  ServerHello, unfit PeerMessageMalformed
  ServerHello, wrong PeerMessageMalformed
  ClientProof        PeerMessageMalformed
  ClientProof, wrong PeerMessageMalformed
  ServerReady        PeerMessageMalformed
  Reject             PeerMessageMalformed
  garbage            PeerMessageMalformed
";

const SERVER_TABLE: &str = "\
AwaitHello
  ClientHello        AwaitProof > ServerHello
  ClientHello, unfit AwaitProof > ServerHello
  ServerHello        PeerMessageUnexpected > Reject(BadMessage)
  ServerHello, unfit PeerMessageUnexpected > Reject(BadMessage)
  ServerHello, wrong PeerMessageUnexpected > Reject(BadMessage)
  ClientProof        PeerMessageUnexpected > Reject(BadMessage)
  ClientProof, wrong PeerMessageUnexpected > Reject(BadMessage)
  ServerReady        PeerMessageUnexpected > Reject(BadMessage)
  Reject             PeerRejected
  garbage            PeerMessageMalformed > Reject(BadMessage)
  accept()           CallerAcceptedUnproven
  reject()           Failed > Reject(TooMany)
AwaitProof
  ClientHello        PeerMessageUnexpected > Reject(BadMessage)
  ClientHello, unfit PeerMessageUnexpected > Reject(BadMessage)
  ServerHello        PeerMessageUnexpected > Reject(BadMessage)
  ServerHello, unfit PeerMessageUnexpected > Reject(BadMessage)
  ServerHello, wrong PeerMessageUnexpected > Reject(BadMessage)
  ClientProof        Proven
  ClientProof, wrong PeerProofWrong > Reject(BadProof)
  ServerReady        PeerMessageUnexpected > Reject(BadMessage)
  Reject             PeerRejected
  garbage            PeerMessageMalformed > Reject(BadMessage)
  accept()           CallerAcceptedUnproven
  reject()           Failed > Reject(TooMany)
Proven
  ClientHello        ignored
  ClientHello, unfit ignored
  ServerHello        ignored
  ServerHello, unfit ignored
  ServerHello, wrong ignored
  ClientProof        ignored
  ClientProof, wrong ignored
  ServerReady        ignored
  Reject             ignored
  garbage            ignored
  accept()           Accepted > ServerReady
  reject()           Failed > Reject(TooMany)
Proven, unfit
  ClientHello        ignored
  ClientHello, unfit ignored
  ServerHello        ignored
  ServerHello, unfit ignored
  ServerHello, wrong ignored
  ClientProof        ignored
  ClientProof, wrong ignored
  ServerReady        ignored
  Reject             ignored
  garbage            ignored
  accept()           PeerIncompatible > Reject(Requirement)
  reject()           Failed > Reject(TooMany)
Accepted
  ClientHello        ignored
  ClientHello, unfit ignored
  ServerHello        ignored
  ServerHello, unfit ignored
  ServerHello, wrong ignored
  ClientProof        ignored
  ClientProof, wrong ignored
  ServerReady        ignored
  Reject             ignored
  garbage            ignored
  accept()           CallerAcceptedUnproven
  reject()           Accepted
Failed
  ClientHello        PeerMessageMalformed
  ClientHello, unfit PeerMessageMalformed
  ServerHello        PeerMessageMalformed
  ServerHello, unfit PeerMessageMalformed
  ServerHello, wrong PeerMessageMalformed
  ClientProof        PeerMessageMalformed
  ClientProof, wrong PeerMessageMalformed
  ServerReady        PeerMessageMalformed
  Reject             PeerMessageMalformed
  garbage            PeerMessageMalformed
  accept()           CallerAcceptedUnproven
  reject()           Failed
";
