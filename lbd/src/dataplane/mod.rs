//! The only module that touches BPF: load, pin, attach, fill the maps, next hops, announcements, counters.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;

use lbd_common::abi;
use tokio::sync::watch;

use crate::config::{Config, SegmentName};
use crate::plan::model::{HostFacts, Notice, Plan};

mod error;

pub use error::DataplaneError;

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

/// The running data plane. Dropping it leaves everything pinned and forwarding.
pub struct Dataplane {}

impl Dataplane {
    /// Opens the pinned maps (ABI and shapes checked) or creates them, loads the programs, and attaches them or replaces the attached
    /// ones atomically. Starts the threads that follow netlink, announce addresses and retire flows.
    pub fn start(config: &Config, object: &[u8]) -> Result<Self, DataplaneError> {
        let _ = (config, object);
        Err(DataplaneError::NoObject)
    }

    /// Takes a reloaded configuration: pools to check ahead of need, timeouts. What needs a restart is not looked at.
    pub fn reconfigure(&mut self, config: &Config) -> Result<(), DataplaneError> {
        let _ = config;
        Ok(())
    }

    /// Makes the maps hold the plan: writes differences only, in an order in which no packet sees half of a change.
    ///
    /// May take as long as a few RCU grace periods: call it where blocking is allowed. After [`DataplaneError::Partial`] or another
    /// error the maps are consistent and the call may be repeated.
    pub fn apply(&mut self, plan: &Plan) -> Result<Applied, DataplaneError> {
        let _ = plan;
        Ok(Applied::default())
    }

    /// The host's interfaces, kept up to date.
    pub fn facts(&self) -> watch::Receiver<HostFacts> {
        watch::channel(HostFacts::default()).1
    }

    /// Addresses of pools and VIPs that another station answers for.
    pub fn taken(&self) -> watch::Receiver<BTreeSet<(SegmentName, IpAddr)>> {
        watch::channel(BTreeSet::default()).1
    }

    /// What an operator should know: address conflicts, a fall-back to generic mode, a next hop that does not answer.
    pub fn notices(&self) -> watch::Receiver<Vec<Notice>> {
        watch::channel(Vec::new()).1
    }

    /// Interfaces with the mode in force.
    pub fn attached(&self) -> Vec<Attached> {
        Vec::new()
    }

    /// Marks and deletes flows, both halves. Returns how many there were.
    pub fn remove_flows(&self, keys: &[abi::FlowKey4]) -> Result<u64, DataplaneError> {
        let _ = keys;
        Ok(0)
    }
}

/// A flow: both halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowPair {
    /// Client → VIP, as it arrives.
    pub key: abi::FlowKey4,
    /// The forward half.
    pub forward: abi::Flow4,
    /// The reverse half, if it was found.
    pub reverse: Option<abi::Flow4>,
    /// Segment of the backend; 0 if it is not known any more.
    pub backend_segment: u16,
}

/// How full a map is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fill {
    /// Map name.
    pub name: &'static str,
    /// Entries that it can hold.
    pub max: u32,
    /// Entries in use, where that means something.
    pub used: Option<u64>,
}

/// A read-only view of the pinned maps; works with the agent dead.
pub struct Pins {}

impl Pins {
    /// Opens the pins below `bpffs`.
    pub fn open(bpffs: &Path) -> Result<Self, DataplaneError> {
        Err(DataplaneError::NotThere { path: bpffs.join("lbd") })
    }

    /// What the agent last told the datapath.
    pub fn settings(&self) -> Result<abi::Settings, DataplaneError> {
        Ok(abi::Settings::ZERO)
    }

    /// The datapath's clock now, in ticks.
    pub fn now(&self) -> Result<u32, DataplaneError> {
        Ok(0)
    }

    /// All live flows.
    pub fn flows(&self) -> Result<Vec<FlowPair>, DataplaneError> {
        Ok(Vec::new())
    }

    /// Half-open connections whose record may be read.
    pub fn half_open(&self) -> Result<Vec<abi::HalfOpen4>, DataplaneError> {
        Ok(Vec::new())
    }

    /// All frontends.
    pub fn frontends(&self) -> Result<Vec<abi::Frontend>, DataplaneError> {
        Ok(Vec::new())
    }

    /// The slots of a frontend's lookup table: backend ids.
    pub fn table(&self, frontend: &abi::Frontend) -> Result<Vec<u16>, DataplaneError> {
        let _ = frontend;
        Ok(Vec::new())
    }

    /// Backends in use, by id.
    pub fn backends(&self) -> Result<BTreeMap<u16, abi::Backend>, DataplaneError> {
        Ok(BTreeMap::new())
    }

    /// Addresses by segment.
    pub fn addresses(&self) -> Result<Vec<(abi::AddressKey, abi::LocalAddress)>, DataplaneError> {
        Ok(Vec::new())
    }

    /// Segments by index in map `segments`.
    pub fn segments(&self) -> Result<BTreeMap<u32, abi::Segment>, DataplaneError> {
        Ok(BTreeMap::new())
    }

    /// Next hops in use by index, with the address that each stands for (`None`: the client's own MAC, or a gateway slot without one).
    pub fn next_hops(&self) -> Result<BTreeMap<u16, (Option<IpAddr>, abi::NextHop)>, DataplaneError> {
        Ok(BTreeMap::new())
    }

    /// Limits and use of tenants that have any.
    pub fn tenants(&self) -> Result<BTreeMap<u16, (abi::Tenant, abi::TenantUse)>, DataplaneError> {
        Ok(BTreeMap::new())
    }

    /// Counters of reasons by (tenant, number of the reason), summed over CPUs, without zeros.
    pub fn reasons(&self) -> Result<BTreeMap<(u16, u8), u64>, DataplaneError> {
        Ok(BTreeMap::new())
    }

    /// Counters of frontends by id, summed over CPUs, without those that are all zero.
    pub fn frontend_counters(&self) -> Result<BTreeMap<u16, abi::FrontendCounters>, DataplaneError> {
        Ok(BTreeMap::new())
    }

    /// Interfaces that carry our program, with the mode in force.
    pub fn attached(&self) -> Result<Vec<Attached>, DataplaneError> {
        Ok(Vec::new())
    }

    /// How full the tables are. Counts flows, so it takes as long as [`Self::flows`].
    pub fn fill(&self) -> Result<Vec<Fill>, DataplaneError> {
        Ok(Vec::new())
    }
}

/// What [`detach`] removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Detached {
    /// Interfaces that our program was taken from.
    pub interfaces: Vec<String>,
    /// Pinned maps removed.
    pub maps: u32,
    /// Neighbour entries released.
    pub neighbours: u32,
}

impl Detached {
    /// There was nothing to remove.
    pub fn is_empty(&self) -> bool {
        self.interfaces.is_empty() && self.maps == 0 && self.neighbours == 0
    }
}

/// Removes everything of lbd's from the kernel: links first, then maps. Works from the pins alone; a second call finds nothing.
pub fn detach(bpffs: &Path) -> Result<Detached, DataplaneError> {
    let _ = bpffs;
    Ok(Detached::default())
}

/// The host's interfaces now; needs no privileges.
pub fn host_facts() -> Result<HostFacts, DataplaneError> {
    Ok(HostFacts::default())
}

/// Looks at the host without changing it: capabilities, BPF file system, interfaces, offloads, MTU.
pub fn preflight(config: &Config) -> Vec<Problem> {
    let _ = config;
    Vec::new()
}

/// Memory that the maps will take, by name, in bytes, on a machine with this many possible CPUs.
pub fn map_memory(config: &Config, cpus: u32) -> Vec<(&'static str, u64)> {
    let _ = (config, cpus);
    Vec::new()
}
