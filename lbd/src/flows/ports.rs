//! SNAT ports in use: how many of an address's ports are taken towards each backend.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use lbd_common::abi::{Address4, Address6, FLOW_REVERSE, HalfOpen};

use crate::dataplane::{DataplaneError, FlowPair, FlowTables, Pins};

/// What the ports of a SNAT address are counted by: each can be used once towards it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Towards {
    /// IP protocol number.
    pub protocol: u8,
    /// SNAT address.
    pub snat: IpAddr,
    /// Segment of the backend.
    pub segment: u16,
    /// Backend.
    pub backend: SocketAddr,
}

/// Ports in use, as the tables have them: a connection that has ended keeps its port until its entry is gone.
pub type PortsUsed = BTreeMap<Towards, u32>;

/// Counts the ports in use of both families.
pub fn used(pins: &Pins) -> Result<PortsUsed, DataplaneError> {
    let mut used = PortsUsed::new();
    count::<Address4>(pins, &mut used)?;
    count::<Address6>(pins, &mut used)?;
    Ok(used)
}

fn count<A: FlowTables>(pins: &Pins, used: &mut PortsUsed) -> Result<(), DataplaneError> {
    let add = |used: &mut PortsUsed, towards| *used.entry(towards).or_default() += 1;
    // Forward halves say it all.
    let found = pins.flows(
        |half| half.state & FLOW_REVERSE == 0,
        PortsUsed::new,
        |used: &mut PortsUsed, pair: &FlowPair<A>| add(used, of_flow(pair)),
    )?;
    for (towards, count) in found.into_iter().flatten() {
        *used.entry(towards).or_default() += count;
    }
    for record in pins.half_open::<A>()? {
        add(used, of_half_open(&record));
    }
    Ok(())
}

fn of_flow<A: FlowTables>(pair: &FlowPair<A>) -> Towards {
    let to = &pair.forward.to;
    Towards {
        protocol: pair.key.protocol,
        snat: to.source().ip(),
        segment: pair.backend_segment,
        backend: to.destination(),
    }
}

fn of_half_open<A: FlowTables>(record: &HalfOpen<A>) -> Towards {
    Towards {
        protocol: 6,
        snat: record.to.source().ip(),
        segment: record.backend_segment,
        backend: record.to.destination(),
    }
}
