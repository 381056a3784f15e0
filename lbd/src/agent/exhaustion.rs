//! Which SNAT ports have run out, and for whom: looked for only when refusals for want of a port are counted.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use crate::config::Protocol;
use crate::dataplane::{DataplaneError, Pins};
use crate::flows::ports::{PortsUsed, Towards, used};
use crate::plan::model::{FrontendAddress, FrontendId, FrontendPlan, Notice, Plan, TenantId};
use crate::source::ObjectName;

/// Seconds between two looks at the tables.
const PAUSE: i64 = 5;
/// Seconds without another refusal after which it is over.
const QUIET: i64 = 60;
/// VIPs, and backends, that a notice names; Services that a tenant's notices name.
const NAMED: usize = 8;
const SERVICES: usize = 32;

/// Connections to a VIP that are refused, as no SNAT port is left towards a backend.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Exhausted {
    pub tenant: String,
    pub service: Option<ObjectName>,
    /// Name of the frontend.
    pub frontend: String,
    pub vip: SocketAddr,
    pub protocol: Protocol,
    pub snat: IpAddr,
    /// Whose ports are used up; `None` = it has not been found out.
    pub backend: Option<SocketAddr>,
    pub node: Option<Arc<str>>,
}

impl Exhausted {
    fn group(&self) -> (&str, Option<&ObjectName>, &str) {
        (&self.tenant, self.service.as_ref(), &self.frontend)
    }
}

/// What one look at the maps has found.
#[derive(Debug, Default)]
pub(crate) struct Look {
    /// Refused connections by frontend, for whatever reason.
    pub refused: BTreeMap<FrontendId, u64>,
    pub used: PortsUsed,
}

impl Look {
    /// Reads the refusals and, with `ports`, all flows.
    pub(crate) fn take(bpffs: &Path, ports: bool) -> Result<Self, DataplaneError> {
        let pins = Pins::open(bpffs)?;
        let refused = pins.frontend_counters()?.into_iter().map(|(id, counters)| (id, counters.refused)).collect();
        Ok(Self { refused, used: if ports { used(&pins)? } else { PortsUsed::new() } })
    }
}

/// What is known of it. Times are seconds of one clock.
#[derive(Debug, Default)]
pub(crate) struct Exhaustion {
    /// Refusals for want of a port, by tenant, when last counted.
    counts: Option<BTreeMap<TenantId, u64>>,
    /// Tenants that have had more since the last look.
    grown: BTreeSet<TenantId>,
    /// Refusals at the last look.
    refused: Option<BTreeMap<FrontendId, u64>>,
    looked: Option<i64>,
    /// With the time at which each was last seen.
    known: BTreeMap<Exhausted, i64>,
}

impl Exhaustion {
    /// Takes the refusals for want of a port. The first ones are only what later ones are compared with.
    pub(crate) fn counted(&mut self, counts: BTreeMap<TenantId, u64>) {
        if let Some(before) = &self.counts {
            let grown = counts.iter().filter(|(id, count)| **count > before.get(id).copied().unwrap_or_default());
            self.grown.extend(grown.map(|(&id, _)| id));
        }
        self.counts = Some(counts);
    }

    /// Whether the maps have to be looked at; and if so, whether at the flows, too.
    pub(crate) fn wants_look(&self, now: i64) -> Option<bool> {
        if self.refused.is_none() {
            return Some(false);
        }
        (!self.grown.is_empty() && self.looked.is_none_or(|last| now - last >= PAUSE)).then_some(true)
    }

    /// Takes what a look has found.
    pub(crate) fn looked(&mut self, look: Look, plan: &Plan, now: i64) {
        let Some(before) = self.refused.replace(look.refused) else { return };
        let after = self.refused.as_ref().unwrap_or(&before);
        self.looked = Some(now);
        let grown = std::mem::take(&mut self.grown);
        let more = |id| after.get(&id) > before.get(&id);
        // Refused for some reason, and where a port could be wanting at all.
        let concerned = plan.frontends.iter().filter(|(_, frontend)| {
            grown.contains(&frontend.tenant) && frontend.snat.is_some() && frontend.table.is_some() && more(frontend.id)
        });
        let (mut sure, mut likely) = (Vec::new(), Vec::new());
        for (address, frontend) in concerned {
            let (full, found) = exhausted(plan, address, frontend, &look.used);
            if full { &mut sure } else { &mut likely }.extend(found);
        }
        // Others may have been refused for other reasons; but somebody's ports are used up.
        for found in if sure.is_empty() { likely } else { sure } {
            self.known.insert(found, now);
        }
    }

    /// What lasts: everything that was seen of a frontend until nothing more is refused for a while.
    pub(crate) fn current(&mut self, now: i64) -> Vec<Exhausted> {
        let mut last: BTreeMap<_, i64> = BTreeMap::new();
        for (known, &seen) in &self.known {
            let group = last.entry(known.group()).or_insert(seen);
            *group = seen.max(*group);
        }
        let over: Vec<Exhausted> = self
            .known
            .keys()
            .filter(|known| last.get(&known.group()).is_none_or(|last| now - last > QUIET))
            .cloned()
            .collect();
        for known in &over {
            self.known.remove(known);
        }
        self.known.keys().cloned().collect()
    }
}

/// The backends of a frontend whose ports are used up; or, if that is true of none (then `false`), the one that has the fewest left.
fn exhausted(
    plan: &Plan,
    address: &FrontendAddress,
    frontend: &FrontendPlan,
    used: &PortsUsed,
) -> (bool, Vec<Exhausted>) {
    let (Some(snat), Some(tenant)) = (frontend.snat, plan.tenants.get(&frontend.tenant)) else {
        return (false, Vec::new());
    };
    let (first, last) = frontend.snat_ports;
    let ports = u32::from(last.saturating_sub(first)) + 1;
    let mut fullest: Option<(u32, Exhausted)> = None;
    let mut full = Vec::new();
    let of = |backend: Option<SocketAddr>, node: Option<Arc<str>>| Exhausted {
        tenant: tenant.name.clone(),
        service: frontend.service.clone(),
        frontend: frontend.name.clone(),
        vip: SocketAddr::new(address.vip, address.port),
        protocol: address.protocol,
        snat,
        backend,
        node,
    };
    for backend in frontend.backends.iter().filter(|backend| backend.serving) {
        let Some(segment) = plan.backends.get(&backend.id).map(|backend| backend.segment) else { continue };
        let socket = SocketAddr::new(backend.address, frontend.port_of(backend));
        let towards = Towards { protocol: address.protocol.number(), snat, segment, backend: socket };
        let count = used.get(&towards).copied().unwrap_or_default();
        let found = of(Some(socket), backend.node.clone());
        // Some may have ended since they were wanted.
        if u64::from(count) * 10 >= u64::from(ports) * 9 {
            full.push(found);
        } else if count > fullest.as_ref().map_or(0, |(most, _)| *most) {
            fullest = Some((count, found));
        }
    }
    if full.is_empty() {
        (false, vec![fullest.map_or_else(|| of(None, None), |(_, found)| found)])
    } else {
        (true, full)
    }
}

/// One notice for each Service or frontend of the file.
pub(crate) fn notices(all: &[Exhausted]) -> Vec<Notice> {
    let mut groups: BTreeMap<_, Vec<&Exhausted>> = BTreeMap::new();
    for one in all {
        groups.entry(one.group()).or_default().push(one);
    }
    let mut notices = Vec::new();
    let mut told: BTreeMap<&str, usize> = BTreeMap::new();
    for ((tenant, service, _), group) in groups {
        let count = told.entry(tenant).or_default();
        *count += 1;
        let (service, message) = if *count <= SERVICES {
            (service.cloned(), message(&group))
        } else if *count == SERVICES + 1 {
            (None, "no SNAT port is left for more frontends than are told one by one: see `lbctl services`".to_owned())
        } else {
            continue;
        };
        notices.push(Notice { reason: "SnatExhausted", service, tenant: Some(tenant.to_owned()), message });
    }
    notices
}

/// Without numbers that change from moment to moment.
fn message(group: &[&Exhausted]) -> String {
    let vips = list(group.iter().map(|one| format!("{}/{}", one.vip, one.protocol.as_str())));
    let snats = list(group.iter().map(|one| one.snat.to_string()));
    let backends = list(group.iter().filter_map(|one| {
        let backend = one.backend?;
        Some(one.node.as_ref().map_or_else(|| backend.to_string(), |node| format!("{backend} (node {node})")))
    }));
    let towards = if backends.is_empty() { "its backends" } else { &backends };
    format!(
        "no SNAT port of {snats} is left towards {towards}: new connections to {vips} are refused; widen snat_ports, give tenant or \
         frontend a SNAT address of its own, or add backends"
    )
}

/// Each once, in order, and not too many.
fn list(items: impl Iterator<Item = String>) -> String {
    let all: BTreeSet<String> = items.collect();
    let more = if all.len() > NAMED { " and more" } else { "" };
    all.into_iter().take(NAMED).collect::<Vec<_>>().join(", ") + more
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::model::{BackendPlan, FrontendBackend, TenantPlan};
    use crate::plan::testing::{frontend_backend, frontend_plan, name};

    const VIPS: [&str; 2] = ["192.0.2.34:6443", "192.0.2.35:443"];

    fn frontend(id: FrontendId, service: Option<&str>, ports: u16) -> FrontendPlan {
        let backend = |id: u16, node: Option<&str>| FrontendBackend {
            node: node.map(Into::into),
            ..frontend_backend(id, IpAddr::from([10, 0, 0, 10 + id as u8]))
        };
        FrontendPlan {
            id,
            service: service.map(name),
            snat_ports: (20_000, 19_999 + ports),
            table: Some(0),
            ..frontend_plan(service.unwrap_or("web"), 30000 + id, &[backend(1, Some("n1")), backend(2, None)])
        }
    }

    /// Frontends 1 (of a Service) and 2 of tenant 1, both to 10.0.0.11 and 10.0.0.12 over 100 ports.
    fn plan() -> Plan {
        let mut plan = Plan::default();
        plan.tenants.insert(1, TenantPlan { name: "a".to_owned(), ..TenantPlan::default() });
        for id in [1, 2] {
            let address = IpAddr::from([10, 0, 0, 10 + id as u8]);
            plan.backends.insert(id, BackendPlan { address, port: 0, segment: 7, node: None, eligible: true });
            let vip: SocketAddr = VIPS[usize::from(id) - 1].parse().unwrap();
            plan.frontends.insert(
                FrontendAddress { segment: 3, vip: vip.ip(), port: vip.port(), protocol: Protocol::Tcp },
                Arc::new(frontend(id, (id == 1).then_some("hcp/api"), 100)),
            );
        }
        plan
    }

    /// Ports in use of frontend 1's target on the backends.
    fn used(counts: [u32; 2]) -> PortsUsed {
        let towards = |last: u8| Towards {
            protocol: 6,
            snat: IpAddr::from([10, 0, 0, 2]),
            segment: 7,
            backend: SocketAddr::new(IpAddr::from([10, 0, 0, last]), 30001),
        };
        [(towards(11), counts[0]), (towards(12), counts[1])].into()
    }

    /// One that has counted nothing yet but knows what there was before.
    fn ready() -> Exhaustion {
        let mut exhaustion = Exhaustion::default();
        assert_eq!(exhaustion.wants_look(0), Some(false), "what was before is no news");
        exhaustion.counted([(1, 500)].into());
        exhaustion.looked(Look { refused: [(1, 400), (2, 100)].into(), used: PortsUsed::new() }, &plan(), 0);
        assert_eq!(exhaustion.wants_look(1), None);
        exhaustion
    }

    fn look(refused: [u64; 2], counts: [u32; 2]) -> Look {
        Look { refused: [(1, refused[0]), (2, refused[1])].into(), used: used(counts) }
    }

    #[test]
    fn a41_the_vip_and_the_node_without_ports_are_named() {
        let mut exhaustion = ready();
        exhaustion.counted([(1, 501)].into());
        assert_eq!(exhaustion.wants_look(1), Some(true));
        // Frontend 2 is refused connections, too, but not for want of ports.
        exhaustion.looked(look([401, 101], [100, 30]), &plan(), 1);
        let told = notices(&exhaustion.current(1));
        assert_eq!(
            told,
            [Notice {
                reason: "SnatExhausted",
                service: Some(name("hcp/api")),
                tenant: Some("a".to_owned()),
                message: "no SNAT port of 10.0.0.2 is left towards 10.0.0.11:30001 (node n1): new connections to \
                          192.0.2.34:6443/TCP are refused; widen snat_ports, give tenant or frontend a SNAT address of its own, or \
                          add backends"
                    .to_owned(),
            }]
        );
        // The same again is the same notice, and the tables are not looked at all the time.
        exhaustion.counted([(1, 502)].into());
        assert_eq!((exhaustion.wants_look(2), exhaustion.wants_look(1 + PAUSE)), (None, Some(true)));
        exhaustion.looked(look([402, 101], [99, 31]), &plan(), 6);
        assert_eq!(notices(&exhaustion.current(6)), told);
    }

    #[test]
    fn a41_it_ends_when_nothing_more_is_refused_for_a_while() {
        let mut exhaustion = ready();
        exhaustion.counted([(1, 501)].into());
        exhaustion.looked(look([401, 100], [100, 30]), &plan(), 10);
        exhaustion.counted([(1, 501)].into());
        assert_eq!(exhaustion.wants_look(50), None);
        assert_eq!(exhaustion.current(10 + QUIET).len(), 1);
        assert!(exhaustion.current(11 + QUIET).is_empty());
        // What grows on one backend keeps what was said of the other: the text does not come and go.
        exhaustion.counted([(1, 502)].into());
        exhaustion.looked(look([402, 100], [100, 100]), &plan(), 100);
        exhaustion.counted([(1, 503)].into());
        exhaustion.looked(look([403, 100], [20, 100]), &plan(), 150);
        assert_eq!(exhaustion.current(11 + 100 + QUIET).len(), 2);
        // Maps made anew begin at zero.
        exhaustion.counted([(1, 3)].into());
        assert_eq!(exhaustion.wants_look(500), None);
    }

    #[test]
    fn without_a_backend_that_is_surely_full_the_fullest_is_named() {
        let mut exhaustion = ready();
        exhaustion.counted([(1, 501)].into());
        exhaustion.looked(look([401, 100], [20, 60]), &plan(), 1);
        let current = exhaustion.current(1);
        assert_eq!(current.iter().map(|one| one.backend).collect::<Vec<_>>(), ["10.0.0.12:30001".parse().ok()]);
        let mut exhaustion = ready();
        exhaustion.counted([(1, 501)].into());
        exhaustion.looked(look([401, 100], [0, 0]), &plan(), 1);
        let told = notices(&exhaustion.current(1));
        assert!(told[0].message.contains("towards its backends:"), "{told:?}");
    }

    #[test]
    fn other_tenants_and_many_frontends() {
        let mut exhaustion = ready();
        // Tenant 2 has run out; frontend 1 is refused connections, for another reason.
        exhaustion.counted([(1, 500), (2, 9)].into());
        exhaustion.looked(look([401, 101], [100, 100]), &plan(), 1);
        assert!(exhaustion.current(1).is_empty());
        let one = Exhausted {
            tenant: "a".to_owned(),
            service: None,
            frontend: String::new(),
            vip: VIPS[0].parse().unwrap(),
            protocol: Protocol::Udp,
            snat: IpAddr::from([10, 0, 0, 2]),
            backend: None,
            node: None,
        };
        let many: Vec<_> = (0..100).map(|number| Exhausted { frontend: number.to_string(), ..one.clone() }).collect();
        assert_eq!(notices(&many).len(), SERVICES + 1);
        let vips: Vec<_> =
            (1..100).map(|port| Exhausted { vip: SocketAddr::new(one.vip.ip(), port), ..one.clone() }).collect();
        let told = notices(&vips);
        assert!(told.len() == 1 && told[0].message.contains(" and more are refused"), "{told:?}");
    }
}
