//! One round of the main loop, without its clocks and channels: what is known → addresses → plan → maps.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use jiff::Timestamp;

use super::events::{Events, Happening, time};
use super::state::{ADDRESSES, IDS, StateDirectory};
use crate::api::types::{ApplyStatus, ConfigStatus};
use crate::config::{Config, SegmentName};
use crate::dataplane::{Applied, Attached, Dataplane, DataplaneError, Pins};
use crate::flows::{Directory, Filter, Flow, Live, Matcher};
use crate::ipam::{Assignments, Ipam, Record};
use crate::plan::Planner;
use crate::plan::model::{Health, HostFacts, Notice, Pinned, Plan};
use crate::source::Inventory;

/// What the main loop needs of the data plane; a test may put something else in its place.
pub(crate) trait Maps {
    /// See [`Dataplane::apply`].
    fn apply(&mut self, plan: &Plan) -> Result<Applied, DataplaneError>;
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
    fn apply(&mut self, plan: &Plan) -> Result<Applied, DataplaneError> {
        Self::apply(self, plan)
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
}

/// What the addresses of Services were decided from.
struct Assigned {
    config: Arc<Config>,
    inventory: Arc<Inventory>,
    host: HostFacts,
    taken: BTreeSet<(SegmentName, IpAddr)>,
    /// Minute: reservations run out.
    minute: i64,
}

impl Assigned {
    fn from(config: &Arc<Config>, inputs: &Inputs, now: Timestamp) -> Self {
        Self {
            config: Arc::clone(config),
            inventory: Arc::clone(&inputs.inventory),
            host: inputs.host.clone(),
            taken: inputs.taken.clone(),
            minute: now.as_second() / 60,
        }
    }

    fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.config, &other.config)
            && Arc::ptr_eq(&self.inventory, &other.inventory)
            && self.host == other.host
            && self.taken == other.taken
            && self.minute == other.minute
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
    /// Revision of the ids on disk.
    saved_ids: Option<u64>,
    saved_generation: Option<u64>,
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
            saved_ids: None,
            saved_generation: None,
        }
    }

    /// Whether the inventory may be acted upon: without its first complete list the file alone decides nothing.
    pub(crate) fn may_act(&self, inputs: &Inputs) -> bool {
        self.config.hub.kubernetes.is_none() || inputs.inventory.complete
    }

    /// Brings addresses, plan and maps to what is known now. Returns false if it must be called again soon.
    pub(crate) fn reconcile(&mut self, inputs: &Inputs, now: Timestamp) -> bool {
        if !self.may_act(inputs) {
            self.tell_notices(inputs, now);
            return true;
        }
        let assigned = Assigned::from(&self.config, inputs, now);
        // Nothing of it has changed when only a probe has: a node that dies must be out of the maps at once.
        if !self.assigned.as_ref().is_some_and(|before| before.is_same(&assigned)) {
            self.assignments = Arc::new(self.ipam.assign(
                &self.config,
                &inputs.inventory,
                &inputs.host,
                &inputs.taken,
                now.as_second(),
            ));
            self.assigned = Some(assigned);
        }
        let plan = self.planner.plan(&self.config, &inputs.inventory, &self.assignments, &inputs.health, &inputs.host);
        self.keep_records(now);
        let done = if self.in_maps && *self.plan == plan { true } else { self.apply(plan, now) };
        self.tell_notices(inputs, now);
        done
    }

    /// Puts a plan into the maps.
    pub(super) fn apply(&mut self, plan: Plan, now: Timestamp) -> bool {
        self.plan = Arc::new(plan);
        let result = self.maps.apply(&self.plan);
        self.in_maps = result.is_ok();
        match result {
            Ok(applied) => {
                self.planner.applied();
                self.keep_ids(now);
                self.ever = true;
                self.counts.map_writes += applied.map_writes;
                self.counts.flows_reset += applied.flows_reset;
                self.apply_status.applied += 1;
                self.apply_status.last = time(now);
                if self.apply_status.error.take().is_some() {
                    self.tell(false, "ApplyRecovered", "the datapath holds the plan again", now);
                }
                tracing::debug!(writes = applied.map_writes, resets = applied.flows_reset, "plan applied");
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
            .cloned()
            .collect();
        self.events.set_lasting(all, now);
    }

    /// Addresses must be on disk before anybody is told of them, ids before the maps hold them.
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
        self.keep_ids(now);
    }

    fn keep_ids(&mut self, now: Timestamp) {
        let revision = self.planner.ids_revision();
        if self.saved_ids == Some(revision) {
            return;
        }
        match self.state.save(IDS, self.planner.ids()) {
            Ok(()) => self.saved_ids = Some(revision),
            Err(error) => self.tell(true, "StateNotSaved", &error.to_string(), now),
        }
    }

    /// Notices by Service: what Events and conditions are made of.
    pub(crate) fn notices_by_service(&self) -> BTreeMap<&crate::source::ObjectName, &Notice> {
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
    }

    /// A data plane without a kernel.
    #[derive(Clone, Default)]
    pub(crate) struct FakeMaps(pub Rc<RefCell<Record>>);

    impl Maps for FakeMaps {
        fn apply(&mut self, plan: &Plan) -> Result<Applied, DataplaneError> {
            let mut record = self.0.borrow_mut();
            if record.failures > 0 {
                record.failures -= 1;
                return Err(DataplaneError::Partial { failed: 1, first: "frontends: injected".to_owned() });
            }
            record.plans.push(plan.clone());
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
            Some(crate::config::Kubernetes { kubeconfig: "/nowhere".into(), allow_insecure: false });
        bench.core.config = Arc::new(config);
        assert!(bench.round());
        assert!(bench.maps.0.borrow().plans.is_empty());
        bench.inputs.inventory = Arc::new(Inventory { complete: true, ..Inventory::default() });
        assert!(bench.round());
        assert_eq!(bench.maps.0.borrow().plans.len(), 1);
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
    fn records_are_on_disk_before_the_maps_change() {
        let mut bench = Bench::new();
        bench.round();
        let state = bench.directory.path().join("state");
        assert!(state.join(IDS).exists());
        assert!(state.join(ADDRESSES).exists());
    }
}
