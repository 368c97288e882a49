//! Ranks that hold shards of parameters, each with its store.

use std::path::{Path, PathBuf};

use lazy_optim_nvme::{
    AdamOptions, GroupOptions, LoadOptions, NvmeAdam, OptimError, ParamSpec, Part, Shard, StepInput,
    combine_norm,
};

use super::{State, grad, state, value};

/// The shape of the whole parameter.
pub(crate) fn global_shape(param: &ParamSpec) -> &[usize] {
    param.shard.as_ref().map_or(&param.shape, |shard| &shard.global_shape)
}

/// Where each element of a shard lies in the whole parameter.
pub(crate) fn places(param: &ParamSpec) -> Vec<usize> {
    let held: usize = param.shape.iter().product();
    let at = |mut i: usize| match &param.shard {
        None => i,
        Some(Shard { part: Part::Range { first }, .. }) => first + i,
        Some(Shard { global_shape, part: Part::Box { offsets } }) => {
            let (mut at, mut stride) = (0, 1);
            for d in (0..offsets.len()).rev() {
                at += (i % param.shape[d] + offsets[d]) * stride;
                i /= param.shape[d];
                stride *= global_shape[d];
            }
            at
        }
    };
    (0..held).map(at).collect()
}

/// Parameters are called `p0`, `p1` and so on wherever they are.
fn number(param: &ParamSpec) -> usize {
    param.name[1..].parse().unwrap()
}

/// The values of a shard: those that [`value`] gives for the elements of the whole parameter.
fn values(param: &ParamSpec, step: usize) -> Vec<f32> {
    places(param).into_iter().map(|at| value(step, number(param), at)).collect()
}

pub(crate) struct Rank {
    pub(crate) params: Vec<ParamSpec>,
    pub(crate) adam: NvmeAdam,
    pub(crate) dir: tempfile::TempDir,
}

pub(crate) struct Ranks(pub(crate) Vec<Rank>);

impl Ranks {
    pub(crate) fn create(shards: &[Vec<ParamSpec>], options: &AdamOptions) -> Self {
        let make = |params: &Vec<ParamSpec>| {
            let dir = tempfile::tempdir().unwrap();
            let initial: Vec<_> = params.iter().map(|param| values(param, 0)).collect();
            let adam = NvmeAdam::create(dir.path(), params, options, |param, first, values| {
                values.copy_from_slice(&initial[param][first..first + values.len()]);
            });
            Rank { params: params.clone(), adam: adam.unwrap(), dir }
        };
        Ranks(shards.iter().map(make).collect())
    }

    pub(crate) fn load<P: AsRef<Path>>(
        sources: &[P],
        shards: &[Vec<ParamSpec>],
        options: &AdamOptions,
        load: LoadOptions,
    ) -> Result<Self, OptimError> {
        let make = |params: &Vec<ParamSpec>| {
            let dir = tempfile::tempdir().unwrap();
            let adam = NvmeAdam::load(sources, dir.path(), params, options, load)?;
            Ok::<_, OptimError>(Rank { params: params.clone(), adam, dir })
        };
        Ok(Ranks(shards.iter().map(make).collect::<Result<_, _>>()?))
    }

    /// Step number `step` of all ranks, with the norm of the whole.
    pub(crate) fn step(&mut self, step: usize) {
        let grads: Vec<Vec<Vec<f32>>> =
            self.0.iter().map(|rank| rank.params.iter().map(|param| values(param, step)).collect()).collect();
        let grads: Vec<Vec<_>> = grads.iter().map(|all| all.iter().map(|one| grad(one)).collect()).collect();
        let parts =
            self.0.iter().zip(&grads).flat_map(|(rank, grads)| rank.adam.norm_parts(grads, 2.0).unwrap());
        let grad_norm = Some(combine_norm(parts));
        let group = GroupOptions { lr: 0.01 / step as f64, ..GroupOptions::default() };
        let (blob, max_norm) = (step.to_le_bytes(), Some(1.0));
        let input = StepInput {
            groups: &[group; 2],
            grad_norm,
            max_norm,
            scale: 2.0,
            blob: &blob,
            ..StepInput::default()
        };
        for (rank, grads) in self.0.iter_mut().zip(&grads) {
            assert!(!rank.adam.step(grads, &input, &mut |_, _, _| {}).unwrap().skipped);
        }
    }

    /// Saves every rank's state; gives the folders.
    pub(crate) fn save(&mut self, name: &str) -> Vec<PathBuf> {
        let saving: Vec<_> = self.0.iter_mut().map(|rank| rank.adam.save(name).unwrap()).collect();
        saving.into_iter().for_each(|saving| saving.wait().unwrap());
        self.0.iter().map(|rank| rank.dir.path().join(name)).collect()
    }

    /// The state of the whole parameters, in the order of their numbers.
    pub(crate) fn state(&mut self) -> State {
        let mut whole = State::new();
        let mut filled: Vec<Vec<bool>> = Vec::new();
        for rank in &mut self.0 {
            for (param, found) in rank.params.iter().zip(state(&mut rank.adam, &rank.params)) {
                let (number, total) = (number(param), global_shape(param).iter().product::<usize>());
                while whole.len() <= number {
                    whole.push(Default::default());
                    filled.push(Vec::new());
                }
                filled[number].resize(total, false);
                for (section, values) in whole[number].iter_mut().zip(found) {
                    section.resize(total, 0);
                    places(param).into_iter().zip(values).for_each(|(at, bits)| section[at] = bits);
                }
                places(param).into_iter().for_each(|at| filled[number][at] = true);
            }
        }
        assert!(filled.iter().flatten().all(|filled| *filled));
        whole
    }
}

/// Every parameter cut into as many runs, at multiples of 65,536 elements.
pub(crate) fn flat(whole: &[ParamSpec], ranks: usize) -> Vec<Vec<ParamSpec>> {
    let cut = |rank: usize, param: &ParamSpec| {
        let elements: usize = param.shape.iter().product();
        let blocks = elements.div_ceil(65_536);
        let mark = |rank: usize| (rank * blocks / ranks * 65_536).min(elements);
        param.clone().range(mark(rank), mark(rank + 1) - mark(rank))
    };
    if ranks == 1 {
        return vec![whole.to_vec()];
    }
    (0..ranks).map(|rank| whole.iter().map(|param| cut(rank, param)).collect()).collect()
}
