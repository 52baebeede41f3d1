//! Texts for incompatible sessions.

use tcpx_proto::handshake::Features;

/// Describes the settings of both sides and the remedy.
pub(super) fn incompatible(peer: &str, peer_lacks: Features, session_lacks: Features) -> String {
    const PLUGIN: &str = "comms of a plugin (transport=plugin)";
    const NATIVE: &str = "native lanes only (transport=tcp)";
    let mut facts = Vec::new();
    let mut hints = Vec::new();
    if peer_lacks.contains(Features::COMMS) {
        facts.push(format!(
            "peer {peer:?} offers {NATIVE} and this session requires {PLUGIN}"
        ));
    }
    if session_lacks.contains(Features::COMMS) {
        facts.push(format!(
            "peer {peer:?} requires {PLUGIN} and this session offers {NATIVE}"
        ));
    }
    if !facts.is_empty() {
        hints.push("set TCPX_TRANSPORT alike on both sides");
    }
    const DIRECT: &str = "direct memory copies (same_host=require)";
    if peer_lacks.contains(Features::SAME_HOST) {
        facts.push(format!(
            "peer {peer:?} does not offer {DIRECT}, which this session requires"
        ));
    }
    if session_lacks.contains(Features::SAME_HOST) {
        facts.push(format!(
            "peer {peer:?} requires {DIRECT}, which this session does not offer"
        ));
    }
    if (peer_lacks | session_lacks).contains(Features::SAME_HOST) {
        hints.push("set TCPX_SAME_HOST=auto on both sides");
    }
    // No setting controls the remaining features: the two builds differ.
    let by_setting = Features::COMMS | Features::SAME_HOST;
    let [theirs, ours] = [peer_lacks, session_lacks].map(|lacks| lacks.without(by_setting));
    if !theirs.is_empty() {
        facts.push(format!(
            "peer {peer:?} does not offer {theirs}, which this session requires"
        ));
    }
    if !ours.is_empty() {
        facts.push(format!(
            "peer {peer:?} requires {ours}, which this session does not offer"
        ));
    }
    if !(theirs | ours).is_empty() {
        hints.push("run the same release on both sides");
    }
    format!("{}: {}", facts.join("; "), hints.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Error, ErrorKind};

    #[test]
    fn text_names_the_settings_of_both_sides() {
        let error = |peer_lacks: u32, session_lacks: u32| {
            let [peer_lacks, session_lacks] = [peer_lacks, session_lacks].map(Features::from_bits);
            let peer = "decode".to_owned();
            let error = Error::Incompatible {
                peer,
                peer_lacks,
                session_lacks,
            };
            assert_eq!(error.kind(), ErrorKind::NotSupported);
            error.to_string()
        };
        assert_eq!(
            error(2, 0),
            "peer \"decode\" offers native lanes only (transport=tcp) and this session requires \
             comms of a plugin (transport=plugin): set TCPX_TRANSPORT alike on both sides"
        );
        assert_eq!(
            error(0, 2),
            "peer \"decode\" requires comms of a plugin (transport=plugin) and this session offers \
             native lanes only (transport=tcp): set TCPX_TRANSPORT alike on both sides"
        );
        assert_eq!(
            error(4, 0),
            "peer \"decode\" does not offer direct memory copies (same_host=require), which this \
             session requires: set TCPX_SAME_HOST=auto on both sides"
        );
        assert_eq!(
            error(0, 0x11),
            "peer \"decode\" requires encryption, features 0x10, which this session does not \
             offer: run the same release on both sides"
        );
        assert_eq!(
            error(0x40, 2),
            "peer \"decode\" requires comms of a plugin (transport=plugin) and this session offers \
             native lanes only (transport=tcp); peer \"decode\" does not offer features 0x40, \
             which this session requires: set TCPX_TRANSPORT alike on both sides; \
             run the same release on both sides"
        );
    }
}
