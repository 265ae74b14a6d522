//! The host side of buddydiff: run guests, observe their page allocator, check it, report.

pub mod batch;
pub mod check;
pub mod freeze;
pub mod fuzz;
pub mod image;
pub mod initramfs;
pub mod model;
pub mod observe;
pub mod pair;
pub mod process;
pub mod replay;
pub mod report;
pub mod run;
pub mod shrink;
pub mod vm;
