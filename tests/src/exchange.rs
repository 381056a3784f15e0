//! Conversations through the loaded programs: what clients and nodes send, and what arrives on the other side.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use lbd_common::abi;
use lbd_common::reason::Reason;
use lbd_common::tcp::{ACK, FIN, SYN};

use crate::datapath::bench::{self, Ip};
use crate::datapath::{Datapath, HUB_NIC, Outcome, REDIRECT, TENANT_NIC};
use crate::packets::{Datagram, Segment, client, query};

/// Sequence number that nodes begin with.
pub const BACKEND_SEQUENCE: u32 = 0x5566_7788;

/// A datapath with `nodes` nodes behind tenant a's frontends. With one, what is chosen is known.
pub fn datapath(nodes: usize) -> Result<Datapath> {
    let mut datapath = Datapath::load(1024)?;
    bench::fill(&mut datapath, nodes)?;
    Ok(datapath)
}

/// Sends a segment.
pub fn send<I: Ip>(datapath: &Datapath, nic: usize, segment: &Segment<I>) -> Result<Outcome> {
    datapath.run(nic, &segment.frame())
}

/// Sends a segment that must be forwarded to the other side; gives what arrives there.
pub fn forwarded<I: Ip>(datapath: &Datapath, nic: usize, segment: &Segment<I>) -> Result<Segment<I>> {
    let outcome = send(datapath, nic, segment)?;
    ensure!(outcome.action == REDIRECT, "not forwarded: action {} of {segment:?}", outcome.action);
    Segment::parse(&outcome.frame)
}

/// Sends a datagram that must be forwarded to the other side; gives what arrives there.
pub fn relayed<I: Ip>(datapath: &Datapath, nic: usize, datagram: &Datagram<I>) -> Result<Datagram<I>> {
    let outcome = datapath.run(nic, &datagram.frame())?;
    ensure!(outcome.action == REDIRECT, "not forwarded: action {} of {datagram:?}", outcome.action);
    Datagram::parse(&outcome.frame)
}

/// SYN and SYN-ACK; gives what the node saw in the SYN.
pub fn half_open<I: Ip>(datapath: &Datapath, source: (I, u16)) -> Result<Segment<I>> {
    let syn = forwarded(datapath, TENANT_NIC, &client(source, SYN, 1000, 0))?;
    forwarded(datapath, HUB_NIC, &syn.answer(SYN | ACK, BACKEND_SEQUENCE))?;
    Ok(syn)
}

/// Three-way handshake; gives what the node saw in the SYN.
pub fn connect<I: Ip>(datapath: &Datapath, source: (I, u16)) -> Result<Segment<I>> {
    let syn = half_open(datapath, source)?;
    forwarded(datapath, TENANT_NIC, &client(source, ACK, 1001, BACKEND_SEQUENCE + 1))?;
    Ok(syn)
}

/// FIN from both sides of a connection on which nothing else was said.
pub fn close<I: Ip>(datapath: &Datapath, source: (I, u16), syn: &Segment<I>) -> Result<()> {
    forwarded(datapath, TENANT_NIC, &client(source, FIN | ACK, 1001, BACKEND_SEQUENCE + 1))?;
    forwarded(datapath, HUB_NIC, &syn.answer(FIN | ACK, BACKEND_SEQUENCE + 1))?;
    forwarded(datapath, TENANT_NIC, &client(source, ACK, 1002, BACKEND_SEQUENCE + 2))?;
    Ok(())
}

/// A datagram and its answer; gives what the node saw of the first.
pub fn ask<I: Ip>(datapath: &Datapath, source: (I, u16)) -> Result<Datagram<I>> {
    let seen = relayed(datapath, TENANT_NIC, &query(source, b"question"))?;
    relayed(datapath, HUB_NIC, &seen.answer(b"answer"))?;
    Ok(seen)
}

/// What is counted if only tenant a's `reason` was.
#[must_use]
pub fn only(reason: Reason, count: u64) -> BTreeMap<(u16, Reason), u64> {
    BTreeMap::from([((bench::TENANT, reason), count)])
}

/// Turns the clock hand until `ticks` have passed.
pub fn age(datapath: &Datapath, ticks: u32) -> Result<()> {
    let begun = datapath.tick()?;
    while datapath.tick()?.wrapping_sub(begun) <= ticks {
        let request = abi::ControlRequest4 { command: abi::control::AGE, count: 64, ..abi::ControlRequest4::ZERO };
        datapath.control(&request)?;
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    Ok(())
}
