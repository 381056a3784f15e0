//! One round of the main loop, without its clocks and channels: what is known → addresses → plan → maps.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::events::{Events, Happening, time};
use super::exhaustion::{self, Exhausted};
use super::state::{ADDRESSES, IDS, StateDirectory};
use crate::api::types::{ApplyStatus, ConfigStatus};
use crate::config::{Config, SegmentName};
use crate::dataplane::{Applied, Attached, Dataplane, DataplaneError, Pins};
use crate::flows::{Directory, Filter, Flow, Live, Matcher};
use crate::ipam::record::Found;
use crate::ipam::{Assignments, Entry, Ipam, Record};
use crate::plan::Planner;
use crate::plan::model::{FrontendBackend, Health, HostFacts, Notice, Pinned, Plan};
use crate::source::{Inventory, ObjectName, Service};

/// By how much a new agent's record outranks the last one's: more than that one can have changed unseen.
const TENURE: u64 = 1 << 20;

/// What the main loop needs of the data plane; a test may put something else in its place.
pub(crate) trait Maps {
    /// See [`Dataplane::apply`].
    fn apply(&mut self, plan: &Arc<Plan>) -> Result<Applied, DataplaneError>;
    /// See [`Dataplane::reconfigure`].
    fn reconfigure(&mut self, config: &Config) -> Result<(), DataplaneError>;
    /// See [`Dataplane::attached`].
    fn attached(&self) -> Vec<Attached>;
    /// See [`Dataplane::pinned`].
    fn pinned(&self) -> Pinned;
    /// How many live flows are meant.
    fn count_flows(&self, config: &Config, meant: &(dyn Fn(&Flow) -> bool + Sync)) -> Result<u64, DataplaneError>;
}

impl Maps for Dataplane {
    fn apply(&mut self, plan: &Arc<Plan>) -> Result<Applied, DataplaneError> {
        Self::apply(self, Arc::clone(plan))
    }

    fn reconfigure(&mut self, config: &Config) -> Result<(), DataplaneError> {
        Self::reconfigure(self, config)
    }

    fn attached(&self) -> Vec<Attached> {
        Self::attached(self)
    }

    fn pinned(&self) -> Pinned {
        Self::pinned(self).clone()
    }

    fn count_flows(&self, config: &Config, meant: &(dyn Fn(&Flow) -> bool + Sync)) -> Result<u64, DataplaneError> {
        let pins = Pins::open(&config.datapath.bpffs)?;
        let live = Live::new(&pins)?;
        let (all, directory) = (Filter::default(), Directory::default());
        let counts = live.fold(
            &Matcher::new(&all, &directory, live.clock),
            || 0,
            |count: &mut u64, flow| *count += u64::from(meant(&flow)),
        )?;
        Ok(counts.into_iter().sum())
    }
}

/// What this agent does for its hub.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Role {
    /// It gives out addresses and announces them.
    #[default]
    Acting,
    /// Another does.
    Standby {
        /// Who, if known.
        holder: String,
    },
}

/// Everything that a plan is made of and that comes from outside.
#[derive(Clone, Debug, Default)]
pub(crate) struct Inputs {
    /// Services and nodes.
    pub inventory: Arc<Inventory>,
    /// Results of probes.
    pub health: Arc<Health>,
    /// Interfaces.
    pub host: HostFacts,
    /// Addresses that others answer for.
    pub taken: BTreeSet<(SegmentName, IpAddr)>,
    /// Notices of the data plane.
    pub host_notices: Vec<Notice>,
    /// Notices of the source.
    pub source_notices: Vec<Notice>,
    /// Whether to act.
    pub role: Role,
    /// The record of addresses that the cluster kept, as it was first read.
    pub record_found: Option<Arc<Found>>,
    /// The cluster's record has this generation, which is not of ours.
    pub record_above: Option<u64>,
    /// Another agent acted before.
    pub succeeded: bool,
    /// The cluster has been silent for longer than this, and must not be for its last state to be acted on.
    pub blind: Option<Duration>,
    /// Frontends for which SNAT ports have run out.
    pub exhausted: Vec<Exhausted>,
}

/// What the addresses of Services were decided from.
struct Assigned {
    config: Arc<Config>,
    inventory: Arc<Inventory>,
    host: HostFacts,
    taken: BTreeSet<(SegmentName, IpAddr)>,
    role: Role,
    /// Of the record.
    generation: u64,
    /// Minute: reservations run out.
    minute: i64,
}

impl Assigned {
    fn from(config: &Arc<Config>, inputs: &Inputs, generation: u64, now: Timestamp) -> Self {
        Self {
            config: Arc::clone(config),
            inventory: Arc::clone(&inputs.inventory),
            host: inputs.host.clone(),
            taken: inputs.taken.clone(),
            role: inputs.role.clone(),
            generation,
            minute: now.as_second() / 60,
        }
    }

    /// Whether everything but the inventory is the same.
    fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.config, &other.config)
            && self.host == other.host
            && self.taken == other.taken
            && self.role == other.role
            && self.generation == other.generation
            && self.minute == other.minute
    }
}

/// What a plan was made from.
struct Planned {
    config: Arc<Config>,
    inventory: Arc<Inventory>,
    assignments: Arc<Assignments>,
    health: Arc<Health>,
    host: HostFacts,
    role: Role,
    blind: Option<Duration>,
}

impl Planned {
    fn from(config: &Arc<Config>, assignments: &Arc<Assignments>, inputs: &Inputs) -> Self {
        Self {
            config: Arc::clone(config),
            inventory: Arc::clone(&inputs.inventory),
            assignments: Arc::clone(assignments),
            health: Arc::clone(&inputs.health),
            host: inputs.host.clone(),
            role: inputs.role.clone(),
            blind: inputs.blind,
        }
    }

    /// Whether the plan would be the same: it does not depend on what the statuses of Services show.
    fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.config, &other.config)
            && Arc::ptr_eq(&self.assignments, &other.assignments)
            && Arc::ptr_eq(&self.health, &other.health)
            && self.host == other.host
            && self.role == other.role
            && self.blind == other.blind
            && self.inventory.is_same_but_for_statuses(&other.inventory)
    }
}

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Map elements written or deleted.
    pub map_writes: u64,
    /// Flows removed because a plan reset them.
    pub flows_reset: u64,
    /// Reloads that came into force.
    pub reloads: u64,
    /// Reloads that were refused.
    pub reloads_refused: u64,
}

/// The state of the main loop.
pub(crate) struct Core<M> {
    pub(super) config: Arc<Config>,
    pub(super) maps: M,
    pub(super) ipam: Ipam,
    pub(super) planner: Planner,
    state: Arc<StateDirectory>,
    pub(super) plan: Arc<Plan>,
    pub(super) assignments: Arc<Assignments>,
    /// What [`Self::ipam`] has on record, to be shown.
    pub(super) record: Arc<Record>,
    /// The maps hold [`Self::plan`].
    pub(super) in_maps: bool,
    /// Some plan has been in the maps in this life.
    pub(super) ever: bool,
    pub(super) apply_status: ApplyStatus,
    pub(super) config_status: ConfigStatus,
    pub(super) counts: Counts,
    pub(super) events: Events,
    assigned: Option<Assigned>,
    planned: Option<Planned>,
    /// Grows whenever something has changed that statuses are made of.
    pub(super) revision: u64,
    /// Revisions of the ids on disk: of all of them, and of what must be there before the maps change.
    saved_ids: Option<(u64, u64)>,
    saved_generation: Option<u64>,
    /// What has been made of the cluster's record.
    found: Option<Arc<Found>>,
}

impl<M: Maps> Core<M> {
    /// Starts from what an earlier life has left on disk.
    pub(crate) fn new(config: Config, maps: M, state: Arc<StateDirectory>, now: Timestamp) -> Self {
        let config_status =
            ConfigStatus { file: config.origin.file.clone(), loaded: time(now), stale: false, error: None };
        let planner = Planner::restored(state.load(IDS), &maps.pinned(), &config);
        Self {
            config: Arc::new(config),
            maps,
            ipam: Ipam::new(state.load(ADDRESSES).unwrap_or_default()),
            planner,
            state,
            plan: Arc::default(),
            assignments: Arc::default(),
            record: Arc::default(),
            in_maps: false,
            ever: false,
            apply_status: ApplyStatus::default(),
            config_status,
            counts: Counts::default(),
            events: Events::default(),
            assigned: None,
            planned: None,
            revision: 0,
            saved_ids: None,
            saved_generation: None,
            found: None,
        }
    }

    /// The record is on disk as it is.
    pub(crate) fn saved(&self) -> bool {
        self.saved_generation == Some(self.ipam.record().generation)
    }

    /// Takes in the record that the cluster kept.
    fn take_record(&mut self, inputs: &Inputs, now: Timestamp) {
        match (&inputs.record_found, &self.found) {
            (Some(new), Some(old)) if Arc::ptr_eq(new, old) => {}
            (Some(found), _) => {
                let before = self.ipam.record().generation;
                let mut record = found.record.clone();
                let left_out = record.keep_plausible(&self.config, |entry| self.vouches(entry, &inputs.inventory));
                if left_out > 0 {
                    let text = format!(
                        "the record of addresses in the cluster holds {left_out} addresses that no pool of their tenant has: they are \
                         left out"
                    );
                    self.tell(true, "RecordImplausible", &text, now);
                }
                let generation = record.generation;
                if let Some(problem) = &found.problem {
                    let text = format!(
                        "the record of addresses in the cluster is damaged ({problem}): it is replaced by the one on disk, and by \
                         what of it can be read"
                    );
                    self.tell(true, "RecordDamaged", &text, now);
                    // Of what is damaged, nothing counts before what is not.
                    record.generation = 0;
                }
                if self.ipam.restore(record) {
                    let text = format!(
                        "addresses taken from the record in the cluster: generation {before}, now {}",
                        self.ipam.record().generation
                    );
                    self.tell(false, "RecordRestored", &text, now);
                }
                if found.problem.is_some() || left_out > 0 {
                    self.ipam.outrank(generation);
                } else if inputs.succeeded {
                    // Whatever the other still believes to have given out must not count any more.
                    self.ipam.outrank(generation + TENURE);
                }
                self.found = Some(Arc::clone(found));
            }
            (None, Some(_)) => self.found = None,
            (None, None) => {}
        }
        if let Some(above) = inputs.record_above
            && self.found.is_some()
            && above >= self.ipam.record().generation
        {
            let text = "another program has written the record of addresses in the cluster: it is replaced by ours";
            self.tell(true, "RecordContended", text, now);
            self.ipam.outrank(above);
        }
    }

    /// Whether an address of the cluster's record is no news: the disk has it too, or the status of the Service shows it, by our hand.
    fn vouches(&self, entry: &Entry, inventory: &Inventory) -> bool {
        let shows = |service: &Service| {
            service.published && service.ingress.iter().any(|shown| shown.parse().ok() == Some(entry.address))
        };
        let same = |known: &Entry| {
            (&known.tenant, &known.service, known.address) == (&entry.tenant, &entry.service, entry.address)
        };
        inventory.services.get(&entry.service).is_some_and(shows) || self.ipam.record().entries.iter().any(same)
    }

    /// Takes over a Service that shows an address which is not ours. Returns its UID.
    pub(crate) fn adopt(&mut self, name: &ObjectName, inputs: &Inputs, now: Timestamp) -> Result<String, String> {
        if inputs.role != Role::Acting {
            return Err("another agent serves this hub: ask that one, see `lbctl status`".to_owned());
        }
        let Some(service) = inputs.inventory.services.get(name) else {
            return Err(format!("there is no Service {name}"));
        };
        let foreign = self
            .assignments
            .notices
            .iter()
            .any(|notice| notice.reason == "ForeignAddress" && notice.service.as_ref() == Some(name));
        if !foreign {
            return Err(match self.assignments.services.get(name).map(|known| (known.claimed, &known.addresses)) {
                Some((true, addresses)) if !addresses.is_empty() => {
                    format!("the Service {name} is ours already, with {}", addresses[0])
                }
                Some(_) => format!("the Service {name} shows no foreign address: see `lbctl events`"),
                None => format!("no tenant claims the Service {name}: change a `claim` in the configuration"),
            });
        }
        let uid = service.uid.clone();
        self.ipam.adopt(name.clone(), uid.clone());
        self.tell(false, "Adopted", &format!("the Service {name} is taken over"), now);
        Ok(uid)
    }

    /// Whether the inventory may be acted upon: without its first complete list the file alone decides nothing.
    pub(crate) fn may_act(&self, inputs: &Inputs) -> bool {
        self.config.hub.kubernetes.is_none() || inputs.inventory.complete
    }

    /// Whether another agent acts and nothing of ours is in the maps: what an earlier life has left there goes on.
    pub(super) fn waits(&self, inputs: &Inputs) -> bool {
        inputs.role != Role::Acting && !self.ever
    }

    /// Brings addresses, plan and maps to what is known now. Returns false if it must be called again soon.
    pub(crate) fn reconcile(&mut self, inputs: &Inputs, now: Timestamp) -> bool {
        if !self.may_act(inputs) {
            self.tell_notices(inputs, now);
            return true;
        }
        if self.waits(inputs) {
            self.tell_notices(inputs, now);
            return true;
        }
        let standby = inputs.role != Role::Acting;
        self.take_record(inputs, now);
        let assigned = Assigned::from(&self.config, inputs, self.ipam.record().generation, now);
        // Nothing of it has changed when only a probe or a node has: one that dies must be out of the maps at once.
        let same = self.assigned.as_ref().is_some_and(|before| {
            before.is_same(&assigned)
                && self.ipam.decides_the_same(&self.config, &self.assignments, &before.inventory, &assigned.inventory)
        });
        if same {
            self.assigned = Some(assigned);
        } else {
            self.assignments = Arc::new(if standby {
                self.frozen(&self.config, inputs, now)
            } else {
                self.ipam.assign(&self.config, &inputs.inventory, &inputs.host, &inputs.taken, now.as_second())
            });
            self.assigned = Some(Assigned { generation: self.ipam.record().generation, ..assigned });
            self.revision += 1;
        }
        let planned = Planned::from(&self.config, &self.assignments, inputs);
        let same = self.planned.as_ref().is_some_and(|before| before.is_same(&planned));
        self.planned = Some(planned);
        if same && self.in_maps && self.plan.resets.is_empty() {
            // Whether an address for which there is no room is shown depends on whether it is shown already.
            self.revision += u64::from(self.events.lasting().iter().any(|notice| notice.reason == "TooManyFrontends"));
            self.keep_records(now);
            // What could not be written when the maps had been.
            self.keep_ids(now);
            self.tell_notices(inputs, now);
            return true;
        }
        self.revision += 1;
        let begun = Instant::now();
        let mut plan =
            self.planner.plan(&self.config, &inputs.inventory, &self.assignments, &inputs.health, &inputs.host);
        restrain(&mut plan, inputs);
        tracing::debug!(frontends = plan.frontends.len(), took = ?begun.elapsed(), "plan made");
        self.keep_records(now);
        let done = if self.in_maps && *self.plan == plan {
            self.keep_ids(now);
            true
        } else {
            self.apply(plan, now)
        };
        self.tell_notices(inputs, now);
        done
    }

    /// What Services have, while another agent gives out addresses: nothing new, and nothing is freed.
    pub(super) fn frozen(&self, config: &Config, inputs: &Inputs, now: Timestamp) -> Assignments {
        let inventory = Inventory { complete: false, ..(*inputs.inventory).clone() };
        let mut ipam = Ipam::new(self.ipam.record().clone());
        ipam.assign(config, &inventory, &inputs.host, &inputs.taken, now.as_second())
    }

    /// Puts a plan into the maps.
    pub(super) fn apply(&mut self, plan: Plan, now: Timestamp) -> bool {
        self.plan = Arc::new(plan);
        self.revision += 1;
        let begun = Instant::now();
        let result = self.maps.apply(&self.plan);
        let took = begun.elapsed();
        self.in_maps = result.is_ok();
        if result.is_ok() {
            self.planner.applied();
        }
        self.keep_ids(now);
        match result {
            Ok(applied) => {
                self.ever = true;
                self.counts.map_writes += applied.map_writes;
                self.counts.flows_reset += applied.flows_reset;
                self.apply_status.applied += 1;
                self.apply_status.last = time(now);
                if self.apply_status.error.take().is_some() {
                    self.tell(false, "ApplyRecovered", "the datapath holds the plan again", now);
                }
                tracing::debug!(writes = applied.map_writes, resets = applied.flows_reset, ?took, "plan applied");
                true
            }
            Err(error) => {
                let message = error.to_string();
                self.apply_status.failed += 1;
                if self.apply_status.error.as_ref() != Some(&message) {
                    let text = format!("the datapath could not be changed, trying again: {message}");
                    self.tell(true, "ApplyFailed", &text, now);
                }
                self.apply_status.error = Some(message);
                false
            }
        }
    }

    pub(super) fn tell(&mut self, warning: bool, reason: &'static str, message: &str, now: Timestamp) {
        self.events.tell(Happening { warning, reason, message: message.to_owned(), ..Happening::default() }, now);
    }

    /// Tells which backends have come or gone. A first result is told only if it is bad.
    pub(super) fn tell_health(&mut self, before: &Health, after: &Health, now: Timestamp) {
        /// Single backends told in one round; more than that are a number.
        const TOLD: usize = 32;
        let mut changes = Vec::new();
        for (target, known) in after {
            let was = before.get(target).and_then(|was| was.up);
            if let Some(up) = known.up
                && was != Some(up)
                && !(up && was.is_none())
            {
                changes.push((target, up, known.cause.as_str()));
            }
        }
        let rest = changes.split_off(changes.len().min(TOLD));
        for (target, up, cause) in changes {
            let state = if up { "up" } else { "down" };
            let reason = if up { "BackendUp" } else { "BackendDown" };
            let socket = std::net::SocketAddr::new(target.address, target.port);
            self.tell(!up, reason, &format!("{socket} on {} is {state}: {cause}", target.interface), now);
        }
        if !rest.is_empty() {
            let down = rest.iter().filter(|(_, up, _)| !up).count();
            let text = format!("{down} more backends are down, {} more are up", rest.len() - down);
            self.tell(down > 0, "BackendsChanged", &text, now);
        }
    }

    fn tell_notices(&mut self, inputs: &Inputs, now: Timestamp) {
        let all = self
            .assignments
            .notices
            .iter()
            .chain(&self.plan.notices)
            .chain(&inputs.host_notices)
            .chain(&inputs.source_notices)
            .chain(&exhaustion::notices(&inputs.exhausted))
            .cloned()
            .collect();
        if self.events.set_lasting(all, now) {
            self.revision += 1;
        }
    }

    /// Addresses must be on disk before anybody is told of them, ids given out before the maps hold them.
    pub(super) fn keep_records(&mut self, now: Timestamp) {
        let generation = self.ipam.record().generation;
        if self.record.generation != generation {
            self.record = Arc::new(self.ipam.record().clone());
        }
        if self.saved_generation != Some(generation) {
            match self.state.save(ADDRESSES, self.ipam.record()) {
                Ok(()) => self.saved_generation = Some(generation),
                Err(error) => self.tell(true, "StateNotSaved", &error.to_string(), now),
            }
        }
        // What can wait until the maps are written does: a node that dies must be out of them at once.
        if self.saved_ids.map(|(_, binding)| binding) != Some(self.planner.binding_ids_revision()) {
            self.keep_ids(now);
        }
    }

    fn keep_ids(&mut self, now: Timestamp) {
        let revision = (self.planner.ids_revision(), self.planner.binding_ids_revision());
        if self.saved_ids == Some(revision) {
            return;
        }
        match self.state.save(IDS, self.planner.ids()) {
            Ok(()) => self.saved_ids = Some(revision),
            Err(error) => self.tell(true, "StateNotSaved", &error.to_string(), now),
        }
    }

    /// Notices by Service: what Events and conditions are made of.
    pub(crate) fn notices_by_service(&self) -> BTreeMap<&ObjectName, &Notice> {
        let mut all: BTreeMap<_, &Notice> = BTreeMap::new();
        for notice in self.events.lasting() {
            if let Some(service) = &notice.service {
                let known = all.entry(service).or_insert(notice);
                if !leaves_out(known) && leaves_out(notice) {
                    *known = notice;
                }
            }
        }
        all
    }
}

/// Takes out of a plan what this agent may not do now: announce while another acts, and open connections while it is blind.
pub(super) fn restrain(plan: &mut Plan, inputs: &Inputs) {
    plan.quiet = inputs.role != Role::Acting;
    if let Some(most) = inputs.blind {
        refuse_new(plan, most);
    }
}

/// Nobody knows any more whose the NodePorts are: flows go on, new ones are refused.
fn refuse_new(plan: &mut Plan, most: Duration) {
    for frontend in plan.frontends.values_mut().filter(|frontend| frontend.service.is_some()) {
        let frontend = Arc::make_mut(frontend);
        frontend.table = None;
        if frontend.backends.iter().any(|backend| backend.serving) {
            let backends = frontend.backends.iter().cloned();
            frontend.backends = backends.map(|backend| FrontendBackend { serving: false, ..backend }).collect();
        }
    }
    plan.notices.push(Notice {
        reason: "Blind",
        service: None,
        tenant: None,
        message: format!(
            "the cluster has been silent for more than max_blind ({} s): new connections to its Services are refused until it answers",
            most.as_secs()
        ),
    });
}

/// Whether a notice says that something of a Service is not in the datapath.
pub(crate) fn leaves_out(notice: &Notice) -> bool {
    matches!(
        notice.reason,
        "NodePortMissing" | "NoSnatAddress" | "PortClash" | "PortInvalid" | "ProtocolUnsupported" | "TooManyFrontends"
    )
}

#[cfg(test)]
pub(super) mod testing {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;

    /// A file that is valid without a host.
    pub(crate) const CONFIG: &str = "\
version: 1
hubs: [{ name: hub, interface: hub0, snat: [10.0.0.2], node_cidrs: [10.0.0.0/24] }]
tenants:
  - name: a
    segment: { interface: ten0, address: 192.0.2.2/24 }
    pools: [192.0.2.32/28]
    frontends:
      - { name: web, vip: 192.0.2.34, ports: [443], backends: [10.0.0.11] }
";

    /// What happens in a fake data plane.
    #[derive(Default)]
    pub(crate) struct Record {
        pub plans: Vec<Plan>,
        pub failures: u32,
        pub reconfigured: u32,
        pub flows: Vec<Flow>,
        /// A file, and what it held whenever a plan came.
        pub watched: std::path::PathBuf,
        pub seen: Vec<String>,
    }

    /// A data plane without a kernel.
    #[derive(Clone, Default)]
    pub(crate) struct FakeMaps(pub Rc<RefCell<Record>>);

    impl Maps for FakeMaps {
        fn apply(&mut self, plan: &Arc<Plan>) -> Result<Applied, DataplaneError> {
            let mut record = self.0.borrow_mut();
            let seen = std::fs::read_to_string(&record.watched).unwrap_or_default();
            record.seen.push(seen);
            if record.failures > 0 {
                record.failures -= 1;
                return Err(DataplaneError::Partial { failed: 1, first: "frontends: injected".to_owned() });
            }
            record.plans.push((**plan).clone());
            Ok(Applied { map_writes: 1, flows_reset: 0 })
        }

        fn reconfigure(&mut self, _: &Config) -> Result<(), DataplaneError> {
            self.0.borrow_mut().reconfigured += 1;
            Ok(())
        }

        fn attached(&self) -> Vec<Attached> {
            Vec::new()
        }

        fn pinned(&self) -> Pinned {
            Pinned::default()
        }

        fn count_flows(&self, _: &Config, meant: &(dyn Fn(&Flow) -> bool + Sync)) -> Result<u64, DataplaneError> {
            Ok(self.0.borrow().flows.iter().filter(|flow| meant(flow)).count() as u64)
        }
    }

    /// A core on a fake data plane, with its file and state in a directory of its own.
    pub(crate) struct Bench {
        pub directory: tempfile::TempDir,
        pub maps: FakeMaps,
        pub core: Core<FakeMaps>,
        pub inputs: Inputs,
    }

    impl Bench {
        pub(crate) fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let state = Arc::new(StateDirectory::open(&directory.path().join("state")).unwrap());
            let path = directory.path().join("lbd.yaml");
            std::fs::write(&path, CONFIG).unwrap();
            let maps = FakeMaps::default();
            let config = crate::config::load(&path).unwrap();
            let core = Core::new(config, maps.clone(), state, Timestamp::UNIX_EPOCH);
            Self { directory, maps, core, inputs: Inputs { host: host(), ..Inputs::default() } }
        }

        pub(crate) fn path(&self) -> std::path::PathBuf {
            self.directory.path().join("lbd.yaml")
        }

        pub(crate) fn round(&mut self) -> bool {
            self.core.reconcile(&self.inputs, Timestamp::UNIX_EPOCH)
        }
    }

    /// The bench's two interfaces.
    pub(crate) fn host() -> HostFacts {
        let interface = |index, address: &str| crate::plan::model::InterfaceFacts {
            index,
            mac: [2, 0, 0, 0, 0, index as u8],
            mtu: 1500,
            up: true,
            addresses: vec![address.parse().unwrap()],
            all_addresses: vec![address.parse().unwrap()],
            gateways: Vec::new(),
            routes: BTreeMap::new(),
            vlan: None,
        };
        let interfaces =
            [("ten0".to_owned(), interface(2, "192.0.2.2/24")), ("hub0".to_owned(), interface(3, "10.0.0.2/24"))];
        HostFacts { interfaces: interfaces.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::Bench;
    use super::*;

    #[test]
    fn b01_a_failed_write_is_retried_and_told() {
        let mut bench = Bench::new();
        bench.maps.0.borrow_mut().failures = 2;
        assert!(!bench.round(), "asks to be called again");
        assert!(!bench.round());
        assert_eq!(bench.core.apply_status.failed, 2);
        assert!(bench.core.apply_status.error.as_deref().unwrap().contains("injected"));
        assert!(!bench.core.ever);
        assert!(bench.round());
        assert_eq!((bench.core.apply_status.applied, bench.core.apply_status.error.clone()), (1, None));
        let events = bench.core.events.all();
        let reasons: Vec<&str> = events.iter().map(|event| event.reason.as_str()).collect();
        assert!(reasons.windows(2).any(|pair| pair == ["ApplyFailed", "ApplyRecovered"]), "{reasons:?}");
        assert_eq!(reasons.iter().filter(|&&reason| reason == "ApplyFailed").count(), 1, "told once");
    }

    #[test]
    fn nothing_new_is_not_applied_again() {
        let mut bench = Bench::new();
        for _ in 0..3 {
            assert!(bench.round());
        }
        // The first plan may carry resets that the second no longer does.
        assert!(bench.maps.0.borrow().plans.len() <= 2);
    }

    #[test]
    fn without_a_complete_list_nothing_is_applied() {
        let mut bench = Bench::new();
        let mut config = (*bench.core.config).clone();
        config.hub.kubernetes =
            Some(crate::config::Kubernetes { kubeconfig: "/nowhere".into(), allow_insecure: false, max_blind: None });
        bench.core.config = Arc::new(config);
        assert!(bench.round());
        assert!(bench.maps.0.borrow().plans.is_empty());
        bench.inputs.inventory = Arc::new(Inventory { complete: true, ..Inventory::default() });
        assert!(bench.round());
        assert_eq!(bench.maps.0.borrow().plans.len(), 1);
    }

    #[test]
    fn b15_an_address_outside_the_pools_survives_the_state_directory_and_a_takeover() {
        let name = ObjectName::new("n", "s");
        let outside: IpAddr = "192.0.2.100".parse().unwrap();
        let entry = Entry { tenant: "a".to_owned(), service: name.clone(), address: outside, freed: None };
        let record = Record { generation: 5, entries: vec![entry], ..Record::default() };
        // What the status shows, whether by our hand, what the disk has; whether the address is kept, and no word is lost about it.
        for (shown, published, disk, kept) in [
            ("192.0.2.100", true, false, true),
            ("192.0.2.100", false, false, false),
            ("192.0.2.40", true, false, false),
            ("192.0.2.40", true, true, true),
        ] {
            let mut bench = Bench::new();
            let text = testing::CONFIG
                .replace("snat:", "kubernetes: { kubeconfig: /k }, snat:")
                .replace("pools:", "claim: [{ namespaces: [n] }]\n    pools:");
            std::fs::write(bench.path(), text).unwrap();
            bench.core.config = Arc::new(crate::config::load(&bench.path()).unwrap());
            if disk {
                bench.core.ipam = Ipam::new(record.clone());
            }
            let mut service = crate::plan::testing::service("u", &[(6443, 30443)]);
            (service.ingress, service.published) = (vec![shown.to_owned()], published);
            let mut inventory = Inventory { complete: true, ..Inventory::default() };
            inventory.services.insert(name.clone(), service);
            bench.inputs.inventory = Arc::new(inventory);
            bench.inputs.record_found = Some(Arc::new(Found { record: record.clone(), problem: None }));
            bench.round();
            let case = format!("{shown} {published} {disk}");
            let found = &bench.core.assignments.services[&name];
            assert_eq!(found.addresses == [outside] && found.claimed, kept, "{case}: {found:?}");
            let told = bench.core.events.all().iter().any(|event| event.reason == "RecordImplausible");
            assert_eq!(told, !kept, "{case}");
        }
    }

    #[test]
    fn backends_that_come_and_go_are_events() {
        let mut bench = Bench::new();
        bench.round();
        let target = bench.core.plan.probes.first().unwrap().clone();
        let health = |up, cause: &str| -> Health {
            let known = crate::plan::model::TargetHealth { up, cause: cause.to_owned(), since: 0 };
            [(target.clone(), known)].into()
        };
        let steps = [
            health(None, ""),
            health(Some(true), "connected"),
            health(Some(false), "connection refused"),
            health(Some(false), "timeout"),
            health(Some(true), "connected"),
        ];
        for pair in steps.windows(2) {
            bench.core.tell_health(&pair[0], &pair[1], Timestamp::UNIX_EPOCH);
        }
        let told: Vec<String> = bench.core.events.all().into_iter().map(|event| event.message).collect();
        assert_eq!(
            told,
            ["10.0.0.11:443 on hub0 is down: connection refused", "10.0.0.11:443 on hub0 is up: connected"]
        );
    }

    #[test]
    fn ids_are_on_disk_before_the_maps_hold_them() {
        let mut bench = Bench::new();
        let state = bench.directory.path().join("state");
        bench.maps.0.borrow_mut().watched = state.join(IDS);
        bench.round();
        assert!(state.join(ADDRESSES).exists());
        // A node comes: it has got an id. One goes: that is found again by whoever comes after, and is written afterwards.
        let mut inventory = Inventory { complete: true, ..Inventory::default() };
        let node = |uid: &str| crate::source::Node {
            uid: uid.to_owned(),
            addresses: vec!["10.0.0.21".parse().unwrap()],
            excluded: false,
        };
        let mut service = crate::plan::testing::service("uid-one", &[(443, 30443)]);
        inventory.nodes.insert("node-one".to_owned(), node("uid-node"));
        service.kind = crate::source::ServiceKind::NodePort;
        let name = ObjectName::new("n", "s");
        inventory.services.insert(name.clone(), service.clone());
        let mut config = crate::config::load(&bench.path()).unwrap();
        config.tenants[0].frontends[0].service = Some(("n".to_owned(), "s".to_owned()));
        config.tenants[0].frontends[0].backends.clear();
        bench.core.config = Arc::new(config);
        let take = |bench: &mut Bench, inventory: &Inventory| {
            bench.inputs.inventory = Arc::new(inventory.clone());
            assert!(bench.round());
            let now = std::fs::read_to_string(bench.directory.path().join("state").join(IDS)).unwrap();
            (bench.maps.0.borrow().seen.last().unwrap().clone(), now)
        };
        let (before, _) = take(&mut bench, &inventory);
        assert!(before.contains("node-one") && before.contains("30443"), "{before}");
        inventory.services.get_mut(&name).unwrap().ports[0].node_port = 30444;
        let (before, _) = take(&mut bench, &inventory);
        assert!(before.contains("30444"), "the owner of a NodePort: {before}");
        inventory.nodes.insert("node-two".to_owned(), node("uid-other"));
        inventory.nodes.remove("node-one");
        let (before, _) = take(&mut bench, &inventory);
        assert!(before.contains("node-two"), "whose the address is: {before}");
        inventory.nodes.remove("node-two");
        let (_, after) = take(&mut bench, &inventory);
        assert!(!after.contains("node-two"), "{after}");
    }

    #[test]
    fn ids_that_could_not_be_written_are_written_when_they_can_be() {
        let mut bench = Bench::new();
        let state = bench.directory.path().join("state");
        let on_disk = || std::fs::read_to_string(state.join(IDS)).unwrap().contains(r#""port":443"#);
        while bench.round() && !bench.core.plan.resets.is_empty() {}
        assert!(on_disk());
        let mut config = (*bench.core.config).clone();
        config.tenants[0].frontends.clear();
        bench.core.config = Arc::new(config);
        // As if the disk were full.
        let away = bench.directory.path().join("away");
        std::fs::rename(&state, &away).unwrap();
        for _ in 0..3 {
            assert!(bench.round(), "the maps do not wait for the disk");
        }
        assert!(bench.core.plan.resets.is_empty());
        std::fs::rename(&away, &state).unwrap();
        assert!(on_disk());
        assert!(bench.round());
        assert!(!on_disk(), "a frontend that is gone");
    }

    #[test]
    fn what_a_status_shows_makes_no_other_plan() {
        let mut bench = Bench::new();
        let mut inventory = Inventory { complete: true, ..Inventory::default() };
        let name = ObjectName::new("n", "s");
        inventory.services.insert(name.clone(), crate::plan::testing::service("uid-one", &[(443, 30443)]));
        bench.inputs.inventory = Arc::new(inventory.clone());
        while bench.round() && !bench.core.plan.resets.is_empty() {}
        let (plan, revision) = (Arc::clone(&bench.core.plan), bench.core.revision);
        inventory.services.get_mut(&name).unwrap().published = true;
        bench.inputs.inventory = Arc::new(inventory.clone());
        assert!(bench.round());
        assert!(Arc::ptr_eq(&plan, &bench.core.plan) && bench.core.revision == revision);
        inventory.services.get_mut(&name).unwrap().ports[0].node_port = 1;
        bench.inputs.inventory = Arc::new(inventory);
        assert!(bench.round());
        assert!(bench.core.revision > revision);
    }
}
