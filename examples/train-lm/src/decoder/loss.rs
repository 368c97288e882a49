//! Final norm, head and cross entropy, with their gradients, over a few rows at a time.

use candle_core::Tensor;

use super::gemm::{Matrix, Store, Threads, product};
use super::math::softmax;
use super::norm::RmsNorm;
use super::ops::{tensor, with_slice};
use super::{Decoder, Result, StepContext, input_error};

/// The target of a row that does not count.
pub const IGNORED: u32 = u32::MAX;

/// Rows whose logits exist at a time.
pub(crate) const ROWS: usize = 128;

/// The loss and what backward starts from.
pub struct Loss {
    /// Sum of the rows' cross entropies divided by the number of tokens given, in nats.
    pub loss: f32,
    /// Gradient of boundary N, in its shape.
    pub dh: Tensor,
    /// Gradients of the final norm and of the head, with their indices in [`Decoder::parameters`]. With tied weights
    /// the head's index is the embedding's, and [`Decoder::embed_backward`] gives the other part.
    pub gradients: Vec<(usize, Tensor)>,
}

/// Targets for next-token prediction: each row's ids shifted by one, the last position [`IGNORED`].
pub fn shifted_targets(ids: &[u32], seq: usize) -> Vec<u32> {
    let rows = ids.chunks(seq.max(1));
    rows.flat_map(|row| row.iter().skip(1).copied().chain([IGNORED])).collect()
}

/// The gradients that one pass over the rows fills.
struct Gradients {
    dh: Vec<f32>,
    dnorm: Vec<f32>,
    dhead: Vec<f32>,
}

impl Decoder {
    /// The loss at boundary N, `h` of shape `[batch, seq, hidden]`, and its gradients.
    ///
    /// `targets` has a token id, or [`IGNORED`], for each row of `h`. The sum over the rows is divided by `tokens`:
    /// the number of targets that count, or that number over all micro-batches where gradients are accumulated.
    ///
    /// # Errors
    ///
    /// When the number of targets is not the number of rows, one lies outside the vocabulary, or `tokens` is zero.
    pub fn loss(&self, h: &Tensor, targets: &[u32], tokens: usize) -> Result<Loss> {
        let (hidden, vocab) = (self.spec.hidden, self.spec.vocab);
        let mut gradients = Gradients {
            dh: Vec::with_capacity(h.elem_count()),
            dnorm: vec![0.0; hidden],
            dhead: vec![0.0; vocab * hidden],
        };
        let loss = self.over_rows(h, targets, tokens, Some(&mut gradients))?;
        let Gradients { dh, dnorm, dhead } = gradients;
        let named = vec![
            (self.norm_index(), tensor(dnorm, hidden)?),
            (self.head_index(), tensor(dhead, (vocab, hidden))?),
        ];
        Ok(Loss { loss, dh: tensor(dh, h.shape())?, gradients: named })
    }

    /// The loss of [`Decoder::loss`] without gradients.
    ///
    /// # Errors
    ///
    /// As [`Decoder::loss`].
    pub fn evaluate(&self, h: &Tensor, targets: &[u32], tokens: usize) -> Result<f32> {
        self.over_rows(h, targets, tokens, None)
    }

    fn over_rows(
        &self,
        h: &Tensor,
        targets: &[u32],
        tokens: usize,
        mut gradients: Option<&mut Gradients>,
    ) -> Result<f32> {
        let (hidden, vocab) = (self.spec.hidden, self.spec.vocab);
        if h.dims().last() != Some(&hidden) || h.elem_count() / hidden != targets.len() {
            let count = targets.len();
            return input_error(format!("{count} targets want [.., {hidden}], got {:?}", h.shape()));
        }
        if let Some(&id) = targets.iter().find(|&&id| id != IGNORED && id as usize >= vocab) {
            return input_error(format!("the target {id} is outside the vocabulary, which ends at {vocab}"));
        }
        if tokens == 0 {
            return input_error(
                "the loss is a mean over no token: use sequences of two tokens or more".into(),
            );
        }
        let mut sum = 0.0;
        let mut run = |h: &[f32], head: &Head<'_>| {
            let rows = self.loss_rows * hidden;
            for (h, targets) in h.chunks(rows).zip(targets.chunks(self.loss_rows)) {
                sum += RowsPass { h, targets, head, tokens }.run(gradients.as_deref_mut());
            }
        };
        with_slice(h, |h| self.with_head(|head| run(h, head)))??;
        Ok((sum / tokens as f64) as f32)
    }

    fn with_head<R>(&self, f: impl FnOnce(&Head<'_>) -> R) -> Result<R> {
        let (hidden, vocab) = (self.spec.hidden, self.spec.vocab);
        let eps = self.spec.rms_norm_eps as f32;
        self.read_parameter(self.norm_index(), |norm| {
            self.read_parameter(self.head_index(), |weight| {
                let (norm_of, weight) = (RmsNorm { eps, rotation: None }, Matrix::new(weight, vocab, hidden));
                f(&Head { norm_of, norm, weight, hidden, vocab })
            })
        })?
    }

    /// The logits of the row-major `ids`, without dropout: `[batch, seq, vocab]`. All of them exist at once.
    ///
    /// # Errors
    ///
    /// As [`Decoder::embed`], and when there are no ids.
    pub fn logits(&self, ids: &[u32], batch: usize, seq: usize) -> Result<Tensor> {
        let mut h = self.embed(ids, batch, seq)?;
        for layer in 0..self.spec.layers() {
            h = self.layer_forward(layer, &h, &StepContext::default())?;
        }
        let logits = with_slice(&h, |h| self.with_head(|head| head.forward(h).1))??;
        Ok(tensor(logits, (batch, seq, self.spec.vocab))?)
    }
}

/// Final norm and head.
struct Head<'a> {
    norm_of: RmsNorm,
    norm: &'a [f32],
    weight: Matrix<'a>,
    hidden: usize,
    vocab: usize,
}

impl Head<'_> {
    /// Rows of boundary N behind the norm, and their logits.
    fn forward(&self, h: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let rows = h.len() / self.hidden;
        let normed = self.norm_of.forward(h, self.norm);
        let mut logits = vec![0.0; rows * self.vocab];
        let rows_of = Matrix::new(&normed, rows, self.hidden);
        product(&mut logits, self.vocab, Store::Set, 1.0, rows_of, self.weight.transposed(), Threads::All);
        (normed, logits)
    }
}

/// A few rows on their way through norm, head and cross entropy, and back.
struct RowsPass<'a> {
    h: &'a [f32],
    targets: &'a [u32],
    head: &'a Head<'a>,
    tokens: usize,
}

impl RowsPass<'_> {
    /// Returns the sum of the rows' losses and adds to the gradients, if they are wanted.
    fn run(&self, gradients: Option<&mut Gradients>) -> f64 {
        let Head { norm_of, norm, weight, hidden, vocab } = self.head;
        let (rows, hidden, vocab) = (self.targets.len(), *hidden, *vocab);
        let (normed, mut logits) = self.head.forward(self.h);
        let loss = self.cross_entropy(&mut logits);
        if let Some(gradients) = gradients {
            let dlogits = Matrix::new(&logits, rows, vocab);
            product(
                &mut gradients.dhead,
                hidden,
                Store::Add,
                1.0,
                dlogits.transposed(),
                Matrix::new(&normed, rows, hidden),
                Threads::All,
            );
            let mut dnormed = vec![0.0; rows * hidden];
            product(&mut dnormed, hidden, Store::Set, 1.0, dlogits, *weight, Threads::All);
            let (dh, dnorm) = norm_of.backward(self.h, norm, &dnormed);
            gradients.dh.extend(dh);
            gradients.dnorm.iter_mut().zip(dnorm).for_each(|(sum, part)| *sum += part);
        }
        loss
    }

    /// Replaces the logits by their gradients, `(softmax - onehot) / tokens`, zero where the target is ignored.
    fn cross_entropy(&self, logits: &mut [f32]) -> f64 {
        let scale = 1.0 / self.tokens as f32;
        let mut sum = 0.0;
        for (row, &target) in logits.chunks_exact_mut(self.head.vocab).zip(self.targets) {
            if target == IGNORED {
                row.fill(0.0);
                continue;
            }
            let target_logit = row[target as usize];
            sum += f64::from(softmax(row)) - f64::from(target_logit);
            row[target as usize] -= 1.0;
            row.iter_mut().for_each(|x| *x *= scale);
        }
        sum
    }
}
