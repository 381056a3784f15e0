//! The benchmark of `lbctl` over a million flows: whole runs of the command, as multiples of one bare batch read of the flow table.
//!
//! The maps are made and filled here, with what `lbctl flows` reads and nothing else; the datapath's object is not needed.

use std::ffi::CString;
use std::fmt;
use std::fs;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use bytemuck::{Pod, Zeroable};
use lbd_common::abi::{
    self, Address4, Address6, FLOW_FIN, FLOW_PEER_FIN, FLOW_REPLIED, FLOW_RESET, FLOW_REVERSE, FLOW_UDP, Flow, Flow4,
    FlowKey, FlowKey4, Tuple, names,
};
use serde::Serialize;

use crate::datapath::BpfFileSystem;

/// Flows in the table.
const FLOWS: u32 = 1_000_000;
/// Runs of each case; the fastest counts, as the least disturbed.
const RUNS: usize = 5;
/// Elements in one batch.
const BATCH: usize = 16_384;
/// Ticks in one second that the maps pretend.
const TICKS_PER_SECOND: u32 = 62;

/// What `--json` writes.
#[derive(Debug, Serialize)]
pub struct Report {
    /// One batch read of the whole table by one thread, milliseconds.
    pub read_ms: f64,
    /// The cases.
    pub cases: Vec<Case>,
}

/// A run of `lbctl`.
#[derive(Debug, Serialize)]
pub struct Case {
    /// Its arguments.
    pub arguments: String,
    /// From start to end of the process, milliseconds.
    pub ms: f64,
    /// The same in bare reads.
    pub reads: f64,
    /// Bytes of output.
    pub bytes: u64,
}

impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "bare read of {FLOWS} flows: {:.0} ms", self.read_ms)?;
        writeln!(formatter, "{:>8} {:>8} {:>12}  lbctl", "reads", "ms", "bytes")?;
        for case in &self.cases {
            writeln!(formatter, "{:>8.2} {:>8.0} {:>12}  {}", case.reads, case.ms, case.bytes, case.arguments)?;
        }
        Ok(())
    }
}

/// Runs the benchmark with this `lbd`.
pub fn flows(lbd: &Path) -> Result<Report> {
    let bed = Bed::new()?;
    let mut read_ms = f64::MAX;
    for _ in 0..RUNS {
        let start = Instant::now();
        let read = bed.flows.count::<FlowKey4, Flow4>()?;
        ensure!(read == u64::from(2 * FLOWS), "{read} halves were read");
        read_ms = read_ms.min(start.elapsed().as_secs_f64() * 1e3);
    }
    let (_, to) = tuples(4711);
    let seen = format!("whois {}", to.source());
    let cases = [
        "flows",
        "flows -o wide",
        "flows -o json",
        "flows --top 20 --by bytes",
        "flows --top 20 --by age -o json",
        "flows --client 10.1.0.0/16",
        "flows --service #7 --state established",
        "flows --proto udp",
        "flows --backend 10.32.96.11:30003",
        "flows --older 1h --top 1000 --by packets",
        &format!("{seen} {}", to.destination()),
        &seen,
    ]
    .into_iter()
    .map(|arguments| {
        let (mut best, mut bytes) = (f64::MAX, 0);
        for _ in 0..RUNS {
            let (ms, length) = bed.run(lbd, arguments)?;
            best = best.min(ms);
            bytes = length;
        }
        Ok(Case { arguments: arguments.to_owned(), ms: best, reads: best / read_ms, bytes })
    })
    .collect::<Result<_>>()?;
    Ok(Report { read_ms, cases })
}

/// Maps with a million flows, pinned as the agent pins them.
struct Bed {
    directory: BpfFileSystem,
    flows: Map,
    _others: Vec<Map>,
}

impl Bed {
    fn new() -> Result<Self> {
        let directory = BpfFileSystem::mount()?;
        let maps = directory.path().join("lbd").join(format!("v{}", abi::ABI_VERSION));
        fs::create_dir_all(&maps)?;
        let clock = Clock::load(&maps.join(names::CONTROL))?;
        let now = clock.tick()?;
        let make = |name: &'static str, kind, key, value, entries| Map::new(&maps, name, kind, key, value, entries);
        let flows = make(names::FLOWS4, HASH, size_of::<FlowKey4>(), size_of::<Flow4>(), abi::flow_entries(FLOWS))?;
        let array = |name, value, entries| make(name, ARRAY, 4, value, entries);
        let hash = |name, key, value, entries| make(name, HASH, key, value, entries);
        let mut others = vec![
            hash(names::FLOWS6, size_of::<abi::Lookup6>(), size_of::<abi::Flow6>(), abi::FLOW_ENTRIES6)?,
            hash(names::FRONTENDS, size_of::<abi::FrontendKey>(), size_of::<abi::Frontend>(), abi::MAX_FRONTENDS)?,
            array(names::HALF_OPEN4, size_of::<abi::HalfOpenSet<Address4>>(), abi::HALF_OPEN_SETS)?,
            array(names::HALF_OPEN6, size_of::<abi::HalfOpenSet<Address6>>(), abi::HALF_OPEN_SETS)?,
            array(names::TENANTS, size_of::<abi::Tenant>(), abi::MAX_TENANTS)?,
            array(names::TENANT_USE, size_of::<abi::TenantUse>(), abi::MAX_TENANTS)?,
            array(names::FRONTEND_OWNERS, size_of::<abi::FrontendOwner>(), abi::MAX_FRONTENDS)?,
        ];
        let settings = array(names::SETTINGS, size_of::<abi::Settings>(), 1)?;
        let value = abi::Settings {
            abi: abi::ABI_VERSION,
            ticks_per_second_256: TICKS_PER_SECOND * 256,
            tombstone: 75 * TICKS_PER_SECOND,
            ..abi::Settings::ZERO
        };
        settings.set_many(&[0_u32], &[value])?;
        let timeouts = array(names::TIMEOUTS, size_of::<abi::Timeouts>(), abi::MAX_TIMEOUTS)?;
        let seconds = |seconds: u32| seconds * TICKS_PER_SECOND;
        let value = abi::Timeouts {
            tcp_established: seconds(86_400),
            tcp_half_open: seconds(30),
            tcp_fin: seconds(60_000),
            tcp_reset: seconds(60_000),
            udp_unreplied: seconds(60_000),
            udp_replied: seconds(60_000),
        };
        timeouts.set_many(&[0_u32], &[value])?;
        let hops = array(names::NEXT_HOPS, size_of::<abi::NextHop>(), abi::MAX_NEXT_HOPS)?;
        let hop = |segment| abi::NextHop { ifindex: 2, segment, ..abi::NextHop::ZERO };
        hops.set_many(&[HUB_HOP, TENANT_HOP], &[hop(HUB), hop(TENANT)])?;
        let segments = array(names::SEGMENTS, size_of::<abi::Segment>(), abi::SEGMENT_SLOTS)?;
        let segment = |id| abi::Segment { id, ..abi::Segment::ZERO };
        segments.set_many(&[0_u32, abi::VLANS], &[segment(HUB), segment(TENANT)])?;
        others.extend([settings, timeouts, hops, segments]);
        fill(&flows, now)?;
        Ok(Self { directory, flows, _others: others })
    }

    /// Runs `lbctl`: milliseconds, and bytes of its output.
    fn run(&self, lbd: &Path, arguments: &str) -> Result<(f64, u64)> {
        let path = Self::output();
        let file = fs::File::create(&path)?;
        let start = Instant::now();
        let status = Command::new(lbd)
            .arg("lbctl")
            .args(arguments.split(' '))
            .arg("--bpffs")
            .arg(self.directory.path())
            .args(["--socket", "/nonexistent/lbd.sock"])
            .stdin(Stdio::null())
            .stdout(file)
            .status()
            .with_context(|| format!("run {}", lbd.display()))?;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        ensure!(status.success(), "lbctl {arguments}: {status}");
        let bytes = fs::metadata(&path)?.len();
        fs::remove_file(&path)?;
        Ok((ms, bytes))
    }

    /// In memory, so that no disk is measured.
    fn output() -> PathBuf {
        Path::new("/dev/shm").join(format!("lbd-bench-flows-{}", std::process::id()))
    }
}

const HUB: u16 = 1;
const TENANT: u16 = 2;
const HUB_HOP: u32 = 1;
const TENANT_HOP: u32 = 2;

/// Client → VIP and SNAT address → backend of a flow: 20 frontends over 500 nodes.
fn tuples(number: u32) -> (Tuple<Address4>, Tuple<Address4>) {
    let frontend = frontend(number);
    // Neighbours in number are strangers in address.
    let client = Ipv4Addr::from(0x0a01_0000 + number.wrapping_mul(0x9e37_79b1) % 0x0003_ffff);
    let vip = Ipv4Addr::new(192, 168, 203, 110 + frontend as u8);
    let node = number / 20 % 500;
    let backend = Ipv4Addr::from(0x0a20_6000 + 11 + node);
    let port = 1024 + (number / 10_000 * 20 + u32::from(frontend)) as u16;
    (
        Tuple::new((client, 10_000 + (number % 50_000) as u16), (vip, 443)),
        Tuple::new((Ipv4Addr::new(10, 32, 96, 9), port), (backend, 30_000 + frontend)),
    )
}

fn frontend(number: u32) -> u16 {
    (number % 20) as u16
}

fn fill(flows: &Map, now: u32) -> Result<()> {
    let (mut keys, mut values) = (Vec::with_capacity(BATCH), Vec::with_capacity(BATCH));
    for number in 0..FLOWS {
        let (tuple, to) = tuples(number);
        let udp = number % 10 == 0;
        let protocol = if udp { 17 } else { 6 };
        let state = match number % 16 {
            _ if udp => FLOW_UDP | FLOW_REPLIED,
            1 => FLOW_FIN | FLOW_PEER_FIN,
            2 => FLOW_RESET,
            _ => 0,
        };
        let age = number % 36_000 * TICKS_PER_SECOND / 5;
        let half = Flow {
            last_seen: now.wrapping_sub(age % (50 * TICKS_PER_SECOND)),
            bytes: u64::from(number.wrapping_mul(2_654_435_761) >> 4),
            packets: number % 100_000,
            frontend: 1 + frontend(number),
            ..Flow::ZERO
        };
        let key = FlowKey { tuple, segment: TENANT, protocol, pad: 0 };
        let reply = FlowKey::reply(&to, HUB, protocol);
        keys.extend([key, reply]);
        values.extend([
            Flow4 {
                tuple,
                segment: TENANT,
                next_hop: HUB_HOP as u16,
                to,
                own: Flow4::forward_own(now.wrapping_sub(age), (number % 500) as u16 + 1),
                state,
                ..half
            },
            Flow4 {
                tuple: reply.tuple,
                segment: HUB,
                next_hop: TENANT_HOP as u16,
                to: tuple.turned(),
                state: state | FLOW_REVERSE,
                ..half
            },
        ]);
        if keys.len() >= BATCH || number + 1 == FLOWS {
            flows.set_many(&keys, &values)?;
            keys.clear();
            values.clear();
        }
    }
    Ok(())
}

const ARRAY: u32 = 2;
const HASH: u32 = 1;

const MAP_CREATE: u32 = 0;
const PROG_LOAD: u32 = 5;
const OBJ_PIN: u32 = 6;
const PROG_TEST_RUN: u32 = 10;
const MAP_LOOKUP_BATCH: u32 = 24;
const MAP_UPDATE_BATCH: u32 = 26;

/// bpf(2) with an attribute of up to 16 words: longer than any of ours, and zero where it says nothing.
///
/// # Safety
/// Every address in the attribute must be valid for the command.
unsafe fn bpf(command: u32, attribute: &mut [u64; 16]) -> Result<i32, std::io::Error> {
    // SAFETY: the attribute is initialised memory of the size given; the caller vouches for the addresses in it.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, libc::c_long::from(command), attribute.as_mut_ptr(), size_of_val(attribute))
    };
    if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(result as i32) }
}

/// Two fields of 32 bits.
const fn pair(low: u32, high: u32) -> u64 {
    (low as u64) | (high as u64) << 32
}

fn address<T>(values: &[T]) -> u64 {
    values.as_ptr() as u64
}

fn pin(object: &OwnedFd, path: &Path) -> Result<()> {
    let text = CString::new(path.as_os_str().as_bytes())?;
    let mut attribute = [0; 16];
    attribute[..2].copy_from_slice(&[text.as_ptr() as u64, object.as_raw_fd() as u64]);
    // SAFETY: the path is a NUL-terminated string that outlives the call.
    unsafe { bpf(OBJ_PIN, &mut attribute) }.with_context(|| format!("pin {}", path.display()))?;
    Ok(())
}

struct Map {
    fd: OwnedFd,
    name: &'static str,
    sizes: (usize, usize),
}

impl Map {
    fn new(directory: &Path, name: &'static str, kind: u32, key: usize, value: usize, entries: u32) -> Result<Self> {
        let mut attribute = [0; 16];
        attribute[..2].copy_from_slice(&[pair(kind, key as u32), pair(value as u32, entries)]);
        // SAFETY: the command takes no address.
        let fd =
            unsafe { bpf(MAP_CREATE, &mut attribute) }.with_context(|| format!("make map {name} (root is needed)"))?;
        // SAFETY: the kernel has just made this descriptor for us.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        pin(&fd, &directory.join(name))?;
        Ok(Self { fd, name, sizes: (key, value) })
    }

    fn set_many<K: Pod, V: Pod>(&self, keys: &[K], values: &[V]) -> Result<()> {
        ensure!(self.sizes == (size_of::<K>(), size_of::<V>()) && keys.len() == values.len(), "map {}", self.name);
        let mut attribute = [0; 16];
        attribute[2..5].copy_from_slice(&[
            address(keys),
            address(values),
            pair(keys.len() as u32, self.fd.as_raw_fd() as u32),
        ]);
        // SAFETY: as many keys and values of the map's sizes, as checked above.
        unsafe { bpf(MAP_UPDATE_BATCH, &mut attribute) }.with_context(|| format!("fill map {}", self.name))?;
        Ok(())
    }

    /// Reads everything, by one thread.
    fn count<K: Pod, V: Pod>(&self) -> Result<u64> {
        ensure!(self.sizes == (size_of::<K>(), size_of::<V>()), "map {}", self.name);
        let (keys, values) = (vec![K::zeroed(); BATCH], vec![V::zeroed(); BATCH]);
        let (mut position, mut next) = ([0_u64; 1], [0_u64; 1]);
        let mut count = 0;
        let mut first = true;
        loop {
            let mut attribute = [0; 16];
            attribute[..5].copy_from_slice(&[
                if first { 0 } else { address(&position) },
                next.as_mut_ptr() as u64,
                address(&keys),
                address(&values),
                pair(BATCH as u32, self.fd.as_raw_fd() as u32),
            ]);
            // SAFETY: room for so many keys and values of the map's sizes, as checked above; a hash's position has 4 bytes.
            let read = unsafe { bpf(MAP_LOOKUP_BATCH, &mut attribute) };
            count += attribute[4] & u64::from(u32::MAX);
            match read {
                Ok(_) => (position, first) = (next, false),
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(count),
                Err(error) => return Err(error).with_context(|| format!("read map {}", self.name)),
            }
        }
    }
}

/// An instruction of BPF.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    immediate: i32,
}

const fn instruction(code: u8, destination: u8, source: u8, offset: i16, immediate: i32) -> Instruction {
    Instruction { code, registers: destination | source << 4, offset, immediate }
}

/// As much of the control program as tells the time.
const CLOCK: [Instruction; 11] = [
    // r7 = data, r3 = its end; no room for jiffies: drop.
    instruction(0x61, 7, 1, 0, 0),
    instruction(0x61, 3, 1, 4, 0),
    instruction(0xbf, 4, 7, 0, 0),
    instruction(0x07, 4, 0, 0, 32),
    instruction(0x2d, 4, 3, 4, 0),
    // jiffies go to their place in the request; pass.
    instruction(0x85, 0, 0, 0, 118),
    instruction(0x7b, 7, 0, 24, 0),
    instruction(0xb7, 0, 0, 0, 2),
    instruction(0x95, 0, 0, 0, 0),
    instruction(0xb7, 0, 0, 0, 1),
    instruction(0x95, 0, 0, 0, 0),
];

struct Clock(OwnedFd);

impl Clock {
    fn load(path: &Path) -> Result<Self> {
        const XDP: u32 = 6;
        let license = c"GPL";
        let mut attribute = [0; 16];
        attribute[..3].copy_from_slice(&[pair(XDP, CLOCK.len() as u32), address(&CLOCK), license.as_ptr() as u64]);
        // SAFETY: instructions and license outlive the call.
        let fd = unsafe { bpf(PROG_LOAD, &mut attribute) }.context("load the clock (root is needed)")?;
        // SAFETY: the kernel has just made this descriptor for us.
        let clock = Self(unsafe { OwnedFd::from_raw_fd(fd) });
        pin(&clock.0, path)?;
        Ok(clock)
    }

    fn tick(&self) -> Result<u32> {
        let mut packet = [0_u64; 11];
        let input = packet;
        let mut attribute = [0; 16];
        let length = size_of_val(&packet) as u32;
        attribute[..5].copy_from_slice(&[
            pair(self.0.as_raw_fd() as u32, 0),
            pair(length, length),
            address(&input),
            packet.as_mut_ptr() as u64,
            pair(1, 0),
        ]);
        // SAFETY: both buffers have the length given and outlive the call.
        unsafe { bpf(PROG_TEST_RUN, &mut attribute) }.context("read the clock")?;
        if packet[3] == 0 {
            bail!("the clock stands still");
        }
        Ok((packet[3] >> abi::TICK_SHIFT) as u32)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn no_two_flows_share_a_tuple_in_either_direction() {
        let mut seen = BTreeSet::new();
        for number in 0..FLOWS {
            let (tuple, to) = tuples(number);
            assert!(seen.insert((tuple, 0)) && seen.insert((to, 1)), "{number}");
            assert!(to.source().port() >= 1024);
        }
    }
}
