use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::RuntimeError;

/// Accumulation buffers for the gradients of all parameters, in float32.
///
/// Contributions are added in the order they come. The executor runs micro-batches one after the other and all arithmetic on one
/// lane, so that order, and with it every bit of the sum, is the same for every schedule.
pub struct Gradients {
    buffers: Vec<Mutex<Vec<f32>>>,
}

impl Gradients {
    /// Zeroed buffers for parameters with these numbers of elements.
    pub fn new(elements: &[usize]) -> Self {
        Gradients { buffers: elements.iter().map(|&n| Mutex::new(vec![0.0; n])).collect() }
    }

    /// Adds a contribution to the gradient of `parameter`.
    ///
    /// # Errors
    /// When there is no such parameter or it has another number of elements.
    pub fn add(&self, parameter: usize, values: &[f32]) -> Result<(), RuntimeError> {
        let want = self.buffers.get(parameter).map_or(0, |b| lock(b).len());
        if want != values.len() || parameter >= self.buffers.len() {
            return Err(RuntimeError::GradientSize { parameter, got: values.len(), want });
        }
        for (sum, value) in lock(&self.buffers[parameter]).iter_mut().zip(values) {
            *sum += value;
        }
        Ok(())
    }

    /// Sets all gradients to zero.
    pub fn zero(&self) {
        for buffer in &self.buffers {
            lock(buffer).fill(0.0);
        }
    }

    /// A locked view of the gradient of `parameter`, if there is one: whoever adds to it waits.
    pub fn view(&self, parameter: usize) -> Option<MutexGuard<'_, Vec<f32>>> {
        self.buffers.get(parameter).map(lock)
    }

    /// Locked views of all gradients, in parameter order.
    pub fn read(&self) -> Vec<MutexGuard<'_, Vec<f32>>> {
        self.buffers.iter().map(lock).collect()
    }
}

/// A panic in a layer poisons a lock; the numbers behind it are still numbers, and the step is abandoned anyway.
fn lock(buffer: &Mutex<Vec<f32>>) -> MutexGuard<'_, Vec<f32>> {
    buffer.lock().unwrap_or_else(PoisonError::into_inner)
}
