//! Stand-in for the store's durable files.

/// How files are read and written.
#[derive(Clone, Debug, Default)]
pub struct IoOptions {}

/// How files are read and written, as obtained.
#[derive(Clone, Debug, Default)]
pub struct NvmeMode {}
