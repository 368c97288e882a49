//! Spill files whose bytes somebody else changes: with checksums on, an extent comes back as it was written or not at all.
//!
//! Extents have no headers on disk: what is known of them (length, a checksum of each piece) is in memory, and the spill files
//! end with the process. So the bytes are what can be damaged; run folders have their own such tests beside the sweep.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::fs::File;
use std::os::unix::fs::FileExt;

use lazy_store::{
    BackendChoice, Bytes, Checksum, DirectChoice, NvmeOptions, Store, StoreError, StoreOptions, Tier,
};
use proptest::prelude::*;

const TIER: u64 = 4 << 20;

/// A change of the spill file. Positions are shares of it, in 65536ths.
#[derive(Clone, Debug)]
enum Change {
    Overwrite(u16, Vec<u8>),
    /// A page where another one belongs, as from a misdirected write.
    Misdirect(u16, u16),
    Cut(u16),
}

fn change() -> impl Strategy<Value = Change> {
    let bytes = prop::collection::vec(any::<u8>(), 1..300);
    prop_oneof![
        4 => (any::<u16>(), bytes).prop_map(|(at, bytes)| Change::Overwrite(at, bytes)),
        2 => (any::<u16>(), any::<u16>()).prop_map(|(from, to)| Change::Misdirect(from, to)),
        1 => any::<u16>().prop_map(Change::Cut),
    ]
}

/// Of one page or many, at times of more than one piece.
fn length() -> impl Strategy<Value = u64> {
    prop_oneof![9 => 1..60_000_u64, 1 => 1 << 20..(1 << 20) + 70_000_u64]
}

fn apply(file: &File, used: u64, change: &Change) {
    let place = |share: u16| u64::from(share) * used / 65536;
    match change {
        Change::Overwrite(at, bytes) => file.write_all_at(bytes, place(*at)).unwrap(),
        Change::Misdirect(from, to) => {
            let mut page = vec![0; 4096];
            let (from, to) = (place(*from) / 4096 * 4096, place(*to) / 4096 * 4096);
            let got = file.read_at(&mut page, from).unwrap();
            file.write_all_at(&page[..got], to).unwrap();
        }
        Change::Cut(at) => file.set_len(place(*at)).unwrap(),
    }
}

/// Bytes of which no two pages are alike.
fn pattern(seed: usize, len: u64) -> Vec<u8> {
    let period: Vec<u8> = (0..4093_usize).map(|i| (i * 31 + i / 255 + seed * 97) as u8).collect();
    let mut bytes = period.repeat(len as usize / period.len() + 1);
    bytes.truncate(len as usize);
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn t14_bytes_changed_behind_the_store_are_never_given_back_as_those_written(
        lengths in prop::collection::vec(length(), 1..4),
        changes in prop::collection::vec(change(), 0..3),
    ) {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let nvme = NvmeOptions {
            // Through the page cache, as the changes go.
            backend: BackendChoice::Posix,
            direct: DirectChoice::Off,
            checksum: Checksum::Crc32c,
            ..NvmeOptions::new(dir.path(), Bytes(TIER))
        };
        let store = Store::open(StoreOptions { nvme: Some(nvme), ..StoreOptions::default() }).unwrap();
        let put = |(i, &len): (usize, &u64)| store.put(format!("put {i}"), Tier::Nvme, pattern(i, len)).unwrap();
        let written: Vec<_> = lengths.iter().enumerate().map(put).collect();
        store.synchronize().unwrap();
        let path = std::fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
        let file = File::options().read(true).write(true).open(path).unwrap();
        let used = written.last().map_or(0, |extent| extent.offset() + extent.bytes().get());
        changes.iter().for_each(|change| apply(&file, used, change));
        for (i, extent) in written.iter().enumerate() {
            let wanted = pattern(i, lengths[i]);
            let mut there = vec![0; wanted.len()];
            let (end, len) = (extent.offset() + lengths[i], file.metadata().unwrap().len());
            let there = file.read_exact_at(&mut there, extent.offset()).is_ok().then_some(there);
            match store.get(extent) {
                Ok(bytes) => prop_assert!(bytes == wanted && there.is_none_or(|there| there == wanted)),
                Err(StoreError::Task { source, .. }) => match source.downcast_ref::<StoreError>() {
                    Some(StoreError::Corrupt { .. }) => prop_assert!(there.is_none_or(|there| there != wanted)),
                    Some(StoreError::Short { .. }) => prop_assert!(len < end.next_multiple_of(4096)),
                    other => panic!("{other:?}"),
                },
                Err(other) => panic!("{other}"),
            }
        }
    }
}
