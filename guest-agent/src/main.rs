//! PID 1 of a guest under test.

fn main() {}
