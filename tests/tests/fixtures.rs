//! Packets through the loaded programs: bytes in, verdict, bytes out, and every counter that moved.
use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use anyhow::{Context as _, Result};
use lbd_common::abi::{self, names};
use lbd_common::checksum::Delta;
use lbd_common::reason::Reason;
use lbd_common::tcp::{ACK, FIN, RST, SYN};
use lbd_tests::datapath::{DROP, Datapath, HUB_NIC, Outcome, PASS, REDIRECT, TENANT_NIC, TX, bench};
use lbd_tests::exchange::{self, BACKEND_SEQUENCE, age, connect, forwarded, half_open, only, send};
use lbd_tests::packets::{self, bytes, client};

/// What is not of one family is tested with IPv4; its twins with both are in `fixtures_families`.
type Segment = packets::Segment<Ipv4Addr>;

/// A datapath with one node behind the frontend: what is chosen is known.
fn one_node() -> Result<Datapath> {
    exchange::datapath(1)
}

/// The golden packets.
fn vector(id: &str) -> Result<(Vec<u8>, Option<Vec<u8>>)> {
    let file: serde_json::Value = serde_json::from_str(include_str!("../fixtures/packets.json"))?;
    let vectors = file["vectors"].as_array().context("vectors")?;
    let vector = vectors.iter().find(|vector| vector["id"] == id).with_context(|| format!("vector {id}"))?;
    let out = vector["out_hex"].as_str().map(bytes).transpose()?;
    Ok((bytes(vector["in_hex"].as_str().context("in_hex")?)?, out))
}

/// A node's answer to what it has received.
fn answer(received: &Segment, flags: u8, sequence: u32) -> Segment {
    received.answer(flags, sequence)
}

/// `out` as it is for the SNAT port that was really chosen: the golden packets name an example.
fn with_snat_port(mut out: Vec<u8>, port: u16) -> Vec<u8> {
    let read = |out: &[u8], at: usize| u16::from_ne_bytes([out[at], out[at + 1]]);
    let checksum = Delta::NONE.word(read(&out, 34), port.to_be()).apply(read(&out, 50));
    out[50..52].copy_from_slice(&checksum.to_ne_bytes());
    out[34..36].copy_from_slice(&port.to_be_bytes());
    out
}

fn source_port(frame: &[u8]) -> u16 {
    u16::from_be_bytes([frame[34], frame[35]])
}

#[test]
#[ignore = "needs root"]
fn a01_plain_rewrite_both_ways_with_checksums_that_verify() -> Result<()> {
    let mut datapath = one_node()?;
    let (input, output) = vector("P01")?;
    let outcome = datapath.run(TENANT_NIC, &input)?;
    assert_eq!(outcome.action, REDIRECT);
    let port = source_port(&outcome.frame);
    assert_eq!(outcome.frame, with_snat_port(output.context("P01 has an output")?, port));
    // Both checksums, from scratch, by another implementation.
    let syn = Segment::parse(&outcome.frame)?;
    assert_eq!((syn.source, syn.destination), ((bench::SNAT, port), (bench::NODES[0], bench::NODE_PORT)));
    assert_eq!(syn.ttl, 59);

    let (input, output) = vector("P02")?;
    let mut input = input;
    let example = u16::from_be_bytes([input[36], input[37]]);
    let checksum = Delta::NONE.word(example.to_be(), port.to_be()).apply(u16::from_ne_bytes([input[50], input[51]]));
    input[36..38].copy_from_slice(&port.to_be_bytes());
    input[50..52].copy_from_slice(&checksum.to_ne_bytes());
    let outcome = datapath.run(HUB_NIC, &input)?;
    assert_eq!(outcome.action, REDIRECT);
    assert_eq!(outcome.frame, output.context("P02 has an output")?);
    Segment::parse(&outcome.frame)?;

    assert_eq!(datapath.reasons()?, BTreeMap::new());
    let counters = datapath.frontend_counters(bench::FRONTEND)?;
    assert_eq!((counters.in_packets, counters.in_bytes), (1, 52));
    assert_eq!((counters.out_packets, counters.out_bytes), (1, 52));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_flow_is_promoted_only_by_the_ack_of_the_backends_sequence_number() -> Result<()> {
    let mut datapath = one_node()?;
    let source = (bench::CLIENT, 40000);
    // Blind: an ACK without a SYN, and an ACK before the SYN-ACK.
    assert_eq!(send(&datapath, TENANT_NIC, &client(source, ACK, 1001, 77))?.action, TX);
    let syn = forwarded(&datapath, TENANT_NIC, &client(source, SYN, 1000, 0))?;
    assert_eq!(send(&datapath, TENANT_NIC, &client(source, ACK, 1001, 1))?.action, DROP);
    forwarded(&datapath, HUB_NIC, &answer(&syn, SYN | ACK, BACKEND_SEQUENCE))?;
    // A wrong number proves nothing.
    for wrong in [0, BACKEND_SEQUENCE, BACKEND_SEQUENCE + 2] {
        assert_eq!(send(&datapath, TENANT_NIC, &client(source, ACK, 1001, wrong))?.action, DROP);
    }
    assert_eq!(datapath.live_halves()?, 0);
    forwarded(&datapath, TENANT_NIC, &client(source, ACK, 1001, BACKEND_SEQUENCE + 1))?;
    assert_eq!(datapath.live_halves()?, 2);
    assert_eq!(
        datapath.reasons()?,
        BTreeMap::from([((bench::TENANT, Reason::NoFlow), 1), ((bench::TENANT, Reason::Unproven), 4)])
    );
    assert_eq!(datapath.frontend_counters(bench::FRONTEND)?.flows, 1);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_retransmitted_syn_goes_the_same_way() -> Result<()> {
    let datapath = one_node()?;
    let first = send(&datapath, TENANT_NIC, &client((bench::CLIENT, 40000), SYN, 1000, 0))?;
    let second = send(&datapath, TENANT_NIC, &client((bench::CLIENT, 40000), SYN, 1000, 0))?;
    assert_eq!(first, second);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a10_short_truncated_and_lying_headers_are_dropped_with_a_reason() -> Result<()> {
    let mut datapath = one_node()?;
    for id in ["P04", "P05", "P06"] {
        let (input, _) = vector(id)?;
        assert_eq!(datapath.run(TENANT_NIC, &input)?, Outcome { action: DROP, frame: input }, "{id}");
    }
    assert_eq!(datapath.reasons()?, only(Reason::Malformed, 3));

    let good = client((bench::CLIENT, 40000), SYN, 1, 0).frame();
    let mut lies: Vec<(String, Vec<u8>)> = Vec::new();
    for length in 14..good.len() {
        lies.push((format!("cut to {length}"), good[..length].to_vec()));
    }
    for ihl in 0..5u8 {
        let mut frame = good.clone();
        frame[14] = 0x40 | ihl;
        lies.push((format!("IHL {ihl}"), frame));
    }
    for total in [0u16, 19, 32, 41 + 14, 1500, 65535] {
        let mut frame = good.clone();
        frame[16..18].copy_from_slice(&total.to_be_bytes());
        lies.push((format!("total length {total}"), frame));
    }
    for offset in [0u8, 1, 2, 3, 4, 6, 15] {
        let mut frame = good.clone();
        frame[46] = offset << 4;
        lies.push((format!("data offset {offset}"), frame));
    }
    let mut version = good.clone();
    version[14] = 0x65;
    lies.push(("version 6".into(), version));
    let count = lies.len() as u64;
    for (what, frame) in lies {
        assert_eq!(datapath.run(TENANT_NIC, &frame)?, Outcome { action: DROP, frame }, "{what}");
    }
    assert_eq!(datapath.reasons()?, only(Reason::Malformed, 3 + count));

    let mut options = good.clone();
    options[14] = 0x4f;
    assert_eq!(datapath.run(TENANT_NIC, &options)?.action, DROP);
    assert_eq!(datapath.reasons()?.get(&(bench::TENANT, Reason::IpOptions)), Some(&1));
    assert_eq!(datapath.live_halves()?, 0);
    assert_eq!(datapath.frontend_counters(bench::FRONTEND)?, abi::FrontendCounters::default());
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a11_ethernet_padding_is_not_payload() -> Result<()> {
    let mut datapath = one_node()?;
    let port = connect(&datapath, (bench::CLIENT, 40002))?.source.1;
    let before = datapath.frontend_counters(bench::FRONTEND)?;
    let (input, output) = vector("P07")?;
    let outcome = datapath.run(TENANT_NIC, &input)?;
    assert_eq!(outcome.action, REDIRECT);
    let expected = with_snat_port(output.context("P07 has an output")?, port);
    assert_eq!(outcome.frame[..54], expected[..54]);
    Segment::parse(&outcome.frame)?;
    let after = datapath.frontend_counters(bench::FRONTEND)?;
    assert_eq!(after.in_bytes - before.in_bytes, 40);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a12_a_udp_checksum_of_zero_stays_zero_and_one_that_becomes_zero_is_sent_as_all_ones() -> Result<()> {
    // The vectors' outputs are for these SNAT ports.
    for (id, port) in [("P08", 20004), ("P09", 20005)] {
        let mut datapath = one_node()?;
        let (_, frontend) = bench::udp_frontend::<Ipv4Addr>(1);
        datapath.set_frontend(abi::Frontend { snat_first: port, snat_last: port, ..frontend })?;
        let (input, output) = vector(id)?;
        let outcome = datapath.run(TENANT_NIC, &input)?;
        assert_eq!(outcome, Outcome { action: REDIRECT, frame: output.context("an output")? }, "{id}");
        packets::Datagram::<Ipv4Addr>::parse(&outcome.frame)?;
        assert_eq!(datapath.reasons()?, BTreeMap::new(), "{id}");
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a13_damage_in_transit_stays_visible() -> Result<()> {
    let datapath = one_node()?;
    let port = connect(&datapath, (bench::CLIENT, 40002))?.source.1;
    let (input, output) = vector("P10")?;
    let outcome = datapath.run(TENANT_NIC, &input)?;
    assert_eq!(outcome.action, REDIRECT);
    assert_eq!(outcome.frame, with_snat_port(output.context("P10 has an output")?, port));
    assert!(Segment::parse(&outcome.frame).is_err_and(|error| error.to_string().contains("TCP checksum")));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a37_a_frame_for_another_station_is_passed_up_unchanged() -> Result<()> {
    let mut datapath = one_node()?;
    let (input, _) = vector("P19")?;
    assert_eq!(datapath.run(TENANT_NIC, &input)?, Outcome { action: PASS, frame: input });
    assert_eq!(datapath.reasons()?, only(Reason::NotOurMac, 1));
    // Of a live flow, too.
    connect(&datapath, (bench::CLIENT, 40000))?;
    let mut data = client((bench::CLIENT, 40000), ACK, 1001, BACKEND_SEQUENCE + 1);
    data.destination_mac = [2, 0, 0, 0, 1, 0x99];
    let frame = data.frame();
    assert_eq!(datapath.run(TENANT_NIC, &frame)?, Outcome { action: PASS, frame });
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a22_a_tagged_frame_on_an_untagged_segment_is_not_translated() -> Result<()> {
    let mut datapath = one_node()?;
    for vlan in bench::VLANS {
        let slot = abi::segment_index(TENANT_NIC as u32, vlan);
        datapath.array(names::SEGMENTS)?.set(slot, abi::Segment::ZERO, 0)?;
    }
    let (input, _) = vector("P20")?;
    assert_eq!(datapath.run(TENANT_NIC, &input)?, Outcome { action: PASS, frame: input });
    assert_eq!(datapath.reasons()?, BTreeMap::from([((0, Reason::UnknownVlan), 1)]));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn what_is_not_served_yet_is_dropped_under_its_own_reason() -> Result<()> {
    let cases = [
        ("P03", Reason::IpOptions),
        ("P11", Reason::Icmp),
        ("P13a", Reason::FragmentOrphan),
        ("P13b", Reason::FragmentOrphan),
        ("P16", Reason::Land),
        ("P22", Reason::UnservedProtocol),
    ];
    for (id, reason) in cases {
        let mut datapath = one_node()?;
        let (input, _) = vector(id)?;
        assert_eq!(datapath.run(TENANT_NIC, &input)?, Outcome { action: DROP, frame: input }, "{id}");
        assert_eq!(datapath.reasons()?, only(reason, 1), "{id}");
        assert_eq!(datapath.live_halves()?, 0, "{id}");
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn an_unserved_port_and_a_frontend_without_backends_are_refused_with_a_reset() -> Result<()> {
    let mut datapath = one_node()?;
    let (input, _) = vector("P21")?;
    let outcome = datapath.run(TENANT_NIC, &input)?;
    assert_eq!(outcome.action, TX);
    let reset = Segment::parse(&outcome.frame)?;
    assert_eq!((reset.flags, reset.sequence, reset.acknowledgement), (RST | ACK, 0, 2));
    assert_eq!((reset.source, reset.destination), ((bench::VIP, 22), (bench::CLIENT, 40010)));
    assert_eq!((reset.source_mac, reset.destination_mac), (bench::TENANT_MAC, bench::GATEWAY_MAC));
    assert_eq!(datapath.reasons()?, only(Reason::Unserved, 1));

    let mut datapath = Datapath::load(1024)?;
    bench::fill(&mut datapath, 0)?;
    let outcome = send(&datapath, TENANT_NIC, &client((bench::CLIENT, 40000), SYN, 7, 0))?;
    assert_eq!(outcome.action, TX);
    let reset = Segment::parse(&outcome.frame)?;
    assert_eq!((reset.flags, reset.acknowledgement), (RST | ACK, 8));
    assert_eq!(datapath.reasons()?, only(Reason::NoBackend, 1));
    assert_eq!(datapath.frontend_counters(bench::FRONTEND)?.refused, 1);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a31_what_a_vip_does_not_serve_is_answered_or_dropped_and_never_sent_on() -> Result<()> {
    let mut datapath = one_node()?;
    let (input, _) = vector("P21")?;
    assert_eq!(datapath.run(TENANT_NIC, &input)?.action, TX, "TCP: refused");
    assert_eq!(datapath.reasons()?, only(Reason::Unserved, 1));
    let (gre, _) = vector("P22")?;
    for protocol in [47u8, 50, 132] {
        let mut frame = gre.clone();
        frame[23] = protocol;
        let mut ip = etherparse::Ipv4Header::from_slice(&frame[14..])?.0;
        ip.header_checksum = ip.calc_header_checksum();
        frame[24..26].copy_from_slice(&ip.header_checksum.to_be_bytes());
        assert_eq!(datapath.run(TENANT_NIC, &frame)?, Outcome { action: DROP, frame }, "protocol {protocol}");
    }
    assert_eq!(datapath.reasons()?.get(&(bench::TENANT, Reason::UnservedProtocol)), Some(&3));
    assert_eq!(datapath.live_halves()?, 0);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a35_sources_that_no_client_can_have_are_dropped() -> Result<()> {
    let mut datapath = one_node()?;
    let (input, _) = vector("P17")?;
    assert_eq!(datapath.run(TENANT_NIC, &input)?, Outcome { action: DROP, frame: input });
    assert_eq!(datapath.reasons()?, only(Reason::BadSource, 1));
    let impossible = [
        Ipv4Addr::UNSPECIFIED,
        Ipv4Addr::new(0, 1, 2, 3),
        Ipv4Addr::LOCALHOST,
        Ipv4Addr::new(224, 0, 0, 1),
        Ipv4Addr::BROADCAST,
        Ipv4Addr::new(240, 0, 0, 1),
        bench::NODES[0],
        bench::TENANT_ADDRESS,
    ];
    for address in impossible {
        for frame in
            [client((address, 40000), SYN, 1, 0).frame(), packets::query((address, 40000), b"question").frame()]
        {
            assert_eq!(datapath.run(TENANT_NIC, &frame)?, Outcome { action: DROP, frame }, "{address}");
        }
    }
    assert_eq!(datapath.reasons()?, only(Reason::BadSource, 1 + 2 * impossible.len() as u64));
    assert_eq!(datapath.live_halves()?, 0);
    let used = datapath.used::<Ipv4Addr>(bench::TENANT)?;
    assert_eq!(used, abi::FamilyUse { epoch: used.epoch, ..abi::FamilyUse::ZERO });
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn b45_a_vip_without_backends_answers_and_serves_from_the_first_backend_on() -> Result<()> {
    let mut datapath = Datapath::load(1024)?;
    bench::fill(&mut datapath, 0)?;
    let syn = client((bench::CLIENT, 40000), SYN, 7, 0);
    assert_eq!(send(&datapath, TENANT_NIC, &syn)?.action, TX);
    bench::fill(&mut datapath, 1)?;
    forwarded(&datapath, TENANT_NIC, &syn)?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn refusals_are_rate_limited() -> Result<()> {
    let mut datapath = one_node()?;
    let limit = abi::Settings { rejects_per_tick: 3, ..bench::settings() };
    datapath.array(names::SETTINGS)?.set(0, limit, 0)?;
    let mut answered = 0;
    for port in 1..=500 {
        let action = send(&datapath, TENANT_NIC, &client((bench::CLIENT, port), ACK, 1, 1))?.action;
        answered += u64::from(action == TX);
    }
    let reasons = datapath.reasons()?;
    let limited = reasons.get(&(bench::TENANT, Reason::RejectLimit)).copied().unwrap_or(0);
    assert_eq!(answered + limited, 500);
    assert!(limited > 0, "500 refusals in no time, none held back");
    assert_eq!(reasons.get(&(bench::TENANT, Reason::NoFlow)), Some(&500));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a40_clients_with_one_source_port_get_different_snat_ports_and_their_own_replies() -> Result<()> {
    let mut datapath = Datapath::load(4096)?;
    bench::fill(&mut datapath, 1)?;
    let clients: Vec<Ipv4Addr> =
        (0..500u16).map(|n| Ipv4Addr::new(203, 0, (113 + n / 250) as u8, (n % 250) as u8 + 1)).collect();
    let mut ports = BTreeMap::new();
    let mut seen = Vec::new();
    for &address in &clients {
        let syn = connect(&datapath, (address, 40000))?;
        assert!(ports.insert(syn.source.1, address).is_none(), "SNAT port {} was given twice", syn.source.1);
        seen.push(syn);
    }
    for (syn, &address) in seen.iter().zip(&clients) {
        let mut reply = answer(syn, ACK, BACKEND_SEQUENCE + 1);
        reply.payload = address.octets().to_vec();
        let arrived = forwarded(&datapath, HUB_NIC, &reply)?;
        assert_eq!(arrived.destination, (address, 40000));
        assert_eq!(arrived.payload, address.octets());
        assert_eq!(arrived.source, (bench::VIP, bench::PORT));
    }
    assert_eq!(datapath.live_halves()?, 2 * clients.len());
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_full_port_range_refuses_and_a_lost_first_choice_is_found_again() -> Result<()> {
    let mut datapath = one_node()?;
    let (key, frontend) = bench::frontend(1);
    let narrow = abi::Frontend { snat_first: 20000, snat_last: 20007, ..frontend };
    datapath.hash(names::FRONTENDS)?.insert(key, narrow, 0)?;
    let mut served = 0;
    let mut refused = 0;
    for port in 1..=60u16 {
        let source = (bench::CLIENT, port);
        let outcome = send(&datapath, TENANT_NIC, &client(source, SYN, 1000, 0))?;
        if outcome.action == REDIRECT {
            // Whatever try the port came from, the rest of the handshake finds it.
            let syn = Segment::parse(&outcome.frame)?;
            assert!((20000..=20007).contains(&syn.source.1));
            forwarded(&datapath, HUB_NIC, &answer(&syn, SYN | ACK, BACKEND_SEQUENCE))?;
            forwarded(&datapath, TENANT_NIC, &client(source, ACK, 1001, BACKEND_SEQUENCE + 1))?;
            served += 1;
        } else {
            assert_eq!(outcome.action, TX);
            refused += 1;
        }
    }
    assert_eq!(served, 8, "every port of the range is used");
    assert_eq!(datapath.reasons()?, only(Reason::SnatExhausted, refused));
    assert_eq!(datapath.frontend_counters(bench::FRONTEND)?.refused, refused);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_client_that_comes_back_while_its_old_port_is_taken_is_found_at_its_new_one() -> Result<()> {
    let mut datapath = one_node()?;
    let (key, frontend) = bench::frontend(1);
    let narrow = abi::Frontend { snat_first: 20000, snat_last: 20015, ..frontend };
    datapath.hash(names::FRONTENDS)?.insert(key, narrow, 0)?;
    let open = |port: u16, sequence: u32| -> Result<Segment> {
        forwarded(&datapath, TENANT_NIC, &client((bench::CLIENT, port), SYN, sequence, 0))
    };
    let give_up = |port: u16, sequence: u32| {
        forwarded(&datapath, TENANT_NIC, &client((bench::CLIENT, port), RST, sequence + 1, 0)).map(drop)
    };
    // Four clients in the way; the others, in turn, come, leave, and come back when somebody has their port.
    let mut came_elsewhere = 0;
    for port in 1..=4 {
        open(port, 1)?;
    }
    for port in 100..200u16 {
        let before = open(port, 1000)?.source.1;
        give_up(port, 1000)?;
        let others: Vec<u16> = (0..8).map(|number| port * 10 + number).collect();
        for other in &others {
            open(*other, 1)?;
        }
        let syn = open(port, 5000)?;
        came_elsewhere += u32::from(syn.source.1 != before);
        forwarded(&datapath, HUB_NIC, &answer(&syn, SYN | ACK, BACKEND_SEQUENCE))?;
        give_up(port, 5000)?;
        for other in others {
            give_up(other, 1)?;
        }
    }
    assert!(came_elsewhere >= 20, "{came_elsewhere} of 100 clients came back from another port");
    assert_eq!(datapath.reasons()?, BTreeMap::new());
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a46_a_refusing_backend_frees_its_port_at_once() -> Result<()> {
    let mut datapath = one_node()?;
    let (key, frontend) = bench::frontend(1);
    datapath.hash(names::FRONTENDS)?.insert(
        key,
        abi::Frontend { snat_first: 20000, snat_last: 20003, ..frontend },
        0,
    )?;
    for round in 0..1000u16 {
        let source = (bench::CLIENT, 1000 + round);
        let syn = forwarded(&datapath, TENANT_NIC, &client(source, SYN, 1000, 0))?;
        let reset = forwarded(&datapath, HUB_NIC, &answer(&syn, RST | ACK, 0))?;
        assert_eq!((reset.flags, reset.acknowledgement, reset.destination), (RST | ACK, 1001, source));
    }
    assert_eq!(datapath.reasons()?, only(Reason::BackendRefused, 1000));
    assert_eq!(datapath.live_halves()?, 0);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a46_a_reset_far_from_the_window_changes_nothing() -> Result<()> {
    let mut datapath = one_node()?;
    let source = (bench::CLIENT, 40000);
    let syn = connect(&datapath, source)?;
    // The receiver judges it: it is forwarded.
    forwarded(&datapath, TENANT_NIC, &client(source, RST, 1001 + (3 << 20), 0))?;
    forwarded(&datapath, HUB_NIC, &answer(&syn, RST | ACK, BACKEND_SEQUENCE.wrapping_add(3 << 20)))?;
    assert_eq!(datapath.reasons()?, only(Reason::BlindReset, 2));
    let state = |datapath: &mut Datapath| -> Result<Vec<u16>> {
        let flows = datapath.hash::<abi::FlowKey4, abi::Flow4>(names::FLOWS4)?;
        flows.iter().map(|entry| Ok(entry?.1.state & (abi::FLOW_RESET | abi::FLOW_DEAD))).collect()
    };
    assert_eq!(state(&mut datapath)?, [0, 0]);
    forwarded(&datapath, TENANT_NIC, &client(source, ACK, 1001, BACKEND_SEQUENCE + 1))?;
    // One in the window ends both halves.
    forwarded(&datapath, HUB_NIC, &answer(&syn, RST | ACK, BACKEND_SEQUENCE + 1))?;
    assert_eq!(state(&mut datapath)?, [abi::FLOW_RESET, abi::FLOW_RESET]);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_stray_reply_never_reaches_the_hosts_tcp() -> Result<()> {
    let mut datapath = one_node()?;
    let stray = Segment {
        source_mac: bench::node_mac(0),
        destination_mac: bench::HUB_MAC,
        source: (bench::NODES[0], bench::NODE_PORT),
        destination: (bench::SNAT, 20001),
        ttl: 64,
        flags: ACK,
        sequence: 5,
        acknowledgement: 99,
        payload: Vec::new(),
    };
    let outcome = send(&datapath, HUB_NIC, &stray)?;
    assert_eq!(outcome.action, TX);
    let reset = Segment::parse(&outcome.frame)?;
    assert_eq!((reset.flags, reset.sequence, reset.destination), (RST, 99, stray.source));
    assert_eq!(datapath.reasons()?, BTreeMap::from([((0, Reason::StrayReply), 1)]));

    let quiet = abi::Settings { flags: abi::SETTING_MIGRATING, ..bench::settings() };
    datapath.array(names::SETTINGS)?.set(0, quiet, 0)?;
    assert_eq!(send(&datapath, HUB_NIC, &stray)?.action, DROP);

    // The host's own life on the hub: other ports, other peers, new connections to it, other protocols.
    for own in [
        Segment { destination: (bench::SNAT, 40000), ..stray.clone() },
        Segment { source: (bench::NODES[0], 50000), ..stray.clone() },
        Segment { source: (Ipv4Addr::new(10, 0, 0, 77), bench::NODE_PORT), ..stray.clone() },
        Segment { flags: SYN, ..stray.clone() },
        Segment { destination: (Ipv4Addr::new(10, 0, 0, 99), 20001), ..stray.clone() },
    ] {
        let frame = own.frame();
        assert_eq!(datapath.run(HUB_NIC, &frame)?, Outcome { action: PASS, frame }, "{own:?}");
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_tenant_reaches_the_hosts_own_address_and_nothing_else_behind_it() -> Result<()> {
    let mut datapath = one_node()?;
    let to = |destination| Segment { destination, ..client((bench::CLIENT, 40000), SYN, 1, 0) };
    assert_eq!(send(&datapath, TENANT_NIC, &to((bench::TENANT_ADDRESS, 22)))?.action, PASS);
    for (address, port) in [
        (bench::SNAT, 22),
        (bench::SNAT, 9474),
        (bench::NODES[0], bench::NODE_PORT),
        (bench::NODES[0], 6443),
        (Ipv4Addr::new(198, 51, 100, 34), 6443),
        (Ipv4Addr::new(8, 8, 8, 8), 53),
        (bench::ON_LINK_CLIENT, 80),
    ] {
        let frame = to((address, port)).frame();
        assert_eq!(datapath.run(TENANT_NIC, &frame)?, Outcome { action: DROP, frame }, "{address}:{port}");
    }
    assert_eq!(
        datapath.reasons()?,
        BTreeMap::from([((bench::TENANT, Reason::Host), 1), ((bench::TENANT, Reason::NotLocal), 7)])
    );
    // `host_access: none`.
    datapath.array(names::TENANTS)?.set(u32::from(bench::TENANT), abi::Tenant::ZERO, 0)?;
    assert_eq!(send(&datapath, TENANT_NIC, &to((bench::TENANT_ADDRESS, 22)))?.action, DROP);
    // A VIP is looked for only where it lives: on the hub its frames are the kernel's, which knows no such address.
    let mut wrong = to((bench::VIP, bench::PORT));
    wrong.destination_mac = bench::HUB_MAC;
    assert_eq!(send(&datapath, HUB_NIC, &wrong)?.action, PASS);
    assert_eq!(datapath.live_halves()?, 0);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn arp_for_a_vip_is_answered_in_its_segment_only() -> Result<()> {
    let mut datapath = one_node()?;
    let request = |target: Ipv4Addr| {
        let mut frame = vec![0xff; 6];
        frame.extend([2, 0, 0, 0, 1, 0x60, 8, 6, 0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 1, 0x60]);
        frame.extend(bench::ON_LINK_CLIENT.octets());
        frame.extend([0; 6]);
        frame.extend(target.octets());
        frame
    };
    let outcome = datapath.run(TENANT_NIC, &request(bench::VIP))?;
    let mut expected = vec![2, 0, 0, 0, 1, 0x60];
    expected.extend(bench::TENANT_MAC);
    expected.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 2]);
    expected.extend(bench::TENANT_MAC);
    expected.extend(bench::VIP.octets());
    expected.extend([2, 0, 0, 0, 1, 0x60]);
    expected.extend(bench::ON_LINK_CLIENT.octets());
    assert_eq!(outcome, Outcome { action: TX, frame: expected });
    for (nic, target) in
        [(TENANT_NIC, bench::TENANT_ADDRESS), (TENANT_NIC, Ipv4Addr::new(192, 0, 2, 35)), (HUB_NIC, bench::VIP)]
    {
        let frame = request(target);
        assert_eq!(datapath.run(nic, &frame)?, Outcome { action: PASS, frame }, "{target}");
    }
    assert_eq!(datapath.reasons()?, BTreeMap::from([((0, Reason::ArpOther), 3), ((bench::TENANT, Reason::Arp), 1)]));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn on_link_clients_are_answered_at_their_own_mac_and_off_link_ones_through_the_gateway() -> Result<()> {
    let mut datapath = one_node()?;
    let mac = [2, 0, 0, 0, 1, 0x60];
    let near = |flags, sequence, acknowledgement| Segment {
        source_mac: mac,
        ..client((bench::ON_LINK_CLIENT, 40000), flags, sequence, acknowledgement)
    };
    let syn = forwarded(&datapath, TENANT_NIC, &near(SYN, 1000, 0))?;
    let back = forwarded(&datapath, HUB_NIC, &answer(&syn, SYN | ACK, BACKEND_SEQUENCE))?;
    assert_eq!((back.destination_mac, back.source_mac), (mac, bench::TENANT_MAC));
    forwarded(&datapath, TENANT_NIC, &near(ACK, 1001, BACKEND_SEQUENCE + 1))?;
    let back = forwarded(&datapath, HUB_NIC, &answer(&syn, ACK, BACKEND_SEQUENCE + 1))?;
    assert_eq!(back.destination_mac, mac);
    // Somebody else's frame with the client's addresses moves nothing.
    let mut forged = near(ACK, 1001, BACKEND_SEQUENCE + 1);
    forged.source_mac = [2, 0, 0, 0, 1, 0x66];
    forwarded(&datapath, TENANT_NIC, &forged)?;
    assert_eq!(forwarded(&datapath, HUB_NIC, &answer(&syn, ACK, BACKEND_SEQUENCE + 1))?.destination_mac, mac);

    let far = connect(&datapath, (bench::CLIENT, 40000))?;
    assert_eq!(forwarded(&datapath, HUB_NIC, &answer(&far, ACK, 1))?.destination_mac, bench::GATEWAY_MAC);
    // The gateway's index is repointed when its MAC moves, and until one is known the client's last hop serves.
    let mut hops = datapath.array::<abi::NextHop>(names::NEXT_HOPS)?;
    let mut gateway = hops.get(&1, 0)?;
    gateway.destination = [2, 0, 0, 0, 1, 0x77];
    hops.set(1, gateway, 0)?;
    assert_eq!(forwarded(&datapath, HUB_NIC, &answer(&far, ACK, 1))?.destination_mac, [2, 0, 0, 0, 1, 0x77]);
    let mut hops = datapath.array::<abi::NextHop>(names::NEXT_HOPS)?;
    gateway.flags = 0;
    hops.set(1, gateway, 0)?;
    assert_eq!(forwarded(&datapath, HUB_NIC, &answer(&far, ACK, 1))?.destination_mac, bench::GATEWAY_MAC);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_one_armed_backend_is_reached_by_xdp_tx() -> Result<()> {
    let mut datapath = one_node()?;
    // The backend lives in the tenant's segment, behind the same NIC; SNAT by the host's address there.
    let worker = Ipv4Addr::new(192, 0, 2, 101);
    let mut hops = datapath.array::<abi::NextHop>(names::NEXT_HOPS)?;
    let gateway = hops.get(&1, 0)?;
    let worker_mac = [2, 0, 0, 0, 1, 0x65];
    hops.set(20, abi::NextHop { destination: worker_mac, ..gateway }, 0)?;
    datapath.array(names::BACKENDS)?.set(
        1,
        abi::Backend {
            address: abi::mapped(worker.octets()),
            segment: bench::TENANT_SEGMENT,
            next_hop: 20,
            flags: abi::BACKEND_PRESENT | abi::BACKEND_ELIGIBLE,
            ..abi::Backend::ZERO
        },
        0,
    )?;
    let (key, frontend) = bench::frontend(1);
    let snat = abi::mapped(bench::TENANT_ADDRESS.octets());
    datapath.hash(names::FRONTENDS)?.insert(key, abi::Frontend { snat, ..frontend }, 0)?;
    let address = abi::AddressKey { address: snat, segment: bench::TENANT_SEGMENT, port_be: 0 };
    let local = abi::LocalAddress {
        flags: abi::ADDRESS_HOST | abi::ADDRESS_SNAT,
        tenant: bench::TENANT,
        snat_first: bench::FIRST_PORT,
        snat_last: bench::LAST_PORT,
    };
    datapath.hash(names::ADDRESSES)?.insert(address, local, 0)?;

    let source = (bench::ON_LINK_CLIENT, 40000);
    let outcome = send(&datapath, TENANT_NIC, &client(source, SYN, 1000, 0))?;
    assert_eq!(outcome.action, TX);
    let syn = Segment::parse(&outcome.frame)?;
    assert_eq!((syn.source.0, syn.destination), (bench::TENANT_ADDRESS, (worker, bench::NODE_PORT)));
    assert_eq!(syn.destination_mac, worker_mac);
    let mut reply = answer(&syn, SYN | ACK, BACKEND_SEQUENCE);
    reply.destination_mac = bench::TENANT_MAC;
    let outcome = send(&datapath, TENANT_NIC, &reply)?;
    assert_eq!(outcome.action, TX);
    assert_eq!(Segment::parse(&outcome.frame)?.destination, source);
    assert_eq!(send(&datapath, TENANT_NIC, &client(source, ACK, 1001, BACKEND_SEQUENCE + 1))?.action, TX);
    assert_eq!(datapath.live_halves()?, 2);
    // The host's own server on that address is still reachable, its closed ports are the kernel's.
    let own = Segment { destination: (bench::TENANT_ADDRESS, 22), ..client(source, SYN, 1, 0) };
    assert_eq!(send(&datapath, TENANT_NIC, &own)?.action, PASS);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn limits_of_a_tenant_refuse_its_new_connections_only() -> Result<()> {
    let mut datapath = one_node()?;
    let limits = |max_flows, new_flows_per_second| abi::Tenant {
        families: [abi::FamilyLimits { flows: max_flows, ..abi::FamilyLimits::ZERO }; 2],
        new_flows_per_second,
        ..abi::Tenant::ZERO
    };
    datapath.array(names::TENANTS)?.set(u32::from(bench::TENANT), limits(2, 0), 0)?;
    connect(&datapath, (bench::CLIENT, 1))?;
    connect(&datapath, (bench::CLIENT, 2))?;
    assert_eq!(send(&datapath, TENANT_NIC, &client((bench::CLIENT, 3), SYN, 1, 0))?.action, TX);
    assert_eq!(datapath.reasons()?, only(Reason::TenantFlows, 1));
    forwarded(&datapath, TENANT_NIC, &client((bench::CLIENT, 1), ACK, 1001, BACKEND_SEQUENCE + 1))?;

    datapath.array(names::TENANTS)?.set(u32::from(bench::TENANT), limits(0, 5), 0)?;
    let mut dropped = 0;
    for port in 100..200 {
        dropped += u64::from(send(&datapath, TENANT_NIC, &client((bench::CLIENT, port), SYN, 1, 0))?.action == DROP);
    }
    // At most two of the limit's seconds can have passed.
    assert!((90..=95).contains(&dropped), "{dropped}");
    assert_eq!(datapath.reasons()?.get(&(bench::TENANT, Reason::TenantRate)), Some(&dropped));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn flows_end_by_the_clock_hand_and_both_halves_together() -> Result<()> {
    let mut datapath = one_node()?;
    let source = (bench::CLIENT, 40000);
    let syn = connect(&datapath, source)?;
    let idle = connect(&datapath, (bench::CLIENT, 40001))?;
    let used = |datapath: &mut Datapath| -> Result<u64> {
        Ok(datapath.array::<abi::TenantUse>(names::TENANT_USE)?.get(&u32::from(bench::TENANT), 0)?.families[0].flows)
    };
    assert_eq!(used(&mut datapath)?, 2);
    // FIN both ways.
    forwarded(&datapath, TENANT_NIC, &client(source, FIN | ACK, 1001, BACKEND_SEQUENCE + 1))?;
    forwarded(&datapath, HUB_NIC, &answer(&syn, FIN | ACK, BACKEND_SEQUENCE + 1))?;
    age(&datapath, 2)?;
    assert_eq!(datapath.live_halves()?, 4, "a closed flow stays as long as its tuple must");
    let quick = abi::Settings { tombstone: 1, ..bench::settings() };
    datapath.array(names::TIMEOUTS)?.set(0, abi::Timeouts { tcp_fin: 1, ..bench::timeouts() }, 0)?;
    datapath.array(names::SETTINGS)?.set(0, quick, 0)?;
    age(&datapath, 8)?;
    let flows = datapath.hash::<abi::FlowKey4, abi::Flow4>(names::FLOWS4)?;
    let left: Vec<u16> = flows.iter().map(|entry| Ok(entry?.1.tuple.source_port_be)).collect::<Result<_>>()?;
    assert_eq!(left.len(), 2, "both halves of the closed flow are gone, the other flow is whole");
    assert_eq!(used(&mut datapath)?, 1);
    forwarded(&datapath, HUB_NIC, &answer(&idle, ACK, BACKEND_SEQUENCE + 1))?;
    // Its late packets are refused, and nothing is made of them.
    assert_eq!(send(&datapath, TENANT_NIC, &client(source, ACK, 1002, BACKEND_SEQUENCE + 2))?.action, TX);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_fin_that_is_the_proof_is_followed_like_any_other() -> Result<()> {
    let mut datapath = one_node()?;
    let source = (bench::CLIENT, 40000);
    let syn = forwarded(&datapath, TENANT_NIC, &client(source, SYN, 1000, 0))?;
    forwarded(&datapath, HUB_NIC, &answer(&syn, SYN | ACK, BACKEND_SEQUENCE))?;
    // The bare ACK was lost.
    forwarded(&datapath, TENANT_NIC, &client(source, FIN | ACK, 1001, BACKEND_SEQUENCE + 1))?;
    forwarded(&datapath, HUB_NIC, &answer(&syn, FIN | ACK, BACKEND_SEQUENCE + 1))?;
    let flows = datapath.hash::<abi::FlowKey4, abi::Flow4>(names::FLOWS4)?;
    for entry in &flows {
        let state = entry?.1.state;
        assert_eq!(state & (abi::FLOW_FIN | abi::FLOW_PEER_FIN), abi::FLOW_FIN | abi::FLOW_PEER_FIN, "{state:#x}");
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn an_old_socket_of_the_backend_is_reset_so_that_the_retransmitted_syn_succeeds() -> Result<()> {
    let mut datapath = one_node()?;
    let source = (bench::CLIENT, 40000);
    let syn = forwarded(&datapath, TENANT_NIC, &client(source, SYN, 1000, 0))?;
    // The backend still has a connection on this tuple and challenges (RFC 5961 §4).
    let challenge = Segment { acknowledgement: 777, ..answer(&syn, ACK, 555) };
    let outcome = send(&datapath, HUB_NIC, &challenge)?;
    assert_eq!(outcome.action, TX);
    let reset = Segment::parse(&outcome.frame)?;
    assert_eq!((reset.flags, reset.sequence, reset.destination), (RST, 777, challenge.source));
    assert_eq!(datapath.reasons()?, only(Reason::StaleAnswer, 1));
    let again = forwarded(&datapath, TENANT_NIC, &client(source, SYN, 1000, 0))?;
    assert_eq!(again.source, syn.source);
    forwarded(&datapath, HUB_NIC, &answer(&again, SYN | ACK, BACKEND_SEQUENCE))?;
    forwarded(&datapath, TENANT_NIC, &client(source, ACK, 1001, BACKEND_SEQUENCE + 1))?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_marked_flow_is_absent_at_once_and_deleted_after_the_grace() -> Result<()> {
    let mut datapath = one_node()?;
    let source = (bench::CLIENT, 40000);
    let syn = connect(&datapath, source)?;
    let key = abi::FlowKey4 {
        tuple: abi::Tuple4::new(source, (bench::VIP, bench::PORT)),
        segment: bench::TENANT_SEGMENT,
        protocol: 6,
        pad: 0,
    };
    let request = abi::ControlRequest::mark(key);
    assert_eq!(datapath.control(&request)?.result, 1);
    assert_eq!(datapath.control(&request)?.result, 0, "it is marked once");
    assert_eq!(datapath.live_halves()?, 0);
    // Either side learns it with its next packet.
    let outcome = send(&datapath, TENANT_NIC, &client(source, ACK, 1001, BACKEND_SEQUENCE + 1))?;
    assert_eq!((outcome.action, Segment::parse(&outcome.frame)?.flags), (TX, RST));
    let outcome = send(&datapath, HUB_NIC, &answer(&syn, ACK, BACKEND_SEQUENCE + 1))?;
    assert_eq!((outcome.action, Segment::parse(&outcome.frame)?.flags), (TX, RST));
    age(&datapath, 6)?;
    assert_eq!(datapath.hash::<abi::FlowKey4, abi::Flow4>(names::FLOWS4)?.keys().count(), 0);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_client_that_uses_its_port_again_gets_a_new_flow_at_once() -> Result<()> {
    let mut datapath = one_node()?;
    let source = (bench::CLIENT, 40000);
    for round in 0..5u32 {
        let base = 1000 + round * 5_000_000;
        let syn = forwarded(&datapath, TENANT_NIC, &client(source, SYN, base, 0))?;
        forwarded(&datapath, HUB_NIC, &answer(&syn, SYN | ACK, BACKEND_SEQUENCE))?;
        forwarded(&datapath, TENANT_NIC, &client(source, ACK, base + 1, BACKEND_SEQUENCE + 1))?;
        assert_eq!(datapath.live_halves()?, 2, "round {round}");
        forwarded(&datapath, TENANT_NIC, &client(source, FIN | ACK, base + 1, BACKEND_SEQUENCE + 1))?;
        forwarded(&datapath, HUB_NIC, &answer(&syn, FIN | ACK, BACKEND_SEQUENCE + 1))?;
    }
    let used = datapath.array::<abi::TenantUse>(names::TENANT_USE)?.get(&u32::from(bench::TENANT), 0)?;
    assert_eq!(used.families[0].flows, 1);
    assert_eq!(datapath.frontend_counters(bench::FRONTEND)?.flows, 5);
    // On a live flow a SYN changes nothing: the server answers it.
    let syn = connect(&datapath, (bench::CLIENT, 50000))?;
    let again = forwarded(&datapath, TENANT_NIC, &client((bench::CLIENT, 50000), SYN, 9_999_999, 0))?;
    assert_eq!(again.source, syn.source);
    assert_eq!(datapath.reasons()?, BTreeMap::new());
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn source_affinity_ignores_the_port_and_flow_affinity_does_not() -> Result<()> {
    let mut datapath = Datapath::load(4096)?;
    bench::fill(&mut datapath, 3)?;
    let nodes = |datapath: &Datapath, first: u16| -> Result<BTreeMap<Ipv4Addr, u32>> {
        let mut counts = BTreeMap::new();
        for port in first..first + 300 {
            let syn = forwarded(datapath, TENANT_NIC, &client((bench::CLIENT, port), SYN, 1, 0))?;
            *counts.entry(syn.destination.0).or_default() += 1;
        }
        Ok(counts)
    };
    let spread = nodes(&datapath, 1000)?;
    assert_eq!(spread.len(), 3);
    assert!(spread.values().all(|&count| (70..=130).contains(&count)), "{spread:?}");
    let (key, frontend) = bench::frontend(3);
    let frontend = abi::Frontend { flags: abi::FRONTEND_SOURCE_AFFINITY, ..frontend };
    datapath.hash(names::FRONTENDS)?.insert(key, frontend, 0)?;
    assert_eq!(nodes(&datapath, 2000)?.len(), 1);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn source_ranges_are_closed_until_they_are_served() -> Result<()> {
    let mut datapath = one_node()?;
    let (key, frontend) = bench::frontend(1);
    datapath.hash(names::FRONTENDS)?.insert(key, abi::Frontend { source_ranges: 1, ..frontend }, 0)?;
    assert_eq!(send(&datapath, TENANT_NIC, &client((bench::CLIENT, 1), SYN, 1, 0))?.action, DROP);
    assert_eq!(datapath.reasons()?, only(Reason::SourceRange, 1));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_packet_larger_than_the_way_out_and_an_unfinished_offload_are_told_apart() -> Result<()> {
    let mut datapath = one_node()?;
    connect(&datapath, (bench::CLIENT, 40000))?;
    let mut hops = datapath.array::<abi::NextHop>(names::NEXT_HOPS)?;
    let hop = hops.get(&u32::from(bench::node_hop(0)), 0)?;
    hops.set(u32::from(bench::node_hop(0)), abi::NextHop { mtu: 1400, ..hop }, 0)?;
    let mut data = client((bench::CLIENT, 40000), ACK, 1001, BACKEND_SEQUENCE + 1);
    data.payload = vec![7; 1460];
    assert_eq!(send(&datapath, TENANT_NIC, &data)?.action, TX);
    assert_eq!(datapath.reasons()?, only(Reason::TooBig, 1));
    data.payload = vec![7; 2900];
    assert_eq!(send(&datapath, TENANT_NIC, &data)?.action, DROP);
    assert_eq!(datapath.reasons()?.get(&(bench::TENANT, Reason::GsoFrame)), Some(&1));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn an_unresolved_neighbour_is_a_counted_drop_that_leaves_nothing_behind() -> Result<()> {
    let mut datapath = one_node()?;
    let mut hops = datapath.array::<abi::NextHop>(names::NEXT_HOPS)?;
    let hop = hops.get(&u32::from(bench::node_hop(0)), 0)?;
    hops.set(u32::from(bench::node_hop(0)), abi::NextHop { flags: 0, destination: [0; 6], ..hop }, 0)?;
    assert_eq!(send(&datapath, TENANT_NIC, &client((bench::CLIENT, 1), SYN, 1, 0))?.action, DROP);
    assert_eq!(datapath.reasons()?, only(Reason::NoNeighbour, 1));
    datapath.array(names::NEXT_HOPS)?.set(u32::from(bench::node_hop(0)), hop, 0)?;
    forwarded(&datapath, TENANT_NIC, &client((bench::CLIENT, 1), SYN, 1, 0))?;
    Ok(())
}

/// A SYN with these options (padded to words), checksum right.
fn syn_with_options(source: (Ipv4Addr, u16), options: &[u8], payload: &[u8], flags: u8) -> Vec<u8> {
    let mut frame = client(source, flags, 1000, 0).frame();
    let mut padded = options.to_vec();
    padded.resize(options.len().next_multiple_of(4), 0);
    frame.truncate(54);
    frame.extend(&padded);
    frame.extend(payload);
    let total = (frame.len() - 14) as u16;
    frame[16..18].copy_from_slice(&total.to_be_bytes());
    frame[46] = ((20 + padded.len()) / 4 * 16) as u8;
    let mut ip = etherparse::Ipv4Header::from_slice(&frame[14..]).expect("a header").0;
    ip.header_checksum = ip.calc_header_checksum();
    frame[24..26].copy_from_slice(&ip.header_checksum.to_be_bytes());
    let tcp = etherparse::TcpSlice::from_slice(&frame[34..]).expect("a segment");
    let checksum = tcp.calc_checksum_ipv4(ip.source, ip.destination).expect("short enough");
    frame[50..52].copy_from_slice(&checksum.to_be_bytes());
    frame
}

#[test]
#[ignore = "needs root"]
fn a08_the_mss_is_lowered_to_what_fits_and_nothing_else_is_touched() -> Result<()> {
    let mut datapath = one_node()?;
    let clamped = |max_mss| abi::Settings { max_mss, ..bench::settings() };
    datapath.array(names::SETTINGS)?.set(0, clamped(1360), 0)?;
    let mss = |value: u16| [2, 4, value.to_be_bytes()[0], value.to_be_bytes()[1]];
    let cases: [(&str, Vec<u8>, Vec<u8>); 8] = [
        ("larger", mss(1460).to_vec(), mss(1360).to_vec()),
        ("smaller", mss(1200).to_vec(), mss(1200).to_vec()),
        ("none", vec![], vec![]),
        ("odd offset", [&[1][..], &mss(1460)].concat(), [&[1][..], &mss(1360)].concat()),
        (
            "after others",
            [&[4, 2, 1, 3, 3, 7][..], &mss(8960)].concat(),
            [&[4, 2, 1, 3, 3, 7][..], &mss(1360)].concat(),
        ),
        ("of another length", vec![2, 3, 0xff, 0], vec![2, 3, 0xff, 0]),
        ("after the end", [&[0][..], &mss(1460)].concat(), [&[0][..], &mss(1460)].concat()),
        ("a length that never ends", vec![9, 0, 2, 4, 5, 0xb4], vec![9, 0, 2, 4, 5, 0xb4]),
    ];
    let mut port = 30000;
    for (what, options, expected) in cases {
        port += 1;
        let frame = syn_with_options((bench::CLIENT, port), &options, &[], SYN);
        let outcome = datapath.run(TENANT_NIC, &frame)?;
        assert_eq!(outcome.action, REDIRECT, "{what}");
        Segment::parse(&outcome.frame).with_context(|| what.to_owned())?;
        assert_eq!(outcome.frame[54..54 + expected.len()], expected, "{what}");
    }
    // A data segment that happens to contain the bytes.
    let syn = connect(&datapath, (bench::CLIENT, 40000))?;
    let mut data = client((bench::CLIENT, 40000), ACK, 1001, BACKEND_SEQUENCE + 1);
    data.payload = mss(1460).to_vec();
    assert_eq!(forwarded(&datapath, TENANT_NIC, &data)?.payload, mss(1460));
    assert!(syn.payload.is_empty());
    // The other way, and by the smaller interface when no number is given.
    datapath.array(names::SETTINGS)?.set(0, clamped(65535), 0)?;
    let mut hops = datapath.array::<abi::NextHop>(names::NEXT_HOPS)?;
    let hop = hops.get(&u32::from(bench::node_hop(0)), 0)?;
    hops.set(u32::from(bench::node_hop(0)), abi::NextHop { mtu: 1400, ..hop }, 0)?;
    let outcome = datapath.run(TENANT_NIC, &syn_with_options((bench::CLIENT, 41000), &mss(1460), &[], SYN))?;
    assert_eq!(outcome.frame[54..58], mss(1360));
    // Off is off.
    datapath.array(names::SETTINGS)?.set(0, clamped(0), 0)?;
    let outcome = datapath.run(TENANT_NIC, &syn_with_options((bench::CLIENT, 42000), &mss(1460), &[], SYN))?;
    assert_eq!(outcome.frame[54..58], mss(1460));
    Ok(())
}

/// What map `addresses` knows a port of the nodes by.
fn target_port(port: u16) -> abi::AddressKey {
    abi::AddressKey { address: [0; 16], segment: bench::HUB_SEGMENT, port_be: port.to_be() }
}

/// Gives the frontend another NodePort, and says of the old one whether another frontend has it now.
fn move_node_port(datapath: &mut Datapath, port: u16, old_is_served: bool) -> Result<()> {
    let (key, frontend) = bench::frontend(1);
    let moved = abi::Frontend { target_port_be: port.to_be(), ..frontend };
    datapath.hash(names::FRONTENDS)?.insert(key, moved, 0)?;
    let mut addresses = datapath.hash::<abi::AddressKey, abi::LocalAddress>(names::ADDRESSES)?;
    let flag = abi::LocalAddress { flags: abi::ADDRESS_TARGET_PORT, ..abi::LocalAddress::ZERO };
    addresses.insert(target_port(port), flag, 0)?;
    if !old_is_served {
        addresses.remove(&target_port(bench::NODE_PORT))?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_handshake_does_not_end_at_a_node_port_that_is_anothers_meanwhile() -> Result<()> {
    let source = (bench::CLIENT, 40000);
    let ack = client(source, ACK, 1001, BACKEND_SEQUENCE + 1);
    // Another frontend has the port now: refused, and a SYN starts anew.
    let mut datapath = one_node()?;
    half_open(&datapath, source)?;
    move_node_port(&mut datapath, 31000, true)?;
    assert_eq!(send(&datapath, TENANT_NIC, &ack)?.action, TX);
    assert_eq!(datapath.live_halves()?, 0);
    let again = forwarded(&datapath, TENANT_NIC, &client(source, SYN, 1000, 0))?;
    assert_eq!(again.destination, (bench::NODES[0], 31000));
    // The Service has moved to another port, and nobody has the old one: the connection is made where it was begun.
    let mut datapath = one_node()?;
    half_open(&datapath, source)?;
    move_node_port(&mut datapath, 31000, false)?;
    assert_eq!(forwarded(&datapath, TENANT_NIC, &ack)?.destination, (bench::NODES[0], bench::NODE_PORT));
    assert_eq!(datapath.live_halves()?, 2);
    // The change is being written: the frontend has the other port, or still this one.
    for written in [false, true] {
        let mut datapath = one_node()?;
        half_open(&datapath, source)?;
        if written {
            move_node_port(&mut datapath, 31000, true)?;
        }
        let left = abi::LocalAddress { flags: abi::ADDRESS_LEFT_PORT, ..abi::LocalAddress::ZERO };
        datapath.hash(names::ADDRESSES)?.insert(target_port(bench::NODE_PORT), left, 0)?;
        assert_eq!(forwarded(&datapath, TENANT_NIC, &ack)?.destination, (bench::NODES[0], bench::NODE_PORT));
        assert_eq!(datapath.live_halves()?, 2);
    }
    // VIP and port belong to another frontend.
    let mut datapath = one_node()?;
    half_open(&datapath, source)?;
    let (key, frontend) = bench::frontend(1);
    datapath.hash(names::FRONTENDS)?.insert(key, abi::Frontend { id: bench::FRONTEND + 1, ..frontend }, 0)?;
    assert_eq!(send(&datapath, TENANT_NIC, &ack)?.action, TX);
    assert_eq!(datapath.live_halves()?, 0);
    // The backend's id is another's.
    let mut datapath = one_node()?;
    half_open(&datapath, source)?;
    let other = abi::Backend { address: [9; 16], flags: abi::BACKEND_PRESENT, ..abi::Backend::ZERO };
    datapath.array(names::BACKENDS)?.set(1, other, 0)?;
    assert_eq!(send(&datapath, TENANT_NIC, &ack)?.action, TX);
    assert_eq!(datapath.live_halves()?, 0);
    // The backend is out of the plan, as when a file no longer names it: its connections live on, those just begun too.
    let mut datapath = one_node()?;
    half_open(&datapath, source)?;
    datapath.array(names::BACKENDS)?.set(1, abi::Backend::ZERO, 0)?;
    forwarded(&datapath, TENANT_NIC, &ack)?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_group_frame_with_a_unicast_address_inside_reaches_nobody() -> Result<()> {
    let mut datapath = one_node()?;
    for mac in [[0xff; 6], [1, 0, 0x5e, 0, 0, 1]] {
        for address in [bench::SNAT, bench::TENANT_ADDRESS, bench::VIP, Ipv4Addr::LOCALHOST] {
            let segment = Segment {
                destination_mac: mac,
                destination: (address, 9474),
                ..client((bench::CLIENT, 40000), SYN, 1, 0)
            };
            assert_eq!(send(&datapath, TENANT_NIC, &segment)?.action, DROP, "{address}");
        }
        // What groups are for.
        for address in [Ipv4Addr::BROADCAST, Ipv4Addr::new(192, 0, 2, 255), Ipv4Addr::new(224, 0, 0, 1)] {
            let segment = Segment {
                destination_mac: mac,
                destination: (address, 67),
                ..client((bench::CLIENT, 40000), SYN, 1, 0)
            };
            assert_eq!(send(&datapath, TENANT_NIC, &segment)?.action, PASS, "{address}");
        }
    }
    assert_eq!(datapath.reasons()?.get(&(bench::TENANT, Reason::BadDestination)), Some(&8));
    Ok(())
}

/// An IPv4 or IPv6 packet with anything inside, to the tenant NIC's own MAC.
fn raw(ethertype: u16, packet: &[u8]) -> Vec<u8> {
    let mut frame = [bench::TENANT_MAC, bench::GATEWAY_MAC].concat();
    frame.extend(ethertype.to_be_bytes());
    frame.extend(packet);
    frame.resize(frame.len().max(64), 0);
    frame
}

#[test]
#[ignore = "needs root"]
fn redirects_and_router_advertisements_of_a_tenant_do_not_reach_the_host() -> Result<()> {
    let datapath = one_node()?;
    let icmp = |kind: u8, options: usize| {
        let mut packet = vec![0x45 + options as u8, 0, 0, 28 + 4 * options as u8, 0, 0, 0, 0, 64, 1, 0, 0];
        packet.extend(bench::CLIENT.octets());
        packet.extend(bench::TENANT_ADDRESS.octets());
        packet.extend(vec![1; 4 * options]);
        packet.extend([kind, 0, 0, 0, 0, 0, 0, 0]);
        raw(0x0800, &packet)
    };
    assert_eq!(datapath.run(TENANT_NIC, &icmp(8, 0))?.action, PASS, "echo request");
    assert_eq!(datapath.run(TENANT_NIC, &icmp(5, 0))?.action, DROP, "redirect");
    assert_eq!(datapath.run(TENANT_NIC, &icmp(9, 0))?.action, DROP, "router advertisement");
    assert_eq!(datapath.run(TENANT_NIC, &icmp(5, 1))?.action, DROP, "redirect behind options");
    // RFC 7113: behind extension headers.
    let ipv6 = |chain: &[u8], last: u8, kind: u8| {
        let mut packet = vec![0x60, 0, 0, 0, 0, 8 * chain.len() as u8 + 16, *chain.first().unwrap_or(&last), 255];
        packet.extend([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        packet.extend([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        for place in 0..chain.len() {
            packet.extend([*chain.get(place + 1).unwrap_or(&last), 0, 1, 4, 0, 0, 0, 0]);
        }
        packet.extend([kind, 0, 0, 0, 64, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let mut frame = raw(0x86dd, &packet);
        frame[..6].copy_from_slice(&[0x33, 0x33, 0, 0, 0, 1]);
        frame
    };
    for (chain, kind, action) in [
        (&[][..], 134, DROP),
        (&[], 137, DROP),
        // Neighbour solicitations are read, and this one has no target.
        (&[], 135, DROP),
        (&[], 136, PASS),
        (&[0], 134, DROP),
        (&[60], 134, DROP),
        (&[43], 134, DROP),
        (&[0, 60], 134, DROP),
        (&[44], 134, DROP),
        // Multicast listener queries come behind a hop-by-hop header.
        (&[0], 130, PASS),
        (&[0], 143, PASS),
    ] {
        assert_eq!(datapath.run(TENANT_NIC, &ipv6(chain, 58, kind))?.action, action, "{chain:?} {kind}");
    }
    Ok(())
}
