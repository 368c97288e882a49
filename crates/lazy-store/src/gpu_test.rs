//! What the programs of tests on a GPU share, here and in crates on top. No part of the crate's interface.

use std::process::ExitCode;
use std::time::Instant;

use crate::BoxError;

/// A test, which says something of what it did.
pub type Test<C> = fn(&C) -> Result<String, BoxError>;

/// Runs tests one after the other; `say` is given a line for each and a count. No tests at all are a failure.
pub fn run<'a, C: 'a>(
    context: &C,
    tests: impl IntoIterator<Item = &'a (&'static str, Test<C>)>,
    say: &mut dyn FnMut(&str),
) -> ExitCode {
    let (mut passed, mut failed) = (0, 0);
    for (name, test) in tests {
        let start = Instant::now();
        match test(context) {
            Ok(said) => {
                passed += 1;
                say(&format!("ok     {name} ({:.2} s) {said}", start.elapsed().as_secs_f64()));
            }
            Err(error) => {
                failed += 1;
                say(&format!("FAILED {name}: {error}"));
            }
        }
    }
    say(&format!("{passed} passed, {failed} failed"));
    if failed == 0 && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A generator of numbers, by its seed: splitmix64.
pub struct Random(pub u64);

impl Random {
    /// Any number.
    pub fn any(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number below a limit.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.any() % limit
    }
}
