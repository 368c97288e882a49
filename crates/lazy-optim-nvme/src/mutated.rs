//! Heads of files, and consolidated files, changed byte by byte: their checksums notice it, and where those are made anew, decoding refuses what cannot be
//! or reads it for what it says. It never panics, and takes no memory for counts that the bytes do not hold.

use std::path::Path;

use proptest::prelude::*;

use crate::import::Consolidated;
use crate::layout::Layout;
use crate::manifest::{self, Manifest};
use crate::record::{Committed, Record, Standing};
use crate::slot::{Identity, SlotHead, SlotShape};
use crate::{AdamOptions, GroupOptions, Moments, NvmeAdam, OptimError, ParamSpec};

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

/// What is read of a consolidated file: parameters, step counts, sequence, blob, and the bits of all values.
#[derive(Debug, PartialEq)]
struct Consolidation {
    params: Vec<ParamSpec>,
    notes: (Vec<u64>, u64, Vec<u8>),
    values: Vec<Vec<u8>>,
}

/// Reads what a consolidated file has of a parameter, or the whole file.
fn consolidation(path: &Path, bytes: &[u8]) -> Result<Consolidation, OptimError> {
    std::fs::write(path, bytes).unwrap();
    let mut file = Consolidated::open(path)?;
    let params = file.params().to_vec();
    let notes = (file.step_counts().to_vec(), file.sequence(), file.blob().to_vec());
    let mut values = vec![Vec::new(); params.len()];
    for (index, param) in params.iter().enumerate() {
        let elements = param.shape.iter().product();
        file.read(index, 0..elements, &mut |stretch| {
            let bytes = stretch.range.start * 4..stretch.range.end * 4;
            stretch
                .sections
                .iter()
                .for_each(|section| values[index].extend_from_slice(&section[bytes.clone()]));
        })?;
    }
    Ok(Consolidation { params, notes, values })
}

/// A file of two parameters, and where its values begin.
fn exported(dir: &Path) -> (Vec<u8>, usize) {
    let params = [ParamSpec::new("a", &[3, 20]), ParamSpec::new("b", &[0]), ParamSpec::new("c", &[])];
    let options = AdamOptions { bucket_elements: 50, ..AdamOptions::default() };
    let store = dir.join("store");
    let mut adam = NvmeAdam::create(&store, &params, &options, crate::common::init).unwrap();
    crate::common::take_step(&mut adam, &params, 1).unwrap();
    adam.save("here").unwrap().wait().unwrap();
    crate::export(&[store.join("here")], &dir.join("good")).unwrap();
    let bytes = std::fs::read(dir.join("good")).unwrap();
    let header = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    (bytes, 8 + header)
}

#[test]
fn every_cut_and_every_flipped_bit_of_a_consolidated_file_is_noticed_or_changes_nothing() {
    let dir = crate::common::scratch();
    let (good, _) = exported(dir.path());
    let path = dir.path().join("changed");
    let wanted = consolidation(&path, &good).unwrap();
    for end in 0..good.len() {
        assert!(
            matches!(consolidation(&path, &good[..end]), Err(OptimError::Damaged { .. })),
            "cut at {end}"
        );
    }
    let (mut noticed, mut harmless) = (0, 0);
    for at in 0..good.len() {
        // A bit of a byte each, and another digit or letter.
        for change in [1 << (at % 8), 0x01, 0x20] {
            let mut bytes = good.clone();
            bytes[at] ^= change;
            match consolidation(&path, &bytes) {
                Ok(read) => {
                    assert!(read == wanted, "byte {at} changed by {change:#x}");
                    harmless += 1;
                }
                Err(OptimError::Damaged { .. }) => noticed += 1,
                Err(other) => panic!("byte {at} changed by {change:#x}: {other}"),
            }
        }
    }
    // Spaces, the version that has no checksums, and such.
    assert!(harmless * 20 < noticed, "{harmless} of {noticed}");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Files that any program may write: without checksums, and so taken for what they say.
    #[test]
    fn consolidated_files_of_others_are_refused_or_read_for_what_they_say(
        changes in prop::collection::vec(change(), 0..4),
        digits in prop::collection::vec((any::<prop::sample::Index>(), b'0'..=b'9'), 0..4),
        count in prop_oneof![Just(1u64), Just(u64::MAX), any::<u64>()],
    ) {
        let dir = crate::common::scratch();
        let (good, data) = exported(dir.path());
        let header = std::str::from_utf8(&good[8..data]).unwrap().replace("\"version\":\"2\"", "\"version\":\"1\"");
        let header = header.replace("\\\"a\\\":1", &format!("\\\"a\\\":{count}"));
        let mut header = changed(header.into_bytes(), &changes);
        let numbers: Vec<usize> = (0..header.len()).filter(|i| header[*i].is_ascii_digit()).collect();
        for (which, digit) in digits {
            if !numbers.is_empty() {
                header[numbers[which.index(numbers.len())]] = digit;
            }
        }
        let bytes = [(header.len() as u64).to_le_bytes().as_slice(), &header, &good[data..]].concat();
        if let Ok(read) = consolidation(&dir.path().join("changed"), &bytes) {
            let found: usize = read.values.iter().map(Vec::len).sum();
            prop_assert_eq!(found, good.len() - data);
            // What a store goes on from can be counted on from.
            prop_assert!(read.notes.0.iter().chain([&read.notes.1]).all(|count| *count < 1 << 53));
        }
    }
}
