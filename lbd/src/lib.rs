//! The agent and the command-line tool of lbd.
//!
//! Data flows one way: [`source`] → [`plan`] → [`dataplane`]. `plan` does no I/O; only `dataplane` touches BPF.

pub mod api;
pub mod config;
pub mod dataplane;
pub mod flows;
pub mod health;
pub mod ipam;
pub mod plan;
pub mod source;
