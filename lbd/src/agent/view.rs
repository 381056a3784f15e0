//! The plan and the health of backends, as `lbctl` shows them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use jiff::Timestamp;

use super::core::{Core, Counts, Inputs, Maps};
use super::events::time;
use crate::api::types::{
    Backend, Event, FrontendLabel, InterfaceStatus, Names, SegmentLabel, Service, SourceStatus, Status, service_state,
};
use crate::config::Config;
use crate::plan::model::{FrontendAddress, FrontendBackend, FrontendPlan, Health, Plan};

/// Seconds that a source may be away before it is a problem: watches are renewed now and then.
const SOURCE_GRACE: u64 = 5;

/// Notices of the plan that make the host degraded; others concern only the owner of a Service.
const ALARMS: [&str; 1] = ["AllBackendsDown"];

/// What the agent lets others see: made anew after every round, never changed.
#[derive(Clone, Debug, Default)]
pub(crate) struct View {
    pub status: Status,
    pub events: Vec<Event>,
    pub plan: Arc<Plan>,
    pub health: Arc<Health>,
    pub hub: String,
    pub bpffs: PathBuf,
    pub counts: Counts,
    pub notices: BTreeMap<&'static str, u64>,
    /// Writes of Service statuses since the start.
    pub status_writes: u64,
    /// Failed requests to the source since the start.
    pub source_failures: u64,
    /// A plan is in the maps.
    pub ready: bool,
    /// When it was made, in seconds since the epoch.
    pub made: i64,
}

impl View {
    pub(super) fn new<M: Maps>(
        core: &Core<M>,
        inputs: &Inputs,
        sources: Vec<SourceStatus>,
        (status_writes, source_failures): (u64, u64),
        started: Timestamp,
    ) -> Self {
        let mut notices = BTreeMap::new();
        for notice in core.events.lasting() {
            *notices.entry(notice.reason).or_default() += 1;
        }
        let interfaces = interfaces(core, inputs);
        let problems = problems(core, inputs, &sources, &interfaces);
        let status = Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            abi: lbd_common::abi::ABI_VERSION,
            pid: std::process::id(),
            started: time(started),
            config: core.config_status.clone(),
            interfaces,
            sources,
            tables: Vec::new(),
            apply: core.apply_status.clone(),
            problems,
        };
        Self {
            status,
            events: core.events.all(),
            plan: Arc::clone(&core.plan),
            health: Arc::clone(&inputs.health),
            hub: core.config.hub.name.clone(),
            bpffs: core.config.datapath.bpffs.clone(),
            counts: core.counts,
            notices,
            status_writes,
            source_failures,
            ready: core.ever,
            made: Timestamp::now().as_second(),
        }
    }
}

fn role(config: &Config, interface: &str) -> &'static str {
    let tenant = config.tenants.iter().any(|tenant| tenant.segment.interface == interface);
    match (tenant, config.hub.segment.interface == interface) {
        (true, true) => "tenant+hub",
        (true, false) => "tenant",
        (false, _) => "hub",
    }
}

fn interfaces<M: Maps>(core: &Core<M>, inputs: &Inputs) -> Vec<InterfaceStatus> {
    let attached = core.maps.attached();
    let one = |name: &str| {
        let facts = inputs.host.interfaces.get(name);
        let mode = attached.iter().find(|attached| attached.interface == name).and_then(|attached| attached.mode);
        InterfaceStatus {
            name: name.to_owned(),
            role: role(&core.config, name).to_owned(),
            mode: mode.map_or("detached", |mode| mode.as_str()).to_owned(),
            up: facts.is_some_and(|facts| facts.up),
            mtu: facts.map_or(0, |facts| facts.mtu),
        }
    };
    core.config.interfaces().into_iter().map(one).collect()
}

fn problems<M: Maps>(
    core: &Core<M>,
    inputs: &Inputs,
    sources: &[SourceStatus],
    interfaces: &[InterfaceStatus],
) -> Vec<String> {
    let mut problems = Vec::new();
    if core.config_status.stale {
        problems.push("config_stale: the last reload was refused".to_owned());
    }
    if let Some(error) = &core.apply_status.error {
        problems.push(format!("apply_failed: {error}"));
    }
    for source in sources {
        if source.state != "synced" && source.age_s.is_none_or(|age| age > SOURCE_GRACE) {
            let error = source.error.as_deref().unwrap_or("no connection");
            let age = source.age_s.map_or_else(String::new, |age| format!(" for {age} s"));
            problems.push(format!("source_away: {} is {}{age}: {error}", source.name, source.state));
        } else if source.state == "synced"
            && let Some(error) = &source.error
        {
            problems.push(format!("source_error: {}: {error}", source.name));
        }
    }
    for interface in interfaces {
        if interface.mode == "detached" {
            problems.push(format!("detached: lbd's program is not on {}", interface.name));
        }
        if !interface.up {
            problems.push(format!("link_down: {} is down or has no carrier", interface.name));
        }
    }
    let mut told = BTreeSet::new();
    for notice in inputs.host_notices.iter().filter(|notice| told.insert(*notice)) {
        problems.push(format!("{}: {}", notice.reason, notice.message));
    }
    for notice in core.plan.notices.iter().filter(|notice| ALARMS.contains(&notice.reason)) {
        problems.push(format!("{}: {}", notice.reason, notice.message));
    }
    problems
}

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

/// The backends of a frontend whose port is known: none of a Service's port without NodePort.
fn reachable(frontend: &FrontendPlan) -> impl Iterator<Item = &FrontendBackend> {
    frontend.backends.iter().filter(|backend| frontend.port_of(backend) != 0)
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
        for backend in reachable(frontend) {
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
        for backend in reachable(frontend) {
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

/// Ids that are gone keep their last name, so that flows which outlive their frontend still have one.
pub(crate) fn with_former(mut names: Names, former: Names) -> Names {
    /// More than that are forgotten.
    const KEPT: usize = 65_536;
    for (id, label) in former.frontends {
        if names.frontends.len() < KEPT {
            names.frontends.entry(id).or_insert(label);
        }
    }
    for (id, label) in former.tenants {
        names.tenants.entry(id).or_insert(label);
    }
    names
}

/// Labels of a frontend's metrics.
pub(crate) fn labels(plan: &Plan, address: &FrontendAddress, frontend: &FrontendPlan) -> Vec<(&'static str, String)> {
    vec![
        ("tenant", tenant(plan, frontend)),
        ("service", label(frontend)),
        ("vip", vip(address)),
        ("proto", address.protocol.as_str().to_owned()),
    ]
}

/// Whether two plans have the same names for the same ids.
pub(crate) fn same_names(a: &Plan, b: &Plan) -> bool {
    a.frontends.len() == b.frontends.len()
        && a.frontends
            .values()
            .zip(b.frontends.values())
            .all(|(a, b)| (a.id, a.tenant, &a.name, &a.service) == (b.id, b.tenant, &b.name, &b.service))
        && a.segments == b.segments
        && a.tenants
            .iter()
            .map(|(id, tenant)| (id, &tenant.name))
            .eq(b.tenants.iter().map(|(id, tenant)| (id, &tenant.name)))
        && a.backends.values().map(|a| (a.address, &a.node)).eq(b.backends.values().map(|b| (b.address, &b.node)))
}
