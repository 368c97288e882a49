//! A model of four layers y = w * x whose boundaries go to all three places, with one recomputed.
use std::sync::{Arc, Mutex};

use lazy_model::schedule::Schedule;
use lazy_model::{Bytes, Placement::*, StepPlan};
use lazy_runtime::{Context, Epilogue, Executor, Layer, LayerError, Phase, Prologue, Saved};
use lazy_store::{Store, StoreOptions};

const SIZE: Bytes = Bytes(4096);

struct Scale(u8, Arc<Mutex<u64>>);

impl Layer for Scale {
    fn output_bytes(&self) -> Bytes {
        SIZE
    }
    fn saved_bytes(&self) -> Bytes {
        Bytes::ZERO
    }
    fn forward(
        &self,
        _: &Context,
        x: &[u8],
        out: Option<&mut [u8]>,
        save: bool,
    ) -> Result<Option<Saved>, LayerError> {
        out.into_iter().flatten().zip(x).for_each(|(y, x)| *y = self.0.wrapping_mul(*x));
        Ok(save.then(|| Saved::new(())))
    }
    fn backward(&self, _: &Context, x: &[u8], _: Saved, dy: &[u8], dx: &mut [u8]) -> Result<(), LayerError> {
        *self.1.lock().unwrap_or_else(|e| e.into_inner()) +=
            x.iter().zip(dy).map(|(&x, &d)| u64::from(x) * u64::from(d)).sum::<u64>();
        dx.iter_mut().zip(dy).for_each(|(dx, dy)| *dx = self.0.wrapping_mul(*dy));
        Ok(())
    }
}

struct Ones;

impl Prologue for Ones {
    fn output_bytes(&self) -> Bytes {
        SIZE
    }
    fn forward(&self, _: &Context, out: &mut [u8]) -> Result<(), LayerError> {
        out.fill(1);
        Ok(())
    }
    fn backward(&self, _: &Context, _: &[u8]) -> Result<(), LayerError> {
        Ok(())
    }
}

impl Epilogue for Ones {
    fn run(&self, _: &Context, _: &[u8], dx: &mut [u8]) -> Result<(), LayerError> {
        dx.fill(1);
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let gradient = Arc::new(Mutex::new(0));
    let layers = (0..4).map(|_| Arc::new(Scale(2, Arc::clone(&gradient))) as Arc<dyn Layer>).collect();
    let sizes = [SIZE; 5];
    let mut schedule = Schedule::named("by hand", &sizes, false);
    schedule.placement = vec![Host, Recompute, Host, Hbm, Hbm];
    let plan = StepPlan::new(&schedule, &sizes)?;
    let store = Store::open(StoreOptions {
        hbm: plan.extents.hbm,
        host: plan.extents.host,
        ..StoreOptions::default()
    })?;
    let executor = Executor::new(store, Arc::new(Ones), layers, Arc::new(Ones));
    let cx = Context { seed: 0, step: 0, micro_batch: 0, layer: None, phase: Phase::Forward };
    executor.run(&plan, cx)?;
    // Each of the four gradients is the product of the other three factors, for each of 4096 elements.
    assert_eq!(*gradient.lock().unwrap_or_else(|e| e.into_inner()), 4 * 8 * 4096);
    Ok(())
}
