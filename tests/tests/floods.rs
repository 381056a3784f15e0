//! Floods at the full speed of a CPU, and the datapath alone for millions of connections: no agent runs.
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use aya::maps::Queue;
use lbd_common::abi::{self, names};
use lbd_common::tcp::{ACK, SYN};
use lbd_tests::bench::{Order, TCP4, establish};
use lbd_tests::datapath::{Datapath, HUB_NIC, REDIRECT, TENANT_NIC, bench};
use lbd_tests::driver::{Driver, on_cpu, padded, two_cpus};
use lbd_tests::exchange::BACKEND_SEQUENCE;
use lbd_tests::packets::{Segment, client, query, tagged, untagged};

/// A count, or a tenth of it when the tests are to be fast.
fn scaled(count: u32) -> u32 {
    if lbd_tests::lab::fast() { count / 10 } else { count }
}

/// Flows that the flooded tenant has before.
const ESTABLISHED: u32 = 1_000_000;
/// Packets of each flood.
const FLOOD: u32 = 10_000_000;
/// Packets of a flood in one run.
const CHUNK: u32 = 250_000;
/// New connections that the other tenant makes during one flood: its one node has 31,744 ports.
const NEIGHBOURS: u16 = 6000;

#[test]
#[ignore = "needs root"]
fn a_tenants_floods_cost_no_established_flow_and_no_other_tenants_new_connection() -> Result<()> {
    if !two_cpus() {
        eprintln!("skipped: needs two CPUs");
        return Ok(());
    }
    let flows = scaled(ESTABLISHED);
    // A tenant may have half of the table, and here it has nearly that.
    let max_flows = flows * 22 / 10;
    let mut datapath = Datapath::load_with(max_flows, 1024)?;
    bench::fill(&mut datapath, 3)?;
    let limits = abi::FamilyLimits { flows: max_flows / 2, udp: max_flows / 32, half_open: 16_384, pad: 0 };
    datapath.limit::<Ipv4Addr>(bench::TENANT, limits)?;
    establish_as_if_opened(&mut datapath, flows)?;
    check_all(&datapath, flows)?;

    let syn = client((Ipv4Addr::UNSPECIFIED, 0), SYN, 1000, 0).frame();
    let datagram = query((Ipv4Addr::UNSPECIFIED, 0), b"0123456789").frame();
    let floods = [
        ("SYNs", &syn, 0, FLOOD, 0x0b00_0000u32),
        ("SYN and ACK pairs", &syn, 1, 2 * FLOOD, 0x0c00_0000),
        ("UDP datagrams", &datagram, 0, FLOOD, 0x0d00_0000),
    ];
    let mut neighbour = 0;
    for (what, frame, pairs, packets, clients) in floods {
        let packets = scaled(packets);
        let mut flooder = Driver::load(&datapath, "flooder", &[("PAIRS", pairs), ("CLIENTS", clients)])?;
        flooder.set_template(0, &padded(frame.clone()))?;
        flooder.aim(0, &datapath.edge(TENANT_NIC)?)?;
        let before = datapath.reasons()?;
        let (rate, neighbours) = flood(&datapath, &flooder, packets, neighbour)?;
        neighbour += neighbours.made;
        let rates = format!("{:.2} million {what} a second", rate / 1e6);
        eprintln!(
            "{packets} packets, {rates}; meanwhile {} new connections of the other tenant, {:.0} a second",
            neighbours.made, neighbours.rate
        );
        for ((tenant, reason), count) in datapath.reasons()? {
            let new = count - before.get(&(tenant, reason)).copied().unwrap_or(0);
            if new > 0 {
                eprintln!("    tenant {tenant}: {new} {}", reason.name());
            }
        }
        ensure!(neighbours.made > 100, "{what}: only {} new connections of the other tenant", neighbours.made);
        check_all(&datapath, flows).with_context(|| format!("after {packets} {what}"))?;
        let used = datapath.used::<Ipv4Addr>(bench::TENANT)?;
        ensure!(used.flows >= u64::from(flows) && used.flows <= u64::from(limits.flows), "{what}: {used:?}");
        ensure!(used.half_open as i64 <= i64::from(limits.half_open), "{what}: {used:?}");
        ensure!(used.udp <= u64::from(limits.udp), "{what}: {used:?}");
    }
    let other = datapath.used::<Ipv4Addr>(bench::VLAN_TENANTS[0])?;
    ensure!(
        other.flows == u64::from(neighbour) && other.half_open == 0,
        "{neighbour} connections were made: {other:?}"
    );
    Ok(())
}

/// Established flows of tenant a that are counted, and in the ageing queue: as if they had been opened.
fn establish_as_if_opened(datapath: &mut Datapath, flows: u32) -> Result<()> {
    establish::<Ipv4Addr>(datapath, &TCP4, flows, Order::AsVisited)?;
    let mut entries = Vec::new();
    for (key, flow) in datapath.flows::<Ipv4Addr>()? {
        if flow.state & abi::FLOW_REVERSE == 0 {
            entries.push(abi::AgeEntry4 { lookup: key, created: flow.created() });
        }
    }
    ensure!(entries.len() == flows as usize, "{} flows", entries.len());
    let mut ageing: Queue<_, abi::AgeEntry4> = datapath.queue(names::AGEING4)?;
    for entry in entries {
        ageing.push(entry, 0)?;
    }
    let mut used = datapath.array::<abi::TenantUse>(names::TENANT_USE)?;
    let mut tenant = used.get(&u32::from(bench::TENANT), 0)?;
    tenant.families[0].flows = u64::from(flows);
    used.set(u32::from(bench::TENANT), tenant, 0)?;
    Ok(())
}

/// Every established flow translates as it says, both ways.
fn check_all(datapath: &Datapath, flows: u32) -> Result<()> {
    let vip = u32::from(bench::VIP);
    let snat = u32::from(bench::SNAT);
    for (nic, source, port) in [(TENANT_NIC, snat, bench::NODE_PORT), (HUB_NIC, vip, bench::PORT)] {
        let constants = [
            ("FLOWS", flows),
            ("REVERSE", u32::from(nic == HUB_NIC)),
            ("EXPECTED_SOURCE", source),
            ("EXPECTED_PORT", u32::from(port)),
        ];
        let mut checker = Driver::load(datapath, "checker", &constants)?;
        let mut segment = client((Ipv4Addr::UNSPECIFIED, 0), ACK, 1, 1);
        if nic == HUB_NIC {
            segment.destination_mac = bench::HUB_MAC;
            segment.source = (Ipv4Addr::UNSPECIFIED, bench::NODE_PORT);
            segment.destination = (bench::SNAT, 0);
        }
        checker.set_template(0, &padded(segment.frame()))?;
        checker.aim(0, &datapath.edge(nic)?)?;
        // The last packet is looked at by the one after it.
        checker.run(flows + 1)?;
        let (right, wrong) = (checker.get("outcomes", 0)?, checker.get("outcomes", 1)?);
        ensure!(
            right == u64::from(flows) && wrong == 0,
            "{right} of {flows} established flows translate as before, {wrong} do not (packets at NIC {nic})"
        );
    }
    Ok(())
}

/// What the other tenant did meanwhile.
struct Neighbours {
    made: u16,
    rate: f64,
}

/// Runs a flood on one CPU while, on another, tenant b makes new connections, all of which must succeed. Gives packets a second.
fn flood(datapath: &Datapath, flooder: &Driver, packets: u32, first: u16) -> Result<(f64, Neighbours)> {
    let done = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        let neighbour = scope.spawn(move || -> Result<Neighbours> {
            on_cpu(1)?;
            let begun = Instant::now();
            let mut made = 0;
            while !done.load(Ordering::Relaxed) && made < NEIGHBOURS {
                let number = first + made;
                connect_in_vlan(datapath, (bench::CLIENT, number + 1))
                    .with_context(|| format!("new connection {made} of the other tenant"))?;
                made += 1;
                std::thread::sleep(Duration::from_micros(200));
            }
            Ok(Neighbours { made, rate: f64::from(made) / begun.elapsed().as_secs_f64() })
        });
        let flooded = on_cpu(0).and_then(|()| {
            let begun = Instant::now();
            let mut left = packets;
            while left > 0 {
                flooder.run(left.min(CHUNK))?;
                left -= left.min(CHUNK);
            }
            Ok(f64::from(packets) / begun.elapsed().as_secs_f64())
        });
        done.store(true, Ordering::Relaxed);
        let neighbours = neighbour.join().expect("no panic")?;
        Ok((flooded?, neighbours))
    })
}

/// A handshake of tenant b.
fn connect_in_vlan(datapath: &Datapath, source: (Ipv4Addr, u16)) -> Result<()> {
    let vlan = bench::VLANS[0];
    let outcome = datapath.run(TENANT_NIC, &tagged(&client(source, SYN, 1000, 0).frame(), vlan))?;
    ensure!(outcome.action == REDIRECT, "SYN: action {}", outcome.action);
    let syn = Segment::<Ipv4Addr>::parse(&outcome.frame)?;
    let outcome = datapath.run(HUB_NIC, &syn.answer(SYN | ACK, BACKEND_SEQUENCE).frame())?;
    ensure!(outcome.action == REDIRECT, "SYN-ACK: action {}", outcome.action);
    let back = Segment::<Ipv4Addr>::parse(&untagged(&outcome.frame)?.1)?;
    ensure!(back.destination == source, "the SYN-ACK went to {:?}", back.destination);
    let ack = tagged(&client(source, ACK, 1001, BACKEND_SEQUENCE + 1).frame(), vlan);
    let outcome = datapath.run(TENANT_NIC, &ack)?;
    ensure!(outcome.action == REDIRECT, "ACK: action {}", outcome.action);
    Ok(())
}

/// Short connections that are made without an agent.
const SHORT: u32 = 2_000_000;
/// Of them in one run.
const AT_ONCE: u32 = 5000;
/// Packets of one.
const STEPS: u32 = 6;

#[test]
#[ignore = "needs root"]
fn without_an_agent_two_million_short_connections_are_made_and_the_table_stays_bounded() -> Result<()> {
    const MAX_FLOWS: u32 = 262_144;
    let mut datapath = Datapath::load_with(MAX_FLOWS, 1024)?;
    bench::fill(&mut datapath, 3)?;
    // An hour in a minute: with their real hold times the three nodes' ports are good for 1270 connections a second.
    datapath.set_settings(abi::Settings { tombstone: 2, ..bench::settings() })?;
    datapath.set_timeouts(abi::Timeouts { tcp_fin: 1, ..bench::timeouts() })?;
    let mut visitor = Driver::load(&datapath, "visitor", &[])?;
    visitor.set_template(0, &padded(client((Ipv4Addr::UNSPECIFIED, 0), SYN, 0, 0).frame()))?;
    let mut from_node = client((Ipv4Addr::UNSPECIFIED, 0), ACK, 0, 0);
    from_node.destination_mac = bench::HUB_MAC;
    visitor.set_template(1, &padded(from_node.frame()))?;
    visitor.aim(0, &datapath.edge(TENANT_NIC)?)?;
    visitor.aim(1, &datapath.edge(HUB_NIC)?)?;
    let connections = scaled(SHORT);
    let begun = Instant::now();
    let (mut made, mut most, mut most_entries) = (0, 0, 0);
    let mut packet = visitor.template().to_vec();
    while made < connections {
        let count = AT_ONCE.min(connections - made);
        packet = visitor.go_on(&packet, count * STEPS)?.last.frame;
        made += count;
        // 50,000 a second: what the compressed hold times allow.
        let due = Duration::from_micros(u64::from(made) * 20);
        std::thread::sleep(due.saturating_sub(begun.elapsed()));
        most = most.max(datapath.used::<Ipv4Addr>(bench::TENANT)?.flows);
        if made.is_multiple_of(200_000) {
            let entries = datapath.hash::<abi::FlowKey4, abi::Flow4>(names::FLOWS4)?.keys().count();
            most_entries = most_entries.max(entries);
        }
    }
    // The last packet is looked at by the one after it.
    visitor.go_on(&packet, 1)?;
    let elapsed = begun.elapsed().as_secs_f64();
    let (whole, refused, lost) =
        (visitor.get("outcomes", 0)?, visitor.get("outcomes", 1)?, visitor.get("outcomes", 2)?);
    eprintln!(
        "{whole} short connections, {:.0} a second; at most {most} flows at once and {most_entries} of {} entries",
        f64::from(connections) / elapsed,
        abi::flow_entries(MAX_FLOWS)
    );
    ensure!(whole == u64::from(connections), "{whole} of {connections} were made: {:?}", datapath.reasons()?);
    ensure!(refused == 0 && lost == 0, "{refused} refused, {lost} packets lost: {:?}", datapath.reasons()?);
    ensure!(most < u64::from(MAX_FLOWS) / 2, "{most} flows at once");
    ensure!(most_entries < MAX_FLOWS as usize, "{most_entries} entries");
    Ok(())
}
