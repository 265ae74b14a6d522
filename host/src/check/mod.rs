//! Checks on what was observed.
