//! UDP datagrams that need more than the hot path: of no live flow, or a flow's first answer.

use aya_ebpf::programs::XdpContext;
use lbd_common::abi::{FLOW_REPLIED, FLOW_REVERSE, FLOW_UDP, STAGE_LOCAL};
use lbd_common::hash;
use lbd_common::packet::{IpHeader as _, UDP};
use lbd_common::reason::Reason;

use super::choice::{
    Client, Kind, admit, choose, frontend_of, hop_to_backend, prepare, promoted, refused, reply_to, write_key,
};
use super::context::{Arrival, Outcome, mac_pointer, now, refuse, send, settings, udp_packet};
use super::edge::{count_traffic, translate};
use super::flags::{mark, mark_other};
use super::half_open::{First, allocate, make};
use super::maps::Tables;
use super::words::{Key, read};

/// Makes a flow for a client's datagram: nothing proves its address, so that it has its own, smaller quota, and a short life.
#[inline(always)]
pub(crate) fn datagram<A: Tables>(context: &XdpContext) -> Outcome {
    let arrival = Arrival::in_stage(context).ok_or(refuse(Reason::Internal, 0))?;
    let packet = udp_packet::<A>(context).map_err(|reason| refuse(reason, arrival.segment.tenant))?;
    let making = A::making().ok_or(refuse(Reason::Internal, 0))?;
    // SAFETY: `udp_packet` has bounds-checked the headers; `making` is this CPU's value.
    let (packet, key) = unsafe {
        write_key(making, packet, arrival.segment.id, UDP);
        (&mut *packet, &(*making).key)
    };
    let Some(frontend) = frontend_of(making) else {
        return match reply_to(making) {
            Some(reply) if reply.from_backend => Err(refuse(Reason::StrayDatagram, reply.tenant)),
            _ => arrival.go(context, STAGE_LOCAL),
        };
    };
    let no = |reason| refuse(reason, frontend.tenant);
    let now = now();
    let settings = settings()?;
    let client = Client { segment: arrival.segment, making, now, settings };
    let hash = hash::flow(&settings.seed, key);
    let expires = admit(&client, frontend, Kind::Udp)?;
    let choice = choose(&client, frontend, hash, 0, 0)?;
    let own = prepare(making, frontend, &choice, hash, UDP);
    let length = packet.ip.total_length();
    let hop = hop_to_backend(arrival.segment, choice.backend.next_hop, length, packet.ip.hops(), frontend)?;
    let found = allocate(making, own, frontend.tenant, now, expires).map_err(|reason| {
        refused(frontend);
        no(reason)
    })?;
    // SAFETY: this CPU's value.
    let record = unsafe { &mut (*making).record };
    client.fill(record, arrival.ethernet, frontend, &choice);
    let first = First { length, sequence: 0, acknowledged: 0, forward: FLOW_UDP, reverse: FLOW_UDP };
    let made = make::<A>(&first, now);
    found.abandon();
    match made {
        Ok(()) => promoted(frontend),
        // Another CPU was faster with the same client's datagram: its flow is there now.
        // SAFETY: a key in a map.
        Err(Reason::TupleInUse) if unsafe { Key::of(key) }.live().is_some() => {
            return arrival.go(context, A::STAGES.replied);
        }
        Err(reason) => return Err(no(reason)),
    }
    count_traffic(frontend.id, false, length);
    // SAFETY: this CPU's value.
    packet.rewrite(&key.tuple, unsafe { &(*making).to });
    Ok(send(context, arrival.ethernet, hop, mac_pointer(&hop.destination)))
}

/// The first datagram of a backend: from now on the flow lives longer. Then as on the hot path.
#[inline(always)]
pub(crate) fn replied<A: Tables>(context: &XdpContext) -> Outcome {
    let arrival = Arrival::in_stage(context).ok_or(refuse(Reason::Internal, 0))?;
    let packet = udp_packet::<A>(context).map_err(|reason| refuse(reason, arrival.segment.tenant))?;
    // SAFETY: `udp_packet` has bounds-checked the headers.
    let packet = unsafe { &mut *packet };
    // SAFETY: the tuple of a checked packet, which stays as it is until the half is read.
    let key = unsafe { Key::new(packet.tuple_mut(), arrival.segment.id, UDP) };
    let Some(flow) = key.flow() else { return arrival.go(context, A::STAGES.datagram) };
    if let Some(way) = read(flow, &key, UDP)
        && way.state & (FLOW_REVERSE | FLOW_REPLIED) == FLOW_REVERSE
    {
        mark(flow, FLOW_REPLIED);
        mark_other(&way.to.0, way.next_hop, way.state, FLOW_REPLIED);
    }
    match translate(context, &arrival, packet, flow, &key, false) {
        Some(outcome) => outcome,
        None => arrival.go(context, A::STAGES.datagram),
    }
}
