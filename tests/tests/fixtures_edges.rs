//! What is off the hot path: tags, neighbours, refusals, and the host behind. Bytes in, verdict, bytes out, and every counter that moved.
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr};

use anyhow::{Context as _, Result, ensure};
use lbd_common::abi::{self, names};
use lbd_common::reason::Reason;
use lbd_common::tcp::{ACK, RST, SYN};
use lbd_tests::datapath::bench::{self, Ip};
use lbd_tests::datapath::{DROP, Datapath, HUB_NIC, Outcome, PASS, REDIRECT, TENANT_NIC, TX};
use lbd_tests::packets::{Datagram, Icmp, Segment, bytes, client, query, tagged, untagged};

const BACKEND_SEQUENCE: u32 = 0x5566_7788;
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

type Counted = BTreeMap<(u16, Reason), u64>;

fn datapath() -> Result<Datapath> {
    let mut datapath = Datapath::load(1024)?;
    bench::fill(&mut datapath, 1)?;
    Ok(datapath)
}

/// The golden packets.
fn vector(id: &str) -> Result<Vec<u8>> {
    let file: serde_json::Value = serde_json::from_str(include_str!("../fixtures/packets.json"))?;
    let vectors = file["vectors"].as_array().context("vectors")?;
    let vector = vectors.iter().find(|vector| vector["id"] == id).with_context(|| format!("vector {id}"))?;
    bytes(vector["in_hex"].as_str().context("in_hex")?)
}

fn counted(reasons: &[(u16, Reason, u64)]) -> Counted {
    reasons.iter().map(|&(tenant, reason, count)| ((tenant, reason), count)).collect()
}

/// The frame is dropped, or left to the kernel as it was.
fn ends(datapath: &Datapath, nic: usize, frame: &[u8], action: u32, what: &str) -> Result<()> {
    let outcome = datapath.run(nic, frame)?;
    if action == DROP {
        assert_eq!(outcome.action, DROP, "{what}");
    } else {
        assert_eq!(outcome, Outcome { action, frame: frame.to_vec() }, "{what}");
    }
    Ok(())
}

/// A frame with any ethertype and content from the gateway to the NIC.
fn raw(ethertype: u16, packet: &[u8]) -> Vec<u8> {
    let mut frame = [bench::TENANT_MAC, bench::GATEWAY_MAC].concat();
    frame.extend(ethertype.to_be_bytes());
    frame.extend(packet);
    frame
}

/// No flow, and no packet counted for any frontend.
fn nothing_forwarded(datapath: &mut Datapath) -> Result<()> {
    assert_eq!(datapath.live_halves()?, 0);
    for id in
        [bench::FRONTEND, Ipv6Addr::FRONTEND].into_iter().chain(bench::VLAN_FRONTENDS).chain(bench::WORKER_FRONTENDS)
    {
        let counters = datapath.frontend_counters(id)?;
        assert_eq!((counters.in_packets, counters.out_packets, counters.flows), (0, 0, 0), "frontend {id}");
    }
    Ok(())
}

// --- A22: tags ---

#[test]
#[ignore = "needs root"]
fn a22_a_tagged_frame_on_a_port_configured_untagged_is_never_translated() -> Result<()> {
    let mut datapath = datapath()?;
    let mut segments = datapath.array::<abi::Segment>(names::SEGMENTS)?;
    for vlan in bench::VLANS {
        segments.set(abi::segment_index(TENANT_NIC as u32, vlan), abi::Segment::ZERO, 0)?;
    }
    ends(&datapath, TENANT_NIC, &vector("P20")?, PASS, "P20")?;
    for control in [1, 2004, 4095, 0xe7d3] {
        let frame = tagged(&client((bench::CLIENT, 40000), SYN, 1, 0).frame(), control);
        ends(&datapath, TENANT_NIC, &frame, PASS, "a SYN to the VIP")?;
    }
    assert_eq!(datapath.reasons()?, counted(&[(0, Reason::UnknownVlan, 5)]));
    nothing_forwarded(&mut datapath)
}

/// A whole connection of the client with source port 40000 in a VLAN; gives the node's view of the SYN.
fn connect_tagged(datapath: &Datapath, control: u16) -> Result<Segment> {
    let from_client = |segment: &Segment| -> Result<Segment> {
        let outcome = datapath.run(TENANT_NIC, &tagged(&segment.frame(), control))?;
        ensure!(outcome.action == REDIRECT, "action {} of {segment:?}", outcome.action);
        Segment::parse(&outcome.frame)
    };
    let to_client = |segment: &Segment| -> Result<Segment> {
        let outcome = datapath.run(HUB_NIC, &segment.frame())?;
        ensure!(outcome.action == REDIRECT, "action {} of {segment:?}", outcome.action);
        let (arrived, frame) = untagged(&outcome.frame)?;
        ensure!(arrived == control & 0xfff, "tag {arrived:#x}");
        Segment::parse(&frame)
    };
    let source = (bench::CLIENT, 40000);
    let syn = from_client(&client(source, SYN, 1000, 0))?;
    let answer = to_client(&syn.answer(SYN | ACK, BACKEND_SEQUENCE))?;
    assert_eq!((answer.source, answer.destination), ((bench::VIP, bench::PORT), source));
    assert_eq!((answer.source_mac, answer.destination_mac), (bench::TENANT_MAC, bench::GATEWAY_MAC));
    from_client(&client(source, ACK, 1001, BACKEND_SEQUENCE + 1))?;
    let mut data = client(source, ACK, 1001, BACKEND_SEQUENCE + 1);
    data.payload = b"question".to_vec();
    let data = from_client(&data)?;
    assert_eq!((data.source, data.destination, &data.payload[..]), (syn.source, syn.destination, &b"question"[..]));
    let mut reply = data.answer(ACK, BACKEND_SEQUENCE + 1);
    reply.payload = control.to_be_bytes().to_vec();
    assert_eq!(to_client(&reply)?.payload, reply.payload);
    Ok(syn)
}

#[test]
#[ignore = "needs root"]
fn a22_tenants_on_vlans_with_the_same_addresses_reach_their_own_backends_and_get_their_tag_back() -> Result<()> {
    let mut datapath = datapath()?;
    for (which, priority) in [(0, 0), (1, 0xe000)] {
        let syn = connect_tagged(&datapath, priority | bench::VLANS[which])?;
        assert_eq!(syn.destination, (bench::NODES[1 + which], bench::NODE_PORT));
        assert_eq!(syn.destination_mac, bench::node_mac(1 + which));
        let counters = datapath.frontend_counters(bench::VLAN_FRONTENDS[which])?;
        assert_eq!((counters.flows, counters.in_packets, counters.out_packets), (1, 3, 2));
    }
    // The same client in the untagged segment knows nothing of this.
    let outcome = datapath.run(TENANT_NIC, &client((bench::CLIENT, 40000), ACK, 1001, BACKEND_SEQUENCE + 1).frame())?;
    assert_eq!((outcome.action, Segment::<Ipv4Addr>::parse(&outcome.frame)?.flags), (TX, RST));
    assert_eq!(datapath.reasons()?, counted(&[(bench::TENANT, Reason::NoFlow, 1)]));
    assert_eq!(datapath.frontend_counters(bench::FRONTEND)?.in_packets, 0);
    assert_eq!(datapath.live_halves()?, 4);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a22_a_backend_in_the_tenants_vlan_is_reached_with_its_tag() -> Result<()> {
    let mut datapath = datapath()?;
    for which in 0..2 {
        let mut syn = client((bench::CLIENT, 40000), SYN, 1000, 0);
        syn.destination.1 = bench::WORKER_PORT;
        let outcome = datapath.run(TENANT_NIC, &tagged(&syn.frame(), bench::VLANS[which]))?;
        assert_eq!(outcome.action, TX);
        let (control, frame) = untagged(&outcome.frame)?;
        assert_eq!(control, bench::VLANS[which]);
        let arrived = Segment::parse(&frame)?;
        assert_eq!(arrived.destination, (bench::WORKER, bench::NODE_PORT));
        assert_eq!((arrived.source_mac, arrived.destination_mac), (bench::TENANT_MAC, bench::WORKER_MAC));
        // Its answer counts only where it lives.
        let answer = arrived.answer(SYN | ACK, BACKEND_SEQUENCE).frame();
        let elsewhere = datapath.run(TENANT_NIC, &answer)?;
        assert_ne!(elsewhere.action, REDIRECT);
        let outcome = datapath.run(TENANT_NIC, &tagged(&answer, bench::VLANS[which]))?;
        assert_eq!(outcome.action, TX);
        let (control, frame) = untagged(&outcome.frame)?;
        let arrived = Segment::<Ipv4Addr>::parse(&frame)?;
        assert_eq!((control, arrived.destination), (bench::VLANS[which], syn.source));
        assert_eq!(arrived.source, (bench::VIP, bench::WORKER_PORT));
    }
    // To tenant a's host address, which does not SNAT: open to it, nobody's flow.
    assert_eq!(datapath.reasons()?, counted(&[(bench::TENANT, Reason::Host, 2)]));
    Ok(())
}

/// A second tag in front of a frame's first one.
fn twice(frame: &[u8], ethertype: u16, control: u16) -> Vec<u8> {
    let mut out = tagged(frame, control);
    out[12..14].copy_from_slice(&ethertype.to_be_bytes());
    out
}

#[test]
#[ignore = "needs root"]
fn a22_two_tags_and_service_tags_are_dropped_and_counted() -> Result<()> {
    let mut datapath = datapath()?;
    let [b, c] = bench::VLANS;
    let syn = client((bench::CLIENT, 40000), SYN, 1, 0).frame();
    let cases = [
        ("a service tag before tenant b's", twice(&tagged(&syn, b), 0x88a8, 100), bench::TENANT),
        ("only a service tag", twice(&syn, 0x88a8, b), bench::TENANT),
        ("a tag in tenant b's VLAN", twice(&tagged(&syn, c), 0x8100, b), bench::VLAN_TENANTS[0]),
        ("a service tag in tenant c's VLAN", twice(&twice(&syn, 0x88a8, b), 0x8100, c), bench::VLAN_TENANTS[1]),
        ("a priority tag before tenant b's", twice(&tagged(&syn, b), 0x8100, 0xe000), bench::TENANT),
    ];
    let mut expected = Counted::new();
    for (what, frame, tenant) in cases {
        ends(&datapath, TENANT_NIC, &frame, DROP, what)?;
        *expected.entry((tenant, Reason::DoubleTag)).or_default() += 1;
        assert_eq!(datapath.reasons()?, expected, "{what}");
    }
    // Where no tenant is, the frame is the kernel's.
    for frame in [twice(&tagged(&syn, b), 0x88a8, 100), twice(&tagged(&syn, b), 0x8100, 7), twice(&syn, 0x88a8, b)] {
        ends(&datapath, HUB_NIC, &frame, PASS, "on the hub")?;
    }
    expected.insert((0, Reason::UnknownVlan), 3);
    // A trunk without an untagged tenant: a priority tag does not hide what is behind it.
    datapath.array(names::SEGMENTS)?.set(abi::segment_index(TENANT_NIC as u32, 0), abi::Segment::ZERO, 0)?;
    ends(&datapath, TENANT_NIC, &twice(&tagged(&syn, b), 0x8100, 0), DROP, "behind a priority tag")?;
    ends(&datapath, TENANT_NIC, &twice(&tagged(&syn, 0), 0x8100, 0), DROP, "two priority tags")?;
    ends(&datapath, TENANT_NIC, &tagged(&syn, 0), PASS, "a priority tag on a trunk")?;
    expected.insert((bench::VLAN_TENANTS[0], Reason::DoubleTag), 2);
    expected.insert((0, Reason::DoubleTag), 1);
    expected.insert((0, Reason::UnknownVlan), 4);
    assert_eq!(datapath.reasons()?, expected);
    nothing_forwarded(&mut datapath)
}

#[test]
#[ignore = "needs root"]
fn a22_a_priority_tag_changes_nothing_but_is_kept_for_the_kernel() -> Result<()> {
    let mut datapath = datapath()?;
    let priority = 0xa000;
    let outcome = datapath.run(TENANT_NIC, &tagged(&client((bench::CLIENT, 40000), SYN, 1, 0).frame(), priority))?;
    assert_eq!(outcome.action, REDIRECT);
    assert_eq!(Segment::<Ipv4Addr>::parse(&outcome.frame)?.destination, (bench::NODES[0], bench::NODE_PORT));
    // The host behind is no more open than without it.
    let mut ssh = client((bench::CLIENT, 40000), SYN, 1, 0);
    ssh.destination = (bench::TENANT_ADDRESS, 22);
    ends(&datapath, TENANT_NIC, &tagged(&ssh.frame(), priority), PASS, "the host's own address")?;
    ssh.destination = (bench::SNAT, 22);
    ends(&datapath, TENANT_NIC, &tagged(&ssh.frame(), priority), DROP, "another interface's address")?;
    assert_eq!(datapath.reasons()?, counted(&[(bench::TENANT, Reason::Host, 1), (bench::TENANT, Reason::NotLocal, 1)]));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a22_what_goes_back_or_up_has_its_tag_and_what_had_none_gets_none() -> Result<()> {
    let mut datapath = datapath()?;
    let [b, c] = bench::VLANS;
    let control = 0x6000 | b;
    // Refused: back with the tag.
    let mut unserved = client((bench::CLIENT, 40000), SYN, 1, 0);
    unserved.destination.1 = 81;
    let outcome = datapath.run(TENANT_NIC, &tagged(&unserved.frame(), control))?;
    assert_eq!(outcome.action, TX);
    let (back, frame) = untagged(&outcome.frame)?;
    let reset = Segment::<Ipv4Addr>::parse(&frame)?;
    assert_eq!((back, reset.flags, reset.acknowledgement), (control, RST | ACK, 2));
    // ARP: answered with the tag.
    let mut arp = vec![0xff; 6];
    arp.extend(bench::GATEWAY_MAC);
    arp.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    arp.extend(bench::GATEWAY_MAC);
    arp.extend([192, 0, 2, 1, 0, 0, 0, 0, 0, 0]);
    arp.extend(bench::VIP.octets());
    let outcome = datapath.run(TENANT_NIC, &tagged(&arp, control))?;
    assert_eq!(outcome.action, TX);
    let (back, frame) = untagged(&outcome.frame)?;
    assert_eq!((back, &frame[..6], &frame[6..12]), (control, &bench::GATEWAY_MAC[..], &bench::TENANT_MAC[..]));
    assert_eq!((&frame[20..22], &frame[22..28]), (&[0, 2][..], &bench::TENANT_MAC[..]));
    // To the kernel: unchanged, tag and all.
    let mut own = client((bench::CLIENT, 40000), SYN, 1, 0);
    own.destination = (bench::TENANT_ADDRESS, 22);
    let mut foreign = unserved.clone();
    foreign.destination_mac = [2, 0, 0, 0, 9, 9];
    let mut group = arp.clone();
    group[38..42].copy_from_slice(&[192, 0, 2, 77]);
    for frame in [foreign.frame(), group.clone(), raw(0x88cc, &[0; 46])] {
        ends(&datapath, TENANT_NIC, &tagged(&frame, control), PASS, "to the kernel")?;
        // Right after a tagged one: nothing of its tag is left.
        ends(&datapath, TENANT_NIC, &frame, PASS, "to the kernel, untagged")?;
    }
    let (tenant_b, tenant_a) = (bench::VLAN_TENANTS[0], bench::TENANT);
    let mut expected = counted(&[
        (tenant_b, Reason::Unserved, 1),
        (tenant_b, Reason::Arp, 1),
        (tenant_b, Reason::NotOurMac, 1),
        (tenant_a, Reason::NotOurMac, 1),
        (tenant_b, Reason::OtherProtocol, 1),
        (tenant_a, Reason::OtherProtocol, 1),
        (0, Reason::ArpOther, 2),
    ]);
    assert_eq!(datapath.reasons()?, expected);
    // An untagged refusal after a tagged one has no tag, from the program at the NIC as from a stage.
    datapath.run(TENANT_NIC, &tagged(&unserved.frame(), c))?;
    let outcome = datapath.run(TENANT_NIC, &unserved.frame())?;
    assert_eq!((outcome.action, Segment::<Ipv4Addr>::parse(&outcome.frame)?.flags), (TX, RST | ACK));
    connect(&datapath, (bench::CLIENT, 40001))?;
    let mut proof = client((bench::CLIENT, 40001), ACK, 1001, BACKEND_SEQUENCE + 1);
    datapath.run(TENANT_NIC, &tagged(&unserved.frame(), c))?;
    proof.ttl = 1;
    let outcome = datapath.run(TENANT_NIC, &proof.frame())?;
    assert_eq!((outcome.action, Icmp::<Ipv4Addr>::parse(&outcome.frame)?.kind), (TX, 11));
    expected.extend(counted(&[
        (bench::VLAN_TENANTS[1], Reason::Unserved, 2),
        (tenant_a, Reason::Unserved, 1),
        (tenant_a, Reason::TtlExceeded, 1),
    ]));
    assert_eq!(datapath.reasons()?, expected);
    Ok(())
}

// --- A31: what a VIP does not serve ---

fn unserved_tcp<I: Ip>() -> Result<()> {
    let mut datapath = datapath()?;
    for (flags, sequence, acknowledgement, expected) in
        [(SYN, 7, 0, (RST | ACK, 0, 8)), (ACK, 7, 99, (RST, 99, 0)), (SYN | ACK, 7, 99, (RST, 99, 0))]
    {
        let mut segment = client((I::CLIENT, 40000), flags, sequence, acknowledgement);
        segment.destination.1 = 81;
        let outcome = datapath.run(TENANT_NIC, &segment.frame())?;
        assert_eq!(outcome.action, TX);
        let reset = Segment::<I>::parse(&outcome.frame)?;
        assert_eq!((reset.flags, reset.sequence, reset.acknowledgement), expected);
        assert_eq!((reset.source, reset.destination), (segment.destination, segment.source));
        assert_eq!((reset.source_mac, reset.destination_mac), (bench::TENANT_MAC, bench::GATEWAY_MAC));
        assert_eq!(outcome.frame.len(), if I::IS_V6 { 74 } else { 54 });
    }
    // A reset is not answered.
    let mut reset = client((I::CLIENT, 40000), RST, 7, 0);
    reset.destination.1 = 81;
    ends(&datapath, TENANT_NIC, &reset.frame(), DROP, "a reset")?;
    assert_eq!(datapath.reasons()?, counted(&[(bench::TENANT, Reason::Unserved, 4)]));
    nothing_forwarded(&mut datapath)
}

#[test]
#[ignore = "needs root"]
fn a31_tcp_to_an_unserved_port_is_reset() -> Result<()> {
    unserved_tcp::<Ipv4Addr>()?;
    unserved_tcp::<Ipv6Addr>()
}

/// An ICMP error about a frame, back where it came from; gives its type, code and rest.
fn error_about<I: Ip>(outcome: &Outcome, about: &[u8], own: I) -> Result<(u8, u8, u32)> {
    ensure!(outcome.action == TX, "action {}", outcome.action);
    let error = Icmp::<I>::parse(&outcome.frame)?;
    ensure!(error.source == own, "from {}", error.source);
    ensure!(error.ttl == 64 && error.destination_mac[..] == about[6..12] && error.source_mac[..] == about[..6]);
    let quoted = if I::IS_V6 { 48 } else { 28 };
    ensure!(error.payload == about[14..14 + quoted], "quotes {:02x?}", error.payload);
    Ok((error.kind, error.code, u32::from_be_bytes(error.rest)))
}

fn unserved_udp<I: Ip>() -> Result<()> {
    let mut datapath = datapath()?;
    let unreachable = if I::IS_V6 { (1, 4, 0) } else { (3, 3, 0) };
    for payload in [&[][..], b"x", &[7; 1400]] {
        let mut datagram = query((I::CLIENT, 40000), payload);
        datagram.destination.1 = bench::PORT;
        let frame = datagram.frame();
        let outcome = datapath.run(TENANT_NIC, &frame)?;
        assert_eq!(error_about(&outcome, &frame, I::VIP)?, unreachable);
        assert_eq!(Icmp::<I>::parse(&outcome.frame)?.destination, I::CLIENT);
        // Padding is not quoted.
        let padded = [&frame[..], &[0; 6]].concat();
        assert_eq!(datapath.run(TENANT_NIC, &padded)?, outcome);
    }
    assert_eq!(datapath.reasons()?, counted(&[(bench::TENANT, Reason::Unserved, 6)]));
    nothing_forwarded(&mut datapath)
}

#[test]
#[ignore = "needs root"]
fn a31_udp_to_a_port_that_only_tcp_is_served_on_is_told_that_it_is_unreachable() -> Result<()> {
    unserved_udp::<Ipv4Addr>()?;
    unserved_udp::<Ipv6Addr>()
}

#[test]
#[ignore = "needs root"]
fn a31_other_protocols_are_dropped_and_counted() -> Result<()> {
    let mut datapath = datapath()?;
    ends(&datapath, TENANT_NIC, &vector("P22")?, DROP, "GRE")?;
    let four = client((bench::CLIENT, 40000), SYN, 1, 0).frame();
    let six = client((Ipv6Addr::CLIENT, 40000), SYN, 1, 0).frame();
    let mut count = 1;
    for protocol in [2u8, 47, 50, 132, 255] {
        let mut frame = four.clone();
        frame[23] = protocol;
        ends(&datapath, TENANT_NIC, &frame, DROP, "IPv4")?;
        count += 1;
        // ESP is an extension header of IPv6.
        if protocol != 50 {
            let mut frame = six.clone();
            frame[20] = protocol;
            ends(&datapath, TENANT_NIC, &frame, DROP, "IPv6")?;
            count += 1;
        }
    }
    let mut expected = counted(&[(bench::TENANT, Reason::UnservedProtocol, count)]);
    assert_eq!(datapath.reasons()?, expected);
    // Behind extension headers nobody looks; fragments have no ports.
    for (header, reason, times) in
        [(0, Reason::IpOptions, 1), (43, Reason::IpOptions, 2), (44, Reason::FragmentOrphan, 1)]
    {
        let mut frame = six.clone();
        frame[20] = header;
        ends(&datapath, TENANT_NIC, &frame, DROP, "an extension header")?;
        expected.insert((bench::TENANT, reason), times);
        assert_eq!(datapath.reasons()?, expected);
    }
    nothing_forwarded(&mut datapath)
}

fn nobody_to_answer<I: Ip>(sources: &[I], reason: Reason) -> Result<()> {
    let mut datapath = datapath()?;
    for &source in sources {
        let mut segment = client((source, 40000), SYN, 1, 0);
        segment.destination.1 = 81;
        ends(&datapath, TENANT_NIC, &segment.frame(), DROP, &source.to_string())?;
        let mut datagram = query((source, 40000), b"x");
        datagram.destination.1 = 81;
        ends(&datapath, TENANT_NIC, &datagram.frame(), DROP, &source.to_string())?;
    }
    assert_eq!(datapath.reasons()?, counted(&[(bench::TENANT, reason, 2 * sources.len() as u64)]));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a31_nothing_is_answered_to_groups_and_impossible_sources() -> Result<()> {
    nobody_to_answer::<Ipv4Addr>(
        &["0.0.0.0", "127.0.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"].map(|ip| ip.parse().expect("IPv4")),
        Reason::BadSource,
    )?;
    nobody_to_answer(&[bench::VIP, bench::TENANT_ADDRESS], Reason::BadSource)?;
    // All hosts of the segment: counted as what it is, answered by nobody.
    nobody_to_answer(&[Ipv4Addr::new(192, 0, 2, 255)], Reason::Unserved)?;
    nobody_to_answer::<Ipv6Addr>(
        &["::", "::1", "::ffff:203.0.113.9", "ff02::1", "2001:db8:a::34"].map(|ip| ip.parse().expect("IPv6")),
        Reason::BadSource,
    )
}

fn errors_are_limited<I: Ip>() -> Result<()> {
    let mut datapath = datapath()?;
    datapath.set_settings(abi::Settings { rejects_per_tick: 3, ..bench::settings() })?;
    let mut answered = 0;
    for port in 1..=500 {
        let mut datagram = query((I::CLIENT, port), b"x");
        datagram.destination.1 = 81;
        answered += u64::from(datapath.run(TENANT_NIC, &datagram.frame())?.action == TX);
    }
    let reasons = datapath.reasons()?;
    let limited = reasons.get(&(bench::TENANT, Reason::RejectLimit)).copied().unwrap_or(0);
    assert!(limited > 0 && answered > 0, "{answered} of 500 answered");
    assert_eq!(
        reasons,
        counted(&[(bench::TENANT, Reason::Unserved, 500), (bench::TENANT, Reason::RejectLimit, 500 - answered)])
    );
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a31_errors_are_rate_limited() -> Result<()> {
    errors_are_limited::<Ipv4Addr>()?;
    errors_are_limited::<Ipv6Addr>()
}

/// Three-way handshake of tenant a; gives what the node saw in the SYN.
fn connect<I: Ip>(datapath: &Datapath, source: (I, u16)) -> Result<Segment<I>> {
    let syn = Segment::parse(&datapath.run(TENANT_NIC, &client(source, SYN, 1000, 0).frame())?.frame)?;
    datapath.run(HUB_NIC, &syn.answer(SYN | ACK, BACKEND_SEQUENCE).frame())?;
    let outcome = datapath.run(TENANT_NIC, &client(source, ACK, 1001, BACKEND_SEQUENCE + 1).frame())?;
    ensure!(outcome.action == REDIRECT, "not promoted");
    Ok(syn)
}

fn used_up<I: Ip>() -> Result<()> {
    let mut datapath = datapath()?;
    let exceeded = if I::IS_V6 { (3, 0, 0) } else { (11, 0, 0) };
    let source = (I::CLIENT, 40000);
    // A SYN, a flow's packet, and its reply, which is told so by the address that it went to.
    let mut syn = client((I::CLIENT, 40001), SYN, 1, 0);
    syn.ttl = 1;
    let frame = syn.frame();
    assert_eq!(error_about(&datapath.run(TENANT_NIC, &frame)?, &frame, I::VIP)?, exceeded);
    assert_eq!(datapath.live_halves()?, 0);
    let seen = connect(&datapath, source)?;
    let mut data = client(source, ACK, 1001, BACKEND_SEQUENCE + 1);
    data.ttl = 1;
    data.payload = vec![7; 100];
    let frame = data.frame();
    assert_eq!(error_about(&datapath.run(TENANT_NIC, &frame)?, &frame, I::VIP)?, exceeded);
    let mut reply = seen.answer(ACK, BACKEND_SEQUENCE + 1);
    reply.ttl = 1;
    let frame = reply.frame();
    assert_eq!(error_about(&datapath.run(HUB_NIC, &frame)?, &frame, I::SNAT)?, exceeded);
    assert_eq!(datapath.reasons()?, counted(&[(bench::TENANT, Reason::TtlExceeded, 3)]));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_used_up_ttl_is_told_to_the_sender() -> Result<()> {
    let frame = vector("P14")?;
    let mut datapath = datapath()?;
    assert_eq!(error_about(&datapath.run(TENANT_NIC, &frame)?, &frame, bench::VIP)?, (11, 0, 0));
    nothing_forwarded(&mut datapath)?;
    used_up::<Ipv4Addr>()?;
    used_up::<Ipv6Addr>()
}

fn too_big<I: Ip>() -> Result<()> {
    let mut datapath = datapath()?;
    let source = (I::CLIENT, 40000);
    connect(&datapath, source)?;
    let hop = u32::from(bench::node_hop(0));
    let mut hops = datapath.array::<abi::NextHop>(names::NEXT_HOPS)?;
    let narrow = abi::NextHop { mtu: 1400, ..hops.get(&hop, 0)? };
    hops.set(hop, narrow, 0)?;
    let mut data = client(source, ACK, 1001, BACKEND_SEQUENCE + 1);
    data.payload = vec![7; 1400];
    let frame = data.frame();
    let outcome = datapath.run(TENANT_NIC, &frame)?;
    let expected = if I::IS_V6 { (2, 0, 1400) } else { (3, 4, 1400) };
    assert_eq!(error_about(&outcome, &frame, I::VIP)?, expected);
    let mut count = 1;
    if !I::IS_V6 {
        // Without "do not fragment" nobody is told.
        let mut frame = frame;
        let flags = u16::from_be_bytes([frame[20], frame[21]]);
        assert_eq!(flags, 0x4000);
        frame[20] = 0;
        let sum = u32::from(!u16::from_be_bytes([frame[24], frame[25]])) + u32::from(!0x4000u16);
        frame[24..26].copy_from_slice(&(!((sum & 0xffff) + (sum >> 16)) as u16).to_be_bytes());
        ends(&datapath, TENANT_NIC, &frame, DROP, "without DF")?;
        count += 1;
    }
    assert_eq!(datapath.reasons()?, counted(&[(bench::TENANT, Reason::TooBig, count)]));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_packet_too_large_for_the_way_out_is_told_the_mtu() -> Result<()> {
    too_big::<Ipv4Addr>()?;
    too_big::<Ipv6Addr>()
}

// --- A35: impossible sources ---

fn impossible<I: Ip>(sources: &[I]) -> Result<()> {
    let mut datapath = datapath()?;
    let mut count = 0;
    for &source in sources {
        for flags in [SYN, SYN | ACK] {
            let frame = client((source, 40000), flags, 9, 0).frame();
            if flags == SYN {
                ends(&datapath, TENANT_NIC, &frame, DROP, &source.to_string())?;
                count += 1;
            } else {
                // Nobody's connection: whatever it is, it crosses to no other segment.
                assert_ne!(datapath.run(TENANT_NIC, &frame)?.action, REDIRECT, "{source}");
            }
        }
        ends(&datapath, TENANT_NIC, &query((source, 40000), b"x").frame(), DROP, &source.to_string())?;
        count += 1;
    }
    let reasons = datapath.reasons()?;
    assert!(reasons.get(&(bench::TENANT, Reason::BadSource)).is_some_and(|&bad| bad >= count), "{reasons:?}");
    assert!(reasons.keys().all(|(tenant, _)| *tenant == bench::TENANT), "{reasons:?}");
    nothing_forwarded(&mut datapath)
}

#[test]
#[ignore = "needs root"]
fn a35_sources_that_no_client_can_have_are_dropped_and_make_no_flow() -> Result<()> {
    let mut four: Vec<Ipv4Addr> = ["0.0.0.0", "127.0.0.1", "224.0.0.1", "255.255.255.255", "240.0.0.1"]
        .map(|ip| ip.parse().expect("IPv4"))
        .to_vec();
    four.extend([bench::SNAT, bench::NODES[0], bench::TENANT_ADDRESS]);
    impossible(&four)?;
    let mut six: Vec<Ipv6Addr> =
        ["::", "::1", "::ffff:203.0.113.9", "ff02::1"].map(|ip| ip.parse().expect("IPv6")).to_vec();
    six.extend([Ipv6Addr::SNAT, Ipv6Addr::NODES[0], Ipv6Addr::TENANT_ADDRESS]);
    impossible(&six)
}

#[test]
#[ignore = "needs root"]
fn a35_the_hubs_address_as_source_is_dropped() -> Result<()> {
    let mut datapath = datapath()?;
    ends(&datapath, TENANT_NIC, &vector("P17")?, DROP, "P17")?;
    assert_eq!(datapath.reasons()?, counted(&[(bench::TENANT, Reason::BadSource, 1)]));
    nothing_forwarded(&mut datapath)
}

#[test]
#[ignore = "needs root"]
fn a35_the_vip_in_a_group_frame_reaches_nobody() -> Result<()> {
    let mut datapath = datapath()?;
    let mut count = 0;
    for mac in [[0xff; 6], [1, 0, 0x5e, 0, 0, 1], [0x33, 0x33, 0, 0, 0, 1]] {
        let mut four = client((bench::CLIENT, 40000), SYN, 1, 0);
        four.destination_mac = mac;
        let mut six = client((Ipv6Addr::CLIENT, 40000), SYN, 1, 0);
        six.destination_mac = mac;
        let mut own = six.clone();
        own.destination.0 = Ipv6Addr::TENANT_ADDRESS;
        for frame in [four.frame(), six.frame(), own.frame()] {
            ends(&datapath, TENANT_NIC, &frame, DROP, "in a group frame")?;
            count += 1;
        }
    }
    assert_eq!(datapath.reasons()?, counted(&[(bench::TENANT, Reason::BadDestination, count)]));
    nothing_forwarded(&mut datapath)
}

// --- A61: neighbour discovery ---

const ASKER_MAC: [u8; 6] = [2, 0, 0, 0, 1, 0x60];

/// The group that solicitations for an address go to, and its MAC.
fn group_of(target: Ipv6Addr) -> (Ipv6Addr, [u8; 6]) {
    let [.., a, b, c] = target.octets();
    let group = Ipv6Addr::from([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c]);
    (group, [0x33, 0x33, 0xff, a, b, c])
}

/// A solicitation to the target's group.
fn solicitation(source: Ipv6Addr, target: Ipv6Addr) -> Icmp<Ipv6Addr> {
    let (destination, destination_mac) = group_of(target);
    let mut payload = target.octets().to_vec();
    if !source.is_unspecified() {
        payload.extend([1, 1]);
        payload.extend(ASKER_MAC);
    }
    Icmp {
        source_mac: ASKER_MAC,
        destination_mac,
        source,
        destination,
        ttl: 255,
        kind: 135,
        code: 0,
        rest: [0; 4],
        payload,
    }
}

/// The advertisement that a solicitation for tenant a's VIP must be answered with.
fn advertisement(to: Ipv6Addr, to_mac: [u8; 6], solicited: bool) -> Icmp<Ipv6Addr> {
    let mut payload = Ipv6Addr::VIP.octets().to_vec();
    payload.extend([2, 1]);
    payload.extend(bench::TENANT_MAC);
    Icmp {
        source_mac: bench::TENANT_MAC,
        destination_mac: to_mac,
        source: Ipv6Addr::VIP,
        destination: to,
        ttl: 255,
        kind: 136,
        code: 0,
        rest: [if solicited { 0x60 } else { 0x20 }, 0, 0, 0],
        payload,
    }
}

#[test]
#[ignore = "needs root"]
fn a61_solicitations_for_a_vip_are_answered_each_time() -> Result<()> {
    let mut datapath = datapath()?;
    let link_local: Ipv6Addr = "fe80::60".parse()?;
    let vip = Ipv6Addr::VIP;
    let mut cases = Vec::new();
    for source in [link_local, Ipv6Addr::ON_LINK_CLIENT] {
        let asked = solicitation(source, vip);
        let answer = advertisement(source, ASKER_MAC, true);
        // Later, to the address itself, with and without the asker's MAC.
        let unicast = Icmp { destination: vip, destination_mac: bench::TENANT_MAC, ..asked.clone() };
        let bare = Icmp { payload: vip.octets().to_vec(), ..unicast.clone() };
        // With a nonce (RFC 3971), and with padding behind the packet.
        let mut nonce = asked.clone();
        nonce.payload.extend([14, 1, 1, 2, 3, 4, 5, 6]);
        let mut padded = asked.frame();
        padded.extend([0; 9]);
        for frame in [asked.frame(), unicast.frame(), bare.frame(), nonce.frame(), padded] {
            cases.push((frame, answer.clone()));
        }
    }
    // Somebody wants the address for itself: all must hear that it is taken.
    let probe = solicitation(Ipv6Addr::UNSPECIFIED, vip);
    let mut nonce = probe.clone();
    nonce.payload.extend([14, 1, 1, 2, 3, 4, 5, 6]);
    for frame in [probe.frame(), nonce.frame()] {
        cases.push((frame, advertisement(ALL_NODES, [0x33, 0x33, 0, 0, 0, 1], false)));
    }
    for round in 1..=2 {
        for (frame, answer) in &cases {
            let outcome = datapath.run(TENANT_NIC, frame)?;
            assert_eq!(outcome.action, TX, "{frame:02x?}");
            assert_eq!(&Icmp::<Ipv6Addr>::parse(&outcome.frame)?, answer);
            assert_eq!(outcome.frame.len(), 86);
        }
        let count = round * cases.len() as u64;
        assert_eq!(datapath.reasons()?, counted(&[(bench::TENANT, Reason::Neighbour, count)]));
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a61_only_the_segment_where_the_vip_lives_answers() -> Result<()> {
    let mut datapath = datapath()?;
    let asked = solicitation(Ipv6Addr::ON_LINK_CLIENT, Ipv6Addr::VIP).frame();
    ends(&datapath, HUB_NIC, &asked, PASS, "on the hub")?;
    ends(&datapath, TENANT_NIC, &tagged(&asked, bench::VLANS[0]), PASS, "in tenant b's VLAN")?;
    // Nobody's, the host's own, and another station's.
    for target in ["2001:db8:a::35".parse()?, Ipv6Addr::TENANT_ADDRESS, Ipv6Addr::SNAT] {
        let frame = solicitation(Ipv6Addr::ON_LINK_CLIENT, target).frame();
        ends(&datapath, TENANT_NIC, &frame, PASS, &target.to_string())?;
    }
    let other = Icmp {
        destination_mac: [2, 0, 0, 0, 9, 9],
        destination: Ipv6Addr::VIP,
        ..solicitation(Ipv6Addr::ON_LINK_CLIENT, Ipv6Addr::VIP)
    };
    ends(&datapath, TENANT_NIC, &other.frame(), PASS, "for another station")?;
    assert_eq!(datapath.reasons()?, counted(&[(0, Reason::NeighbourOther, 5), (bench::TENANT, Reason::NotOurMac, 1)]));
    // Once it lives there too, it is answered there, with the tag.
    let key = abi::AddressKey { address: Ipv6Addr::VIP.mapped(), segment: bench::VLAN_SEGMENTS[0], port_be: 0 };
    let vip = abi::LocalAddress { flags: abi::ADDRESS_VIP | abi::ADDRESS_ANSWER, tenant: 2, ..abi::LocalAddress::ZERO };
    datapath.hash(names::ADDRESSES)?.insert(key, vip, 0)?;
    let control = 0xe000 | bench::VLANS[0];
    let outcome = datapath.run(TENANT_NIC, &tagged(&asked, control))?;
    assert_eq!(outcome.action, TX);
    let (back, frame) = untagged(&outcome.frame)?;
    assert_eq!(back, control);
    assert_eq!(Icmp::parse(&frame)?, advertisement(Ipv6Addr::ON_LINK_CLIENT, ASKER_MAC, true));
    assert_eq!(datapath.reasons()?.get(&(2, Reason::Neighbour)), Some(&1));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a61_malformed_solicitations_are_dropped() -> Result<()> {
    let mut datapath = datapath()?;
    let good = solicitation(Ipv6Addr::ON_LINK_CLIENT, Ipv6Addr::VIP);
    let vip = Ipv6Addr::VIP.octets();
    let with = |options: &[u8]| Icmp { payload: [&vip[..], options].concat(), ..good.clone() }.frame();
    let mut damaged = good.frame();
    damaged[56] ^= 1;
    let mut cases = vec![
        ("through a router", Icmp { ttl: 254, ..good.clone() }.frame()),
        ("code 1", Icmp { code: 1, ..good.clone() }.frame()),
        ("a wrong checksum", damaged),
        ("an empty option", with(&[1, 0, 2, 0, 0, 0, 1, 0x60])),
        ("an option beyond the end", with(&[1, 2, 2, 0, 0, 0, 1, 0x60])),
        ("half an option", with(&[1, 1, 2, 0])),
        ("more options than anybody sends", with(&[1, 1, 2, 0, 0, 0, 1, 0x60].repeat(9))),
        ("a probe to the address itself", {
            let probe = solicitation(Ipv6Addr::UNSPECIFIED, Ipv6Addr::VIP);
            Icmp { destination: Ipv6Addr::VIP, destination_mac: bench::TENANT_MAC, ..probe }.frame()
        }),
        ("a probe with a source MAC", Icmp { source: Ipv6Addr::UNSPECIFIED, ..good.clone() }.frame()),
    ];
    cases.push(("cut short", good.frame()[..80].to_vec()));
    let count = cases.len() as u64;
    for (what, frame) in cases {
        ends(&datapath, TENANT_NIC, &frame, DROP, what)?;
    }
    assert_eq!(datapath.reasons()?, counted(&[(bench::TENANT, Reason::Malformed, count)]));
    // As many options as are looked at.
    let outcome = datapath.run(TENANT_NIC, &with(&[1, 1, 2, 0, 0, 0, 1, 0x60].repeat(8)))?;
    assert_eq!(outcome.action, TX);
    assert_eq!(Icmp::parse(&outcome.frame)?, advertisement(Ipv6Addr::ON_LINK_CLIENT, ASKER_MAC, true));
    Ok(())
}

// --- the host behind ---

/// Sets tenant a's `host_access`.
fn host_access(datapath: &mut Datapath, flags: u32) -> Result<()> {
    let tenant = abi::Tenant { flags, ..abi::Tenant::ZERO };
    Ok(datapath.array(names::TENANTS)?.set(u32::from(bench::TENANT), tenant, 0)?)
}

fn to_host<I: Ip>() -> Result<()> {
    let mut datapath = datapath()?;
    let key = abi::AddressKey { address: [0; 16], segment: bench::TENANT_SEGMENT, port_be: 22u16.to_be() };
    let port = abi::LocalAddress { flags: abi::ADDRESS_HOST_PORT, ..abi::LocalAddress::ZERO };
    let tcp = |port: u16, flags: u8| {
        let mut segment = client((I::CLIENT, 40000), flags, 1, 1);
        segment.destination = (I::TENANT_ADDRESS, port);
        segment.frame()
    };
    let mut datagram = query((I::CLIENT, 40000), b"x");
    datagram.destination = (I::TENANT_ADDRESS, 22);
    let ping = Icmp {
        source_mac: bench::GATEWAY_MAC,
        destination_mac: bench::TENANT_MAC,
        source: I::CLIENT,
        destination: I::TENANT_ADDRESS,
        ttl: 64,
        kind: if I::IS_V6 { 128 } else { 8 },
        code: 0,
        rest: [0, 1, 0, 1],
        payload: b"ping".to_vec(),
    };
    let frames = [tcp(22, SYN), tcp(22, ACK), tcp(23, SYN), datagram.frame(), ping.frame()];
    let mut expected = Counted::new();
    let mut check = |datapath: &mut Datapath, open: [bool; 5], what: &str| -> Result<()> {
        for (frame, open) in frames.iter().zip(open) {
            ends(datapath, TENANT_NIC, frame, if open { PASS } else { DROP }, what)?;
            let reason = if open { Reason::Host } else { Reason::HostClosed };
            *expected.entry((bench::TENANT, reason)).or_default() += 1;
        }
        assert_eq!(datapath.reasons()?, expected, "{what}");
        Ok(())
    };
    check(&mut datapath, [true; 5], "own")?;
    host_access(&mut datapath, 0)?;
    check(&mut datapath, [false; 5], "none")?;
    host_access(&mut datapath, abi::TENANT_HOST_ACCESS_ICMP)?;
    check(&mut datapath, [false, false, false, false, true], "[icmp]")?;
    // A port of backends with that number opens nothing.
    let target = abi::LocalAddress { flags: abi::ADDRESS_TARGET_PORT, ..abi::LocalAddress::ZERO };
    datapath.hash(names::ADDRESSES)?.insert(key, target, 0)?;
    check(&mut datapath, [false, false, false, false, true], "a target port")?;
    datapath.hash(names::ADDRESSES)?.insert(key, port, 0)?;
    host_access(&mut datapath, 0)?;
    check(&mut datapath, [true, true, false, false, false], "[22]")?;

    // Other interfaces' addresses and transit, whatever is open.
    host_access(&mut datapath, abi::TENANT_HOST_ACCESS_OWN)?;
    let mut elsewhere = 0;
    for destination in [I::SNAT, I::NODES[0], I::client(77)] {
        let mut segment = client((I::CLIENT, 40000), SYN, 1, 0);
        segment.destination = (destination, 22);
        ends(&datapath, TENANT_NIC, &segment.frame(), DROP, &destination.to_string())?;
        elsewhere += 1;
    }
    expected.insert((bench::TENANT, Reason::NotLocal), elsewhere);
    assert_eq!(datapath.reasons()?, expected);

    // Where several tenants share the segment, it says what they may; no one of them is counted.
    let at = abi::segment_index(TENANT_NIC as u32, 0);
    let own = abi::AddressKey { address: I::TENANT_ADDRESS.mapped(), segment: bench::TENANT_SEGMENT, port_be: 0 };
    let nobodys = abi::LocalAddress { flags: abi::ADDRESS_HOST, ..abi::LocalAddress::ZERO };
    datapath.hash(names::ADDRESSES)?.insert(own, nobodys, 0)?;
    let segments = datapath.array::<abi::Segment>(names::SEGMENTS)?;
    let segment = segments.get(&at, 0)?;
    for (flags, open) in [
        (0, [true, true, false, false, false]),
        (abi::SEGMENT_HOST_ACCESS_ICMP, [true, true, false, false, true]),
        (abi::SEGMENT_HOST_ACCESS_OWN, [true; 5]),
    ] {
        let shared = abi::Segment { tenant: 0, flags: segment.flags | flags, ..segment };
        datapath.array::<abi::Segment>(names::SEGMENTS)?.set(at, shared, 0)?;
        let mut seen = expected.clone();
        for (frame, open) in frames.iter().zip(open) {
            ends(&datapath, TENANT_NIC, frame, if open { PASS } else { DROP }, "shared")?;
            let reason = if open { Reason::Host } else { Reason::HostClosed };
            *seen.entry((0, reason)).or_default() += 1;
        }
        assert_eq!(datapath.reasons()?, seen, "{flags}");
        expected = seen;
    }
    nothing_forwarded(&mut datapath)
}

#[test]
#[ignore = "needs root"]
fn host_access_opens_what_it_names_on_the_hosts_own_address_only() -> Result<()> {
    to_host::<Ipv4Addr>()?;
    to_host::<Ipv6Addr>()
}

#[test]
#[ignore = "needs root"]
fn answers_of_backends_to_the_hosts_probes_reach_it_though_the_host_is_closed() -> Result<()> {
    let mut datapath = datapath()?;
    datapath.array(names::TENANTS)?.set(u32::from(bench::VLAN_TENANTS[0]), abi::Tenant::ZERO, 0)?;
    let mut segment = client((bench::WORKER, bench::NODE_PORT), SYN | ACK, 1, 1);
    // Not a SNAT port.
    segment.destination = (bench::TENANT_ADDRESS, 45000);
    let control = bench::VLANS[0];
    ends(&datapath, TENANT_NIC, &tagged(&segment.frame(), control), PASS, "a SYN-ACK")?;
    segment.flags = SYN;
    ends(&datapath, TENANT_NIC, &tagged(&segment.frame(), control), DROP, "a SYN")?;
    segment.flags = SYN | ACK;
    segment.source.0 = bench::ON_LINK_CLIENT;
    ends(&datapath, TENANT_NIC, &tagged(&segment.frame(), control), DROP, "from another station")?;
    let tenant = bench::VLAN_TENANTS[0];
    assert_eq!(datapath.reasons()?, counted(&[(tenant, Reason::Host, 1), (tenant, Reason::HostClosed, 2)]));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn the_host_keeps_its_neighbours_on_a_closed_segment_and_hears_no_router_there() -> Result<()> {
    let mut datapath = datapath()?;
    host_access(&mut datapath, 0)?;
    let own = Ipv6Addr::TENANT_ADDRESS;
    let message = |kind: u8, destination: Ipv6Addr, destination_mac: [u8; 6]| Icmp {
        kind,
        destination,
        destination_mac,
        ..solicitation("fe80::1".parse().expect("an address"), own)
    };
    // Solicited to its group and to itself, and answers to what it asked.
    ends(&datapath, TENANT_NIC, &solicitation(Ipv6Addr::ON_LINK_CLIENT, own).frame(), PASS, "solicited")?;
    ends(&datapath, TENANT_NIC, &message(135, own, bench::TENANT_MAC).frame(), PASS, "solicited again")?;
    ends(&datapath, TENANT_NIC, &message(136, own, bench::TENANT_MAC).frame(), PASS, "advertised")?;
    let all = (ALL_NODES, [0x33, 0x33, 0, 0, 0, 1]);
    ends(&datapath, TENANT_NIC, &message(136, all.0, all.1).frame(), PASS, "advertised to all")?;
    let mut expected = counted(&[(0, Reason::NeighbourOther, 2), (bench::TENANT, Reason::NeighbourOther, 2)]);
    assert_eq!(datapath.reasons()?, expected);
    // Listener queries have a hop-by-hop header.
    let mut query = vec![0x60, 0, 0, 0, 0, 36, 0, 1];
    query.extend("fe80::1".parse::<Ipv6Addr>()?.octets());
    query.extend(ALL_NODES.octets());
    query.extend([58, 0, 5, 2, 0, 0, 1, 0, 130, 0, 0, 0]);
    query.extend([0; 24]);
    let mut frame = raw(0x86dd, &query);
    frame[..6].copy_from_slice(&all.1);
    ends(&datapath, TENANT_NIC, &frame, PASS, "a listener query")?;
    expected.insert((bench::TENANT, Reason::Multicast), 1);
    // Anything else could hide behind one.
    frame[14 + 40 + 8] = 134;
    ends(&datapath, TENANT_NIC, &frame, DROP, "behind a hop-by-hop header")?;
    expected.insert((bench::TENANT, Reason::IpOptions), 1);
    for kind in [134, 137] {
        for (destination, mac) in [all, (own, bench::TENANT_MAC)] {
            ends(&datapath, TENANT_NIC, &message(kind, destination, mac).frame(), DROP, "a router's")?;
        }
    }
    expected.insert((bench::TENANT, Reason::RouterControl), 4);
    assert_eq!(datapath.reasons()?, expected);
    // On the hub, the hub's router may speak.
    let mut hub = message(134, all.0, all.1);
    hub.source_mac = bench::node_mac(0);
    ends(&datapath, HUB_NIC, &hub.frame(), PASS, "on the hub")?;
    Ok(())
}

fn on_the_hub<I: Ip>() -> Result<()> {
    let mut datapath = datapath()?;
    let anywhere = abi::AddressKey { address: I::VIP.mapped(), segment: 0, port_be: 0 };
    let vip = abi::LocalAddress { flags: abi::ADDRESS_VIP, tenant: bench::TENANT, ..abi::LocalAddress::ZERO };
    datapath.hash(names::ADDRESSES)?.insert(anywhere, vip, 0)?;
    let from_node = |destination: I, port: u16| Segment {
        source_mac: bench::node_mac(0),
        destination_mac: bench::HUB_MAC,
        source: (I::NODES[0], 40000),
        destination: (destination, port),
        ..client((I::NODES[0], 40000), SYN, 1, 0)
    };
    for port in [bench::PORT, 81] {
        ends(&datapath, HUB_NIC, &from_node(I::VIP, port).frame(), DROP, "a VIP")?;
    }
    let datagram = Datagram {
        source_mac: bench::node_mac(0),
        destination_mac: bench::HUB_MAC,
        ..query((I::NODES[0], 40000), b"x")
    };
    ends(&datapath, HUB_NIC, &datagram.frame(), DROP, "a datagram to a VIP")?;
    let expected = counted(&[(bench::TENANT, Reason::WrongSegment, 3)]);
    assert_eq!(datapath.reasons()?, expected);
    // The host's own life on the hub goes on: its address, and anybody else's.
    for destination in [I::SNAT, I::client(5)] {
        ends(&datapath, HUB_NIC, &from_node(destination, 22).frame(), PASS, "the host's own")?;
    }
    // An address of the hub that a tenant has as VIP too is the hub's here.
    let own = abi::AddressKey { address: I::VIP.mapped(), segment: bench::HUB_SEGMENT, port_be: 0 };
    let host = abi::LocalAddress { flags: abi::ADDRESS_HOST, ..abi::LocalAddress::ZERO };
    datapath.hash(names::ADDRESSES)?.insert(own, host, 0)?;
    ends(&datapath, HUB_NIC, &from_node(I::VIP, 22).frame(), PASS, "the host's own")?;
    assert_eq!(datapath.reasons()?, expected);
    nothing_forwarded(&mut datapath)
}

#[test]
#[ignore = "needs root"]
fn a_vip_that_is_called_from_the_hub_is_dropped_and_counted() -> Result<()> {
    on_the_hub::<Ipv4Addr>()?;
    on_the_hub::<Ipv6Addr>()
}
