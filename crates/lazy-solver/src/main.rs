//! The `lazy-plan` program.
fn main() {}
