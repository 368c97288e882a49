//! Heads of files changed byte by byte: their checksums notice it, and where those are made anew, decoding refuses what cannot be
//! or reads it for what it says. It never panics, and takes no memory for counts that the bytes do not hold.

use proptest::prelude::*;

use crate::layout::Layout;
use crate::manifest::{self, Manifest};
use crate::record::{Committed, Record, Standing};
use crate::slot::{Identity, SlotHead, SlotShape};
use crate::{GroupOptions, Moments, ParamSpec};

/// Bytes put in the place of others, at a share of the length in 65536ths; a cut, or a longer end.
#[derive(Clone, Debug)]
enum Change {
    Overwrite(u16, Vec<u8>),
    Cut(u16),
    Append(Vec<u8>),
}

fn change() -> impl Strategy<Value = Change> {
    let bytes = || prop::collection::vec(prop_oneof![any::<u8>(), Just(0), Just(0xff)], 1..12);
    prop_oneof![
        4 => (any::<u16>(), bytes()).prop_map(|(at, bytes)| Change::Overwrite(at, bytes)),
        1 => any::<u16>().prop_map(Change::Cut),
        1 => bytes().prop_map(Change::Append),
    ]
}

fn changed(mut bytes: Vec<u8>, changes: &[Change]) -> Vec<u8> {
    for change in changes {
        match change {
            Change::Overwrite(at, new) => {
                let at = usize::from(*at) * bytes.len() / 65536;
                bytes.iter_mut().skip(at).zip(new).for_each(|(byte, new)| *byte = *new);
            }
            Change::Cut(at) => bytes.truncate(usize::from(*at) * bytes.len() / 65536),
            Change::Append(new) => bytes.extend(new),
        }
    }
    bytes
}

/// The same with the length field and the checksum made to fit, as the format page describes them.
fn resealed(mut bytes: Vec<u8>, [magic, version]: [&[u8]; 2]) -> Vec<u8> {
    bytes.resize(bytes.len().max(20), 0);
    let end = bytes.len() - 4;
    bytes[..8].copy_from_slice(magic);
    bytes[8..12].copy_from_slice(version);
    bytes[12..16].copy_from_slice(&(end as u32 + 4).to_le_bytes());
    let crc = crc32c::crc32c(&bytes[..end]);
    bytes[end..].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// Decodes changed bytes, as they are and with a new checksum; what comes out takes as many bytes again.
fn check<T>(
    good: &[u8],
    changes: &[Change],
    decode: impl Fn(&[u8]) -> Option<T>,
    encode: impl Fn(&T) -> Vec<u8>,
) -> Result<(), TestCaseError> {
    let bytes = changed(good.to_vec(), changes);
    if let Some(read) = decode(&bytes) {
        // What follows an envelope is not its.
        prop_assert!(bytes.starts_with(good) && encode(&read) == good);
    }
    let bytes = resealed(bytes, [&good[..8], &good[8..12]]);
    if let Some(read) = decode(&bytes) {
        prop_assert_eq!(encode(&read).len(), bytes.len());
        prop_assert!(decode(&encode(&read)).is_some());
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn changed_records_are_noticed_or_read_for_what_they_say(
        buckets in 0..5usize,
        step_counts in prop::collection::vec(any::<u64>(), 0..5),
        groups in 0..3usize,
        blob in prop::collection::vec(any::<u8>(), 0..40),
        changes in prop::collection::vec(change(), 0..3),
    ) {
        let buckets = vec![Committed { slot: 1, generation: 77, head_crc: 5 }; buckets];
        let groups = vec![GroupOptions::default(); groups];
        let (id, standing) = ([3; 16], Standing::Saved);
        let good = Record { id, layout_crc: 8, standing, sequence: 77, buckets, step_counts, groups, blob }.encode();
        check(&good, &changes, |bytes| Record::decode(bytes).ok(), Record::encode)?;
    }

    #[test]
    fn changed_manifests_are_noticed_or_read_for_what_they_say(
        sizes in prop::collection::vec(0..200usize, 1..5),
        blob in prop::collection::vec(any::<u8>(), 0..40),
        changes in prop::collection::vec(change(), 0..3),
    ) {
        let param = |(i, n): (usize, &usize)| ParamSpec::new(format!("p{i}"), &[*n]);
        let params: Vec<_> = sizes.iter().enumerate().map(param).collect();
        let layout = Layout::new(&params, 70).unwrap();
        let (id, layout_crc) = ([3; 16], layout.encode(&[3; 16]).1);
        let buckets = vec![Committed { slot: 1, generation: 77, head_crc: 5 }; layout.bucket_count()];
        let (step_counts, groups, standing) = (vec![7; sizes.len()], Vec::new(), Standing::Committed);
        let record = Record { id, layout_crc, standing, sequence: 77, buckets, step_counts, groups, blob };
        let good = manifest::encode(&id, &layout, &record);
        let encode = |read: &Manifest| manifest::encode(&read.id, &read.layout, &read.record);
        check(&good, &changes, |bytes| Manifest::decode(bytes).ok(), encode)?;
    }

    #[test]
    fn changed_layouts_are_noticed_or_read_for_what_they_say(
        shapes in prop::collection::vec(prop::collection::vec(0..9usize, 0..4), 1..5),
        changes in prop::collection::vec(change(), 0..3),
    ) {
        let named = |(i, shape): (usize, &Vec<usize>)| {
            let whole = ParamSpec::new(format!("p{i}"), shape).in_group(i % 2).with_moments(Moments::ALL[i % 3]);
            match i {
                0 => whole,
                1 => whole.range(0, 0),
                _ => whole.boxed(&vec![0; shape.len()], shape),
            }
        };
        let params: Vec<_> = shapes.iter().enumerate().map(named).collect();
        // A layout of no elements at all is refused when it is made.
        let Ok(layout) = Layout::new(&params, 70) else { return Ok(()) };
        let good = layout.encode(&[3; 16]).0;
        let encode = |(id, layout, _): &([u8; 16], Layout, u32)| layout.encode(id).0;
        check(&good, &changes, |bytes| Layout::decode(bytes).ok(), encode)?;
    }

    #[test]
    fn changed_slot_heads_are_noticed_or_read_for_what_they_say(
        elements in 0..200_000usize,
        changes in prop::collection::vec(change(), 0..3),
    ) {
        let identity = Identity { id: [3; 16], bucket: 4, generation: 77 };
        let table = vec![[1, 2, 3]; elements.div_ceil(crate::slot::BLOCK)];
        let shape = SlotShape { elements, moments: Moments::Bf16 };
        let good = SlotHead { identity, slot: 1, shape, table }.encode().0;
        check(&good, &changes, |bytes| SlotHead::decode(bytes).ok(), |(head, _)| head.encode().0)?;
    }
}
