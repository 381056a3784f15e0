//! Pure: what the rest of lbd is told of the host's interfaces while these come and go.
//!
//! An interface that is away, or that a network service has taken the addresses from to give them back, is no reason to change
//! what is planned: new connections would be refused and settings lost for a moment that often is all it takes.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use ipnet::IpNet;

use crate::plan::model::{HostFacts, InterfaceFacts};

/// How long addresses, gateways and routes are believed in that the kernel does not have any more, if it has no others instead.
const HOLD: Duration = Duration::from_secs(10);

/// What is being held, by interface and family (IPv6).
#[derive(Default)]
pub(super) struct Steady {
    told: HostFacts,
    addresses: BTreeMap<(String, bool), Instant>,
    gateways: BTreeMap<(String, bool), Instant>,
    routes: BTreeMap<(String, bool), Instant>,
}

impl Steady {
    /// Starts from what was told.
    pub(super) fn new(told: HostFacts) -> Self {
        Self { told, ..Self::default() }
    }

    /// What to tell. `attached`: the interfaces that lbd serves, with the index that the program is attached to.
    pub(super) fn tell(&mut self, mut facts: HostFacts, attached: &BTreeMap<&str, u32>, now: Instant) -> &HostFacts {
        for (&name, &index) in attached {
            let Some(old) = self.told.interfaces.get(name).cloned() else { continue };
            let found = facts.interfaces.get(name).or_else(|| {
                // Renamed: the program is where it was.
                facts.interfaces.values().find(|interface| interface.index == index)
            });
            let mut new = match found {
                Some(found) => found.clone(),
                None => InterfaceFacts { up: false, ..old.clone() },
            };
            if found.is_some() {
                for six in [false, true] {
                    self.hold(name, six, &old, &mut new, now);
                }
            }
            facts.interfaces.insert(name.to_owned(), new);
        }
        self.told = facts;
        &self.told
    }

    fn hold(&mut self, name: &str, six: bool, old: &InterfaceFacts, new: &mut InterfaceFacts, now: Instant) {
        let key = (name.to_owned(), six);
        let of = |address: &&IpNet| matches!(address.addr(), IpAddr::V6(_)) == six;
        let lost =
            old.addresses.iter().any(|address| of(&address)) && !new.addresses.iter().any(|address| of(&address));
        if held(&mut self.addresses, &key, lost, now) {
            new.addresses.extend(old.addresses.iter().filter(of));
            new.all_addresses.extend(old.addresses.iter().filter(of));
        }
        let of = |gateway: &&IpAddr| gateway.is_ipv6() == six;
        let lost = old.gateways.iter().any(|gateway| of(&gateway)) && !new.gateways.iter().any(|gateway| of(&gateway));
        if held(&mut self.gateways, &key, lost, now) {
            new.gateways.extend(old.gateways.iter().filter(of));
        }
        let of = |network: &IpNet| matches!(network, IpNet::V6(_)) == six;
        let lost = old.routes.keys().any(of) && !new.routes.keys().any(of);
        if held(&mut self.routes, &key, lost, now) {
            new.routes.extend(old.routes.iter().filter(|(network, _)| of(network)));
        }
    }

    /// When to look again, because something is held no longer.
    pub(super) fn next(&self) -> Option<Instant> {
        self.addresses.values().chain(self.gateways.values()).chain(self.routes.values()).min().copied()
    }
}

/// Whether what is lost is still believed in.
fn held(until: &mut BTreeMap<(String, bool), Instant>, key: &(String, bool), lost: bool, now: Instant) -> bool {
    let hold = lost && *until.entry(key.clone()).or_insert(now + HOLD) > now;
    if !hold {
        until.remove(key);
    }
    hold
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(index: u32, addresses: &[&str], gateways: &[&str]) -> InterfaceFacts {
        let addresses: Vec<IpNet> = addresses.iter().map(|text| text.parse().unwrap()).collect();
        InterfaceFacts {
            index,
            mtu: 1500,
            up: true,
            all_addresses: addresses.clone(),
            addresses,
            gateways: gateways.iter().map(|text| text.parse().unwrap()).collect(),
            ..InterfaceFacts::default()
        }
    }

    fn facts(name: &str, interface: &InterfaceFacts) -> HostFacts {
        HostFacts { interfaces: [(name.to_owned(), interface.clone())].into() }
    }

    #[test]
    fn addresses_that_come_back_were_never_away() {
        let full = interface(7, &["192.0.2.2/24", "2001:db8::2/64"], &["192.0.2.1", "fe80::1"]);
        let (attached, now) = (BTreeMap::from([("ten0", 7)]), Instant::now());
        let mut steady = Steady::new(facts("ten0", &full));
        let bare = facts("ten0", &interface(7, &[], &[]));
        assert_eq!(*steady.tell(bare.clone(), &attached, now), facts("ten0", &full));
        assert_eq!(steady.next(), Some(now + HOLD));
        assert_eq!(*steady.tell(bare.clone(), &attached, now + Duration::from_secs(9)), facts("ten0", &full));
        assert_eq!(*steady.tell(facts("ten0", &full), &attached, now + Duration::from_secs(9)), facts("ten0", &full));
        assert_eq!(steady.next(), None);
        // For good, this time.
        let later = now + Duration::from_secs(20);
        steady.tell(bare.clone(), &attached, later);
        assert_eq!(*steady.tell(bare.clone(), &attached, later + HOLD), bare);
        assert_eq!(steady.next(), None);
    }

    #[test]
    fn another_address_or_gateway_counts_at_once_and_families_are_apart() {
        let (attached, now) = (BTreeMap::from([("ten0", 7)]), Instant::now());
        let old = interface(7, &["192.0.2.2/24", "2001:db8::2/64"], &["192.0.2.1"]);
        let mut steady = Steady::new(facts("ten0", &old));
        let told = steady.tell(facts("ten0", &interface(7, &["192.0.2.3/24"], &["192.0.2.9"])), &attached, now);
        let wanted = interface(7, &["192.0.2.3/24", "2001:db8::2/64"], &["192.0.2.9"]);
        assert_eq!(*told, facts("ten0", &wanted));
    }

    #[test]
    fn an_interface_that_is_away_keeps_everything_but_is_down() {
        let (attached, now) = (BTreeMap::from([("ten0", 7)]), Instant::now());
        let full = interface(7, &["192.0.2.2/24"], &["192.0.2.1"]);
        let mut steady = Steady::new(facts("ten0", &full));
        let down = InterfaceFacts { up: false, ..full.clone() };
        assert_eq!(*steady.tell(HostFacts::default(), &attached, now), facts("ten0", &down));
        // Made anew, without addresses at first.
        let told = steady.tell(facts("ten0", &interface(12, &[], &[])), &attached, now + Duration::from_mins(1));
        assert_eq!(*told, facts("ten0", &InterfaceFacts { index: 12, ..full }));
        // One that lbd does not serve may go.
        let mut steady = Steady::new(facts("eth9", &interface(9, &[], &[])));
        assert_eq!(*steady.tell(HostFacts::default(), &attached, now), HostFacts::default());
    }

    #[test]
    fn a_renamed_interface_is_still_known_by_its_old_name() {
        let (attached, now) = (BTreeMap::from([("ten0", 7)]), Instant::now());
        let full = interface(7, &["192.0.2.2/24"], &[]);
        let mut steady = Steady::new(facts("ten0", &full));
        let told = steady.tell(facts("lan0", &full), &attached, now);
        assert_eq!((&told.interfaces["ten0"], &told.interfaces["lan0"]), (&full, &full));
        // Another one has the name now: that one is meant.
        let mut both = facts("lan0", &full);
        both.interfaces.insert("ten0".to_owned(), interface(8, &["192.0.2.7/24"], &[]));
        assert_eq!(steady.tell(both, &attached, now).interfaces["ten0"].index, 8);
    }
}
