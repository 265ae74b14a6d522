//! buddydiff's command line: one file a verb.

fn main() {}
