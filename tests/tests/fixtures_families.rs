//! What both families must do, written once and run with each: TCP, UDP, `preserve_client`.
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr};

use anyhow::{Context as _, Result};
use lbd_common::abi::{self, names};
use lbd_common::half_open::{LIVE, PROMOTING};
use lbd_common::packet::{TCP, UDP};
use lbd_common::reason::Reason;
use lbd_common::tcp::{ACK, FIN, RST, SYN};
use lbd_tests::datapath::bench::{self, Ip};
use lbd_tests::datapath::{DROP, Datapath, HUB_NIC, Outcome, PASS, REDIRECT, TENANT_NIC, TX};
use lbd_tests::exchange::{
    BACKEND_SEQUENCE, age, ask, close, connect, datapath, forwarded, half_open, only, relayed, send,
};
use lbd_tests::packets::{Datagram, Segment, client, query};

/// A test for each family.
macro_rules! families {
    ($($name:ident),* $(,)?) => {
        mod ipv4 {
            $(#[test] #[ignore = "needs root"] fn $name() -> anyhow::Result<()> { super::$name::<std::net::Ipv4Addr>() })*
        }
        mod ipv6 {
            $(#[test] #[ignore = "needs root"] fn $name() -> anyhow::Result<()> { super::$name::<std::net::Ipv6Addr>() })*
        }
    };
}

families!(
    packets_are_translated_both_ways_with_checksums_that_verify,
    a_flow_is_promoted_only_by_the_ack_of_the_backends_sequence_number,
    what_overtakes_the_promotion_of_its_flow_is_forwarded,
    a13_damage_in_transit_stays_visible,
    frames_cut_anywhere_are_dropped_and_make_nothing,
    fin_both_ways_ends_both_halves_and_the_tuple_is_kept_for_a_while,
    a38_a_syn_on_a_closing_flow_is_chosen_anew_and_on_a_live_one_changes_nothing,
    a46_only_a_reset_in_the_window_ends_a_flow,
    a49_mid_flow_packets_without_state_are_reset_and_make_no_entry,
    a_stray_reply_never_reaches_the_hosts_tcp,
    b53_refusals_of_the_backend_are_passed_on_and_nobody_piles_up,
    no_backend_is_refused_at_once_and_served_from_the_first_one_on,
    on_link_clients_are_answered_at_their_own_mac_and_off_link_ones_through_the_gateway,
    clients_of_the_segments_second_prefix_are_on_the_link,
    a31_a_vip_that_is_silent_answers_nothing_at_ports_that_nobody_serves,
    a_marked_flow_is_absent_at_once_and_deleted_after_the_grace,
    a_half_of_another_flow_under_the_key_translates_nothing,
    a65_flow_affinity_spreads_and_source_affinity_does_not,
    adopted_connections_keep_their_backend_and_port,
    udp_flows_go_both_ways_and_are_counted,
    udp_flows_expire_sooner_without_a_reply,
    udp_flows_beyond_the_tenants_quota_are_refused_and_the_others_go_on,
    udp_stray_datagrams_are_dropped_and_the_hosts_own_are_not,
    preserved_clients_go_both_ways,
    a_preserved_client_whose_tuple_is_taken_is_refused,
);

fn key<I: Ip>(source: (I, u16), port: u16, protocol: u8) -> abi::FlowKey<I::Address> {
    let tuple = abi::Tuple::new(source, (I::VIP, port));
    abi::FlowKey { tuple, segment: bench::TENANT_SEGMENT, protocol, pad: 0 }
}

/// Forward and reverse half of a flow.
type Halves<I> = (abi::Flow<<I as Ip>::Address>, abi::Flow<<I as Ip>::Address>);

/// The two halves of a client's flow.
fn halves<I: Ip>(datapath: &mut Datapath, key: &abi::FlowKey<I::Address>) -> Result<Halves<I>> {
    let flows = datapath.flows::<I>()?;
    let forward = *flows.get(key).with_context(|| format!("no flow {key:?}"))?;
    let reverse = flows.get(&abi::FlowKey::reply(&forward.to, bench::HUB_SEGMENT, key.protocol));
    Ok((forward, *reverse.context("no reverse half")?))
}

fn packets_are_translated_both_ways_with_checksums_that_verify<I: Ip>() -> Result<()> {
    let mut datapath = datapath(1)?;
    let source = (I::CLIENT, 40000);
    let mut lengths = [0; 2];
    let mut through = |datapath: &Datapath, nic: usize, segment: &Segment<I>| -> Result<Segment<I>> {
        lengths[usize::from(nic == HUB_NIC)] += segment.frame().len() as u64 - 14;
        forwarded(datapath, nic, segment)
    };
    let syn = through(&datapath, TENANT_NIC, &Segment { ttl: 7, ..client(source, SYN, 1000, 0) })?;
    assert!((bench::FIRST_PORT..=bench::LAST_PORT).contains(&syn.source.1));
    let at_node = Segment {
        source_mac: bench::HUB_MAC,
        destination_mac: bench::node_mac(0),
        source: (I::SNAT, syn.source.1),
        destination: (I::NODES[0], bench::NODE_PORT),
        ttl: 6,
        ..client(source, SYN, 1000, 0)
    };
    assert_eq!(syn, at_node);
    let answer = syn.answer(SYN | ACK, BACKEND_SEQUENCE);
    let at_client = Segment {
        source_mac: bench::TENANT_MAC,
        destination_mac: bench::GATEWAY_MAC,
        source: (I::VIP, bench::PORT),
        destination: source,
        ttl: 63,
        ..answer.clone()
    };
    assert_eq!(through(&datapath, HUB_NIC, &answer)?, at_client);
    assert_eq!(datapath.flows::<I>()?.len(), 0);
    through(&datapath, TENANT_NIC, &client(source, ACK, 1001, BACKEND_SEQUENCE + 1))?;
    // Payloads of odd and even length, both ways.
    for payload in [&b"odd"[..], b"even", b""] {
        let mut data = client(source, ACK, 1001, BACKEND_SEQUENCE + 1);
        data.payload = payload.to_vec();
        let arrived = through(&datapath, TENANT_NIC, &data)?;
        assert_eq!((arrived.source, arrived.destination), (at_node.source, at_node.destination));
        assert_eq!((arrived.ttl, &arrived.payload[..]), (63, payload));
        let mut data = syn.answer(ACK, BACKEND_SEQUENCE + 1);
        data.payload = payload.to_vec();
        let arrived = through(&datapath, HUB_NIC, &data)?;
        assert_eq!((arrived.source, arrived.destination), (at_client.source, at_client.destination));
        assert_eq!((arrived.ttl, &arrived.payload[..]), (63, payload));
    }
    assert_eq!(datapath.reasons()?, BTreeMap::new());
    let counters = datapath.frontend_counters(I::FRONTEND)?;
    let expected = abi::FrontendCounters {
        in_packets: 5,
        in_bytes: lengths[0],
        out_packets: 4,
        out_bytes: lengths[1],
        flows: 1,
        refused: 0,
    };
    assert_eq!(counters, expected);
    let (forward, reverse) = halves::<I>(&mut datapath, &key(source, bench::PORT, TCP))?;
    assert_eq!(forward.to, abi::Tuple::new(at_node.source, at_node.destination));
    assert_eq!((forward.backend(), forward.frontend), (I::FIRST_BACKEND, I::FRONTEND));
    assert_eq!((forward.state, reverse.state), (abi::FLOW_REPLIED, abi::FLOW_REPLIED | abi::FLOW_REVERSE));
    // The ACK that promoted counts too.
    assert_eq!((forward.packets(), reverse.packets()), (4, 3));
    assert_eq!((forward.sequence, reverse.sequence), (1001 + 4, BACKEND_SEQUENCE + 1 + 4));
    let used = datapath.used::<I>(bench::TENANT)?;
    assert_eq!((used.flows, used.udp, used.half_open), (1, 0, 0));
    Ok(())
}

fn a_flow_is_promoted_only_by_the_ack_of_the_backends_sequence_number<I: Ip>() -> Result<()> {
    let mut datapath = datapath(1)?;
    let source = (I::CLIENT, 40000);
    let syn = forwarded(&datapath, TENANT_NIC, &client(source, SYN, 1000, 0))?;
    assert_eq!(send(&datapath, TENANT_NIC, &client(source, ACK, 1001, 1))?.action, DROP);
    forwarded(&datapath, HUB_NIC, &syn.answer(SYN | ACK, BACKEND_SEQUENCE))?;
    for wrong in [0, BACKEND_SEQUENCE, BACKEND_SEQUENCE + 2] {
        assert_eq!(send(&datapath, TENANT_NIC, &client(source, ACK, 1001, wrong))?.action, DROP);
    }
    assert_eq!(datapath.flows::<I>()?.len(), 0);
    assert_eq!(datapath.used::<I>(bench::TENANT)?.half_open, 1);
    forwarded(&datapath, TENANT_NIC, &client(source, ACK, 1001, BACKEND_SEQUENCE + 1))?;
    assert_eq!(datapath.flows::<I>()?.len(), 2);
    assert_eq!(datapath.used::<I>(bench::TENANT)?.half_open, 0);
    assert_eq!(datapath.reasons()?, only(Reason::Unproven, 4));
    Ok(())
}

/// One CPU has the client's proof and is making the flow; what the client has sent after it is at another, and so is all that follows.
fn what_overtakes_the_promotion_of_its_flow_is_forwarded<I: Ip>() -> Result<()> {
    let mut datapath = datapath(1)?;
    let source = (I::CLIENT, 40000);
    let syn = half_open(&datapath, source)?;
    assert_eq!(datapath.turn_half_open::<I>(LIVE, PROMOTING)?, 1);
    let proof = client(source, ACK, 1001, BACKEND_SEQUENCE + 1);
    let request = forwarded(&datapath, TENANT_NIC, &Segment { payload: b"request".to_vec(), ..proof.clone() })?;
    assert_eq!((request.source, request.destination), (syn.source, syn.destination));
    // It acknowledges more than the SYN, and what the client says next more than the SYN-ACK.
    let answer = Segment { payload: b"answer".to_vec(), ..request.answer(ACK, BACKEND_SEQUENCE + 1) };
    let answered = forwarded(&datapath, HUB_NIC, &answer)?;
    assert_eq!((answered.source, answered.destination), ((I::VIP, bench::PORT), source));
    let next = client(source, ACK, 1001 + 7, BACKEND_SEQUENCE + 1 + 6);
    assert_eq!(forwarded(&datapath, TENANT_NIC, &next)?.destination, syn.destination);
    assert_eq!(datapath.reasons()?, only(Reason::PromoteRace, 2));
    // No room for the flow: nothing is proven yet.
    assert_eq!(datapath.turn_half_open::<I>(PROMOTING, LIVE)?, 1);
    assert_eq!(send(&datapath, HUB_NIC, &answer)?.action, TX);
    assert_eq!(send(&datapath, TENANT_NIC, &next)?.action, DROP);
    assert_eq!(datapath.flows::<I>()?.len(), 0);
    forwarded(&datapath, TENANT_NIC, &proof)?;
    forwarded(&datapath, HUB_NIC, &answer)?;
    forwarded(&datapath, TENANT_NIC, &next)?;
    assert_eq!(datapath.flows::<I>()?.len(), 2);
    let refused = [(Reason::PromoteRace, 2), (Reason::StaleAnswer, 1), (Reason::Unproven, 1)];
    assert_eq!(datapath.reasons()?, refused.map(|(reason, count)| ((bench::TENANT, reason), count)).into());
    Ok(())
}

fn a13_damage_in_transit_stays_visible<I: Ip>() -> Result<()> {
    let datapath = datapath(1)?;
    let source = (I::CLIENT, 40000);
    let syn = connect(&datapath, source)?;
    let damage = |mut frame: Vec<u8>| {
        *frame.last_mut().expect("a byte") ^= 0x10;
        frame
    };
    let mut segments = [client(source, ACK, 1001, BACKEND_SEQUENCE + 1), syn.answer(ACK, BACKEND_SEQUENCE + 1)];
    for (segment, nic) in segments.iter_mut().zip([TENANT_NIC, HUB_NIC]) {
        segment.payload = b"payload".to_vec();
        let outcome = datapath.run(nic, &damage(segment.frame()))?;
        assert_eq!(outcome.action, REDIRECT);
        let error = Segment::<I>::parse(&outcome.frame).expect_err("damaged").to_string();
        assert!(error.contains("TCP checksum is wrong"), "{error}");
        // And it is only the damage.
        Segment::<I>::parse(&damage(outcome.frame))?;
    }
    let asked = ask(&datapath, source)?;
    for (datagram, nic) in [(query(source, b"payload"), TENANT_NIC), (asked.answer(b"payload"), HUB_NIC)] {
        let outcome = datapath.run(nic, &damage(datagram.frame()))?;
        assert_eq!(outcome.action, REDIRECT);
        let error = Datagram::<I>::parse(&outcome.frame).expect_err("damaged").to_string();
        assert!(error.contains("UDP checksum is wrong"), "{error}");
        Datagram::<I>::parse(&damage(outcome.frame))?;
    }
    Ok(())
}

fn frames_cut_anywhere_are_dropped_and_make_nothing<I: Ip>() -> Result<()> {
    let mut datapath = datapath(1)?;
    let segment = client((I::CLIENT, 40000), SYN, 1000, 0).frame();
    let datagram = query((I::CLIENT, 40000), b"question").frame();
    let mut count = 0;
    for frame in [segment, datagram] {
        for length in 14..frame.len() {
            let cut = frame[..length].to_vec();
            assert_eq!(datapath.run(TENANT_NIC, &cut)?, Outcome { action: DROP, frame: cut }, "{length}");
            count += 1;
        }
    }
    assert_eq!(datapath.reasons()?, only(Reason::Malformed, count));
    assert_eq!(datapath.flows::<I>()?.len(), 0);
    assert_eq!(datapath.used::<I>(bench::TENANT)?, abi::FamilyUse::ZERO);
    for id in [I::FRONTEND, I::FRONTEND + 1] {
        assert_eq!(datapath.frontend_counters(id)?, abi::FrontendCounters::default());
    }
    Ok(())
}

fn fin_both_ways_ends_both_halves_and_the_tuple_is_kept_for_a_while<I: Ip>() -> Result<()> {
    let mut datapath = datapath(1)?;
    let source = (I::CLIENT, 40000);
    let syn = connect(&datapath, source)?;
    let other = connect(&datapath, (I::CLIENT, 40001))?;
    let fins = abi::FLOW_FIN | abi::FLOW_PEER_FIN;
    let states = |datapath: &mut Datapath| -> Result<(u16, u16)> {
        let (forward, reverse) = halves::<I>(datapath, &key(source, bench::PORT, TCP))?;
        Ok((forward.state & fins, reverse.state & fins))
    };
    forwarded(&datapath, TENANT_NIC, &client(source, FIN | ACK, 1001, BACKEND_SEQUENCE + 1))?;
    assert_eq!(states(&mut datapath)?, (abi::FLOW_FIN, abi::FLOW_PEER_FIN));
    forwarded(&datapath, HUB_NIC, &syn.answer(FIN | ACK, BACKEND_SEQUENCE + 1))?;
    assert_eq!(states(&mut datapath)?, (fins, fins));
    forwarded(&datapath, TENANT_NIC, &client(source, ACK, 1002, BACKEND_SEQUENCE + 2))?;
    age(&datapath, 2)?;
    assert_eq!(datapath.flows::<I>()?.len(), 4, "a closed flow stays as long as its tuple must");
    datapath.set_timeouts(abi::Timeouts { tcp_fin: 1, ..bench::timeouts() })?;
    datapath.set_settings(abi::Settings { tombstone: 1, ..bench::settings() })?;
    age(&datapath, 8)?;
    assert_eq!(datapath.flows::<I>()?.len(), 2, "both halves of the closed flow are gone, the other flow is whole");
    halves::<I>(&mut datapath, &key((I::CLIENT, 40001), bench::PORT, TCP))?;
    assert_eq!(datapath.used::<I>(bench::TENANT)?.flows, 1);
    forwarded(&datapath, HUB_NIC, &other.answer(ACK, BACKEND_SEQUENCE + 1))?;
    assert_eq!(datapath.reasons()?, BTreeMap::new());
    Ok(())
}

fn a38_a_syn_on_a_closing_flow_is_chosen_anew_and_on_a_live_one_changes_nothing<I: Ip>() -> Result<()> {
    let mut datapath = datapath(2)?;
    let source = (I::CLIENT, 40000);
    let first = connect(&datapath, source)?;
    // On a live flow the server answers it, and nothing changes.
    let before = datapath.flows::<I>()?;
    let again = forwarded(&datapath, TENANT_NIC, &client(source, SYN, 77_777_777, 0))?;
    assert_eq!((again.source, again.destination), (first.source, first.destination));
    let after = datapath.flows::<I>()?;
    for (key, flow) in &before {
        let now = after.get(key).context("the flow is still there")?;
        assert_eq!((now.to, now.state, now.sequence, now.own), (flow.to, flow.state, flow.sequence, flow.own));
    }
    // Closed, and its backend is gone: the next one is on the other node.
    close(&datapath, source, &first)?;
    let gone = u32::from(first.destination.0 != I::NODES[0]);
    let mut backends = datapath.array::<abi::Backend>(names::BACKENDS)?;
    backends.set(u32::from(I::FIRST_BACKEND) + gone, abi::Backend::ZERO, 0)?;
    let mut slots = abi::MaglevChunk::ZERO;
    slots.slots.fill(I::FIRST_BACKEND + 1 - gone as u16);
    datapath.array(names::MAGLEV)?.set(I::TABLE, slots, 0)?;
    let second = forwarded(&datapath, TENANT_NIC, &client(source, SYN, 9000, 0))?;
    assert_eq!(second.destination, (I::NODES[1 - gone as usize], bench::NODE_PORT));
    forwarded(&datapath, HUB_NIC, &second.answer(SYN | ACK, 500))?;
    // A straggler of the old connection is not the new one's proof.
    assert_ne!(send(&datapath, TENANT_NIC, &client(source, ACK, 1002, BACKEND_SEQUENCE + 2))?.action, TX);
    forwarded(&datapath, TENANT_NIC, &client(source, ACK, 9001, 501))?;
    let (forward, _) = halves::<I>(&mut datapath, &key(source, bench::PORT, TCP))?;
    assert_eq!(forward.to.destination().ip(), second.destination.0.into());
    assert_eq!(datapath.used::<I>(bench::TENANT)?.flows, 1);
    // Without a FIN, too, if the backend takes no new connections: it drains.
    let id = u32::from(I::FIRST_BACKEND) + 1 - gone;
    let mut backends = datapath.array::<abi::Backend>(names::BACKENDS)?;
    let backend = backends.get(&id, 0)?;
    backends.set(id, abi::Backend { flags: abi::BACKEND_PRESENT, ..backend }, 0)?;
    forwarded(&datapath, TENANT_NIC, &client(source, ACK, 9001, 501))?;
    forwarded(&datapath, TENANT_NIC, &client(source, SYN, 55_000, 0))?;
    assert_eq!(datapath.flows::<I>()?.len(), 0);
    let used = datapath.used::<I>(bench::TENANT)?;
    assert_eq!((used.flows, used.half_open), (0, 1));
    Ok(())
}

fn a46_only_a_reset_in_the_window_ends_a_flow<I: Ip>() -> Result<()> {
    let mut datapath = datapath(1)?;
    let source = (I::CLIENT, 40000);
    let syn = connect(&datapath, source)?;
    forwarded(&datapath, TENANT_NIC, &client(source, RST, 1001 + (3 << 20), 0))?;
    forwarded(&datapath, HUB_NIC, &syn.answer(RST | ACK, BACKEND_SEQUENCE.wrapping_add(3 << 20)))?;
    assert_eq!(datapath.reasons()?, only(Reason::BlindReset, 2));
    let reset = |datapath: &mut Datapath| -> Result<(u16, u16)> {
        let (forward, reverse) = halves::<I>(datapath, &key(source, bench::PORT, TCP))?;
        Ok((forward.state & abi::FLOW_RESET, reverse.state & abi::FLOW_RESET))
    };
    assert_eq!(reset(&mut datapath)?, (0, 0));
    forwarded(&datapath, HUB_NIC, &syn.answer(RST | ACK, BACKEND_SEQUENCE + 1))?;
    assert_eq!(reset(&mut datapath)?, (abi::FLOW_RESET, abi::FLOW_RESET));
    assert_eq!(datapath.reasons()?, only(Reason::BlindReset, 2));
    Ok(())
}

fn a49_mid_flow_packets_without_state_are_reset_and_make_no_entry<I: Ip>() -> Result<()> {
    let mut datapath = datapath(1)?;
    let source = (I::CLIENT, 40000);
    let mut data = client(source, ACK, 5000, 6000);
    data.payload = b"more".to_vec();
    // RFC 9293 §3.10.7.1: as from a host that knows no such connection.
    for (segment, flags, sequence, acknowledgement) in [
        (data, RST, 6000, 0),
        (client(source, FIN | ACK, 5000, 6000), RST, 6000, 0),
        (client(source, FIN, 5000, 0), RST | ACK, 0, 5001),
        (client(source, SYN | ACK, 5000, 6000), RST, 6000, 0),
    ] {
        let outcome = send(&datapath, TENANT_NIC, &segment)?;
        assert_eq!(outcome.action, TX, "{segment:?}");
        let reset = Segment::<I>::parse(&outcome.frame)?;
        let expected = Segment { flags, sequence, acknowledgement, ..segment.answer(0, 0) };
        assert_eq!(reset, expected);
    }
    // A RST is never answered.
    let reset = client(source, RST, 5000, 0).frame();
    assert_eq!(datapath.run(TENANT_NIC, &reset)?, Outcome { action: DROP, frame: reset });
    assert_eq!(datapath.reasons()?, only(Reason::NoFlow, 5));
    assert_eq!(datapath.flows::<I>()?.len(), 0);
    assert_eq!(datapath.used::<I>(bench::TENANT)?, abi::FamilyUse::ZERO);
    let counters = datapath.frontend_counters(I::FRONTEND)?;
    assert_eq!((counters.in_packets, counters.out_packets, counters.flows), (0, 0, 0));
    Ok(())
}

fn a_stray_reply_never_reaches_the_hosts_tcp<I: Ip>() -> Result<()> {
    let mut datapath = datapath(1)?;
    let stray = Segment {
        source_mac: bench::node_mac(0),
        destination_mac: bench::HUB_MAC,
        source: (I::NODES[0], bench::NODE_PORT),
        destination: (I::SNAT, 20001),
        ..client((I::CLIENT, 1), ACK, 5, 99)
    };
    let outcome = send(&datapath, HUB_NIC, &stray)?;
    assert_eq!(outcome.action, TX);
    let reset = Segment::<I>::parse(&outcome.frame)?;
    assert_eq!(reset, Segment { flags: RST, sequence: 99, acknowledgement: 0, ..stray.answer(0, 0) });
    assert_eq!(datapath.reasons()?, BTreeMap::from([((0, Reason::StrayReply), 1)]));

    datapath.set_settings(abi::Settings { flags: abi::SETTING_MIGRATING, ..bench::settings() })?;
    assert_eq!(send(&datapath, HUB_NIC, &stray)?.action, DROP);
    assert_eq!(datapath.reasons()?.get(&(0, Reason::StrayReplyQuiet)), Some(&1));

    for own in [
        Segment { destination: (I::SNAT, 40000), ..stray.clone() },
        Segment { source: (I::NODES[0], 50000), ..stray.clone() },
        Segment { source: (I::CLIENT, bench::NODE_PORT), ..stray.clone() },
        Segment { flags: SYN, ..stray.clone() },
    ] {
        let frame = own.frame();
        assert_eq!(datapath.run(HUB_NIC, &frame)?, Outcome { action: PASS, frame }, "{own:?}");
    }
    Ok(())
}

fn b53_refusals_of_the_backend_are_passed_on_and_nobody_piles_up<I: Ip>() -> Result<()> {
    let mut datapath = datapath(1)?;
    let (_, frontend) = bench::tcp_frontend::<I>(1);
    datapath.set_frontend(abi::Frontend { snat_first: 20000, snat_last: 20003, ..frontend })?;
    for round in 0..100 {
        let source = (I::CLIENT, 1000 + round);
        let syn = forwarded(&datapath, TENANT_NIC, &client(source, SYN, 1000, 0))?;
        let reset = forwarded(&datapath, HUB_NIC, &syn.answer(RST | ACK, 0))?;
        assert_eq!((reset.flags, reset.acknowledgement, reset.destination), (RST | ACK, 1001, source));
    }
    assert_eq!(datapath.reasons()?, only(Reason::BackendRefused, 100));
    assert_eq!(datapath.flows::<I>()?.len(), 0);
    assert_eq!(datapath.used::<I>(bench::TENANT)?.half_open, 0);
    Ok(())
}

fn no_backend_is_refused_at_once_and_served_from_the_first_one_on<I: Ip>() -> Result<()> {
    let mut datapath = datapath(0)?;
    let syn = client((I::CLIENT, 40000), SYN, 7, 0);
    let outcome = send(&datapath, TENANT_NIC, &syn)?;
    assert_eq!(outcome.action, TX);
    let reset = Segment::<I>::parse(&outcome.frame)?;
    assert_eq!(reset, Segment { flags: RST | ACK, ..syn.answer(0, 0) });
    assert_eq!(datapath.reasons()?, only(Reason::NoBackend, 1));
    assert_eq!(datapath.frontend_counters(I::FRONTEND)?.refused, 1);
    // A port that nobody serves.
    let unserved = Segment { destination: (I::VIP, 22), ..syn.clone() };
    let outcome = send(&datapath, TENANT_NIC, &unserved)?;
    assert_eq!(outcome.action, TX);
    assert_eq!(Segment::<I>::parse(&outcome.frame)?, Segment { flags: RST | ACK, ..unserved.answer(0, 0) });
    assert_eq!(datapath.reasons()?.get(&(bench::TENANT, Reason::Unserved)), Some(&1));
    bench::fill(&mut datapath, 1)?;
    forwarded(&datapath, TENANT_NIC, &syn)?;
    Ok(())
}

fn on_link_clients_are_answered_at_their_own_mac_and_off_link_ones_through_the_gateway<I: Ip>() -> Result<()> {
    let mut datapath = datapath(1)?;
    let mac = [2, 0, 0, 0, 1, 0x60];
    let near = |flags, sequence, acknowledgement| Segment {
        source_mac: mac,
        ..client((I::ON_LINK_CLIENT, 40000), flags, sequence, acknowledgement)
    };
    let syn = forwarded(&datapath, TENANT_NIC, &near(SYN, 1000, 0))?;
    let back = forwarded(&datapath, HUB_NIC, &syn.answer(SYN | ACK, BACKEND_SEQUENCE))?;
    assert_eq!((back.destination_mac, back.source_mac), (mac, bench::TENANT_MAC));
    forwarded(&datapath, TENANT_NIC, &near(ACK, 1001, BACKEND_SEQUENCE + 1))?;
    let back = forwarded(&datapath, HUB_NIC, &syn.answer(ACK, BACKEND_SEQUENCE + 1))?;
    assert_eq!(back.destination_mac, mac);

    let far = connect(&datapath, (I::CLIENT, 40000))?;
    let back = |datapath: &Datapath| -> Result<[u8; 6]> {
        Ok(forwarded(datapath, HUB_NIC, &far.answer(ACK, BACKEND_SEQUENCE + 1))?.destination_mac)
    };
    assert_eq!(back(&datapath)?, bench::GATEWAY_MAC);
    // The gateway's index is repointed when its MAC moves, and until one is known the client's last hop serves.
    let gateway = u32::from(bench::GATEWAY_HOP);
    let mut hop = datapath.array::<abi::NextHop>(names::NEXT_HOPS)?.get(&gateway, 0)?;
    hop.destination = [2, 0, 0, 0, 1, 0x77];
    datapath.array(names::NEXT_HOPS)?.set(gateway, hop, 0)?;
    assert_eq!(back(&datapath)?, [2, 0, 0, 0, 1, 0x77]);
    hop.flags = 0;
    datapath.array(names::NEXT_HOPS)?.set(gateway, hop, 0)?;
    assert_eq!(back(&datapath)?, bench::GATEWAY_MAC);
    Ok(())
}

fn clients_of_the_segments_second_prefix_are_on_the_link<I: Ip>() -> Result<()> {
    let mut datapath = datapath(1)?;
    let slot = abi::segment_index(TENANT_NIC as u32, 0);
    let segment = datapath.array::<abi::Segment>(names::SEGMENTS)?.get(&slot, 0)?;
    let address = I::CLIENT.mapped();
    let word = |at: usize| u32::from_ne_bytes([address[at], address[at + 1], address[at + 2], address[at + 3]]);
    let with = if I::IS_V6 {
        let mask = [u32::MAX, u32::MAX, 0, 0];
        abi::Segment { second_network6_be: [word(0), word(4), 0, 0], second_mask6_be: mask, ..segment }
    } else {
        let mask = 0xffff_ff00u32.to_be();
        abi::Segment { second_network4_be: word(12) & mask, second_mask4_be: mask, ..segment }
    };
    datapath.array(names::SEGMENTS)?.set(slot, with, 0)?;
    let mac = [2, 0, 0, 0, 1, 0x61];
    let near = |port, flags| Segment { source_mac: mac, ..client((I::CLIENT, port), flags, 1000, 0) };
    let syn = forwarded(&datapath, TENANT_NIC, &near(40000, SYN))?;
    let back = forwarded(&datapath, HUB_NIC, &syn.answer(SYN | ACK, BACKEND_SEQUENCE))?;
    assert_eq!(back.destination_mac, mac);

    // What is ours there can be no client's address.
    let key = abi::AddressKey { address: I::CLIENT.mapped(), segment: bench::TENANT_SEGMENT, port_be: 0 };
    let own = abi::LocalAddress { flags: abi::ADDRESS_HOST, ..abi::LocalAddress::ZERO };
    datapath.hash(names::ADDRESSES)?.insert(key, own, 0)?;
    assert_eq!(send(&datapath, TENANT_NIC, &near(40001, SYN))?.action, DROP);
    assert_eq!(datapath.reasons()?, only(Reason::BadSource, 1));
    Ok(())
}

fn a31_a_vip_that_is_silent_answers_nothing_at_ports_that_nobody_serves<I: Ip>() -> Result<()> {
    let mut datapath = datapath(1)?;
    let key = abi::AddressKey { address: I::VIP.mapped(), segment: bench::TENANT_SEGMENT, port_be: 0 };
    let mut vip: abi::LocalAddress = datapath.hash(names::ADDRESSES)?.get(&key, 0)?;
    vip.flags |= abi::ADDRESS_UNSERVED_DROP;
    datapath.hash(names::ADDRESSES)?.insert(key, vip, 0)?;
    let mut syn = client((I::CLIENT, 40000), SYN, 1000, 0);
    syn.destination.1 = 81;
    assert_eq!(send(&datapath, TENANT_NIC, &syn)?.action, DROP);
    let mut datagram = query((I::CLIENT, 40000), b"x");
    datagram.destination.1 = 81;
    assert_eq!(datapath.run(TENANT_NIC, &datagram.frame())?.action, DROP);
    assert_eq!(datapath.reasons()?, only(Reason::UnservedQuiet, 2));
    // The ports that are served are as they were.
    connect(&datapath, (I::CLIENT, 40000))?;
    Ok(())
}

fn a_marked_flow_is_absent_at_once_and_deleted_after_the_grace<I: Ip>() -> Result<()> {
    let mut datapath = datapath(1)?;
    let source = (I::CLIENT, 40000);
    let syn = connect(&datapath, source)?;
    let key = key(source, bench::PORT, TCP);
    assert_eq!(mark(&datapath, key)?, 1);
    assert_eq!(mark(&datapath, key)?, 0, "it is marked once");
    assert_eq!(datapath.flows::<I>()?.len(), 0);
    for (nic, segment) in [
        (TENANT_NIC, client(source, ACK, 1001, BACKEND_SEQUENCE + 1)),
        (HUB_NIC, syn.answer(ACK, BACKEND_SEQUENCE + 1)),
    ] {
        let outcome = send(&datapath, nic, &segment)?;
        assert_eq!((outcome.action, Segment::<I>::parse(&outcome.frame)?.flags), (TX, RST));
    }
    age(&datapath, 6)?;
    let keys = datapath.flow_table::<I>()?.keys().count();
    assert_eq!(keys, 0);
    assert_eq!(datapath.used::<I>(bench::TENANT)?.flows, 0);
    Ok(())
}

/// What a reader finds whose element was recycled after its look-up: a live half that says another tuple, segment or protocol.
fn a_half_of_another_flow_under_the_key_translates_nothing<I: Ip>() -> Result<()> {
    let mut datapath = datapath(1)?;
    let source = (I::CLIENT, 40000);
    let syn = connect(&datapath, source)?;
    let client_key = key(source, bench::PORT, TCP);
    let (forward, reverse) = halves::<I>(&mut datapath, &client_key)?;
    let backend_key = abi::FlowKey::reply(&forward.to, bench::HUB_SEGMENT, TCP);
    for (nic, segment, key, half) in [
        (TENANT_NIC, client(source, ACK, 1001, BACKEND_SEQUENCE + 1), client_key, forward),
        (HUB_NIC, syn.answer(ACK, BACKEND_SEQUENCE + 1), backend_key, reverse),
    ] {
        let lookup = key.lookup(bench::LOOKUP_SECRET);
        let of_tuple = |bits: &[usize]| {
            let mut tuple = key.tuple;
            for bit in bits {
                bytemuck::bytes_of_mut(&mut tuple)[bit / 8] ^= 1 << (bit % 8);
            }
            abi::Flow { tuple, ..half }
        };
        let (bits, address_bits) = (8 * size_of_val(&key.tuple), 8 * size_of::<I::Address>());
        let mut others: Vec<_> = (0..bits).map(|bit| of_tuple(&[bit])).collect();
        others.extend((0..address_bits).map(|bit| of_tuple(&[bit, bit + address_bits])));
        others.extend((0..16).map(|bit| abi::Flow { segment: half.segment ^ (1 << bit), ..half }));
        others.push(abi::Flow { state: half.state ^ abi::FLOW_UDP, ..half });
        for other in others {
            datapath.flow_table::<I>()?.insert(lookup, other, 0)?;
            let action = send(&datapath, nic, &segment)?.action;
            assert!([DROP, TX].contains(&action), "action {action} by {other:?}");
            let found = datapath.flow_table::<I>()?.get(&lookup, 0)?;
            assert_eq!(found, other, "the other flow counts nothing of it");
        }
        datapath.flow_table::<I>()?.insert(lookup, half, 0)?;
        forwarded(&datapath, nic, &segment)?;
    }
    Ok(())
}

/// Another VIP of the tenant, in the first one's subnet.
const SECOND_VIP: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0xa, 0, 0, 0, 0, 0x35);

/// The client of [`SECOND_VIP`] that the flow table would have under the key of the bench's client, from the same port. Only who knows the
/// secret can tell which one that is.
fn look_alike() -> Ipv6Addr {
    let words = |address: Ipv6Addr| bytemuck::cast::<_, [u64; 2]>(address.octets());
    let ([prefix, interface], vip) = (words(Ipv6Addr::CLIENT), words(Ipv6Addr::VIP)[1]);
    let secret = [bench::LOOKUP_SECRET[2], bench::LOOKUP_SECRET[3]];
    let mixed = abi::mixed(interface, vip, secret);
    let other = mixed.wrapping_sub(abi::mixed(0, words(SECOND_VIP)[1], secret));
    Ipv6Addr::from(bytemuck::cast::<_, [u8; 16]>([prefix, other]))
}

#[test]
#[ignore = "needs root"]
fn clients_that_the_flow_table_cannot_tell_apart_never_get_each_others_packets() -> Result<()> {
    let mut datapath = datapath(1)?;
    let (_, frontend) = bench::tcp_frontend::<Ipv6Addr>(1);
    datapath.set_frontend(abi::Frontend { vip: SECOND_VIP.octets(), ..frontend })?;
    let vip = (SECOND_VIP, bench::PORT);
    let (first, second) = ((Ipv6Addr::CLIENT, 40000), (look_alike(), 40000));
    let first_key = key(first, bench::PORT, TCP);
    let second_key = abi::FlowKey { tuple: abi::Tuple::new(second, vip), ..first_key };
    assert_ne!(second_key, first_key);
    assert_eq!(second_key.lookup(bench::LOOKUP_SECRET), first_key.lookup(bench::LOOKUP_SECRET));

    let answered = connect(&datapath, first)?;
    let halves_before = halves::<Ipv6Addr>(&mut datapath, &first_key)?;
    let from_second =
        |flags, sequence, acknowledged| Segment { destination: vip, ..client(second, flags, sequence, acknowledged) };
    let syn = forwarded(&datapath, TENANT_NIC, &from_second(SYN, 1000, 0))?;
    forwarded(&datapath, HUB_NIC, &syn.answer(SYN | ACK, BACKEND_SEQUENCE))?;
    // The proof of the second one's address finds the first one's flow.
    let proof = from_second(ACK, 1001, BACKEND_SEQUENCE + 1);
    let refused = send(&datapath, TENANT_NIC, &proof)?;
    assert_eq!((refused.action, Segment::<Ipv6Addr>::parse(&refused.frame)?.flags), (TX, RST));
    assert_eq!(halves::<Ipv6Addr>(&mut datapath, &first_key)?, halves_before);
    assert_eq!(datapath.flows::<Ipv6Addr>()?.len(), 2);
    let to_node = forwarded(&datapath, TENANT_NIC, &client(first, ACK, 1001, BACKEND_SEQUENCE + 1))?;
    assert_eq!((to_node.source, to_node.destination), (answered.source, answered.destination));
    let data = forwarded(&datapath, HUB_NIC, &answered.answer(ACK, BACKEND_SEQUENCE + 1))?;
    assert_eq!((data.source, data.destination), ((Ipv6Addr::VIP, bench::PORT), first));

    // A dead half is written over by its own client's next connection only.
    assert_eq!(mark(&datapath, first_key)?, 1);
    let there = |datapath: &mut Datapath| -> Result<_> {
        let half = datapath.flow_table::<Ipv6Addr>()?.get(&first_key.lookup(bench::LOOKUP_SECRET), 0)?;
        // The clock hand comes by.
        Ok(abi::Flow { state: half.state & !abi::FLOW_ENDED, ..half })
    };
    let dead = there(&mut datapath)?;
    assert_eq!(send(&datapath, TENANT_NIC, &proof)?.action, TX);
    assert_eq!(there(&mut datapath)?, dead);
    assert_eq!(datapath.reasons()?, only(Reason::TupleInUse, 2));
    // When it is gone, there is room.
    age(&datapath, 6)?;
    let to_node = forwarded(&datapath, TENANT_NIC, &proof)?;
    assert_eq!((to_node.source, to_node.destination), (syn.source, syn.destination));
    let data = forwarded(&datapath, HUB_NIC, &syn.answer(ACK, BACKEND_SEQUENCE + 1))?;
    assert_eq!((data.source, data.destination), (vip, second));
    assert_eq!(mark(&datapath, first_key)?, 0, "the first one's flow is not there, and the second one's is not meant");
    assert_eq!(mark(&datapath, second_key)?, 1);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_snat_port_whose_replies_look_like_another_flows_is_not_given() -> Result<()> {
    let mut datapath = datapath(1)?;
    let source = (Ipv6Addr::CLIENT, 40000);
    let syn = connect(&datapath, source)?;
    let (forward, reverse) = halves::<Ipv6Addr>(&mut datapath, &key(source, bench::PORT, TCP))?;
    let lookup = reverse.key().lookup(bench::LOOKUP_SECRET);
    assert_eq!(mark(&datapath, key(source, bench::PORT, TCP))?, 1);
    age(&datapath, 6)?;
    // Another flow's half has the place of the replies: the next port is taken, and that half stays as it is.
    let mut tuple = reverse.tuple;
    tuple.source_be[3] ^= 1;
    let other = abi::Flow { tuple, to: forward.tuple, ..reverse };
    datapath.flow_table::<Ipv6Addr>()?.insert(lookup, other, 0)?;
    let again = connect(&datapath, source)?;
    assert_eq!(again.destination, syn.destination);
    assert_ne!(again.source, syn.source);
    assert_eq!(datapath.flow_table::<Ipv6Addr>()?.get(&lookup, 0)?, other);
    Ok(())
}

/// Marks a flow as the agent does. Gives how many lived.
fn mark<A: abi::Address>(datapath: &Datapath, key: abi::FlowKey<A>) -> Result<u64> {
    Ok(datapath.control(&abi::ControlRequest::mark(key))?.result)
}

fn a65_flow_affinity_spreads_and_source_affinity_does_not<I: Ip>() -> Result<()> {
    let mut datapath = datapath(3)?;
    let nodes = |datapath: &Datapath, first: u16| -> Result<BTreeMap<I, u32>> {
        let mut counts = BTreeMap::new();
        for port in first..first + 1000 {
            let syn = forwarded(datapath, TENANT_NIC, &client((I::CLIENT, port), SYN, 1, 0))?;
            *counts.entry(syn.destination.0).or_default() += 1;
        }
        Ok(counts)
    };
    let spread = nodes(&datapath, 1000)?;
    assert_eq!(spread.len(), 3);
    assert!(spread.values().all(|&count| (283..=383).contains(&count)), "{spread:?}");
    let (_, frontend) = bench::tcp_frontend::<I>(3);
    datapath.set_frontend(abi::Frontend { flags: abi::FRONTEND_SOURCE_AFFINITY, ..frontend })?;
    assert_eq!(nodes(&datapath, 3000)?.len(), 1);
    Ok(())
}

fn adopted_connections_keep_their_backend_and_port<I: Ip>() -> Result<()> {
    let mut datapath = datapath(3)?;
    let (_, frontend) = bench::tcp_frontend::<I>(3);
    datapath.set_frontend(abi::Frontend { flags: abi::FRONTEND_ADOPT, ..frontend })?;
    let mut before = Vec::new();
    for port in 40000..40010 {
        before.push(((I::CLIENT, port), connect(&datapath, (I::CLIENT, port))?));
    }
    // Another machine takes the VIP over: nothing in the tables.
    let mut datapath = self::datapath(3)?;
    datapath.set_frontend(abi::Frontend { flags: abi::FRONTEND_ADOPT, ..frontend })?;
    // Not without being told to.
    let data = client(before[0].0, ACK, 1001, BACKEND_SEQUENCE + 1);
    assert_eq!(send(&datapath, TENANT_NIC, &data)?.action, TX);
    assert_eq!(datapath.reasons()?, only(Reason::NoFlow, 1));
    let until = datapath.tick()?.wrapping_add(300 * lbd_tests::datapath::TICKS_PER_SECOND);
    datapath.set_settings(abi::Settings { adopt_until: until, ..bench::settings() })?;
    for (source, syn) in &before {
        let there = forwarded(&datapath, TENANT_NIC, &client(*source, ACK, 1001, BACKEND_SEQUENCE + 1))?;
        assert_eq!((there.source, there.destination), (syn.source, syn.destination));
        let back = forwarded(&datapath, HUB_NIC, &syn.answer(ACK, BACKEND_SEQUENCE + 1))?;
        assert_eq!((back.source, back.destination), ((I::VIP, bench::PORT), *source));
        let (forward, reverse) = halves::<I>(&mut datapath, &key(*source, bench::PORT, TCP))?;
        assert!(forward.state & abi::FLOW_ADOPTED != 0 && reverse.state & abi::FLOW_ADOPTED != 0);
    }
    assert_eq!(datapath.used::<I>(bench::TENANT)?.flows, before.len() as u64);
    // What is no connection's is not adopted: RST, FIN, SYN-ACK.
    for flags in [RST, SYN | ACK] {
        assert_ne!(send(&datapath, TENANT_NIC, &client((I::CLIENT, 50000), flags, 7, 8))?.action, REDIRECT);
    }
    // Nor for a frontend that is not set to, nor when the time is over.
    datapath.set_frontend(frontend)?;
    assert_eq!(send(&datapath, TENANT_NIC, &client((I::CLIENT, 50001), ACK, 7, 8))?.action, TX);
    datapath.set_frontend(abi::Frontend { flags: abi::FRONTEND_ADOPT, ..frontend })?;
    let over = datapath.tick()?.wrapping_sub(1);
    datapath.set_settings(abi::Settings { adopt_until: over, ..bench::settings() })?;
    assert_eq!(send(&datapath, TENANT_NIC, &client((I::CLIENT, 50002), ACK, 7, 8))?.action, TX);
    assert_eq!(datapath.flows::<I>()?.len(), 2 * before.len());
    Ok(())
}

fn udp_flows_go_both_ways_and_are_counted<I: Ip>() -> Result<()> {
    let mut datapath = datapath(1)?;
    let source = (I::CLIENT, 40000);
    let asked = query(source, b"question");
    let seen = relayed(&datapath, TENANT_NIC, &asked)?;
    assert!((bench::FIRST_PORT..=bench::LAST_PORT).contains(&seen.source.1));
    let expected = Datagram {
        source_mac: bench::HUB_MAC,
        destination_mac: bench::node_mac(0),
        source: (I::SNAT, seen.source.1),
        destination: (I::NODES[0], bench::UDP_NODE_PORT),
        ttl: 63,
        ..asked.clone()
    };
    assert_eq!(seen, expected);
    let flow = key(source, bench::UDP_PORT, UDP);
    let (forward, reverse) = halves::<I>(&mut datapath, &flow)?;
    assert_eq!((forward.state, reverse.state), (abi::FLOW_UDP, abi::FLOW_UDP | abi::FLOW_REVERSE));
    let answer = seen.answer(b"answer");
    let back = relayed(&datapath, HUB_NIC, &answer)?;
    let expected = Datagram {
        source_mac: bench::TENANT_MAC,
        destination_mac: bench::GATEWAY_MAC,
        source: (I::VIP, bench::UDP_PORT),
        destination: source,
        ttl: 63,
        ..answer.clone()
    };
    assert_eq!(back, expected);
    // The same flow again, the same way; another client, another port.
    assert_eq!(relayed(&datapath, TENANT_NIC, &asked)?, seen);
    let other = ask(&datapath, (I::CLIENT, 40001))?;
    assert_ne!(other.source.1, seen.source.1);
    let (forward, reverse) = halves::<I>(&mut datapath, &flow)?;
    let replied = abi::FLOW_UDP | abi::FLOW_REPLIED;
    assert_eq!((forward.state, reverse.state), (replied, replied | abi::FLOW_REVERSE));
    assert_eq!((forward.packets(), reverse.packets()), (2, 1));
    let (asked_length, answer_length) = (asked.frame().len() as u64 - 14, answer.frame().len() as u64 - 14);
    assert_eq!((forward.bytes, reverse.bytes), (2 * asked_length, answer_length));
    let used = datapath.used::<I>(bench::TENANT)?;
    assert_eq!((used.flows, used.udp, used.half_open), (2, 2, 0));
    let counters = datapath.frontend_counters(I::FRONTEND + 1)?;
    let expected = abi::FrontendCounters {
        in_packets: 3,
        in_bytes: 3 * asked_length,
        out_packets: 2,
        out_bytes: 2 * answer_length,
        flows: 2,
        refused: 0,
    };
    assert_eq!(counters, expected);
    assert_eq!(datapath.reasons()?, BTreeMap::new());
    Ok(())
}

fn udp_flows_expire_sooner_without_a_reply<I: Ip>() -> Result<()> {
    let mut datapath = datapath(1)?;
    relayed(&datapath, TENANT_NIC, &query((I::CLIENT, 40000), b"question"))?;
    ask(&datapath, (I::CLIENT, 40001))?;
    age(&datapath, 2)?;
    assert_eq!(datapath.flows::<I>()?.len(), 4);
    datapath.set_settings(abi::Settings { tombstone: 1, ..bench::settings() })?;
    datapath.set_timeouts(abi::Timeouts { udp_unreplied: 1, ..bench::timeouts() })?;
    age(&datapath, 8)?;
    halves::<I>(&mut datapath, &key((I::CLIENT, 40001), bench::UDP_PORT, UDP))?;
    assert_eq!(datapath.flows::<I>()?.len(), 2, "the one without a reply is gone");
    let used = datapath.used::<I>(bench::TENANT)?;
    assert_eq!((used.flows, used.udp), (1, 1));
    datapath.set_timeouts(abi::Timeouts { udp_replied: 1, ..bench::timeouts() })?;
    age(&datapath, 8)?;
    assert_eq!(datapath.flows::<I>()?.len(), 0);
    let used = datapath.used::<I>(bench::TENANT)?;
    assert_eq!((used.flows, used.udp), (0, 0));
    // The tuple is free again.
    ask(&datapath, (I::CLIENT, 40000))?;
    Ok(())
}

fn udp_flows_beyond_the_tenants_quota_are_refused_and_the_others_go_on<I: Ip>() -> Result<()> {
    let mut datapath = datapath(1)?;
    datapath.limit::<I>(bench::TENANT, abi::FamilyLimits { udp: 2, ..abi::FamilyLimits::ZERO })?;
    ask(&datapath, (I::CLIENT, 1))?;
    ask(&datapath, (I::CLIENT, 2))?;
    let third = query((I::CLIENT, 3), b"question").frame();
    assert_eq!(datapath.run(TENANT_NIC, &third)?, Outcome { action: DROP, frame: third.clone() });
    assert_eq!(datapath.reasons()?, only(Reason::TenantUdp, 1));
    // What is open goes on, and TCP is another quota.
    ask(&datapath, (I::CLIENT, 1))?;
    connect(&datapath, (I::CLIENT, 1))?;
    let used = datapath.used::<I>(bench::TENANT)?;
    assert_eq!((used.flows, used.udp), (3, 2));
    datapath.limit::<I>(bench::TENANT, abi::FamilyLimits { udp: 3, ..abi::FamilyLimits::ZERO })?;
    ask(&datapath, (I::CLIENT, 3))?;
    Ok(())
}

fn udp_stray_datagrams_are_dropped_and_the_hosts_own_are_not<I: Ip>() -> Result<()> {
    let mut datapath = datapath(1)?;
    let stray = Datagram {
        source_mac: bench::node_mac(0),
        destination_mac: bench::HUB_MAC,
        source: (I::NODES[0], bench::UDP_NODE_PORT),
        destination: (I::SNAT, 20001),
        ..query((I::CLIENT, 1), b"late")
    };
    let frame = stray.frame();
    assert_eq!(datapath.run(HUB_NIC, &frame)?, Outcome { action: DROP, frame });
    assert_eq!(datapath.reasons()?, BTreeMap::from([((0, Reason::StrayDatagram), 1)]));
    for own in [
        Datagram { destination: (I::SNAT, 40000), ..stray.clone() },
        Datagram { source: (I::NODES[0], 53), ..stray.clone() },
        Datagram { source: (I::CLIENT, bench::UDP_NODE_PORT), ..stray.clone() },
    ] {
        let frame = own.frame();
        assert_eq!(datapath.run(HUB_NIC, &frame)?, Outcome { action: PASS, frame }, "{own:?}");
    }
    Ok(())
}

/// A client's segment to the frontend with `preserve_client`.
fn preserving<I: Ip>(source: (I, u16), flags: u8, sequence: u32, acknowledgement: u32) -> Segment<I> {
    Segment { destination: (I::VIP, bench::PRESERVE_PORT), ..client(source, flags, sequence, acknowledgement) }
}

fn preserved_clients_go_both_ways<I: Ip>() -> Result<()> {
    let mut datapath = datapath(1)?;
    let source = (I::CLIENT, 40000);
    let syn = forwarded(&datapath, TENANT_NIC, &preserving(source, SYN, 1000, 0))?;
    assert_eq!((syn.source, syn.destination), (source, (I::NODES[0], bench::NODE_PORT)));
    assert_eq!((syn.source_mac, syn.destination_mac), (bench::HUB_MAC, bench::node_mac(0)));
    let back = forwarded(&datapath, HUB_NIC, &syn.answer(SYN | ACK, BACKEND_SEQUENCE))?;
    assert_eq!((back.source, back.destination), ((I::VIP, bench::PRESERVE_PORT), source));
    forwarded(&datapath, TENANT_NIC, &preserving(source, ACK, 1001, BACKEND_SEQUENCE + 1))?;
    let mut data = syn.answer(ACK, BACKEND_SEQUENCE + 1);
    data.payload = b"pushed".to_vec();
    let back = forwarded(&datapath, HUB_NIC, &data)?;
    assert_eq!((back.source, back.destination), ((I::VIP, bench::PRESERVE_PORT), source));
    assert_eq!((back.destination_mac, &back.payload[..]), (bench::GATEWAY_MAC, &b"pushed"[..]));
    let (forward, reverse) = halves::<I>(&mut datapath, &key(source, bench::PRESERVE_PORT, TCP))?;
    assert_eq!(forward.to, abi::Tuple::new(source, (I::NODES[0], bench::NODE_PORT)));
    assert_eq!(reverse.to, abi::Tuple::new((I::VIP, bench::PRESERVE_PORT), source));
    assert_eq!(datapath.reasons()?, BTreeMap::new());
    let counters = datapath.frontend_counters(I::FRONTEND + 2)?;
    assert_eq!((counters.in_packets, counters.out_packets, counters.flows), (2, 2, 1));
    Ok(())
}

fn a_preserved_client_whose_tuple_is_taken_is_refused<I: Ip>() -> Result<()> {
    let mut datapath = datapath(1)?;
    // Two ports of the VIP with one target: a client's port can go to one of them only.
    let (_, frontend) = bench::preserving::<I>(1);
    datapath.set_frontend(abi::Frontend { port_be: 9443u16.to_be(), id: I::FRONTEND + 3, ..frontend })?;
    let source = (I::CLIENT, 40000);
    let first = forwarded(&datapath, TENANT_NIC, &preserving(source, SYN, 1000, 0))?;
    let other = Segment { destination: (I::VIP, 9443), ..client(source, SYN, 2000, 0) };
    let refused = |datapath: &Datapath| -> Result<()> {
        let outcome = send(datapath, TENANT_NIC, &other)?;
        assert_eq!(outcome.action, TX);
        let reset = Segment::<I>::parse(&outcome.frame)?;
        assert_eq!(reset, Segment { flags: RST | ACK, ..other.answer(0, 0) });
        Ok(())
    };
    // Against a half-open connection, and against a flow.
    refused(&datapath)?;
    forwarded(&datapath, HUB_NIC, &first.answer(SYN | ACK, BACKEND_SEQUENCE))?;
    forwarded(&datapath, TENANT_NIC, &preserving(source, ACK, 1001, BACKEND_SEQUENCE + 1))?;
    refused(&datapath)?;
    assert_eq!(datapath.reasons()?, only(Reason::TupleInUse, 2));
    assert_eq!(datapath.frontend_counters(I::FRONTEND + 3)?.refused, 2);
    let back = forwarded(&datapath, HUB_NIC, &first.answer(ACK, BACKEND_SEQUENCE + 1))?;
    assert_eq!(back.source, (I::VIP, bench::PRESERVE_PORT));
    // Another port of the client is free.
    forwarded(&datapath, TENANT_NIC, &Segment { source: (I::CLIENT, 40001), ..other })?;
    Ok(())
}

/// The SYN of a half-open connection is as old as `ticks`.
fn grow_old<I: Ip>(datapath: &mut Datapath, ticks: u32) -> Result<u32> {
    datapath.change_half_open::<I>(|record| record.first_syn = record.first_syn.wrapping_sub(ticks))
}

#[test]
#[ignore = "needs root"]
fn a_syn_without_answer_goes_to_the_next_candidate_after_900_ms() -> Result<()> {
    let mut datapath = datapath(3)?;
    let second = lbd_tests::datapath::TICKS_PER_SECOND;
    let source = (Ipv4Addr::CLIENT, 40000);
    let syn = client(source, SYN, 1000, 0);
    let first = forwarded(&datapath, TENANT_NIC, &syn)?;
    // At once: the same way.
    let again = forwarded(&datapath, TENANT_NIC, &syn)?;
    assert_eq!((again.source, again.destination), (first.source, first.destination));
    assert_eq!(grow_old::<Ipv4Addr>(&mut datapath, second)?, 1);
    let next = forwarded(&datapath, TENANT_NIC, &syn)?;
    assert_ne!(next.destination.0, first.destination.0);
    // There is one connection, and the rest of the handshake is with the new one.
    assert_eq!(datapath.change_half_open::<Ipv4Addr>(|_| ())?, 1);
    assert_eq!(datapath.used::<Ipv4Addr>(bench::TENANT)?.half_open, 1);
    forwarded(&datapath, HUB_NIC, &next.answer(SYN | ACK, BACKEND_SEQUENCE))?;
    forwarded(&datapath, TENANT_NIC, &client(source, ACK, 1001, BACKEND_SEQUENCE + 1))?;
    let (forward, _) = halves::<Ipv4Addr>(&mut datapath, &key(source, bench::PORT, TCP))?;
    assert_eq!(forward.to, abi::Tuple::new(next.source, next.destination));

    // A backend that answers others within the second keeps its SYN: it is only slow with this one.
    let source = (Ipv4Addr::CLIENT, 41000);
    let syn = client(source, SYN, 1000, 0);
    let first = forwarded(&datapath, TENANT_NIC, &syn)?;
    let mut port = 42000;
    let other = loop {
        port += 1;
        let other = half_open(&datapath, (Ipv4Addr::CLIENT, port))?;
        if other.destination.0 == first.destination.0 {
            break other;
        }
    };
    assert_eq!(other.destination, first.destination);
    grow_old::<Ipv4Addr>(&mut datapath, second)?;
    let again = forwarded(&datapath, TENANT_NIC, &syn)?;
    assert_eq!((again.source, again.destination), (first.source, first.destination));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_backend_that_answers_nobody_is_skipped_until_it_answers() -> Result<()> {
    let mut datapath = datapath(3)?;
    let second = lbd_tests::datapath::TICKS_PER_SECOND;
    let backend = u32::from(Ipv4Addr::FIRST_BACKEND);
    let mut chosen = Vec::new();
    for port in 40000..40100 {
        let syn = forwarded(&datapath, TENANT_NIC, &client((Ipv4Addr::CLIENT, port), SYN, 1000, 0))?;
        if syn.destination.0 == Ipv4Addr::NODES[0] {
            chosen.push(syn);
        } else {
            forwarded(&datapath, HUB_NIC, &syn.answer(SYN | ACK, BACKEND_SEQUENCE))?;
        }
    }
    assert!(chosen.len() > 3, "{}", chosen.len());
    let mut used = datapath.array::<abi::BackendUse>(names::BACKEND_USE)?;
    let mut before = used.get(&backend, 0)?;
    assert!(before.unanswered >= 3, "{before:?}");
    // Three seconds pass.
    before.since = before.since.wrapping_sub(3 * second + 1);
    before.answered = before.answered.wrapping_sub(3 * second + 1);
    used.set(backend, before, 0)?;
    let reached = |datapath: &Datapath, ports: std::ops::Range<u16>| -> Result<usize> {
        let mut reached = 0;
        for port in ports {
            let syn = forwarded(datapath, TENANT_NIC, &client((Ipv4Addr::CLIENT, port), SYN, 1000, 0))?;
            reached += usize::from(syn.destination.0 == Ipv4Addr::NODES[0]);
        }
        Ok(reached)
    };
    let trials = reached(&datapath, 41000..41100)?;
    assert!(trials <= 2, "{trials} SYNs in well below a second went to the dead one");
    // Its first SYN-ACK clears it.
    forwarded(&datapath, HUB_NIC, &chosen[0].answer(SYN | ACK, BACKEND_SEQUENCE))?;
    assert!(reached(&datapath, 42000..42100)? > 10);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a12_udp_over_ipv6_without_a_checksum_is_dropped_and_over_ipv4_it_stays_without() -> Result<()> {
    let mut datapath = datapath(1)?;
    let frame = Datagram { checksum: false, ..query((Ipv6Addr::CLIENT, 40000), b"question") }.frame();
    assert_eq!(datapath.run(TENANT_NIC, &frame)?, Outcome { action: DROP, frame });
    assert_eq!(datapath.reasons()?, only(Reason::UdpNoChecksum, 1));
    assert_eq!(datapath.flows::<Ipv6Addr>()?.len(), 0);
    assert_eq!(datapath.used::<Ipv6Addr>(bench::TENANT)?, abi::FamilyUse::ZERO);
    let asked = Datagram { checksum: false, ..query((Ipv4Addr::CLIENT, 40000), b"question") };
    let seen = relayed(&datapath, TENANT_NIC, &asked)?;
    assert!(!seen.checksum);
    let answer = Datagram { checksum: false, ..seen.answer(b"answer") };
    assert!(!relayed(&datapath, HUB_NIC, &answer)?.checksum);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn ipv6_extension_headers_fragments_and_lies_are_dropped_under_their_own_reasons() -> Result<()> {
    let good = client((Ipv6Addr::CLIENT, 40000), SYN, 1000, 0).frame();
    let with = |at: usize, value: u8| {
        let mut frame = good.clone();
        frame[at] = value;
        frame
    };
    let (next_header, payload_length) = (20, 18);
    let cases = [
        ("hop-by-hop options", with(next_header, 0), Reason::IpOptions),
        ("routing", with(next_header, 43), Reason::IpOptions),
        ("destination options", with(next_header, 60), Reason::IpOptions),
        ("authentication", with(next_header, 51), Reason::IpOptions),
        ("fragment", with(next_header, 44), Reason::FragmentOrphan),
        ("a protocol that is not served", with(next_header, 132), Reason::UnservedProtocol),
        ("a payload longer than the frame", with(payload_length, 1), Reason::Malformed),
        ("a payload shorter than the TCP header", with(payload_length + 1, 19), Reason::Malformed),
        ("version 4", with(14, 0x40), Reason::Malformed),
        ("a TCP header of 16 bytes", with(14 + 40 + 12, 4 << 4), Reason::Malformed),
        ("source and destination the same", land(), Reason::Land),
    ];
    for (what, frame, reason) in cases {
        let mut datapath = datapath(1)?;
        assert_eq!(datapath.run(TENANT_NIC, &frame)?, Outcome { action: DROP, frame }, "{what}");
        assert_eq!(datapath.reasons()?, only(reason, 1), "{what}");
        assert_eq!(datapath.flows::<Ipv6Addr>()?.len(), 0, "{what}");
    }
    Ok(())
}

fn land() -> Vec<u8> {
    client((Ipv6Addr::VIP, bench::PORT), SYN, 1000, 0).frame()
}
