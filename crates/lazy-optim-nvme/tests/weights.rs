//! Compute weights read back from the mains, into room of the caller's.

#![allow(clippy::unwrap_used, reason = "a test that cannot set up should stop")]

mod common;

use common::{all, cut, grads, init, params, value};
use lazy_optim_nvme::{
    AdamOptions, Bytes, Durability, GroupOptions, LoadOptions, Moments, NvmeAdam, OptimError, ParamSpec,
    StepInput, WeightsOut,
};

const SIZES: [usize; 6] = [70_001, 511, 40_000, 4097, 0, 100_000];

fn specs() -> Vec<ParamSpec> {
    let formats = [Moments::F32, Moments::Bf16, Moments::Int8, Moments::F32, Moments::F32, Moments::Int8];
    params(&SIZES).into_iter().zip(formats).map(|(param, moments)| param.with_moments(moments)).collect()
}

/// Room in both formats, filled with something else: float32 for even parameters, bfloat16 for odd ones, none for the third.
struct Rooms {
    wide: Vec<Vec<f32>>,
    narrow: Vec<Vec<u16>>,
}

impl Rooms {
    fn new() -> Rooms {
        let wide = SIZES.iter().map(|n| vec![f32::NAN; *n]).collect();
        Rooms { wide, narrow: SIZES.iter().map(|n| vec![7; *n]).collect() }
    }

    fn all(&mut self) -> Vec<Option<WeightsOut<'_>>> {
        let mut all = Vec::new();
        for (param, (wide, narrow)) in self.wide.iter_mut().zip(&mut self.narrow).enumerate() {
            all.push(match param {
                2 => None,
                _ if param % 2 == 0 => Some(WeightsOut::F32(wide)),
                _ => Some(WeightsOut::Bf16(narrow)),
            });
        }
        all
    }

    fn bits(&self) -> (Vec<Vec<u32>>, &[Vec<u16>]) {
        (self.wide.iter().map(|w| w.iter().map(|v| v.to_bits()).collect()).collect(), &self.narrow)
    }
}

fn read(adam: &mut NvmeAdam) -> Rooms {
    let mut rooms = Rooms::new();
    adam.read_weights_into(rooms.all()).unwrap();
    rooms
}

/// None, some buckets, all of them in RAM; several chunks a bucket, and one.
fn options() -> [AdamOptions; 4] {
    let kept =
        |host| AdamOptions { host: Bytes(host), durability: Durability::Checkpoint, ..cut(40_000, 64, 3) };
    [cut(40_000, 64, 3), cut(1 << 20, 1024, 1), kept(1_000_000), kept(1 << 40)]
}

#[test]
fn room_is_filled_with_the_weights_that_a_store_was_made_with() {
    for options in options() {
        let dir = common::scratch();
        let mut adam = NvmeAdam::create(dir.path(), &specs(), &options, init).unwrap();
        let found = read(&mut adam);
        for (param, n) in SIZES.into_iter().enumerate() {
            for i in 0..n {
                let (wanted, wide) = (value(0, param, i), found.wide[param][i]);
                // To the nearest, ties to even.
                let bits = wanted.to_bits();
                let nearest = ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16;
                let narrow = found.narrow[param][i];
                match param {
                    2 => assert!(wide.is_nan() && narrow == 7),
                    _ if param % 2 == 0 => assert!(wide == wanted && narrow == 7, "{param} {i}"),
                    _ => assert!(wide.is_nan() && narrow == nearest, "{param} {i}"),
                }
            }
        }
    }
}

#[test]
fn what_is_read_is_what_a_step_wrote_also_after_opening_and_loading() {
    for options in options() {
        let dir = common::scratch();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        let mut adam = NvmeAdam::create(&a, &specs(), &options, init).unwrap();
        let input = StepInput { groups: &[GroupOptions::default()], ..StepInput::default() };
        let mut written = Rooms::new();
        let grads = grads(&specs(), 1);
        adam.step_into(&all(&grads), &input, written.all(), &mut |_, _| {}).unwrap();
        let wanted = written.bits();
        assert!(read(&mut adam).bits() == wanted, "{options:?}");
        adam.save("one").unwrap().wait().unwrap();
        drop(adam);
        if options.host == Bytes::ZERO {
            let mut adam = NvmeAdam::open(&a, &specs(), &options).unwrap();
            assert!(read(&mut adam).bits() == wanted, "{options:?}");
        }
        let (from, to) = ([a.join("one")], LoadOptions::default());
        let mut adam = NvmeAdam::load(&from, &b, &specs(), &cut(33_000, 64, 2), to).unwrap();
        assert!(read(&mut adam).bits() == wanted, "{options:?}");
    }
}

#[test]
fn what_cannot_be_read_is_an_error() {
    let dir = common::scratch();
    let options = cut(40_000, 64, 3);
    let mut adam = NvmeAdam::create(dir.path(), &specs(), &options, init).unwrap();
    let refused = |adam: &mut NvmeAdam, rooms| adam.read_weights_into(rooms).unwrap_err().to_string();
    let error = refused(&mut adam, (0..5).map(|_| None).collect());
    assert!(error.contains("5 parameters was given, there are 6"), "{error}");
    let mut short = [0.0; 510];
    let mut rooms = Rooms::new();
    let mut given = rooms.all();
    given[1] = Some(WeightsOut::F32(&mut short));
    let error = refused(&mut adam, given);
    assert!(error.contains("p1 has 510 elements, it has 511"), "{error}");
    adam.suspend().unwrap();
    assert!(matches!(adam.read_weights_into(rooms.all()).unwrap_err(), OptimError::Suspended));
    adam.resume().unwrap();
    drop(adam);

    // A flipped bit among the weights of the second bucket, which is of the parameters 0 and 3.
    let path = dir.path().join("bucket-00001.slot-0");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[4096 + 17] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let mut adam = NvmeAdam::open(dir.path(), &specs(), &options).unwrap();
    let error = adam.read_weights_into(rooms.all()).unwrap_err();
    assert!(matches!(error, OptimError::Checksum { bucket: 1, section: "main", .. }), "{error}");
    // Where none of it is wanted it is not read.
    let mut given = rooms.all();
    given[..4].fill_with(|| None);
    adam.read_weights_into(given).unwrap();
}
