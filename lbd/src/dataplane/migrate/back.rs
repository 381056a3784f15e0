//! The way back to the datapath of ABI 1 that a migration has left pinned.
//!
//! Its maps are filled again with what it can express, and its programs put back at the interfaces. The flows of its table are live from
//! then on: what changed in the meantime is handed over by inserting what is absent and by its own control program's marks.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use bytemuck::{Pod, Zeroable};
use lbd_common::abi::{
    self, ControlRequest4, Flow4, FlowKey4, FrontendEvents, HalfOpenSet4, SETTING_MIGRATING, Settings, TenantUse,
    Timeouts, Traffic, control, names,
};
use lbd_common::half_open;

use super::super::DataplaneError;
use super::super::bpf::{self, Map};
use super::super::engine::run_control;
use super::super::loader::{self, HOP_RECORDS, Paths};
use super::tables::{Counters, Flows, Half, Late, Living};
use super::{KEPT, Stage, Step, failed, predecessor, v1};

/// What `rollback` did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RolledBack {
    /// Map ABI that is in force now.
    pub abi: u32,
    /// Interfaces with the old program.
    pub interfaces: Vec<String>,
    /// Connections that went along.
    pub flows: u64,
    /// Connections that the old ABI has no place for: they are lost.
    pub lost: u64,
}

/// Flows on their way back.
type BackFlows = Flows<FlowKey4, Flow4, v1::Flow>;

struct Back {
    paths: Paths,
    old: PathBuf,
    /// The old control program.
    control: OwnedFd,
    now: u32,
    told: v1::Settings,
}

fn error(paths: &Paths, message: String) -> DataplaneError {
    DataplaneError::Rollback { path: paths.maps.clone(), found: abi::ABI_VERSION, message }
}

/// Puts the datapath back that was in force before the last migration. No agent may run.
pub(in super::super) fn rollback(paths: &Paths) -> Result<RolledBack, DataplaneError> {
    let found = predecessor(paths)?.filter(|found| found.stage == Stage::Kept);
    let Some(found) = found else { return Err(error(paths, nothing())) };
    super::check_maps(&found.maps).map_err(|message| error(paths, message))?;
    let quiet = |quiet| set_quiet(paths, quiet);
    let result = quiet(true).and_then(|()| Back::open(paths, &found.maps)).and_then(|back| {
        let mut swapped = Vec::new();
        back.run(&mut swapped).inspect_err(|_| back.undo(&swapped))
    });
    result.map_err(|message| {
        // The new datapath is in force still.
        if let Err(left) = quiet(false) {
            tracing::error!("{left}");
        }
        error(paths, message)
    })
}

fn nothing() -> String {
    "no datapath of an older map ABI is kept beside it".to_owned()
}

/// Gives the way back up, and with it the memory of the old maps.
pub(in super::super) fn discard(paths: &Paths) -> Result<u32, DataplaneError> {
    let found = predecessor(paths)?.filter(|found| found.stage == Stage::Kept);
    let Some(found) = found else { return Err(error(paths, nothing())) };
    loader::remove_directory(&found.maps)
        .map_err(DataplaneError::system(format!("cannot remove {}", found.maps.display())))?;
    Ok(v1::VERSION)
}

fn set_quiet(paths: &Paths, quiet: bool) -> Step<()> {
    let map = Map::<u32, Settings>::open(&paths.map(names::SETTINGS)).map_err(failed(names::SETTINGS))?;
    let told = map.get(&0).map_err(failed(names::SETTINGS))?.unwrap_or(Settings::ZERO);
    let flags = if quiet { told.flags | SETTING_MIGRATING } else { told.flags & !SETTING_MIGRATING };
    map.set(&0, &Settings { flags, ..told }).map_err(failed(names::SETTINGS))
}

/// Makes an array hold what the other one becomes.
fn array<V1: Pod + PartialEq, V2>(from: &Path, to: &Path, mut convert: impl FnMut(u32, &V1) -> V2) -> io::Result<()>
where
    V2: Pod + PartialEq,
{
    let (from, to) = (Map::<u32, V1>::open(from)?, Map::<u32, V2>::open(to)?);
    let mut there = HashMap::new();
    to.for_each(|&index, value| {
        if *value != V2::zeroed() {
            there.insert(index, *value);
        }
    })?;
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    from.for_each(|&index, value| {
        let wanted = convert(index, value);
        if there.get(&index).copied().unwrap_or_else(V2::zeroed) != wanted {
            keys.push(index);
            values.push(wanted);
        }
    })?;
    to.set_many(&keys, &values).map_err(|(_, error)| error)
}

/// Makes a hash hold what the other one becomes, where it becomes anything.
fn hash<K1: Pod, V1: Pod, K2: Pod, V2: Pod>(
    from: &Path,
    to: &Path,
    mut convert: impl FnMut(&K1, &V1) -> Option<(K2, V2)>,
) -> io::Result<()> {
    let (from, to) = (Map::<K1, V1>::open(from)?, Map::<K2, V2>::open(to)?);
    let mut stale = Vec::new();
    to.for_each(|key, _| stale.push(*key))?;
    for key in stale {
        to.delete(&key)?;
    }
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    from.for_each(|key, value| {
        if let Some((key, value)) = convert(key, value) {
            keys.push(key);
            values.push(value);
        }
    })?;
    to.set_many(&keys, &values).map_err(|(_, error)| error)
}

/// An interface that got its old program back.
struct Swapped {
    interface: String,
    link: OwnedFd,
    newer: OwnedFd,
}

impl Back {
    fn open(paths: &Paths, old: &Path) -> Step<Self> {
        let control = bpf::open(&old.join(names::CONTROL)).map_err(failed("its control program is missing"))?;
        let request = ControlRequest4 { command: control::CLOCK, ..ControlRequest4::ZERO };
        let answer = run_control(&control, request).map_err(failed("its clock cannot be read"))?;
        let settings = Map::<u32, Settings>::open(&paths.map(names::SETTINGS))
            .and_then(|map| map.get(&0))
            .map_err(failed(names::SETTINGS))?;
        let timeouts = Map::<u32, Timeouts>::open(&paths.map(names::TIMEOUTS))
            .and_then(|map| map.get(&0))
            .map_err(failed(names::TIMEOUTS))?;
        let told = v1::settings_back(&settings.unwrap_or(Settings::ZERO), &timeouts.unwrap_or(Timeouts::ZERO));
        Ok(Self {
            paths: paths.clone(),
            old: old.to_owned(),
            control,
            now: (answer.jiffies >> abi::TICK_SHIFT) as u32,
            told: v1::Settings { flags: v1::SETTING_MIGRATING, ..told },
        })
    }

    fn tell(&self, told: &v1::Settings) -> Step<()> {
        Map::<u32, v1::Settings>::open(&self.old.join(names::SETTINGS))
            .and_then(|map| map.set(&0, told))
            .map_err(failed(names::SETTINGS))
    }

    fn run(&self, swapped: &mut Vec<Swapped>) -> Step<RolledBack> {
        self.tables()?;
        self.tell(&self.told)?;
        self.counters()?;
        let segments = self.segments()?;
        let mut flows = BackFlows::open(
            &self.paths.map(names::FLOWS4),
            &self.old.join(names::FLOWS4),
            &self.old.join(names::AGEING4),
        )
        .and_then(|flows| flows.clear().map(|()| flows))
        .map_err(failed(names::FLOWS4))?;
        self.pass(&mut flows, &segments)?;
        // The second time, what has changed meanwhile.
        let (living, lost) = self.pass(&mut flows, &segments)?;
        self.half_open(&living)?;
        for (interface, program) in loader::programs_in(&self.old) {
            let Some((link, newer)) = loader::linked(&self.paths, &interface, &self.paths.maps) else {
                tracing::warn!(
                    "{interface}: not attached, or made anew since: the agent of ABI {} attaches it",
                    v1::VERSION
                );
                continue;
            };
            bpf::link_update(link.as_fd(), program.as_fd())
                .map_err(|error| format!("{interface}: the program cannot be put back: {error}"))?;
            swapped.push(Swapped { interface, link, newer });
        }
        bpf::barrier();
        self.late(&mut flows, &segments)?;
        self.tell(&v1::Settings { flags: 0, ..self.told })?;
        // From here on nothing goes back.
        for path in [self.paths.maps.clone(), self.old.join(KEPT)] {
            let removed = if path.is_dir() { loader::remove_directory(&path) } else { std::fs::remove_file(&path) };
            if let Err(error) = removed {
                tracing::error!("{} cannot be removed: {error}", path.display());
            }
        }
        Ok(RolledBack {
            abi: v1::VERSION,
            interfaces: swapped.iter().map(|place| place.interface.clone()).collect(),
            flows: living.values().map(|(flows, _)| flows).sum(),
            lost,
        })
    }

    fn undo(&self, swapped: &[Swapped]) {
        for place in swapped {
            if let Err(error) = bpf::link_update(place.link.as_fd(), place.newer.as_fd()) {
                tracing::error!("{}: the newer program cannot be put back: {error}", place.interface);
            }
        }
        if let Err(error) = self.tell(&v1::Settings { flags: 0, ..self.told }) {
            tracing::error!("{error}");
        }
    }

    /// The tables that the agent writes.
    fn tables(&self) -> Step<()> {
        let (new, old) = (|name: &str| self.paths.map(name), |name: &str| self.old.join(name));
        let both = |name: &'static str| (new(name), old(name), failed::<io::Error>(name));
        let (from, to, fail) = both(names::NEXT_HOPS);
        array(&from, &to, |_, hop| v1::next_hop_back(hop)).map_err(fail)?;
        let (from, to, fail) = both(HOP_RECORDS);
        array(&from, &to, |_, record| v1::address_key_back(record).unwrap_or_else(v1::AddressKey::zeroed))
            .map_err(fail)?;
        let (from, to, fail) = both(names::TENANTS);
        array(&from, &to, |_, tenant| v1::tenant_back(tenant)).map_err(fail)?;
        let (from, to, fail) = both(names::BACKENDS);
        array(&from, &to, |_, backend| v1::backend_back(backend)).map_err(fail)?;
        let (from, to, fail) = both(names::MAGLEV);
        array(&from, &to, |_, chunk| v1::chunk_back(chunk)).map_err(fail)?;
        let (from, to, fail) = both(names::FRONTEND_OWNERS);
        array(&from, &to, |_, owner| v1::owner_back(owner)).map_err(fail)?;
        let (from, to, fail) = both(names::SEGMENTS);
        array(&from, &to, |_, segment| v1::segment_back(segment)).map_err(fail)?;
        let (from, to, fail) = both(names::FRONTENDS);
        hash(&from, &to, |_: &abi::FrontendKey, frontend| v1::frontend_back(frontend)).map_err(fail)?;
        let (from, to, fail) = both(names::ADDRESSES);
        hash(&from, &to, |key, address| Some((v1::address_key_back(key)?, v1::address_back(address)?))).map_err(fail)
    }

    fn counters(&self) -> Step<()> {
        let both = |name: &'static str| (self.paths.map(name), self.old.join(name), failed::<io::Error>(name));
        let (from, to, fail) = both(names::TRAFFIC);
        Counters::<Traffic>::open(&from, &to).and_then(|mut it| it.pass(super::total_traffic)).map_err(fail)?;
        let (from, to, fail) = both(names::FRONTEND_EVENTS);
        Counters::<FrontendEvents>::open(&from, &to).and_then(|mut it| it.pass(super::total_events)).map_err(fail)?;
        let (from, to, fail) = both(names::REASONS);
        Counters::<u64>::open(&from, &to).and_then(|mut it| it.pass(super::total)).map_err(fail)
    }

    /// Segments that the old ABI knows.
    fn segments(&self) -> Step<BTreeSet<u16>> {
        let mut segments = BTreeSet::new();
        Map::<u32, v1::Segment>::open(&self.old.join(names::SEGMENTS))
            .and_then(|map| map.for_each(|_, segment| segments.extend((segment.id != 0).then_some(segment.id))))
            .map_err(failed(names::SEGMENTS))?;
        Ok(segments)
    }

    /// Brings the old table, which nobody reads yet, up to date. Returns what lives, and how many connections cannot go along.
    fn pass(&self, flows: &mut BackFlows, segments: &BTreeSet<u16>) -> Step<(Living, u64)> {
        let mut lost = 0;
        let passed = flows.pass(Some(self.now), |key, flow| {
            let half = half_back(key, flow, segments);
            lost += u64::from(half.is_none() && flow.is_connection());
            half
        });
        let (living, _) = passed.map_err(|error| match (error.raw_os_error(), flows.room()) {
            (Some(libc::E2BIG), (room, _)) => {
                format!("there are more halves of flows than the {room} that its table has room for")
            }
            _ => format!("{}: {error}", names::FLOWS4),
        })?;
        Map::<abi::Lookup6, abi::Flow6>::open(&self.paths.map(names::FLOWS6))
            .and_then(|map| map.for_each(|_, flow| lost += u64::from(flow.is_connection())))
            .map_err(failed(names::FLOWS6))?;
        Ok((living, lost))
    }

    /// Half-open connections, and what tenants use. Hints hold too little of a client's hash for ABI 1: whose first port was taken and whose
    /// handshake is under way now has to open its connection again.
    fn half_open(&self, living: &Living) -> Step<()> {
        let both = |name: &'static str| (self.paths.map(name), self.old.join(name), failed::<io::Error>(name));
        let (from, to, fail) = both(names::HALF_OPEN4);
        array(&from, &to, |_, set: &HalfOpenSet4| {
            let mut old = v1::HalfOpenSet::zeroed();
            for (way, (&tag, record)) in set.tags.iter().zip(&set.records).enumerate() {
                if half_open::readable(tag, self.now) {
                    old.tags[way] = v1::tag_back(tag, self.now, &self.told);
                    old.records[way] = v1::half_open_back(record);
                }
            }
            old
        })
        .map_err(fail)?;
        let mut owners: HashMap<u16, u16> = HashMap::new();
        Map::<u32, v1::FrontendOwner>::open(&self.old.join(names::FRONTEND_OWNERS))
            .and_then(|map| {
                map.for_each(|&id, owner| {
                    owners.insert(id as u16, owner.tenant);
                })
            })
            .map_err(failed(names::FRONTEND_OWNERS))?;
        let mut in_use: HashMap<u32, u64> = HashMap::new();
        for (frontend, (flows, _)) in living {
            *in_use.entry(u32::from(owners.get(frontend).copied().unwrap_or(0))).or_default() += flows;
        }
        let (from, to, fail) = both(names::TENANT_USE);
        array(&from, &to, |id, used: &TenantUse| {
            let flows = in_use.get(&id).copied().unwrap_or(0);
            let window = match (id, used.hinted) {
                (0, 0) => 0,
                (0, expires) => expires.saturating_sub(u64::from(self.told.tcp_half_open)),
                _ => used.window,
            };
            v1::TenantUse { flows, new_flows: used.new_flows, window, total: 0 }
        })
        .map_err(fail)
    }

    /// What the newer programs did last. The older control program can end flows; what grew meanwhile is not counted.
    fn late(&self, flows: &mut BackFlows, segments: &BTreeSet<u16>) -> Step<()> {
        for late in flows.late(|key, flow| half_back(key, flow, segments)).map_err(failed(names::FLOWS4))? {
            match late {
                Late::New(key, half) => {
                    flows.insert(&key, &half).map_err(failed(names::FLOWS4))?;
                }
                Late::Grown(key, half) if half.state & abi::FLOW_DEAD != 0 => self.mark(&key)?,
                Late::Grown(..) => {}
                Late::Ended(key) => self.mark(&key)?,
            }
        }
        Ok(())
    }

    fn mark(&self, key: &v1::FlowKey) -> Step<()> {
        run_control(&self.control, ControlRequest4::mark(v1::flow_key(key)))
            .map(|_| ())
            .map_err(failed("the end of a flow cannot be handed over"))
    }
}

/// A half as the old table has it; `None` if that has no place for it.
fn half_back(key: &FlowKey4, flow: &Flow4, segments: &BTreeSet<u16>) -> Option<(v1::FlowKey, v1::Flow)> {
    let key = v1::flow_key_back(key)?;
    segments.contains(&key.segment).then(|| (key, v1::flow_back(flow)))
}
