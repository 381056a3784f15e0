//! What a change of the configuration costs. Pure, and from the two configurations alone.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::{Claim, Config, Frontend, Protocol, SegmentName, Tenant};

/// Keys whose change a reload cannot carry out: each needs a restart of the agent (which cuts no connection), or, where
/// the text says so, a migration.
pub fn changes_needing_restart(old: &Config, new: &Config) -> Vec<String> {
    // All fields are named, so that a new one must be thought about here.
    let Config { hub, tenants: _, datapath, address_annotations: _, state_dir, socket, metrics, origin: _ } = new;
    let mut changes = Vec::new();
    let mut changed = |key: &str, differs: bool| {
        if differs {
            changes.push(key.to_owned());
        }
    };
    changed("hubs[0].name", hub.name != old.hub.name);
    changed("hubs[0].interface", hub.segment.interface != old.hub.segment.interface);
    changed("hubs[0].vlan", hub.segment.vlan != old.hub.segment.vlan);
    changed("hubs[0].kubernetes", hub.kubernetes != old.hub.kubernetes);
    changed("datapath.mode", datapath.mode != old.datapath.mode);
    changed("datapath.max_flows", datapath.max_flows != old.datapath.max_flows);
    changed("datapath.max_flows_v6", datapath.max_flows_v6 != old.datapath.max_flows_v6);
    changed("datapath.bpffs", datapath.bpffs != old.datapath.bpffs);
    changed("state_dir", *state_dir != old.state_dir);
    changed("socket", *socket != old.socket);
    changed("metrics", *metrics != old.metrics);
    let (before, after) = (old.interfaces(), new.interfaces());
    for interface in after.difference(&before) {
        changes.push(format!("interface {interface} is new"));
    }
    for interface in before.difference(&after) {
        changes.push(format!("interface {interface} is gone"));
    }
    changes
}

/// What clients connect to.
type Entrance<'a> = (&'a SegmentName, IpAddr, Protocol, u16);

/// VIPs, frontends and claims of `old` whose live flows `new` would cut, one line each; empty when nothing is lost.
///
/// A backend that leaves a frontend is no loss: its flows stay with it until they end. Neither is a new name for the
/// same entrance.
pub fn loss(old: &Config, new: &Config) -> Vec<String> {
    let entrances = entrances(new);
    let reserved: BTreeSet<_> = reservations(new).collect();
    let mut losses = Vec::new();
    for tenant in &old.tenants {
        let next = new.tenant(&tenant.name).filter(|next| next.segment == tenant.segment);
        for frontend in &tenant.frontends {
            let label = format!("tenant {}: frontend {}", tenant.name, frontend.name);
            losses
                .extend(lost_frontend(tenant, frontend, &entrances, &reserved).map(|what| format!("{label}: {what}")));
        }
        losses.extend(lost_claims(tenant, next));
    }
    losses
}

/// The frontends of a configuration by what clients connect to; port 0 = all ports of the Service.
fn entrances(config: &Config) -> BTreeMap<Entrance<'_>, (&Tenant, &Frontend)> {
    let mut entrances = BTreeMap::new();
    for tenant in &config.tenants {
        for frontend in &tenant.frontends {
            let Some(vip) = frontend.vip else {
                continue;
            };
            if frontend.ports.is_empty() {
                entrances.insert((&tenant.segment, vip, Protocol::Tcp, 0), (tenant, frontend));
            }
            for port in &frontend.ports {
                entrances.insert((&tenant.segment, vip, port.protocol, port.port), (tenant, frontend));
            }
        }
    }
    entrances
}

/// Tenants and the Services that their frontends reserve, where any address will do or the given one.
fn reservations(config: &Config) -> impl Iterator<Item = (&str, &SegmentName, &(String, String))> {
    config.tenants.iter().flat_map(|tenant| {
        let of_tenant = tenant.frontends.iter().filter_map(|frontend| frontend.service.as_ref());
        of_tenant.map(|service| (tenant.name.as_str(), &tenant.segment, service))
    })
}

fn lost_frontend(
    tenant: &Tenant,
    frontend: &Frontend,
    entrances: &BTreeMap<Entrance<'_>, (&Tenant, &Frontend)>,
    reserved: &BTreeSet<(&str, &SegmentName, &(String, String))>,
) -> Option<String> {
    let Some(vip) = frontend.vip else {
        let service = frontend.service.as_ref()?;
        let kept = reserved.contains(&(&tenant.name, &tenant.segment, service));
        return (!kept).then(|| format!("Service {}/{} is no longer reserved", service.0, service.1));
    };
    let stays = |protocol, port| {
        let same = |key: Entrance<'_>| {
            entrances
                .get(&key)
                .is_some_and(|(other, next)| other.name == tenant.name && next.service == frontend.service)
        };
        let any = frontend.service.is_some() && same((&tenant.segment, vip, Protocol::Tcp, 0));
        any || same((&tenant.segment, vip, protocol, port))
    };
    if frontend.ports.is_empty() {
        return (!stays(Protocol::Tcp, 0)).then(|| format!("{vip} no longer serves all ports of its Service"));
    }
    let gone: Vec<String> = frontend
        .ports
        .iter()
        .filter(|port| !stays(port.protocol, port.port))
        .map(|port| format!("{vip}:{}/{}", port.port, port.protocol.as_str()))
        .collect();
    (!gone.is_empty()).then(|| format!("{} no longer served by it", gone.join(", ")))
}

/// Services whose VIPs depend on the tenant's claims and pools.
fn lost_claims(tenant: &Tenant, next: Option<&Tenant>) -> Vec<String> {
    let mut losses = Vec::new();
    for claim in &tenant.claims {
        if !next.is_some_and(|next| next.claims.iter().any(|next| next.covers(claim))) {
            losses.push(format!("tenant {}: Services {claim} are no longer claimed", tenant.name));
        }
    }
    for pool in tenant.pools.iter().filter(|_| next.is_some()) {
        let pools = next.map(|next| next.pools.as_slice()).unwrap_or_default();
        if !super::validate::covered(*pool, pools) {
            losses.push(format!("tenant {}: VIPs of pool {pool} are no longer all in its pools", tenant.name));
        }
    }
    losses
}

impl Claim {
    /// Whether everything that the other claim matches is matched by this one too.
    pub(super) fn covers(&self, other: &Self) -> bool {
        let Self { namespaces, namespace_labels, service_labels, guest: _ } = self;
        let within = |mine: &BTreeMap<String, String>, others: &BTreeMap<String, String>| {
            mine.iter().all(|(key, value)| others.get(key) == Some(value))
        };
        let names = namespaces.is_empty()
            || (!other.namespaces.is_empty() && other.namespaces.iter().all(|name| namespaces.contains(name)));
        names && within(namespace_labels, &other.namespace_labels) && within(service_labels, &other.service_labels)
    }
}
