//! The only module that touches BPF: load, pin, attach, fill the maps, next hops, announcements, counters.
//!
//! | module | holds |
//! |---|---|
//! | `loader` | objects, pins, attachments |
//! | `migrate` | taking over from the datapath of another map ABI |
//! | `engine` | what is in the maps, the order of changes |
//! | `contents`, `resets`, `regions`, `claims`, `resolver`, `steady`, `arp`, `ndisc` | the pure parts of it |
//! | `shadow` | only differences are written |
//! | `worker` | the threads: netlink, addresses, flows |
//! | `netlink`, `packet`, `bpf` | sockets and bpf(2) |
//! | `groups`, `offload` | what lbd changes on the host: multicast groups, VLAN offload |
//! | `pins` | the read-only view for `lbctl` |
//! | `preflight` | what `lbd check` says of the host |

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use caps::{CapSet, Capability};
use lbd_common::abi::{self, ControlRequest4, FlowKey, Settings, Timeouts, control, names};
use tokio::sync::watch;

use crate::config::{Adopt, Config, FrontendSettings, SegmentName};
use crate::plan::model::{HostFacts, Notice, Pinned, Plan};

mod arp;
mod bpf;
mod claims;
mod contents;
mod engine;
mod error;
mod groups;
mod loader;
#[doc(hidden)]
pub mod migrate;
mod ndisc;
mod netlink;
mod offload;
mod packet;
mod pins;
mod preflight;
mod regions;
mod resets;
mod resolver;
mod shadow;
mod steady;
mod worker;

use bpf::{Map, PerCpu};
use engine::{Engine, Programs, Tables};
pub use error::DataplaneError;
use loader::{Loaded, Loader, Nic, Paths};
pub use migrate::back::RolledBack;
use migrate::{Migration, Stage};
use netlink::{Client, Events};
pub use pins::{Answers, Fill, FlowPair, FlowTables, Pins};
use worker::{Shared, Workers};

/// The BPF object that this binary was built with; empty if there was none.
pub const OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/lbd-bpf"));

/// XDP mode in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    /// In the driver.
    Native,
    /// In the network stack.
    Generic,
}

impl Mode {
    /// `native` or `generic`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Generic => "generic",
        }
    }
}

/// An XDP program at an interface, as netlink tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct InterfaceXdp {
    /// `None`: in hardware.
    mode: Option<Mode>,
    program_id: u32,
}

/// An interface that carries our program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attached {
    /// Interface name.
    pub interface: String,
    /// Interface index; 0 if the interface is gone.
    pub index: u32,
    /// Mode in force; `None` if the interface is gone or carries another program.
    pub mode: Option<Mode>,
    /// Id of the attached program.
    pub program_id: u32,
    /// First index of the interface in map `segments`.
    pub segment_base: u32,
}

/// What [`Dataplane::apply`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Map elements written or deleted; 0 if nothing had changed.
    pub map_writes: u64,
    /// Flows removed because the plan reset them.
    pub flows_reset: u64,
}

/// What `lbd check` found on the host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// `lbd run` would fail.
    pub fatal: bool,
    /// Interface, path or capability concerned.
    pub subject: String,
    /// What is wrong and what to do.
    pub message: String,
}

/// The interfaces that the configuration names, the hub's first.
fn interfaces(config: &Config) -> Vec<String> {
    let mut found = vec![config.hub.segment.interface.clone()];
    for tenant in &config.tenants {
        if !found.contains(&tenant.segment.interface) {
            found.push(tenant.segment.interface.clone());
        }
    }
    found
}

/// The running data plane. Dropping it leaves everything pinned and forwarding.
pub struct Dataplane {
    shared: Arc<Shared>,
    workers: Workers,
    settings: Map<u32, Settings>,
    pinned: Pinned,
}

impl Dataplane {
    /// Opens the pinned maps (ABI and shapes checked) or creates them, loads the programs, and attaches them or replaces the attached
    /// ones atomically. Starts the threads that follow netlink, announce addresses and let flows end.
    ///
    /// After an error nothing is attached that was not before.
    pub fn start(config: &Config, object: &[u8]) -> Result<Self, DataplaneError> {
        if object.is_empty() {
            return Err(DataplaneError::NoObject);
        }
        for (capability, name) in [
            (Capability::CAP_NET_ADMIN, "CAP_NET_ADMIN"),
            (Capability::CAP_BPF, "CAP_BPF"),
            (Capability::CAP_NET_RAW, "CAP_NET_RAW"),
        ] {
            if !caps::has_cap(None, CapSet::Effective, capability).unwrap_or(false) {
                return Err(DataplaneError::Capability { capability: name });
            }
        }
        let mut loader = Loader::new(config, object)?;
        loader.lock(&config.datapath.bpffs)?;
        let interfaces = interfaces(config);
        for interface in &interfaces {
            loader.check(interface)?;
        }
        let fresh = loader.is_fresh();
        let predecessor = loader.predecessor().cloned();
        let mut migration = match &predecessor {
            Some(old) if old.stage != Stage::Kept => Some(Migration::open(&loader.paths, old)?),
            _ => None,
        };
        let offloads = offload::Record::new(&loader.paths.root);
        let result = offloads.prepare(&engine::tagged_interfaces(config)).and_then(|changed| {
            Self::bring_up(config, &mut loader, &interfaces, migration.as_mut())
                .inspect_err(|_| offloads.undo(&changed))
        });
        let (engine, settings) = match result {
            Ok(made) => made,
            Err(error) => {
                if let Some(migration) = &mut migration {
                    migration.undo();
                }
                if fresh && let Err(left) = loader::remove_all(&loader.paths) {
                    tracing::warn!("cleaning up after a failed start: {left}");
                }
                return Err(error);
            }
        };
        if let Some(old) = &predecessor {
            migrate::settle(&old.maps);
        }
        let netlink = |error| DataplaneError::System { what: "cannot follow netlink".to_owned(), source: error };
        // Subscribed before the first look, so that nothing falls between the two.
        let events = Events::new().map_err(netlink)?;
        let mut client = Client::new().map_err(netlink)?;
        let mut engine = engine;
        engine.facts = client.facts().map_err(netlink)?;
        engine.neighbours = client.neighbours().map_err(netlink)?;
        let traced = loader
            .own(engine.nics.values())
            .map_err(|error| format!("map {}: {error}", names::OWN))
            .and_then(|()| loader.trace());
        if let Err(error) = traced {
            tracing::warn!(
                "redirects that a driver refuses are not counted: {error}; is tracefs at /sys/kernel/tracing, is there CAP_PERFMON?"
            );
        }
        for interface in loader.release_others(&interfaces) {
            tracing::warn!("{interface}: no longer configured, detached");
        }
        offloads.restore(&engine::tagged_interfaces(config).into_keys().collect::<Vec<_>>());
        engine.claim_addresses(Instant::now());
        let pinned = engine.pinned();
        let shared = Arc::new(Shared::new(engine, loader));
        let workers =
            Workers::start(&shared, events, client).map_err(DataplaneError::system("cannot start a thread"))?;
        Ok(Self { shared, workers, settings, pinned })
    }

    fn bring_up(
        config: &Config,
        loader: &mut Loader,
        interfaces: &[String],
        mut migration: Option<&mut Migration>,
    ) -> Result<(Engine, Map<u32, Settings>), DataplaneError> {
        if let Some(migration) = &migration {
            migration.clean()?;
        }
        loader.create_maps()?;
        if let Some(migration) = &migration {
            migration.prepare()?;
        }
        let paths = loader.paths.clone();
        let settings = Map::<u32, Settings>::open(&paths.map(names::SETTINGS))
            .map_err(DataplaneError::system(format!("cannot open map {}", names::SETTINGS)))?;
        let old = pinned_settings(&settings)?;
        let seed = seed(&config.state_dir, old.map(|old| old.seed))?;
        loader.set_seed(&seed);
        let mut loaded = Vec::new();
        for (interface, slot) in slots(&loader.slots(), interfaces)? {
            loaded.push(loader.prepare(&interface, slot)?);
        }
        let Some(first) = loaded.first() else {
            return Err(DataplaneError::Object { message: "no interface to load it for".to_owned() });
        };
        let timeouts = Map::<u32, Timeouts>::open(&paths.map(names::TIMEOUTS))
            .map_err(DataplaneError::system(format!("cannot open map {}", names::TIMEOUTS)))?;
        write_settings(config, old, seed, &settings, &timeouts, first)?;
        if let Some(migration) = &mut migration {
            migration.copy(first)?;
        }
        let programs = programs(&paths, first).map_err(DataplaneError::system("cannot open the pinned maps"))?;
        let mut engine = Tables::open(&paths)
            .and_then(|tables| Engine::new(config, tables, Some(Arc::new(programs))))
            .map_err(DataplaneError::system("cannot read the pinned maps"))?;
        if let Some(migration) = &mut migration {
            migration.swap(loader, &loaded)?;
        }
        let mut nics: Vec<Nic> = Vec::new();
        for program in &loaded {
            match loader.attach(program) {
                Ok(nic) => {
                    tracing::info!("{}: program {} in {} mode", nic.interface, nic.program_id, nic.mode.as_str());
                    if let Some(warning) = &nic.warning {
                        tracing::warn!("{warning}");
                    }
                    nics.push(nic);
                }
                Err(error) => {
                    for nic in nics.iter().filter(|nic| nic.new) {
                        loader.undo(nic);
                    }
                    return Err(error);
                }
            }
        }
        if let Err(error) = one_mode(loader, &loaded, &mut nics) {
            for nic in nics.iter().filter(|nic| nic.new) {
                loader.undo(nic);
            }
            return Err(error);
        }
        engine.nics = nics.into_iter().map(|nic| (nic.interface.clone(), nic)).collect();
        Ok((engine, settings))
    }

    /// Takes a reloaded configuration: pools to check ahead of need, timeouts, announcements. What needs a restart is not looked at.
    pub fn reconfigure(&mut self, config: &Config) -> Result<(), DataplaneError> {
        let what = || format!("cannot write map {}", names::SETTINGS);
        // Held from here on: it writes settings, too.
        let mut engine = self.shared.engine();
        let old = self.settings.get(&0).map_err(DataplaneError::system(what()))?.unwrap_or(Settings::ZERO);
        let hertz = old.ticks_per_second_256 << abi::TICK_SHIFT >> 8;
        let new =
            Settings { flags: old.flags, adopt_until: old.adopt_until, ..engine::settings(config, old.seed, hertz) };
        if new != old {
            self.settings.set(&0, &new).map_err(DataplaneError::system(what()))?;
        }
        engine.config = config.clone();
        engine.claims.set_interval(config.datapath.announce_interval, Instant::now());
        engine.claim_addresses(Instant::now());
        drop(engine);
        self.workers.wake();
        Ok(())
    }

    /// Makes the maps hold the plan: writes differences only, in an order in which no packet sees half of a change.
    ///
    /// May take as long as a few RCU grace periods: call it where blocking is allowed. After [`DataplaneError::Partial`] or another
    /// error the maps are consistent and the call may be repeated.
    pub fn apply(&mut self, plan: impl Into<Arc<Plan>>) -> Result<Applied, DataplaneError> {
        let result = self.shared.engine().apply(&plan.into(), Instant::now());
        self.workers.wake();
        result
    }

    /// What the maps said of ids when this agent started.
    pub const fn pinned(&self) -> &Pinned {
        &self.pinned
    }

    /// The host's interfaces, kept up to date.
    pub fn facts(&self) -> watch::Receiver<HostFacts> {
        self.shared.facts.subscribe()
    }

    /// Addresses of pools and VIPs that another station answers for.
    pub fn taken(&self) -> watch::Receiver<BTreeSet<(SegmentName, IpAddr)>> {
        self.shared.taken.subscribe()
    }

    /// Stations that answer for addresses of pools and VIPs, or that claim one that is ours: their MACs.
    pub fn holders(&self) -> watch::Receiver<BTreeMap<(SegmentName, IpAddr), [u8; 6]>> {
        self.shared.holders.subscribe()
    }

    /// What an operator should know: address conflicts, a fall-back to generic mode.
    pub fn notices(&self) -> watch::Receiver<Vec<Notice>> {
        self.shared.notices.subscribe()
    }

    /// Interfaces with the mode in force, as the kernel tells: an attachment may have been taken away.
    pub fn attached(&self) -> Vec<Attached> {
        let paths = self.shared.loader.lock().unwrap_or_else(PoisonError::into_inner).paths.clone();
        loader::attached(&paths).unwrap_or_else(|error| {
            tracing::warn!("cannot tell what is attached: {error}");
            Vec::new()
        })
    }

    /// Marks flows as dead: both halves are treated as absent at once and deleted soon. Returns how many lived.
    pub fn remove_flows<A: FlowTables>(&self, keys: &[FlowKey<A>]) -> Result<u64, DataplaneError> {
        self.shared.engine().mark(keys).map_err(DataplaneError::system(format!("cannot mark flows in {}", A::FLOWS)))
    }

    /// Lets the next `count` writes to a map fail: for tests of what happens then.
    #[doc(hidden)]
    pub fn fail_writes(&self, map: &str, count: u64) {
        self.shared.engine().faults.inject(map, count);
    }
}

/// Slots of the configured interfaces: those that carry our program keep theirs.
fn slots(taken: &BTreeMap<String, u32>, interfaces: &[String]) -> Result<Vec<(String, u32)>, DataplaneError> {
    let mut used: BTreeSet<u32> = taken.values().copied().collect();
    interfaces
        .iter()
        .map(|interface| {
            let slot = match taken.get(interface) {
                Some(&slot) => slot,
                None => (0..abi::MAX_NICS)
                    .find(|slot| !used.contains(slot))
                    .ok_or_else(|| DataplaneError::TooManyInterfaces { interface: interface.clone() })?,
            };
            used.insert(slot);
            Ok((interface.clone(), slot))
        })
        .collect()
}

fn programs(paths: &Paths, loaded: &Loaded) -> io::Result<Programs> {
    Ok(Programs {
        control: loaded.control.try_clone()?,
        flows: Map::open(&paths.map(names::FLOWS4))?,
        flows6: Map::open(&paths.map(names::FLOWS6))?,
        settings: Map::open(&paths.map(names::SETTINGS))?,
        traffic: PerCpu::open(&paths.map(names::TRAFFIC))?,
        events: PerCpu::open(&paths.map(names::FRONTEND_EVENTS))?,
        used: Map::open(&paths.map(names::TENANT_USE))?,
        reasons: PerCpu::open(&paths.map(names::REASONS))?,
    })
}

/// What the datapath was told before, if anything.
fn pinned_settings(map: &Map<u32, Settings>) -> Result<Option<Settings>, DataplaneError> {
    let found = map.get(&0).map_err(DataplaneError::system(format!("cannot read map {}", names::SETTINGS)))?;
    Ok(found.filter(|found| found.abi == abi::ABI_VERSION))
}

/// Tells the datapath its timeouts and its seed.
fn write_settings(
    config: &Config,
    old: Option<Settings>,
    seed: [u64; 2],
    map: &Map<u32, Settings>,
    timeouts: &Map<u32, Timeouts>,
    loaded: &Loaded,
) -> Result<(), DataplaneError> {
    // The kernel does not change its tick while it runs, and pins do not outlive it.
    let hertz = match old {
        Some(old) => old.ticks_per_second_256 << abi::TICK_SHIFT >> 8,
        None => measure_hertz(loaded)?,
    };
    let mut settings = engine::settings(config, seed, hertz);
    if let Some(old) = old {
        settings.flags = old.flags;
        settings.adopt_until = old.adopt_until;
    }
    if old.is_none() && adopts(config) {
        // The tables are lost, and clients know nothing of it.
        let request = ControlRequest4 { command: control::CLOCK, ..ControlRequest4::ZERO };
        let clock = engine::run_control(&loaded.control, request)
            .map_err(DataplaneError::system("cannot read the datapath's clock"))?;
        settings.adopt_until = engine::adopt_until(clock.jiffies, hertz);
    }
    timeouts
        .set(&0, &engine::timeouts(&config.timeouts, hertz))
        .map_err(DataplaneError::system(format!("cannot write map {}", names::TIMEOUTS)))?;
    if old != Some(settings) {
        map.set(&0, &settings).map_err(DataplaneError::system(format!("cannot write map {}", names::SETTINGS)))?;
    }
    Ok(())
}

/// Whether any frontend adopts flows without state.
fn adopts(config: &Config) -> bool {
    let takeover = |settings: &FrontendSettings| settings.adopt == Adopt::Takeover;
    config.tenants.iter().any(|tenant| {
        takeover(&tenant.settings) || tenant.frontends.iter().any(|frontend| takeover(&frontend.settings))
    })
}

/// Compares the datapath's two clocks.
fn measure_hertz(loaded: &Loaded) -> Result<u32, DataplaneError> {
    let failed = || DataplaneError::system("cannot read the datapath's clock");
    let read = || {
        let request = ControlRequest4 { command: control::CLOCK, ..ControlRequest4::ZERO };
        engine::run_control(&loaded.control, request).map_err(failed())
    };
    let mut last = None;
    // A machine that is stopped between two readings gets another chance.
    for _ in 0..5 {
        let first = read()?;
        std::thread::sleep(Duration::from_millis(120));
        let second = read()?;
        last = engine::hertz(
            second.jiffies.wrapping_sub(first.jiffies),
            second.nanoseconds.saturating_sub(first.nanoseconds),
        );
        if last.is_some() {
            break;
        }
    }
    last.ok_or_else(|| failed()(io::Error::other("its ticks fit no CONFIG_HZ")))
}

/// The secret seed: the pinned one, as it decides where every flow is, else that of the state directory, else a new one; kept in the state directory.
fn seed(state_dir: &Path, pinned: Option<[u64; 2]>) -> Result<[u64; 2], DataplaneError> {
    let path = state_dir.join("seed");
    let failed = |verb: &str| DataplaneError::system(format!("cannot {verb} the seed {}", path.display()));
    let kept = match fs::read(&path) {
        Ok(bytes) => <[u8; 16]>::try_from(bytes.as_slice()).ok(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(failed("read")(error)),
    };
    let bytes = match (pinned, kept) {
        (Some([first, second]), _) => {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&first.to_ne_bytes());
            bytes[8..].copy_from_slice(&second.to_ne_bytes());
            bytes
        }
        (None, Some(bytes)) => bytes,
        (None, None) => {
            let mut bytes = [0; 16];
            fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)).map_err(failed("make"))?;
            bytes
        }
    };
    if kept != Some(bytes) {
        fs::create_dir_all(state_dir).map_err(failed("write"))?;
        let beside = state_dir.join("seed.new");
        fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&beside)
            .and_then(|mut file| {
                file.set_permissions(fs::Permissions::from_mode(0o600))?;
                file.write_all(&bytes)?;
                file.sync_all()
            })
            .and_then(|()| fs::rename(&beside, &path))
            .map_err(failed("write"))?;
    }
    let word = |at: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[at..at + 8]);
        u64::from_ne_bytes(word)
    };
    Ok([word(0), word(8)])
}

/// What [`detach`] removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Detached {
    /// Interfaces that our program was taken from.
    pub interfaces: Vec<String>,
    /// Pinned maps and programs removed.
    pub maps: u32,
    /// Neighbour entries released.
    pub neighbours: u32,
    /// Multicast groups left, counting those of the kernel's IPv6 and those of NICs' filters.
    pub groups: u32,
    /// Interfaces whose rx-vlan offload was turned on again.
    pub offloads: Vec<String>,
}

impl Detached {
    /// There was nothing to remove.
    pub fn is_empty(&self) -> bool {
        self.interfaces.is_empty()
            && self.maps == 0
            && self.neighbours == 0
            && self.groups == 0
            && self.offloads.is_empty()
    }
}

/// Removes everything of lbd's from the kernel: links first, then maps. Works from the pins alone; a second call finds nothing.
pub fn detach(bpffs: &Path) -> Result<Detached, DataplaneError> {
    let paths = Paths::new(bpffs);
    let offloads = offload::Record::new(&paths.root).restore(&[]);
    let (mut interfaces, maps) = loader::remove_all(&paths)?;
    let mut client = Client::new().map_err(DataplaneError::system("cannot open a netlink socket"))?;
    let facts = client.facts().map_err(DataplaneError::system("cannot list interfaces"))?;
    let indexes: Vec<(String, u32)> =
        facts.interfaces.iter().map(|(name, interface)| (name.clone(), interface.index)).collect();
    interfaces.extend(loader::detach_left_overs(&mut client, &indexes));
    let mut released = 0;
    for (place, neighbour) in client.neighbours().map_err(DataplaneError::system("cannot list neighbours"))? {
        if neighbour.ours {
            client
                .release(place)
                .map_err(DataplaneError::system(format!("cannot release the neighbour {}", place.address)))?;
            released += 1;
        }
    }
    let groups = groups::leave_all(&mut client).map_err(DataplaneError::system("cannot leave multicast groups"))?;
    Ok(Detached { interfaces, maps, neighbours: released, groups, offloads })
}

/// Puts the datapath of the previous map ABI back that a start of this version has taken over from. No agent may run.
pub fn rollback(bpffs: &Path) -> Result<RolledBack, DataplaneError> {
    let paths = Paths::new(bpffs);
    paths.check_bpffs()?;
    let _lock = loader::lock(bpffs)?;
    migrate::back::rollback(&paths)
}

/// Gives the way back up: removes the maps of the previous ABI. Returns its version.
pub fn discard_rollback(bpffs: &Path) -> Result<u32, DataplaneError> {
    let paths = Paths::new(bpffs);
    paths.check_bpffs()?;
    migrate::back::discard(&paths)
}

/// Where one interface has only generic mode, all get it: a driver with a program sends nothing to an interface without one.
fn one_mode(loader: &mut Loader, loaded: &[Loaded], nics: &mut [Nic]) -> Result<(), DataplaneError> {
    let Some(cause) = nics.iter().find(|nic| nic.mode == Mode::Generic).map(|nic| nic.interface.clone()) else {
        return Ok(());
    };
    for (nic, program) in nics.iter_mut().zip(loaded).filter(|(nic, _)| nic.mode == Mode::Native) {
        let warning = format!(
            "{}: generic XDP mode, because {cause} has it: packets that a driver redirects to an interface in generic mode get lost",
            nic.interface
        );
        tracing::warn!("{warning}");
        let generic = loader.attach_generic(program)?;
        *nic = Nic { new: nic.new, warning: Some(warning), ..generic };
    }
    Ok(())
}

/// Whether an agent runs that fills the maps below `bpffs`.
pub fn is_busy(bpffs: &Path) -> bool {
    loader::is_busy(bpffs)
}

/// Whether the path is a BPF file system.
pub fn check_bpffs(bpffs: &Path) -> Result<(), DataplaneError> {
    Paths::new(bpffs).check_bpffs()
}

/// The host's interfaces now; needs no privileges.
pub fn host_facts() -> Result<HostFacts, DataplaneError> {
    let read = Client::new().and_then(|mut client| client.facts());
    read.map_err(DataplaneError::system("read the interfaces by netlink"))
}

/// Looks at the host without changing it: capabilities, BPF file system, interfaces, offloads, MTU.
pub fn preflight(config: &Config) -> Vec<Problem> {
    preflight::preflight(config)
}

/// Memory that the maps will take, by name, in bytes, on a machine with this many possible CPUs. Empty without a BPF object.
pub fn map_memory(config: &Config, cpus: u32) -> Vec<(&'static str, u64)> {
    let shapes = loader::shapes(OBJECT, config).unwrap_or_default();
    shapes.iter().map(|shape| (loader::known_name(&shape.name), shape.memory(cpus))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_keep_their_slots() {
        let taken = BTreeMap::from([("ten0".to_owned(), 3), ("gone".to_owned(), 0)]);
        let interfaces = ["hub0".to_owned(), "ten0".to_owned(), "ten1".to_owned()];
        let found = slots(&taken, &interfaces).unwrap();
        assert_eq!(found.into_iter().map(|(_, slot)| slot).collect::<Vec<_>>(), [1, 3, 2]);
        let many: Vec<String> = (0..=abi::MAX_NICS).map(|number| format!("eth{number}")).collect();
        assert!(matches!(slots(&BTreeMap::new(), &many), Err(DataplaneError::TooManyInterfaces { .. })));
    }

    #[test]
    fn the_seed_survives_and_the_pinned_one_wins() {
        let directory = tempfile::tempdir().unwrap();
        let first = seed(directory.path(), None).unwrap();
        assert_ne!(first, [0, 0]);
        assert_eq!(seed(directory.path(), None).unwrap(), first);
        assert_eq!(seed(directory.path(), Some([1, 2])).unwrap(), [1, 2]);
        assert_eq!(seed(directory.path(), None).unwrap(), [1, 2]);
        let mode = fs::metadata(directory.path().join("seed")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
