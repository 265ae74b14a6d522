//! One file a verb.

pub(crate) mod bench;
pub(crate) mod ci;
pub(crate) mod fuzz;
pub(crate) mod guest;
pub(crate) mod inspect;
pub(crate) mod kernel;
pub(crate) mod runner;
pub(crate) mod test_kernel;
