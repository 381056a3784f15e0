//! Wishes of the last plan, for as long as what they were made of has not changed.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::frontend::{Settled, Wish, wishes};
use super::model::{ClientsPlan, HostFacts, Notice, Plan};
use super::{Ids, Site};
use crate::config::{AddressRange, Config};
use crate::ipam::Assignments;
use crate::source::{Inventory, ObjectName};

/// What wishes are made of.
pub(super) struct Origin {
    config: Arc<Config>,
    inventory: Inventory,
    assignments: Arc<Assignments>,
    host: HostFacts,
}

impl Origin {
    pub(super) fn of(
        config: &Arc<Config>,
        inventory: &Inventory,
        assignments: &Arc<Assignments>,
        host: &HostFacts,
    ) -> Self {
        Self {
            config: Arc::clone(config),
            inventory: inventory.clone(),
            assignments: Arc::clone(assignments),
            host: host.clone(),
        }
    }
}

/// Wishes in the order of [`wishes`].
struct Wishes<'a>(Vec<Wish<'a>>);

self_cell::self_cell!(
    struct Asked {
        owner: Origin,
        #[covariant]
        dependent: Wishes,
    }
);

/// Wishes with what they were made of, and what making them added to the plan.
pub(super) struct Known {
    asked: Asked,
    /// The last inventory of which the same was wished: what statuses show has come a long way since the first one.
    last: Inventory,
    /// A wish leads to endpoints: those must not be nodes.
    to_endpoints: bool,
    notices: Vec<Notice>,
    clients: BTreeMap<ObjectName, ClientsPlan>,
    intervals: Vec<Arc<[AddressRange]>>,
    /// See [`Settled`].
    pub(super) settled: Option<Settled>,
}

impl Known {
    /// Makes the wishes. The VIPs are in the plan already.
    pub(super) fn make(origin: Origin, site: &Site<'_>, ids: &Ids, plan: &mut Plan) -> Self {
        let told = plan.notices.len();
        let last = origin.inventory.clone();
        let asked = Asked::new(origin, |origin| {
            Wishes(wishes(&origin.config, &origin.inventory, &origin.assignments, site, ids, plan))
        });
        Self {
            to_endpoints: asked.borrow_dependent().0.iter().any(Wish::to_endpoints),
            asked,
            last,
            notices: plan.notices[told..].to_vec(),
            clients: plan.clients.clone(),
            intervals: plan.intervals.clone(),
            settled: None,
        }
    }

    /// Whether the same would be wished for again: neither nodes nor what the statuses of Services show matter to that.
    pub(super) fn holds(&self, origin: &Origin) -> bool {
        let (known, last) = (self.asked.borrow_owner(), &self.last);
        Arc::ptr_eq(&known.config, &origin.config)
            && Arc::ptr_eq(&known.assignments, &origin.assignments)
            && known.host == origin.host
            && (!self.to_endpoints || last.nodes == origin.inventory.nodes)
            && Inventory { nodes: origin.inventory.nodes.clone(), ..last.clone() }
                .is_same_but_for_statuses(&origin.inventory)
    }

    /// Goes on with an inventory of which the same is wished.
    pub(super) fn follow(&mut self, origin: Origin) {
        self.last = origin.inventory;
    }

    /// Adds to a plan what making the wishes would.
    pub(super) fn add_to(&self, plan: &mut Plan) {
        plan.notices.extend_from_slice(&self.notices);
        plan.clients.clone_from(&self.clients);
        plan.intervals.clone_from(&self.intervals);
    }

    pub(super) fn wishes(&self) -> &[Wish<'_>] {
        &self.asked.borrow_dependent().0
    }
}

impl std::fmt::Debug for Known {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Known").field("wishes", &self.wishes().len()).finish_non_exhaustive()
    }
}
