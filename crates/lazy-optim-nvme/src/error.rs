//! What can go wrong, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};

use lazy_model::Bytes;

use lazy_store::{BoxError, StoreError};

/// Every failure of this crate. After any of them the committed state on disk is what it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OptimError {
    /// An option or a shape that cannot work.
    #[error("{what}")]
    Option {
        /// What is wrong and what to give instead.
        what: String,
    },
    /// Two parameters share a name.
    #[error("parameters {first} and {second} are both named {name}; give each its own name")]
    DuplicateName {
        /// The name.
        name: String,
        /// Index of the first.
        first: usize,
        /// Index of the second.
        second: usize,
    },
    /// `create` was pointed at a folder that already holds a store, or the remains of an interrupted creation.
    #[error("{} already holds optimizer state; open it, or choose another folder", dir.display())]
    AlreadyExists {
        /// The folder.
        dir: PathBuf,
    },
    /// `open` was pointed at a folder without a store.
    #[error("{} holds no optimizer state; create it first, or check the path", dir.display())]
    NoStore {
        /// The folder.
        dir: PathBuf,
    },
    /// The folder's store was never finished.
    #[error(
        "{} holds optimizer state whose creation or loading was interrupted: load a generation again, replacing it, \
         or remove the files adam.* and bucket-* there and create it again",
        dir.display()
    )]
    Incomplete {
        /// The folder.
        dir: PathBuf,
    },
    /// A generation of that name is there already.
    #[error("{} exists already; save under another name, or remove that generation first", path.display())]
    GenerationExists {
        /// Its folder.
        path: PathBuf,
    },
    /// A file or folder of a generation or of a consolidated file cannot be used.
    #[error("cannot {verb} {}: {source}", path.display())]
    File {
        /// What was tried.
        verb: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// What was saved does not make up the parameters asked for.
    #[error(
        "what was saved does not fit: {difference}; load the generations of one step, of all ranks, of this model"
    )]
    Mismatch {
        /// The first difference.
        difference: String,
    },
    /// Loading would round moments.
    #[error("{what}, so that moments would be rounded; set LoadOptions::lossy to accept that")]
    Lossy {
        /// Why.
        what: String,
    },
    /// The store was made for other parameters or another cut.
    #[error(
        "the optimizer state in {} does not fit: {difference}; open it with the parameters and bucket size it was \
         made with",
        dir.display()
    )]
    LayoutMismatch {
        /// The folder.
        dir: PathBuf,
        /// The first difference.
        difference: String,
    },
    /// The state was kept with [`Durability::Checkpoint`](crate::Durability::Checkpoint), and steps were taken after the last save.
    #[error(
        "the optimizer state in {} is of no one step: it is kept from save to save (durability = checkpoint), the last was \
         after step {sequence}, and a step was begun after that; load what was saved",
        dir.display()
    )]
    NotKept {
        /// The folder.
        dir: PathBuf,
        /// Steps taken up to the last save, or creation.
        sequence: u64,
    },
    /// Not enough free space for all files of the store.
    #[error(
        "the optimizer state needs {needed} ({} bytes) in {}, where {free} ({} bytes) are free; free space or \
         choose another folder",
        needed.0, dir.display(), free.0
    )]
    NoSpace {
        /// The folder.
        dir: PathBuf,
        /// Size of all files.
        needed: Bytes,
        /// Free space.
        free: Bytes,
    },
    /// A file that cannot be read as what it should be.
    #[error("{} is damaged: {what}; restore the folder from a copy", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A slot or record file that is intact but belongs elsewhere: swapped, stale, or of another store.
    #[error(
        "{} is not the file that was committed: its {field} is {found}, {wanted} was expected; put the right file \
         back or restore the folder from a copy",
        path.display()
    )]
    WrongFile {
        /// The file.
        path: PathBuf,
        /// What differs.
        field: &'static str,
        /// What was committed.
        wanted: String,
        /// What the file says.
        found: String,
    },
    /// Data that does not match its checksum.
    #[error(
        "{}: elements {first}..{end} of section {section} of bucket {bucket} do not match their checksum; restore \
         the folder from a copy",
        path.display()
    )]
    Checksum {
        /// The slot file.
        path: PathBuf,
        /// The bucket.
        bucket: usize,
        /// `main`, `exp_avg` or `exp_avg_sq`.
        section: &'static str,
        /// First element of the block, counted in the bucket.
        first: usize,
        /// One past its last element.
        end: usize,
    },
    /// The number of gradients is not the number of parameters.
    #[error(
        "{found} gradients for {wanted} parameters; give one entry a parameter, None where there is none"
    )]
    GradCount {
        /// Parameters.
        wanted: usize,
        /// Gradients given.
        found: usize,
    },
    /// A gradient of the wrong length.
    #[error("the gradient of {name} has {found} elements, its parameter {wanted}")]
    GradLength {
        /// The parameter.
        name: String,
        /// Elements of the parameter.
        wanted: usize,
        /// Elements of the gradient.
        found: usize,
    },
    /// A gradient that was awaited did not come.
    #[error(
        "the gradient of {name} did not become final: {source}; nothing was committed, rebuild the weights with read_weights"
    )]
    NoGradient {
        /// The parameter.
        name: String,
        /// What whoever was asked for it said.
        source: BoxError,
    },
    /// Fewer groups than the parameters name.
    #[error("{found} groups given, but parameters name groups up to {}; give {wanted}", wanted - 1)]
    GroupCount {
        /// Groups named.
        wanted: usize,
        /// Groups given.
        found: usize,
    },
    /// A hyper-parameter outside its range.
    #[error("group {group}: {name} is {value}, but must be {range}")]
    HyperParameter {
        /// The group.
        group: usize,
        /// The hyper-parameter.
        name: &'static str,
        /// The value given.
        value: f64,
        /// Where it must lie.
        range: &'static str,
    },
    /// A clipping norm that would freeze, negate or poison the weights.
    #[error("max_norm is {max_norm}, but must be finite and above 0; give None to leave gradients unclipped")]
    MaxNorm {
        /// The value given.
        max_norm: f64,
    },
    /// A scale that gradients cannot be divided by.
    #[error("scale is {scale}, but must be a finite float32 above 0; 1 leaves gradients as they are")]
    Scale {
        /// The value given.
        scale: f64,
    },
    /// A blob that does not fit the record page.
    #[error(
        "the blob has {found} bytes, at most {} fit; keep large state in a file of your own",
        crate::MAX_BLOB_BYTES
    )]
    BlobTooLarge {
        /// Its size.
        found: usize,
    },
    /// An earlier step failed half-way.
    #[error("an earlier step failed ({reason}); {remedy}")]
    Latched {
        /// The earlier error.
        reason: String,
        /// How to go on.
        remedy: &'static str,
    },
    /// Work on the GPU failed.
    #[error("the GPU did not do what it was to: {reason}")]
    Device {
        /// The first thing that failed, and why.
        reason: String,
    },
    /// The store gave its memory back.
    #[error("the optimizer is suspended; call resume first")]
    Suspended,
    /// The files could not be read or written.
    #[error("optimizer state: {0}")]
    Store(#[from] StoreError),
}

impl OptimError {
    /// Wraps an error of a call on a file or folder.
    pub(crate) fn file(verb: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| OptimError::File { verb, path, source }
    }
}
