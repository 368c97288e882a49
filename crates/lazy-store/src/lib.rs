//! A tensor store over three tiers: HBM, pinned host RAM and NVMe.

mod arena;
mod buffer;
mod clock;
mod drive;
pub mod durable;
mod error;
mod io;
mod lanes;
mod links;
mod memory;
mod options;
mod random;
pub mod scratch;
mod spill;
mod store;

pub use error::{BoxError, StoreError};
#[cfg(any(test, feature = "test-util"))]
pub use io::fault;
pub use io::fs::is_tmpfs;
pub use lazy_model::{
    BoundaryIndex, Bytes, BytesPerSecond, Lane, LayerIndex, Placement, Seconds, Span, Tier,
};
pub use links::LinkRates;
pub use memory::Access;
pub use options::{
    Backend, BackendChoice, DirectChoice, LinkLimits, NvmeMode, NvmeOptions, QueueOrder, StoreOptions,
};
pub use store::{Event, Extent, MEMORY_ALIGNMENT, Store, Submission};
