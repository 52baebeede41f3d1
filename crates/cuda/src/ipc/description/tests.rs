use proptest::prelude::*;

use super::*;

fn opaque() -> impl Strategy<Value = [u8; OPAQUE]> {
    any::<[[u8; 32]; 2]>().prop_map(|halves| {
        let mut all = [0; OPAQUE];
        all[..32].copy_from_slice(&halves[0]);
        all[32..].copy_from_slice(&halves[1]);
        all
    })
}

fn descriptions() -> impl Strategy<Value = Description> {
    let len = 1_usize..=MAX_LEN as usize;
    let pieces = proptest::collection::vec(1_usize..1 << 26, 1..40);
    let way = prop_oneof![
        (len.clone(), opaque()).prop_map(|(len, handle)| (len, Way::Ipc(handle))),
        (len, opaque()).prop_map(|(len, handle)| (len, Way::Pool(handle))),
        pieces.prop_map(|pieces| (pieces.iter().sum(), Way::Pieces(pieces))),
    ];
    (any::<[u8; 16]>(), any::<[u8; 16]>(), 0_usize..1 << 47, way).prop_map(
        |(gpu, owner, base, (len, way))| Description {
            gpu: Gpu(gpu),
            owner,
            base,
            len,
            way,
        },
    )
}

proptest! {
    #[test]
    fn what_was_encoded_is_decoded(description in descriptions()) {
        let bytes = description.encode();
        prop_assert!(bytes.len() <= Description::MAX_BYTES);
        prop_assert_eq!(Description::decode(&bytes), Ok(description));
    }

    /// Tests fewer and more bytes than the encoding has.
    #[test]
    fn other_lengths_are_refused(description in descriptions(), cut in any::<prop::sample::Index>()) {
        let mut bytes = description.encode();
        let len = cut.index(bytes.len());
        prop_assert!(Description::decode(&bytes[..len]).is_err());
        bytes.push(0);
        prop_assert!(Description::decode(&bytes).is_err());
    }

    /// However the bytes are changed: accepted input respects all limits and is canonical.
    #[test]
    fn junk_is_refused_or_harmless(
        description in descriptions(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        junk in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let _ = Description::decode(&junk);
        let mut bytes = description.encode();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(found) = Description::decode(&bytes) {
            prop_assert!(found.len > 0 && found.len as u64 <= MAX_LEN);
            prop_assert!((found.base as u64 + found.len as u64) < 1 << ADDRESS_BITS);
            if let Way::Pieces(pieces) = &found.way {
                prop_assert!(!pieces.contains(&0));
                prop_assert_eq!(pieces.iter().sum::<usize>(), found.len);
            }
            prop_assert_eq!(found.encode(), bytes);
        }
    }
}

fn pieces(pieces: Vec<usize>, len: usize) -> Description {
    Description {
        gpu: Gpu([7; 16]),
        owner: [1; 16],
        base: 1 << 21,
        len,
        way: Way::Pieces(pieces),
    }
}

fn reason(description: &Description) -> &'static str {
    match Description::decode(&description.encode()) {
        Err(Error::BadDescription { reason }) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn limits_are_kept_on_both_sides() {
    let most = pieces(vec![1; MAX_PIECES], MAX_PIECES);
    assert_eq!(most.encode().len(), Description::MAX_BYTES);
    assert_eq!(most.fd_count(), MAX_PIECES);
    assert_eq!(Description::decode(&most.encode()), Ok(most));
    let count = "its number of pieces is out of bounds";
    assert_eq!(
        reason(&pieces(vec![1; MAX_PIECES + 1], MAX_PIECES + 1)),
        count
    );
    assert_eq!(reason(&pieces(vec![], 1)), count);
    let sum = "its pieces do not add up to its length";
    assert_eq!(reason(&pieces(vec![1, 2], 4)), sum);
    assert_eq!(reason(&pieces(vec![1, 2], 2)), sum);
    assert_eq!(reason(&pieces(vec![1, 0], 1)), sum);
    assert_eq!(reason(&pieces(vec![5, usize::MAX], 4)), sum);

    let ipc = |base: u64, len: u64| Description {
        base: base as usize,
        way: Way::Ipc([0; OPAQUE]),
        ..pieces(vec![], len as usize)
    };
    assert_eq!(reason(&ipc(0, 0)), "its length is out of bounds");
    assert_eq!(reason(&ipc(0, MAX_LEN + 1)), "its length is out of bounds");
    assert_eq!(reason(&ipc(1 << 48, 1)), "its address is out of bounds");
    assert_eq!(reason(&ipc(u64::MAX, 1)), "its address is out of bounds");
    assert_eq!(
        reason(&ipc((1 << 48) - 8, 8)),
        "its address is out of bounds"
    );
    assert!(Description::decode(&ipc((1 << 48) - 9, 8).encode()).is_ok());
}

#[test]
fn other_versions_and_kinds_are_refused() {
    let decode = |at: usize, byte| {
        let mut bytes = pieces(vec![5], 5).encode();
        bytes[at] = byte;
        Description::decode(&bytes)
    };
    let refused = |reason| Err(Error::BadDescription { reason });
    assert_eq!(decode(0, VERSION + 1), refused("its version is unknown"));
    assert_eq!(decode(1, 0), refused("its kind is unknown"));
    assert_eq!(decode(1, KIND_POOL + 1), refused("its kind is unknown"));
}

#[test]
fn a_range_is_inside_or_it_is_not() {
    let found = pieces(vec![100], 100);
    let contains = |address: usize, len| found.contains(Range { address, len });
    let base = found.base;
    assert!(contains(base, 100) && contains(base + 100, 0) && contains(base + 99, 1));
    assert!(!contains(base, 101) && !contains(base - 1, 1) && !contains(base + 1, usize::MAX));
}

#[test]
fn a_gpu_is_written_as_nvidia_smi_does() {
    let gpu = Gpu(std::array::from_fn(|i| i as u8));
    assert_eq!(gpu.to_string(), "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f");
}
