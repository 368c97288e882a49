//! Gradients that become final while the step runs, and weights that are ready while it goes on.

#![allow(clippy::unwrap_used, reason = "a test that cannot set up should stop")]

mod common;

use std::cell::RefCell;
use std::sync::mpsc;

use common::{cut, grads, init, params, state};
use lazy_optim_nvme::{
    AdamOptions, Durability, Gradient, Gradients, GroupOptions, Moments, NvmeAdam, OptimError, ParamSpec,
    StepInput, StepOutcome, WeightsOut,
};

const SIZES: [usize; 6] = [70_001, 511, 40_000, 4097, 0, 100_000];
const GROUPS: [GroupOptions; 1] = [GroupOptions {
    lr: 0.01,
    betas: (0.9, 0.999),
    eps: 1e-8,
    weight_decay: 0.01,
    decoupled: true,
    maximize: false,
}];

fn specs() -> Vec<ParamSpec> {
    let formats = [Moments::F32, Moments::Bf16, Moments::Int8, Moments::F32, Moments::F32, Moments::Int8];
    params(&SIZES).into_iter().zip(formats).map(|(param, moments)| param.with_moments(moments)).collect()
}

fn input() -> StepInput<'static> {
    StepInput { groups: &GROUPS, scale: 2.0, blob: b"cursor", ..StepInput::default() }
}

/// A store, and the weights that the caller has of it.
struct Trainer {
    adam: NvmeAdam,
    params: Vec<ParamSpec>,
    weights: Vec<Vec<f32>>,
    _dir: tempfile::TempDir,
}

impl Trainer {
    fn new(params: Vec<ParamSpec>, options: &AdamOptions) -> Trainer {
        let dir = common::scratch();
        let mut adam = NvmeAdam::create(dir.path(), &params, options, init).unwrap();
        let mut weights: Vec<Vec<f32>> = params.iter().map(|p| vec![0.0; p.shape[0]]).collect();
        adam.read_weights(&mut |param, first, values| put(&mut weights, param, first, values)).unwrap();
        Trainer { adam, params, weights, _dir: dir }
    }

    fn step<'a, 'g: 'a>(
        &mut self,
        grads: impl Into<Gradients<'a, 'g>>,
        input: &StepInput<'_>,
    ) -> Result<StepOutcome, OptimError> {
        let weights = &mut self.weights;
        self.adam.step(grads, input, &mut |param, first, values| put(weights, param, first, values))
    }

    fn same(&mut self, other: &mut Trainer) -> bool {
        let same = self.adam.step_counts() == other.adam.step_counts()
            && (self.adam.sequence(), self.adam.blob()) == (other.adam.sequence(), other.adam.blob());
        let weights = bits(&self.weights) == bits(&other.weights);
        same && weights && state(&mut self.adam, &self.params) == state(&mut other.adam, &other.params)
    }
}

fn put(weights: &mut [Vec<f32>], param: usize, first: usize, values: &[f32]) {
    weights[param][first..first + values.len()].copy_from_slice(values);
}

fn bits(weights: &[Vec<f32>]) -> Vec<Vec<u32>> {
    weights.iter().map(|w| w.iter().map(|v| v.to_bits()).collect()).collect()
}

fn bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

#[test]
fn awaited_gradients_give_the_same_bits() {
    for options in [cut(40_000, 64, 3), cut(20_000, 64, 1), cut(1 << 20, 128, 4)] {
        let (mut here, mut there) = (Trainer::new(specs(), &options), Trainer::new(specs(), &options));
        for t in 1..=3 {
            let grads = grads(&specs(), t);
            let given = |param: usize| (t != 2 || !matches!(param, 2 | 3 | 5)).then(|| &grads[param][..]);
            let all: Vec<_> = (0..SIZES.len()).map(|param| given(param).map(Gradient::F32)).collect();
            let wanted = there.step(&all, &input()).unwrap();
            let mut asked = Vec::new();
            let found = here
                .step(
                    Gradients::Awaited(&mut |param| {
                        asked.push(param);
                        Ok(given(param).map(Gradient::F32))
                    }),
                    &input(),
                )
                .unwrap();
            assert_eq!(found.grad_norm.to_bits(), wanted.grad_norm.to_bits());
            assert!(!found.skipped && here.same(&mut there), "{options:?}, step {t}");
            asked.sort_unstable();
            assert_eq!(asked, [0, 1, 2, 3, 4, 5]);
        }
        assert_eq!(here.adam.step_counts(), [3, 3, 2, 2, 3, 2]);
    }
}

#[test]
fn a_norm_from_elsewhere_clips_what_is_awaited() {
    let options = cut(40_000, 64, 3);
    let (mut here, mut there) = (Trainer::new(specs(), &options), Trainer::new(specs(), &options));
    let grads = grads(&specs(), 1);
    let clipped = StepInput { max_norm: Some(0.5), grad_norm: Some(7.0), ..input() };
    there.step(&common::all(&grads), &clipped).unwrap();
    let awaited = Gradients::Awaited(&mut |param| Ok(common::grad(&grads[param])));
    let outcome = here.step(awaited, &clipped).unwrap();
    assert!(outcome.grad_norm == 7.0 && outcome.clip_coefficient < 0.08 && here.same(&mut there));
}

#[test]
fn updates_begin_before_the_last_gradient_is_final() {
    // A bucket a parameter.
    let specs = params(&[40_000; 4]);
    let dir = common::scratch();
    let mut adam = NvmeAdam::create(dir.path(), &specs, &cut(40_000, 64, 3), init).unwrap();
    let grads = grads(&specs, 1);
    // A parameter when it is asked for, and minus its number minus one when all of its weights were received.
    let events = RefCell::new(Vec::new());
    let awaited = Gradients::Awaited(&mut |param| {
        events.borrow_mut().push(param as i32);
        Ok(common::grad(&grads[param]))
    });
    adam.step(awaited, &input(), &mut |param, first, values| {
        if first + values.len() == 40_000 {
            events.borrow_mut().push(-1 - param as i32);
        }
    })
    .unwrap();
    assert_eq!(events.into_inner(), [3, -4, 2, -3, 1, -2, 0, -1]);
}

#[test]
fn gradients_come_from_a_thread_that_runs_backward() {
    let options = cut(40_000, 64, 3);
    let (mut here, mut there) = (Trainer::new(specs(), &options), Trainer::new(specs(), &options));
    let mut grads = grads(&specs(), 1);
    there.step(&common::all(&grads), &input()).unwrap();
    std::thread::scope(|scope| {
        let (send, finals) = mpsc::channel();
        let grads = &mut grads;
        scope.spawn(move || {
            for (param, grad) in grads.iter_mut().enumerate().rev() {
                std::thread::yield_now();
                send.send((param, &*grad)).unwrap();
            }
        });
        let mut arrived: Vec<Option<&Vec<f32>>> = vec![None; SIZES.len()];
        let mut wait = |param: usize| loop {
            if let Some(grad) = arrived[param] {
                return Ok(Some(Gradient::F32(grad)));
            }
            let (param, grad) = finals.recv()?;
            arrived[param] = Some(grad);
        };
        here.step(Gradients::Awaited(&mut wait), &input()).map(|_| ())
    })
    .unwrap();
    assert!(here.same(&mut there));
}

#[test]
fn a_late_gradient_that_is_not_finite_takes_everything_back() {
    let options = cut(40_000, 64, 3);
    for bad in [0, 5] {
        let (mut here, mut there) = (Trainer::new(specs(), &options), Trainer::new(specs(), &options));
        let mut grads = grads(&specs(), 1);
        for trainer in [&mut here, &mut there] {
            trainer.step(&common::all(&grads), &input()).unwrap();
        }
        let (good, received) = (grads[bad][17], RefCell::new(0));
        grads[bad][17] = f32::NAN;
        let mut weights = here.weights.clone();
        let awaited = Gradients::Awaited(&mut |param| Ok(common::grad(&grads[param])));
        let outcome = here.adam.step(awaited, &input(), &mut |param, first, values| {
            *received.borrow_mut() += values.len();
            put(&mut weights, param, first, values);
        });
        let outcome = outcome.unwrap();
        assert!(
            outcome.skipped && outcome.grad_norm.is_nan() && outcome.warning.unwrap().contains("skipped")
        );
        // Where the last parameter is bad, nothing was handed out; else all but the first bucket's, and that again.
        assert_eq!(received.into_inner() > 0, bad == 0);
        here.weights = weights;
        assert!(here.same(&mut there));
        // The same into rooms, none of which is given back.
        let mut wide = here.weights.clone();
        let mut narrow: Vec<u16> = here.weights[5].iter().map(|w| bf16(*w)).collect();
        let before = narrow.clone();
        let mut rooms: Vec<_> = wide.iter_mut().map(|w| Some(WeightsOut::F32(w))).collect();
        rooms[5] = Some(WeightsOut::Bf16(&mut narrow));
        let awaited = Gradients::Awaited(&mut |param| Ok(common::grad(&grads[param])));
        let mut ready = |param, _: WeightsOut<'_>| panic!("parameter {param} is ready");
        assert!(here.adam.step_into(awaited, &input(), rooms, &mut ready).unwrap().skipped);
        assert!(bits(&wide) == bits(&here.weights) && narrow == before && here.same(&mut there));
        // On with the next step.
        grads[bad][17] = good;
        for trainer in [&mut here, &mut there] {
            trainer.step(&common::all(&grads), &input()).unwrap();
        }
        assert!(here.same(&mut there));
    }
}

#[test]
fn a_gradient_that_never_comes_is_an_error_and_commits_nothing() {
    let options = cut(40_000, 64, 3);
    let (mut here, mut there) = (Trainer::new(specs(), &options), Trainer::new(specs(), &options));
    let grads = grads(&specs(), 1);
    let mut asked = 0;
    let error = here.step(
        Gradients::Awaited(&mut |param| {
            asked += 1;
            if asked == 4 { Err("backward was stopped".into()) } else { Ok(common::grad(&grads[param])) }
        }),
        &input(),
    );
    let error = error.unwrap_err();
    assert!(matches!(&error, OptimError::NoGradient { name, .. } if name.starts_with('p')), "{error}");
    assert!(error.to_string().contains("backward was stopped"), "{error}");
    assert!(matches!(here.step(&common::all(&grads), &input()), Err(OptimError::Latched { .. })));
    let weights = &mut here.weights;
    here.adam.read_weights(&mut |param, first, values| put(weights, param, first, values)).unwrap();
    assert!(here.same(&mut there));
    for trainer in [&mut here, &mut there] {
        trainer.step(&common::all(&grads), &input()).unwrap();
    }
    assert!(here.same(&mut there));
    // So is one of another length.
    let short = Gradients::Awaited(&mut |param| Ok(common::grad(&grads[param][..1])));
    assert!(matches!(here.step(short, &input()), Err(OptimError::GradLength { .. })));
    // What was saved and opened again knows nothing of it.
    assert_eq!(here.adam.step_counts(), [1; 6]);
}

#[test]
fn what_cannot_be_awaited_is_refused_by_name() {
    let mut never = |_| panic!("nothing may be asked for");
    let mut trainer = Trainer::new(specs(), &cut(40_000, 64, 3));
    let clipped = StepInput { max_norm: Some(1.0), ..input() };
    let error = trainer.step(Gradients::Awaited(&mut never), &clipped).unwrap_err().to_string();
    assert!(error.contains("max_norm"), "{error}");
    let options = AdamOptions { durability: Durability::Checkpoint, ..cut(40_000, 64, 3) };
    let mut trainer = Trainer::new(specs(), &options);
    let error = trainer.step(Gradients::Awaited(&mut never), &input()).unwrap_err().to_string();
    assert!(error.contains("durability = checkpoint"), "{error}");
    let grads = grads(&specs(), 1);
    trainer.step(&common::all(&grads), &input()).unwrap();
}

#[test]
fn weights_are_used_elsewhere_while_the_step_goes_on() {
    let specs = params(&[50_000, 3, 0, 30_000, 40_000]);
    let mut trainer = Trainer::new(specs.clone(), &cut(40_000, 64, 3));
    let grads = grads(&specs, 1);
    let mut given = common::all(&grads);
    given[3] = None;
    let mut rooms: Vec<Vec<f32>> = specs.iter().map(|p| vec![0.0; p.shape[0]]).collect();
    let order = std::thread::scope(|scope| {
        let (send, ready) = mpsc::channel::<(usize, WeightsOut<'_>)>();
        let (reply, used) = mpsc::channel();
        scope.spawn(move || {
            for (param, room) in ready {
                let WeightsOut::F32(weights) = room else { panic!("the room was of float32") };
                reply.send((param, weights.to_vec())).unwrap();
            }
        });
        let mut order = Vec::new();
        let rooms = rooms.iter_mut().map(|room| Some(WeightsOut::F32(room))).collect();
        // The step waits for the other thread here, so that one uses the weights before it ends.
        let mut hand_over = |param, room| {
            send.send((param, room)).unwrap();
            order.push(used.recv().unwrap());
        };
        trainer.adam.step_into(&given, &input(), rooms, &mut hand_over).unwrap();
        order
    });
    let params: Vec<usize> = order.iter().map(|(param, _)| *param).collect();
    assert_eq!(params, [0, 1, 4, 2]);
    let weights = &mut trainer.weights;
    trainer.adam.read_weights(&mut |param, first, values| put(weights, param, first, values)).unwrap();
    assert!(order.iter().all(|(param, seen)| *seen == trainer.weights[*param]));
    assert_eq!(rooms[3], [0.0; 30_000]);
}

#[test]
fn awaited_gradients_give_rooms_back_once_all_are_known() {
    let specs = params(&[40_000; 3]);
    let mut trainer = Trainer::new(specs.clone(), &cut(40_000, 64, 3));
    let (grads, asked, mut order) = (grads(&specs, 1), RefCell::new(0), Vec::new());
    let mut rooms: Vec<Vec<f32>> = vec![vec![0.0; 40_000]; 3];
    let places = rooms.iter_mut().map(|room| Some(WeightsOut::F32(room))).collect();
    let awaited = Gradients::Awaited(&mut |param| {
        *asked.borrow_mut() += 1;
        Ok(common::grad(&grads[param]))
    });
    let mut ready = |param, _: WeightsOut<'_>| order.push((param, *asked.borrow()));
    trainer.adam.step_into(awaited, &input(), places, &mut ready).unwrap();
    assert_eq!(order, [(2, 3), (1, 3), (0, 3)]);
    let weights = &mut trainer.weights;
    trainer.adam.read_weights(&mut |param, first, values| put(weights, param, first, values)).unwrap();
    assert!(rooms == trainer.weights);
}
