//! What tenants may not do to each other and to each other's connections: VLANs, quotas, forged packets, SNAT ports.
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use lbd_common::abi::{self, names};
use lbd_common::packet::TCP;
use lbd_common::reason::Reason;
use lbd_common::tcp::{ACK, FIN, RST, SYN};
use lbd_tests::datapath::bench::{self, Ip};
use lbd_tests::datapath::{DROP, Datapath, HUB_NIC, Outcome, PASS, REDIRECT, TENANT_NIC, TX};
use lbd_tests::exchange::{BACKEND_SEQUENCE, age, ask, close, connect, datapath, forwarded, only, send};
use lbd_tests::packets::{Segment, client, query, tagged, untagged};

/// Everything that is counted for tenants b (0) and c (1), and their flows.
fn counted(datapath: &mut Datapath, which: usize) -> Result<impl PartialEq + std::fmt::Debug + use<>> {
    let reasons: Vec<_> =
        datapath.reasons()?.into_iter().filter(|((tenant, _), _)| *tenant == bench::VLAN_TENANTS[which]).collect();
    let mut frontends = Vec::new();
    for id in [bench::VLAN_FRONTENDS[which], bench::WORKER_FRONTENDS[which]] {
        frontends.push(datapath.frontend_counters(id)?);
    }
    let flows: Vec<_> = datapath
        .flows::<Ipv4Addr>()?
        .into_iter()
        .filter(|(_, flow)| [bench::VLAN_FRONTENDS[which], bench::WORKER_FRONTENDS[which]].contains(&flow.frontend))
        .collect();
    Ok((reasons, frontends, flows, datapath.used::<Ipv4Addr>(bench::VLAN_TENANTS[which])?))
}

/// A segment in a VLAN of the tenant NIC, which must come out untagged at the hub; what arrives there.
fn to_hub(datapath: &Datapath, vlan: u16, segment: &Segment) -> Result<Segment> {
    let outcome = datapath.run(TENANT_NIC, &tagged(&segment.frame(), vlan))?;
    ensure!(outcome.action == REDIRECT, "not forwarded: action {} of {segment:?}", outcome.action);
    Segment::parse(&outcome.frame)
}

/// A segment from the hub, which must come out tagged; what arrives, and the tag.
fn from_hub(datapath: &Datapath, segment: &Segment) -> Result<(u16, Segment)> {
    let outcome = send(datapath, HUB_NIC, segment)?;
    ensure!(outcome.action == REDIRECT, "not forwarded: action {} of {segment:?}", outcome.action);
    let (tag, frame) = untagged(&outcome.frame)?;
    Ok((tag, Segment::parse(&frame)?))
}

/// A handshake from a VLAN; gives what the node saw in the SYN.
fn connect_in(datapath: &Datapath, vlan: u16, source: (Ipv4Addr, u16)) -> Result<Segment> {
    let syn = to_hub(datapath, vlan, &client(source, SYN, 1000, 0))?;
    let (tag, _) = from_hub(datapath, &syn.answer(SYN | ACK, BACKEND_SEQUENCE))?;
    ensure!(tag == vlan, "the SYN-ACK left in VLAN {tag}");
    to_hub(datapath, vlan, &client(source, ACK, 1001, BACKEND_SEQUENCE + 1))?;
    Ok(syn)
}

#[test]
#[ignore = "needs root"]
fn a22_tags_are_taken_off_on_the_way_to_the_hub_and_put_on_on_the_way_back() -> Result<()> {
    let mut datapath = datapath(1)?;
    let source = (bench::CLIENT, 40000);
    for which in 0..2 {
        let syn = to_hub(&datapath, bench::VLANS[which], &client(source, SYN, 1000, 0))?;
        let expected = Segment {
            source_mac: bench::HUB_MAC,
            destination_mac: bench::node_mac(1 + which),
            source: (bench::SNAT, syn.source.1),
            destination: (bench::NODES[1 + which], bench::NODE_PORT),
            ttl: 63,
            ..client(source, SYN, 1000, 0)
        };
        assert_eq!(syn, expected);
        let answer = syn.answer(SYN | ACK, BACKEND_SEQUENCE);
        let expected = Segment {
            source_mac: bench::TENANT_MAC,
            destination_mac: bench::GATEWAY_MAC,
            source: (bench::VIP, bench::PORT),
            destination: source,
            ttl: 63,
            ..answer.clone()
        };
        assert_eq!(from_hub(&datapath, &answer)?, (bench::VLANS[which], expected));
        to_hub(&datapath, bench::VLANS[which], &client(source, ACK, 1001, BACKEND_SEQUENCE + 1))?;
        let mut data = syn.answer(ACK, BACKEND_SEQUENCE + 1);
        data.payload = vec![which as u8; 1400];
        let (tag, arrived) = from_hub(&datapath, &data)?;
        assert_eq!((tag, arrived.payload), (bench::VLANS[which], data.payload));
        let used = datapath.used::<Ipv4Addr>(bench::VLAN_TENANTS[which])?;
        assert_eq!((used.flows, used.half_open), (1, 0));
        let counters = datapath.frontend_counters(bench::VLAN_FRONTENDS[which])?;
        assert_eq!((counters.in_packets, counters.in_bytes), (2, 80));
        assert_eq!((counters.out_packets, counters.out_bytes), (2, 40 + 1440));
        assert_eq!(counters.flows, 1);
    }
    assert_eq!(datapath.reasons()?, BTreeMap::new());
    assert_eq!(datapath.used::<Ipv4Addr>(bench::TENANT)?, abi::FamilyUse::ZERO);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn the_same_addresses_in_three_segments_never_mix() -> Result<()> {
    let mut datapath = datapath(1)?;
    let source = (bench::CLIENT, 40000);
    let untagged_syn = connect(&datapath, source)?;
    assert_eq!(untagged_syn.destination.0, bench::NODES[0]);
    let first = connect_in(&datapath, bench::VLANS[0], source)?;
    let before = counted(&mut datapath, 0)?;
    let second = connect_in(&datapath, bench::VLANS[1], source)?;
    assert_eq!((first.destination.0, second.destination.0), (bench::NODES[1], bench::NODES[2]));
    assert_eq!(datapath.live_halves()?, 6);
    // Traffic of tenant c moves nothing of tenant b's.
    let data = client(source, ACK, 1001, BACKEND_SEQUENCE + 1);
    for _ in 0..10 {
        assert_eq!(to_hub(&datapath, bench::VLANS[1], &data)?.destination.0, bench::NODES[2]);
        let (tag, _) = from_hub(&datapath, &second.answer(ACK, BACKEND_SEQUENCE + 1))?;
        assert_eq!(tag, bench::VLANS[1]);
    }
    assert_eq!(counted(&mut datapath, 0)?, before);
    // And each still reaches its own.
    assert_eq!(forwarded(&datapath, TENANT_NIC, &data)?.destination, untagged_syn.destination);
    assert_eq!(to_hub(&datapath, bench::VLANS[0], &data)?.destination, first.destination);
    let back = forwarded(&datapath, HUB_NIC, &untagged_syn.answer(ACK, BACKEND_SEQUENCE + 1))?;
    assert_eq!(back.destination, source);
    let (tag, _) = from_hub(&datapath, &first.answer(ACK, BACKEND_SEQUENCE + 1))?;
    assert_eq!(tag, bench::VLANS[0]);

    // Tenant c closes: tenant b's connection with the same addresses stays open.
    let before = counted(&mut datapath, 0)?;
    to_hub(&datapath, bench::VLANS[1], &client(source, RST, 1001, 0))?;
    assert_eq!(counted(&mut datapath, 0)?, before);
    assert_eq!(datapath.reasons()?, BTreeMap::new());
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_flow_of_one_vlan_is_no_flow_in_another() -> Result<()> {
    let mut datapath = datapath(1)?;
    let source = (bench::CLIENT, 40000);
    connect_in(&datapath, bench::VLANS[0], source)?;
    let before = counted(&mut datapath, 0)?;
    let data = client(source, ACK, 1001, BACKEND_SEQUENCE + 1);
    // In tenant c's VLAN: refused, with tenant c's tag.
    let outcome = datapath.run(TENANT_NIC, &tagged(&data.frame(), bench::VLANS[1]))?;
    assert_eq!(outcome.action, TX);
    let (tag, frame) = untagged(&outcome.frame)?;
    assert_eq!(tag, bench::VLANS[1]);
    let reset = Segment::parse(&frame)?;
    assert_eq!(reset, Segment { flags: RST, sequence: BACKEND_SEQUENCE + 1, acknowledgement: 0, ..data.answer(0, 0) });
    // Untagged: tenant a's.
    assert_eq!(send(&datapath, TENANT_NIC, &data)?.action, TX);
    assert_eq!(
        datapath.reasons()?,
        BTreeMap::from([((bench::TENANT, Reason::NoFlow), 1), ((bench::VLAN_TENANTS[1], Reason::NoFlow), 1)])
    );
    assert_eq!(counted(&mut datapath, 0)?, before);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn workers_in_the_tenants_own_vlan_are_reached_with_its_tag_and_answer_for_nobody_else() -> Result<()> {
    let mut datapath = datapath(1)?;
    let source = (bench::CLIENT, 40000);
    let through = |vlan: u16, segment: &Segment| -> Result<Segment> {
        let outcome = datapath.run(TENANT_NIC, &tagged(&segment.frame(), vlan))?;
        ensure!(outcome.action == TX, "not sent back out: action {} of {segment:?}", outcome.action);
        let (tag, frame) = untagged(&outcome.frame)?;
        ensure!(tag == vlan, "left in VLAN {tag}");
        Segment::parse(&frame)
    };
    let to_worker = |flags, sequence, acknowledgement| Segment {
        destination: (bench::VIP, bench::WORKER_PORT),
        ..client(source, flags, sequence, acknowledgement)
    };
    let mut seen = Vec::new();
    for vlan in bench::VLANS {
        let syn = through(vlan, &to_worker(SYN, 1000, 0))?;
        assert_eq!(syn.destination, (bench::WORKER, bench::NODE_PORT));
        assert_eq!((syn.source.0, syn.destination_mac), (bench::TENANT_ADDRESS, bench::WORKER_MAC));
        let back = through(vlan, &syn.answer(SYN | ACK, BACKEND_SEQUENCE))?;
        assert_eq!((back.source, back.destination), ((bench::VIP, bench::WORKER_PORT), source));
        through(vlan, &to_worker(ACK, 1001, BACKEND_SEQUENCE + 1))?;
        seen.push(syn);
    }
    assert_eq!(datapath.live_halves()?, 4);
    assert_eq!(datapath.reasons()?, BTreeMap::new());
    // Tenant b's worker answers a connection of tenant c's, if it is not its own as well.
    assert_ne!(bench::VLANS[0], bench::VLANS[1]);
    let before = counted(&mut datapath, 0)?;
    for flags in [ACK, RST, FIN | ACK] {
        let reply = seen[0].answer(flags, BACKEND_SEQUENCE + 1);
        let frame = tagged(&reply.frame(), bench::VLANS[1]);
        let outcome = datapath.run(TENANT_NIC, &frame)?;
        // Both tenants' first choice of port is by a hash with the segment in it.
        assert_ne!(seen[0].source.1, seen[1].source.1);
        assert_ne!(outcome.action, REDIRECT);
        assert!(outcome.action == DROP || untagged(&outcome.frame)?.0 == bench::VLANS[1]);
    }
    assert_eq!(counted(&mut datapath, 0)?, before);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_tenant_answers_for_no_backend_of_the_hub() -> Result<()> {
    let mut datapath = datapath(1)?;
    let syn = connect(&datapath, (bench::CLIENT, 40000))?;
    let before = datapath.flows::<Ipv4Addr>()?;
    for flags in [ACK, SYN | ACK, RST | ACK, FIN | ACK] {
        let mut reply = syn.answer(flags, BACKEND_SEQUENCE + 1);
        reply.destination_mac = bench::TENANT_MAC;
        let frame = reply.frame();
        assert_eq!(datapath.run(TENANT_NIC, &frame)?, Outcome { action: DROP, frame });
        let tagged_reply = tagged(&reply.frame(), bench::VLANS[0]);
        assert_eq!(datapath.run(TENANT_NIC, &tagged_reply)?.action, DROP);
    }
    assert_eq!(datapath.flows::<Ipv4Addr>()?, before);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a22_other_tags_are_nobodys() -> Result<()> {
    let mut datapath = datapath(1)?;
    let syn = client((bench::CLIENT, 40000), SYN, 1000, 0).frame();
    let unknown = tagged(&syn, 2005);
    assert_eq!(datapath.run(TENANT_NIC, &unknown)?, Outcome { action: PASS, frame: unknown });
    assert_eq!(datapath.reasons()?, BTreeMap::from([((0, Reason::UnknownVlan), 1)]));
    // On another NIC the id means nothing.
    let hub =
        tagged(&Segment { destination_mac: bench::HUB_MAC, ..client((bench::CLIENT, 1), SYN, 1, 0) }.frame(), 2003);
    assert_eq!(datapath.run(HUB_NIC, &hub)?, Outcome { action: PASS, frame: hub });
    // Two tags.
    let double = tagged(&tagged(&syn, 2004), 2003);
    assert_eq!(datapath.run(TENANT_NIC, &double)?, Outcome { action: DROP, frame: double });
    assert_eq!(
        datapath.reasons()?,
        BTreeMap::from([((0, Reason::UnknownVlan), 2), ((bench::VLAN_TENANTS[0], Reason::DoubleTag), 1)])
    );
    // Priority and drop eligibility are not the id.
    let outcome = datapath.run(TENANT_NIC, &tagged(&syn, 0xb000 | bench::VLANS[0]))?;
    assert_eq!(outcome.action, REDIRECT);
    assert_eq!(Segment::<Ipv4Addr>::parse(&outcome.frame)?.destination.0, bench::NODES[1]);
    // A tag with id 0 is priority only: the untagged segment's (IEEE 802.1Q 9.6).
    let outcome = datapath.run(TENANT_NIC, &tagged(&client((bench::CLIENT, 40001), SYN, 1000, 0).frame(), 0xe000))?;
    assert_eq!(outcome.action, REDIRECT);
    assert_eq!(Segment::<Ipv4Addr>::parse(&outcome.frame)?.destination.0, bench::NODES[0]);
    assert_eq!(datapath.used::<Ipv4Addr>(bench::TENANT)?.half_open, 1);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn what_the_kernel_gets_in_a_vlan_has_its_tag_again() -> Result<()> {
    let datapath = datapath(1)?;
    // To the host's own address, and for another station.
    let own = Segment { destination: (bench::TENANT_ADDRESS, 22), ..client((bench::CLIENT, 40000), SYN, 1, 0) };
    let other = Segment { destination_mac: [2, 0, 0, 0, 1, 0x99], ..client((bench::CLIENT, 40000), SYN, 1, 0) };
    for segment in [own, other] {
        let frame = tagged(&segment.frame(), 0x6000 | bench::VLANS[0]);
        assert_eq!(datapath.run(TENANT_NIC, &frame)?, Outcome { action: PASS, frame });
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn refusals_of_one_tenant_do_not_take_anothers() -> Result<()> {
    let mut datapath = datapath(1)?;
    datapath.set_settings(abi::Settings { rejects_per_tick: 80, ..bench::settings() })?;
    let stray = |port: u16| client((bench::CLIENT, port), ACK, 1, 1);
    let mut told = 0;
    for round in 0..10 {
        for port in 0..200 {
            let action = send(&datapath, TENANT_NIC, &stray(1000 + round * 200 + port))?.action;
            ensure!([TX, DROP].contains(&action), "action {action}");
            told += u64::from(action == TX);
        }
        let outcome = datapath.run(TENANT_NIC, &tagged(&stray(1000 + round).frame(), bench::VLANS[0]))?;
        ensure!(outcome.action == TX, "round {round}: tenant b is not told: action {}", outcome.action);
    }
    let refused = |tenant, count| ((tenant, Reason::NoFlow), count);
    let limited = ((bench::TENANT, Reason::RejectLimit), 2000 - told);
    let expected = BTreeMap::from([refused(bench::TENANT, 2000), refused(bench::VLAN_TENANTS[0], 10), limited]);
    assert!(told < 2000, "nothing was held back");
    assert_eq!(datapath.reasons()?, expected);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn half_open_connections_of_one_tenant_do_not_take_anothers_place() -> Result<()> {
    let mut datapath = datapath(1)?;
    datapath.limit::<Ipv4Addr>(bench::TENANT, abi::FamilyLimits { half_open: 3, ..abi::FamilyLimits::ZERO })?;
    let half_open =
        |datapath: &mut Datapath| -> Result<u64> { Ok(datapath.used::<Ipv4Addr>(bench::TENANT)?.half_open) };
    let mut seen = Vec::new();
    for port in 1..=3 {
        seen.push(forwarded(&datapath, TENANT_NIC, &client((bench::CLIENT, port), SYN, 1000, 0))?);
    }
    for port in 4..=10 {
        let frame = client((bench::CLIENT, port), SYN, 1000, 0).frame();
        assert_eq!(datapath.run(TENANT_NIC, &frame)?, Outcome { action: DROP, frame });
    }
    assert_eq!(datapath.reasons()?, only(Reason::TenantHalfOpen, 7));
    assert_eq!(half_open(&mut datapath)?, 3);
    // Retransmitted SYNs of those that have a place, and another tenant's new connections, go through.
    forwarded(&datapath, TENANT_NIC, &client((bench::CLIENT, 1), SYN, 1000, 0))?;
    for port in 1..=10 {
        connect_in(&datapath, bench::VLANS[0], (bench::CLIENT, port))?;
    }
    assert_eq!(datapath.reasons()?, only(Reason::TenantHalfOpen, 7));
    let other = datapath.used::<Ipv4Addr>(bench::VLAN_TENANTS[0])?;
    assert_eq!((other.flows, other.half_open), (10, 0));
    // A place is free again when a connection is proven, and when the backend refuses one.
    forwarded(&datapath, HUB_NIC, &seen[0].answer(SYN | ACK, BACKEND_SEQUENCE))?;
    forwarded(&datapath, TENANT_NIC, &client((bench::CLIENT, 1), ACK, 1001, BACKEND_SEQUENCE + 1))?;
    assert_eq!(half_open(&mut datapath)?, 2);
    forwarded(&datapath, HUB_NIC, &seen[1].answer(RST | ACK, 0))?;
    assert_eq!(half_open(&mut datapath)?, 1);
    for port in 11..=12 {
        forwarded(&datapath, TENANT_NIC, &client((bench::CLIENT, port), SYN, 1000, 0))?;
    }
    assert_eq!(send(&datapath, TENANT_NIC, &client((bench::CLIENT, 13), SYN, 1000, 0))?.action, DROP);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn half_open_connections_that_expire_give_their_place_back() -> Result<()> {
    let mut datapath = datapath(1)?;
    datapath.limit::<Ipv4Addr>(bench::TENANT, abi::FamilyLimits { half_open: 2, ..abi::FamilyLimits::ZERO })?;
    datapath.set_timeouts(abi::Timeouts { tcp_half_open: 2, ..bench::timeouts() })?;
    datapath.set_settings(abi::Settings { half_open_epoch: 2, ..bench::settings() })?;
    for round in 0..3 {
        let first = 1000 + 10 * round;
        for port in first..first + 2 {
            forwarded(&datapath, TENANT_NIC, &client((bench::CLIENT, port), SYN, 1000, 0))?;
        }
        assert_eq!(send(&datapath, TENANT_NIC, &client((bench::CLIENT, first + 2), SYN, 1000, 0))?.action, DROP);
        // A record's end is kept in units of 16 ticks.
        std::thread::sleep(Duration::from_millis(2500));
        // Late: nothing is known of it any more.
        assert_eq!(send(&datapath, TENANT_NIC, &client((bench::CLIENT, first), ACK, 1001, 1))?.action, TX);
    }
    assert_eq!(
        datapath.reasons()?,
        BTreeMap::from([((bench::TENANT, Reason::TenantHalfOpen), 3), ((bench::TENANT, Reason::NoFlow), 3)])
    );
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn flows_of_one_tenant_do_not_take_anothers_place() -> Result<()> {
    let mut datapath = datapath(1)?;
    datapath.limit::<Ipv4Addr>(bench::TENANT, abi::FamilyLimits { flows: 2, ..abi::FamilyLimits::ZERO })?;
    let first = connect(&datapath, (bench::CLIENT, 1))?;
    ask(&datapath, (bench::CLIENT, 2))?;
    let refused = client((bench::CLIENT, 3), SYN, 7, 0);
    let outcome = send(&datapath, TENANT_NIC, &refused)?;
    assert_eq!(outcome.action, TX);
    assert_eq!(Segment::parse(&outcome.frame)?, Segment { flags: RST | ACK, ..refused.answer(0, 0) });
    let datagram = query((bench::CLIENT, 3), b"question").frame();
    assert_ne!(datapath.run(TENANT_NIC, &datagram)?.action, REDIRECT);
    assert_eq!(datapath.reasons()?, only(Reason::TenantFlows, 2));
    connect_in(&datapath, bench::VLANS[0], (bench::CLIENT, 3))?;
    forwarded(&datapath, HUB_NIC, &first.answer(ACK, BACKEND_SEQUENCE + 1))?;
    assert_eq!(datapath.reasons()?, only(Reason::TenantFlows, 2));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn timeouts_shrink_with_the_tenants_own_fill_and_established_connections_never_do() -> Result<()> {
    let mut datapath = datapath(1)?;
    let limits = abi::FamilyLimits { flows: 8, udp: 4, ..abi::FamilyLimits::ZERO };
    datapath.limit::<Ipv4Addr>(bench::TENANT, limits)?;
    datapath.set_timeouts(abi::Timeouts { tcp_reset: 160, udp_replied: 160, ..bench::timeouts() })?;
    let reset = client((bench::CLIENT, 1), RST, 1001, 0);
    for port in 1..=4 {
        ask(&datapath, (bench::CLIENT, port))?;
        connect(&datapath, (bench::CLIENT, port))?;
    }
    forwarded(&datapath, TENANT_NIC, &reset)?;
    connect_in(&datapath, bench::VLANS[0], (bench::CLIENT, 1))?;
    to_hub(&datapath, bench::VLANS[0], &reset)?;
    let before = counted(&mut datapath, 0)?;
    age(&datapath, 75)?;
    // At its limits, tenant a's times are an eighth; tenant b is far from any.
    assert_eq!(counted(&mut datapath, 0)?, before);
    let flows = datapath.flows::<Ipv4Addr>()?;
    let left = |protocol: u8, port: u16| {
        let destination = if protocol == TCP { bench::PORT } else { bench::UDP_PORT };
        let tuple = abi::Tuple4::new((bench::CLIENT, port), (bench::VIP, destination));
        flows.contains_key(&abi::FlowKey4 { tuple, segment: bench::TENANT_SEGMENT, protocol, pad: 0 })
    };
    assert!(!left(TCP, 1), "the connection that was reset");
    assert_eq!((2..=4).filter(|&port| left(TCP, port)).count(), 3, "established connections");
    let used = datapath.used::<Ipv4Addr>(bench::TENANT)?;
    // The fewer there are, the longer they live: below its half a tenant has the whole time.
    assert!((2..=3).contains(&used.udp), "{used:?}");
    assert_eq!(used.flows, 3 + used.udp);
    Ok(())
}

/// What a forged packet must not move of a half: all but the counts of what was forwarded.
fn unmoved(datapath: &mut Datapath) -> Result<BTreeMap<abi::FlowKey4, abi::Flow4>> {
    let mut flows = datapath.flows::<Ipv4Addr>()?;
    for flow in flows.values_mut() {
        (flow.bytes, flow.packets, flow.packets_high) = (0, 0, 0);
    }
    Ok(flows)
}

#[test]
#[ignore = "needs root"]
fn forged_packets_move_neither_replies_nor_state_nor_timeouts() -> Result<()> {
    const ATTACKER: [u8; 6] = [2, 0, 0, 0, 1, 0x66];
    let mut datapath = datapath(1)?;
    let mac = [2, 0, 0, 0, 1, 0x60];
    let near = (bench::ON_LINK_CLIENT, 40000);
    let far = (bench::CLIENT, 40000);
    let from = |source_mac, segment: Segment| Segment { source_mac, ..segment };
    let syn = forwarded(&datapath, TENANT_NIC, &from(mac, client(near, SYN, 1000, 0)))?;
    forwarded(&datapath, HUB_NIC, &syn.answer(SYN | ACK, BACKEND_SEQUENCE))?;
    forwarded(&datapath, TENANT_NIC, &from(mac, client(near, ACK, 1001, BACKEND_SEQUENCE + 1)))?;
    let victims = [(near, syn, mac), (far, connect(&datapath, far)?, bench::GATEWAY_MAC)];
    // The connections have been idle for a while: a packet that counted as theirs would show.
    datapath.change_flows::<Ipv4Addr>(|flow| flow.last_seen = flow.last_seen.wrapping_sub(1000))?;
    let before = unmoved(&mut datapath)?;
    assert_eq!(before.len(), 4);
    let mut sent = 0;
    for (source, ..) in &victims {
        for source_mac in [ATTACKER, bench::GATEWAY_MAC] {
            for flags in [ACK, FIN | ACK, RST, RST | ACK, SYN, 0] {
                for distance in [2 << 20, 3 << 20, 1 << 30, 1 << 31, u32::MAX - (2 << 20)] {
                    for acknowledgement in [0, BACKEND_SEQUENCE.wrapping_add(distance)] {
                        let sequence = 1001u32.wrapping_add(distance);
                        let forged = from(source_mac, client(*source, flags, sequence, acknowledgement));
                        send(&datapath, TENANT_NIC, &forged)?;
                        sent += 1;
                        assert_eq!(unmoved(&mut datapath)?, before, "{forged:?}");
                    }
                }
            }
        }
    }
    assert_eq!(sent, 240);
    // Nor do half-open connections of a victim's tuple come about, or another reverse tuple.
    assert_eq!(datapath.change_half_open::<Ipv4Addr>(|_| ())?, 0);
    for (source, syn, mac) in &victims {
        let back = forwarded(&datapath, HUB_NIC, &syn.answer(ACK, BACKEND_SEQUENCE + 1))?;
        assert_eq!((back.destination, back.destination_mac), (*source, *mac));
    }
    let used = datapath.used::<Ipv4Addr>(bench::TENANT)?;
    assert_eq!((used.flows, used.half_open), (2, 0));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_client_that_moves_to_another_mac_is_found_again_by_what_it_sends_again() -> Result<()> {
    let datapath = datapath(1)?;
    let near = (bench::ON_LINK_CLIENT, 40000);
    let (old, new) = ([2, 0, 0, 0, 1, 0x60], [2, 0, 0, 0, 1, 0x61]);
    let from = |source_mac, segment: Segment| Segment { source_mac, ..segment };
    let syn = forwarded(&datapath, TENANT_NIC, &from(old, client(near, SYN, 1000, 0)))?;
    forwarded(&datapath, HUB_NIC, &syn.answer(SYN | ACK, BACKEND_SEQUENCE))?;
    forwarded(&datapath, TENANT_NIC, &from(old, client(near, ACK, 1001, BACKEND_SEQUENCE + 1)))?;
    let mut data = client(near, ACK, 1001, BACKEND_SEQUENCE + 1);
    data.payload = b"again".to_vec();
    forwarded(&datapath, TENANT_NIC, &from(old, data.clone()))?;
    let at = |datapath: &Datapath| -> Result<[u8; 6]> {
        Ok(forwarded(datapath, HUB_NIC, &syn.answer(ACK, BACKEND_SEQUENCE + 1))?.destination_mac)
    };
    // Who knows the client's number only is not the client.
    age(&datapath, 8)?;
    let guess = Segment { acknowledgement: BACKEND_SEQUENCE.wrapping_add(1 << 30), ..data.clone() };
    forwarded(&datapath, TENANT_NIC, &from(new, guess))?;
    assert_eq!(at(&datapath)?, old);
    // Nobody is looked at closer who has just been heard.
    forwarded(&datapath, TENANT_NIC, &from(new, data.clone()))?;
    assert_eq!(at(&datapath)?, old);
    age(&datapath, 8)?;
    forwarded(&datapath, TENANT_NIC, &from(new, data))?;
    assert_eq!(at(&datapath)?, new);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_forged_syn_does_not_take_over_a_handshake_under_way() -> Result<()> {
    let mut datapath = datapath(1)?;
    let mac = [2, 0, 0, 0, 1, 0x60];
    let near = (bench::ON_LINK_CLIENT, 40000);
    let from = |source_mac, segment: Segment| Segment { source_mac, ..segment };
    let syn = forwarded(&datapath, TENANT_NIC, &from(mac, client(near, SYN, 1000, 0)))?;
    // The attacker knows addresses and ports, not the sequence number.
    send(&datapath, TENANT_NIC, &from([2, 0, 0, 0, 1, 0x66], client(near, ACK, 1001, 1)))?;
    let back = forwarded(&datapath, HUB_NIC, &syn.answer(SYN | ACK, BACKEND_SEQUENCE))?;
    assert_eq!(back.destination_mac, mac);
    // Even the same SYN from elsewhere leaves the answer where it belongs until the handshake is proven.
    send(&datapath, TENANT_NIC, &from([2, 0, 0, 0, 1, 0x66], client(near, ACK, 1001, BACKEND_SEQUENCE + 99)))?;
    forwarded(&datapath, TENANT_NIC, &from(mac, client(near, ACK, 1001, BACKEND_SEQUENCE + 1)))?;
    let back = forwarded(&datapath, HUB_NIC, &syn.answer(ACK, BACKEND_SEQUENCE + 1))?;
    assert_eq!(back.destination_mac, mac);
    assert_eq!(datapath.live_halves()?, 2);
    Ok(())
}

/// Sends a SYN again while the search for a port is put off; gives what came of it in the end.
fn persistent(datapath: &mut Datapath, syn: &Segment) -> Result<Outcome> {
    for _ in 0..200 {
        let busy = |datapath: &mut Datapath| -> Result<Option<u64>> {
            Ok(datapath.reasons()?.get(&(bench::TENANT, Reason::SnatBusy)).copied())
        };
        let before = busy(datapath)?;
        let outcome = send(datapath, TENANT_NIC, syn)?;
        if busy(datapath)? == before {
            return Ok(outcome);
        }
        std::thread::sleep(Duration::from_millis(70));
    }
    anyhow::bail!("the search was put off 200 times")
}

#[test]
#[ignore = "needs root"]
fn a41_a_hundred_ports_serve_a_hundred_connections_and_come_back_after_their_hold_time() -> Result<()> {
    let mut datapath = datapath(1)?;
    let (_, frontend) = bench::frontend(1);
    datapath.set_frontend(abi::Frontend { snat_first: 20000, snat_last: 20099, ..frontend })?;
    let serve = |datapath: &mut Datapath, ports: std::ops::Range<u16>| -> Result<Vec<(u16, Segment)>> {
        let mut served = Vec::new();
        for port in ports {
            let source = (bench::CLIENT, port);
            let outcome = persistent(datapath, &client(source, SYN, 1000, 0))?;
            if outcome.action != REDIRECT {
                ensure!(outcome.action == TX, "action {}", outcome.action);
                ensure!(Segment::<Ipv4Addr>::parse(&outcome.frame)?.flags == RST | ACK);
                continue;
            }
            let syn = Segment::parse(&outcome.frame)?;
            forwarded(datapath, HUB_NIC, &syn.answer(SYN | ACK, BACKEND_SEQUENCE))?;
            forwarded(datapath, TENANT_NIC, &client(source, ACK, 1001, BACKEND_SEQUENCE + 1))?;
            served.push((port, syn));
        }
        Ok(served)
    };
    let first = serve(&mut datapath, 1000..1100)?;
    assert_eq!(first.len(), 100, "a port was free, and none was found");
    let ports: BTreeSet<u16> = first.iter().map(|(_, syn)| syn.source.1).collect();
    assert_eq!(ports, (20000..20100).collect());
    assert_eq!(serve(&mut datapath, 2000..2050)?.len(), 0);
    assert_eq!(datapath.reasons()?.get(&(bench::TENANT, Reason::SnatExhausted)), Some(&50));
    assert_eq!(datapath.frontend_counters(bench::FRONTEND)?.refused, 50);
    for (port, syn) in &first[..60] {
        close(&datapath, (bench::CLIENT, *port), syn)?;
    }
    // Within the hold time the tuples are nobody else's.
    age(&datapath, 2)?;
    assert_eq!(serve(&mut datapath, 3000..3010)?.len(), 0);
    datapath.set_settings(abi::Settings { tombstone: 1, ..bench::settings() })?;
    datapath.set_timeouts(abi::Timeouts { tcp_fin: 1, ..bench::timeouts() })?;
    age(&datapath, 8)?;
    assert_eq!(serve(&mut datapath, 4000..4060)?.len(), 60);
    for (port, syn) in &first[60..] {
        let back = forwarded(&datapath, HUB_NIC, &syn.answer(ACK, BACKEND_SEQUENCE + 1))?;
        assert_eq!(back.destination, (bench::CLIENT, *port));
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a41_the_last_ports_of_a_range_that_is_99_percent_used_are_found() -> Result<()> {
    let mut datapath = Datapath::load(40_000)?;
    bench::fill(&mut datapath, 1)?;
    let range = bench::FIRST_PORT..=bench::LAST_PORT;
    // Every hundredth port is free.
    let (free, taken): (Vec<u16>, Vec<u16>) = range.partition(|port| port % 100 == 7);
    let mut map = datapath.hash::<abi::FlowKey4, abi::Flow4>(names::FLOWS4)?;
    for (number, port) in taken.iter().enumerate() {
        let from = abi::Tuple4::new((Ipv4Addr::client(number as u32), 1), (bench::VIP, bench::PORT));
        let to = abi::Tuple4::new((bench::SNAT, *port), (bench::NODES[0], bench::NODE_PORT));
        let key = abi::FlowKey4 { tuple: from, segment: bench::TENANT_SEGMENT, protocol: TCP, pad: 0 };
        let reverse_key = abi::FlowKey4::reply(&to, bench::HUB_SEGMENT, TCP);
        let forward = abi::Flow4 {
            tuple: from,
            segment: key.segment,
            next_hop: bench::node_hop(0),
            to,
            own: abi::Flow4::forward_own(1, 1),
            frontend: bench::FRONTEND,
            state: abi::FLOW_REPLIED,
            ..abi::Flow4::ZERO
        };
        let reverse = abi::Flow4 {
            tuple: reverse_key.tuple,
            segment: reverse_key.segment,
            to: from.turned(),
            state: abi::FLOW_REPLIED | abi::FLOW_REVERSE,
            ..forward
        };
        map.insert(key, forward, 0)?;
        map.insert(reverse_key, reverse, 0)?;
    }
    let mut found = BTreeSet::new();
    for number in 0..free.len() as u16 {
        let outcome = persistent(&mut datapath, &client((bench::CLIENT, 1000 + number), SYN, 1000, 0))?;
        assert_eq!(outcome.action, REDIRECT, "connection {number} of {}", free.len());
        found.insert(Segment::<Ipv4Addr>::parse(&outcome.frame)?.source.1);
    }
    assert_eq!(found, free.iter().copied().collect());
    let outcome = persistent(&mut datapath, &client((bench::CLIENT, 60000), SYN, 1000, 0))?;
    assert_eq!(outcome.action, TX);
    assert_eq!(datapath.reasons()?.get(&(bench::TENANT, Reason::SnatExhausted)).copied().context("counted")?, 1);
    let used = datapath.used::<Ipv4Addr>(bench::TENANT)?;
    assert_eq!(used.half_open, free.len() as u64);
    Ok(())
}
