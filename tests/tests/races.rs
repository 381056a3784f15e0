//! What two CPUs may do to each other: claims of one tuple, and readers of flows that are being retired.
use std::net::Ipv4Addr;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use lbd_common::abi::{self, names};
use lbd_common::tcp::{ACK, SYN};
use lbd_tests::datapath::{Datapath, HUB_NIC, Outcome, REDIRECT, TENANT_NIC, bench};
use lbd_tests::driver::{Driver, on_cpu, padded, two_cpus};
use lbd_tests::packets::{Segment, client};

fn key(source: (Ipv4Addr, u16)) -> abi::FlowKey4 {
    abi::FlowKey4 {
        tuple: abi::Tuple4::new(source, (bench::VIP, bench::PORT)),
        segment: bench::TENANT_SEGMENT,
        protocol: 6,
        pad: 0,
    }
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
        let mut claimer = Driver::load(&datapath, "claimer", &[("CLIENTS", 0x0a40_0000 + cpu * 0x10_0000)])?;
        claimer.set_template(0, &padded(client((bench::CLIENT, 1), SYN, 1000, 0).frame()))?;
        claimer.aim(0, &datapath.edge(TENANT_NIC)?)?;
        claimers.push(claimer);
    }
    let barrier = &Barrier::new(2);
    let results: Vec<Result<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> = claimers
            .iter_mut()
            .enumerate()
            .map(|(cpu, claimer)| {
                scope.spawn(move || {
                    on_cpu(cpu)?;
                    barrier.wait();
                    claimer.run(3_000_000)?;
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    results.into_iter().collect::<Result<()>>()?;
    let (opened, doubled) = (claimers[0].get("claims", 0)?, claimers[0].get("claims", 1)?);
    eprintln!("{opened} connections opened, {doubled} tuples with two owners");
    ensure!(opened > 1_000_000, "only {opened} connections were opened");
    ensure!(doubled == 0, "{doubled} of {opened} claims gave a tuple to two owners at once");
    Ok(())
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
