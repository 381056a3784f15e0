//! The plan and the health of backends, as `lbctl` shows them.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use crate::api::types::{Backend, FrontendLabel, Names, SegmentLabel, Service, service_state};
use crate::plan::model::{FrontendAddress, FrontendBackend, FrontendPlan, Health, Plan};

/// Names of all ids in a plan.
pub(crate) fn names(plan: &Plan, hub: &str) -> Names {
    let segments = plan.segments.iter().map(|(&id, segment)| {
        let label = SegmentLabel {
            interface: segment.name.interface.clone(),
            vlan: segment.name.vlan.unwrap_or_default(),
            tenant_side: segment.tenant_side,
            hub_side: segment.hub_side,
        };
        (id, label)
    });
    let frontends = plan.frontends.values().map(|frontend| {
        let label = FrontendLabel {
            name: frontend.name.clone(),
            service: frontend.service.as_ref().map(ToString::to_string),
            tenant: frontend.tenant,
        };
        (frontend.id, label)
    });
    let nodes: BTreeMap<IpAddr, String> = plan
        .backends
        .values()
        .filter_map(|backend| Some((backend.address, backend.node.as_ref()?.to_string())))
        .collect();
    Names {
        hub: hub.to_owned(),
        segments: segments.collect(),
        tenants: plan.tenants.iter().map(|(&id, tenant)| (id, tenant.name.clone())).collect(),
        frontends: frontends.collect(),
        nodes,
    }
}

fn label(frontend: &FrontendPlan) -> String {
    frontend.service.as_ref().map_or_else(|| frontend.name.clone(), ToString::to_string)
}

fn tenant(plan: &Plan, frontend: &FrontendPlan) -> String {
    plan.tenants.get(&frontend.tenant).map_or_else(|| format!("#{}", frontend.tenant), |tenant| tenant.name.clone())
}

fn vip(address: &FrontendAddress) -> String {
    SocketAddr::new(address.vip, address.port).to_string()
}

/// A backend that could get connections if it were up: excluded nodes and those with weight 0 could not.
fn counts(backend: &FrontendBackend) -> bool {
    backend.probed && backend.weight > 0
}

/// How many backends of a frontend there are, are up, are down, and serve.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub all: u32,
    pub up: u32,
    pub down: u32,
    pub serving: u32,
}

impl Tally {
    pub(crate) fn of(frontend: &FrontendPlan, health: &Health) -> Self {
        let mut tally = Self::default();
        for backend in frontend.backends.iter() {
            tally.serving += u32::from(backend.serving && frontend.table.is_some());
            if counts(backend) {
                tally.all += 1;
                match frontend.health_of(backend, health).up {
                    Some(true) => tally.up += 1,
                    Some(false) => tally.down += 1,
                    None => {}
                }
            }
        }
        tally
    }

    pub(crate) fn state(self) -> &'static str {
        if self.all == 0 && self.serving == 0 {
            service_state::PENDING
        } else if self.serving == 0 {
            service_state::DOWN
        } else if self.all > 0 && self.down == self.all {
            service_state::TRYING
        } else if self.serving < self.all || self.down > 0 {
            service_state::DEGRADED
        } else {
            service_state::SERVING
        }
    }
}

/// All frontends of a plan.
pub(crate) fn services(plan: &Plan, health: &Health) -> Vec<Service> {
    let service = |(address, frontend): (&FrontendAddress, &FrontendPlan)| {
        let tally = Tally::of(frontend, health);
        Service {
            tenant: tenant(plan, frontend),
            service: label(frontend),
            name: frontend.name.clone(),
            vip: vip(address),
            proto: address.protocol.as_str().to_owned(),
            state: tally.state().to_owned(),
            serving: tally.serving,
            up: Some(tally.up),
            backends: Some(tally.all),
            affinity: if frontend.source_affinity { "source" } else { "flow" }.to_owned(),
            target_port: frontend.target_port,
            snat: frontend.snat,
            id: frontend.id,
            ..Service::default()
        }
    };
    plan.frontends.iter().map(service).collect()
}

/// All backends of all frontends of a plan.
pub(crate) fn backends(plan: &Plan, health: &Health, now: i64) -> Vec<Backend> {
    let mut all = Vec::new();
    for (address, frontend) in &plan.frontends {
        let (tenant, service, vip) = (tenant(plan, frontend), label(frontend), vip(address));
        for backend in frontend.backends.iter() {
            let known = frontend.health_of(backend, health);
            let cause = if !backend.probed {
                if known.cause.is_empty() { "excluded".to_owned() } else { known.cause }
            } else if backend.weight == 0 {
                "weight 0".to_owned()
            } else {
                known.cause
            };
            all.push(Backend {
                tenant: tenant.clone(),
                service: service.clone(),
                vip: vip.clone(),
                proto: address.protocol.as_str().to_owned(),
                backend: SocketAddr::new(backend.address, frontend.port_of(backend)).to_string(),
                node: backend.node.as_ref().map(ToString::to_string),
                state: match known.up {
                    Some(true) => "up",
                    Some(false) => "down",
                    None => "unknown",
                }
                .to_owned(),
                cause,
                since_s: known.up.map(|_| u64::try_from(now.saturating_sub(known.since)).unwrap_or_default()),
                serving: backend.serving && frontend.table.is_some(),
                weight: Some(backend.weight),
                id: backend.id,
                frontend: frontend.id,
                flows: None,
            });
        }
    }
    all
}
