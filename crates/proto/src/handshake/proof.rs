//! The tags of the handshake and the bytes that they cover.

use core::fmt;

use hmac::Mac;
use sha2::{Digest, Sha256};

use crate::secret::{Secret, Tagger};

/// Size of a tag and of a transcript hash in bytes.
pub(super) const TAG_LEN: usize = 32;

/// HMAC-SHA256 over a label and the hash of a transcript.
pub(super) type Tag = [u8; TAG_LEN];

/// The purpose of a tag. Both sides know the server's secret: without labels one side's tag could
/// be reflected as the other's.
#[derive(Clone, Copy, Debug)]
pub(super) enum Label {
    Server,
    Client,
    Owner,
}

impl Label {
    const fn bytes(self) -> &'static [u8] {
        match self {
            Self::Server => b"tcpx server",
            Self::Client => b"tcpx client",
            Self::Owner => b"tcpx owner",
        }
    }
}

/// A running hash of every handshake byte so far, in the order of travel.
#[derive(Clone, Debug, Default)]
pub(super) struct Transcript(Sha256);

impl Transcript {
    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(super) fn hash(&self) -> [u8; TAG_LEN] {
        self.0.clone().finalize().into()
    }

    pub(super) fn tag(&self, secret: &Secret, label: Label) -> Tag {
        mac(secret, label, &self.hash())
            .finalize()
            .into_bytes()
            .into()
    }

    /// Returns whether `tag` is right, in constant time.
    pub(super) fn verify(&self, secret: &Secret, label: Label, tag: &Tag) -> bool {
        mac(secret, label, &self.hash()).verify_slice(tag).is_ok()
    }
}

fn mac(secret: &Secret, label: Label, transcript: &[u8; TAG_LEN]) -> Tagger {
    let mut mac = secret.tagger(label.bytes());
    mac.update(transcript);
    mac
}

/// A client's proof that it owns the identity it claims.
///
/// The proof can be checked at any later time, for instance when the application adds the client's
/// connection info after the client has connected.
#[derive(Clone, PartialEq, Eq)]
pub struct OwnerProof {
    /// SHA-256 of the ClientHello and the ServerHello of this handshake.
    pub transcript: [u8; TAG_LEN],
    /// The tag made with the client's own secret; arbitrary bytes if the client does not know it.
    pub tag: [u8; TAG_LEN],
}

impl OwnerProof {
    /// Returns whether the client knows `secret`.
    ///
    /// `secret` must be the secret of the session that the client claims to be: prefer
    /// [`Established::is_owned_by`](super::Established::is_owned_by), which checks this too.
    #[must_use]
    pub fn verify(&self, secret: &Secret) -> bool {
        mac(secret, Label::Owner, &self.transcript)
            .verify_slice(&self.tag)
            .is_ok()
    }
}

impl fmt::Debug for OwnerProof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OwnerProof(..)")
    }
}

#[cfg(test)]
mod tests {
    use hmac::{Hmac, KeyInit};

    use super::*;

    /// RFC 4231 test case 1 has a key of 20 bytes; padding it to 32 with zeros changes nothing.
    /// Its message cannot be made of a label and a hash, so this compares with plain HMAC.
    #[test]
    fn a_tag_is_plain_hmac_sha256() {
        let secret = Secret::new([0x0b; 32]);
        let mut transcript = Transcript::default();
        transcript.add(b"Hi ");
        transcript.add(b"There");
        let mut plain = <Hmac<Sha256> as KeyInit>::new_from_slice(&[0x0b; 32]).unwrap();
        plain.update(b"tcpx server");
        plain.update(&Sha256::digest(b"Hi There"));
        let tag = transcript.tag(&secret, Label::Server);
        assert_eq!(tag[..], plain.finalize().into_bytes()[..]);
        assert!(transcript.verify(&secret, Label::Server, &tag));
        assert!(!transcript.verify(&secret, Label::Client, &tag));
        assert!(!transcript.verify(&Secret::new([0x0c; 32]), Label::Server, &tag));
        transcript.add(b"!");
        assert!(!transcript.verify(&secret, Label::Server, &tag));
    }

    #[test]
    fn an_owner_proof_needs_the_owners_secret() {
        let secret = Secret::new([1; 32]);
        let mut transcript = Transcript::default();
        transcript.add(b"hello");
        let proof = OwnerProof {
            transcript: transcript.hash(),
            tag: transcript.tag(&secret, Label::Owner),
        };
        assert!(proof.verify(&secret));
        assert!(!proof.verify(&Secret::new([2; 32])));
        assert!(
            !OwnerProof {
                transcript: [0; 32],
                ..proof
            }
            .verify(&secret)
        );
    }
}
