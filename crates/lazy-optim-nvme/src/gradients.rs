//! The gradients of a step: all final when it begins, or awaited one after the other.

use lazy_store::BoxError;

use crate::Gradient;
use crate::norm::NormPart;

/// The gradients of a step. A slice, an array or a `Vec` of them is [`Gradients::Final`].
///
/// Here backward runs on a thread of its own, and the step updates what has become final meanwhile:
///
/// ```
/// use lazy_optim_nvme::*;
/// use std::{sync::mpsc, thread};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// let params = [ParamSpec::new("embedding", &[8]), ParamSpec::new("head", &[4])];
/// let mut adam = NvmeAdam::create(dir.path(), &params, &AdamOptions::default(), |_, _, w| w.fill(0.5))?;
/// let mut weights = [vec![0.5; 8], vec![0.5; 4]];
/// let mut grads = [vec![0.0; 8], vec![0.0; 4]];
/// let outcome = thread::scope(|scope| {
///     let (send, finals) = mpsc::channel();
///     let grads = grads.iter_mut().enumerate().rev();
///     scope.spawn(move || {
///         for (param, grad) in grads {
///             grad.fill(0.1); // the backward of the layer
///             let _ = send.send((param, &*grad));
///         }
///     });
///     let mut arrived = [None; 2];
///     let mut wait = |param: usize| {
///         while arrived[param].is_none() {
///             let (param, grad) = finals.recv()?; // an error if the thread ended early
///             arrived[param] = Some(Gradient::F32(grad));
///         }
///         Ok(arrived[param])
///     };
///     let input = StepInput { groups: &[GroupOptions::default()], ..StepInput::default() };
///     adam.step(Gradients::Awaited(&mut wait), &input, &mut |param, first, values| {
///         weights[param][first..first + values.len()].copy_from_slice(values);
///     })
/// })?;
/// assert!(!outcome.skipped && weights[1][3] < 0.5);
/// # Ok(())
/// # }
/// ```
pub enum Gradients<'a, 'g> {
    /// All of them, one entry a parameter, in order. `None` means no gradient this step.
    Final(&'a [Option<Gradient<'g>>]),
    /// They become final while the step runs. Called once for each parameter, with its index, and returns when that parameter's
    /// gradient is final; `None` means that it has none this step.
    ///
    /// What is asked for first is what becomes final first where parameters are listed in the order in which forward uses them: a
    /// bucket is updated once the gradients of all its parameters are there, the one with the last parameters first. An error ends
    /// the step, and nothing is committed. A gradient stays as it is until the step returns.
    Awaited(&'a mut (dyn FnMut(usize) -> Awaited<'g> + 'a)),
}

/// What comes of waiting for a gradient: see [`Gradients::Awaited`].
pub type Awaited<'g> = Result<Option<Gradient<'g>>, BoxError>;

impl<'a, 'g, G: AsRef<[Option<Gradient<'g>>]> + ?Sized> From<&'a G> for Gradients<'a, 'g> {
    fn from(grads: &'a G) -> Self {
        Gradients::Final(grads.as_ref())
    }
}

impl std::fmt::Debug for Gradients<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Gradients::Final(grads) => f.debug_tuple("Final").field(grads).finish(),
            Gradients::Awaited(_) => f.debug_tuple("Awaited").finish_non_exhaustive(),
        }
    }
}

/// Whoever is asked for gradients, and what was heard.
pub(crate) struct Asking<'a, 'g> {
    source: Option<&'a mut (dyn FnMut(usize) -> Awaited<'g> + 'a)>,
    /// The parameters that were not asked for yet.
    unasked: Vec<bool>,
    left: usize,
    /// Parts of the norm of what was awaited.
    pub(crate) parts: Vec<NormPart>,
    /// The one that is not finite, which ends the step.
    pub(crate) stopped: Option<usize>,
}

impl<'a, 'g> Gradients<'a, 'g> {
    /// The same, for as long as something else is lent as well.
    pub(crate) fn shorter<'b>(self) -> Gradients<'b, 'g>
    where
        'a: 'b,
    {
        match self {
            Gradients::Final(grads) => Gradients::Final(grads),
            Gradients::Awaited(source) => Gradients::Awaited(source),
        }
    }

    /// What is there of the gradients of so many parameters, and who is asked for the others.
    pub(crate) fn begin(self, params: usize) -> (Vec<Option<Gradient<'g>>>, Asking<'a, 'g>) {
        let (grads, source, left) = match self {
            Gradients::Final(grads) => (grads.to_vec(), None, 0),
            Gradients::Awaited(source) => (vec![None; params], Some(source), params),
        };
        let unasked = vec![left > 0; params];
        (grads, Asking { source, unasked, left, parts: Vec::new(), stopped: None })
    }
}

impl<'g> Asking<'_, 'g> {
    /// Whether gradients become final while the step runs.
    pub(crate) fn is_needed(&self) -> bool {
        self.source.is_some()
    }

    /// Whether no gradient is awaited any more.
    pub(crate) fn is_over(&self) -> bool {
        self.left == 0
    }

    /// Waits for a gradient that was not asked for yet.
    pub(crate) fn ask(&mut self, param: usize) -> Option<Awaited<'g>> {
        let source = self.source.as_mut().filter(|_| self.unasked[param])?;
        self.unasked[param] = false;
        self.left -= 1;
        Some(source(param))
    }
}
