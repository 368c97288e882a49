//! How far a step reaches into each tier: exactly as far as its plan says.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;

use common::*;
use lazy_model::schedule::{ExposedSeconds, Promise};
use lazy_model::{Bytes, Seconds, Tier, TierBytes, Verified};
use lazy_runtime::{
    Backward, Context, Executor, ExecutorOptions, Forward, Layer, LayerError, LayerSizes, Model,
    ModelOptions, Parameter, Saved,
};
use lazy_store::QueueOrder;
use proptest::prelude::*;

/// 4096 bytes: a multiple of what HBM and NVMe align to.
const WIDTH: usize = 1024;

#[test]
fn a_step_reaches_as_far_into_hbm_as_its_plan_says_to_the_byte() {
    for (letters, keep) in [
        ("GGGGGGGGG", "KKKKKKKK"),
        ("GGGGGGGGG", NO_KEEP),
        ("N-C-G--CG", "K--K-KK-"),
        ("N--N--C-G", NO_KEEP),
        ("CCNNC-NNG", "----K--K"),
    ] {
        for options in [resident(1), resident(3), streamed(false, 3), streamed(true, 1), streamed(true, 3)] {
            for ahead in [Ahead::Prefetch(0), Ahead::Prefetch(2), Ahead::Planned(4)] {
                let dir = folder();
                let running = running(QueueOrder::Threads, dir.path());
                let (mut executor, mut program) = set_up_ahead(letters, keep, ahead, options, &running);
                // The second one starts where the first one left the arenas.
                for number in 0..2 {
                    let report = executor.run(&mut program, &step(number, options.micro_batches)).unwrap();
                    let promised = executor.model().needs(program.plan());
                    assert_eq!(report.extents, promised, "{letters} {keep} {ahead:?} {options:?}");
                    assert!(Tier::ALL.iter().all(|&tier| report.peaks.get(tier) <= report.extents.get(tier)));
                }
            }
        }
    }
}

#[test]
fn the_comparison_sets_what_was_reached_beside_what_was_promised() {
    let dir = folder();
    let (mut executor, mut program) =
        set_up("N-C-G--CG", NO_KEEP, 2, streamed(false, 3), &running(QueueOrder::Threads, dir.path()));
    let report = executor.run(&mut program, &step(0, 3)).unwrap();
    let resident = executor.model().resident();
    let promise = Promise {
        step_s: Seconds(7.0),
        forward_s: Seconds(2.0),
        backward_s: Seconds(4.0),
        optimizer_s: Seconds(1.0),
        exposed_s: ExposedSeconds::default(),
        peak_bytes: TierBytes::default(),
    };
    let (timeline, first) = (report.pass(1), Some(report.pass(0)));
    let verified = Verified { plan: program.plan().clone(), timeline, first, promise };
    let comparison = report.compare(&verified, resident);
    let predicted: Vec<f64> = comparison.rows.iter().map(|row| row.predicted).collect();
    assert_eq!(predicted[..3], [6.0, 2.0, 4.0]);
    let needs = executor.model().needs(program.plan());
    for tier in Tier::ALL {
        let row = comparison.rows.iter().find(|row| row.what == format!("{tier} extent")).unwrap();
        assert_eq!([row.predicted, row.measured], [needs.get(tier).get() as f64; 2]);
    }
    // An evaluation needs less, and says so.
    let mut evaluation = executor.prepare_evaluation().unwrap();
    let least = executor.model().needs(evaluation.plan());
    let report = executor.run(&mut evaluation, &step(0, 3)).unwrap();
    assert!(report.extents == least && least.hbm < needs.hbm);
}

/// A layer of any sizes, which moves no numbers.
struct Sized(LayerSizes, usize, usize);

impl Layer for Sized {
    fn sizes(&self) -> LayerSizes {
        self.0
    }
    fn parameters(&self) -> Vec<Parameter> {
        vec![Parameter::f32(self.1, format!("w{}", self.1), self.2)]
    }
    fn forward(&self, _: &Context<'_>, call: Forward<'_>) -> Result<Saved, LayerError> {
        let sizes = self.0;
        let out = call.out.map(|out| out.bytes()).transpose()?.map_or(sizes.output, |out| {
            out.fill(1);
            Bytes(out.len() as u64)
        });
        let saved = call.save.map(|save| save.bytes()).transpose()?.map_or(sizes.saved, |save| {
            save.fill(2);
            Bytes(save.len() as u64)
        });
        assert_eq!((out, saved), (sizes.output, sizes.saved));
        Ok(Saved::none())
    }
    fn backward(&self, _: &Context<'_>, call: Backward<'_>) -> Result<(), LayerError> {
        assert_eq!(call.internals.len(), self.0.saved);
        call.dx.bytes()?.fill(3);
        Ok(())
    }
}

fn sizes() -> impl Strategy<Value = LayerSizes> {
    [1u64..9000, 0..5000, 0..3000, 0..3000].prop_map(|[output, saved, forward, backward]| LayerSizes {
        output: Bytes(output),
        saved: Bytes(saved),
        forward_workspace: Bytes(forward),
        backward_workspace: Bytes(backward),
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(100 * deep(10) as u32) })]
    #[test]
    fn no_step_reaches_further_than_its_plan_says(
        (seed, order) in any::<(u64, u64)>(), sizes in proptest::collection::vec((sizes(), 1usize..2000), LAYERS - 1),
    ) {
        let mut random = Random(seed);
        let options = random.options();
        // The last boundary is what the loss of the common model takes.
        let last = LayerSizes { output: BYTES, ..sizes[0].0 };
        let all = sizes.into_iter().chain([(last, 100)]).enumerate();
        let layers = all.map(|(l, (sizes, width))| Arc::new(Sized(sizes, l, width)) as Arc<dyn Layer>).collect();
        let model = Model::new(Arc::new(Ends), layers, Arc::new(Ends), options).unwrap();
        let plan = model.plan(&schedule(&random.letters(), &random.keep(), random.below(5))).unwrap();
        let dir = folder();
        let store = store(&model, &plan, &running(QueueOrder::Seeded(order), dir.path()));
        let needs = model.needs(&plan);
        let mut executor = Executor::new(store, model, ExecutorOptions::default()).unwrap();
        let mut program = executor.prepare(plan).unwrap();
        let ModelOptions { micro_batches, .. } = options;
        let report = executor.run(&mut program, &step(0, micro_batches)).unwrap();
        for tier in Tier::ALL {
            prop_assert!(report.extents.get(tier) <= needs.get(tier), "{} of {}", report.extents, needs);
        }
    }
}
