//! State that is loaded into another cut than it was saved in.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot set up should stop")]

mod common;

use common::cut;
use common::ranks::{Ranks, flat};
use lazy_optim_nvme::{LoadOptions, Moments, OptimError, ParamSpec};

const EXACT: LoadOptions = LoadOptions { lossy: false, replace: false };
const LOSSY: LoadOptions = LoadOptions { lossy: true, replace: false };

/// All formats, sizes that fit nothing.
fn mixed() -> Vec<ParamSpec> {
    let of = |name: &str, shape: &[usize], moments| ParamSpec::new(name, shape).with_moments(moments);
    vec![
        of("p0", &[300, 700], Moments::Int8),
        of("p1", &[333_333], Moments::F32),
        of("p2", &[511], Moments::Int8),
        of("p3", &[0], Moments::F32),
        of("p4", &[2, 70_000], Moments::Bf16).in_group(1),
        of("p5", &[], Moments::Bf16),
    ]
}

#[test]
fn o2_saved_at_5_and_loaded_into_1_2_4_8_and_1_shards_it_ends_at_10_as_if_nothing_had_been() {
    let whole = mixed();
    let mut straight = Ranks::create(&flat(&whole, 1), &cut(1 << 20, 256, 3));
    (1..=10).for_each(|step| straight.step(step));
    let mut ranks = Ranks::create(&flat(&whole, 1), &cut(100_000, 64, 3));
    (1..=5).for_each(|step| ranks.step(step));
    let cuts = [(1, 70_001), (2, 40_000), (4, 16_385), (8, 1 << 20), (1, 77_777)];
    for (step, (count, bucket)) in (6..).zip(cuts) {
        let saved = ranks.save("here");
        let before = ranks.state();
        ranks = Ranks::load(&saved, &flat(&whole, count), &cut(bucket, 64, 2), EXACT).unwrap();
        assert!(ranks.state() == before, "{count} shards hold what was saved");
        for rank in &ranks.0 {
            assert_eq!(rank.adam.sequence(), step - 1);
            assert_eq!(rank.adam.step_counts(), vec![step - 1; whole.len()]);
            assert_eq!(rank.adam.blob(), (step - 1).to_le_bytes());
        }
        ranks.step(step as usize);
    }
    assert!(ranks.state() == straight.state());
}

#[test]
fn boxes_rows_columns_and_runs_are_loaded_into_each_other() {
    let whole = [
        ParamSpec::new("p0", &[60, 1000]).with_moments(Moments::Bf16),
        ParamSpec::new("p1", &[4, 30, 512]),
        ParamSpec::new("p2", &[64, 1024]).with_moments(Moments::Int8),
        ParamSpec::new("p3", &[17]),
    ];
    let [a, b, c, d] = whole.clone();
    let alone = vec![whole.to_vec()];
    let rows = vec![
        vec![
            a.clone().boxed(&[0, 0], &[13, 1000]),
            b.clone().boxed(&[0, 0, 0], &[1, 30, 512]),
            c.clone().boxed(&[0, 0], &[1, 1024]),
        ],
        vec![
            d.clone(),
            c.clone().boxed(&[1, 0], &[63, 1024]),
            b.clone().boxed(&[1, 0, 0], &[3, 30, 512]),
            a.clone().boxed(&[13, 0], &[47, 1000]),
        ],
    ];
    let columns = vec![
        vec![
            a.clone().boxed(&[0, 0], &[60, 1]),
            b.clone().boxed(&[0, 0, 0], &[4, 7, 512]),
            d.clone().boxed(&[0], &[3]),
        ],
        vec![b.clone().boxed(&[0, 7, 0], &[4, 23, 100]), c.clone().boxed(&[0, 0], &[64, 768])],
        vec![
            c.clone().boxed(&[0, 768], &[64, 256]),
            a.clone().boxed(&[0, 1], &[60, 999]),
            b.clone().boxed(&[0, 7, 100], &[4, 23, 412]),
            d.clone().boxed(&[3], &[14]).in_group(1),
        ],
    ];
    let runs = vec![
        vec![d.clone().range(0, 17), c.clone().range(0, 2560), b.clone().range(0, 1)],
        vec![a.clone().range(0, 60_000), b.clone().range(1, 61_439), c.clone().range(2560, 62_976)],
    ];
    let mut ranks = Ranks::create(&alone, &cut(30_000, 64, 2));
    ranks.step(1);
    ranks.step(2);
    let wanted = ranks.state();
    for shards in [&rows, &columns, &runs, &columns, &alone, &runs, &rows, &alone] {
        let saved = ranks.save("here");
        ranks = Ranks::load(&saved, shards, &cut(20_000, 64, 3), EXACT).unwrap();
        assert!(ranks.state() == wanted);
        assert!(ranks.0.iter().all(|rank| rank.adam.step_counts().iter().all(|count| *count == 2)));
    }
}

#[test]
fn other_formats_and_cuts_inside_a_quantisation_block_are_refused_unless_rounding_is_asked_for() {
    let whole = [ParamSpec::new("p0", &[100_000]).with_moments(Moments::Int8)];
    let mut ranks = Ranks::create(&[whole.to_vec()], &cut(30_000, 64, 2));
    ranks.step(1);
    let wanted = ranks.state();
    let saved = ranks.save("here");
    let of = |moments| vec![vec![whole[0].clone().with_moments(moments)]];
    let inside = vec![vec![whole[0].clone().range(0, 1000)], vec![whole[0].clone().range(1000, 99_000)]];
    let beside = vec![vec![whole[0].clone().range(0, 1024)], vec![whole[0].clone().range(1024, 98_976)]];
    for (shards, why) in [
        (of(Moments::F32), "the moments of p0 are Int8"),
        (of(Moments::Bf16), "the moments of p0 are Int8"),
        (inside.clone(), "the part of p0 asked for is cut inside a block of 256"),
    ] {
        let refused = Ranks::load(&saved, &shards, &cut(30_000, 64, 2), EXACT).err().unwrap();
        assert!(matches!(refused, OptimError::Lossy { .. }), "{refused}");
        assert!(refused.to_string().contains(why), "{refused}");
    }
    // To float32 the values are what they were, and main weights are always.
    let mut loaded = Ranks::load(&saved, &of(Moments::F32), &cut(30_000, 64, 2), LOSSY).unwrap();
    assert!(loaded.state() == wanted);
    let mut loaded = Ranks::load(&saved, &beside, &cut(30_000, 64, 2), EXACT).unwrap();
    assert!(loaded.state() == wanted);
    for shards in [of(Moments::Bf16), inside.clone()] {
        let mut loaded = Ranks::load(&saved, &shards, &cut(30_000, 64, 2), LOSSY).unwrap();
        let found = loaded.state();
        assert!(found[0][0] == wanted[0][0]);
        for (found, wanted) in found[0][1..].iter().flatten().zip(wanted[0][1..].iter().flatten()) {
            let [found, wanted] = [found, wanted].map(|bits| f32::from_bits(*bits));
            assert!((found - wanted).abs() <= wanted.abs() / 16.0 + 1e-6, "{found} {wanted}");
        }
        // What was cut inside a block and is to be whole again; the same cut loads as it is.
        if shards == inside {
            let saved = loaded.save("inside");
            for (i, bucket) in [(0, 30_000), (1, 20_000)] {
                assert!(Ranks::load(&saved[i..=i], &inside[i..=i], &cut(bucket, 64, 2), EXACT).is_ok());
            }
            let mut again =
                Ranks::load(&saved, &inside, &cut(20_000, 64, 2), EXACT).unwrap_or_else(|e| panic!("{e}"));
            assert!(again.state() == found);
            let refused = Ranks::load(&saved, &of(Moments::Int8), &cut(30_000, 64, 2), EXACT).err().unwrap();
            assert!(
                refused.to_string().contains("holds a part of p0 that is cut inside a block"),
                "{refused}"
            );
            assert!(Ranks::load(&saved, &of(Moments::Int8), &cut(30_000, 64, 2), LOSSY).is_ok());
        }
    }
}

#[test]
fn o2_what_does_not_fit_is_refused_by_its_first_difference() {
    let whole = [ParamSpec::new("p0", &[400, 500]), ParamSpec::new("p1", &[3])];
    let options = cut(30_000, 64, 2);
    let mut ranks = Ranks::create(&flat(&whole, 2), &options);
    ranks.step(1);
    let first = ranks.save("first");
    ranks.step(2);
    let second = ranks.save("second");
    let refused = |sources: &[std::path::PathBuf], shards: &[Vec<ParamSpec>]| {
        let error = Ranks::load(sources, shards, &options, EXACT).err().unwrap();
        assert!(matches!(error, OptimError::Mismatch { .. }), "{error}");
        error.to_string()
    };
    let one = flat(&whole, 1);
    let named = |name: &str, shape: &[usize]| vec![vec![ParamSpec::new(name, shape)]];
    let cases = [
        (vec![first[0].clone()], one.clone(), "elements 131072..200000 of parameter p0 are missing"),
        (vec![first[1].clone()], one.clone(), "elements 0..131072 of parameter p0 are missing"),
        (
            vec![first[0].clone(), first[0].clone(), first[1].clone()],
            one.clone(),
            "elements 0..131072 of parameter p0 are both in",
        ),
        (vec![first[0].clone(), second[1].clone()], one.clone(), "was saved at step 1"),
        (first.clone(), named("p2", &[3]), "parameter p2 is not in"),
        (first.clone(), named("p1", &[4]), "parameter p1 has shape [3]"),
        (first.clone(), named("p0", &[500, 400]), "parameter p0 has shape [400, 500]"),
    ];
    for (sources, shards, why) in cases {
        let message = refused(&sources, &shards);
        assert!(message.contains(why), "{message}");
    }
    // Step counts that are not those of one run: the second rank had no gradient in a step.
    let mut odd = Ranks::load(&first, &flat(&whole, 2), &options, EXACT).unwrap();
    let input = lazy_optim_nvme::StepInput { groups: &[Default::default()], ..Default::default() };
    let zeros = vec![0.0; 131_072];
    odd.0[0].adam.step(&[common::grad(&zeros), None], &input, &mut |_, _, _| {}).unwrap();
    odd.0[1].adam.step(&[None, None], &input, &mut |_, _, _| {}).unwrap();
    let message = refused(&odd.save("odd"), &one);
    assert!(message.contains("parameter p0 has taken 2 steps in") && message.contains("1 in"), "{message}");
}

#[test]
fn parameters_in_another_order_and_other_groups_and_a_part_of_them_are_loaded() {
    let whole = mixed();
    let options = cut(50_000, 64, 2);
    let mut ranks = Ranks::create(std::slice::from_ref(&whole), &options);
    ranks.step(1);
    let wanted = ranks.state();
    let saved = ranks.save("here");
    let mut other: Vec<_> = whole.iter().rev().map(|param| param.clone().in_group(1)).collect();
    assert!(Ranks::load(&saved, &[other.clone()], &options, EXACT).unwrap().state() == wanted);
    other.retain(|param| param.name != "p5");
    assert!(Ranks::load(&saved, &[other], &options, EXACT).unwrap().state() == wanted[..5]);
}
