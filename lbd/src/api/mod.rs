//! The agent's local interface: a Unix socket for `lbctl`, and metrics and health for machines.

pub mod types;
