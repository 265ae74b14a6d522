//! One file a verb.

pub(crate) mod ci;
pub(crate) mod kernel;
pub(crate) mod test_kernel;
