//! The common model with boundaries of different sizes: what they hold comes first, and a mark of theirs fills the rest.

use std::sync::Arc;

use lazy_model::Bytes;
use lazy_runtime::{
    Backward, Context, Forward, Input, Layer, LayerError, LayerSizes, Model, ModelOptions, Output, Parameter,
    Saved,
};

use crate::common::{BYTES, Ends, LAYERS, Square};

const LEN: usize = BYTES.get() as usize;
/// How much longer boundaries are than what they hold.
const LONGER: [usize; 5] = [0, 10240, 4352, 17920, 256];

struct Padded {
    inner: Arc<Square>,
    output: usize,
}

/// What fills the rest of a boundary, or of its gradient.
fn padding(cx: &Context<'_>, boundary: usize) -> u8 {
    (cx.step as usize * 31 + cx.micro_batch * 59 + boundary * 7) as u8 & 0x7f
}

/// What comes first, if the rest is as it was written.
fn unpad<'a>(bytes: Input<'a>, padding: u8) -> Result<Input<'a>, LayerError> {
    let (first, rest) = bytes.bytes()?.split_at(LEN);
    match rest.iter().all(|&byte| byte == padding) {
        true => Ok(Input::of(first)),
        false => Err("the rest of a boundary is not what was written".into()),
    }
}

fn pad<'a>(bytes: Output<'a>, padding: u8) -> Result<Output<'a>, LayerError> {
    let (first, rest) = bytes.bytes()?.split_at_mut(LEN);
    rest.fill(padding);
    Ok(Output::of(first))
}

impl Layer for Padded {
    fn sizes(&self) -> LayerSizes {
        LayerSizes { output: Bytes((LEN + self.output) as u64), ..self.inner.sizes() }
    }
    fn parameters(&self) -> Vec<Parameter> {
        self.inner.parameters()
    }
    fn forward(&self, cx: &Context<'_>, call: Forward<'_>) -> Result<Saved, LayerError> {
        let l = self.inner.number;
        let x = unpad(call.x, padding(cx, l))?;
        let out = call.out.map(|out| pad(out, padding(cx, l + 1))).transpose()?;
        self.inner.forward(cx, Forward { x, out, ..call })
    }
    fn backward(&self, cx: &Context<'_>, call: Backward<'_>) -> Result<(), LayerError> {
        let l = self.inner.number;
        let (x, dy) = (unpad(call.x, padding(cx, l))?, unpad(call.dy, padding(cx, l + 1))?);
        let dx = pad(call.dx, padding(cx, l))?;
        self.inner.backward(cx, Backward { x, dy, dx, ..call })
    }
}

pub(crate) fn model(squares: &[Arc<Square>], options: ModelOptions) -> Model {
    // The ends are those of the common model.
    let longer = |boundary: usize| match boundary {
        0 | LAYERS => 0,
        _ => LONGER[boundary % LONGER.len()],
    };
    let layer = |(l, square): (usize, &Arc<Square>)| {
        let padded = Padded { inner: Arc::clone(square), output: longer(l + 1) };
        Arc::new(padded) as Arc<dyn Layer>
    };
    let layers = squares.iter().enumerate().map(layer).collect();
    Model::new(Arc::new(Ends), layers, Arc::new(Ends), options).unwrap()
}
