//! Who is behind a connection that somebody has seen on a node.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use lbd_common::abi::{Address4, Address6, FlowKey, Tuple};

use super::{Directory, Endpoint, Filter, Flow, Live, Matcher, order};
use crate::dataplane::{DataplaneError, FlowTables};

/// A connection as a node shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// Its source.
    pub snat: SocketAddr,
    /// The node, or whoever the backend is; connections to several backends may have one source.
    pub backend: Option<Endpoint>,
}

impl Question {
    /// What the connection must look like.
    pub fn filter(&self) -> Filter {
        Filter { snat: Some(self.snat), backend: self.backend, ..Filter::default() }
    }

    /// The live connections that are meant, by VIP and client. A backend with its port is looked up; without, all flows are read.
    pub fn answer(&self, live: &Live<'_>) -> Result<Vec<Flow>, DataplaneError> {
        let filter = self.filter();
        let directory = Directory::default();
        let matcher = Matcher::new(&filter, &directory, live.clock);
        let mut found = match (self.snat.ip(), self.backend.and_then(|backend| backend.socket())) {
            (IpAddr::V4(snat), Some(SocketAddr::V4(backend))) => {
                let to = Tuple::new((snat, self.snat.port()), (*backend.ip(), backend.port()));
                look_up::<Address4>(live, &matcher, &to)?
            }
            (IpAddr::V6(snat), Some(SocketAddr::V6(backend))) => {
                let to = Tuple::new((snat, self.snat.port()), (*backend.ip(), backend.port()));
                look_up::<Address6>(live, &matcher, &to)?
            }
            (_, Some(_)) => Vec::new(),
            (_, None) => live.fold(&matcher, Vec::new, Vec::push)?.concat(),
        };
        found.sort_by_key(order);
        Ok(found)
    }
}

fn look_up<A: FlowTables>(live: &Live<'_>, matcher: &Matcher<'_>, to: &Tuple<A>) -> Result<Vec<Flow>, DataplaneError> {
    let pins = live.pins();
    let mut found = Vec::new();
    for record in pins.half_open_at::<A>(u16::from_be(to.source_port_be))? {
        found.extend(Flow::from_half_open(&record, live.clock).filter(|flow| matcher.matches(flow)));
    }
    let segments: BTreeSet<u16> = pins.segments()?.values().map(|segment| segment.id).collect();
    for segment in segments {
        for protocol in [6, 17] {
            let Some(pair) = pins.flow_of_reply(&FlowKey::reply(to, segment, protocol))? else { continue };
            if let Some(flow) = live.flow(&pair).filter(|flow| matcher.matches(flow)) {
                // It has been promoted meanwhile.
                found.retain(|other| order(other) != order(&flow));
                found.push(flow);
            }
        }
    }
    Ok(found)
}
