//! Pure: when to ask the kernel to resolve a neighbour.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::claims::Place;
use super::netlink::Neighbours;

/// Between attempts at first, for so many attempts, and then.
const SOON: Duration = Duration::from_secs(1);
const SOON_ATTEMPTS: u32 = 10;
const LATER: Duration = Duration::from_secs(5);
/// How often the kernel is made to look again after a neighbour that it does not keep fresh itself (before 5.16).
const FRESHEN: Duration = Duration::from_secs(30);

/// `ip neigh flush` goes over the table until it finds nothing, and gives up with an error if entries come back at once.
const AFTER_FLUSH: Duration = Duration::from_millis(150);

/// Attempts that were made.
#[derive(Default)]
pub(super) struct Resolver {
    tried: BTreeMap<Place, (Instant, u32)>,
}

impl Resolver {
    /// The neighbours to resolve now.
    pub(super) fn due(&mut self, wanted: &BTreeSet<Place>, neighbours: &Neighbours, now: Instant) -> Vec<Place> {
        self.tried.retain(|place, _| wanted.contains(place));
        let mut due = Vec::new();
        for &place in wanted {
            let neighbour = neighbours.get(&place).copied().unwrap_or_default();
            if neighbour.permanent || (neighbour.valid && neighbour.managed) {
                // Forgotten, so that it is tried at once when the entry is flushed.
                self.tried.remove(&place);
                continue;
            }
            let (next, attempts) = self.tried.get(&place).copied().unwrap_or((now, 0));
            if next <= now {
                let pause = match (neighbour.valid, attempts) {
                    (true, _) => FRESHEN,
                    (false, attempts) if attempts < SOON_ATTEMPTS => SOON,
                    (false, _) => LATER,
                };
                self.tried.insert(place, (now + pause, attempts.saturating_add(1)));
                due.push(place);
            }
        }
        due
    }

    /// The entry is gone: try soon, but let whoever flushes the table finish.
    pub(super) fn gone(&mut self, place: Place, now: Instant) {
        self.tried.insert(place, (now + AFTER_FLUSH, 0));
    }

    /// When something is due next.
    pub(super) fn next(&self) -> Option<Instant> {
        self.tried.values().map(|&(next, _)| next).min()
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::super::netlink::Neighbour;
    use super::*;

    const NODE: Place = Place { interface: 8, vlan: 0, address: IpAddr::V4(Ipv4Addr::new(10, 0, 0, 11)) };

    #[test]
    fn silent_neighbours_are_asked_for_often_then_seldom() {
        let (mut resolver, wanted, start) = (Resolver::default(), BTreeSet::from([NODE]), Instant::now());
        let mut asked = Vec::new();
        for tenth in 0..300 {
            let now = start + Duration::from_millis(tenth * 100);
            if !resolver.due(&wanted, &Neighbours::new(), now).is_empty() {
                asked.push(tenth / 10);
            }
        }
        assert_eq!(asked, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 15, 20, 25]);
    }

    #[test]
    fn managed_neighbours_are_left_alone_until_they_are_flushed() {
        let (mut resolver, wanted, now) = (Resolver::default(), BTreeSet::from([NODE]), Instant::now());
        let good = Neighbour { mac: Some([1; 6]), valid: true, managed: true, ours: true, permanent: false };
        let table = Neighbours::from([(NODE, good)]);
        assert_eq!(resolver.due(&wanted, &Neighbours::new(), now), [NODE]);
        assert!(resolver.due(&wanted, &table, now).is_empty());
        resolver.gone(NODE, now);
        assert!(resolver.due(&wanted, &Neighbours::new(), now).is_empty());
        assert_eq!(resolver.next(), Some(now + AFTER_FLUSH));
        assert_eq!(resolver.due(&wanted, &Neighbours::new(), now + AFTER_FLUSH), [NODE]);
    }

    #[test]
    fn static_entries_are_never_touched_and_others_are_kept_fresh() {
        let (mut resolver, wanted, now) = (Resolver::default(), BTreeSet::from([NODE]), Instant::now());
        let fixed = Neighbour { mac: Some([1; 6]), valid: true, permanent: true, ..Neighbour::default() };
        assert!(resolver.due(&wanted, &Neighbours::from([(NODE, fixed)]), now).is_empty());
        let stale = Neighbours::from([(NODE, Neighbour { permanent: false, ..fixed })]);
        assert_eq!(resolver.due(&wanted, &stale, now), [NODE]);
        assert!(resolver.due(&wanted, &stale, now + Duration::from_secs(29)).is_empty());
        assert_eq!(resolver.due(&wanted, &stale, now + FRESHEN), [NODE]);
    }
}
