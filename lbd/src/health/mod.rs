//! Probes of backends.

use std::collections::BTreeSet;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};

use crate::plan::model::{Health, ProbeTarget};

/// State of a target as kept on disk, so that a restart does not forget what is down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedTarget {
    /// Address.
    pub address: IpAddr,
    /// Port.
    pub port: u16,
    /// Interface.
    pub interface: String,
    /// `tcp`, `http`, `https` or `tls`.
    pub kind: String,
    /// Up.
    pub up: bool,
    /// Why.
    pub cause: String,
    /// Since when, in seconds since the epoch.
    pub since: i64,
}

/// What is worth keeping on disk.
pub fn save(health: &Health) -> Vec<SavedTarget> {
    let _ = health;
    Vec::new()
}

/// The reverse of [`save`]. A restored target lends its state to any target with the same address, port, interface and kind.
pub fn restore(saved: &[SavedTarget]) -> Health {
    let _ = saved;
    Health::new()
}

/// Probes targets in tasks of its own until it is dropped.
#[derive(Debug)]
pub struct Prober {
    targets: mpsc::UnboundedSender<BTreeSet<ProbeTarget>>,
}

impl Prober {
    /// Starts. Needs a running tokio runtime. The receiver changes only when a state or its cause does.
    pub fn start(restored: Health) -> (Self, watch::Receiver<Health>) {
        let (targets, _) = mpsc::unbounded_channel();
        let (_, receiver) = watch::channel(restored);
        (Self { targets }, receiver)
    }

    /// Replaces the set of targets. New ones are probed at once; those that are gone are forgotten.
    pub fn set_targets(&self, targets: BTreeSet<ProbeTarget>) {
        // The task only ends with the prober.
        let _ = self.targets.send(targets);
    }
}
