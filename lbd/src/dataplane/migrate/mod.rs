//! Taking over from a datapath of the previous map ABI, without losing its flows.
//!
//! ```text
//! make the new maps, load the new programs over them          the old ones forward; any failure: remove the new maps, nothing has happened
//! copy the tables, and flows again until few have changed
//! tell both to drop strays in silence (SETTING_MIGRATING)
//! copy once more what has changed
//! replace the programs at all interfaces, one system call each
//! wait until no old program runs                              from here on the old maps stand still
//! hand over what the old programs did since the last copy     a failure up to here: put the old programs back, remove the new maps
//! clear SETTING_MIGRATING                                     done: the new maps are in force
//! ```
//!
//! Before the programs are replaced nobody reads the new maps, and they are written like any other map. After that their flows are live,
//! and changed by the control program only. The old maps and programs stay pinned, as the way back (`back`).

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use lbd_common::abi::{
    self, Address4, ControlFlow, ControlHalfOpen, ControlRequest4, FamilyUse, FrontendEvents, HalfOpenSet4, HintLine,
    SETTING_MIGRATING, Settings, TenantUse, Timeouts, Traffic, control, names,
};
use lbd_common::half_open;

use super::bpf::{self, Map};
use super::engine::run_control;
use super::loader::{self, HOP_RECORDS, Loaded, Loader, Paths};
use super::{DataplaneError, engine};

pub(super) mod back;
mod tables;
#[doc(hidden)]
pub mod v1;

use tables::{Counters, Flows, Late, Living, copy, copy_array};

/// A pin in the directory of old maps: they are kept for the way back. Its value: when they were left, in seconds since the boot.
pub(super) const KEPT: &str = "kept";

/// Passes over the flows before the programs are replaced, at the most; and the number of changes that is few enough.
const PASSES: u32 = 4;
const FEW: u64 = 1000;

/// Looks whether all old maps are there, with the sizes that they should have.
fn check_maps(old: &Path) -> Step<()> {
    v1::MAPS.iter().try_for_each(|(name, key, value)| {
        let map = bpf::open(&old.join(name)).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => format!("its map {name} is missing"),
            _ => format!("its map {name} cannot be opened: {error}"),
        })?;
        let info = bpf::map_info(map.as_fd()).map_err(failed(name))?;
        if (info.key_size as usize, info.value_size as usize) != (*key, *value) {
            return Err(format!(
                "its map {name} has keys of {} and values of {} bytes, not {key} and {value}",
                info.key_size, info.value_size
            ));
        }
        Ok(())
    })
}

/// What of the previous ABI is pinned beside ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Predecessor {
    /// Directory of its maps.
    pub(super) maps: PathBuf,
    pub(super) stage: Stage,
}

/// How far a migration has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The old programs forward.
    Forwarding,
    /// Some or all interfaces have the new programs, but not all was handed over.
    Interrupted,
    /// The new maps are in force; the old ones are kept for the way back.
    Kept,
}

/// Looks for pins of another ABI. Those that cannot be taken over are an error, and left alone.
pub(super) fn predecessor(paths: &Paths) -> Result<Option<Predecessor>, DataplaneError> {
    let mut found = None;
    for (version, path) in loader::versions(&paths.root) {
        if version == abi::ABI_VERSION || loader::entries(&path).is_empty() {
            continue;
        }
        if version != v1::VERSION {
            return Err(DataplaneError::Abi { path, found: version, wanted: abi::ABI_VERSION });
        }
        found = Some(path);
    }
    let Some(maps) = found else { return Ok(None) };
    let stage = if maps.join(KEPT).exists() { Stage::Kept } else { stage(paths) };
    Ok(Some(Predecessor { maps, stage }))
}

fn stage(paths: &Paths) -> Stage {
    let settings = Map::<u32, Settings>::open(&paths.map(names::SETTINGS)).and_then(|map| map.get(&0)).ok().flatten();
    match settings {
        Some(settings) if settings.abi == abi::ABI_VERSION && settings.flags & SETTING_MIGRATING == 0 => Stage::Kept,
        Some(settings) if settings.abi == abi::ABI_VERSION && loader::runs(paths, &paths.maps) => Stage::Interrupted,
        _ => Stage::Forwarding,
    }
}

/// Whether a start could take over what is pinned, as far as that can be told without changing anything; what it would do.
pub(super) fn check(paths: &Paths) -> Result<Option<String>, DataplaneError> {
    let Some(found) = predecessor(paths)?.filter(|found| found.stage != Stage::Kept) else { return Ok(None) };
    Migration::open(paths, &found)?;
    Ok(Some(format!(
        "the datapath of map ABI {} pinned at {} is taken over with its connections, to ABI {}",
        v1::VERSION,
        found.maps.display(),
        abi::ABI_VERSION
    )))
}

/// A program at an interface that was replaced.
struct Replaced {
    interface: String,
    link: OwnedFd,
    old: OwnedFd,
}

/// A step that failed; the caller adds what it means.
type Step<T> = Result<T, String>;

fn failed<E: std::fmt::Display>(what: &str) -> impl Fn(E) -> String {
    move |error| format!("{what}: {error}")
}

/// A migration from ABI 1 under way.
pub(super) struct Migration {
    old: PathBuf,
    paths: Paths,
    told: v1::Settings,
    interrupted: bool,
    flows: Option<Flows<v1::FlowKey, v1::Flow, abi::Flow4>>,
    half_open: Vec<v1::HalfOpenSet>,
    traffic: Option<Counters<Traffic>>,
    events: Option<Counters<FrontendEvents>>,
    reasons: Option<Counters<u64>>,
    /// Tick at which the last pass began.
    since: Option<u32>,
    replaced: Vec<Replaced>,
    /// The new maps are in force.
    done: bool,
}

impl Migration {
    /// Looks at everything old that is needed, and changes nothing.
    pub(super) fn open(paths: &Paths, predecessor: &Predecessor) -> Result<Self, DataplaneError> {
        let old = predecessor.maps.clone();
        let told = check_maps(&old).and_then(|()| {
            let told = Map::<u32, v1::Settings>::open(&old.join(names::SETTINGS))
                .and_then(|map| map.get(&0))
                .map_err(failed(names::SETTINGS))?;
            told.filter(|told| told.abi == v1::VERSION)
                .ok_or_else(|| "its map settings is not that of an agent of ABI 1".to_owned())
        });
        match told {
            Ok(told) => Ok(Self {
                old,
                paths: paths.clone(),
                told,
                interrupted: predecessor.stage == Stage::Interrupted,
                flows: None,
                half_open: Vec::new(),
                traffic: None,
                events: None,
                reasons: None,
                since: None,
                replaced: Vec::new(),
                done: false,
            }),
            Err(message) => Err(refused(&old, message)),
        }
    }

    fn refused(&self, message: String) -> DataplaneError {
        refused(&self.old, message)
    }

    /// Removes what an earlier attempt has left.
    pub(super) fn clean(&self) -> Result<(), DataplaneError> {
        if self.interrupted {
            return Ok(());
        }
        loader::remove_directory(&self.paths.maps)
            .map_err(|error| self.refused(format!("{} cannot be removed: {error}", self.paths.maps.display())))
    }

    /// Writes what the new programs are told, marked as migrating: from here on a start that dies is known as one.
    pub(super) fn prepare(&self) -> Result<(), DataplaneError> {
        if self.interrupted {
            return Ok(());
        }
        let write = || -> io::Result<()> {
            let timeouts = Map::<u32, Timeouts>::open(&self.paths.map(names::TIMEOUTS))?;
            timeouts.set(&0, &v1::timeouts(&self.told))?;
            let settings = Map::<u32, Settings>::open(&self.paths.map(names::SETTINGS))?;
            settings.set(&0, &Settings { flags: SETTING_MIGRATING, ..v1::settings(&self.told) })
        };
        write().map_err(|error| self.refused(format!("the settings cannot be written: {error}")))
    }

    /// Copies everything, and flows until few change between two passes.
    pub(super) fn copy(&mut self, loaded: &Loaded) -> Result<(), DataplaneError> {
        let result = self.open_tables().and_then(|()| {
            if self.interrupted {
                return Ok(());
            }
            self.copy_tables()?;
            for _ in 0..PASSES {
                if self.pass(loaded)? < FEW {
                    break;
                }
            }
            Ok(())
        });
        result.map_err(|message| self.refused(message))
    }

    fn open_tables(&mut self) -> Step<()> {
        let (old, new) = (&self.old, &self.paths);
        let from = old.join(names::FLOWS4);
        self.flows =
            Some(Flows::open(&from, &new.map(names::FLOWS4), &new.map(names::AGEING4)).map_err(failed(names::FLOWS4))?);
        let both = |name: &str| (old.join(name), new.map(name));
        let (from, to) = both(names::TRAFFIC);
        self.traffic = Some(Counters::open(&from, &to).map_err(failed(names::TRAFFIC))?);
        let (from, to) = both(names::FRONTEND_EVENTS);
        self.events = Some(Counters::open(&from, &to).map_err(failed(names::FRONTEND_EVENTS))?);
        let (from, to) = both(names::REASONS);
        self.reasons = Some(Counters::open(&from, &to).map_err(failed(names::REASONS))?);
        Ok(())
    }

    /// The tables that the agent writes: they stand still, as the old agent does not run.
    fn copy_tables(&self) -> Step<()> {
        let (old, new) = (|name: &str| self.old.join(name), |name: &str| self.paths.map(name));
        let array = |name: &'static str, result: io::Result<u64>| result.map(|_| ()).map_err(failed(name));
        array(
            names::NEXT_HOPS,
            copy_array(&old(names::NEXT_HOPS), &new(names::NEXT_HOPS), |_, hop| v1::next_hop(hop)),
        )?;
        array(HOP_RECORDS, copy_array(&old(HOP_RECORDS), &new(HOP_RECORDS), |_, record| v1::address_key(record)))?;
        array(names::TENANTS, copy_array(&old(names::TENANTS), &new(names::TENANTS), |_, tenant| v1::tenant(tenant)))?;
        array(
            names::BACKENDS,
            copy_array(&old(names::BACKENDS), &new(names::BACKENDS), |_, backend| v1::backend(backend)),
        )?;
        array(names::MAGLEV, copy_array(&old(names::MAGLEV), &new(names::MAGLEV), |_, chunk| v1::chunk(chunk)))?;
        array(
            names::FRONTEND_OWNERS,
            copy_array(&old(names::FRONTEND_OWNERS), &new(names::FRONTEND_OWNERS), |_, owner| v1::owner(owner)),
        )?;
        array(
            names::FRONTENDS,
            copy(&old(names::FRONTENDS), &new(names::FRONTENDS), |key, frontend| {
                Some((v1::frontend_key(key), v1::frontend(frontend)))
            }),
        )?;
        array(
            names::ADDRESSES,
            copy(&old(names::ADDRESSES), &new(names::ADDRESSES), |key, address| {
                Some((v1::address_key(key), v1::address(address)))
            }),
        )?;
        array(
            names::SEGMENTS,
            copy_array(&old(names::SEGMENTS), &new(names::SEGMENTS), |_, segment| v1::segment(segment)),
        )
    }

    /// Brings everything that the old programs write up to date in the new maps, which nobody reads yet. Returns the number of halves
    /// of flows that had changed.
    fn pass(&mut self, loaded: &Loaded) -> Step<u64> {
        let since = self.since.replace(now(loaded)?);
        if let Some(counters) = &mut self.traffic {
            counters.pass(total_traffic).map_err(failed(names::TRAFFIC))?;
        }
        if let Some(counters) = &mut self.events {
            counters.pass(total_events).map_err(failed(names::FRONTEND_EVENTS))?;
        }
        if let Some(counters) = &mut self.reasons {
            counters.pass(total).map_err(failed(names::REASONS))?;
        }
        let Some(flows) = &mut self.flows else { return Ok(0) };
        let passed = flows.pass(since, |key, flow| Some((v1::flow_key(key), v1::flow(flow))));
        let (living, changed) = passed.map_err(|error| match (error.raw_os_error(), flows.room()) {
            (Some(libc::E2BIG), (room, copied)) => format!(
                "there are at least {copied} halves of flows, and room for {room}: set datapath.max_flows to {} or more",
                copied.div_ceil(2)
            ),
            _ => format!("{}: {error}", names::FLOWS4),
        })?;
        self.pass_half_open(now(loaded)?, &living)?;
        Ok(changed)
    }

    /// Half-open connections, and what tenants use.
    fn pass_half_open(&mut self, now: u32, living: &Living) -> Step<()> {
        let settings = self.settings()?;
        let mut used: HashMap<u32, TenantUse> = HashMap::new();
        let owners = self.owners()?;
        for (frontend, (flows, udp)) in living {
            let tenant = owners.get(frontend).copied().unwrap_or(0);
            let family = &mut used.entry(u32::from(tenant)).or_insert(TenantUse::ZERO).families[0];
            family.flows += flows;
            family.udp += udp;
        }
        self.half_open = self.half_open_sets()?;
        let told = self.told;
        let mut sets = self.half_open.iter();
        copy_array(&self.old.join(names::HALF_OPEN4), &self.paths.map(names::HALF_OPEN4), |_, _: &v1::HalfOpenSet| {
            let mut new = HalfOpenSet4::ZERO;
            let Some(set) = sets.next() else { return new };
            for (way, (&tag, record)) in set.tags.iter().zip(&set.records).enumerate() {
                let tag = v1::tag(tag, now, &told);
                if tag == 0 {
                    continue;
                }
                (new.tags[way], new.records[way]) = (tag, v1::half_open(record));
                let family = &mut used.entry(u32::from(record.tenant)).or_insert(TenantUse::ZERO).families[0];
                count_half_open(family, tag, now, settings.half_open_epoch);
            }
            new
        })
        .map_err(failed(names::HALF_OPEN4))?;
        copy_array(&self.old.join(names::HINTS4), &self.paths.map(names::HINTS4), |_, line: &v1::HintLine| HintLine {
            hints: line.hints.map(|hint| v1::hint(hint, now, &told)),
        })
        .map_err(failed(names::HINTS4))?;
        let epoch = half_open::epoch(now, settings.half_open_epoch);
        copy_array(&self.old.join(names::TENANT_USE), &self.paths.map(names::TENANT_USE), |id, old: &v1::TenantUse| {
            let mut new = used.get(&id).copied().unwrap_or(TenantUse::ZERO);
            new.families[0].epoch = epoch;
            if id == 0 {
                // At no tenant's index: when a hint was last left, here when it expires.
                TenantUse {
                    hinted: if old.window == 0 { 0 } else { old.window + u64::from(told.tcp_half_open) },
                    ..new
                }
            } else {
                TenantUse { new_flows: old.new_flows, window: old.window, ..new }
            }
        })
        .map_err(failed(names::TENANT_USE))?;
        Ok(())
    }

    fn settings(&self) -> Step<Settings> {
        Map::<u32, Settings>::open(&self.paths.map(names::SETTINGS))
            .and_then(|map| map.get(&0))
            .map(|settings| settings.unwrap_or(Settings::ZERO))
            .map_err(failed(names::SETTINGS))
    }

    /// Tenants by frontend id.
    fn owners(&self) -> Step<HashMap<u16, u16>> {
        let mut owners = HashMap::new();
        Map::<u32, abi::FrontendOwner>::open(&self.paths.map(names::FRONTEND_OWNERS))
            .and_then(|map| {
                map.for_each(|&id, owner| {
                    if owner.tenant != 0 {
                        owners.insert(id as u16, owner.tenant);
                    }
                })
            })
            .map_err(failed(names::FRONTEND_OWNERS))?;
        Ok(owners)
    }

    fn half_open_sets(&self) -> Step<Vec<v1::HalfOpenSet>> {
        let mut sets = Vec::new();
        Map::<u32, v1::HalfOpenSet>::open(&self.old.join(names::HALF_OPEN4))
            .and_then(|map| map.for_each(|_, set| sets.push(*set)))
            .map_err(failed(names::HALF_OPEN4))?;
        Ok(sets)
    }

    /// Replaces the programs, and hands over what the old ones did last. After an error the old programs are back.
    pub(super) fn swap(&mut self, loader: &Loader, loaded: &[Loaded]) -> Result<(), DataplaneError> {
        let result = self.exchange(loader, loaded).and_then(|()| match loaded.first() {
            Some(first) => self.hand_over(first),
            None => Ok(()),
        });
        if let Err(message) = result {
            return Err(self.refused(message));
        }
        self.done = true;
        Ok(())
    }

    fn exchange(&mut self, loader: &Loader, loaded: &[Loaded]) -> Step<()> {
        let mut places = Vec::new();
        for program in loaded {
            let Some((link, old)) = loader::linked(&self.paths, program.interface(), &self.old) else { continue };
            loader.pin_loaded(program).map_err(|error| error.to_string())?;
            places.push((program, Replaced { interface: program.interface().to_owned(), link, old }));
        }
        self.quieten(true)?;
        if !self.interrupted
            && let Some(first) = loaded.first()
        {
            self.pass(first)?;
        }
        for (program, place) in places {
            bpf::link_update(place.link.as_fd(), program.edge())
                .map_err(|error| format!("{}: the program cannot be replaced: {error}", place.interface))?;
            self.replaced.push(place);
        }
        bpf::barrier();
        Ok(())
    }

    /// Tells the old programs to drop strays in silence, or no longer.
    fn quieten(&self, quiet: bool) -> Step<()> {
        let flags =
            if quiet { self.told.flags | v1::SETTING_MIGRATING } else { self.told.flags & !v1::SETTING_MIGRATING };
        Map::<u32, v1::Settings>::open(&self.old.join(names::SETTINGS))
            .and_then(|map| map.set(&0, &v1::Settings { flags, ..self.told }))
            .map_err(failed("its settings cannot be written"))
    }

    /// What the old programs did after the last pass.
    fn hand_over(&mut self, loaded: &Loaded) -> Step<()> {
        let now = now(loaded)?;
        let mut lost = 0;
        // First what is waited for: the proof of a handshake that is not known is dropped.
        for (before, set) in std::iter::zip(std::mem::take(&mut self.half_open), self.half_open_sets()?) {
            for way in 0..v1::WAYS {
                let (tag, record) = (v1::tag(set.tags[way], now, &self.told), set.records[way]);
                if tag != 0 && (before.tags[way] != set.tags[way] || before.records[way] != record) {
                    let mut request = ControlHalfOpen::<Address4>::ZERO;
                    request.request.command = control::RESTORE_HALF_OPEN;
                    request.request.nanoseconds = tag;
                    request.record = v1::half_open(&record);
                    lost += u64::from(restore(loaded, &mut request)? == 0);
                }
            }
        }
        let Some(flows) = &mut self.flows else { return Ok(()) };
        let mut handed = 0_u64;
        for late in flows.late(|key, flow| Some((v1::flow_key(key), v1::flow(flow)))).map_err(failed(names::FLOWS4))? {
            handed += 1;
            match late {
                Late::New(key, flow) => {
                    if control_flow(loaded, control::RESTORE, key, flow)? == 0
                        && flows.get(&key).ok().flatten().is_none()
                    {
                        lost += 1;
                    }
                }
                Late::Grown(key, flow) => {
                    if flow.state & (abi::FLOW_DEAD | abi::FLOW_REVERSE) == abi::FLOW_DEAD {
                        mark(loaded, key)?;
                    } else {
                        control_flow(loaded, control::GROW, key, flow)?;
                    }
                }
                Late::Ended(key) => mark(loaded, key)?,
            }
        }
        self.hand_over_counters(loaded)?;
        if lost > 0 {
            tracing::warn!(
                "{lost} connections that were made while the programs were replaced are lost: their ports were taken meanwhile"
            );
        }
        tracing::info!(
            "map ABI {}: took over {} halves of flows, {handed} of them changed while the programs were replaced",
            v1::VERSION,
            self.flows.as_ref().map_or(0, |flows| flows.room().1)
        );
        let map = Map::<u32, Settings>::open(&self.paths.map(names::SETTINGS)).map_err(failed(names::SETTINGS))?;
        let settings = self.settings()?;
        map.set(&0, &Settings { flags: settings.flags & !SETTING_MIGRATING, ..settings })
            .map_err(failed(names::SETTINGS))
    }

    fn hand_over_counters(&self, loaded: &Loaded) -> Step<()> {
        // An interrupted migration does not know what it had copied.
        if self.interrupted {
            return Ok(());
        }
        let credit = |table: u32, index: u32, first: u64, second: u64| -> Step<()> {
            let request = ControlRequest4 {
                command: control::CREDIT,
                count: index,
                jiffies: first,
                nanoseconds: second,
                result: u64::from(table),
                ..ControlRequest4::ZERO
            };
            run_control(loaded.control(), request).map(|_| ()).map_err(failed("the counters cannot be handed over"))
        };
        if let Some(counters) = &self.traffic {
            for (index, then, now) in counters.late(total_traffic).map_err(failed(names::TRAFFIC))? {
                let (packets, bytes) = (now.packets.wrapping_sub(then.packets), now.bytes.wrapping_sub(then.bytes));
                credit(control::CREDIT_TRAFFIC, index, packets, bytes)?;
            }
        }
        if let Some(counters) = &self.events {
            for (index, then, now) in counters.late(total_events).map_err(failed(names::FRONTEND_EVENTS))? {
                let (flows, refused) = (now.flows.wrapping_sub(then.flows), now.refused.wrapping_sub(then.refused));
                credit(control::CREDIT_EVENTS, index, flows, refused)?;
            }
        }
        if let Some(counters) = &self.reasons {
            for (index, then, now) in counters.late(total).map_err(failed(names::REASONS))? {
                credit(control::CREDIT_REASON, index, now.wrapping_sub(then), 0)?;
            }
        }
        Ok(())
    }

    /// Puts the old programs back and removes the new maps, unless those are in force already.
    pub(super) fn undo(&mut self) {
        if self.done {
            return;
        }
        for place in self.replaced.drain(..) {
            if let Err(error) = bpf::link_update(place.link.as_fd(), place.old.as_fd()) {
                tracing::error!("{}: the program of ABI {} cannot be put back: {error}", place.interface, v1::VERSION);
                return;
            }
        }
        if let Err(error) = self.quieten(false) {
            tracing::error!("{error}");
        }
        // With an interrupted migration, other interfaces may run the new programs.
        if !self.interrupted
            && let Err(error) = loader::remove_directory(&self.paths.maps)
        {
            tracing::warn!("{} cannot be removed: {error}", self.paths.maps.display());
        }
    }
}

/// How long the old maps are kept as the way back.
const KEEP_SECONDS: u64 = 24 * 3600;

/// After a start over our maps: marks the old ones as the way back, or gives them up when they have been that for long enough.
pub(super) fn settle(old: &Path) {
    match kept_since(old) {
        None => {
            keep(old);
            tracing::info!(
                "the datapath of map ABI {} is kept for {} hours: `lbd rollback` goes back to it, `lbd rollback --discard` frees its memory",
                v1::VERSION,
                KEEP_SECONDS / 3600
            );
        }
        Some(since) if boot_seconds().saturating_sub(since) >= KEEP_SECONDS => match loader::remove_directory(old) {
            Ok(()) => tracing::info!("the datapath of map ABI {} is not kept any longer", v1::VERSION),
            Err(error) => tracing::warn!("{} cannot be removed: {error}", old.display()),
        },
        Some(_) => {}
    }
}

/// Leaves the old maps as the way back, marked with the time; what ran beside the programs at the interfaces ends.
pub(super) fn keep(old: &Path) {
    loader::remove_traces(old);
    let marked = bpf::create_map(KEPT, &bpf::MapInfo::of(bpf::TYPE_ARRAY, 4, 8, 1, 0)).and_then(|map| {
        let map_fd = map.try_clone()?;
        Map::<u32, u64>::new(map)?.set(&0, &boot_seconds())?;
        bpf::pin(map_fd.as_fd(), &old.join(KEPT))
    });
    if let Err(error) = marked {
        tracing::warn!("{} cannot be marked as the way back: {error}", old.display());
    }
}

/// When the old maps were left, in seconds since the boot.
pub(super) fn kept_since(old: &Path) -> Option<u64> {
    Map::<u32, u64>::open(&old.join(KEPT)).ok()?.get(&0).ok()?
}

/// Seconds since the boot; pins do not outlive it.
pub(super) fn boot_seconds() -> u64 {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME).map_or(0, |time| time.tv_sec().unsigned_abs())
}

fn refused(old: &Path, message: String) -> DataplaneError {
    DataplaneError::Migration { path: old.to_owned(), found: v1::VERSION, wanted: abi::ABI_VERSION, message }
}

/// Counts a half-open record in the bucket of its end.
fn count_half_open(family: &mut FamilyUse, tag: u64, now: u32, ticks_per_epoch: u32) {
    let epoch = half_open::epoch(now, ticks_per_epoch);
    // A configuration with shorter timeouts has shorter epochs: no bucket is further ahead than there are buckets.
    let last = epoch + abi::HALF_OPEN_BUCKETS as u64 - 1;
    let counted = half_open::expiry_epoch(half_open::expires(tag, now), ticks_per_epoch).min(last);
    family.half_open += 1;
    family.buckets[half_open::bucket(counted)] += 1;
}

fn now(loaded: &Loaded) -> Step<u32> {
    let request = ControlRequest4 { command: control::CLOCK, ..ControlRequest4::ZERO };
    let answer = run_control(loaded.control(), request).map_err(failed("the datapath's clock cannot be read"))?;
    Ok((answer.jiffies >> abi::TICK_SHIFT) as u32)
}

fn restore(loaded: &Loaded, request: &mut ControlHalfOpen<Address4>) -> Step<u64> {
    engine::run_request(loaded.control(), request).map_err(failed("a connection cannot be handed over"))?;
    Ok(request.request.result)
}

fn control_flow(loaded: &Loaded, command: u32, key: abi::FlowKey4, flow: abi::Flow4) -> Step<u64> {
    let mut request = ControlFlow::<Address4>::ZERO;
    request.request.command = command;
    request.request.key = key;
    request.flow = flow;
    engine::run_request(loaded.control(), &mut request).map_err(failed("a flow cannot be handed over"))?;
    Ok(request.request.result)
}

fn mark(loaded: &Loaded, key: abi::FlowKey4) -> Step<()> {
    run_control(loaded.control(), ControlRequest4::mark(key))
        .map(|_| ())
        .map_err(failed("the end of a flow cannot be handed over"))
}

fn total(values: &[u64]) -> u64 {
    values.iter().fold(0, |total, &value| total.wrapping_add(value))
}

fn total_traffic(values: &[Traffic]) -> Traffic {
    values.iter().fold(Traffic::ZERO, |total, value| Traffic {
        packets: total.packets.wrapping_add(value.packets),
        bytes: total.bytes.wrapping_add(value.bytes),
    })
}

fn total_events(values: &[FrontendEvents]) -> FrontendEvents {
    values.iter().fold(FrontendEvents::ZERO, |total, value| FrontendEvents {
        flows: total.flows.wrapping_add(value.flows),
        refused: total.refused.wrapping_add(value.refused),
    })
}
