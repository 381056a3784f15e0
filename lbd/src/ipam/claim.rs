//! Whose a Service is, and whether it can be served at all.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::{CLASS, GUEST_LABEL, SHARED_KEY_ANNOTATION, ServiceAssignment, VIP_ANNOTATION};
use crate::config::{Claim, Config, Frontend, Mode, Tenant};
use crate::plan::model::Notice;
use crate::plan::ranges::{clients, shortened};
use crate::source::{Inventory, ObjectName, Service, ServiceKind};

/// A Service that some tenant has to do with.
pub(super) struct Wanted<'a> {
    pub(super) tenant: &'a Tenant,
    /// The object, if it exists.
    pub(super) service: Option<&'a Service>,
    /// The frontend of the file that reserves it.
    pub(super) frontend: Option<&'a Frontend>,
    /// The claim that matches.
    pub(super) claim: Option<&'a Claim>,
    /// Its status is ours.
    pub(super) claimed: bool,
}

impl Wanted<'_> {
    /// The families (`true` = IPv6) in which it wants an address, in order.
    pub(super) fn families(&self) -> Vec<bool> {
        let vip = self.frontend.and_then(|frontend| frontend.vip).map(|vip| vip.is_ipv6());
        let mut families: Vec<bool> = Vec::new();
        let spec = self.service.map_or(&[][..], |service| &service.families_v6);
        // What is not there yet is of the family that the file says.
        let first = self.tenant.pools.iter().map(|pool| pool.first.is_ipv6()).min().unwrap_or_default();
        let unsaid = if spec.is_empty() { vip.or(Some(first)) } else { None };
        let both = self.service.is_some_and(|service| service.require_dual_stack).then_some([false, true]);
        for v6 in spec.iter().copied().chain(unsaid).chain(vip).chain(both.into_iter().flatten()) {
            if !families.contains(&v6) {
                families.push(v6);
            }
        }
        families
    }

    /// Whether the tenant has addresses of a family.
    pub(super) fn has_pool(&self, v6: bool) -> bool {
        self.tenant.pools.iter().any(|pool| pool.first.is_ipv6() == v6)
    }

    /// What it has before it has an address.
    pub(super) fn assignment(&self) -> ServiceAssignment {
        ServiceAssignment {
            tenant: self.tenant.name.clone(),
            claimed: self.claimed,
            frontend: self.frontend.map(|frontend| frontend.name.clone()),
            mode: mode(self.service, self.frontend, self.claim),
            addresses: Vec::new(),
        }
    }
}

/// How backends are found: as the file says at the frontend, else at the claim, else by the Service itself. One that mirrors a Service of
/// a guest cluster has no selector, and its NodePort leads nowhere: the guest's nodes are in the tenant's segment.
pub(crate) fn mode(service: Option<&Service>, frontend: Option<&Frontend>, claim: Option<&Claim>) -> Mode {
    let said = frontend.and_then(|frontend| frontend.mode).or_else(|| claim.and_then(|claim| claim.mode));
    said.unwrap_or_else(|| {
        if service.is_some_and(|service| is_guest_made(service) && !service.selector) {
            Mode::Endpoints
        } else {
            Mode::Nodes
        }
    })
}

/// All Services that are claimed or reserved.
pub(super) fn wanted<'a>(
    config: &'a Config,
    inventory: &'a Inventory,
    notices: &mut Vec<Notice>,
) -> BTreeMap<ObjectName, Wanted<'a>> {
    let mut all = BTreeMap::new();
    for (name, service) in &inventory.services {
        if service.kind != ServiceKind::LoadBalancer || service.class.as_deref().is_some_and(|class| class != CLASS) {
            continue;
        }
        let mut matching = config
            .tenants
            .iter()
            .filter_map(|tenant| {
                tenant.claims.iter().find(|claim| matches(claim, name, service, inventory)).map(|claim| (tenant, claim))
            })
            .collect::<Vec<_>>();
        matching.sort_by(|(left, _), (right, _)| left.name.cmp(&right.name));
        match matching.as_slice() {
            [] => {
                let reserved = config.tenants.iter().any(|tenant| tenant.frontends.iter().any(|it| names(it, name)));
                if service.class.is_some() && !reserved {
                    notices.push(Notice {
                        reason: "NoTenant",
                        service: Some(name.clone()),
                        tenant: None,
                        message: format!(
                            "this Service asks for the class {CLASS}, but no tenant of this load balancer claims it"
                        ),
                    });
                }
            }
            [(tenant, claim)] => {
                let wanted =
                    Wanted { tenant, service: Some(service), frontend: None, claim: Some(claim), claimed: true };
                all.insert(name.clone(), wanted);
            }
            [(first, _), .., (last, _)] => notices.push(Notice {
                reason: "ClaimedTwice",
                service: Some(name.clone()),
                tenant: None,
                message: format!(
                    "the tenants {} and {} both claim this Service, so neither serves it; narrow one of the claims",
                    first.name, last.name
                ),
            }),
        }
    }
    for tenant in &config.tenants {
        for frontend in &tenant.frontends {
            let Some((namespace, service)) = &frontend.service else { continue };
            let name = ObjectName { namespace: namespace.clone(), name: service.clone() };
            match all.get_mut(&name) {
                None => {
                    let service = inventory.services.get(&name);
                    all.insert(name, Wanted { tenant, service, frontend: Some(frontend), claim: None, claimed: false });
                }
                Some(wanted) if wanted.tenant.name == tenant.name && wanted.frontend.is_none() => {
                    wanted.frontend = Some(frontend);
                }
                // Forwarded with the address that the file gives.
                Some(_) if frontend.vip.is_some() => {}
                Some(wanted) => notices.push(Notice {
                    reason: "ReservationNeedsVip",
                    service: Some(name),
                    tenant: Some(tenant.name.clone()),
                    message: format!(
                        "the frontend {} of tenant {} names a Service that tenant {} serves already; give the frontend a vip",
                        frontend.name, tenant.name, wanted.tenant.name
                    ),
                }),
            }
        }
    }
    all
}

fn names(frontend: &Frontend, name: &ObjectName) -> bool {
    frontend.service.as_ref().is_some_and(|(namespace, service)| *namespace == name.namespace && *service == name.name)
}

fn matches(claim: &Claim, name: &ObjectName, service: &Service, inventory: &Inventory) -> bool {
    let contains = |have: Option<&BTreeMap<String, String>>, want: &BTreeMap<String, String>| {
        want.iter().all(|(key, value)| have.and_then(|have| have.get(key)) == Some(value))
    };
    let empty = claim.namespaces.is_empty() && claim.namespace_labels.is_empty() && claim.service_labels.is_empty();
    // A claim that says nothing claims nothing, rather than every Service of the cluster.
    !empty
        && (claim.namespaces.is_empty() || claim.namespaces.contains(&name.namespace))
        && contains(inventory.namespaces.get(&name.namespace), &claim.namespace_labels)
        && contains(Some(&service.labels), &claim.service_labels)
}

/// Whether a guest cluster made the Service: then a tenant's user chose its annotations.
pub(crate) fn is_guest_made(service: &Service) -> bool {
    service.labels.contains_key(GUEST_LABEL)
}

/// The key under which a Service shares its address with others of its tenant.
pub(super) fn shared_key(service: &Service) -> Option<&str> {
    let key = service.annotations.get(SHARED_KEY_ANNOTATION).map(String::as_str);
    key.filter(|key| !key.is_empty() && !is_guest_made(service))
}

/// The addresses that a Service asks for, at most one of each family. Untrusted text.
pub(super) fn requested(service: &Service, annotations: &[String]) -> Result<Vec<IpAddr>, String> {
    if is_guest_made(service) {
        return Ok(Vec::new());
    }
    let mut found: Vec<(IpAddr, &str)> = Vec::new();
    let texts = std::iter::once(VIP_ANNOTATION)
        .chain(annotations.iter().map(String::as_str))
        .filter_map(|key| Some((key, service.annotations.get(key)?.as_str())))
        .chain(service.requested_address.as_deref().map(|text| ("spec.loadBalancerIP", text)));
    for (key, text) in texts {
        // With two families, two addresses.
        for text in text.split(',').map(str::trim).filter(|text| !text.is_empty()) {
            let address: IpAddr =
                text.parse().map_err(|_| format!("{key} holds {}, which is not an IP address", shortened(text)))?;
            match found.iter().find(|(other, _)| other.is_ipv6() == address.is_ipv6()) {
                Some((other, first)) if *other != address => {
                    return Err(format!("{first} asks for {other}, but {key} asks for {address}"));
                }
                Some(_) => {}
                None => found.push((address, key)),
            }
        }
    }
    Ok(found.into_iter().map(|(address, _)| address).collect())
}

/// Why a Service cannot be served at all: reason and text of its notice.
///
/// Such a Service gets no new address, and nothing is forwarded: a restriction that is not understood is never left out.
pub(crate) fn unserved(service: &Service) -> Option<(&'static str, String)> {
    if service.kind == ServiceKind::ExternalName {
        return Some(("ExternalName", "a Service of type ExternalName has nothing to forward to".to_owned()));
    }
    match clients(service) {
        Err(reason) => {
            let message = format!("{reason}; the Service stays closed until that is mended");
            return Some(("SourceRangesInvalid", message));
        }
        Ok(clients) if clients.is_limited(service) => {
            return Some((
                "SourceRangesUnsupported",
                "loadBalancerSourceRanges are not supported yet; the Service stays closed rather than open to everybody"
                    .to_owned(),
            ));
        }
        Ok(_) => {}
    }
    if !service.ports.is_empty() && !service.ports.iter().any(|port| port.protocol().is_some()) {
        let mut protocols: Vec<_> = service.ports.iter().map(|port| shortened(&port.protocol)).collect();
        protocols.sort();
        protocols.dedup();
        return Some((
            "ProtocolUnsupported",
            format!("no port of this Service has a supported protocol: {} instead of TCP or UDP", protocols.join(", ")),
        ));
    }
    None
}
