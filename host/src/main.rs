//! buddydiff's host side as one program, for machines that have no kernel sources or compilers.

fn main() {}
