//! A datapath of map ABI 1 at the interfaces of a bench, as an agent of that ABI leaves it when it ends.
//!
//! `tests/fixtures/abi1.o` is the BPF object of the last commit with ABI 1 (3dce7b3): `cargo xtask build --bpf-only` there, then
//! `llvm-strip -g --keep-section=.BTF --keep-section=.BTF.ext target/bpf/lbd-bpf`. Set `LBD_TEST_ABI1` to an `lbd` of that commit to have
//! it start that one instead.

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use aya::maps::{Array, HashMap, Map, MapData, ProgramArray};
use aya::programs::links::{FdLink, PinnedLink};
use aya::programs::{TestRun as _, TestRunOptions, Xdp, XdpMode};
use aya::{Ebpf, EbpfLoader, Pod};
use aya_obj::programs::XdpAttachType;
use bytemuck::Zeroable as _;
use lbd::dataplane::migrate::v1;
use lbd_common::abi::{self, names};

use crate::lab::{Agent, Bench};

/// The object of ABI 1.
const OBJECT: &[u8] = aya::include_bytes_aligned!("../fixtures/abi1.o");

/// Where the maps of ABI 1 are pinned.
pub const PINS: &str = "/sys/fs/bpf/lbd/v1";
const LINKS: &str = "/sys/fs/bpf/lbd/links";

/// Maps that the interfaces' loads share.
const SHARED: [&str; 19] = [
    "flows4",
    "ageing4",
    "half_open4",
    "hints4",
    "segments",
    "addresses",
    "frontends",
    "maglev",
    "backends",
    "next_hops",
    "tenants",
    "tenant_use",
    "settings",
    "frontend_owner",
    "traffic",
    "frontend_event",
    "reasons",
    "scratch",
    "own",
];
const STAGES: [(u32, &str); 7] = [
    (0, "lbd_open"),
    (1, "lbd_prove"),
    (2, "lbd_answer"),
    (3, "lbd_flags"),
    (4, "lbd_arp"),
    (5, "lbd_local"),
    (6, "lbd_reject"),
];
/// Interfaces by slot.
const NICS: [&str; 3] = ["hub0", "ten0", "ten1"];
/// Slots of a lookup table.
const TABLE: u32 = 1021;
const VLANS: u32 = 4096;
const NODES: u16 = 3;

/// Starts an agent of ABI 1 in a bench and kills it when VIPs answer; or makes what it would have left.
pub fn leave(bench: &Bench, agent: &Agent, max_flows: u32) -> Result<()> {
    if let Some(program) = std::env::var_os("LBD_TEST_ABI1") {
        agent.start_build(&bench.lab, Path::new(&program))?;
        std::thread::sleep(Duration::from_secs(2));
        agent.kill();
        return Ok(());
    }
    bench.lb.run(|| make(bench, max_flows))
}

fn make(bench: &Bench, max_flows: u32) -> Result<()> {
    for directory in ["/sys/fs/bpf/lbd", PINS, LINKS] {
        fs::DirBuilder::new().mode(0o700).create(directory)?;
    }
    let mut loads = Vec::new();
    for (slot, interface) in NICS.into_iter().enumerate() {
        loads.push(load(interface, slot as u32, max_flows)?);
    }
    let hertz = hertz(loads.first_mut().context("a load")?)?;
    fill(bench, hertz)?;
    for (load, interface) in loads.iter_mut().zip(NICS) {
        let edge = program(load, names::PROGRAM)?;
        let link = edge.attach(interface, XdpMode::Driver)?;
        FdLink::try_from(edge.take_link(link)?)?.pin(Path::new(LINKS).join(interface))?;
    }
    Ok(())
}

fn program<'a>(load: &'a mut Ebpf, name: &str) -> Result<&'a mut Xdp> {
    Ok(load.program_mut(name).with_context(|| format!("program {name}"))?.try_into()?)
}

/// Loads and pins as the agent does.
fn load(interface: &str, slot: u32, max_flows: u32) -> Result<Ebpf> {
    let (base, index) = (slot * VLANS, nix::net::if_::if_nametoindex(interface)?);
    let mut loader = EbpfLoader::new();
    loader.override_global("SEGMENT_BASE", &base, true).override_global("IFINDEX", &index, true);
    for name in ["flows4", "ageing4"] {
        loader.map_max_entries(name, abi::flow_entries(max_flows));
    }
    for name in SHARED {
        loader.map_pin_path(name, pin(name));
    }
    let mut load = loader.load(OBJECT).context("load the object of ABI 1")?;
    let Some(Map::ProgramArray(data)) = load.take_map("stages") else { anyhow::bail!("no map stages") };
    let fingerprint = "00000000000000ab";
    let mut stages: ProgramArray<MapData> = Map::ProgramArray(data).try_into()?;
    for (index, name) in STAGES {
        let stage = program(&mut load, name)?;
        stage.load().with_context(|| format!("verify {name} of ABI 1"))?;
        stages.set(index, stage.fd()?, 0)?;
    }
    for name in [names::PROGRAM, names::CONTROL] {
        program(&mut load, name)?.load().with_context(|| format!("verify {name} of ABI 1"))?;
    }
    // Last: this gives the array's descriptor up, which the programs were loaded with.
    stages.pin(pin(&format!("stages-{interface}-{slot}-{fingerprint}")))?;
    program(&mut load, names::PROGRAM)?.pin(pin(&format!("edge-{interface}-{slot}-{fingerprint}")))?;
    if slot == 0 {
        program(&mut load, names::CONTROL)?.pin(pin(names::CONTROL))?;
    }
    Ok(load)
}

/// Where something of ABI 1 is pinned.
pub fn pin(name: &str) -> PathBuf {
    Path::new(PINS).join(name)
}

/// `CONFIG_HZ`, by the clocks of the control program.
fn hertz(load: &mut Ebpf) -> Result<u32> {
    let control = program(load, names::CONTROL)?;
    let read = || -> Result<(u64, u64)> {
        let request = abi::ControlRequest4 { command: 2, ..abi::ControlRequest4::ZERO };
        let mut out = [0; size_of::<abi::ControlRequest4>()];
        control.test_run(TestRunOptions {
            data_in: Some(bytemuck::bytes_of(&request)),
            data_out: Some(&mut out),
            ..TestRunOptions::default()
        })?;
        let answer: abi::ControlRequest4 = bytemuck::pod_read_unaligned(&out);
        Ok((answer.jiffies, answer.nanoseconds))
    };
    let first = read()?;
    std::thread::sleep(Duration::from_millis(200));
    let second = read()?;
    let measured = (second.0 - first.0) * 1_000_000_000 / (second.1 - first.1).max(1);
    [100_u32, 250, 300, 1000]
        .into_iter()
        .min_by_key(|hertz| measured.abs_diff(u64::from(*hertz)))
        .context("a frequency")
}

/// A value as bytes: that is how aya's maps take layouts which it does not know.
fn raw<const N: usize>(value: &impl bytemuck::Pod) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(bytemuck::bytes_of(value));
    bytes
}

fn set<const N: usize>(name: &str, index: u32, value: &impl bytemuck::Pod) -> Result<()>
where
    [u8; N]: Pod,
{
    let mut map: Array<MapData, [u8; N]> = Map::Array(MapData::from_pin(pin(name))?).try_into()?;
    map.set(index, raw::<N>(value), 0).with_context(|| format!("write {name}"))
}

fn put<const K: usize, const V: usize>(name: &str, key: &impl bytemuck::Pod, value: &impl bytemuck::Pod) -> Result<()>
where
    [u8; K]: Pod,
    [u8; V]: Pod,
{
    let mut map: HashMap<MapData, [u8; K], [u8; V]> = Map::HashMap(MapData::from_pin(pin(name))?).try_into()?;
    map.insert(raw::<K>(key), raw::<V>(value), 0).with_context(|| format!("write {name}"))
}

fn mac(text: &str) -> Result<[u8; 6]> {
    let mut bytes = [0; 6];
    for (byte, part) in bytes.iter_mut().zip(text.split(':')) {
        *byte = u8::from_str_radix(part, 16)?;
    }
    Ok(bytes)
}

fn mapped(address: [u8; 4]) -> [u8; 16] {
    abi::mapped(address)
}

/// The contents of the maps for [`Bench::configuration`].
fn fill(bench: &Bench, hertz: u32) -> Result<()> {
    const HUB: u16 = 3;
    let ticks = |seconds: u32| seconds * hertz / 16;
    let settings = v1::Settings {
        abi: 1,
        seed: [0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3210],
        ticks_per_second_256: (hertz * 256) / 16,
        tcp_established: ticks(86_400),
        tcp_half_open: ticks(30),
        tcp_fin: ticks(60),
        tcp_reset: ticks(10),
        udp_unreplied: ticks(30),
        udp_replied: ticks(180),
        tombstone: ticks(75),
        grace: hertz / 160 + 2,
        rejects_per_tick: 16_000 / hertz,
        half_open_sets: v1::HALF_OPEN_SETS,
        max_mss: 65_535,
        ..v1::Settings::zeroed()
    };
    set::<80>("settings", 0, &settings)?;

    // The agent's own map.
    Array::<MapData, [u8; 20]>::create(65_536, 0)?.pin(pin("next_hop_keys"))?;
    let mut index = 0;
    let mut hop =
        |segment: u16, interface: &str, address: Option<[u8; 4]>, kind: u16, to: Option<[u8; 6]>| -> Result<u16> {
            index += 1;
            let record = v1::AddressKey { address: address.map_or([0; 16], mapped), segment, port_be: kind };
            set::<20>("next_hop_keys", index, &record)?;
            let hop = v1::NextHop {
                destination: to.unwrap_or_default(),
                flags: if kind == 1 { 2 } else { u16::from(to.is_some()) },
                source: mac(&bench.lb.mac(interface)?)?,
                vlan: 0,
                ifindex: bench.lb.index(interface)?,
                mtu: 1500,
                segment,
            };
            set::<24>("next_hops", index, &hop)?;
            Ok(index as u16)
        };
    let router = mac("02:00:00:00:01:01")?;
    for (segment, tenant, slot, interface, gateway, network) in [
        (1_u16, 1_u16, 1_u32, "ten0", Some(([192, 0, 2, 1], router)), [192, 0, 2, 0]),
        (2, 2, 2, "ten1", None, [198, 51, 100, 0]),
    ] {
        let on_link_next_hop = hop(segment, interface, None, 1, None)?;
        let gateway_next_hop = hop(segment, interface, gateway.map(|it| it.0), 2, gateway.map(|it| it.1))?;
        let value = v1::Segment {
            id: segment,
            flags: abi::SEGMENT_TENANT,
            mac: mac(&bench.lb.mac(interface)?)?,
            tenant,
            gateway_next_hop,
            on_link_next_hop,
            vlan: 0,
            pad: 0,
            network4_be: u32::from_ne_bytes(network),
            mask4_be: u32::from_ne_bytes([255, 255, 255, 0]),
            mtu: 1500,
        };
        set::<32>("segments", slot * VLANS, &value)?;
    }
    let hub = v1::Segment {
        id: HUB,
        flags: abi::SEGMENT_HUB,
        mac: mac(&bench.lb.mac("hub0")?)?,
        network4_be: u32::from_ne_bytes([10, 0, 0, 0]),
        mask4_be: u32::from_ne_bytes([255, 255, 255, 0]),
        mtu: 1500,
        ..v1::Segment::zeroed()
    };
    let address = |segment: u16, address: [u8; 4], value: v1::LocalAddress| {
        put::<20, 8>("addresses", &v1::AddressKey { address: mapped(address), segment, port_be: 0 }, &value)
    };
    let local = |flags, tenant| v1::LocalAddress { flags, tenant, snat_first: 0, snat_last: 0 };
    for node in 1..=NODES {
        let (place, octets) = (node as u8, [10, 0, 0, 10 + node as u8]);
        let next_hop = hop(HUB, "hub0", Some(octets), 3, Some([2, 0, 0, 0, 0x0a, 10 + place]))?;
        let backend = v1::Backend { address: mapped(octets), port_be: 0, segment: HUB, next_hop, flags: 3 };
        set::<24>("backends", u32::from(node), &backend)?;
        address(HUB, octets, local(abi::ADDRESS_BACKEND, 0))?;
    }
    let port = v1::AddressKey { address: [0; 16], segment: HUB, port_be: Bench::NODE_PORT.to_be() };
    put::<20, 8>("addresses", &port, &local(abi::ADDRESS_TARGET_PORT, 0))?;
    for chunk in 0..TABLE.div_ceil(32) {
        let mut value = v1::MaglevChunk { slots: [0; 32] };
        for (slot, id) in (chunk * 32..TABLE).zip(&mut value.slots) {
            *id = (slot % u32::from(NODES)) as u16 + 1;
        }
        set::<64>("maglev", chunk, &value)?;
    }
    let snat =
        v1::LocalAddress { snat_first: 1024, snat_last: 32_767, ..local(abi::ADDRESS_SNAT | abi::ADDRESS_HOST, 0) };
    address(HUB, [10, 0, 0, 2], snat)?;
    for (tenant, vip, host) in [(1_u16, [192, 0, 2, 34], [192, 0, 2, 2]), (2, [198, 51, 100, 34], [198, 51, 100, 2])] {
        let limits = v1::Tenant { max_flows: 131_072, flags: 1, ..v1::Tenant::zeroed() };
        set::<16>("tenants", u32::from(tenant), &limits)?;
        set::<8>("frontend_owner", u32::from(tenant), &v1::FrontendOwner { tenant, pad: [0; 3] })?;
        let key =
            v1::FrontendKey { vip: mapped(vip), port_be: 6443_u16.to_be(), segment: tenant, protocol: 6, pad: [0; 3] };
        let frontend = v1::Frontend {
            vip: mapped(vip),
            snat: mapped([10, 0, 0, 2]),
            port_be: 6443_u16.to_be(),
            segment: tenant,
            protocol: 6,
            id: tenant,
            tenant,
            target_port_be: Bench::NODE_PORT.to_be(),
            snat_first: 1024,
            snat_last: 32_767,
            table_size: TABLE,
            ..v1::Frontend::zeroed()
        };
        put::<24, 64>("frontends", &key, &frontend)?;
        address(tenant, vip, local(abi::ADDRESS_VIP | abi::ADDRESS_ANSWER, tenant))?;
        address(tenant, host, local(abi::ADDRESS_HOST, 0))?;
    }
    set::<32>("segments", 0, &hub)
}

/// The flows of ABI 1 that live: client and packets of both directions.
pub fn flows(bench: &Bench) -> Result<std::collections::BTreeMap<(Ipv4Addr, u16), u64>> {
    bench.lb.run(|| {
        let map: HashMap<MapData, [u8; 16], [u8; 64]> = Map::HashMap(MapData::from_pin(pin("flows4"))?).try_into()?;
        let mut found = std::collections::BTreeMap::new();
        for entry in &map {
            let (_, value) = entry?;
            let flow: v1::Flow = bytemuck::pod_read_unaligned(&value);
            if flow.state & abi::FLOW_DEAD == 0 {
                let (address, port) = if flow.state & abi::FLOW_REVERSE == 0 {
                    (flow.tuple.source_be, flow.tuple.source_port_be)
                } else {
                    (flow.to.destination_be, flow.to.destination_port_be)
                };
                let client = (Ipv4Addr::from(address.to_ne_bytes()), u16::from_be(port));
                *found.entry(client).or_default() += u64::from(flow.packets);
            }
        }
        Ok(found)
    })
}

/// The flags of ABI 1's settings.
pub fn flags(bench: &Bench) -> Result<u32> {
    bench.lb.run(|| {
        let map: Array<MapData, [u8; 80]> = Map::Array(MapData::from_pin(pin("settings"))?).try_into()?;
        Ok(bytemuck::pod_read_unaligned::<v1::Settings>(&map.get(&0, 0)?).flags)
    })
}

/// Makes an upgrade that was done look as if its agent had been killed between two interfaces: this one runs the program of ABI 1.
pub fn interrupt(bench: &Bench, interface: &str) -> Result<()> {
    bench.lb.run(|| {
        fs::remove_file(pin("kept"))?;
        let path = Path::new(PINS).with_file_name("v2").join(names::SETTINGS);
        let mut map: Array<MapData, abi::Settings> = Map::Array(MapData::from_pin(path)?).try_into()?;
        let settings = map.get(&0, 0)?;
        map.set(0, abi::Settings { flags: settings.flags | abi::SETTING_MIGRATING, ..settings }, 0)?;
        let mut pins = fs::read_dir(PINS)?.filter_map(|entry| Some(entry.ok()?.path()));
        let name = format!("edge-{interface}-");
        let edge = pins.find(|path| path.file_name().is_some_and(|it| it.to_string_lossy().starts_with(&name)));
        let mut edge = Xdp::from_pin(edge.context("the program of ABI 1")?, XdpAttachType::Interface)?;
        let link = FdLink::from(PinnedLink::from_pin(Path::new(LINKS).join(interface))?);
        edge.attach_to_link(link.try_into()?)?;
        Ok(())
    })
}

/// The flags of our settings.
pub fn our_flags(bench: &Bench) -> Result<u32> {
    bench.lb.run(|| {
        let path = Path::new(PINS).with_file_name("v2").join(names::SETTINGS);
        let map: Array<MapData, abi::Settings> = Map::Array(MapData::from_pin(path)?).try_into()?;
        Ok(map.get(&0, 0)?.flags)
    })
}

/// Ids of the programs at the interfaces.
pub fn programs(bench: &Bench) -> Result<Vec<u64>> {
    NICS.iter()
        .map(|interface| {
            let link = bench.lb.ip_json(&format!("-details link show dev {interface}"))?;
            let id = link.pointer("/0/xdp/prog/id").or_else(|| link.pointer("/0/xdp/attached/0/prog/id"));
            id.and_then(serde_json::Value::as_u64).with_context(|| format!("no program at {interface}: {link}"))
        })
        .collect()
}

/// Waits until something holds in a bench.
pub fn soon(what: &str, mut check: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(10);
    while !check()? {
        ensure!(Instant::now() < end, "{what}: not within 10 s");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
