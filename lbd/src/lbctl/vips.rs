//! The addresses of tenants as the maps and the agent's files tell them: what is left when the agent is down.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;

use lbd_common::abi::{self, AddressKey, Frontend, LocalAddress, Segment};

use crate::api::types::{Names, TenantVips, Vip, vip_state};
use crate::flows::{Directory, unmap};
use crate::ipam::{RESERVED, Record};

/// The addresses given out, from the agent's state directory; none if there is no such file or it can't be read.
pub(super) fn record_on_disk(state_dir: &Path) -> Record {
    let bytes = std::fs::read(state_dir.join(crate::agent::state::ADDRESSES)).unwrap_or_default();
    serde_json::from_slice(&bytes).unwrap_or_default()
}

/// VIPs by tenant, with what uses them. `now` is in seconds since the epoch.
pub(super) fn from_maps(
    names: &Names,
    addresses: &[(AddressKey, LocalAddress)],
    segments: &BTreeMap<u32, Segment>,
    frontends: &[Frontend],
    record: &Record,
    now: i64,
) -> Vec<TenantVips> {
    let directory = Directory::new(names, frontends);
    let tenant_name = |index: u16| names.tenants.get(&index).cloned().unwrap_or_else(|| format!("#{index}"));
    let mut users: BTreeMap<(u16, [u8; 16]), BTreeSet<String>> = BTreeMap::new();
    for frontend in frontends {
        let label = directory
            .frontends
            .get(&frontend.id)
            .map_or_else(|| format!("#{}", frontend.id), |names| names.service.clone());
        users.entry((frontend.segment, frontend.vip)).or_default().insert(label);
    }
    // By tenant: its segment, and its addresses.
    let mut tenants: BTreeMap<String, (Option<u16>, BTreeMap<IpAddr, Vip>)> = BTreeMap::new();
    for (key, local) in addresses.iter().filter(|(_, local)| local.flags & abi::ADDRESS_VIP != 0) {
        let answered = local.flags & abi::ADDRESS_ANSWER != 0;
        let vip = Vip {
            address: unmap(&key.address),
            state: if answered { vip_state::USED } else { vip_state::UNANSWERED }.to_owned(),
            services: users.get(&(key.segment, key.address)).into_iter().flatten().cloned().collect(),
            mac: None,
            until_s: None,
        };
        let (segment, vips) = tenants.entry(tenant_name(local.tenant)).or_default();
        *segment = Some(key.segment);
        vips.insert(vip.address, vip);
    }
    for entry in &record.entries {
        let until_s =
            entry.freed.map(|freed| u64::try_from(freed.saturating_add(RESERVED).saturating_sub(now)).unwrap_or(0));
        let (_, vips) = tenants.entry(entry.tenant.clone()).or_default();
        let service = entry.service.to_string();
        let vip = vips.entry(entry.address).or_insert_with(|| Vip {
            address: entry.address,
            state: if entry.freed.is_none() { vip_state::USED } else { vip_state::RESERVED }.to_owned(),
            services: Vec::new(),
            mac: None,
            until_s,
        });
        if entry.freed.is_none() == (vip.state != vip_state::RESERVED) && !vip.services.contains(&service) {
            vip.services.push(service);
        }
    }
    tenants
        .into_iter()
        .map(|(tenant, (segment, vips))| {
            let label = segment.and_then(|segment| names.segments.get(&segment));
            let vlan =
                segment.and_then(|id| segments.values().find(|segment| segment.id == id)).map(|segment| segment.vlan);
            TenantVips {
                tenant,
                interface: label.map_or_else(|| "?".to_owned(), |label| label.interface.clone()),
                vlan: vlan.or(label.map(|label| label.vlan)).unwrap_or_default(),
                addresses: vips.into_values().collect(),
                ..TenantVips::default()
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::*;
    use crate::api::types::{FrontendLabel, SegmentLabel};
    use crate::ipam::Entry;
    use crate::source::ObjectName;

    #[test]
    fn without_an_agent_maps_and_files_tell() {
        let names = Names {
            segments: [(2, SegmentLabel { interface: "eth1".to_owned(), vlan: 2003, ..SegmentLabel::default() })]
                .into(),
            tenants: [(1, "a".to_owned())].into(),
            frontends: [(5, FrontendLabel { name: "web".to_owned(), service: None, tenant: 1 })].into(),
            ..Names::default()
        };
        let vip = abi::mapped([192, 0, 2, 34]);
        let vip6 = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0x34).octets();
        let key = |address| AddressKey { address, segment: 2, port_be: 0 };
        let local = |flags| LocalAddress { flags, tenant: 1, ..LocalAddress::ZERO };
        let addresses = [
            (key(vip), local(abi::ADDRESS_VIP | abi::ADDRESS_ANSWER)),
            (key(vip6), local(abi::ADDRESS_VIP)),
            (key(abi::mapped([192, 0, 2, 2])), local(abi::ADDRESS_HOST)),
        ];
        let segments = [(4096, Segment { id: 2, vlan: 2003, ..Segment::ZERO })].into();
        let frontend = Frontend { vip, id: 5, segment: 2, tenant: 1, ..Frontend::ZERO };
        let entry = |last: u8, freed| Entry {
            tenant: "a".to_owned(),
            service: ObjectName::new("ns", format!("s{last}")),
            address: IpAddr::from([192, 0, 2, last]),
            freed,
        };
        let record = Record {
            generation: 1,
            entries: vec![entry(35, Some(100)), entry(36, None), entry(34, Some(100))],
            ..Record::default()
        };
        let found = from_maps(&names, &addresses, &segments, &[frontend], &record, 100 + RESERVED - 7);
        let [tenant] = found.as_slice() else { panic!("{found:?}") };
        assert_eq!(
            (tenant.tenant.as_str(), tenant.interface.as_str(), tenant.vlan, tenant.free),
            ("a", "eth1", 2003, None)
        );
        let told: Vec<_> = tenant
            .addresses
            .iter()
            .map(|vip| (vip.address.to_string(), vip.state.as_str(), vip.services.join(","), vip.until_s))
            .collect();
        let told: Vec<_> = told.iter().map(|told| (told.0.as_str(), told.1, told.2.as_str(), told.3)).collect();
        assert_eq!(
            told,
            [
                ("192.0.2.34", "used", "web", None),
                ("192.0.2.35", "reserved", "ns/s35", Some(7)),
                ("192.0.2.36", "used", "ns/s36", None),
                ("2001:db8::34", "unanswered", "", None),
            ]
        );
    }

    #[test]
    fn what_nobody_has_named_is_a_number() {
        let local = LocalAddress { flags: abi::ADDRESS_VIP | abi::ADDRESS_ANSWER, tenant: 3, ..LocalAddress::ZERO };
        let key = AddressKey { address: abi::mapped([192, 0, 2, 34]), segment: 2, port_be: 0 };
        let found = from_maps(&Names::default(), &[(key, local)], &BTreeMap::new(), &[], &Record::default(), 0);
        assert_eq!((found[0].tenant.as_str(), found[0].interface.as_str(), found[0].vlan), ("#3", "?", 0));
    }
}
