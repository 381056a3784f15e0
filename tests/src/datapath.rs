//! The BPF object, loaded but attached nowhere: packets go in by `BPF_PROG_TEST_RUN`, maps are filled by hand.
//!
//! This is the level of the golden packets: bytes in, verdict, bytes out, and every counter that moved.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use anyhow::{Context as _, Result, anyhow, bail};
use aya::maps::{Array, HashMap, MapData, PerCpuArray, ProgramArray};
use aya::programs::{TestRun as _, TestRunOptions, Xdp};
use aya::{Ebpf, EbpfLoader};
use lbd_common::abi::{self, names};
use lbd_common::reason::Reason;

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
    /// Loads the object that `lbd` embeds, with room for `max_flows` flows.
    pub fn load(max_flows: u32) -> Result<Self> {
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
                .map_max_entries(names::FLOWS4, abi::flow_entries(max_flows))
                .map_max_entries(names::AGEING4, abi::flow_entries(max_flows))
                .map_max_entries(names::ENDED4, abi::flow_entries(max_flows));
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
        Ok(Self { nics, pins })
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
        let flows = self.hash::<abi::FlowKey4, abi::Flow4>(names::FLOWS4)?;
        let mut live = 0;
        for entry in &flows {
            live += usize::from(entry?.1.state & abi::FLOW_DEAD == 0);
        }
        Ok(live)
    }
}

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
struct BpfFileSystem {
    directory: tempfile::TempDir,
}

impl BpfFileSystem {
    fn mount() -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("lbd-bpffs-").tempdir()?;
        nix::mount::mount(Some("bpf"), directory.path(), Some("bpf"), nix::mount::MsFlags::empty(), None::<&str>)
            .with_context(|| format!("mount bpffs on {} (root is needed)", directory.path().display()))?;
        Ok(Self { directory })
    }

    fn path(&self) -> &std::path::Path {
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

/// The bench of the acceptance cases: tenant a on the first NIC, hub on the second, one VIP with TCP 6443 → NodePort 30918.
pub mod bench {
    use super::{
        Array, Datapath, HUB_NIC, Ipv4Addr, MapData, Result, TENANT_NIC, TICKS_PER_SECOND, abi, ifindex, names,
    };

    /// VIP of tenant a.
    pub const VIP: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 34);
    /// SNAT address.
    pub const SNAT: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
    /// The host's address on the tenant's segment.
    pub const TENANT_ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
    /// Off-link client.
    pub const CLIENT: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 9);
    /// On-link client.
    pub const ON_LINK_CLIENT: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 60);
    /// Hub nodes.
    pub const NODES: [Ipv4Addr; 3] =
        [Ipv4Addr::new(10, 0, 0, 11), Ipv4Addr::new(10, 0, 0, 12), Ipv4Addr::new(10, 0, 0, 13)];
    /// Service port.
    pub const PORT: u16 = 6443;
    /// NodePort.
    pub const NODE_PORT: u16 = 30918;
    /// MAC of the tenant NIC.
    pub const TENANT_MAC: [u8; 6] = [2, 0, 0, 0, 1, 2];
    /// MAC of the tenant's gateway.
    pub const GATEWAY_MAC: [u8; 6] = [2, 0, 0, 0, 1, 1];
    /// MAC of the hub NIC.
    pub const HUB_MAC: [u8; 6] = [2, 0, 0, 0, 0x0a, 2];
    /// Tenant a's segment.
    pub const TENANT_SEGMENT: u16 = 1;
    /// The hub's segment.
    pub const HUB_SEGMENT: u16 = 2;
    /// Tenant a.
    pub const TENANT: u16 = 1;
    /// The frontend VIP:6443.
    pub const FRONTEND: u16 = 7;
    /// First SNAT port.
    pub const FIRST_PORT: u16 = 1024;
    /// Last SNAT port.
    pub const LAST_PORT: u16 = 32767;

    /// MAC of node number `index`.
    pub const fn node_mac(index: usize) -> [u8; 6] {
        [2, 0, 0, 0, 0x0a, 0x0b + index as u8]
    }

    /// Index of the next hop to node number `index`.
    pub const fn node_hop(index: usize) -> u16 {
        10 + index as u16
    }

    /// Settings with the design's timeouts.
    pub fn settings() -> abi::Settings {
        abi::Settings {
            abi: abi::ABI_VERSION,
            seed: [0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3210],
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

    /// Fills the maps with `nodes` of the bench's nodes behind the frontend.
    pub fn fill(datapath: &mut Datapath, nodes: usize) -> Result<()> {
        datapath.array(names::SETTINGS)?.set(0, settings(), 0)?;
        datapath.array(names::TIMEOUTS)?.set(0, timeouts(), 0)?;
        let mut segments: Array<&mut MapData, abi::Segment> = datapath.array(names::SEGMENTS)?;
        segments.set(
            abi::segment_index(TENANT_NIC as u32, 0),
            abi::Segment {
                id: TENANT_SEGMENT,
                flags: abi::SEGMENT_TENANT,
                mac: TENANT_MAC,
                tenant: TENANT,
                gateway_next_hop: 1,
                on_link_next_hop: 2,
                network4_be: u32::from(Ipv4Addr::new(192, 0, 2, 0)).to_be(),
                mask4_be: u32::from(Ipv4Addr::new(255, 255, 255, 0)).to_be(),
                mtu: 1500,
                mask6_be: [u32::MAX; 4],
                ..abi::Segment::ZERO
            },
            0,
        )?;
        segments.set(
            abi::segment_index(HUB_NIC as u32, 0),
            abi::Segment {
                id: HUB_SEGMENT,
                flags: abi::SEGMENT_HUB,
                mac: HUB_MAC,
                network4_be: u32::from(Ipv4Addr::new(10, 0, 0, 0)).to_be(),
                mask4_be: u32::from(Ipv4Addr::new(255, 255, 255, 0)).to_be(),
                mtu: 1500,
                mask6_be: [u32::MAX; 4],
                ..abi::Segment::ZERO
            },
            0,
        )?;
        let hop = |nic: usize, destination, flags, segment| abi::NextHop {
            destination,
            flags,
            source: if nic == TENANT_NIC { TENANT_MAC } else { HUB_MAC },
            vlan: 0,
            ifindex: ifindex(nic),
            mtu: 1500,
            segment,
        };
        let mut hops: Array<&mut MapData, abi::NextHop> = datapath.array(names::NEXT_HOPS)?;
        hops.set(1, hop(TENANT_NIC, GATEWAY_MAC, abi::NEXT_HOP_RESOLVED, TENANT_SEGMENT), 0)?;
        hops.set(2, hop(TENANT_NIC, [0; 6], abi::NEXT_HOP_ON_LINK, TENANT_SEGMENT), 0)?;
        for index in 0..NODES.len() {
            let node = hop(HUB_NIC, node_mac(index), abi::NEXT_HOP_RESOLVED, HUB_SEGMENT);
            hops.set(u32::from(node_hop(index)), node, 0)?;
        }
        let mut backends: Array<&mut MapData, abi::Backend> = datapath.array(names::BACKENDS)?;
        for (index, node) in NODES.iter().enumerate() {
            let backend = abi::Backend {
                address: abi::mapped(node.octets()),
                port_be: 0,
                segment: HUB_SEGMENT,
                next_hop: node_hop(index),
                flags: abi::BACKEND_PRESENT | abi::BACKEND_ELIGIBLE,
            };
            backends.set(index as u32 + 1, backend, 0)?;
        }
        let mut chunk = abi::MaglevChunk::ZERO;
        for (slot, id) in chunk.slots.iter_mut().enumerate() {
            *id = (slot % nodes.max(1)) as u16 + 1;
        }
        datapath.array(names::MAGLEV)?.set(5, chunk, 0)?;
        let mut addresses = datapath.hash(names::ADDRESSES)?;
        let mut put = |address: Ipv4Addr, segment, port_be, value: abi::LocalAddress| {
            let address = if address.is_unspecified() { [0; 16] } else { abi::mapped(address.octets()) };
            addresses.insert(abi::AddressKey { address, segment, port_be }, value, 0)
        };
        let local = |flags, tenant| abi::LocalAddress { flags, tenant, ..abi::LocalAddress::ZERO };
        put(VIP, TENANT_SEGMENT, 0, local(abi::ADDRESS_VIP | abi::ADDRESS_ANSWER, TENANT))?;
        put(TENANT_ADDRESS, TENANT_SEGMENT, 0, local(abi::ADDRESS_HOST, TENANT))?;
        put(
            SNAT,
            HUB_SEGMENT,
            0,
            abi::LocalAddress {
                flags: abi::ADDRESS_SNAT | abi::ADDRESS_HOST,
                tenant: 0,
                snat_first: FIRST_PORT,
                snat_last: LAST_PORT,
            },
        )?;
        for node in NODES {
            put(node, HUB_SEGMENT, 0, local(abi::ADDRESS_BACKEND, 0))?;
        }
        put(Ipv4Addr::UNSPECIFIED, HUB_SEGMENT, NODE_PORT.to_be(), local(abi::ADDRESS_TARGET_PORT, 0))?;
        datapath.array(names::TENANTS)?.set(
            u32::from(TENANT),
            abi::Tenant { flags: abi::TENANT_HOST_ACCESS_OWN, ..abi::Tenant::ZERO },
            0,
        )?;
        let owner = abi::FrontendOwner { tenant: TENANT, ..abi::FrontendOwner::ZERO };
        datapath.array(names::FRONTEND_OWNERS)?.set(u32::from(FRONTEND), owner, 0)?;
        let (key, frontend) = frontend(nodes);
        datapath.hash(names::FRONTENDS)?.insert(key, frontend, 0)?;
        Ok(())
    }

    /// The frontend VIP:6443 over `nodes` nodes.
    pub fn frontend(nodes: usize) -> (abi::FrontendKey, abi::Frontend) {
        let key = abi::FrontendKey {
            vip: abi::mapped(VIP.octets()),
            port_be: PORT.to_be(),
            segment: TENANT_SEGMENT,
            protocol: 6,
            pad: [0; 3],
        };
        let frontend = abi::Frontend {
            vip: key.vip,
            snat: abi::mapped(SNAT.octets()),
            port_be: key.port_be,
            segment: key.segment,
            protocol: 6,
            id: FRONTEND,
            tenant: TENANT,
            target_port_be: NODE_PORT.to_be(),
            snat_first: FIRST_PORT,
            snat_last: LAST_PORT,
            table: 5,
            table_size: if nodes == 0 { 0 } else { abi::CHUNK_SLOTS - abi::CHUNK_SLOTS % nodes as u32 },
            ..abi::Frontend::ZERO
        };
        (key, frontend)
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
