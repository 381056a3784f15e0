//! What has happened to flows between two looks at the table.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::SocketAddr;

use super::{Flow, State, order};

/// What happened to a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    /// It was not there at the look before.
    Opened,
    /// Its state is another.
    Changed,
    /// It is not there any more; what is known is from the look before.
    Closed,
}

impl Change {
    /// Stable name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Opened => "opened",
            Self::Changed => "changed",
            Self::Closed => "closed",
        }
    }
}

type Key = (SocketAddr, SocketAddr, u16, u8);

/// Remembers the flows of the last look: as many as there are in the table, and no more.
#[derive(Debug, Default)]
pub struct Follower {
    looks: u64,
    known: HashMap<Key, (Flow, u64)>,
}

impl Follower {
    /// Takes in all flows that there are now; returns what has changed, by VIP and client. The first look changes nothing: what is
    /// there was there before.
    pub fn look(&mut self, flows: impl IntoIterator<Item = Flow>) -> Vec<(Change, Flow)> {
        self.looks += 1;
        let (looks, first) = (self.looks, self.looks == 1);
        let mut changes = Vec::new();
        for flow in flows {
            match self.known.entry(order(&flow)) {
                Entry::Vacant(entry) => {
                    entry.insert((flow, looks));
                    if !first {
                        changes.push((Change::Opened, flow));
                    }
                }
                Entry::Occupied(mut entry) => {
                    let (before, _) = std::mem::replace(entry.get_mut(), (flow, looks));
                    // A proven connection counts from its proof.
                    if before.opened != flow.opened && before.state != State::HalfOpen {
                        changes.extend([(Change::Closed, before), (Change::Opened, flow)]);
                    } else if before.state != flow.state {
                        changes.push((Change::Changed, flow));
                    }
                }
            }
        }
        self.known.retain(|_, (flow, seen)| {
            let here = *seen == looks;
            if !here {
                changes.push((Change::Closed, *flow));
            }
            here
        });
        // Stable: a client that comes again has closed before it opened.
        changes.sort_by_key(|(_, flow)| order(flow));
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(port: u16, state: State, opened: u32) -> Flow {
        Flow { opened, ..Flow::sample((std::net::Ipv4Addr::LOCALHOST, port).into(), state) }
    }

    fn look(follower: &mut Follower, flows: &[Flow]) -> Vec<(&'static str, u16, State)> {
        let changes = follower.look(flows.iter().copied());
        changes.into_iter().map(|(change, flow)| (change.as_str(), flow.client.port(), flow.state)).collect()
    }

    #[test]
    fn a_flows_life_is_told_once() {
        let mut follower = Follower::default();
        let old = flow(9, State::Established, 3);
        assert_eq!(look(&mut follower, &[old]), [], "what was there before is no news");
        let half_open = flow(1, State::HalfOpen, 10);
        assert_eq!(look(&mut follower, &[old, half_open]), [("opened", 1, State::HalfOpen)]);
        assert_eq!(look(&mut follower, &[half_open, old]), []);
        // Proven: it counts from then on, and is the same connection.
        let open = flow(1, State::Established, 12);
        assert_eq!(look(&mut follower, &[open, old]), [("changed", 1, State::Established)]);
        let busy = Flow { in_packets: 900, ..open };
        assert_eq!(look(&mut follower, &[busy, old]), [], "traffic is no change");
        let closed = flow(1, State::Closed, 12);
        assert_eq!(look(&mut follower, &[closed, old]), [("changed", 1, State::Closed)]);
        assert_eq!(look(&mut follower, &[old]), [("closed", 1, State::Closed)]);
        assert_eq!(look(&mut follower, &[old]), []);
    }

    #[test]
    fn a_client_that_comes_again_is_another_connection() {
        let mut follower = Follower::default();
        look(&mut follower, &[flow(1, State::Closed, 12)]);
        assert_eq!(
            look(&mut follower, &[flow(1, State::Established, 90)]),
            [("closed", 1, State::Closed), ("opened", 1, State::Established)]
        );
        assert_eq!(look(&mut follower, &[flow(1, State::HalfOpen, 95)]).len(), 2);
    }

    #[test]
    fn what_has_ended_is_forgotten() {
        let mut follower = Follower::default();
        for round in 0..50_u16 {
            look(
                &mut follower,
                &(0..100).map(|port| flow(round * 100 + port, State::Established, 1)).collect::<Vec<_>>(),
            );
            assert_eq!(follower.known.len(), 100);
        }
        assert_eq!(look(&mut follower, &[]).len(), 100);
        assert!(follower.known.is_empty());
    }
}
