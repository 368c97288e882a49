//! Seals where a device makes the checksums.

use lazy_model::Lane;

use super::device::equal_runs;
use super::*;
use crate::options::{BackendChoice, DirectChoice};
use crate::simulated::Simulated;

#[test]
fn t1_what_the_device_sealed_the_host_reads_and_the_other_way_round() {
    let folders = [(); 2].map(|()| {
        let program = std::env::current_exe().unwrap();
        tempfile::tempdir_in(program.parent().unwrap()).unwrap()
    });
    for drives in 1..=2 {
        let dirs = folders[..drives].iter().map(|folder| folder.path().to_owned()).collect();
        let (backend, checksum, direct) = (BackendChoice::Posix, Checksum::Crc32c, DirectChoice::Off);
        let options =
            NvmeOptions { dirs, backend, checksum, direct, ..NvmeOptions::new("", Bytes::from_mib(8)) };
        let mut spill = Spill::open(&options).unwrap();
        let device: Arc<dyn Device> = Arc::new(Simulated::new(Bytes::ZERO, 0).unwrap());
        spill.sums = Some((Arc::clone(&device), [device.stream(Lane::NvmeWrite); 2]));
        for len in [1, 448, 4095, 4096, 4097, (1 << 20) + 1, (1 << 20) + 512_448, (3 << 20) + 8191] {
            for offset in [0, 4096, (1 << 20) - 4096] {
                let mut bytes: Vec<u128> = (0..len as u128 / 16 + 1).map(|i| i * 0x1_0000_0003).collect();
                let bytes = &mut bytemuck::cast_slice_mut::<u128, u8>(&mut bytes)[..len];
                let mut back = vec![0; len];
                // SAFETY: the memory is this test's alone, here and below.
                unsafe { spill.write_device(offset, Window::of_mut(bytes)) }.unwrap();
                spill.read(offset, &mut back).unwrap();
                assert!(back == bytes, "{len} at {offset} over {drives} drives");
                spill.write(offset, &back).unwrap();
                bytes.fill(0);
                // SAFETY: as above.
                unsafe { spill.read_device(offset, Window::of_mut(bytes)) }.unwrap();
                assert!(back == bytes);
                // The last byte changed on the drive: its piece is named.
                let place = spill.files.locate(offset + len as u64 - 1);
                let file = spill.files.file(place.file);
                rustix::io::pwrite(&file.file, &[!back[len - 1]], place.offset).unwrap();
                // SAFETY: as above.
                let error = unsafe { spill.read_device(offset, Window::of_mut(bytes)) }.unwrap_err();
                let StoreError::Corrupt { offset: at, bytes: piece, .. } = error else { panic!("{error}") };
                assert_eq!(at + piece.get() - 1, place.offset);
                let error = spill.read(offset, &mut back).unwrap_err();
                assert!(matches!(error, StoreError::Corrupt { offset, .. } if offset == at), "{error}");
            }
        }
    }
}

#[test]
fn runs_are_of_equal_pieces_and_a_shorter_one_at_their_end() {
    let runs = |pieces: &[usize]| {
        let runs = equal_runs(pieces.iter().copied());
        runs.iter().map(|run| (run.start, run.len, run.piece)).collect::<Vec<_>>()
    };
    assert_eq!(runs(&[]), []);
    assert_eq!(runs(&[4096, 1]), [(0, 4097, 4096)]);
    assert_eq!(runs(&[8, 64, 64, 16, 3]), [(0, 8, 8), (8, 144, 64), (152, 3, 3)]);
}

#[test]
fn records_of_boundaries_that_nobody_takes_are_the_latest_ones() {
    let folder = tempfile::tempdir().unwrap();
    let (backend, direct) = (BackendChoice::Posix, DirectChoice::Off);
    let nvme = NvmeOptions::new(folder.path(), Bytes(4096));
    let spill = Spill::open(&NvmeOptions { backend, direct, debug_boundaries: true, ..nvme }).unwrap();
    for offset in 0..MOST_RECORDS as u64 + 3 {
        spill.noted(Op::Write, offset, 1, &[]);
    }
    let records = spill.take_boundary_records();
    assert_eq!((records.len(), records[0].offset), (MOST_RECORDS, 3));
    assert!(spill.take_boundary_records().is_empty());
}
