//! What two CPUs may do to each other: claims of one tuple, and readers of flows that are being retired.
use std::net::Ipv4Addr;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use aya::programs::{TestRun as _, TestRunOptions, Xdp};
use lbd_common::abi::{self, names};
use lbd_common::tcp::{ACK, SYN};
use lbd_tests::datapath::{Datapath, HUB_NIC, Outcome, REDIRECT, TENANT_NIC, bench};
use lbd_tests::packets::{Segment, client};

fn key(source: (Ipv4Addr, u16)) -> abi::FlowKey4 {
    abi::FlowKey4 {
        tuple: abi::Tuple4::new(source, (bench::VIP, bench::PORT)),
        segment: bench::TENANT_SEGMENT,
        protocol: 6,
        pad: 0,
    }
}

fn on_cpu(cpu: usize) -> Result<()> {
    let mut cpus = nix::sched::CpuSet::new();
    cpus.set(cpu)?;
    Ok(nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &cpus)?)
}

fn two_cpus() -> bool {
    std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() >= 2)
}

#[test]
#[ignore = "needs root"]
fn two_cpus_that_claim_one_tuple_at_once_never_both_get_it() -> Result<()> {
    if !two_cpus() {
        eprintln!("skipped: needs two CPUs");
        return Ok(());
    }
    let mut datapath = Datapath::load(1024)?;
    bench::fill(&mut datapath, 3)?;
    // One port towards three nodes: the CPUs meet all the time, in one set of records, in different ways.
    let (frontend_key, frontend) = bench::frontend(3);
    let narrow = abi::Frontend { snat_first: 20000, snat_last: 20000, ..frontend };
    datapath.hash(names::FRONTENDS)?.insert(frontend_key, narrow, 0)?;
    let mut claimers = Vec::new();
    for cpu in 0..2u32 {
        claimers.push(Claimer::load(
            &datapath,
            0x0a40_0000 + cpu * 0x10_0000,
            &client((bench::CLIENT, 1), SYN, 1000, 0),
        )?);
    }
    let barrier = &Barrier::new(2);
    let results: Vec<Result<(u64, u64)>> = std::thread::scope(|scope| {
        let threads: Vec<_> = claimers
            .iter_mut()
            .enumerate()
            .map(|(cpu, claimer)| {
                scope.spawn(move || {
                    on_cpu(cpu)?;
                    barrier.wait();
                    claimer.run(3_000_000)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let counts = results.into_iter().collect::<Result<Vec<_>>>()?;
    let (opened, doubled) = *counts.last().context("counts")?;
    eprintln!("{opened} connections opened, {doubled} tuples with two owners");
    ensure!(opened > 1_000_000, "only {opened} connections were opened");
    ensure!(doubled == 0, "{doubled} of {opened} claims gave a tuple to two owners at once");
    Ok(())
}

/// The race test's driver on one CPU. The counters are shared by all.
struct Claimer {
    ebpf: aya::Ebpf,
    _target: aya::maps::ProgramArray<aya::maps::MapData>,
}

impl Claimer {
    fn load(datapath: &Datapath, clients: u32, syn: &Segment) -> Result<Self> {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bpf/lbd-driver");
        let object =
            std::fs::read(&path).with_context(|| format!("read {}: run `cargo xtask build`", path.display()))?;
        let mut loader = aya::EbpfLoader::new();
        loader.override_global("CLIENTS", &clients, true);
        for shared in ["owners", "claims"] {
            loader.map_pin_path(shared, datapath.pinned(shared));
        }
        let mut ebpf = loader.load(&object)?;
        let program: &mut Xdp = ebpf.program_mut("claimer").context("claimer")?.try_into()?;
        program.load()?;
        let mut target = aya::maps::ProgramArray::try_from(ebpf.take_map("target").context("target")?)?;
        target.set(0, &datapath.edge(TENANT_NIC)?, 0)?;
        let mut frame = syn.frame();
        frame.resize(64, 0);
        let frame: [u8; 64] = frame.try_into().map_err(|_| anyhow::anyhow!("64 bytes"))?;
        let mut map: aya::maps::Array<_, [u8; 64]> = ebpf.map_mut("template").context("template")?.try_into()?;
        map.set(0, frame, 0)?;
        Ok(Self { ebpf, _target: target })
    }

    fn run(&mut self, repeat: u32) -> Result<(u64, u64)> {
        let program: &Xdp = self.ebpf.program("claimer").context("claimer")?.try_into()?;
        let mut out = vec![0; 256];
        let options =
            TestRunOptions { data_in: Some(&[0; 64]), data_out: Some(&mut out), repeat, ..TestRunOptions::new() };
        ensure!(program.test_run(options)?.return_value != 0, "the driver aborted");
        let claims: aya::maps::Array<_, u64> = aya::maps::Array::try_from(self.ebpf.map("claims").context("claims")?)?;
        Ok((claims.get(&0, 0)?, claims.get(&1, 0)?))
    }
}

#[test]
#[ignore = "needs root"]
fn a_reader_never_sees_another_flows_data_while_flows_are_retired_at_full_speed() -> Result<()> {
    if !two_cpus() {
        eprintln!("skipped: needs two CPUs");
        return Ok(());
    }
    // So few elements that each is recycled at once, and no grace: only the reader's own check stands between.
    let mut datapath = Datapath::load(8)?;
    bench::fill(&mut datapath, 1)?;
    datapath.array(names::SETTINGS)?.set(0, abi::Settings { grace: 0, ..bench::settings() }, 0)?;
    let datapath = &datapath;
    let watched = (Ipv4Addr::new(203, 0, 113, 9), 40000);
    let others: Vec<_> = (1..200u16).map(|port| (Ipv4Addr::new(203, 0, 113, 77), port)).collect();
    let open = |source: (Ipv4Addr, u16)| -> Result<Option<Segment>> {
        let Outcome { action, frame } = datapath.run(TENANT_NIC, &client(source, SYN, 1000, 0).frame())?;
        if action != REDIRECT {
            return Ok(None);
        }
        let syn = Segment::parse(&frame)?;
        let answer = Segment {
            source_mac: syn.destination_mac,
            destination_mac: bench::HUB_MAC,
            source: syn.destination,
            destination: syn.source,
            ttl: 64,
            flags: SYN | ACK,
            sequence: 500,
            acknowledgement: 1001,
            payload: Vec::new(),
        };
        datapath.run(HUB_NIC, &answer.frame())?;
        datapath.run(TENANT_NIC, &client(source, ACK, 1001, 501).frame())?;
        Ok(Some(syn))
    };
    let retire = |source| -> Result<()> {
        let mark = abi::ControlRequest4 { command: abi::control::MARK, key: key(source), ..abi::ControlRequest4::ZERO };
        datapath.control(&mark)?;
        datapath.control(&abi::ControlRequest4 {
            command: abi::control::AGE,
            count: 16,
            ..abi::ControlRequest4::ZERO
        })?;
        Ok(())
    };
    let port = open(watched)?.context("the first connection")?.source.1;
    let done = &AtomicBool::new(false);
    let seen = std::thread::scope(|scope| -> Result<(u64, u64)> {
        let reader = scope.spawn(move || -> Result<(u64, u64)> {
            on_cpu(0)?;
            let frame = client(watched, ACK, 1001, 501).frame();
            let (mut forwarded, mut absent) = (0, 0);
            while !done.load(Ordering::Relaxed) {
                let outcome = datapath.run(TENANT_NIC, &frame)?;
                if outcome.action != REDIRECT {
                    absent += 1;
                    continue;
                }
                forwarded += 1;
                let out = Segment::parse(&outcome.frame)?;
                ensure!(
                    out.source == (bench::SNAT, port) && out.destination == (bench::NODES[0], bench::NODE_PORT),
                    "rewritten with another flow's data: {out:?}, SNAT port {port} was expected"
                );
            }
            Ok((forwarded, absent))
        });
        let writer = || -> Result<()> {
            on_cpu(1)?;
            let end = Instant::now() + Duration::from_secs(5);
            for other in others.iter().cycle() {
                if Instant::now() > end {
                    break;
                }
                retire(watched)?;
                open(*other)?;
                retire(*other)?;
                open(watched)?;
            }
            Ok(())
        };
        let written = writer();
        done.store(true, Ordering::Relaxed);
        let read = reader.join().expect("no panic")?;
        written.map(|()| read)
    })?;
    eprintln!("{} packets forwarded, {} met no flow", seen.0, seen.1);
    ensure!(seen.0 > 1000 && seen.1 > 1000, "the test did not meet both states: {seen:?}");
    Ok(())
}
