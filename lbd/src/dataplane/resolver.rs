//! Pure: when to resolve a neighbour, by the kernel or, in a VLAN that it has no interface for, by asking ourselves.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::arp::Heard;
use super::claims::Place;
use super::netlink::{Neighbour, Neighbours};

/// Between attempts at first, for so many attempts, and then.
const SOON: Duration = Duration::from_secs(1);
const SOON_ATTEMPTS: u32 = 10;
const LATER: Duration = Duration::from_secs(5);
/// How often the kernel is made to look again after a neighbour that it does not keep fresh itself (before 5.16).
const FRESHEN: Duration = Duration::from_secs(30);

/// `ip neigh flush` goes over the table until it finds nothing, and gives up with an error if entries come back at once.
const AFTER_FLUSH: Duration = Duration::from_millis(150);

/// How long a neighbour may take to answer us.
const ANSWER: Duration = Duration::from_secs(3);
/// Neighbours that we ask for ourselves at a time: the next ones follow 10 ms later.
const AT_A_TIME: usize = 8;

/// Attempts that were made.
#[derive(Default)]
pub(super) struct Resolver {
    tried: BTreeMap<Place, (Instant, u32)>,
}

impl Resolver {
    /// The neighbours to resolve now.
    pub(super) fn due(&mut self, wanted: &BTreeSet<Place>, neighbours: &Neighbours, now: Instant) -> Vec<Place> {
        self.some_due(wanted, neighbours, now, usize::MAX)
    }

    fn some_due(
        &mut self,
        wanted: &BTreeSet<Place>,
        neighbours: &Neighbours,
        now: Instant,
        limit: usize,
    ) -> Vec<Place> {
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
            if next <= now && due.len() < limit {
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

/// Neighbours in VLANs that the kernel has no interface for.
#[derive(Default)]
pub(super) struct Asker {
    resolver: Resolver,
    /// Since when there is no answer.
    waiting: BTreeMap<Place, Instant>,
}

impl Asker {
    /// The neighbours to ask for now.
    pub(super) fn due(&mut self, wanted: &BTreeSet<Place>, neighbours: &Neighbours, now: Instant) -> Vec<Place> {
        self.waiting.retain(|place, _| wanted.contains(place));
        // One that was never due is, so that `next` knows of it when only some are asked for at a time.
        for &place in wanted {
            self.resolver.tried.entry(place).or_insert((now, 0));
        }
        let due = self.resolver.some_due(wanted, neighbours, now, AT_A_TIME);
        for &place in &due {
            self.waiting.entry(place).or_insert(now);
        }
        due
    }

    /// Somebody says where it is. Returns what is known now, if the neighbour is wanted and to be believed.
    pub(super) fn heard(
        &mut self,
        place: Place,
        heard: &Heard,
        known: Option<&Neighbour>,
        now: Instant,
    ) -> Option<Neighbour> {
        let other = known.is_some_and(|known| known.valid && known.mac.is_some_and(|mac| mac != heard.mac));
        // Neither a group nor nobody; and an answer that does not override changes nothing (RFC 4861 §7.2.5).
        if heard.mac[0] & 1 != 0 || heard.mac == [0; 6] || (other && !heard.overrides) {
            return None;
        }
        self.waiting.remove(&place);
        self.resolver.tried.insert(place, (now + FRESHEN, 0));
        Some(Neighbour { mac: Some(heard.mac), valid: true, ..Neighbour::default() })
    }

    /// Neighbours that have not answered in time: they are asked for more often, and their last MAC stays in use.
    pub(super) fn silent(&mut self, now: Instant) -> Vec<Place> {
        let silent: Vec<Place> =
            self.waiting.iter().filter(|(_, since)| now.duration_since(**since) >= ANSWER).map(|(&at, _)| at).collect();
        for place in &silent {
            self.waiting.remove(place);
            if let Some((next, _)) = self.resolver.tried.get_mut(place) {
                *next = (*next).min(now + SOON);
            }
        }
        silent
    }

    /// When something is due next.
    pub(super) fn next(&self) -> Option<Instant> {
        let answers = self.waiting.values().map(|&since| since + ANSWER);
        self.resolver.next().into_iter().chain(answers).min()
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

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

    const TAGGED: Place = Place { interface: 7, vlan: 2003, address: IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)) };

    fn answer(mac: [u8; 6]) -> Heard {
        Heard { mac, sender: TAGGED.address, target: TAGGED.address, request: false, overrides: true }
    }

    /// Asks for so long; `answers` says whether the neighbour does.
    fn ask(asker: &mut Asker, table: &mut Neighbours, from: Instant, seconds: u64, answers: bool) -> Vec<u64> {
        let mut asked = Vec::new();
        for tenth in 0..seconds * 10 {
            let now = from + Duration::from_millis(tenth * 100);
            for place in asker.silent(now) {
                table.entry(place).or_default().valid = false;
            }
            if !asker.due(&BTreeSet::from([TAGGED]), table, now).is_empty() {
                asked.push(tenth / 10);
                if answers && let Some(known) = asker.heard(TAGGED, &answer([2; 6]), table.get(&TAGGED), now) {
                    table.insert(TAGGED, known);
                }
            }
        }
        asked
    }

    #[test]
    fn a_tagged_neighbour_is_asked_for_every_30_s_and_keeps_its_mac_when_it_falls_silent() {
        let (mut asker, mut table, start) = (Asker::default(), Neighbours::new(), Instant::now());
        assert_eq!(ask(&mut asker, &mut table, start, 61, true), [0, 30, 60]);
        assert_eq!(table[&TAGGED], Neighbour { mac: Some([2; 6]), valid: true, ..Neighbour::default() });
        let later = start + Duration::from_secs(90);
        assert_eq!(ask(&mut asker, &mut table, later, 10, false)[..4], [0, 4, 5, 6]);
        assert_eq!(table[&TAGGED], Neighbour { mac: Some([2; 6]), ..Neighbour::default() });
        // Back again.
        assert_eq!(ask(&mut asker, &mut table, later + Duration::from_secs(100), 31, true), [0, 30]);
        assert!(table[&TAGGED].valid);
    }

    #[test]
    fn a_move_is_believed_at_once_unless_it_overrides_nothing() {
        let (mut asker, now) = (Asker::default(), Instant::now());
        let known = Neighbour { mac: Some([2; 6]), valid: true, ..Neighbour::default() };
        let moved = asker.heard(TAGGED, &answer([4; 6]), Some(&known), now).unwrap();
        assert_eq!(moved.mac, Some([4; 6]));
        let proxy = Heard { overrides: false, ..answer([4; 6]) };
        assert_eq!(asker.heard(TAGGED, &proxy, Some(&known), now), None);
        let silent = Neighbour { valid: false, ..known };
        assert_eq!(asker.heard(TAGGED, &proxy, Some(&silent), now), Some(moved));
        for mac in [[0xff; 6], [0; 6], [1, 0, 0x5e, 0, 0, 1]] {
            assert_eq!(asker.heard(TAGGED, &answer(mac), None, now), None);
        }
    }

    #[test]
    fn a_few_tagged_neighbours_are_asked_for_at_a_time() {
        let place = |last: u8| Place { address: IpAddr::from([192, 0, 2, last]), ..TAGGED };
        let (mut asker, now) = (Asker::default(), Instant::now());
        let wanted: BTreeSet<Place> = (1..=20).map(place).collect();
        let asked: Vec<usize> = (0..4).map(|_| asker.due(&wanted, &Neighbours::new(), now).len()).collect();
        assert_eq!(asked, [8, 8, 4, 0]);
        assert_eq!(asker.next(), Some(now + SOON));
        asker.due(&BTreeSet::new(), &Neighbours::new(), now);
        assert_eq!(asker.next(), None);
    }
}
