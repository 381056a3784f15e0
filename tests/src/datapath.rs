//! The BPF object, loaded but attached nowhere: packets go in by `BPF_PROG_TEST_RUN`, maps are filled by hand.
//!
//! This is the level of the golden packets: bytes in, verdict, bytes out, and every counter that moved.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use aya::maps::{Array, HashMap, MapData, PerCpuArray, ProgramArray, Queue};
use aya::programs::{TestRun as _, TestRunOptions, Xdp};
use aya::{Ebpf, EbpfLoader};
use lbd_common::abi::{self, names};
use lbd_common::half_open;
use lbd_common::reason::Reason;

use self::bench::Ip;

/// `XDP_DROP`.
pub const DROP: u32 = 1;
/// `XDP_PASS`.
pub const PASS: u32 = 2;
/// `XDP_TX`.
pub const TX: u32 = 3;
/// `XDP_REDIRECT`.
pub const REDIRECT: u32 = 4;

/// Ticks in one second that the tests' settings pretend. Timeouts that matter are tested by changing them, not by waiting.
pub const TICKS_PER_SECOND: u32 = 62;

/// A loaded object with two NICs: tenant (ifindex 2) and hub (ifindex 3), each with its own load over shared maps.
pub struct Datapath {
    nics: Vec<Ebpf>,
    pins: BpfFileSystem,
    max_flows: u32,
    max_flows_v6: u32,
}

/// What came out of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// XDP action.
    pub action: u32,
    /// The frame after the program.
    pub frame: Vec<u8>,
}

/// Index of the tenant's NIC in [`Datapath::run`].
pub const TENANT_NIC: usize = 0;
/// Index of the hub's NIC.
pub const HUB_NIC: usize = 1;

/// Interface index that a NIC's load pretends.
pub const fn ifindex(nic: usize) -> u32 {
    nic as u32 + 2
}

impl Datapath {
    /// Loads the object that `lbd` embeds, with room for `max_flows` flows of each family.
    pub fn load(max_flows: u32) -> Result<Self> {
        Self::load_with(max_flows, max_flows)
    }

    /// Loads the object that `lbd` embeds, with room for so many flows of IPv4 and of IPv6.
    pub fn load_with(max_flows: u32, max_flows_v6: u32) -> Result<Self> {
        let object = lbd::dataplane::OBJECT;
        if object.is_empty() {
            bail!("lbd was built without its datapath: run `cargo xtask build` first");
        }
        let mut nics: Vec<Ebpf> = Vec::new();
        let pins = BpfFileSystem::mount()?;
        for nic in 0..2usize {
            let (base, index) = (nic as u32 * abi::VLANS, ifindex(nic));
            let mut loader = EbpfLoader::new();
            loader
                .override_global(abi::GLOBAL_SEGMENT_BASE, &base, true)
                .override_global(abi::GLOBAL_IFINDEX, &index, true)
                .override_global(abi::GLOBAL_LOOKUP_SECRET, &bench::LOOKUP_SECRET, true);
            for name in [names::FLOWS4, names::AGEING4, names::ENDED4] {
                loader.map_max_entries(name, abi::flow_entries(max_flows));
            }
            for name in [names::FLOWS6, names::AGEING6, names::ENDED6] {
                loader.map_max_entries(name, abi::flow_entries(max_flows_v6));
            }
            for name in names::SHARED {
                loader.map_pin_path(name, pins.path().join(name));
            }
            let mut ebpf = loader.load(object).context("load the BPF object")?;
            let mut stages = ProgramArray::try_from(ebpf.take_map(names::STAGES).context("map stages")?)?;
            for name in ["lbd_edge", "lbd_control"] {
                program(&mut ebpf, name)?.load().with_context(|| format!("verify {name}"))?;
            }
            for (index, name) in abi::STAGE_PROGRAMS {
                let stage = program(&mut ebpf, name)?;
                stage.load().with_context(|| format!("verify {name}"))?;
                stages.set(index, stage.fd()?, 0)?;
            }
            // The array lives as long as the programs that use it.
            std::mem::forget(stages);
            nics.push(ebpf);
        }
        Ok(Self { nics, pins, max_flows, max_flows_v6 })
    }

    /// Runs a frame through the program at a NIC.
    pub fn run(&self, nic: usize, frame: &[u8]) -> Result<Outcome> {
        let edge: &Xdp = self.nics[nic].program(names::PROGRAM).context("lbd_edge")?.try_into()?;
        run_program(edge, frame)
    }

    /// The program at a NIC, for a program array.
    pub fn edge(&self, nic: usize) -> Result<aya::programs::ProgramFd> {
        let edge: &Xdp = self.nics[nic].program(names::PROGRAM).context("lbd_edge")?.try_into()?;
        Ok(edge.fd()?.try_clone()?)
    }

    /// For how many IPv4 flows there is room.
    pub const fn max_flows(&self) -> u32 {
        self.max_flows
    }

    /// For how many IPv6 flows there is room.
    pub const fn max_flows_v6(&self) -> u32 {
        self.max_flows_v6
    }

    /// Where a shared map is pinned.
    pub fn pinned(&self, name: &str) -> std::path::PathBuf {
        self.pins.path().join(name)
    }

    /// Runs the control program.
    pub fn control<A: abi::Address>(&self, request: &abi::ControlRequest<A>) -> Result<abi::ControlRequest<A>> {
        let control: &Xdp = self.nics[0].program(names::CONTROL).context("lbd_control")?.try_into()?;
        let outcome = run_program(control, bytemuck::bytes_of(request))?;
        if outcome.action != PASS {
            bail!("the control program refused {request:?}");
        }
        let mut answer = abi::ControlRequest::<A>::ZERO;
        bytemuck::bytes_of_mut(&mut answer).copy_from_slice(&outcome.frame[..size_of::<abi::ControlRequest<A>>()]);
        Ok(answer)
    }

    /// A program by name, of the tenant's NIC.
    pub fn program(&mut self, name: &str) -> Result<&mut Xdp> {
        program(&mut self.nics[TENANT_NIC], name)
    }

    /// An array map.
    pub fn array<V: aya::Pod>(&mut self, name: &str) -> Result<Array<&mut MapData, V>> {
        Ok(Array::try_from(self.nics[0].map_mut(name).ok_or_else(|| anyhow!("no map {name}"))?)?)
    }

    /// A hash map.
    pub fn hash<K: aya::Pod, V: aya::Pod>(&mut self, name: &str) -> Result<HashMap<&mut MapData, K, V>> {
        Ok(HashMap::try_from(self.nics[0].map_mut(name).ok_or_else(|| anyhow!("no map {name}"))?)?)
    }

    /// A queue.
    pub fn queue<V: aya::Pod>(&mut self, name: &str) -> Result<Queue<&mut MapData, V>> {
        Ok(Queue::try_from(self.nics[0].map_mut(name).ok_or_else(|| anyhow!("no map {name}"))?)?)
    }

    /// The reasons counted so far, by tenant and reason, summed over the CPUs; zero counts left out.
    pub fn reasons(&mut self) -> Result<BTreeMap<(u16, Reason), u64>> {
        let map = self.nics[0].map_mut(names::REASONS).context("map reasons")?;
        let counters: PerCpuArray<_, u64> = PerCpuArray::try_from(map)?;
        let mut counted = BTreeMap::new();
        for tenant in 0..4u16 {
            for &reason in Reason::ALL {
                let values = counters.get(&(u32::from(tenant) * abi::REASON_SLOTS + reason as u32), 0)?;
                let total: u64 = values.iter().sum();
                if total != 0 {
                    counted.insert((tenant, reason), total);
                }
            }
        }
        Ok(counted)
    }

    /// Counters of a frontend, summed over the CPUs.
    pub fn frontend_counters(&mut self, id: u16) -> Result<abi::FrontendCounters> {
        let mut total = abi::FrontendCounters::default();
        for reverse in [false, true] {
            let map = self.nics[0].map_mut(names::TRAFFIC).context("map traffic")?;
            let traffic: PerCpuArray<_, abi::Traffic> = PerCpuArray::try_from(map)?;
            for value in traffic.get(&abi::traffic_index(id, reverse), 0)?.iter() {
                let (packets, bytes) = if reverse {
                    (&mut total.out_packets, &mut total.out_bytes)
                } else {
                    (&mut total.in_packets, &mut total.in_bytes)
                };
                *packets += value.packets;
                *bytes += value.bytes;
            }
        }
        let map = self.nics[0].map_mut(names::FRONTEND_EVENTS).context("map frontend_event")?;
        let events: PerCpuArray<_, abi::FrontendEvents> = PerCpuArray::try_from(map)?;
        for value in events.get(&u32::from(id), 0)?.iter() {
            total.flows += value.flows;
            total.refused += value.refused;
        }
        Ok(total)
    }

    /// Number of live halves in `flows4`.
    pub fn live_halves(&mut self) -> Result<usize> {
        Ok(self.flows::<Ipv4Addr>()?.len())
    }

    /// The flow table of a family: a half is found by [`abi::FlowKey::lookup`] with [`bench::LOOKUP_SECRET`].
    pub fn flow_table<I: Ip>(&mut self) -> Result<FlowTable<'_, I>> {
        self.hash(I::FLOWS)
    }

    /// The live halves of a family.
    pub fn flows<I: Ip>(&mut self) -> Result<Flows<I>> {
        let flows = self.flow_table::<I>()?;
        let mut live = BTreeMap::new();
        for entry in &flows {
            let (lookup, flow) = entry?;
            ensure!(lookup == flow.key().lookup(bench::LOOKUP_SECRET), "{flow:?} is nowhere to be found");
            if flow.state & abi::FLOW_DEAD == 0 {
                live.insert(flow.key(), flow);
            }
        }
        Ok(live)
    }

    /// Changes the halves of a family from outside, as nothing runs meanwhile.
    pub fn change_flows<I: Ip>(&mut self, mut change: impl FnMut(&mut abi::Flow<I::Address>)) -> Result<()> {
        let halves = self.flows::<I>()?;
        let mut map = self.flow_table::<I>()?;
        for (key, mut flow) in halves {
            change(&mut flow);
            map.insert(key.lookup(bench::LOOKUP_SECRET), flow, 0)?;
        }
        Ok(())
    }

    /// Shows `change` each half-open record that has not been given up, and writes back what it makes of it. Gives their number.
    pub fn change_half_open<I: Ip>(&mut self, mut change: impl FnMut(&mut abi::HalfOpen<I::Address>)) -> Result<u32> {
        self.change_half_open_in::<I>(half_open::LIVE, |_, record| change(record))
    }

    /// Puts every half-open record in one state of [`half_open`] into another, as the datapath would. Gives their number.
    pub fn turn_half_open<I: Ip>(&mut self, from: u64, to: u64) -> Result<u32> {
        self.change_half_open_in::<I>(from, |tag, _| *tag = half_open::with_state(*tag, to))
    }

    /// Shows `change` each half-open record in a state, with its tag, and writes back what it makes of them. Gives their number.
    fn change_half_open_in<I: Ip>(
        &mut self,
        state: u64,
        mut change: impl FnMut(&mut u64, &mut abi::HalfOpen<I::Address>),
    ) -> Result<u32> {
        let mut sets: Array<_, abi::HalfOpenSet<I::Address>> = self.array(I::HALF_OPEN)?;
        let mut found = 0;
        for index in 0..abi::HALF_OPEN_SETS {
            let mut set = sets.get(&index, 0)?;
            let before = set;
            for (tag, record) in set.tags.iter_mut().zip(&mut set.records) {
                if *tag & half_open::STATE == state {
                    change(tag, record);
                    found += 1;
                }
            }
            if set != before {
                sets.set(index, set, 0)?;
            }
        }
        Ok(found)
    }

    /// What a tenant uses in a family.
    pub fn used<I: Ip>(&mut self, tenant: u16) -> Result<abi::FamilyUse> {
        Ok(self.array::<abi::TenantUse>(names::TENANT_USE)?.get(&u32::from(tenant), 0)?.families[I::INDEX])
    }

    /// Sets a tenant's limits in a family; the host's own address stays reachable.
    pub fn limit<I: Ip>(&mut self, tenant: u16, limits: abi::FamilyLimits) -> Result<()> {
        let mut families = [abi::FamilyLimits::ZERO; 2];
        families[I::INDEX] = limits;
        let tenant_limits = abi::Tenant { families, flags: abi::TENANT_HOST_ACCESS_OWN, ..abi::Tenant::ZERO };
        Ok(self.array(names::TENANTS)?.set(u32::from(tenant), tenant_limits, 0)?)
    }

    /// Sets the timeouts of all frontends.
    pub fn set_timeouts(&mut self, timeouts: abi::Timeouts) -> Result<()> {
        Ok(self.array(names::TIMEOUTS)?.set(0, timeouts, 0)?)
    }

    /// Sets the settings.
    pub fn set_settings(&mut self, settings: abi::Settings) -> Result<()> {
        Ok(self.array(names::SETTINGS)?.set(0, settings, 0)?)
    }

    /// Puts a frontend in, or in place of the one with its key.
    pub fn set_frontend(&mut self, frontend: abi::Frontend) -> Result<()> {
        let (key, frontend) = bench::with_key(frontend);
        Ok(self.hash(names::FRONTENDS)?.insert(key, frontend, 0)?)
    }

    /// The kernel's clock, in ticks.
    pub fn tick(&self) -> Result<u32> {
        let request = abi::ControlRequest4 { command: abi::control::CLOCK, ..abi::ControlRequest4::ZERO };
        Ok((self.control(&request)?.jiffies >> abi::TICK_SHIFT) as u32)
    }
}

/// The flow table of one family.
pub type FlowTable<'a, I> =
    HashMap<&'a mut MapData, <<I as Ip>::Address as abi::Address>::Lookup, abi::Flow<<I as Ip>::Address>>;

/// Halves of flows of one family.
pub type Flows<I> = BTreeMap<abi::FlowKey<<I as Ip>::Address>, abi::Flow<<I as Ip>::Address>>;

fn program<'a>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut Xdp> {
    Ok(ebpf.program_mut(name).ok_or_else(|| anyhow!("no program {name}"))?.try_into()?)
}

fn run_program(program: &Xdp, frame: &[u8]) -> Result<Outcome> {
    let mut out = vec![0; frame.len().max(64) + 256];
    let result =
        program.test_run(TestRunOptions { data_in: Some(frame), data_out: Some(&mut out), ..TestRunOptions::new() })?;
    out.truncate(result.data_size_out as usize);
    Ok(Outcome { action: result.return_value, frame: out })
}

/// A BPF file system of its own, to pin the shared maps in; gone when dropped.
pub(crate) struct BpfFileSystem {
    directory: tempfile::TempDir,
}

impl BpfFileSystem {
    pub(crate) fn mount() -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("lbd-bpffs-").tempdir()?;
        nix::mount::mount(Some("bpf"), directory.path(), Some("bpf"), nix::mount::MsFlags::empty(), None::<&str>)
            .with_context(|| format!("mount bpffs on {} (root is needed)", directory.path().display()))?;
        Ok(Self { directory })
    }

    pub(crate) fn path(&self) -> &std::path::Path {
        self.directory.path()
    }
}

impl Drop for BpfFileSystem {
    fn drop(&mut self) {
        // Before the directory goes: it could not be removed while something is mounted on it.
        if let Err(error) = nix::mount::umount2(self.path(), nix::mount::MntFlags::MNT_DETACH) {
            eprintln!("{}: cannot unmount: {error}", self.path().display());
        }
    }
}

/// The bench of the acceptance cases: three tenants on the first NIC, the hub on the second.
///
/// | tenant | segment | frontends |
/// |---|---|---|
/// | a | untagged | VIP:6443 TCP → NodePort 30918, VIP:5353 UDP → 31053, VIP:8443 TCP with `preserve_client`; each in both families |
/// | b, c | VLANs 2003, 2004 | VIP:6443 TCP → one hub node each; VIP:443 TCP → a worker in the tenant's own segment |
///
/// All tenants have the same IPv4 subnet, VIP, client and worker addresses.
pub mod bench {
    use std::fmt::{Debug, Display};
    use std::net::{IpAddr, Ipv6Addr};

    use lbd_common::abi::Address as _;
    use lbd_common::hash::{LookupSecret, Seed, lookup_secret};
    use lbd_common::packet::{Family, TCP, UDP};

    use super::{
        Array, Datapath, HUB_NIC, Ipv4Addr, MapData, Result, TENANT_NIC, TICKS_PER_SECOND, abi, ifindex, names,
    };
    use crate::packets::Packets;

    /// An address of one family, and what the bench has in that family.
    pub trait Ip: Packets + Copy + Debug + Display + Eq + Ord + Into<IpAddr> + Send + Sync + 'static {
        /// As the maps have it.
        type Address: Family<Ip = Self, Lookup: aya::Pod>;
        /// Whether this is IPv6.
        const IS_V6: bool = <Self::Address as abi::Address>::IS_V6;
        /// Name of the family's flow map.
        const FLOWS: &str = if Self::IS_V6 { names::FLOWS6 } else { names::FLOWS4 };
        /// Name of the family's half-open records.
        const HALF_OPEN: &str = if Self::IS_V6 { names::HALF_OPEN6 } else { names::HALF_OPEN4 };
        /// Index of the family's limits and counts.
        const INDEX: usize = Self::IS_V6 as usize;
        /// VIP.
        const VIP: Self;
        /// SNAT address, the host's own on the hub.
        const SNAT: Self;
        /// The host's address on the tenant's segment.
        const TENANT_ADDRESS: Self;
        /// Off-link client.
        const CLIENT: Self;
        /// On-link client.
        const ON_LINK_CLIENT: Self;
        /// Hub nodes.
        const NODES: [Self; 3];
        /// Backend id of the first node.
        const FIRST_BACKEND: u16;
        /// First chunk of the nodes' lookup table.
        const TABLE: u32;
        /// Id of the TCP frontend; the UDP one and the one with `preserve_client` follow.
        const FRONTEND: u16;

        /// Off-link client number `number`, as the drivers count them.
        fn client(number: u32) -> Self;
        /// Backend number `number` of the flows that the drivers go through.
        fn backend(number: u32) -> Self;

        /// As an IPv6 address.
        fn mapped(self) -> [u8; 16] {
            abi::Address::mapped(Self::Address::from_ip(self))
        }
    }

    impl Ip for Ipv4Addr {
        type Address = abi::Address4;
        const VIP: Self = VIP;
        const SNAT: Self = SNAT;
        const TENANT_ADDRESS: Self = TENANT_ADDRESS;
        const CLIENT: Self = CLIENT;
        const ON_LINK_CLIENT: Self = ON_LINK_CLIENT;
        const NODES: [Self; 3] = NODES;
        const FIRST_BACKEND: u16 = 1;
        const TABLE: u32 = 5;
        const FRONTEND: u16 = FRONTEND;

        fn client(number: u32) -> Self {
            Self::from(0x0a40_0000 + number)
        }

        fn backend(number: u32) -> Self {
            Self::from(0x0a00_0100 + number)
        }
    }

    impl Ip for Ipv6Addr {
        type Address = abi::Address6;
        const VIP: Self = Self::new(0x2001, 0xdb8, 0xa, 0, 0, 0, 0, 0x34);
        const SNAT: Self = Self::new(0x2001, 0xdb8, 0xf, 0, 0, 0, 0, 2);
        const TENANT_ADDRESS: Self = Self::new(0x2001, 0xdb8, 0xa, 0, 0, 0, 0, 2);
        const CLIENT: Self = Self::new(0x2001, 0xdb8, 0xc, 0, 0, 0, 0, 9);
        const ON_LINK_CLIENT: Self = Self::new(0x2001, 0xdb8, 0xa, 0, 0, 0, 0, 0x60);
        const NODES: [Self; 3] = [
            Self::new(0x2001, 0xdb8, 0xf, 0, 0, 0, 0, 0x11),
            Self::new(0x2001, 0xdb8, 0xf, 0, 0, 0, 0, 0x12),
            Self::new(0x2001, 0xdb8, 0xf, 0, 0, 0, 0, 0x13),
        ];
        const FIRST_BACKEND: u16 = 11;
        const TABLE: u32 = 6;
        const FRONTEND: u16 = FRONTEND + 10;

        fn client(number: u32) -> Self {
            Self::from(0x2001_0db8_000c_0000_0000_0000_0000_0000 + u128::from(0x0a40_0000 + number))
        }

        fn backend(number: u32) -> Self {
            Self::from(0x2001_0db8_000f_0000_0000_0000_0000_0000 + u128::from(0x0a00_0100 + number))
        }
    }

    /// VIP of all tenants.
    pub const VIP: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 34);
    /// SNAT address.
    pub const SNAT: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
    /// The host's address on the tenants' segments.
    pub const TENANT_ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
    /// Off-link client.
    pub const CLIENT: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 9);
    /// On-link client.
    pub const ON_LINK_CLIENT: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 60);
    /// Hub nodes.
    pub const NODES: [Ipv4Addr; 3] =
        [Ipv4Addr::new(10, 0, 0, 11), Ipv4Addr::new(10, 0, 0, 12), Ipv4Addr::new(10, 0, 0, 13)];
    /// Backend in the segments of tenants b and c.
    pub const WORKER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 101);
    /// Service port.
    pub const PORT: u16 = 6443;
    /// NodePort, and target port of the workers.
    pub const NODE_PORT: u16 = 30918;
    /// UDP service port.
    pub const UDP_PORT: u16 = 5353;
    /// Its NodePort.
    pub const UDP_NODE_PORT: u16 = 31053;
    /// Port of the service with `preserve_client`.
    pub const PRESERVE_PORT: u16 = 8443;
    /// Port of the services whose backends are in the tenants' segments.
    pub const WORKER_PORT: u16 = 443;
    /// MAC of the tenant NIC.
    pub const TENANT_MAC: [u8; 6] = [2, 0, 0, 0, 1, 2];
    /// MAC of the tenants' gateways.
    pub const GATEWAY_MAC: [u8; 6] = [2, 0, 0, 0, 1, 1];
    /// MAC of the workers.
    pub const WORKER_MAC: [u8; 6] = [2, 0, 0, 0, 1, 0x65];
    /// MAC of the hub NIC.
    pub const HUB_MAC: [u8; 6] = [2, 0, 0, 0, 0x0a, 2];
    /// Tenant a's segment.
    pub const TENANT_SEGMENT: u16 = 1;
    /// The hub's segment.
    pub const HUB_SEGMENT: u16 = 2;
    /// Segments of tenants b and c.
    pub const VLAN_SEGMENTS: [u16; 2] = [3, 4];
    /// Their VLAN ids.
    pub const VLANS: [u16; 2] = [2003, 2004];
    /// Tenant a.
    pub const TENANT: u16 = 1;
    /// Tenants b and c.
    pub const VLAN_TENANTS: [u16; 2] = [2, 3];
    /// The frontend VIP:6443 of tenant a.
    pub const FRONTEND: u16 = 7;
    /// The frontends VIP:6443 of tenants b and c.
    pub const VLAN_FRONTENDS: [u16; 2] = [30, 31];
    /// The frontends VIP:443 of tenants b and c.
    pub const WORKER_FRONTENDS: [u16; 2] = [32, 33];
    /// First SNAT port.
    pub const FIRST_PORT: u16 = 1024;
    /// Last SNAT port.
    pub const LAST_PORT: u16 = 32767;

    /// Next hop to tenant a's gateway.
    pub const GATEWAY_HOP: u16 = 1;
    /// Next hop to tenant a's on-link clients.
    const ON_LINK_HOP: u16 = 2;
    /// Next hops of tenant b or c: gateway, on-link clients, worker.
    const VLAN_HOPS: [[u16; 3]; 2] = [[20, 21, 22], [23, 24, 25]];
    /// Backend ids of the workers.
    const WORKERS: [u16; 2] = [21, 22];

    /// Next hop to the gateway of tenant b (0) or c (1).
    pub const fn vlan_gateway_hop(which: usize) -> u16 {
        VLAN_HOPS[which][0]
    }

    /// MAC of node number `index`.
    pub const fn node_mac(index: usize) -> [u8; 6] {
        [2, 0, 0, 0, 0x0a, 0x0b + index as u8]
    }

    /// Index of the next hop to node number `index`.
    pub const fn node_hop(index: usize) -> u16 {
        10 + index as u16
    }

    /// The seed of the maps.
    pub const SEED: Seed = [0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3210];
    /// What the programs over them mix keys of the IPv6 flow table with.
    pub const LOOKUP_SECRET: LookupSecret = lookup_secret(&SEED);

    /// Settings with the design's timeouts.
    pub fn settings() -> abi::Settings {
        abi::Settings {
            abi: abi::ABI_VERSION,
            seed: SEED,
            ticks_per_second_256: TICKS_PER_SECOND * 256,
            tombstone: 75 * TICKS_PER_SECOND,
            grace: 2,
            rejects_per_tick: 1000,
            half_open_epoch: 5 * TICKS_PER_SECOND,
            ..abi::Settings::ZERO
        }
    }

    /// Timeouts of all frontends.
    pub const fn timeouts() -> abi::Timeouts {
        abi::Timeouts {
            tcp_established: 24 * 3600 * TICKS_PER_SECOND,
            tcp_half_open: 30 * TICKS_PER_SECOND,
            tcp_fin: 60 * TICKS_PER_SECOND,
            tcp_reset: 10 * TICKS_PER_SECOND,
            udp_unreplied: 30 * TICKS_PER_SECOND,
            udp_replied: 180 * TICKS_PER_SECOND,
        }
    }

    /// Fills the maps, with `nodes` of the bench's nodes behind tenant a's frontends.
    pub fn fill(datapath: &mut Datapath, nodes: usize) -> Result<()> {
        datapath.array(names::SETTINGS)?.set(0, settings(), 0)?;
        datapath.array(names::TIMEOUTS)?.set(0, timeouts(), 0)?;
        segments(datapath)?;
        next_hops(datapath)?;
        backends(datapath, nodes)?;
        addresses::<Ipv4Addr>(datapath)?;
        addresses::<Ipv6Addr>(datapath)?;
        worker_addresses(datapath)?;
        for tenant in [TENANT, VLAN_TENANTS[0], VLAN_TENANTS[1]] {
            let limits = abi::Tenant { flags: abi::TENANT_HOST_ACCESS_OWN, ..abi::Tenant::ZERO };
            datapath.array(names::TENANTS)?.set(u32::from(tenant), limits, 0)?;
        }
        for (key, frontend) in [
            frontend(nodes),
            udp_frontend::<Ipv4Addr>(nodes),
            preserving::<Ipv4Addr>(nodes),
            tcp_frontend::<Ipv6Addr>(nodes),
            udp_frontend::<Ipv6Addr>(nodes),
            preserving::<Ipv6Addr>(nodes),
            vlan_frontend(0),
            vlan_frontend(1),
            worker_frontend(0),
            worker_frontend(1),
        ] {
            datapath.hash(names::FRONTENDS)?.insert(key, frontend, 0)?;
            let owner = abi::FrontendOwner { tenant: frontend.tenant, ..abi::FrontendOwner::ZERO };
            datapath.array(names::FRONTEND_OWNERS)?.set(u32::from(frontend.id), owner, 0)?;
        }
        Ok(())
    }

    fn segments(datapath: &mut Datapath) -> Result<()> {
        let mut segments: Array<&mut MapData, abi::Segment> = datapath.array(names::SEGMENTS)?;
        let prefix4 = |a, b, c| (u32::from(Ipv4Addr::new(a, b, c, 0)).to_be(), 0xffff_ff00u32.to_be());
        let prefix6 = |id: u32| [0x2001_0db8u32.to_be(), (id << 16u32).to_be(), 0, 0];
        let tenant = abi::Segment {
            id: TENANT_SEGMENT,
            flags: abi::SEGMENT_TENANT,
            mac: TENANT_MAC,
            tenant: TENANT,
            gateway_next_hop: GATEWAY_HOP,
            on_link_next_hop: ON_LINK_HOP,
            vlan: 0,
            gateway6_next_hop: GATEWAY_HOP,
            network4_be: prefix4(192, 0, 2).0,
            mask4_be: prefix4(192, 0, 2).1,
            mtu: 1500,
            network6_be: prefix6(0xa),
            mask6_be: [u32::MAX, u32::MAX, 0, 0],
            second_network6_be: [0; 4],
            second_mask6_be: [u32::MAX; 4],
            second_network4_be: 0,
            second_mask4_be: u32::MAX,
            reserved: [0; 6],
        };
        segments.set(abi::segment_index(TENANT_NIC as u32, 0), tenant, 0)?;
        let hub = abi::Segment {
            id: HUB_SEGMENT,
            flags: abi::SEGMENT_HUB,
            mac: HUB_MAC,
            tenant: 0,
            gateway_next_hop: 0,
            on_link_next_hop: 0,
            gateway6_next_hop: 0,
            network4_be: prefix4(10, 0, 0).0,
            network6_be: prefix6(0xf),
            ..tenant
        };
        segments.set(abi::segment_index(HUB_NIC as u32, 0), hub, 0)?;
        for which in 0..2 {
            let [gateway_next_hop, on_link_next_hop, _] = VLAN_HOPS[which];
            let segment = abi::Segment {
                id: VLAN_SEGMENTS[which],
                tenant: VLAN_TENANTS[which],
                vlan: VLANS[which],
                gateway_next_hop,
                on_link_next_hop,
                gateway6_next_hop: gateway_next_hop,
                ..tenant
            };
            segments.set(abi::segment_index(TENANT_NIC as u32, VLANS[which]), segment, 0)?;
        }
        Ok(())
    }

    fn next_hops(datapath: &mut Datapath) -> Result<()> {
        let mut hops: Array<&mut MapData, abi::NextHop> = datapath.array(names::NEXT_HOPS)?;
        let tenant = abi::NextHop {
            destination: GATEWAY_MAC,
            flags: abi::NEXT_HOP_RESOLVED,
            source: TENANT_MAC,
            vlan: 0,
            ifindex: ifindex(TENANT_NIC),
            mtu: 1500,
            segment: TENANT_SEGMENT,
        };
        let on_link = |hop: abi::NextHop| abi::NextHop { destination: [0; 6], flags: abi::NEXT_HOP_ON_LINK, ..hop };
        hops.set(u32::from(GATEWAY_HOP), tenant, 0)?;
        hops.set(u32::from(ON_LINK_HOP), on_link(tenant), 0)?;
        for which in 0..2 {
            let gateway = abi::NextHop { vlan: VLANS[which], segment: VLAN_SEGMENTS[which], ..tenant };
            let [gateway_hop, on_link_hop, worker_hop] = VLAN_HOPS[which].map(u32::from);
            hops.set(gateway_hop, gateway, 0)?;
            hops.set(on_link_hop, on_link(gateway), 0)?;
            hops.set(worker_hop, abi::NextHop { destination: WORKER_MAC, ..gateway }, 0)?;
        }
        for index in 0..NODES.len() {
            let node = abi::NextHop {
                destination: node_mac(index),
                source: HUB_MAC,
                ifindex: ifindex(HUB_NIC),
                segment: HUB_SEGMENT,
                ..tenant
            };
            hops.set(u32::from(node_hop(index)), node, 0)?;
        }
        Ok(())
    }

    /// Backends and lookup tables. Backend ids follow from [`Ip::FIRST_BACKEND`].
    fn backends(datapath: &mut Datapath, nodes: usize) -> Result<()> {
        let backend = |address, segment, next_hop| abi::Backend {
            address,
            segment,
            next_hop,
            flags: abi::BACKEND_PRESENT | abi::BACKEND_ELIGIBLE,
            ..abi::Backend::ZERO
        };
        // What the hub's addresses have in common: 10.0.0.0/24, 2001:db8::/32.
        let on_hub = |address, hop, [ours_be, ours_mask_be]: [u32; 2]| abi::Backend {
            ours_be,
            ours_mask_be,
            ..backend(address, HUB_SEGMENT, hop)
        };
        let (hub4, hub6) = ([0x0a00_0000, 0xffff_ff00].map(u32::to_be), [0x2001_0db8, 0xffff_ffff].map(u32::to_be));
        let mut backends: Array<&mut MapData, abi::Backend> = datapath.array(names::BACKENDS)?;
        for index in 0..NODES.len() {
            let number = index as u32;
            let (node4, node6) = (<Ipv4Addr as Ip>::NODES[index], Ipv6Addr::NODES[index]);
            let id = u32::from(Ipv4Addr::FIRST_BACKEND) + number;
            backends.set(id, on_hub(node4.mapped(), node_hop(index), hub4), 0)?;
            let id = u32::from(Ipv6Addr::FIRST_BACKEND) + number;
            backends.set(id, on_hub(node6.mapped(), node_hop(index), hub6), 0)?;
        }
        for (which, id) in WORKERS.into_iter().enumerate() {
            let worker = backend(WORKER.mapped(), VLAN_SEGMENTS[which], VLAN_HOPS[which][2]);
            backends.set(u32::from(id), worker, 0)?;
        }
        let mut table = |chunk: u32, first: u16, count: usize| -> Result<()> {
            let mut slots = abi::MaglevChunk::ZERO;
            for (slot, id) in slots.slots.iter_mut().enumerate() {
                *id = first + (slot % count.max(1)) as u16;
            }
            Ok(datapath.array(names::MAGLEV)?.set(chunk, slots, 0)?)
        };
        table(Ipv4Addr::TABLE, Ipv4Addr::FIRST_BACKEND, nodes)?;
        table(Ipv6Addr::TABLE, Ipv6Addr::FIRST_BACKEND, nodes)?;
        for (which, worker) in WORKERS.into_iter().enumerate() {
            table(vlan_frontend(which).1.table, Ipv4Addr::FIRST_BACKEND + 1 + which as u16, 1)?;
            table(worker_frontend(which).1.table, worker, 1)?;
        }
        Ok(())
    }

    /// Says what an address, or a port of backends, means in a segment.
    fn put(
        datapath: &mut Datapath,
        address: [u8; 16],
        segment: u16,
        port: u16,
        value: abi::LocalAddress,
    ) -> Result<()> {
        let key = abi::AddressKey { address, segment, port_be: port.to_be() };
        Ok(datapath.hash(names::ADDRESSES)?.insert(key, value, 0)?)
    }

    const fn local(flags: u16, tenant: u16) -> abi::LocalAddress {
        abi::LocalAddress { flags, tenant, ..abi::LocalAddress::ZERO }
    }

    const fn snat(flags: u16, tenant: u16) -> abi::LocalAddress {
        abi::LocalAddress { flags: flags | abi::ADDRESS_SNAT, tenant, snat_first: FIRST_PORT, snat_last: LAST_PORT }
    }

    fn addresses<I: Ip>(datapath: &mut Datapath) -> Result<()> {
        put(datapath, I::VIP.mapped(), TENANT_SEGMENT, 0, local(abi::ADDRESS_VIP | abi::ADDRESS_ANSWER, TENANT))?;
        put(datapath, I::TENANT_ADDRESS.mapped(), TENANT_SEGMENT, 0, local(abi::ADDRESS_HOST, TENANT))?;
        put(datapath, I::SNAT.mapped(), HUB_SEGMENT, 0, snat(abi::ADDRESS_HOST, 0))?;
        for node in I::NODES {
            put(datapath, node.mapped(), HUB_SEGMENT, 0, local(abi::ADDRESS_BACKEND, 0))?;
        }
        for port in [NODE_PORT, UDP_NODE_PORT] {
            put(datapath, [0; 16], HUB_SEGMENT, port, local(abi::ADDRESS_TARGET_PORT, 0))?;
        }
        Ok(())
    }

    fn worker_addresses(datapath: &mut Datapath) -> Result<()> {
        for which in 0..2 {
            let (segment, tenant) = (VLAN_SEGMENTS[which], VLAN_TENANTS[which]);
            put(datapath, VIP.mapped(), segment, 0, local(abi::ADDRESS_VIP | abi::ADDRESS_ANSWER, tenant))?;
            put(datapath, TENANT_ADDRESS.mapped(), segment, 0, snat(abi::ADDRESS_HOST, tenant))?;
            put(datapath, WORKER.mapped(), segment, 0, local(abi::ADDRESS_BACKEND, 0))?;
            put(datapath, [0; 16], segment, NODE_PORT, local(abi::ADDRESS_TARGET_PORT, 0))?;
        }
        Ok(())
    }

    /// Slots that a table over `nodes` nodes has, so that each has as many.
    const fn table_size(nodes: usize) -> u32 {
        if nodes == 0 { 0 } else { abi::CHUNK_SLOTS - abi::CHUNK_SLOTS % nodes as u32 }
    }

    /// The frontend VIP:6443 of tenant a, IPv4, over `nodes` nodes.
    pub fn frontend(nodes: usize) -> (abi::FrontendKey, abi::Frontend) {
        tcp_frontend::<Ipv4Addr>(nodes)
    }

    /// The frontend VIP:6443 of tenant a over `nodes` nodes.
    pub fn tcp_frontend<I: Ip>(nodes: usize) -> (abi::FrontendKey, abi::Frontend) {
        with_key(abi::Frontend {
            vip: I::VIP.mapped(),
            snat: I::SNAT.mapped(),
            port_be: PORT.to_be(),
            segment: TENANT_SEGMENT,
            protocol: TCP,
            id: I::FRONTEND,
            tenant: TENANT,
            target_port_be: NODE_PORT.to_be(),
            snat_first: FIRST_PORT,
            snat_last: LAST_PORT,
            table: I::TABLE,
            table_size: table_size(nodes),
            ..abi::Frontend::ZERO
        })
    }

    /// The frontend VIP:5353, UDP, of tenant a.
    pub fn udp_frontend<I: Ip>(nodes: usize) -> (abi::FrontendKey, abi::Frontend) {
        with_key(abi::Frontend {
            port_be: UDP_PORT.to_be(),
            protocol: UDP,
            id: I::FRONTEND + 1,
            target_port_be: UDP_NODE_PORT.to_be(),
            ..tcp_frontend::<I>(nodes).1
        })
    }

    /// The frontend VIP:8443 with `preserve_client` of tenant a.
    pub fn preserving<I: Ip>(nodes: usize) -> (abi::FrontendKey, abi::Frontend) {
        with_key(abi::Frontend {
            port_be: PRESERVE_PORT.to_be(),
            id: I::FRONTEND + 2,
            snat: [0; 16],
            snat_first: 0,
            snat_last: 0,
            flags: abi::FRONTEND_PRESERVE_CLIENT,
            ..tcp_frontend::<I>(nodes).1
        })
    }

    /// The frontend VIP:6443 of tenant b (0) or c (1): over the second or the third node of the hub.
    pub fn vlan_frontend(which: usize) -> (abi::FrontendKey, abi::Frontend) {
        with_key(abi::Frontend {
            segment: VLAN_SEGMENTS[which],
            id: VLAN_FRONTENDS[which],
            tenant: VLAN_TENANTS[which],
            table: Ipv6Addr::TABLE + 1 + which as u32,
            ..frontend(1).1
        })
    }

    /// The frontend VIP:443 of tenant b (0) or c (1): over the worker in the tenant's own segment.
    pub fn worker_frontend(which: usize) -> (abi::FrontendKey, abi::Frontend) {
        with_key(abi::Frontend {
            snat: TENANT_ADDRESS.mapped(),
            port_be: WORKER_PORT.to_be(),
            id: WORKER_FRONTENDS[which],
            table: Ipv6Addr::TABLE + 3 + which as u32,
            ..vlan_frontend(which).1
        })
    }

    /// A frontend with its key.
    pub fn with_key(frontend: abi::Frontend) -> (abi::FrontendKey, abi::Frontend) {
        let abi::Frontend { vip, port_be, segment, protocol, .. } = frontend;
        (abi::FrontendKey { vip, port_be, segment, protocol, pad: [0; 3] }, frontend)
    }
}

impl Datapath {
    /// Verified instructions of each program, as the kernel counts them.
    pub fn verified_instructions(&mut self) -> Result<BTreeMap<&'static str, u32>> {
        let mut counts = BTreeMap::new();
        let stages = abi::STAGE_PROGRAMS.iter().map(|(_, name)| *name);
        for name in stages.chain([names::PROGRAM, names::CONTROL]) {
            let info = program(&mut self.nics[TENANT_NIC], name)?.info()?;
            counts.insert(name, info.verified_instruction_count().unwrap_or(0));
        }
        Ok(counts)
    }
}
