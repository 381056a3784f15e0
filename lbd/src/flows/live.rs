//! All live flows: of both families, established and half-open, without those whose time is over.

use std::collections::BTreeSet;

use lbd_common::abi::{
    Address, Address4, Address6, FLOW_UDP, FlowKey, FrontendOwner, HalfOpen, Settings, Tenant, TenantUse, Timeouts,
};
use lbd_common::tcp;

use super::{Clock, Flow, Matcher};
use crate::dataplane::{DataplaneError, FlowPair, FlowTables, Pins};

/// How long flows are kept without a packet, as the datapath decides it.
#[derive(Clone, Debug, Default)]
pub struct Lifetimes {
    settings: Option<Settings>,
    timeouts: Vec<Timeouts>,
    owners: Vec<FrontendOwner>,
    /// What is used, and its limit, by tenant and family: of all flows, and of UDP flows.
    tenants: Vec<[[(u64, u32); 2]; 2]>,
}

impl Lifetimes {
    /// From what the maps hold: timeouts by index, owners by frontend, tenants by index.
    pub fn new<'a>(
        settings: Settings,
        timeouts: Vec<Timeouts>,
        owners: Vec<FrontendOwner>,
        tenants: impl IntoIterator<Item = (u16, &'a (Tenant, TenantUse))>,
    ) -> Self {
        let mut all = Vec::new();
        for (id, (limits, used)) in tenants {
            let id = usize::from(id);
            if all.len() <= id {
                all.resize(id + 1, [[(0, 0); 2]; 2]);
            }
            all[id] = [0, 1].map(|family| {
                let (used, limits) = (&used.families[family], &limits.families[family]);
                [(used.flows, limits.flows), (used.udp, limits.udp)]
            });
        }
        Self { settings: Some(settings), timeouts, owners, tenants: all }
    }

    /// Ticks without a packet that a flow of this frontend lives, in this state (`FLOW_*` bits) and with what its tenant uses now.
    pub fn of(&self, bits: u16, frontend: u16, family: usize) -> u32 {
        let owner = self.owners.get(usize::from(frontend)).copied().unwrap_or(FrontendOwner::ZERO);
        let udp = usize::from(bits & FLOW_UDP != 0);
        let (used, limit) = self.tenants.get(usize::from(owner.tenant)).map_or((0, 0), |tenant| tenant[family][udp]);
        let timeouts = self.timeouts.get(usize::from(owner.timeouts)).unwrap_or(&Timeouts::ZERO);
        tcp::lifetime(bits, timeouts, self.settings.as_ref().unwrap_or(&Settings::ZERO), used, limit)
    }
}

/// Reads flows from the pinned maps.
pub struct Live<'a> {
    pins: &'a Pins,
    /// When the reading began.
    pub clock: Clock,
    lifetimes: Lifetimes,
}

impl<'a> Live<'a> {
    /// Reads what decides about flows.
    pub fn new(pins: &'a Pins) -> Result<Self, DataplaneError> {
        let settings = pins.settings()?;
        let clock = Clock { now: pins.now()?, ticks_per_second_256: settings.ticks_per_second_256 };
        let tenants = pins.tenants()?;
        let tenants = tenants.iter().map(|(&id, tenant)| (id, tenant));
        let lifetimes = Lifetimes::new(settings, pins.timeouts()?, pins.owners()?, tenants);
        Ok(Self { pins, clock, lifetimes })
    }

    /// The maps.
    pub const fn pins(&self) -> &Pins {
        self.pins
    }

    /// The flow with these halves, if it lives.
    pub fn flow<A: FlowTables>(&self, pair: &FlowPair<A>) -> Option<Flow> {
        Flow::from_pair(pair, self.clock, &self.lifetimes)
    }

    /// Hands the flows that are meant to `each`, in no order, from several threads, each with what `new` made for it.
    pub fn fold<T: Send>(
        &self,
        matcher: &Matcher<'_>,
        new: impl Fn() -> T + Sync,
        each: impl Fn(&mut T, Flow) + Sync,
    ) -> Result<Vec<T>, DataplaneError> {
        let mut results = self.fold_family::<Address4, T>(matcher, &new, &each)?;
        results.extend(self.fold_family::<Address6, T>(matcher, &new, &each)?);
        Ok(results)
    }

    fn fold_family<A: FlowTables, T: Send>(
        &self,
        matcher: &Matcher<'_>,
        new: &(impl Fn() -> T + Sync),
        each: &(impl Fn(&mut T, Flow) + Sync),
    ) -> Result<Vec<T>, DataplaneError> {
        // Flows are read last: a connection promoted in between is then in both tables, never in none.
        let half_open = self.pins.half_open::<A>()?;
        let waiting: BTreeSet<FlowKey<A>> = half_open.iter().map(half_open_key).collect();
        let read = self.pins.flows(
            |half| matcher.may_match(half),
            || (new(), Vec::new()),
            |(result, promoted): &mut (T, Vec<FlowKey<A>>), pair: &FlowPair<A>| {
                if !waiting.is_empty() && waiting.contains(&pair.key) {
                    promoted.push(pair.key);
                }
                if let Some(flow) = self.flow(pair).filter(|flow| matcher.matches(flow)) {
                    each(result, flow);
                }
            },
        )?;
        let mut promoted = BTreeSet::new();
        let mut results = Vec::new();
        for (result, keys) in read {
            promoted.extend(keys);
            results.push(result);
        }
        if let Some(result) = results.first_mut() {
            for record in half_open.iter().filter(|record| !promoted.contains(&half_open_key(record))) {
                if let Some(flow) = Flow::from_half_open(record, self.clock).filter(|flow| matcher.matches(flow)) {
                    each(result, flow);
                }
            }
        }
        Ok(results)
    }
}

fn half_open_key<A: Address>(record: &HalfOpen<A>) -> FlowKey<A> {
    FlowKey { tuple: record.client, segment: record.client_segment, protocol: 6, pad: 0 }
}

#[cfg(test)]
mod tests {
    use lbd_common::abi::{FLOW_FIN, FLOW_PEER_FIN, FLOW_REPLIED, FamilyLimits, FamilyUse};

    use super::*;

    #[test]
    fn a_frontends_timeouts_and_its_tenants_fill_decide() {
        let of = |established| Timeouts {
            tcp_established: established,
            tcp_fin: 100,
            udp_unreplied: 80,
            udp_replied: 800,
            ..Timeouts::ZERO
        };
        let mut tenant = (Tenant::ZERO, TenantUse::ZERO);
        tenant.0.families = [FamilyLimits { flows: 1000, udp: 100, ..FamilyLimits::ZERO }; 2];
        tenant.1.families = [
            FamilyUse { flows: 1000, udp: 50, ..FamilyUse::ZERO },
            FamilyUse { flows: 100, udp: 100, ..FamilyUse::ZERO },
        ];
        let owner = |tenant, timeouts| FrontendOwner { tenant, timeouts, ..FrontendOwner::ZERO };
        let settings = Settings { tombstone: 50, ..Settings::ZERO };
        let owners = vec![owner(0, 0), owner(3, 1)];
        let lifetimes = Lifetimes::new(settings, vec![of(5000), of(7000)], owners, [(3, &tenant)]);
        assert_eq!([0, 1, 9].map(|frontend| lifetimes.of(0, frontend, 0)), [5000, 7000, 5000]);
        let closed = FLOW_FIN | FLOW_PEER_FIN;
        assert_eq!(lifetimes.of(closed, 0, 0), 100, "a tenant without a limit");
        assert_eq!(lifetimes.of(closed, 1, 0), 50, "a full tenant: as short as the tombstone allows");
        assert_eq!(lifetimes.of(closed, 1, 1), 100, "the other family is empty");
        assert_eq!(lifetimes.of(FLOW_UDP, 1, 1), 10, "UDP has a quota of its own");
        assert_eq!(lifetimes.of(FLOW_UDP | FLOW_REPLIED, 1, 1), 100);
        assert_eq!(lifetimes.of(FLOW_UDP | FLOW_REPLIED, 1, 0), 800);
    }
}
