//! The datapath benchmark.
//!
//! A driver program restores a 64-byte packet, makes it the next flow's and tail-calls the program under test; `BPF_PROG_TEST_RUN` repeats
//! that. The driver's own cost, tail-calling a program that only returns, is the unit; all figures are net of it. So the ratios hold
//! on any machine, however fast or busy it is.

use std::fmt;
use std::net::Ipv4Addr;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use aya::maps::{Array, ProgramArray};
use aya::programs::{TestRun as _, TestRunOptions, Xdp};
use aya::{Ebpf, EbpfLoader};
use lbd_common::abi::{self, names};
use lbd_common::half_open;
use lbd_common::packet::{ETHERNET, IPV4_TCP, Ipv4Tcp};
use lbd_common::tcp;
use serde::Serialize;

use crate::datapath::{Datapath, REDIRECT, bench};

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
/// Sequence number that the bench's backends begin with.
const BACKEND_SEQUENCE: u32 = 7_000_000;

/// What `--json` writes.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The driver with a program that only returns, nanoseconds.
    pub unit_ns: f64,
    /// One look-up in the flow map with a million flows, nanoseconds, net.
    pub bare_lookup_1m_ns: f64,
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
}

impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "unit {:.1} ns, bare look-up at 1m {:.1} ns", self.unit_ns, self.bare_lookup_1m_ns)?;
        for case in &self.cases {
            let Case { name, flows, ns, units } = case;
            write!(formatter, "{name:<20} {flows:>8} flows {ns:>8.1} ns {units:>6.2} units")?;
            if *flows >= 1_000_000 {
                write!(formatter, " {:>5.2} bare look-ups", ns / self.bare_lookup_1m_ns)?;
            }
            writeln!(formatter)?;
        }
        Ok(())
    }
}

/// Runs all cases.
pub fn datapath() -> Result<Report> {
    pin_to_one_cpu()?;
    let mut bed = Bed::new(MANY_FLOWS)?;
    let mut report = Report { unit_ns: 0.0, bare_lookup_1m_ns: 0.0, cases: Vec::new() };
    let mut unit = f64::MAX;
    let sizes = [("1", 1), ("10k", 10_000), ("1m", 1_000_000)];
    for (label, flows) in sizes {
        bed.establish(flows)?;
        for reverse in [false, true] {
            let direction = if reverse { "reverse" } else { "forward" };
            let mut driver = Driver::new(&bed, flows, reverse)?;
            let base = driver.best(&bed, Target::Nothing)?;
            unit = unit.min(base);
            let ns = driver.best(&bed, Target::Edge)? - base;
            driver.check_translation(&mut bed)?;
            report.cases.push(Case { name: format!("tcp4_{direction}_{label}"), flows, ns, units: ns / base });
            if flows == 1_000_000 && !reverse {
                report.bare_lookup_1m_ns = driver.best(&bed, Target::BareLookup)? - base;
            }
        }
    }
    report.unit_ns = unit;
    drop(bed);
    let (open, promote) = Bed::new(DEFAULT_FLOWS)?.openings()?;
    report.cases.push(Case { name: "tcp4_new_flow".into(), flows: OPENINGS, ns: open, units: open / unit });
    report.cases.push(Case { name: "tcp4_promote".into(), flows: OPENINGS, ns: promote, units: promote / unit });
    Ok(report)
}

/// The kernel runs the programs on the CPU of the thread that asks.
fn pin_to_one_cpu() -> Result<()> {
    let mut cpus = nix::sched::CpuSet::new();
    cpus.set(nix::sched::sched_getcpu()?)?;
    nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &cpus)?;
    Ok(())
}

#[derive(Clone, Copy)]
enum Target {
    Nothing,
    BareLookup,
    Edge,
}

/// The loaded datapath with maps of production size.
struct Bed {
    datapath: Datapath,
    max_flows: u32,
}

/// Client of flow number `flow`, as the driver computes it.
fn client(flow: u32) -> (Ipv4Addr, u16) {
    let port = 1024 + (u64::from(flow) * 7919 % 60_000) as u16;
    (Ipv4Addr::from(0x0a40_0000 + (flow & 0x3f_ffff)), port)
}

/// Backend and SNAT port of flow number `flow`, as the driver computes them.
fn backend(flow: u32) -> (Ipv4Addr, u16) {
    (Ipv4Addr::from(0x0a00_0100 + flow / 31_744), 1024 + (flow % 31_744) as u16)
}

impl Bed {
    fn new(max_flows: u32) -> Result<Self> {
        let mut datapath = Datapath::load(max_flows)?;
        bench::fill(&mut datapath, 3)?;
        // Next hops for the backends of the established flows.
        let mut hops: Array<_, abi::NextHop> = datapath.array(names::NEXT_HOPS)?;
        let hop = hops.get(&u32::from(bench::node_hop(0)), 0)?;
        for index in 0..500u32 {
            hops.set(1000 + index, hop, 0)?;
        }
        Ok(Self { datapath, max_flows })
    }

    /// Puts `flows` established flows into the map, spread over 20,000 frontends' counters.
    fn establish(&mut self, flows: u32) -> Result<()> {
        let have = self.datapath.live_halves()? as u32 / 2;
        let mut map = self.datapath.hash::<abi::FlowKey4, abi::Flow4>(names::FLOWS4)?;
        for flow in have..flows {
            let (client, backend) = (client(flow), backend(flow));
            let from = abi::Tuple4::new(client, (bench::VIP, bench::PORT));
            let to = abi::Tuple4::new((bench::SNAT, backend.1), (backend.0, bench::NODE_PORT));
            let key = abi::FlowKey4 { tuple: from, segment: bench::TENANT_SEGMENT, protocol: 6, pad: 0 };
            let reverse_key = abi::FlowKey4::reply(&to, bench::HUB_SEGMENT, 6);
            let frontend = (flow * 31 % 20_000) as u16;
            let forward = abi::Flow4 {
                tuple: key.tuple,
                segment: key.segment,
                next_hop: (1000 + flow * 7 % 500) as u16,
                to,
                sequence: 1,
                own: abi::Flow4::forward_own(1, 1),
                frontend,
                state: abi::FLOW_REPLIED,
                ..abi::Flow4::ZERO
            };
            let reverse = abi::Flow4 {
                tuple: reverse_key.tuple,
                segment: reverse_key.segment,
                next_hop: 1,
                to: abi::FlowKey4::reply(&from, 0, 6).tuple,
                sequence: 1,
                own: bench::GATEWAY_MAC,
                frontend,
                state: abi::FLOW_REPLIED | abi::FLOW_REVERSE,
                ..abi::Flow4::ZERO
            };
            map.insert(key, forward, 0)?;
            map.insert(reverse_key, reverse, 0)?;
        }
        Ok(())
    }

    fn forget_flows(&mut self) -> Result<()> {
        let mut map = self.datapath.hash::<abi::FlowKey4, abi::Flow4>(names::FLOWS4)?;
        let keys = map.keys().collect::<Result<Vec<_>, _>>()?;
        for key in keys {
            map.remove(&key)?;
        }
        Ok(())
    }

    /// Opens and proves connections; nanoseconds for each, net.
    fn openings(&mut self) -> Result<(f64, f64)> {
        let mut best = (f64::MAX, f64::MAX);
        for _ in 0..ROUNDS {
            self.forget_half_open()?;
            let mut opener = Driver::new(self, OPENINGS, false)?;
            opener.set_template(&client_packet(tcp::SYN, 0, 0))?;
            let base = opener.best(self, Target::Nothing)?;
            opener.start()?;
            let open = opener.run(self, Target::Edge, OPENINGS)? - base;
            ensure!(opener.last.0 == REDIRECT, "the last SYN was not forwarded: action {}", opener.last.0);
            let opened = self.answer_all()?;
            ensure!(opened > OPENINGS * 98 / 100, "only {opened} of {OPENINGS} connections are half-open");
            let mut prover = Driver::new(self, OPENINGS, false)?;
            prover.set_template(&client_packet(tcp::ACK, 1, BACKEND_SEQUENCE + 1))?;
            let prove = prover.run(self, Target::Edge, OPENINGS)? - base;
            ensure!(prover.last.0 == REDIRECT, "the last ACK was not forwarded: action {}", prover.last.0);
            let live = self.datapath.live_halves()? as u32;
            ensure!(live == 2 * opened, "{live} halves of {opened} promoted connections");
            self.forget_flows()?;
            best = (best.0.min(open), best.1.min(prove));
        }
        Ok(best)
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
        let mut sets: Array<_, abi::HalfOpenSet4> = self.datapath.array(names::HALF_OPEN4)?;
        let mut opened = 0;
        for index in 0..abi::HALF_OPEN_SETS {
            let mut set = sets.get(&index, 0)?;
            for (tag, record) in set.tags.iter().zip(&mut set.records) {
                if tag & half_open::STATE == half_open::LIVE {
                    record.backend_sequence = BACKEND_SEQUENCE;
                    record.state |= abi::HALF_OPEN_ANSWERED;
                    opened += 1;
                }
            }
            sets.set(index, set, 0)?;
        }
        Ok(opened)
    }
}

/// A client's packet of 64 bytes, checksums right but for what the driver changes.
fn client_packet(flags: u8, sequence: u32, acknowledgement: u32) -> [u8; 64] {
    frame(bench::TENANT_MAC, (Ipv4Addr::UNSPECIFIED, 0), (bench::VIP, bench::PORT), flags, sequence, acknowledgement)
}

fn frame(
    mac: [u8; 6],
    source: (Ipv4Addr, u16),
    destination: (Ipv4Addr, u16),
    flags: u8,
    sequence: u32,
    acknowledgement: u32,
) -> [u8; 64] {
    let mut bytes = [0u8; 64];
    bytes[..6].copy_from_slice(&mac);
    bytes[6..12].copy_from_slice(&bench::GATEWAY_MAC);
    bytes[12] = 8;
    let mut headers = Ipv4Tcp::from_bytes([0; IPV4_TCP]);
    headers.ip.version_length = 0x45;
    headers.ip.total_length_be = 50u16.to_be();
    headers.ip.ttl = 64;
    headers.ip.protocol = 6;
    headers.ip.source_be = u32::from(source.0).to_be();
    headers.ip.destination_be = u32::from(destination.0).to_be();
    headers.tcp.source_port_be = source.1.to_be();
    headers.tcp.destination_port_be = destination.1.to_be();
    headers.tcp.sequence_be = sequence.to_be();
    headers.tcp.acknowledgement_be = acknowledgement.to_be();
    headers.tcp.offset = 5 << 4;
    headers.tcp.flags = flags;
    bytes[ETHERNET..ETHERNET + IPV4_TCP].copy_from_slice(&headers.to_bytes());
    bytes
}

/// A loaded driver.
struct Driver {
    ebpf: Ebpf,
    target: ProgramArray<aya::maps::MapData>,
    flows: u32,
    reverse: bool,
    template: [u8; 64],
    /// Action and frame of the last repetition.
    last: (u32, Vec<u8>),
}

impl Driver {
    fn new(bed: &Bed, flows: u32, reverse: bool) -> Result<Self> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bpf/lbd-driver");
        let object = std::fs::read(&path)
            .with_context(|| format!("read {}: run `cargo xtask bench`, which builds it", path.display()))?;
        let mut ebpf = EbpfLoader::new()
            .override_global("FLOWS", &flows, true)
            .override_global("REVERSE", &u32::from(reverse), true)
            .map_max_entries(names::FLOWS4, abi::flow_entries(bed.max_flows))
            .map_pin_path(names::FLOWS4, bed.datapath.pinned(names::FLOWS4))
            .load(&object)
            .context("load the driver")?;
        for name in ["driver", "nothing", "bare_lookup"] {
            let program: &mut Xdp = ebpf.program_mut(name).with_context(|| format!("program {name}"))?.try_into()?;
            program.load()?;
        }
        let target = ProgramArray::try_from(ebpf.take_map("target").context("map target")?)?;
        let template = if reverse {
            let (mac, snat) = (bench::HUB_MAC, (bench::SNAT, 0));
            frame(mac, (Ipv4Addr::UNSPECIFIED, bench::NODE_PORT), snat, tcp::ACK, 1, 1)
        } else {
            client_packet(tcp::ACK, 1, 1)
        };
        let mut driver = Self { ebpf, target, flows, reverse, template, last: (0, Vec::new()) };
        driver.set_template(&template)?;
        Ok(driver)
    }

    fn set_template(&mut self, packet: &[u8; 64]) -> Result<()> {
        self.template = *packet;
        let mut map: Array<_, [u8; 64]> = Array::try_from(self.ebpf.map_mut("template").context("map template")?)?;
        map.set(0, *packet, 0)?;
        Ok(())
    }

    /// Nanoseconds a packet in the least disturbed run.
    fn best(&mut self, bed: &Bed, target: Target) -> Result<f64> {
        self.start()?;
        let packets = (self.flows * 20).clamp(*PACKETS.start(), *PACKETS.end());
        let mut best = f64::MAX;
        for _ in 0..RUNS {
            best = best.min(self.run(bed, target, packets)?);
        }
        Ok(best)
    }

    /// Begins again with the first flow.
    fn start(&mut self) -> Result<()> {
        let mut next: Array<_, u64> = Array::try_from(self.ebpf.map_mut("next_flow").context("map next_flow")?)?;
        next.set(0, 0, 0)?;
        Ok(())
    }

    /// Nanoseconds a packet in one run, from the flow on that the last run ended with: the kernel's figure, in whole
    /// nanoseconds. The clock around the call would count an RCU grace period, in which the kernel installs the program.
    fn run(&mut self, bed: &Bed, target: Target, repeat: u32) -> Result<f64> {
        match target {
            Target::Nothing => self.aim("nothing")?,
            Target::BareLookup => self.aim("bare_lookup")?,
            Target::Edge => self.target.set(0, &bed.datapath.edge(usize::from(self.reverse))?, 0)?,
        }
        let driver: &Xdp = self.ebpf.program("driver").context("program driver")?.try_into()?;
        let mut out = vec![0; 256];
        let result = driver.test_run(TestRunOptions {
            data_in: Some(&self.template),
            data_out: Some(&mut out),
            repeat,
            ..TestRunOptions::new()
        })?;
        out.truncate(result.data_size_out as usize);
        self.last = (result.return_value, out);
        if self.last.0 == 0 {
            bail!("the driver aborted");
        }
        Ok(result.duration.as_nanos() as f64)
    }

    fn aim(&mut self, name: &str) -> Result<()> {
        let program: &Xdp = self.ebpf.program(name).with_context(|| format!("program {name}"))?.try_into()?;
        self.target.set(0, program.fd()?, 0)?;
        Ok(())
    }

    /// Whether the last packet came out as the flow says, byte for byte.
    fn check_translation(&mut self, bed: &mut Bed) -> Result<()> {
        // One more packet, the first flow's.
        self.start()?;
        self.run(bed, Target::Edge, 1)?;
        let (client, backend) = (client(0), backend(0));
        let from_client = abi::Tuple4::new(client, (bench::VIP, bench::PORT));
        let to_backend = abi::Tuple4::new((bench::SNAT, backend.1), (backend.0, bench::NODE_PORT));
        let (from, to) = if self.reverse {
            (abi::FlowKey4::reply(&to_backend, 0, 6).tuple, abi::FlowKey4::reply(&from_client, 0, 6).tuple)
        } else {
            (from_client, to_backend)
        };
        let mut expected = self.template;
        let header: [u8; IPV4_TCP] = expected[ETHERNET..ETHERNET + IPV4_TCP].try_into()?;
        let mut headers = Ipv4Tcp::from_bytes(header);
        headers.ip.source_be = from.source_be;
        headers.ip.destination_be = from.destination_be;
        headers.tcp.source_port_be = from.source_port_be;
        headers.tcp.destination_port_be = from.destination_port_be;
        headers.rewrite(&from, &to);
        expected[ETHERNET..ETHERNET + IPV4_TCP].copy_from_slice(&headers.to_bytes());
        let (destination, source) =
            if self.reverse { (bench::GATEWAY_MAC, bench::TENANT_MAC) } else { (bench::node_mac(0), bench::HUB_MAC) };
        expected[..6].copy_from_slice(&destination);
        expected[6..12].copy_from_slice(&source);
        ensure!(self.last.0 == REDIRECT, "not forwarded: action {} ({} flows)", self.last.0, self.flows);
        ensure!(self.last.1 == expected, "translated wrongly:\n{:02x?}\n{expected:02x?}", self.last.1);
        Ok(())
    }
}
