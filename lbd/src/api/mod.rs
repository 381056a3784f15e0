//! The agent's local interface: a Unix socket for `lbctl`, and metrics and health for machines.

mod metrics;
pub mod server;
pub mod types;
