//! The datapath benchmark.
//!
//! A driver program restores a 64-byte packet, makes it the next flow's and tail-calls the program under test; `BPF_PROG_TEST_RUN` repeats
//! that. The driver's own cost, tail-calling a program that only returns, is the unit; all figures are net of it. So the ratios hold
//! on any machine, however fast or busy it is.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

use anyhow::{Context as _, Result, bail, ensure};
use aya::maps::Array;
use lbd_common::abi::{self, names};
use lbd_common::packet::{TCP, UDP};
use lbd_common::reason::Reason;
use lbd_common::tcp::{ACK, SYN};
use serde::Serialize;

use crate::datapath::bench::{self, Ip};
use crate::datapath::{DROP, Datapath, HUB_NIC, Outcome, PASS, REDIRECT, TENANT_NIC};
use crate::driver::{Driver, Run, on_cpu, padded, two_cpus};
use crate::packets::{Datagram, Segment, client, query, tagged};

/// `datapath.max_flows` for the cases of live flows: the table is nearly full with a million.
const MANY_FLOWS: u32 = 1_048_576;
/// The default of `datapath.max_flows`.
const DEFAULT_FLOWS: u32 = 262_144;
/// Packets in one run: each flow many times, so that the caches are as warm as the flows allow.
const PACKETS: std::ops::RangeInclusive<u32> = 200_000..=3_000_000;
/// Runs of each case; the fastest counts, as the least disturbed.
const RUNS: usize = 9;
/// Rounds of opening and promoting.
const ROUNDS: usize = 9;
/// Connections opened or promoted in one run: few enough for the half-open table, which is emptied between the runs.
const OPENINGS: u32 = 20_000;
/// Packets that `opener` makes beyond its flows, so that one CPU can wait for the other: about a second. The kernel starts the second run after
/// an RCU grace period, for which it interrupts the first one only when that has lasted for some time.
const PATIENCE: u32 = 100_000_000;
/// Sequence number that the bench's backends begin with.
const BACKEND_SEQUENCE: u32 = 7_000_000;

/// What `--json` writes.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The driver with a program that only returns, nanoseconds.
    pub unit_ns: f64,
    /// One look-up in the flow map with a million flows, nanoseconds, net: IPv4.
    pub bare_lookup_1m_ns: f64,
    /// The same: IPv6.
    pub bare_lookup6_1m_ns: f64,
    /// The cases.
    pub cases: Vec<Case>,
}

/// One case.
#[derive(Debug, Serialize)]
pub struct Case {
    /// Name.
    pub name: String,
    /// Flows gone through in turn.
    pub flows: u32,
    /// Nanoseconds a packet, net.
    pub ns: f64,
    /// The same in units.
    pub units: f64,
    /// The same in bare look-ups in a map of that size, family and order, for a million flows.
    pub bare_lookups: Option<f64>,
    /// The case that this one is compared with, and the ratio to it.
    pub compared: Option<(String, f64)>,
}

impl Report {
    fn add(&mut self, name: &str, flows: u32, ns: f64, compared: Option<&str>) {
        let bare = if name.starts_with(TCP6.name) { self.bare_lookup6_1m_ns } else { self.bare_lookup_1m_ns };
        let bare_lookups = (flows >= 1_000_000 && !name.contains(SHUFFLED)).then_some(ns / bare);
        let compared = compared.and_then(|other| {
            let base = self.cases.iter().find(|case| case.name == other)?;
            Some((other.to_owned(), ns / base.ns))
        });
        self.cases.push(Case { name: name.to_owned(), flows, ns, units: ns / self.unit_ns, bare_lookups, compared });
    }
}

impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "unit {:.1} ns, bare look-up at 1m {:.1} ns", self.unit_ns, self.bare_lookup_1m_ns)?;
        writeln!(formatter, ", IPv6 {:.1} ns", self.bare_lookup6_1m_ns)?;
        for case in &self.cases {
            let Case { name, flows, ns, units, bare_lookups, compared } = case;
            write!(formatter, "{name:<22} {flows:>8} flows {ns:>8.1} ns {units:>6.2} units")?;
            if let Some(ratio) = bare_lookups {
                write!(formatter, " {ratio:>5.2} bare look-ups")?;
            }
            if let Some((other, ratio)) = compared {
                write!(formatter, " {ratio:>5.2} × {other}")?;
            }
            writeln!(formatter)?;
        }
        Ok(())
    }
}

/// A kind of established flows.
#[derive(Clone, Copy)]
pub struct Kind {
    /// In names of cases.
    name: &'static str,
    protocol: u8,
    port: u16,
    target_port: u16,
    preserve_client: bool,
    /// Number of the VLAN tenant whose clients they are, else tenant a's.
    vlan: Option<usize>,
    /// Spread over the counters of this many frontends; 0: all are the bench's own frontend's.
    frontends: u32,
}

/// TCP through the bench's frontend.
pub const TCP4: Kind = Kind {
    name: "tcp4",
    protocol: TCP,
    port: bench::PORT,
    target_port: bench::NODE_PORT,
    preserve_client: false,
    vlan: None,
    frontends: 0,
};
const SPREAD4: Kind = Kind { frontends: 20_000, ..TCP4 };
const TCP6: Kind = Kind { name: "tcp6", ..SPREAD4 };
const UDP4: Kind = Kind { name: "udp4", protocol: UDP, port: bench::UDP_PORT, ..SPREAD4 };
const PRESERVE4: Kind = Kind { name: "tcp4_preserve", port: bench::PRESERVE_PORT, preserve_client: true, ..SPREAD4 };
/// Another target port: on the hub its reverse tuples are apart from tenant a's.
const VLAN4: Kind = Kind { name: "tcp4_vlan", target_port: bench::NODE_PORT + 1, vlan: Some(0), ..SPREAD4 };

/// Runs the cases whose names contain `wanted`. What a case is compared with runs too.
pub fn datapath(wanted: &str) -> Result<Report> {
    let both = two_cpus();
    on_cpu(nix::sched::sched_getcpu()?)?;
    let mut report = Report { unit_ns: 0.0, bare_lookup_1m_ns: 0.0, bare_lookup6_1m_ns: 0.0, cases: Vec::new() };
    let any = |names: &[&str]| names.iter().any(|name| name.contains(wanted));
    let sizes: Vec<_> = [("1", 1, &[][..]), ("10k", 10_000, &OTHERS_10K[..]), ("1m", 1_000_000, &[])]
        .into_iter()
        .filter(|(label, _, others)| {
            let both = ["tcp4_forward", "tcp4_reverse", "tcp6_forward", "tcp6_reverse"];
            both.iter().any(|name| any(&[&format!("{name}_{label}")])) || others.iter().any(|(_, name)| any(&[name]))
        })
        .collect();
    let shuffled: Vec<_> = [("10k", 10_000), ("1m", 1_000_000)]
        .into_iter()
        .filter(|(label, _)| any(&[&format!("tcp4_{SHUFFLED}_{label}"), &format!("tcp6_{SHUFFLED}_{label}")]))
        .collect();
    let mut bed = Bed::new(if sizes.is_empty() { DEFAULT_FLOWS } else { MANY_FLOWS })?;
    report.unit_ns = bed.driver::<Ipv4Addr>(&TCP4, 1, false)?.best(&bed, Target::Nothing)?;
    for &(label, flows, others) in &sizes {
        let mut drivers = bed.both_families(flows, Order::AsVisited)?;
        if flows == 1_000_000 {
            let [bare4, _, bare6, _] = &mut drivers;
            report.bare_lookup_1m_ns = bare4.bare_lookup(&bed)?;
            report.bare_lookup6_1m_ns = bare6.bare_lookup(&bed)?;
        }
        let costs = nets(&mut drivers, &mut bed)?;
        for (driver, ns) in drivers.iter().zip(costs) {
            let way = direction(driver.reverse);
            let name = format!("{}_{way}_{label}", driver.name);
            report.add(&name, flows, ns, driver.v6.then(|| format!("tcp4_{way}_{label}")).as_deref());
        }
        for (kind, name) in others {
            establish::<Ipv4Addr>(&mut bed.datapath, kind, flows, Order::AsVisited)?;
            let ns = bed.driver::<Ipv4Addr>(kind, flows, false)?.net(&mut bed)?;
            report.add(name, flows, ns, Some("tcp4_forward_10k"));
        }
    }
    for &(label, flows) in &shuffled {
        drop(bed);
        bed = Bed::new(MANY_FLOWS)?;
        let [forward4, _, forward6, _] = bed.both_families(flows, Order::Shuffled)?;
        let mut drivers = [forward4, forward6];
        let costs = nets(&mut drivers, &mut bed)?;
        for (driver, ns) in drivers.iter().zip(costs) {
            let name = format!("{}_{SHUFFLED}_{label}", driver.name);
            report.add(&name, flows, ns, driver.v6.then(|| format!("tcp4_{SHUFFLED}_{label}")).as_deref());
        }
    }
    if !shuffled.is_empty() || !sizes.is_empty() {
        drop(bed);
        bed = Bed::new(DEFAULT_FLOWS)?;
    }
    if any(&["tcp4_new_flow", "tcp4_promote"]) {
        let (open, promote) = bed.openings()?;
        report.add("tcp4_new_flow", OPENINGS, open, None);
        report.add("tcp4_promote", OPENINGS, promote, None);
    }
    if any(&["tcp4_new_flow_1cpu", "tcp4_new_flow_2cpu"]) {
        let (one, two) = bed.openings_on_cpus(both)?;
        report.add("tcp4_new_flow_1cpu", OPENINGS, one, None);
        if let Some(two) = two {
            report.add("tcp4_new_flow_2cpu", OPENINGS, two, Some("tcp4_new_flow_1cpu"));
        }
    }
    if any(&["syn_refused", "syn_refused_rate"]) {
        for (name, ns) in bed.refusals()? {
            report.add(name, PACKETS_OF_REFUSALS, ns, None);
        }
    }
    if report.cases.is_empty() {
        bail!("no case has `{wanted}` in its name");
    }
    Ok(report)
}

/// Other kinds of flows, and the names of their cases.
const OTHERS_10K: [(Kind, &str); 3] =
    [(UDP4, "udp4_forward_10k"), (PRESERVE4, "tcp4_preserve_10k"), (VLAN4, "tcp4_vlan_10k")];

/// SYNs of one run of refusals.
const PACKETS_OF_REFUSALS: u32 = 200_000;

const fn direction(reverse: bool) -> &'static str {
    if reverse { "reverse" } else { "forward" }
}

#[derive(Clone, Copy)]
enum Target {
    Nothing,
    Pop,
    BareLookup,
    Edge,
}

/// The loaded datapath with maps of production size.
struct Bed {
    datapath: Datapath,
}

/// Client of flow number `flow`, as the driver computes it.
fn flow_client<I: Ip>(flow: u32) -> (I, u16) {
    let port = 1024 + (u64::from(flow) * 7919 % 60_000) as u16;
    (I::client(flow & 0x3f_ffff), port)
}

/// Backend and SNAT port of flow number `flow`, as the driver computes them.
fn flow_backend<I: Ip>(flow: u32) -> (I, u16) {
    (I::backend(flow / 31_744), 1024 + (flow % 31_744) as u16)
}

/// Where a flow's packets come from and go to: as they arrive, and as they leave.
fn tuples<I: Ip>(kind: &Kind, flow: u32) -> (abi::Tuple<I::Address>, abi::Tuple<I::Address>) {
    let (client, backend) = (flow_client::<I>(flow), flow_backend::<I>(flow));
    let from = abi::Tuple::new(client, (I::VIP, kind.port));
    let source = if kind.preserve_client { client } else { (I::SNAT, backend.1) };
    (from, abi::Tuple::new(source, (backend.0, kind.target_port)))
}

/// How flows lie in the table.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// As the driver goes through them: what comes next lies beside what came last, and the CPU has it ready. The C program that the
    /// targets come from does so.
    AsVisited,
    /// As connections that were opened at any time: nothing is near to what came before.
    Shuffled,
}

/// In names of cases with [`Order::Shuffled`].
const SHUFFLED: &str = "shuffled";

/// Coprime to the numbers of flows: multiples of it, modulo these, go through all of them.
const SHUFFLE: u64 = 611_953;

/// Puts `flows` established flows of a kind into the map, just used, as nothing runs meanwhile.
pub fn establish<I: Ip>(datapath: &mut Datapath, kind: &Kind, flows: u32, order: Order) -> Result<()> {
    // Next hops for their backends.
    let mut hops: Array<_, abi::NextHop> = datapath.array(names::NEXT_HOPS)?;
    let hop = hops.get(&u32::from(bench::node_hop(0)), 0)?;
    for index in 0..500u32 {
        hops.set(1000 + index, hop, 0)?;
    }
    let (segment, gateway) = match kind.vlan {
        Some(which) => (bench::VLAN_SEGMENTS[which], bench::vlan_gateway_hop(which)),
        None => (bench::TENANT_SEGMENT, bench::GATEWAY_HOP),
    };
    let state = abi::FLOW_REPLIED | if kind.protocol == UDP { abi::FLOW_UDP } else { 0 };
    let now = datapath.tick()?;
    let mut map = datapath.flow_table::<I>()?;
    for number in 0..flows {
        let flow = match order {
            Order::AsVisited => number,
            Order::Shuffled => (u64::from(number) * SHUFFLE % u64::from(flows)) as u32,
        };
        let (from, to) = tuples::<I>(kind, flow);
        let key = abi::FlowKey { tuple: from, segment, protocol: kind.protocol, pad: 0 };
        let reverse_key = abi::FlowKey::reply(&to, bench::HUB_SEGMENT, kind.protocol);
        let frontend = if kind.frontends == 0 { I::FRONTEND } else { (flow * 31 % kind.frontends) as u16 };
        let forward = abi::Flow {
            tuple: key.tuple,
            segment: key.segment,
            next_hop: (1000 + flow * 7 % 500) as u16,
            to,
            last_seen: now,
            sequence: 1,
            own: abi::Flow::<I::Address>::forward_own(now, 1),
            frontend,
            state,
            ..abi::Flow::ZERO
        };
        let reverse = abi::Flow {
            tuple: reverse_key.tuple,
            segment: reverse_key.segment,
            next_hop: gateway,
            to: from.turned(),
            own: bench::GATEWAY_MAC,
            state: state | abi::FLOW_REVERSE,
            ..forward
        };
        map.insert(key.lookup(bench::LOOKUP_SECRET), forward, 0)?;
        map.insert(reverse_key.lookup(bench::LOOKUP_SECRET), reverse, 0)?;
    }
    Ok(())
}

impl Bed {
    fn new(max_flows: u32) -> Result<Self> {
        let mut datapath = Datapath::load(max_flows)?;
        bench::fill(&mut datapath, 3)?;
        Ok(Self { datapath })
    }

    /// Establishes flows of TCP in both families; their drivers: IPv4 forward and reverse, IPv6 forward and reverse.
    fn both_families(&mut self, flows: u32, order: Order) -> Result<[FlowDriver; 4]> {
        establish::<Ipv4Addr>(&mut self.datapath, &SPREAD4, flows, order)?;
        establish::<Ipv6Addr>(&mut self.datapath, &TCP6, flows, order)?;
        Ok([
            self.driver::<Ipv4Addr>(&SPREAD4, flows, false)?,
            self.driver::<Ipv4Addr>(&SPREAD4, flows, true)?,
            self.driver::<Ipv6Addr>(&TCP6, flows, false)?,
            self.driver::<Ipv6Addr>(&TCP6, flows, true)?,
        ])
    }

    /// A driver for established flows of a kind.
    fn driver<I: Ip>(&self, kind: &Kind, flows: u32, reverse: bool) -> Result<FlowDriver> {
        let program = match (I::IS_V6, kind.vlan) {
            (false, None) => "driver",
            (true, None) => "driver6",
            (false, Some(_)) => "driver_tagged",
            (true, Some(_)) => bail!("no driver for tagged IPv6"),
        };
        let right = packet::<I>(kind, reverse, 0);
        let mut driver = Driver::load(&self.datapath, program, &[("FLOWS", flows), ("REVERSE", u32::from(reverse))])?;
        driver.set_template(0, &right)?;
        let expected = translated::<I>(kind, reverse, 0);
        Ok(FlowDriver {
            driver,
            flows,
            reverse,
            v6: I::IS_V6,
            name: kind.name,
            tagged: kind.vlan.is_some(),
            right,
            expected,
        })
    }

    fn forget_flows(&mut self) -> Result<()> {
        let mut map = self.datapath.hash::<abi::FlowKey4, abi::Flow4>(names::FLOWS4)?;
        let keys = map.keys().collect::<Result<Vec<_>, _>>()?;
        for key in keys {
            map.remove(&key)?;
        }
        let mut used: Array<_, abi::TenantUse> = self.datapath.array(names::TENANT_USE)?;
        for tenant in 0..4 {
            used.set(tenant, abi::TenantUse::ZERO, 0)?;
        }
        Ok(())
    }

    /// A driver for packets from clients without a flow.
    fn client_driver(&self, flags: u8, sequence: u32, acknowledgement: u32) -> Result<FlowDriver> {
        let mut driver = self.driver::<Ipv4Addr>(&TCP4, OPENINGS, false)?;
        let segment = client((Ipv4Addr::client(0), 0), flags, sequence, acknowledgement);
        driver.driver.set_template(0, &padded(segment.frame()))?;
        Ok(driver)
    }

    /// Opens and proves connections; nanoseconds for each, net.
    fn openings(&mut self) -> Result<(f64, f64)> {
        let mut best = (f64::MAX, f64::MAX);
        for _ in 0..ROUNDS {
            self.forget_half_open()?;
            let mut opener = self.client_driver(SYN, 0, 0)?;
            let base = opener.best(self, Target::Nothing)?;
            opener.driver.start()?;
            let run = opener.run(self, Target::Edge, OPENINGS)?;
            ensure!(run.last.action == REDIRECT, "the last SYN was not forwarded: action {}", run.last.action);
            let open = run.nanoseconds - base;
            let opened = self.answer_all()?;
            ensure!(opened > OPENINGS * 98 / 100, "only {opened} of {OPENINGS} connections are half-open");
            let mut prover = self.client_driver(ACK, 1, BACKEND_SEQUENCE + 1)?;
            let run = prover.run(self, Target::Edge, OPENINGS)?;
            ensure!(run.last.action == REDIRECT, "the last ACK was not forwarded: action {}", run.last.action);
            let prove = run.nanoseconds - base;
            let live = self.datapath.live_halves()? as u32;
            ensure!(live == 2 * opened, "{live} halves of {opened} promoted connections");
            self.forget_flows()?;
            best = (best.0.min(open), best.1.min(prove));
        }
        Ok(best)
    }

    /// Nanoseconds, net, that a CPU takes to open a connection: alone, and while another CPU does the same.
    fn openings_on_cpus(&mut self, both: bool) -> Result<(f64, Option<f64>)> {
        let base = self.client_driver(SYN, 0, 0)?.best(self, Target::Nothing)?;
        let (mut one, mut two) = (f64::MAX, f64::MAX);
        for _ in 0..ROUNDS {
            one = one.min(self.open_together(1)?.context("one CPU waits for nobody")? - base);
            if both && let Some(ns) = self.open_together(2)? {
                two = two.min(ns - base);
            }
        }
        // Back to the CPU that the other cases run on.
        on_cpu(nix::sched::sched_getcpu()?)?;
        let two = (two < f64::MAX).then_some(two);
        if both && two.is_none() {
            eprintln!("the two CPUs never began together: no figure for both");
        }
        Ok((one, two))
    }

    /// Opens connections on `cpus` CPUs at once; nanoseconds for each on the slowest, or `None` if they did not meet.
    fn open_together(&mut self, cpus: u32) -> Result<Option<f64>> {
        self.forget_half_open()?;
        let mut openers = Vec::new();
        for cpu in 0..cpus {
            let clients = ("CLIENTS", 0x0a40_0000 + cpu * 0x10_0000);
            let mut opener = Driver::load(&self.datapath, "opener", &[("FLOWS", OPENINGS), ("CPUS", cpus), clients])?;
            opener.set_template(0, &padded(client((Ipv4Addr::client(0), 0), SYN, 0, 0).frame()))?;
            opener.aim(0, &self.datapath.edge(TENANT_NIC)?)?;
            opener.set("gate", 0, 0)?;
            openers.push(opener);
        }
        let patience = if cpus == 1 { 1 } else { PATIENCE };
        let times = std::thread::scope(|scope| -> Result<Vec<Option<u64>>> {
            let run = |opener: &Driver| -> Result<Option<u64>> {
                opener.run(OPENINGS + patience)?;
                let (begun, done) = (opener.get("times", 1)?, opener.get("times", 2)?);
                Ok((done != 0).then(|| done - begun))
            };
            let others: Vec<_> = openers
                .iter()
                .enumerate()
                .skip(1)
                .map(|(cpu, opener)| scope.spawn(move || on_cpu(cpu).and_then(|()| run(opener))))
                .collect();
            let mut times = vec![on_cpu(0).and_then(|()| run(&openers[0]))?];
            for other in others {
                times.push(other.join().expect("no panic")?);
            }
            Ok(times)
        })?;
        let Some(times) = times.into_iter().collect::<Option<Vec<u64>>>() else { return Ok(None) };
        let opened = self.answer_all()?;
        ensure!(
            opened > cpus * OPENINGS * 95 / 100,
            "only {opened} of {cpus} times {OPENINGS} connections are half-open"
        );
        let slowest = times.into_iter().max().unwrap_or(0);
        Ok(Some(slowest as f64 / f64::from(OPENINGS)))
    }

    /// Nanoseconds, net, of SYNs that a limit of their tenant refuses.
    fn refusals(&mut self) -> Result<Vec<(&'static str, f64)>> {
        let mut figures = Vec::new();
        let limits = |half_open, flows, new_flows_per_second| abi::Tenant {
            families: [abi::FamilyLimits { half_open, flows, ..abi::FamilyLimits::ZERO }; 2],
            new_flows_per_second,
            ..abi::Tenant::ZERO
        };
        for (name, limits, reason) in [
            ("syn_refused", limits(1, 0, 0), Reason::TenantHalfOpen),
            ("syn_refused_rate", limits(0, 0, 1), Reason::TenantRate),
        ] {
            self.forget_half_open()?;
            self.forget_flows()?;
            self.datapath.array(names::TENANTS)?.set(u32::from(bench::TENANT), limits, 0)?;
            let mut opener = self.client_driver(SYN, 0, 0)?;
            let base = opener.best(self, Target::Nothing)?;
            // What the limit lets through.
            opener.run(self, Target::Edge, 1000)?;
            let counted = |datapath: &mut Datapath| -> Result<u64> {
                Ok(datapath.reasons()?.get(&(bench::TENANT, reason)).copied().unwrap_or(0))
            };
            let before = counted(&mut self.datapath)?;
            let mut best = f64::MAX;
            for _ in 0..RUNS {
                let run = opener.run(self, Target::Edge, PACKETS_OF_REFUSALS)?;
                ensure!(run.last.action == DROP, "{name}: the last SYN was not dropped: action {}", run.last.action);
                best = best.min(run.nanoseconds - base);
            }
            let refused = counted(&mut self.datapath)? - before;
            let sent = RUNS as u64 * u64::from(PACKETS_OF_REFUSALS);
            ensure!(refused > sent * 99 / 100, "{name}: {refused} of {sent} SYNs were refused");
            figures.push((name, best));
        }
        Ok(figures)
    }

    fn forget_half_open(&mut self) -> Result<()> {
        let mut sets: Array<_, abi::HalfOpenSet4> = self.datapath.array(names::HALF_OPEN4)?;
        for index in 0..abi::HALF_OPEN_SETS {
            sets.set(index, abi::HalfOpenSet4::ZERO, 0)?;
        }
        let mut hints: Array<_, abi::HintLine> = self.datapath.array(names::HINTS4)?;
        for index in 0..abi::HINT_LINES {
            hints.set(index, abi::HintLine::ZERO, 0)?;
        }
        Ok(())
    }

    /// Lets every half-open connection have its SYN-ACK, as nothing runs meanwhile. Gives their number.
    fn answer_all(&mut self) -> Result<u32> {
        self.datapath.change_half_open::<Ipv4Addr>(|record| {
            record.backend_sequence = BACKEND_SEQUENCE;
            record.state |= abi::HALF_OPEN_ANSWERED;
        })
    }
}

/// Packet of flow number `flow`, with right checksums.
fn packet<I: Ip>(kind: &Kind, reverse: bool, flow: u32) -> Vec<u8> {
    let (client_side, backend_side) = (flow_client::<I>(flow), flow_backend::<I>(flow));
    let (source, destination) = if reverse {
        ((backend_side.0, kind.target_port), (I::SNAT, backend_side.1))
    } else {
        (client_side, (I::VIP, kind.port))
    };
    let (source_mac, destination_mac) =
        if reverse { (bench::node_mac(0), bench::HUB_MAC) } else { (bench::GATEWAY_MAC, bench::TENANT_MAC) };
    let frame = if kind.protocol == UDP {
        Datagram { source_mac, destination_mac, source, destination, ..query(client_side, b"0123456789") }.frame()
    } else {
        // Without payload: sent again and again, data would be a retransmission, which is looked at closer.
        let ack = client(client_side, ACK, 1, 1);
        Segment { source_mac, destination_mac, source, destination, ..ack }.frame()
    };
    match kind.vlan {
        Some(which) => tagged(&padded(frame), bench::VLANS[which]),
        None => padded(frame),
    }
}

/// Addresses and ports that the packet must leave with, and its MACs.
type Expected = (String, String, [u8; 6], [u8; 6]);

fn translated<I: Ip>(kind: &Kind, reverse: bool, flow: u32) -> Expected {
    let (from, to) = tuples::<I>(kind, flow);
    let (tuple, source_mac, destination_mac) = if reverse {
        (from.turned(), bench::TENANT_MAC, bench::GATEWAY_MAC)
    } else {
        (to, bench::HUB_MAC, bench::node_mac(0))
    };
    (tuple.source().to_string(), tuple.destination().to_string(), source_mac, destination_mac)
}

/// What a frame says of itself; its checksums must be right.
fn described(frame: &[u8]) -> Result<Expected> {
    fn say<I: Ip>(source: (I, u16), destination: (I, u16), source_mac: [u8; 6], destination_mac: [u8; 6]) -> Expected {
        let text = |(address, port): (I, u16)| std::net::SocketAddr::new(address.into(), port).to_string();
        (text(source), text(destination), source_mac, destination_mac)
    }
    if let Ok(Datagram { source, destination, source_mac, destination_mac, .. }) = Datagram::<Ipv4Addr>::parse(frame) {
        return Ok(say(source, destination, source_mac, destination_mac));
    }
    if let Ok(Segment { source, destination, source_mac, destination_mac, .. }) = Segment::<Ipv6Addr>::parse(frame) {
        return Ok(say(source, destination, source_mac, destination_mac));
    }
    let Segment { source, destination, source_mac, destination_mac, .. } = Segment::<Ipv4Addr>::parse(frame)?;
    Ok(say(source, destination, source_mac, destination_mac))
}

/// A driver that goes through flows.
struct FlowDriver {
    driver: Driver,
    flows: u32,
    reverse: bool,
    v6: bool,
    name: &'static str,
    tagged: bool,
    /// A packet of the first flow with right checksums, and what it must become.
    right: Vec<u8>,
    expected: Expected,
}

/// Nanoseconds that the datapath takes for a packet of each driver. They run in turn, so that none has the quieter minute. The packets are
/// looked at.
fn nets(drivers: &mut [FlowDriver], bed: &mut Bed) -> Result<Vec<f64>> {
    let mut best = vec![(f64::MAX, f64::MAX, f64::MAX); drivers.len()];
    for _ in 0..RUNS {
        for (driver, (base, pop, edge)) in drivers.iter_mut().zip(&mut best) {
            *base = base.min(driver.once(bed, Target::Nothing)?);
            if driver.tagged {
                *pop = pop.min(driver.once(bed, Target::Pop)?);
            }
            *edge = edge.min(driver.once(bed, Target::Edge)?);
        }
    }
    for driver in &mut *drivers {
        driver.check(bed)?;
    }
    let net = |(driver, (base, pop, edge)): (&FlowDriver, (f64, f64, f64))| {
        // The driver puts back the tag that was taken off: half of what taking it off costs in between is the driver's.
        edge - if driver.tagged { f64::midpoint(base, pop) } else { base }
    };
    Ok(drivers.iter().zip(best).map(net).collect())
}

impl FlowDriver {
    /// Nanoseconds that the datapath takes for a packet. The packets are looked at.
    fn net(&mut self, bed: &mut Bed) -> Result<f64> {
        Ok(nets(std::slice::from_mut(self), bed)?[0])
    }

    /// Nanoseconds of a look-up in the flows and nothing else, net.
    fn bare_lookup(&mut self, bed: &Bed) -> Result<f64> {
        let base = self.best(bed, Target::Nothing)?;
        let ns = self.best(bed, Target::BareLookup)? - base;
        let action = self.run(bed, Target::BareLookup, 1)?.last.action;
        ensure!(action == PASS, "a bare look-up finds no flow of {}: action {action}", self.name);
        Ok(ns)
    }

    /// Nanoseconds a packet in the least disturbed run.
    fn best(&mut self, bed: &Bed, target: Target) -> Result<f64> {
        let mut best = f64::MAX;
        for _ in 0..RUNS {
            best = best.min(self.once(bed, target)?);
        }
        Ok(best)
    }

    /// Nanoseconds a packet in one run, after each flow has had a packet: caches are as full as they get.
    fn once(&mut self, bed: &Bed, target: Target) -> Result<f64> {
        self.driver.start()?;
        self.run(bed, target, self.flows)?;
        let packets = (self.flows * 20).clamp(*PACKETS.start(), *PACKETS.end());
        Ok(self.run(bed, target, packets)?.nanoseconds)
    }

    fn nic(&self) -> usize {
        if self.reverse { HUB_NIC } else { TENANT_NIC }
    }

    fn run(&mut self, bed: &Bed, target: Target, repeat: u32) -> Result<Run> {
        match target {
            Target::Nothing => self.driver.aim_at_own("nothing")?,
            Target::Pop => self.driver.aim_at_own("pop")?,
            Target::BareLookup => self.driver.aim_at_own(if self.v6 { "bare_lookup6" } else { "bare_lookup" })?,
            Target::Edge => self.driver.aim(0, &bed.datapath.edge(self.nic())?)?,
        }
        self.driver.run(repeat)
    }

    /// Whether the driver's packets come out as their flow says, byte for byte: its first is the template.
    fn check(&mut self, bed: &mut Bed) -> Result<()> {
        let what = format!("{} {} of {} flows", self.name, direction(self.reverse), self.flows);
        self.driver.start()?;
        let last = self.run(bed, Target::Edge, 1)?.last;
        let Outcome { action, frame } = bed.datapath.run(self.nic(), &self.right)?;
        ensure!(action == REDIRECT, "{what}: not forwarded, action {action}");
        let described = described(&frame).context(what.clone())?;
        ensure!(described == self.expected, "{what}: {described:?}, expected {:?}", self.expected);
        ensure!(last == Outcome { action, frame }, "{what}: the driver's packet came out as {last:02x?}");
        Ok(())
    }
}
