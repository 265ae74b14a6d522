//! What guest and host agree on: allocation scripts and the wire format of observations.
//!
//! The binary of this crate is PID 1 inside each guest. The library holds only formats, no I/O, so that the host
//! can use it without dragging in anything that touches a running system.

pub mod op;
pub mod script;
pub mod wire;
