//! The hub's cluster, if there is one: what comes from it, what is written back, and whether this agent may act on it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::core::{Core, Inputs, Maps, Role, leaves_out};
use super::state::{CLUSTER, STANDING, StateDirectory, StateError};
use crate::api::types::{ClusterStatus, LeaseStatus, SourceStatus, lease_state};
use crate::config::{Config, Protocol};
use crate::ipam::Assignments;
use crate::plan::model::{Notice, Plan};
use crate::source::events::EventWriter;
use crate::source::kubernetes::{
    Kept, KubernetesSource, LeaseKeeper, LeaseTiming, Options, RecordKeeper, Snapshot, Standing, Timing, Validity,
};
use crate::source::status::{DesiredStatus, StatusWriter};
use crate::source::{Condition, Inventory, ObjectName};

/// How long the record in the cluster is waited for while everything else can be read.
const RECORD_PATIENCE: Duration = Duration::from_secs(20);

/// Source and writers of a cluster; all absent when the configuration file is all there is.
pub(super) struct Hub {
    name: String,
    file: String,
    state: Arc<StateDirectory>,
    /// What the cluster holds.
    pub(super) snapshots: Option<watch::Receiver<Snapshot>>,
    /// What can't be written to it.
    pub(super) notices: Option<watch::Receiver<Vec<Notice>>>,
    /// Whether another agent serves.
    pub(super) standing: Option<watch::Receiver<Standing>>,
    /// The record in the cluster.
    pub(super) kept: Option<watch::Receiver<Kept>>,
    parts: Option<Parts>,
    /// What the source was told of whose Services are ours.
    ours: Option<Arc<Assignments>>,
    /// When the restored inventory was current.
    restored: Option<i64>,
    /// What may be acted on: the last of a cluster that was the right one.
    current: Arc<Inventory>,
    role: Role,
    /// What comes from the cluster now is acted on.
    passed: bool,
    /// Since when nothing but the record is missing.
    waiting: Option<Instant>,
    /// What is on disk of `role`.
    saved_held: Option<bool>,
    /// How long the last state may be acted on without news of the cluster; `None` = for ever.
    max_blind: Option<Duration>,
    /// UID of the cluster that `current` comes from.
    cluster: Option<String>,
    /// UID of the cluster that is there instead.
    stranger: Option<String>,
    /// Statuses that wait until the record with their addresses is kept: the next, and the newest.
    queued: Vec<(u64, BTreeMap<ObjectName, DesiredStatus>)>,
    /// Revision of what statuses were last made of.
    written: Option<u64>,
}

struct Parts {
    source: KubernetesSource,
    status: StatusWriter,
    events: EventWriter,
    lease: LeaseKeeper,
    record: RecordKeeper,
}

/// Whether this agent gave out addresses, as it knew last.
#[derive(Serialize, Deserialize)]
struct SavedStanding {
    held: bool,
}

/// The cluster that everything else in the state directory comes from.
#[derive(Serialize, Deserialize)]
struct SavedCluster {
    uid: String,
}

/// Pauses and limits towards a cluster.
#[derive(Clone, Debug, Default)]
pub struct Patience {
    /// Of the source.
    pub source: Timing,
    /// Of the Lease.
    pub lease: LeaseTiming,
}

/// Why an order was not carried out.
pub(super) type Refused = String;

impl Hub {
    /// Starts to follow the cluster, from the inventory of an earlier life. Fails for what is wrong with the kubeconfig only.
    pub(super) async fn start(
        config: &Config,
        state: &Arc<StateDirectory>,
        restored: Option<(i64, &Inventory)>,
        patience: Patience,
    ) -> Result<Self, super::AgentError> {
        let mut hub = Self {
            name: config.hub.name.clone(),
            file: config.origin.file.clone(),
            state: Arc::clone(state),
            snapshots: None,
            notices: None,
            standing: None,
            kept: None,
            parts: None,
            ours: None,
            restored: restored.map(|(synced, _)| synced),
            current: Arc::new(Inventory { complete: true, ..Inventory::default() }),
            role: Role::Acting,
            passed: true,
            waiting: None,
            saved_held: None,
            max_blind: config.hub.kubernetes.as_ref().and_then(|settings| settings.max_blind),
            cluster: None,
            stranger: None,
            queued: Vec::new(),
            written: None,
        };
        let Some(settings) = &config.hub.kubernetes else { return Ok(hub) };
        let identity = state.identity().map_err(super::AgentError::State)?;
        hub.current = Arc::new(restored.map(|(_, inventory)| inventory.clone()).unwrap_or_default());
        hub.passed = false;
        hub.cluster = state
            .load::<SavedCluster>(CLUSTER)
            .map(|saved| saved.uid)
            .or_else(|| restored.and_then(|(_, inventory)| inventory.cluster.clone()));
        // What was served before, by an agent that knew of no Lease too, is served until another is known to do it.
        hub.saved_held = state.load::<SavedStanding>(STANDING).map(|saved| saved.held);
        if hub.saved_held == Some(false) {
            hub.role = Role::Standby { holder: String::new() };
        }
        let options = Options {
            restored: restored.map(|(_, inventory)| inventory.clone()),
            annotations: annotations(config),
            timing: patience.source,
        };
        let (source, snapshots) = KubernetesSource::start(settings, options).await?;
        let status = StatusWriter::start(source.access(), snapshots.clone());
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let host = host.trim();
        let events = EventWriter::start(source.access(), snapshots.clone(), host);
        let lease =
            LeaseKeeper::start(source.access(), &config.hub.name, &format!("{host}_{identity}"), patience.lease);
        let record = RecordKeeper::start(source.access(), &config.hub.name);
        source.access().set_detour(detour(config, &Plan::default(), source.access().server()));
        hub.notices = Some(status.notices());
        hub.standing = Some(lease.standing());
        hub.kept = Some(record.kept());
        hub.snapshots = Some(snapshots);
        hub.parts = Some(Parts { source, status, events, lease, record });
        Ok(hub)
    }

    /// For how long nothing has been heard of the cluster.
    fn blind_for(&self) -> Option<Duration> {
        let snapshot = self.snapshots.as_ref()?.borrow();
        match (snapshot.live, snapshot.connected) {
            (true, true) => None,
            (true, false) => snapshot.last_sync.map(|then| then.elapsed()),
            (false, _) => {
                let age = Timestamp::now().as_second().saturating_sub(self.restored?);
                Some(Duration::from_secs(u64::try_from(age).unwrap_or_default()))
            }
        }
    }

    /// What is known of the cluster now, as far as it may be acted on. Returns whether there is news.
    pub(super) fn take(&mut self, inputs: &mut Inputs) -> bool {
        if let (Some(snapshots), Some(standing), Some(kept)) = (&mut self.snapshots, &mut self.standing, &mut self.kept)
        {
            let snapshot = snapshots.borrow_and_update().clone();
            let (standing, kept) = (standing.borrow_and_update().clone(), kept.borrow_and_update().clone());
            self.survey(&snapshot, &standing, &kept);
            inputs.record_found = kept.found.filter(|_| standing.acts());
            inputs.record_above = kept.above;
            inputs.succeeded = standing == Standing::Holder { taken: true };
        }
        let mut news = !Arc::ptr_eq(&self.current, &inputs.inventory) || self.role != inputs.role;
        inputs.inventory = Arc::clone(&self.current);
        inputs.role = self.role.clone();
        let blind = self.max_blind.filter(|most| self.blind_for().is_some_and(|age| age > *most));
        news |= super::renew(&mut inputs.blind, &blind);
        let notices = self.take_notices();
        news |= super::renew(&mut inputs.source_notices, &notices);
        news || inputs.record_above.is_some()
    }

    /// Decides whether what the cluster holds may be acted on, and by whom.
    fn survey(&mut self, snapshot: &Snapshot, standing: &Standing, kept: &Kept) {
        let Some(parts) = &self.parts else { return };
        let uid = snapshot.inventory.cluster.as_ref();
        let right = snapshot.live && (self.cluster.is_none() || uid == self.cluster.as_ref());
        self.stranger = (snapshot.live && !right).then(|| uid.cloned().unwrap_or_default());
        parts.lease.enable(right);
        parts.record.enable(right && standing.acts());
        if !right {
            self.waiting = None;
            return;
        }
        match standing {
            Standing::Other { holder } => {
                self.passed = false;
                self.waiting = None;
                self.role = Role::Standby { holder: holder.clone() };
                self.current = Arc::clone(&snapshot.inventory);
            }
            Standing::Holder { .. } | Standing::Unguarded { .. } if !self.passed => {
                let since = *self.waiting.get_or_insert_with(Instant::now);
                let known = kept.found.is_some()
                    || kept.failure.as_ref().is_some_and(|failure| failure.lasting)
                    || since.elapsed() > RECORD_PATIENCE;
                if known {
                    self.passed = true;
                    self.role = Role::Acting;
                }
            }
            Standing::Unknown | Standing::Holder { .. } | Standing::Unguarded { .. } => {}
        }
        if self.passed {
            self.current = Arc::clone(&snapshot.inventory);
        }
        self.remember(uid);
    }

    /// Keeps on disk what the next life must know first.
    fn remember(&mut self, uid: Option<&String>) {
        let failed = |error: StateError| tracing::warn!(%error, "state not saved");
        if self.cluster.is_none()
            && let Some(uid) = uid.filter(|_| self.passed)
        {
            self.cluster = Some(uid.clone());
            self.state.save(CLUSTER, &SavedCluster { uid: uid.clone() }).unwrap_or_else(failed);
        }
        let held = self.role == Role::Acting;
        let settled = self.passed || !held;
        if settled && self.saved_held != Some(held) {
            self.state.save(STANDING, &SavedStanding { held }).unwrap_or_else(failed);
            self.saved_held = Some(held);
        }
    }

    /// From now on the cluster that is there is the right one. Returns its UID.
    pub(super) fn accept_cluster(&mut self) -> Result<String, Refused> {
        let Some(parts) = &self.parts else {
            return Err("no cluster is followed: the file is all there is".to_owned());
        };
        let Some(uid) = self.stranger.take() else {
            let known = self.cluster.as_ref().map_or_else(String::new, |uid| format!(", {uid}"));
            return Err(format!("there is nothing to accept: the cluster is the one known before{known}"));
        };
        if uid.is_empty() {
            return Err("the cluster shows no namespace kube-system, so it cannot be told from another".to_owned());
        }
        self.state.save(CLUSTER, &SavedCluster { uid: uid.clone() }).map_err(|error| error.to_string())?;
        self.cluster = Some(uid.clone());
        self.passed = false;
        parts.source.trust();
        Ok(uid)
    }

    /// The inventory, if it comes from the cluster in this life.
    pub(super) fn live(&self) -> Option<Arc<Inventory>> {
        let snapshot = self.snapshots.as_ref()?.borrow();
        (snapshot.live && (self.passed || self.role != Role::Acting) && self.stranger.is_none())
            .then(|| Arc::clone(&self.current))
    }

    /// When what is known of the cluster was last known to be what it has, in seconds since the epoch; `now` is that, too.
    pub(super) fn contact(&self, now: i64) -> Option<i64> {
        self.live()?;
        let snapshot = self.snapshots.as_ref()?.borrow();
        let age = if snapshot.connected { Duration::ZERO } else { snapshot.last_sync?.elapsed() };
        Some(now.saturating_sub(i64::try_from(age.as_secs()).ok()?))
    }

    fn take_notices(&mut self) -> Vec<Notice> {
        let mut notices = self.notices.as_mut().map(|notices| notices.borrow_and_update().clone()).unwrap_or_default();
        notices.extend(self.parts.as_ref().and_then(|parts| parts.events.notice()));
        let mut tell = |reason, message| notices.push(Notice { reason, service: None, tenant: None, message });
        if let Some(held) = self.snapshots.as_ref().and_then(|snapshots| snapshots.borrow().held.clone()) {
            tell("RemovalHeld", held);
        }
        if let Some(validity) = self.validity().filter(|validity| validity.ends_soon(Timestamp::now().as_second())) {
            tell("CredentialsEnd", credentials(validity, &self.file));
        }
        if let Some(uid) = &self.stranger {
            tell("ClusterChanged", stranger(self.cluster.as_deref().unwrap_or_default(), uid));
        }
        if let Some(Standing::Unguarded { why }) = self.standing.as_ref().map(|standing| standing.borrow().clone()) {
            tell("LeaseUnavailable", why);
        }
        if let Role::Standby { holder } = &self.role {
            tell("LeaseHeldByOther", standby(holder));
        }
        if let Some(failure) = self.kept.as_ref().and_then(|kept| kept.borrow().failure.clone()) {
            tell(failure.reason, failure.text);
        }
        notices
    }

    /// Takes over what a reload may change.
    pub(super) fn configure(&self, config: &Config) {
        if let Some(parts) = &self.parts {
            parts.source.set_annotations(annotations(config));
        }
    }

    /// Writes what became of the Services: not before the record of their addresses is kept.
    pub(super) fn write<M: Maps>(&mut self, core: &Core<M>, inputs: &Inputs) {
        let Some(parts) = &self.parts else { return };
        if !self.ours.as_ref().is_some_and(|ours| Arc::ptr_eq(ours, &core.assignments)) {
            let assignments = Arc::clone(&core.assignments);
            self.ours = Some(Arc::clone(&assignments));
            parts.source.set_ours(Arc::new(move |name| assignments.services.contains_key(name)));
        }
        parts.source.access().set_detour(detour(&core.config, &core.plan, parts.source.access().server()));
        if !self.writes() {
            parts.status.pause();
            parts.events.set(Vec::new());
            self.queued.clear();
            self.written = None;
            return;
        }
        if self.written == Some(core.revision) {
            self.flush(core.saved());
            return;
        }
        self.written = Some(core.revision);
        parts.record.set(&core.record);
        parts.events.set(for_owners(core));
        let desired = desired(core, &inputs.inventory);
        self.queued.truncate(1);
        self.queued.push((core.record.generation, desired));
        self.flush(core.saved());
    }

    /// Whether statuses are ours to write.
    fn writes(&self) -> bool {
        self.passed && self.role == Role::Acting && self.stranger.is_none()
    }

    /// Lets go what waits for the record. `saved`: it is on disk.
    pub(super) fn flush(&mut self, saved: bool) {
        // The Lease may have been lost since it was queued.
        if !self.writes() {
            return;
        }
        let (Some(parts), Some(kept)) = (&self.parts, &self.kept) else { return };
        let kept = kept.borrow();
        // Without the cluster's, the record on disk must do.
        let instead = saved && kept.failure.is_some();
        while let Some((generation, _)) = self.queued.first()
            && (instead || kept.stored >= *generation || *generation == 0)
        {
            parts.status.set(self.queued.remove(0).1);
        }
    }

    /// State and age of the sources.
    pub(super) fn status(&self) -> Vec<SourceStatus> {
        let Some(snapshots) = &self.snapshots else {
            let file = SourceStatus {
                name: format!("file {}", self.file),
                state: "synced".to_owned(),
                age_s: None,
                error: None,
            };
            return vec![file];
        };
        let snapshot = snapshots.borrow();
        let since = |then: i64| u64::try_from(Timestamp::now().as_second().saturating_sub(then)).unwrap_or_default();
        let (state, age_s) = match (snapshot.live, snapshot.connected) {
            (true, true) => ("synced", Some(0)),
            (true, false) => ("away", snapshot.last_sync.map(|then| then.elapsed().as_secs())),
            (false, _) if snapshot.inventory.complete => ("restored", self.restored.map(since)),
            (false, _) => ("waiting", None),
        };
        let failure = self.parts.as_ref().and_then(|parts| parts.source.access().failure());
        vec![SourceStatus {
            name: format!("kubernetes {}", self.name),
            state: state.to_owned(),
            age_s,
            error: snapshot.last_error.clone().or(failure),
        }]
    }

    /// Whether this agent acts, and who does instead; `None` without a cluster.
    pub(super) fn lease(&self) -> Option<LeaseStatus> {
        let standing = self.standing.as_ref()?.borrow();
        let state = match (&*standing, &self.role) {
            (Standing::Unguarded { .. }, _) => lease_state::UNGUARDED,
            (_, Role::Standby { .. }) => lease_state::OTHER,
            (Standing::Holder { .. }, Role::Acting) => lease_state::HELD,
            (_, Role::Acting) => lease_state::UNKNOWN,
        };
        let holder = match &self.role {
            Role::Standby { holder } if !holder.is_empty() => Some(holder.clone()),
            Role::Standby { .. } | Role::Acting => None,
        };
        Some(LeaseStatus { state: state.to_owned(), holder })
    }

    /// Which cluster is served, and whether another is there.
    pub(super) fn cluster(&self) -> Option<ClusterStatus> {
        self.parts.as_ref()?;
        Some(ClusterStatus { uid: self.cluster.clone().unwrap_or_default(), instead: self.stranger.clone() })
    }

    /// Until when the credentials for the cluster are good, if they say so.
    pub(super) fn validity(&self) -> Option<Validity> {
        self.parts.as_ref()?.source.access().validity()
    }

    /// Writes to the cluster and failures of it since the start.
    pub(super) fn counts(&self) -> (u64, BTreeMap<&'static str, u64>) {
        let writes = self.parts.as_ref().map_or(0, |parts| parts.status.writes());
        let failures = self.snapshots.as_ref().map(|snapshots| snapshots.borrow().failures.clone()).unwrap_or_default();
        (writes, failures)
    }
}

fn stranger(known: &str, uid: &str) -> String {
    let now = if uid.is_empty() { "one without a namespace kube-system".to_owned() } else { format!("another, {uid}") };
    format!(
        "the cluster is {now}; the last state of {known} stays in force and nothing is written: correct the kubeconfig, or accept \
         the cluster with `lbctl accept-cluster`"
    )
}

fn credentials(validity: Validity, file: &str) -> String {
    let until = Timestamp::from_second(validity.until).unwrap_or(Timestamp::MAX);
    format!(
        "the credentials in the kubeconfig that {file} names are good until {until}: renew them, they are read again without a restart;          without them the last state stays in force"
    )
}

fn standby(holder: &str) -> String {
    let holder = if holder.is_empty() { "another agent" } else { holder };
    format!(
        "{holder} serves this hub (its Lease says so): this agent neither gives out addresses nor announces or writes any, and takes over \
         when the Lease runs out; if there should be no other agent, stop it"
    )
}

/// Where to dial a server that is behind a VIP of ours, the best first: from the plan, else from the file.
fn detour(config: &Config, plan: &Plan, (server, port): (Vec<IpAddr>, u16)) -> Vec<SocketAddr> {
    let frontend = plan.frontends.iter().find(|(address, _)| {
        address.protocol == Protocol::Tcp && address.port == port && server.contains(&address.vip)
    });
    if let Some((_, frontend)) = frontend {
        let mut backends: Vec<_> = frontend
            .backends
            .iter()
            .filter(|backend| frontend.port_of(backend) != 0)
            .map(|backend| (!backend.serving, SocketAddr::new(backend.address, frontend.port_of(backend))))
            .collect();
        backends.sort();
        return backends.into_iter().map(|(_, backend)| backend).collect();
    }
    let all = config.tenants.iter().flat_map(|tenant| &tenant.frontends);
    let named = all.filter(|frontend| frontend.vip.is_some_and(|vip| server.contains(&vip)));
    named
        .flat_map(|frontend| {
            let ports = frontend.ports.iter().filter(move |of| of.port == port && of.protocol == Protocol::Tcp);
            ports.flat_map(|of| {
                frontend.backends.iter().map(|backend| SocketAddr::new(backend.address, of.target.unwrap_or(of.port)))
            })
        })
        .collect()
}

fn annotations(config: &Config) -> BTreeSet<String> {
    config.address_annotations.iter().cloned().collect()
}

/// What owners of Services are told by Events. To a Service that is not ours nothing is written but why it is not.
fn for_owners<M: Maps>(core: &Core<M>) -> Vec<Notice> {
    let assigned = |name: &ObjectName| core.assignments.services.get(name).is_some_and(|assignment| assignment.claimed);
    let concerns = |notice: &&Notice| {
        matches!(notice.reason, "ClaimedTwice" | "ForeignAddress" | "NoTenant")
            || notice.service.as_ref().is_some_and(assigned)
    };
    core.events.lasting().iter().filter(concerns).cloned().collect()
}

/// The status of every Service that is ours.
fn desired<M: Maps>(core: &Core<M>, inventory: &Inventory) -> BTreeMap<ObjectName, DesiredStatus> {
    let programmed: BTreeSet<&ObjectName> =
        core.plan.frontends.values().filter_map(|frontend| frontend.service.as_ref()).collect();
    let notices = core.notices_by_service();
    let beyond = core.events.lasting().iter().filter(|notice| notice.reason == "TooManyFrontends");
    let beyond: BTreeSet<&ObjectName> = beyond.filter_map(|notice| notice.service.as_ref()).collect();
    let mut all = BTreeMap::new();
    for (name, assignment) in core.assignments.services.iter().filter(|(_, assignment)| assignment.claimed) {
        let Some(service) = inventory.services.get(name) else { continue };
        let Some(tenant) = core.config.tenant(&assignment.tenant) else { continue };
        let settings = assignment
            .frontend
            .as_ref()
            .and_then(|frontend| tenant.frontend(frontend))
            .map_or(&tenant.settings, |frontend| &frontend.settings);
        let notice = notices.get(name);
        let no = |reason: &str, message: &str| Condition {
            status: Some(false),
            reason: notice.map_or(reason, |notice| notice.reason).to_owned(),
            message: notice.map_or(message, |notice| notice.message.as_str()).to_owned(),
            since: 0,
        };
        let condition = if assignment.addresses.is_empty() {
            no("NoAddress", "it has no address")
        } else if !core.in_maps {
            Condition {
                status: Some(false),
                reason: "ApplyFailed".to_owned(),
                message: "the datapath could not be changed yet".to_owned(),
                since: 0,
            }
        } else if notice.is_some_and(|notice| leaves_out(notice)) {
            no("NotServed", "not all of it is served")
        } else if programmed.contains(name) {
            Condition {
                status: Some(true),
                reason: "Programmed".to_owned(),
                message: "its ports are in the datapath".to_owned(),
                since: 0,
            }
        } else {
            no("NoPort", "none of its ports is forwarded")
        };
        // What has no room will not heal by itself. What is shown already stays.
        let withheld = beyond.contains(name) && !programmed.contains(name) && service.ingress.is_empty();
        let desired = DesiredStatus {
            uid: service.uid.clone(),
            addresses: if withheld { Vec::new() } else { assignment.addresses.clone() },
            ip_mode: settings.ip_mode,
            programmed: Some(condition),
        };
        all.insert(name.clone(), desired);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::core::testing::Bench;
    use super::*;
    use crate::ipam::ServiceAssignment;

    fn notice(reason: &'static str, service: Option<&str>) -> Notice {
        let service = service.map(|name| ObjectName::new("n", name));
        Notice { reason, service, tenant: None, message: "text".to_owned() }
    }

    #[test]
    fn b10_nothing_is_written_to_services_of_others_but_why_they_are_not_served() {
        let mut bench = Bench::new();
        let assignment = |claimed| ServiceAssignment { claimed, ..ServiceAssignment::default() };
        let services = [("ours", true), ("reserved", false), ("foreign", false)];
        let services = services.map(|(name, claimed)| (ObjectName::new("n", name), assignment(claimed)));
        bench.core.assignments = Arc::new(Assignments { services: services.into(), ..Assignments::default() });
        let told = [
            notice("AllBackendsDown", Some("ours")),
            notice("ForeignAddress", Some("foreign")),
            notice("NoTenant", Some("elsewhere")),
        ];
        let silent = [
            notice("AllBackendsDown", Some("reserved")),
            notice("NodePortMissing", Some("foreign")),
            notice("StatusForbidden", Some("elsewhere")),
            notice("RemovalHeld", None),
        ];
        let all = told.iter().chain(&silent).cloned().collect();
        bench.core.events.set_lasting(all, Timestamp::UNIX_EPOCH);
        assert_eq!(for_owners(&bench.core), told);
    }

    #[test]
    fn b40_an_address_for_which_there_is_no_room_is_not_published() {
        let mut bench = Bench::new();
        bench.core.in_maps = true;
        let address: IpAddr = "192.0.2.40".parse().unwrap();
        let (fresh, shown) = (ObjectName::new("n", "fresh"), ObjectName::new("n", "shown"));
        let assignment = ServiceAssignment {
            tenant: "a".to_owned(),
            claimed: true,
            addresses: vec![address],
            ..ServiceAssignment::default()
        };
        let services = [(fresh.clone(), assignment.clone()), (shown.clone(), assignment)];
        bench.core.assignments = Arc::new(Assignments { services: services.into(), ..Assignments::default() });
        let mut inventory = Inventory::default();
        inventory.services.insert(fresh.clone(), crate::source::Service::default());
        let ingress = vec![address.to_string()];
        inventory.services.insert(shown.clone(), crate::source::Service { ingress, ..Default::default() });
        let of = |bench: &Bench, name| desired(&bench.core, &inventory).remove(name).unwrap();
        let full = ["fresh", "shown"].map(|name| notice("TooManyFrontends", Some(name)));
        bench.core.events.set_lasting(full.into(), Timestamp::UNIX_EPOCH);
        assert!(of(&bench, &fresh).addresses.is_empty());
        assert_eq!(
            of(&bench, &fresh).programmed.map(|it| (it.status, it.reason)),
            Some((Some(false), "TooManyFrontends".to_owned()))
        );
        assert_eq!(of(&bench, &shown).addresses, [address], "what is published stays");
        bench.core.events.set_lasting(BTreeSet::new(), Timestamp::UNIX_EPOCH);
        assert_eq!(of(&bench, &fresh).addresses, [address]);
    }

    #[tokio::test]
    async fn b59_what_waits_for_the_record_is_not_written_after_the_lease_is_lost() {
        let bench = Bench::new();
        let (_file, settings) = crate::source::kubernetes::testing::nowhere();
        let mut config = (*bench.core.config).clone();
        config.hub.kubernetes = Some(settings);
        let state = Arc::new(StateDirectory::open(&bench.directory.path().join("hub")).unwrap());
        let mut hub = Hub::start(&config, &state, None, Patience::default()).await.unwrap();
        let kept = watch::Sender::new(Kept::default());
        hub.kept = Some(kept.subscribe());
        hub.passed = true;
        hub.queued = vec![(3, BTreeMap::new())];
        hub.flush(true);
        assert_eq!(hub.queued.len(), 1, "the record is not kept yet");
        kept.send_replace(Kept { stored: 3, ..Kept::default() });
        hub.role = Role::Standby { holder: "other".to_owned() };
        hub.flush(true);
        assert_eq!(hub.queued.len(), 1, "another writes");
        hub.role = Role::Acting;
        hub.flush(true);
        assert!(hub.queued.is_empty());
    }

    #[tokio::test]
    async fn b35_the_last_contact_is_that_with_the_right_cluster_only() {
        let bench = Bench::new();
        let directory = tempfile::tempdir().unwrap();
        let state = Arc::new(StateDirectory::open(directory.path()).unwrap());
        let mut hub = Hub::start(&bench.core.config, &state, None, Patience::default()).await.unwrap();
        assert_eq!(hub.contact(1000), None, "there is no cluster");
        let (sender, receiver) = watch::channel(Snapshot::default());
        hub.snapshots = Some(receiver);
        assert_eq!(hub.contact(1000), None, "nothing has come yet");
        let ago = Instant::now().checked_sub(Duration::from_secs(100));
        sender.send_replace(Snapshot { live: true, connected: true, last_sync: ago, ..Snapshot::default() });
        assert_eq!(hub.contact(1000), Some(1000));
        sender.send_replace(Snapshot { live: true, connected: false, last_sync: ago, ..Snapshot::default() });
        assert_eq!(hub.contact(1000), Some(900));
        hub.stranger = Some("other".to_owned());
        assert_eq!(hub.contact(1000), None);
    }
}
