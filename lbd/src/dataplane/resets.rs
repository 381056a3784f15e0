//! Pure: which flows a reset means.

use lbd_common::abi::{Address, Flow};

use crate::plan::model::{Plan, Reset};

/// Whether the flow with this forward half, whose backend lives in `backend_segment`, is meant.
pub(super) fn matches<A: Address>(reset: &Reset, forward: &Flow<A>, backend_segment: u16) -> bool {
    let destination = forward.to.destination();
    match reset {
        Reset::Frontend(id) => forward.frontend == *id,
        Reset::Backend { frontend, backend } => forward.frontend == *frontend && forward.backend() == *backend,
        Reset::Address(segment, address) => backend_segment == *segment && destination.ip() == *address,
        Reset::Source(segment, address) => backend_segment == *segment && forward.to.source().ip() == *address,
        Reset::Target { segment, protocol, address, port, keep } => {
            backend_segment == *segment
                && forward.protocol() == *protocol
                && destination.port() == *port
                && address.is_none_or(|address| destination.ip() == address)
                && !keep.contains(&forward.frontend)
        }
    }
}

/// Whether the reset still makes sense under a plan: connections that were half-open when it was applied may finish their handshake
/// later, so it is applied once more after the half-open timeout.
pub(super) fn still_meant(reset: &Reset, plan: &Plan) -> bool {
    match reset {
        Reset::Frontend(id) => plan.frontends.values().all(|frontend| frontend.id != *id),
        // A backend that comes back in the meantime may have new connections.
        Reset::Backend { .. } => plan.resets.contains(reset),
        Reset::Address(segment, address) => {
            plan.backends.values().all(|backend| backend.segment != *segment || backend.address != *address)
        }
        Reset::Source(segment, address) => {
            let known = plan.addresses.get(&(*segment, *address));
            !known.is_some_and(|known| known.snat.is_some() || known.host)
        }
        // Nobody's that we know: as long as it is none of ours again.
        Reset::Target { keep, port, protocol, .. } if keep.is_empty() => plan
            .frontends
            .iter()
            .all(|(address, frontend)| frontend.target_port != *port || address.protocol.number() != *protocol),
        Reset::Target { keep, .. } => plan.frontends.values().any(|frontend| keep.contains(&frontend.id)),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::net::{IpAddr, Ipv4Addr};

    use lbd_common::abi::{FLOW_UDP, Flow4, Tuple4};

    use super::*;

    fn flow(frontend: u16, backend: u16, address: [u8; 4], port: u16) -> Flow4 {
        let to = Tuple4::new((Ipv4Addr::new(10, 0, 0, 2), 2000), (Ipv4Addr::from(address), port));
        Flow4 { to, frontend, own: Flow4::forward_own(0, backend), ..Flow4::ZERO }
    }

    #[test]
    fn flows_of_ipv6_and_of_udp_are_meant_like_others() {
        use std::net::Ipv6Addr;

        use lbd_common::abi::{Flow6, Tuple6};

        let address = Ipv6Addr::new(0x2001, 0xdb8, 0xf, 0, 0, 0, 0, 0x105);
        let to = Tuple6::new((Ipv6Addr::LOCALHOST, 2000), (address, 30053));
        let forward = Flow6 { to, frontend: 7, own: Flow6::forward_own(0, 3), state: FLOW_UDP, ..Flow6::ZERO };
        let hit = |reset: &Reset| matches(reset, &forward, 2);
        assert!(hit(&Reset::Address(2, address.into())) && !hit(&Reset::Address(1, address.into())));
        assert!(hit(&Reset::Backend { frontend: 7, backend: 3 }));
        let source = |segment, source: Ipv6Addr| Reset::Source(segment, source.into());
        assert!(hit(&source(2, Ipv6Addr::LOCALHOST)));
        assert!(!hit(&source(1, Ipv6Addr::LOCALHOST)) && !hit(&source(2, address)));
        let target =
            |protocol| Reset::Target { segment: 2, protocol, address: None, port: 30053, keep: BTreeSet::new() };
        assert!(hit(&target(17)) && !hit(&target(6)));
    }

    #[test]
    fn each_reset_means_its_flows_only() {
        let forward = flow(7, 3, [10, 0, 0, 11], 30918);
        let hit = |reset: &Reset| matches(reset, &forward, 2);
        assert!(hit(&Reset::Frontend(7)) && !hit(&Reset::Frontend(8)));
        assert!(hit(&Reset::Backend { frontend: 7, backend: 3 }) && !hit(&Reset::Backend { frontend: 7, backend: 4 }));
        let address = IpAddr::from([10, 0, 0, 11]);
        assert!(hit(&Reset::Address(2, address)) && !hit(&Reset::Address(1, address)));
        let target = |address, port, keep: u16| Reset::Target {
            segment: 2,
            protocol: 6,
            address,
            port,
            keep: BTreeSet::from([keep]),
        };
        assert!(hit(&target(None, 30918, 8)) && hit(&target(Some(address), 30918, 8)));
        assert!(!hit(&target(None, 30918, 7)) && !hit(&target(None, 30919, 8)));
        assert!(!hit(&target(Some(IpAddr::from([10, 0, 0, 12])), 30918, 8)));
    }

    #[test]
    fn a_frontend_that_is_back_is_not_reset_again() {
        assert!(still_meant(&Reset::Frontend(7), &Plan::default()));
        assert!(!still_meant(&Reset::Backend { frontend: 7, backend: 3 }, &Plan::default()));
    }
}
