//! Tests on a fake kernel tree.
