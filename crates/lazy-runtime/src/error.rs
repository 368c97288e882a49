use lazy_model::step::StepError;
use lazy_store::StoreError;

/// What can go wrong while a step runs. The store is back at its earlier level of live bytes in every case.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RuntimeError {
    /// The schedule does not fit the layers.
    #[error(transparent)]
    Step(#[from] StepError),
    /// The plan was made for another number of layers.
    #[error(
        "the plan has {plan} layers, the executor {executor}: derive the plan from a schedule for this model"
    )]
    Layers {
        /// Layers of the plan.
        plan: usize,
        /// Layers given to the executor.
        executor: usize,
    },
    /// The store refused or a task failed; a layer's own error is inside, with the task's name.
    #[error(transparent)]
    Store(#[from] StoreError),
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
