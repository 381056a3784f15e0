//! What lbd's end-to-end suites, its demo and its benchmarks share.

pub mod apiserver;
pub mod bench;
pub mod bench_control;
pub mod bench_flows;
pub mod datapath;
pub mod driver;
pub mod exchange;
pub mod lab;
pub mod packets;
pub mod predecessor;
