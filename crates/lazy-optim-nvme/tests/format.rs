//! The files, read by hand as `docs/formats.md` describes them.

#![allow(clippy::unwrap_used, reason = "a test that cannot set up should stop")]

mod common;

use common::{files, init, options, params, state, take_step};
use lazy_optim_nvme::NvmeAdam;

fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(bytes[offset..offset + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(bytes[offset..offset + 8].try_into().unwrap())
}

/// Checks an envelope and returns its length.
fn envelope(bytes: &[u8], magic: &[u8]) -> usize {
    assert_eq!(&bytes[..8], magic);
    assert_eq!(u32_at(bytes, 8), if magic == b"LZADCOMM" { 1 } else { 2 });
    let length = u32_at(bytes, 12) as usize;
    assert_eq!(u32_at(bytes, length - 4), crc32c::crc32c(&bytes[..length - 4]));
    length
}

#[test]
fn the_files_are_what_the_format_page_says() {
    let params = params(&[20_000, 5_000]);
    let dir = tempfile::tempdir().unwrap();
    let mut adam = NvmeAdam::create(dir.path(), &params, &options(24_000), init).unwrap();
    take_step(&mut adam, &params, 1).unwrap();
    let state = state(&mut adam, &params);
    drop(adam);
    let files = files(dir.path());
    assert_eq!(files.len(), 6);

    let layout = &files["adam.layout"];
    let layout_end = envelope(layout, b"LZADLAYO");
    let id = &layout[16..32];
    assert_eq!((u64_at(layout, 32), u32_at(layout, 40)), (24_000, 2));
    // Group 0, float32 moments, two letters, one dimension, no shard.
    assert_eq!([44, 48, 52].map(|at| u32_at(layout, at)), [0, 0, 2]);
    assert_eq!(&layout[56..58], b"p0");
    assert_eq!((u32_at(layout, 58), u64_at(layout, 62), u32_at(layout, 70)), (1, 20_000, 0));
    assert_eq!(layout_end, 74 + 30 + 4);

    // One step: sequence 1 in page 1, every bucket in slot 1.
    let record = &files["adam.record"];
    let page = (68 + 2 * 16 + 2 * 8 + 48 + (1usize << 20)).next_multiple_of(4096);
    assert_eq!(record.len(), 2 * page);
    envelope(&record[..page], b"LZADCOMM");
    let record = &record[page..];
    envelope(record, b"LZADCOMM");
    assert_eq!(&record[16..32], id);
    assert_eq!((u64_at(record, 32), u32_at(record, 40)), (1, u32_at(layout, layout_end - 4)));
    assert_eq!([48, 52, 56, 60].map(|at| u32_at(record, at)), [2, 2, 1, 2400]);
    assert_eq!((u64_at(record, 96), u64_at(record, 104)), (1, 1));
    assert_eq!(f64::from_bits(u64_at(record, 112)), 0.01);
    assert_eq!(f64::from_bits(u64_at(record, 128)), 0.999);
    assert_eq!((u32_at(record, 152), u32_at(record, 156)), (1, 0));
    assert_eq!(&record[160..2560], common::blob(1));

    let flat: Vec<Vec<u32>> = (0..3).map(|s| [state[0][s].as_slice(), &state[1][s]].concat()).collect();
    for (bucket, range) in [(0, 0..24_000), (1, 24_000..25_000)] {
        let slot = &files[&format!("bucket-0000{bucket}.slot-1")];
        let head_end = envelope(slot, b"LZADSLOT");
        let blocks = range.len().div_ceil(16_384);
        assert_eq!(head_end, 68 + 12 * blocks);
        assert_eq!(&slot[16..32], id);
        assert_eq!((u32_at(slot, 32), u32_at(slot, 36), u64_at(slot, 40)), (bucket, 1, 1));
        assert_eq!((u64_at(slot, 48), u32_at(slot, 56), u32_at(slot, 60)), (range.len() as u64, 16_384, 0));
        let committed = 64 + 16 * bucket as usize;
        assert_eq!((u64_at(record, committed), u32_at(record, committed + 8)), (1, 1));
        assert_eq!(u32_at(record, committed + 12), u32_at(slot, head_end - 4));
        let (head, section_bytes) = (4096, (4 * range.len()).next_multiple_of(4096));
        assert_eq!(slot.len(), head + 3 * section_bytes);
        for section in 0..3u32 {
            let data = &slot[head + section as usize * section_bytes..][..4 * range.len()];
            let values: Vec<u32> = data.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
            assert_eq!(values, flat[section as usize][range.clone()]);
            for (block, data) in data.chunks(4 * 16_384).enumerate() {
                let mut covered = id.to_vec();
                covered.extend(u64::from(bucket).to_le_bytes());
                covered.extend(1u64.to_le_bytes());
                covered.extend((block as u32).to_le_bytes());
                covered.extend(section.to_le_bytes());
                covered.extend(data);
                assert_eq!(u32_at(slot, 64 + 12 * block + 4 * section as usize), crc32c::crc32c(&covered));
            }
        }
    }
}
