//! Allocation scripts.
