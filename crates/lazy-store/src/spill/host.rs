//! Copies of the host device to and from staging slots.

use crate::error::BoxError;
use crate::io::transfer::StagedCopy;

/// The copies of the host device, whose HBM is memory like any other.
pub(crate) enum HostCopy<'a> {
    /// Out of these bytes, into slots.
    Out(&'a [u8]),
    /// Out of slots, into these bytes.
    In(&'a mut [u8]),
}

impl StagedCopy for HostCopy<'_> {
    fn start(&mut self, _slot: usize, at: u64, staging: &mut [u8]) -> Result<(), BoxError> {
        let range = at as usize..at as usize + staging.len();
        match self {
            HostCopy::Out(bytes) => staging.copy_from_slice(bytes.get(range).ok_or(OUTSIDE)?),
            HostCopy::In(bytes) => bytes.get_mut(range).ok_or(OUTSIDE)?.copy_from_slice(staging),
        }
        Ok(())
    }

    fn wait(&mut self, _slot: usize) -> Result<(), BoxError> {
        Ok(())
    }
}

const OUTSIDE: &str = "a piece lies outside the extent";
