//! The agent and the command-line tool of lbd.
//!
//! Data flows one way: [`source`] → [`plan`] → [`dataplane`]. `plan` does no I/O; only `dataplane` touches BPF.

pub mod agent;
pub mod api;
pub mod cli;
pub mod config;
pub mod dataplane;
pub mod flows;
pub mod health;
pub mod ipam;
pub mod lbctl;
pub mod plan;
pub mod source;
