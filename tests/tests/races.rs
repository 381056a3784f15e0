//! What two CPUs may do to each other: claims of one tuple, and readers of flows that are being retired.
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use lbd_common::abi::{self, names};
use lbd_common::packet::TCP;
use lbd_common::tcp::{ACK, SYN};
use lbd_tests::datapath::bench::{self, Ip};
use lbd_tests::datapath::{Datapath, HUB_NIC, Outcome, REDIRECT, TENANT_NIC};
use lbd_tests::driver::{Driver, on_cpu, padded, two_cpus};
use lbd_tests::packets::{Segment, client};

fn key<I: Ip>(source: (I, u16)) -> abi::FlowKey<I::Address> {
    abi::FlowKey {
        tuple: abi::Tuple::new(source, (I::VIP, bench::PORT)),
        segment: bench::TENANT_SEGMENT,
        protocol: TCP,
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
    let others: Vec<_> = (1..200).map(|port| (Ipv4Addr::new(203, 0, 113, 77), port)).collect();
    read_while_others_come_and_go((bench::CLIENT, 40000), &others)
}

/// The others differ from the flow that is read in the prefix of the client alone, in its interface identifier, or in its port.
#[test]
#[ignore = "needs root"]
fn a_reader_never_sees_another_flows_data_of_ipv6() -> Result<()> {
    let client = |net, host| Ipv6Addr::new(0x2001, 0xdb8, 0xc, net, 0, 0, 0, host);
    let others: Vec<_> = (1..70u16)
        .flat_map(|number| {
            [(client(number, 9), 40000), (client(0, 100 + number), 40000), (client(0, 9), 40000 + number)]
        })
        .collect();
    read_while_others_come_and_go((<Ipv6Addr as Ip>::CLIENT, 40000), &others)
}

/// Reads one flow on one CPU, while on the other one it and `others` take turns in the same few elements.
fn read_while_others_come_and_go<I: Ip>(watched: (I, u16), others: &[(I, u16)]) -> Result<()> {
    if !two_cpus() {
        eprintln!("skipped: needs two CPUs");
        return Ok(());
    }
    // So few elements that each is recycled at once, and no grace: only the reader's own check stands between.
    let mut datapath = Datapath::load(8)?;
    bench::fill(&mut datapath, I::NODES.len())?;
    datapath.array(names::SETTINGS)?.set(0, abi::Settings { grace: 0, ..bench::settings() }, 0)?;
    let datapath = &datapath;
    let open = |source: (I, u16)| -> Result<Option<Segment<I>>> {
        let Outcome { action, frame } = datapath.run(TENANT_NIC, &client(source, SYN, 1000, 0).frame())?;
        if action != REDIRECT {
            return Ok(None);
        }
        let syn = Segment::<I>::parse(&frame)?;
        datapath.run(HUB_NIC, &syn.answer(SYN | ACK, 500).frame())?;
        datapath.run(TENANT_NIC, &client(source, ACK, 1001, 501).frame())?;
        Ok(Some(syn))
    };
    let retire = |source| -> Result<()> {
        datapath.control(&abi::ControlRequest::mark(key(source)))?;
        datapath.control(&abi::ControlRequest::<I::Address> {
            command: abi::control::AGE,
            count: 16,
            ..abi::ControlRequest::ZERO
        })?;
        Ok(())
    };
    let way = |segment: &Segment<I>| (segment.destination_mac, segment.source, segment.destination);
    let expected = way(&open(watched)?.context("the first connection")?);
    let done = AtomicBool::new(false);
    let (seen, elsewhere) = std::thread::scope(|scope| -> Result<((u64, u64), u64)> {
        let reader = scope.spawn(|| -> Result<(u64, u64)> {
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
                let out = way(&Segment::<I>::parse(&outcome.frame)?);
                ensure!(out == expected, "rewritten with another flow's data: {out:?}, {expected:?} was expected");
            }
            Ok((forwarded, absent))
        });
        let writer = || -> Result<u64> {
            on_cpu(1)?;
            let mut elsewhere = 0;
            let end = Instant::now() + Duration::from_secs(5);
            for other in others.iter().cycle() {
                if Instant::now() > end {
                    break;
                }
                retire(watched)?;
                if open(*other)?.is_some_and(|syn| syn.destination_mac != expected.0) {
                    elsewhere += 1;
                }
                retire(*other)?;
                open(watched)?;
            }
            Ok(elsewhere)
        };
        let written = writer();
        done.store(true, Ordering::Relaxed);
        let read = reader.join().expect("no panic")?;
        written.map(|elsewhere| (read, elsewhere))
    })?;
    eprintln!("{} packets forwarded, {} met no flow; {elsewhere} other flows had another node", seen.0, seen.1);
    ensure!(
        seen.0 > 1000 && seen.1 > 1000 && elsewhere > 1000,
        "the test did not meet all states: {seen:?}, {elsewhere}"
    );
    Ok(())
}
