//! Connection infos and region descriptors.

use sha2::{Digest, Sha256};
use tcpx_proto::descriptor::RegionDescriptor;
use tcpx_proto::info::ConnectionInfo;

/// Decodes `data` as a connection info, as one with a right checksum, and as a region descriptor.
pub fn check(data: &[u8]) {
    check_info(data);
    // No fuzzer guesses a SHA-256, so this reaches everything after the checksum.
    check_info(&seal(data));
    check_descriptor(data);
}

/// Appends the checksum that makes `body` a valid connection info.
pub fn seal(body: &[u8]) -> Vec<u8> {
    [body, &Sha256::digest(body)[..8]].concat()
}

fn check_info(data: &[u8]) {
    let Ok(info) = ConnectionInfo::decode(data) else {
        return;
    };
    assert_eq!(info.encode(), data, "one encoding of each info");
    assert!(data.len() <= ConnectionInfo::MAX_ENCODED_LEN);
    assert!((1..=255).contains(&info.name().as_str().len()));
    assert!((1..=64).contains(&(info.addresses().len() + info.names().len())));
    assert!(info.names().iter().all(|host| host.port != 0));
    assert!(info.addresses().iter().all(|address| address.port() != 0));
}

fn check_descriptor(data: &[u8]) {
    let Ok(region) = RegionDescriptor::decode(data) else {
        return;
    };
    assert_eq!(region.encode(), data, "one encoding of each descriptor");
    let end = region
        .address()
        .checked_add(region.len())
        .expect("no overflow");
    assert!(region.contains(region.address(), region.len()));
    assert!(!region.contains(end, 1));
}
