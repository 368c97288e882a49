use lazy_model::step::StepError;
use lazy_store::StoreError;

/// What can go wrong while a step runs. The store is back at its earlier level of live bytes in every case.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RuntimeError {
    /// The schedule or the plan does not fit the layers.
    #[error(transparent)]
    Step(#[from] StepError),
    /// The store refused or a task failed; a layer's own error is inside, with the task's name.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Nothing to run.
    #[error("the model has no layers, or its step no micro-batches: give at least one of each")]
    Empty,
    /// A schedule by hand that is none of this model.
    #[error("{letters:?} places no {boundaries} boundaries: give one letter of `G C N -` for each")]
    Letters {
        /// What was given.
        letters: String,
        /// Boundaries of the model.
        boundaries: usize,
    },
    /// Weights that are no float32.
    #[error(
        "weights of {name} have {bytes}, no multiple of four bytes: set them as bytes, by `Executor::set_weights`"
    )]
    NotFloats {
        /// The parameter.
        name: String,
        /// Bytes declared.
        bytes: lazy_model::Bytes,
    },
    /// A parameter's weights or gradient are not in the memory of a GPU.
    #[error(
        "{name} does not lie in the HBM of a GPU: copy it with `Executor::weights` or `Executor::gradient`, or keep what is streamed \
         resident"
    )]
    NotOnDevice {
        /// The parameter.
        name: String,
    },
    /// Owners of one parameter disagree.
    #[error(
        "parameter {id} is declared with other sizes as {first} than as {second}: give two parameters two ids"
    )]
    SharedParameter {
        /// The id.
        id: usize,
        /// Name by one owner.
        first: String,
        /// Name by another.
        second: String,
    },
    /// An owner lists a parameter twice.
    #[error("parameter {name} is declared twice by one owner: declare each once")]
    ParameterTwice {
        /// Its name.
        name: String,
    },
    /// No such parameter among those the runtime keeps.
    #[error(
        "there is no parameter {id} whose bytes the runtime keeps: ask the layer, or declare it with its sizes"
    )]
    NoParameter {
        /// The id asked for.
        id: usize,
    },
    /// Weights of another size.
    #[error("weights of parameter {id} have {got} bytes, it is declared with {want}")]
    WeightBytes {
        /// The parameter.
        id: usize,
        /// Bytes given.
        got: usize,
        /// Bytes declared.
        want: usize,
    },
    /// No such layer.
    #[error("there is no layer {layer}: the model has {layers}")]
    NoLayer {
        /// The layer asked for.
        layer: usize,
        /// How many there are.
        layers: usize,
    },
    /// A program of another executor.
    #[error("the program was prepared by another executor: prepare the plan with the one that runs it")]
    ForeignProgram,
    /// Side inputs for another number of micro-batches.
    #[error(
        "the step brings side inputs for {got} micro-batches, the model runs {want}: give one for each, or none"
    )]
    Inputs {
        /// Side inputs given.
        got: usize,
        /// Micro-batches of the model.
        want: usize,
    },
    /// Checksums of recomputed outputs are made on the CPU.
    #[error(
        "check_recompute compares outputs in RAM, but this store's HBM is a GPU's: run the check on the host device"
    )]
    ChecksumsOnHost,
    /// Gradient buffers and a contribution do not belong together.
    #[error(
        "gradient of parameter {parameter} has {got} elements, its buffer {want}: number parameters as when the buffers were made"
    )]
    GradientSize {
        /// Which parameter.
        parameter: usize,
        /// Elements offered.
        got: usize,
        /// Elements of the buffer; zero when there is no such parameter.
        want: usize,
    },
}
