//! Observation of a guest.
