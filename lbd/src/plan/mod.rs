//! Pure: (config, inventory, addresses, health, host) → exact contents of the maps.

pub mod model;

use serde::{Deserialize, Serialize};

use self::model::{Health, HostFacts, Plan};
use crate::config::Config;
use crate::ipam::Assignments;
use crate::source::Inventory;

/// Ids that must survive restarts, and what is needed to find flows whose backend is gone or another's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ids {}

/// Makes plans. A plan is a function of the arguments and the [`Ids`].
#[derive(Debug, Default)]
pub struct Planner {
    ids: Ids,
}

impl Planner {
    /// Starts from the ids of an earlier life, or from none.
    pub fn new(ids: Ids) -> Self {
        Self { ids }
    }

    /// To be kept on disk, before the plan is applied.
    pub fn ids(&self) -> &Ids {
        &self.ids
    }

    /// Tells that the last plan is in the maps: its resets are done and not asked for again. Until then every plan repeats them.
    pub fn applied(&mut self) {}

    /// Makes a plan. With a hub in Kubernetes, an inventory that is not complete must not be applied.
    pub fn plan(
        &mut self,
        config: &Config,
        inventory: &Inventory,
        assignments: &Assignments,
        health: &Health,
        host: &HostFacts,
    ) -> Plan {
        let _ = (config, inventory, assignments, health, host);
        Plan::default()
    }
}
