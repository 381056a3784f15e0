//! Pure: whose an address is (RFC 5227, RFC 4862), and when to say so.
//!
//! An address that a frontend needs is asked for three times before it is answered for; if somebody has it, it is asked for again
//! every 5 s until nobody has. Free pool addresses are checked ahead, so that most addresses are known to be free when needed.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::arp::Heard;

/// Probes before an address counts as free.
const PROBES: u8 = 3;
/// Between probes. RFC 5227 asks for 1–2 s, against stations that boot together after a power cut; here an operator waits.
const PROBE_SPACING: Duration = Duration::from_millis(250);
/// Between attempts to get an address that another station has.
const RETRY: Duration = Duration::from_secs(5);
/// Announcements of a new address, and the pause between them.
const ANNOUNCEMENTS: u8 = 3;
const ANNOUNCE_SPACING: Duration = Duration::from_secs(1);
/// How long a rival is remembered after it was last heard.
const REMEMBERED: Duration = Duration::from_mins(1);
/// How long a check ahead of need is believed.
const BELIEVED: Duration = Duration::from_mins(1);
/// At most one defence of an address in this time (RFC 5227 §2.4 (b)).
const DEFEND: Duration = Duration::from_secs(10);

/// An address on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    /// Index of the interface.
    pub(super) interface: u32,
    /// Its VLAN; 0 = untagged.
    pub(super) vlan: u16,
    /// The address.
    pub(super) address: IpAddr,
}

/// What to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// A probe.
    Probe(Place),
    /// Both forms of the announcement.
    Announce(Place),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Being asked for; `holder` is who had it when last asked.
    Probing { sent: u8, next: Instant, holder: Option<[u8; 6]> },
    /// Nobody has it and nobody needs it.
    Free { until: Instant },
    /// Ours.
    Ours { announced: u8, next: Instant, defended: Option<Instant> },
    /// Another station has it.
    Taken { mac: [u8; 6], next: Instant },
}

#[derive(Clone, Copy, Debug)]
struct Claim {
    state: State,
    /// A frontend or SNAT needs it; else it is only checked ahead.
    needed: bool,
    /// Another station has claimed it though it is ours.
    rival: Option<([u8; 6], Instant)>,
}

/// All addresses that lbd has or may want.
pub(super) struct Claims {
    claims: BTreeMap<Place, Claim>,
    /// Between announcements after the first ones.
    interval: Duration,
}

impl Claims {
    pub(super) const fn new(interval: Duration) -> Self {
        Self { claims: BTreeMap::new(), interval }
    }

    /// Announces in another interval: what is due later than that is due then.
    pub(super) fn set_interval(&mut self, interval: Duration, now: Instant) {
        self.interval = interval;
        for claim in self.claims.values_mut() {
            if let State::Ours { next, .. } = &mut claim.state {
                *next = (*next).min(now + interval);
            }
        }
    }

    /// Sets which addresses are needed, and which of the others to check ahead. `kept`: answered for already when this agent started.
    pub(super) fn want(
        &mut self,
        needed: &BTreeSet<Place>,
        ahead: &BTreeSet<Place>,
        kept: &BTreeSet<Place>,
        now: Instant,
    ) {
        self.claims.retain(|place, _| needed.contains(place) || ahead.contains(place));
        for &place in needed.iter().chain(ahead) {
            let need = needed.contains(&place);
            let ours = State::Ours { announced: 0, next: now, defended: None };
            let claim = self.claims.entry(place).or_insert(Claim {
                state: if need && kept.contains(&place) {
                    ours
                } else {
                    State::Probing { sent: 0, next: now, holder: None }
                },
                needed: false,
                rival: None,
            });
            match claim.state {
                State::Ours { .. } if need => {}
                _ if need && kept.contains(&place) => claim.state = ours,
                State::Free { until } if need && until > now => claim.state = ours,
                State::Free { .. } if need => claim.state = State::Probing { sent: 0, next: now, holder: None },
                State::Ours { .. } if !need => claim.state = State::Free { until: now + BELIEVED },
                _ => {}
            }
            claim.needed = need;
        }
    }

    /// What is due. `usable`: whether the interface is up; nothing happens on one that is not.
    pub(super) fn due(&mut self, now: Instant, usable: impl Fn(u32) -> bool) -> Vec<Action> {
        let mut actions = Vec::new();
        for (&place, claim) in self.claims.iter_mut().filter(|(place, _)| usable(place.interface)) {
            claim.rival = claim.rival.filter(|(_, seen)| now.duration_since(*seen) < REMEMBERED);
            match &mut claim.state {
                State::Probing { sent, next, .. } if *next <= now => {
                    if *sent < PROBES {
                        *sent += 1;
                        *next = now + PROBE_SPACING;
                        actions.push(Action::Probe(place));
                    } else if claim.needed {
                        claim.state = State::Ours { announced: 1, next: now + ANNOUNCE_SPACING, defended: None };
                        actions.push(Action::Announce(place));
                    } else {
                        claim.state = State::Free { until: now + BELIEVED };
                    }
                }
                State::Ours { announced, next, .. } if *next <= now => {
                    *announced = announced.saturating_add(1);
                    *next = now + if *announced < ANNOUNCEMENTS { ANNOUNCE_SPACING } else { self.interval };
                    actions.push(Action::Announce(place));
                }
                State::Free { until } if *until <= now => {
                    claim.state = State::Probing { sent: 1, next: now + PROBE_SPACING, holder: None };
                    actions.push(Action::Probe(place));
                }
                State::Taken { next, mac } if *next <= now => {
                    claim.state = State::Probing { sent: 1, next: now + PROBE_SPACING, holder: Some(*mac) };
                    actions.push(Action::Probe(place));
                }
                State::Probing { .. } | State::Ours { .. } | State::Free { .. } | State::Taken { .. } => {}
            }
        }
        actions
    }

    /// An ARP or neighbour discovery packet that did not come from this host.
    pub(super) fn heard(&mut self, interface: u32, vlan: u16, heard: &Heard, now: Instant) -> Option<Action> {
        // Somebody has the address; or asks for it before taking it, while we do the same (RFC 5227 §2.1.1).
        let probing = heard.sender.is_unspecified() && heard.request;
        let address = if probing { heard.target } else { heard.sender };
        let place = Place { interface, vlan, address };
        let claim = self.claims.get_mut(&place)?;
        match &mut claim.state {
            State::Ours { defended, .. } if !probing => {
                claim.rival = Some((heard.mac, now));
                if defended.is_none_or(|last| now.duration_since(last) >= DEFEND) {
                    *defended = Some(now);
                    return Some(Action::Announce(place));
                }
            }
            // The datapath answers probes for what is ours.
            State::Ours { .. } => {}
            State::Free { .. } if probing => {}
            State::Probing { .. } | State::Free { .. } | State::Taken { .. } => {
                claim.state = State::Taken { mac: heard.mac, next: now + RETRY };
            }
        }
        None
    }

    /// Addresses that are needed and ours to answer for.
    pub(super) fn ours(&self) -> BTreeSet<Place> {
        self.claims
            .iter()
            .filter(|(_, claim)| matches!(claim.state, State::Ours { .. }))
            .map(|(&place, _)| place)
            .collect()
    }

    /// Whether an address is ours to answer for.
    pub(super) fn is_ours(&self, place: Place) -> bool {
        self.claims.get(&place).is_some_and(|claim| matches!(claim.state, State::Ours { .. }))
    }

    /// Addresses that another station has, also while asking again.
    pub(super) fn taken(&self) -> BTreeMap<Place, [u8; 6]> {
        self.claims
            .iter()
            .filter_map(|(&place, claim)| match claim.state {
                State::Taken { mac, .. } | State::Probing { holder: Some(mac), .. } => Some((place, mac)),
                State::Probing { .. } | State::Free { .. } | State::Ours { .. } => None,
            })
            .collect()
    }

    /// Needed addresses that another station has or claims.
    pub(super) fn conflicts(&self) -> BTreeMap<Place, [u8; 6]> {
        self.claims
            .iter()
            .filter(|(_, claim)| claim.needed)
            .filter_map(|(&place, claim)| match claim.state {
                State::Taken { mac, .. } | State::Probing { holder: Some(mac), .. } => Some((place, mac)),
                State::Probing { .. } | State::Free { .. } | State::Ours { .. } => {
                    claim.rival.map(|(mac, _)| (place, mac))
                }
            })
            .collect()
    }

    /// An interface was made anew: its addresses are what they were.
    pub(super) fn moved(&mut self, from: u32, to: u32) {
        self.claims = std::mem::take(&mut self.claims)
            .into_iter()
            .map(|(place, claim)| {
                let interface = if place.interface == from { to } else { place.interface };
                (Place { interface, ..place }, claim)
            })
            .collect();
    }

    /// The interface has come up or has another MAC: its switch and its stations have to learn anew.
    pub(super) fn came_up(&mut self, interface: u32, now: Instant) {
        for (_, claim) in self.claims.iter_mut().filter(|(place, _)| place.interface == interface) {
            if let State::Ours { announced, next, .. } = &mut claim.state {
                (*announced, *next) = (0, now);
            }
        }
    }

    /// When something is due next on an interface that is usable.
    pub(super) fn next(&self, usable: impl Fn(u32) -> bool) -> Option<Instant> {
        self.claims
            .iter()
            .filter(|(place, _)| usable(place.interface))
            .map(|(_, claim)| match claim.state {
                State::Probing { next, .. } | State::Ours { next, .. } | State::Taken { next, .. } => next,
                State::Free { until } => until,
            })
            .min()
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const VIP: Place = Place { interface: 7, vlan: 0, address: IpAddr::V4(Ipv4Addr::new(192, 0, 2, 34)) };
    const INTERVAL: Duration = Duration::from_mins(1);
    const RIVAL: [u8; 6] = [2, 0, 0, 0, 9, 9];

    fn run(claims: &mut Claims, from: Instant, time: Duration) -> (Vec<Action>, Instant) {
        let mut actions = Vec::new();
        let mut now = from;
        while now < from + time {
            actions.extend(claims.due(now, |_| true));
            now += Duration::from_millis(10);
        }
        (actions, now)
    }

    fn says(mac: [u8; 6]) -> Heard {
        Heard { mac, sender: VIP.address, target: VIP.address, request: false, overrides: true }
    }

    #[test]
    fn a_new_address_is_probed_three_times_then_announced() {
        let mut claims = Claims::new(INTERVAL);
        let start = Instant::now();
        claims.want(&BTreeSet::from([VIP]), &BTreeSet::new(), &BTreeSet::new(), start);
        assert!(claims.ours().is_empty());
        let (actions, now) = run(&mut claims, start, Duration::from_secs(10));
        assert_eq!(actions, [[Action::Probe(VIP); 3], [Action::Announce(VIP); 3]].concat());
        assert_eq!(claims.ours(), BTreeSet::from([VIP]));
        let (actions, _) = run(&mut claims, now, Duration::from_mins(1));
        assert_eq!(actions, [Action::Announce(VIP)]);
    }

    #[test]
    fn b31_announcements_come_at_the_configured_interval() {
        let mut claims = Claims::new(Duration::from_secs(10));
        let start = Instant::now();
        claims.want(&BTreeSet::from([VIP]), &BTreeSet::new(), &BTreeSet::from([VIP]), start);
        // After the three of the beginning, in 0, 1 and 2 s: 12, 22, 32 s.
        let (actions, now) = run(&mut claims, start, Duration::from_secs(35));
        assert_eq!(actions.len(), 6);
        // Nobody waits for the end of an interval that is no longer wanted; a longer one begins after the next announcement.
        claims.set_interval(Duration::from_secs(2), now);
        let (actions, now) = run(&mut claims, now, Duration::from_secs(5));
        assert_eq!(actions.len(), 2);
        claims.set_interval(INTERVAL, now);
        let (actions, _) = run(&mut claims, now, Duration::from_secs(30));
        assert_eq!(actions.len(), 1);
    }

    #[test]
    fn an_address_checked_ahead_is_ours_at_once() {
        let mut claims = Claims::new(INTERVAL);
        let start = Instant::now();
        claims.want(&BTreeSet::new(), &BTreeSet::from([VIP]), &BTreeSet::new(), start);
        let (actions, now) = run(&mut claims, start, Duration::from_secs(5));
        assert_eq!(actions, [Action::Probe(VIP); 3]);
        claims.want(&BTreeSet::from([VIP]), &BTreeSet::new(), &BTreeSet::new(), now);
        assert_eq!(claims.ours(), BTreeSet::from([VIP]));
        assert_eq!(claims.due(now, |_| true), [Action::Announce(VIP)]);
    }

    #[test]
    fn a_restart_keeps_what_was_answered_for() {
        let mut claims = Claims::new(INTERVAL);
        let now = Instant::now();
        claims.want(&BTreeSet::from([VIP]), &BTreeSet::new(), &BTreeSet::from([VIP]), now);
        assert_eq!(claims.ours(), BTreeSet::from([VIP]));
        // Also if it was checked ahead before the first plan came.
        let mut claims = Claims::new(INTERVAL);
        claims.want(&BTreeSet::new(), &BTreeSet::from([VIP]), &BTreeSet::from([VIP]), now);
        assert!(claims.ours().is_empty());
        claims.want(&BTreeSet::from([VIP]), &BTreeSet::new(), &BTreeSet::from([VIP]), now);
        assert_eq!(claims.ours(), BTreeSet::from([VIP]));
    }

    #[test]
    fn a_taken_address_is_asked_for_until_its_holder_is_gone() {
        let mut claims = Claims::new(INTERVAL);
        let start = Instant::now();
        claims.want(&BTreeSet::from([VIP]), &BTreeSet::new(), &BTreeSet::new(), start);
        claims.due(start, |_| true);
        claims.heard(7, 0, &says(RIVAL), start);
        assert_eq!(
            (claims.taken(), claims.conflicts()),
            (BTreeMap::from([(VIP, RIVAL)]), BTreeMap::from([(VIP, RIVAL)]))
        );
        let (actions, now) = run(&mut claims, start, Duration::from_millis(4900));
        assert_eq!((actions.len(), claims.ours().len()), (0, 0));
        // Still there.
        let (actions, now) = run(&mut claims, now, Duration::from_millis(200));
        assert_eq!(actions, [Action::Probe(VIP)]);
        assert_eq!(claims.taken().len(), 1);
        claims.heard(7, 0, &says(RIVAL), now);
        assert_eq!(claims.taken().len(), 1);
        let (_, now) = run(&mut claims, now, Duration::from_millis(4900));
        // Gone.
        let (actions, _) = run(&mut claims, now, Duration::from_secs(2));
        assert_eq!(actions[..4], [Action::Probe(VIP), Action::Probe(VIP), Action::Probe(VIP), Action::Announce(VIP)]);
        assert!(claims.ours().contains(&VIP) && claims.conflicts().is_empty());
    }

    #[test]
    fn what_is_ours_is_defended_not_given_up() {
        let mut claims = Claims::new(INTERVAL);
        let now = Instant::now();
        claims.want(&BTreeSet::from([VIP]), &BTreeSet::new(), &BTreeSet::from([VIP]), now);
        assert_eq!(claims.heard(7, 0, &says(RIVAL), now), Some(Action::Announce(VIP)));
        assert_eq!(claims.heard(7, 0, &says(RIVAL), now), None);
        assert_eq!(claims.heard(7, 0, &says(RIVAL), now + DEFEND), Some(Action::Announce(VIP)));
        assert_eq!((claims.ours().len(), claims.taken().len(), claims.conflicts().len()), (1, 0, 1));
        claims.due(now + DEFEND + REMEMBERED, |_| true);
        assert!(claims.conflicts().is_empty());
    }

    #[test]
    fn other_segments_and_interfaces_that_are_down_do_nothing() {
        let mut claims = Claims::new(INTERVAL);
        let now = Instant::now();
        claims.want(&BTreeSet::from([VIP]), &BTreeSet::new(), &BTreeSet::new(), now);
        assert!(claims.due(now, |interface| interface != 7).is_empty());
        assert_eq!((claims.next(|interface| interface != 7), claims.next(|_| true)), (None, Some(now)));
        claims.heard(8, 0, &says(RIVAL), now);
        claims.heard(7, 5, &says(RIVAL), now);
        assert!(claims.taken().is_empty());
    }

    #[test]
    fn an_interface_that_comes_up_is_announced_on_again() {
        let mut claims = Claims::new(INTERVAL);
        let now = Instant::now();
        claims.want(&BTreeSet::from([VIP]), &BTreeSet::new(), &BTreeSet::from([VIP]), now);
        let (_, now) = run(&mut claims, now, Duration::from_secs(5));
        claims.came_up(8, now);
        assert!(claims.due(now, |_| true).is_empty());
        claims.came_up(7, now);
        let (actions, _) = run(&mut claims, now, Duration::from_secs(10));
        assert_eq!(actions, [Action::Announce(VIP); 3]);
    }

    #[test]
    fn an_interface_made_anew_keeps_its_addresses() {
        let mut claims = Claims::new(INTERVAL);
        let now = Instant::now();
        claims.want(&BTreeSet::from([VIP]), &BTreeSet::new(), &BTreeSet::from([VIP]), now);
        claims.moved(7, 12);
        let anew = Place { interface: 12, ..VIP };
        claims.want(&BTreeSet::from([anew]), &BTreeSet::new(), &BTreeSet::new(), now);
        assert_eq!(claims.ours(), BTreeSet::from([anew]));
        claims.came_up(12, now);
        assert_eq!(claims.due(now, |_| true), [Action::Announce(anew)]);
    }

    #[test]
    fn a_simultaneous_probe_is_a_conflict_only_while_probing() {
        let mut claims = Claims::new(INTERVAL);
        let now = Instant::now();
        let probe = Heard {
            mac: RIVAL,
            sender: Ipv4Addr::UNSPECIFIED.into(),
            target: VIP.address,
            request: true,
            overrides: true,
        };
        claims.want(&BTreeSet::from([VIP]), &BTreeSet::new(), &BTreeSet::new(), now);
        claims.heard(7, 0, &probe, now);
        assert_eq!(claims.taken().len(), 1);
        let mut claims = Claims::new(INTERVAL);
        claims.want(&BTreeSet::from([VIP]), &BTreeSet::new(), &BTreeSet::from([VIP]), now);
        assert_eq!(claims.heard(7, 0, &probe, now), None);
        assert!(claims.conflicts().is_empty());
    }
}
