//! Runs tests one after the other and counts them.

use std::process::ExitCode;
use std::time::Instant;

use lazy_store::BoxError;

/// A test, which says something of what it did.
pub(crate) type Test<C> = fn(&C) -> Result<String, BoxError>;

/// Prints a line for each test and a count.
pub(crate) fn run<'a, C: 'a>(
    context: &C,
    tests: impl IntoIterator<Item = &'a (&'static str, Test<C>)>,
) -> ExitCode {
    let (mut passed, mut failed) = (0, 0);
    for (name, test) in tests {
        let start = Instant::now();
        match test(context) {
            Ok(said) => {
                passed += 1;
                println!("ok     {name} ({:.2} s) {said}", start.elapsed().as_secs_f64());
            }
            Err(error) => {
                failed += 1;
                println!("FAILED {name}: {error}");
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
