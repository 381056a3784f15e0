//! Writes what became of Services into their status: server-side apply on the `status` subresource.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use k8s_openapi::api::core::v1;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::{Id, JoinSet};

use super::kubernetes::rights::{self, Reach};
use super::kubernetes::{Access, Snapshot, describe, lock};
use super::{CLASS, Condition, Inventory, MANAGER, ObjectName, Objects, PROGRAMMED, Service, ServiceKind};
use crate::config::{Config, IpMode};
use crate::plan::model::Notice;

/// Limit for one write.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Writes at once.
const CONCURRENCY: usize = 8;
/// Writes per second, and how many may be saved up.
const RATE: f64 = 100.0;
const BURST: f64 = 200.0;
/// Forced writes before a contended Service is left alone.
const FORCES: u32 = 3;

/// How patient the writer is.
#[derive(Clone, Debug)]
pub struct Pace {
    /// How long a write of ours is believed rather than a snapshot that may be older.
    pub settle: Duration,
    /// How long a status must stand until earlier trouble with it is forgotten.
    pub calm: Duration,
    /// First pause after a failure.
    pub pause_first: Duration,
    /// Longest pause after writes that failed or did not last.
    pub pause_last: Duration,
    /// How long a contended Service is left alone.
    pub hold: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            settle: Duration::from_secs(2),
            calm: Duration::from_mins(1),
            pause_first: Duration::from_millis(100),
            pause_last: Duration::from_secs(30),
            hold: Duration::from_mins(10),
        }
    }
}

/// What the status of a Service shall say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DesiredStatus {
    /// UID of the Service that is meant; another of the same name is never touched.
    pub uid: String,
    /// `status.loadBalancer.ingress`, in order.
    pub addresses: Vec<IpAddr>,
    /// `ipMode` of each; `None` leaves it to the server.
    pub ip_mode: Option<IpMode>,
    /// The condition `lbd.tenantedge.io/Programmed`; its `since` is ignored. `None` writes no condition.
    pub programmed: Option<Condition>,
}

type Wishes = BTreeMap<ObjectName, DesiredStatus>;
/// `None`: nothing is written.
type Desired = Option<Arc<Wishes>>;

/// Keeps the statuses of our Services as they shall be. Dropping it stops it; what is written stays.
#[derive(Debug)]
pub struct StatusWriter {
    desired: watch::Sender<Desired>,
    notices: watch::Receiver<Vec<Notice>>,
    writes: Arc<Mutex<u64>>,
    _tasks: JoinSet<()>,
}

impl StatusWriter {
    /// Starts a writer that has nothing to write yet. Must be called inside a runtime.
    pub fn start(access: &Access, snapshots: watch::Receiver<Snapshot>) -> Self {
        Self::start_with(access, snapshots, Pace::default())
    }

    /// The same at another pace.
    pub fn start_with(access: &Access, snapshots: watch::Receiver<Snapshot>, pace: Pace) -> Self {
        let desired = watch::Sender::new(Desired::default());
        let (publish, notices) = watch::channel(Vec::new());
        let writes = Arc::new(Mutex::new(0));
        let worker = Worker::new(access.clone(), snapshots, desired.subscribe(), publish, Arc::clone(&writes), pace);
        let mut tasks = JoinSet::new();
        tasks.spawn(worker.run());
        Self { desired, notices, writes, _tasks: tasks }
    }

    /// Replaces what is desired. A Service that is in `desired` gets exactly that; one that is not, but carries our
    /// status though it is no longer of type `LoadBalancer` (or of another class), is cleared; any other is left alone.
    pub fn set(&self, desired: BTreeMap<ObjectName, DesiredStatus>) {
        self.desired.send_if_modified(|current| {
            let changed = current.as_ref().is_none_or(|current| **current != desired);
            if changed {
                *current = Some(Arc::new(desired));
            }
            changed
        });
    }

    /// Writes nothing until something is desired again.
    pub fn pause(&self) {
        self.desired.send_if_modified(|current| current.take().is_some());
    }

    /// Services whose status cannot be kept as desired, with the reason.
    pub fn notices(&self) -> watch::Receiver<Vec<Notice>> {
        self.notices.clone()
    }

    /// Writes sent since the start.
    pub fn writes(&self) -> u64 {
        *lock(&self.writes)
    }
}

/// Removes our entries from the status of the named Services, as far as they are still those with that UID.
/// Returns what could not be done.
pub async fn release(access: &Access, services: &BTreeMap<ObjectName, String>) -> Vec<(ObjectName, String)> {
    let mut failed = Vec::new();
    for (name, uid) in services {
        match send(access, name, &body(name, uid, None, 0), false).await {
            Outcome::Done | Outcome::Gone => {}
            Outcome::Contended(text) | Outcome::Refused(text) | Outcome::Failed { text, .. } => {
                failed.push((name.clone(), text));
            }
        }
    }
    failed
}

/// Whether the status of a Service has something of ours: by its field managers, and by an address that is one of those given.
fn is_released(object: &v1::Service, own: &dyn Fn(IpAddr) -> bool) -> bool {
    let managers = object.metadata.managed_fields.iter().flatten();
    let mut applied = managers.filter(|entry| entry.operation.as_deref() == Some("Apply"));
    let ours = applied
        .any(|entry| entry.manager.as_deref() == Some(MANAGER) && entry.subresource.as_deref() == Some("status"));
    let ingress = object.status.iter().flat_map(|status| &status.load_balancer).flat_map(|status| &status.ingress);
    let addresses: Vec<_> = ingress.flatten().filter_map(|entry| entry.ip.as_ref()?.parse::<IpAddr>().ok()).collect();
    // Another lbd on the same cluster has the same name, but other pools. What has no address may only have our condition.
    ours && addresses.iter().all(|address| own(*address))
}

/// Removes our entries from the statuses of all Services in claimed namespaces. Returns how many, and what could not be done.
pub async fn release_all(access: &Access, config: &Config) -> Result<(usize, Vec<(ObjectName, String)>), String> {
    let own = |address: IpAddr| {
        let mut pools = config.tenants.iter().flat_map(|tenant| &tenant.pools);
        let mut frontends = config.tenants.iter().flat_map(|tenant| &tenant.frontends);
        pools.any(|pool| pool.contains(address)) || frontends.any(|frontend| frontend.vip == Some(address))
    };
    let places = rights::places(config, Reach::Services);
    let api: Api<v1::Service> = Api::all(access.client());
    let mut services = BTreeMap::new();
    let mut page = ListParams::default().limit(500);
    loop {
        let list = match tokio::time::timeout(REQUEST_TIMEOUT, api.list(&page)).await {
            Ok(Ok(list)) => list,
            Ok(Err(error)) => return Err(format!("Services cannot be listed: {}", describe(&error))),
            Err(_) => return Err(format!("Services cannot be listed: no answer within {REQUEST_TIMEOUT:?}")),
        };
        for object in &list.items {
            let text = |text: &Option<String>| text.clone().unwrap_or_default();
            let name = ObjectName::new(text(&object.metadata.namespace), text(&object.metadata.name));
            let claimed = places.as_ref().is_none_or(|places| places.contains(name.namespace.as_str()));
            if claimed && is_released(object, &own) {
                services.insert(name, text(&object.metadata.uid));
            }
        }
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => break,
        }
    }
    let failed = release(access, &services).await;
    Ok((services.len() - failed.len(), failed))
}

/// How a write went.
#[derive(Debug)]
enum Outcome {
    Done,
    /// The Service, or the one with that UID, is not there.
    Gone,
    /// Another field manager owns what we would write.
    Contended(String),
    /// The server will not take it, now or later.
    Refused(String),
    /// Try again.
    Failed {
        text: String,
        forbidden: bool,
        retry_after: Option<Duration>,
    },
}

fn ip_mode(mode: IpMode) -> &'static str {
    match mode {
        IpMode::Vip => "VIP",
        IpMode::Proxy => "Proxy",
    }
}

/// The object to apply; `None` gives up everything that is ours in the status.
fn body(name: &ObjectName, uid: &str, desired: Option<&DesiredStatus>, since: i64) -> Value {
    let mut object = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"namespace": name.namespace, "name": name.name, "uid": uid},
    });
    let Some(desired) = desired else { return object };
    let mut status = json!({});
    if !desired.addresses.is_empty() {
        let ingress = desired.addresses.iter().map(|address| match desired.ip_mode {
            None => json!({"ip": address}),
            Some(mode) => json!({"ip": address, "ipMode": ip_mode(mode)}),
        });
        status["loadBalancer"] = json!({"ingress": ingress.collect::<Vec<_>>()});
    }
    if let Some(condition) = &desired.programmed {
        let state = match condition.status {
            Some(true) => "True",
            Some(false) => "False",
            None => "Unknown",
        };
        let since = Timestamp::from_second(since).unwrap_or_default();
        status["conditions"] = json!([{
            "type": PROGRAMMED, "status": state, "reason": condition.reason, "message": condition.message,
            "lastTransitionTime": since.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        }]);
    }
    object["status"] = status;
    object
}

/// Whether the status says what is desired.
fn satisfied(service: &Service, desired: &DesiredStatus) -> bool {
    let addresses: Vec<_> = service.ingress.iter().map(|text| text.parse::<IpAddr>().ok()).collect();
    let wanted: Vec<_> = desired.addresses.iter().copied().map(Some).collect();
    let modes = desired.ip_mode.is_none_or(|mode| service.ingress_modes.iter().all(|actual| actual == ip_mode(mode)));
    let condition = match (&service.programmed, &desired.programmed) {
        (Some(actual), Some(desired)) => {
            (actual.status, &actual.reason, &actual.message) == (desired.status, &desired.reason, &desired.message)
        }
        (None, None) => true,
        (Some(_), None) | (None, Some(_)) => false,
    };
    // Without an address or a condition there is nothing that could be ours.
    let owned = service.published || (desired.addresses.is_empty() && desired.programmed.is_none());
    addresses == wanted && modes && condition && owned
}

/// Whether we may write to it: our kind, and not on its way out.
fn writable(service: &Service) -> bool {
    service.kind == ServiceKind::LoadBalancer
        && service.class.as_deref().is_none_or(|class| class == CLASS)
        && !service.terminating
}

/// Whether it carries a status of ours that it may not carry any more.
fn stale(service: &Service) -> bool {
    let ours = service.kind == ServiceKind::LoadBalancer && service.class.as_deref().is_none_or(|class| class == CLASS);
    service.published && !ours && !service.terminating && (!service.ingress.is_empty() || service.programmed.is_some())
}

/// What is desired of this very Service, if we may write to it.
fn meant<'a>(desired: &'a Wishes, name: &ObjectName, service: &Service) -> Option<&'a DesiredStatus> {
    desired.get(name).filter(|desired| desired.uid == service.uid && writable(service))
}

/// Whether there may be something to write to it, now or later.
fn concerns(desired: &Wishes, name: &ObjectName, service: Option<&Service>) -> bool {
    service.is_some_and(|service| meant(desired, name, service).is_some() || stale(service))
}

async fn send(access: &Access, name: &ObjectName, body: &Value, force: bool) -> Outcome {
    let api: Api<v1::Service> = Api::namespaced(access.client(), &name.namespace);
    let parameters = PatchParams { force, ..PatchParams::apply(MANAGER) };
    let patch = Patch::Apply(body);
    let error = match tokio::time::timeout(REQUEST_TIMEOUT, api.patch_status(&name.name, &parameters, &patch)).await {
        Ok(Ok(_)) => return Outcome::Done,
        Ok(Err(error)) => error,
        Err(_) => {
            let text = format!("no answer within {REQUEST_TIMEOUT:?}");
            return Outcome::Failed { text, forbidden: false, retry_after: None };
        }
    };
    let text = describe(&error);
    let kube::Error::Api(status) = &error else {
        return Outcome::Failed { text, forbidden: false, retry_after: None };
    };
    let causes = status.details.iter().flat_map(|details| &details.causes);
    let managers: BTreeSet<_> = causes
        .filter(|cause| cause.reason == "FieldManagerConflict")
        // `conflict with "manager" using v1 ...`
        .map(|cause| cause.message.split('"').nth(1).unwrap_or(&cause.message).to_owned())
        .collect();
    if !managers.is_empty() {
        return Outcome::Contended(managers.into_iter().collect::<Vec<_>>().join(", "));
    }
    match status.code {
        404 => Outcome::Gone,
        // The name belongs to another Service now.
        409 if text.to_lowercase().contains("uid") => Outcome::Gone,
        422 if text.contains("metadata.uid") => Outcome::Gone,
        400 | 415 | 422 => Outcome::Refused(text),
        code => {
            if code == 401 {
                let _ = access.reread();
            }
            let seconds = status.details.as_ref().map_or(0, |details| details.retry_after_seconds);
            // A server that has too much to do says so with a bare code, too.
            let seconds = if code == 429 { seconds.max(1) } else { seconds };
            let retry_after = (seconds > 0).then(|| Duration::from_secs(u64::from(seconds.min(60))));
            Outcome::Failed { text, forbidden: code == 403, retry_after }
        }
    }
}

/// What is known of the writing to one Service.
#[derive(Debug)]
struct State {
    uid: String,
    /// Being written: what (`None` = cleared), and whether by force.
    writing: Option<(Option<DesiredStatus>, bool)>,
    /// Written last (`None` = cleared) and when.
    written: Option<(Option<DesiredStatus>, Instant)>,
    /// How long what was written is believed; longer each time that it did not last.
    settle: Duration,
    /// Not before.
    due: Instant,
    /// Next pause after a failure.
    pause: Duration,
    /// The next write is by force.
    force: bool,
    forced: u32,
    notice: Option<Notice>,
}

impl State {
    fn new(uid: &str, now: Instant, pace: &Pace) -> Self {
        Self {
            uid: uid.to_owned(),
            writing: None,
            written: None,
            settle: pace.settle,
            due: now,
            pause: pace.pause_first,
            force: false,
            forced: 0,
            notice: None,
        }
    }

    /// Puts the next attempt off, longer each time.
    fn put_off(&mut self, now: Instant, at_least: Duration, pace: &Pace) {
        // A little of the clock's own noise keeps many Services from coming back in step.
        let jitter = Duration::from_micros(u64::from(Timestamp::now().subsec_nanosecond().unsigned_abs() % 50_000));
        self.due = now + self.pause.max(at_least) + jitter;
        self.pause = (self.pause * 2).min(pace.pause_last);
    }
}

/// What is to be done about one Service.
enum Step {
    Nothing,
    /// Look again then.
    Wait(Instant),
    /// Write: what (`None` = clear).
    Write(Option<DesiredStatus>),
}

struct Worker {
    access: Access,
    snapshots: watch::Receiver<Snapshot>,
    desired: watch::Receiver<Desired>,
    notices: watch::Sender<Vec<Notice>>,
    writes: Arc<Mutex<u64>>,
    states: BTreeMap<ObjectName, State>,
    /// Services that may have something to write.
    queue: VecDeque<ObjectName>,
    running: JoinSet<Outcome>,
    names: BTreeMap<Id, ObjectName>,
    tokens: f64,
    filled: Instant,
    /// The server has asked for silence until then.
    silent_until: Option<Instant>,
    pace: Pace,
}

impl Worker {
    fn new(
        access: Access,
        snapshots: watch::Receiver<Snapshot>,
        desired: watch::Receiver<Desired>,
        notices: watch::Sender<Vec<Notice>>,
        writes: Arc<Mutex<u64>>,
        pace: Pace,
    ) -> Self {
        Self {
            access,
            snapshots,
            desired,
            notices,
            writes,
            states: BTreeMap::new(),
            queue: VecDeque::new(),
            running: JoinSet::new(),
            names: BTreeMap::new(),
            tokens: BURST,
            filled: Instant::now(),
            silent_until: None,
            pace,
        }
    }

    async fn run(mut self) {
        let mut connected = false;
        let mut dirty = true;
        // Nodes and the like come and go, too: of the snapshots, only other Services than the last scan saw are news.
        let mut scanned = Objects::default();
        let mut scan_at = Instant::now();
        let mut next: Option<Instant> = None;
        loop {
            let now = Instant::now();
            let snapshot = self.snapshots.borrow_and_update().clone();
            let desired = {
                let desired = self.desired.borrow_and_update();
                // It counts as seen from here on, whatever it was that woke us.
                dirty |= desired.has_changed();
                desired.clone()
            };
            let desired = desired.as_deref().filter(|_| snapshot.live);
            if snapshot.connected && !connected {
                // What failed while the server was away is worth another try at once.
                for state in self.states.values_mut().filter(|state| state.notice.is_none()) {
                    state.due = now;
                    state.pause = self.pace.pause_first;
                }
            }
            dirty |= snapshot.connected != connected || !snapshot.inventory.services.ptr_eq(&scanned);
            connected = snapshot.connected;
            if next.is_some_and(|at| at <= now) {
                (dirty, next) = (true, None);
            }
            // What an earlier life saw says nothing about what may be written now.
            if let Some(desired) = desired
                && dirty
                && scan_at <= now
            {
                next = self.scan(&snapshot.inventory, desired, now);
                scanned = snapshot.inventory.services.clone();
                dirty = false;
                // With very many Services, what changes while they are looked through waits a little.
                scan_at = now + now.elapsed() * 10;
            }
            let mut wake = next;
            let look = |wake: &mut Option<Instant>, at: Instant| *wake = Some(wake.map_or(at, |wake| wake.min(at)));
            if let Some(desired) = desired
                && let Some(at) = self.write(&snapshot.inventory, desired, now, &mut next)
            {
                look(&mut wake, at);
            }
            if let Some(at) = next {
                look(&mut wake, at);
            }
            if dirty && desired.is_some() {
                look(&mut wake, scan_at);
            }
            self.tell(desired.is_some());
            let wait = wake.map_or(Duration::from_hours(1), |at| at.saturating_duration_since(Instant::now()));
            tokio::select! {
                changed = self.desired.changed() => if changed.is_ok() { dirty = true } else { return },
                changed = self.snapshots.changed() => if changed.is_err() { return },
                Some(done) = self.running.join_next_with_id() => match done {
                    Ok((id, outcome)) => self.done(id, outcome),
                    Err(error) => {
                        let outcome = Outcome::Failed { text: error.to_string(), forbidden: false, retry_after: None };
                        self.done(error.id(), outcome);
                    }
                },
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    /// Queues every Service that has something to write: first those whose owner waits for an address, of these the newest, for the
    /// others have waited or work already; then what is only put right. Returns when to look again, if nothing happens before.
    fn scan(&mut self, inventory: &Inventory, desired: &Wishes, now: Instant) -> Option<Instant> {
        // Of what is not to be written any more, no trouble is told either.
        self.states.retain(|name, state| {
            let service = inventory.services.get(name).filter(|service| service.uid == state.uid);
            state.writing.is_some() || concerns(desired, name, service)
        });
        let mut queue = Vec::new();
        let mut next: Option<Instant> = None;
        let stale = inventory.services.iter().filter(|(_, service)| stale(service)).map(|(name, _)| name);
        for name in desired.keys().chain(stale) {
            match self.step(inventory, desired, name, now) {
                Step::Nothing => {}
                Step::Wait(at) => next = Some(next.map_or(at, |next| next.min(at))),
                Step::Write(wanted) => {
                    let service = inventory.services.get(name);
                    let waits = service.filter(|service| {
                        service.ingress.is_empty() && wanted.is_some_and(|wanted| !wanted.addresses.is_empty())
                    });
                    queue.push((Reverse(waits.map(|service| service.created)), name));
                }
            }
        }
        queue.sort_unstable();
        self.queue = queue.into_iter().map(|(_, name)| name.clone()).collect();
        next
    }

    /// Starts what is queued, within the limits. Returns when to go on if a limit was met; puts into `next` when to
    /// look again at those that turned out not to be due.
    fn write(
        &mut self,
        inventory: &Inventory,
        desired: &Wishes,
        now: Instant,
        next: &mut Option<Instant>,
    ) -> Option<Instant> {
        self.tokens = (self.tokens + now.saturating_duration_since(self.filled).as_secs_f64() * RATE).min(BURST);
        self.filled = now;
        if let Some(until) = self.silent_until.filter(|until| *until > now) {
            // What was saved up before is no reason to come back with a burst.
            self.tokens = self.tokens.min(1.0);
            return (!self.queue.is_empty()).then_some(until);
        }
        while self.running.len() < CONCURRENCY {
            let name = self.queue.pop_front()?;
            let (Some(service), Step::Write(desired)) =
                (inventory.services.get(&name), self.step(inventory, desired, &name, now))
            else {
                if let Step::Wait(at) = self.step(inventory, desired, &name, now) {
                    *next = Some(next.map_or(at, |next| next.min(at)));
                }
                // It went while it was being written.
                if !concerns(desired, &name, inventory.services.get(&name)) {
                    self.states.remove(&name);
                }
                continue;
            };
            if self.tokens < 1.0 {
                self.queue.push_front(name);
                return Some(now + Duration::from_secs_f64(1.0 / RATE));
            }
            self.tokens -= 1.0;
            let since = match (&service.programmed, desired.as_ref().and_then(|desired| desired.programmed.as_ref())) {
                (Some(actual), Some(desired)) if actual.status == desired.status => actual.since,
                _ => Timestamp::now().as_second(),
            };
            let body = body(&name, &service.uid, desired.as_ref(), since);
            let state = self.states.entry(name.clone()).or_insert_with(|| State::new(&service.uid, now, &self.pace));
            if state.written.as_ref().is_some_and(|(written, _)| *written == desired) {
                // Somebody else writes too, or we do not see what is there: more slowly each time.
                state.settle = (state.settle * 2).min(self.pace.pause_last);
            }
            let force = std::mem::take(&mut state.force);
            state.writing = Some((desired, force));
            *lock(&self.writes) += 1;
            let (access, target) = (self.access.clone(), name.clone());
            let handle = self.running.spawn(async move { send(&access, &target, &body, force).await });
            self.names.insert(handle.id(), name);
        }
        None
    }

    /// Decides about one Service.
    fn step(&mut self, inventory: &Inventory, desired: &Wishes, name: &ObjectName, now: Instant) -> Step {
        let Some(service) = inventory.services.get(name).filter(|service| !service.uid.is_empty()) else {
            return Step::Nothing;
        };
        let desired = meant(desired, name, service);
        if desired.is_none() && !stale(service) {
            return Step::Nothing;
        }
        let satisfied = desired.is_some_and(|desired| satisfied(service, desired));
        let Some(state) = self.states.get_mut(name) else {
            return if satisfied { Step::Nothing } else { Step::Write(desired.cloned()) };
        };
        if state.writing.is_some() {
            return Step::Nothing;
        }
        if state.uid != service.uid {
            *state = State::new(&service.uid, now, &self.pace);
        }
        if satisfied {
            // What has lasted for a while is contended no more.
            let calm = state.written.as_ref().map_or(now, |(_, at)| *at + self.pace.calm);
            if calm <= now {
                *state = State::new(&service.uid, now, &self.pace);
            }
            let troubled = state.notice.is_some() || state.forced > 0 || state.settle > self.pace.settle;
            if troubled && calm > now {
                return Step::Wait(calm);
            }
            return Step::Nothing;
        }
        let settled = match &state.written {
            Some((written, at)) if written.as_ref() == desired => *at + state.settle,
            _ => now,
        };
        let due = state.due.max(settled);
        if due > now { Step::Wait(due) } else { Step::Write(desired.cloned()) }
    }

    /// Notes how a write went.
    fn done(&mut self, id: Id, outcome: Outcome) {
        let now = Instant::now();
        let Some(name) = self.names.remove(&id) else { return };
        let Some(state) = self.states.get_mut(&name) else { return };
        let Some((desired, force)) = state.writing.take() else { return };
        self.queue.push_front(name.clone());
        state.forced += u32::from(force);
        match outcome {
            Outcome::Done => {
                tracing::debug!(service = %name, cleared = desired.is_none(), force, "status written");
                state.written = Some((desired, now));
                state.due = now;
                state.pause = self.pace.pause_first;
                if state.forced == 0 {
                    state.notice = None;
                }
            }
            Outcome::Gone => state.put_off(now, Duration::from_secs(1), &self.pace),
            // What is not ours any more is not fought for.
            Outcome::Contended(_) if desired.is_none() => {
                state.written = Some((None, now));
                state.due = now + self.pace.hold;
            }
            Outcome::Contended(_) if state.forced < FORCES => {
                state.force = true;
                state.due = now;
            }
            Outcome::Contended(managers) => {
                state.due = now + self.pace.hold;
                state.forced = 0;
                let message = format!(
                    "the status is also written by field manager {managers}: the address was set {FORCES} times by force \
                     and did not stay; make that controller ignore this Service (loadBalancerClass), lbd tries again later"
                );
                tracing::warn!(service = %name, managers, "status contended");
                state.notice = Some(notice("StatusContended", &name, message));
            }
            Outcome::Refused(text) => {
                state.pause = self.pace.pause_last;
                state.put_off(now, Duration::ZERO, &self.pace);
                tracing::warn!(service = %name, "status refused: {text}");
                state.notice = Some(notice("StatusRefused", &name, format!("the status cannot be written: {text}")));
            }
            Outcome::Failed { text, forbidden, retry_after } => {
                state.force = force;
                state.put_off(now, retry_after.unwrap_or_default(), &self.pace);
                // It concerns all that this account writes, not only this Service.
                self.silent_until = self.silent_until.max(retry_after.map(|pause| now + pause));
                tracing::debug!(service = %name, "status not written: {text}");
                if forbidden {
                    let message = format!("the status cannot be written, allow `patch` of `services/status`: {text}");
                    state.notice = Some(notice("StatusForbidden", &name, message));
                }
            }
        }
    }

    /// While nothing is to be written, nothing is told: another agent writes, or nobody may.
    fn tell(&self, writes: bool) {
        let notices = self.states.values().filter_map(|state| state.notice.clone());
        let current: Vec<_> = notices.filter(|_| writes).collect();
        self.notices.send_if_modified(|notices| {
            let changed = *notices != current;
            *notices = current;
            changed
        });
    }
}

fn notice(reason: &'static str, name: &ObjectName, message: String) -> Notice {
    Notice { reason, service: Some(name.clone()), tenant: None, message }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name() -> ObjectName {
        ObjectName::new("clusters-tenant-a", "kube-apiserver")
    }

    fn desired() -> DesiredStatus {
        let programmed = Condition { status: Some(true), reason: "Programmed".into(), message: "m".into(), since: 0 };
        DesiredStatus {
            uid: "u".into(),
            addresses: vec!["192.168.203.110".parse().unwrap()],
            ip_mode: None,
            programmed: Some(programmed),
        }
    }

    fn service() -> Service {
        Service {
            uid: "u".into(),
            kind: ServiceKind::LoadBalancer,
            ingress: vec!["192.168.203.110".into()],
            ingress_modes: vec!["VIP".into()],
            programmed: Some(Condition { since: 7, ..desired().programmed.unwrap() }),
            published: true,
            ..Service::default()
        }
    }

    #[test]
    fn the_body_names_the_object_by_uid_and_only_what_is_ours() {
        let object = body(&name(), "u", Some(&desired()), 60);
        assert_eq!(object["metadata"], json!({"namespace": "clusters-tenant-a", "name": "kube-apiserver", "uid": "u"}));
        assert_eq!(
            object["status"],
            json!({
                "loadBalancer": {"ingress": [{"ip": "192.168.203.110"}]},
                "conditions": [{"type": "lbd.tenantedge.io/Programmed", "status": "True", "reason": "Programmed",
                    "message": "m", "lastTransitionTime": "1970-01-01T00:01:00Z"}]
            })
        );
        let proxy = DesiredStatus { ip_mode: Some(IpMode::Proxy), programmed: None, ..desired() };
        let status = json!({"loadBalancer": {"ingress": [{"ip": "192.168.203.110", "ipMode": "Proxy"}]}});
        assert_eq!(body(&name(), "u", Some(&proxy), 0)["status"], status);
        assert_eq!(body(&name(), "u", None, 0).get("status"), None);
    }

    #[test]
    fn nothing_is_written_when_nothing_differs() {
        assert!(satisfied(&service(), &desired()));
        assert!(satisfied(&service(), &DesiredStatus { ip_mode: Some(IpMode::Vip), ..desired() }));
        assert!(!satisfied(&service(), &DesiredStatus { ip_mode: Some(IpMode::Proxy), ..desired() }));
        assert!(!satisfied(&Service { published: false, ..service() }, &desired()));
        assert!(!satisfied(&Service { ingress: vec![], ..service() }, &desired()));
        assert!(!satisfied(&Service { ingress: vec!["h".into()], ..service() }, &desired()));
        assert!(!satisfied(&Service { programmed: None, ..service() }, &desired()));
        let empty = DesiredStatus { uid: "u".into(), ..DesiredStatus::default() };
        assert!(satisfied(&Service { ingress: vec![], programmed: None, published: false, ..service() }, &empty));
    }

    /// A server that nobody has started: every write fails, and is put off until after the test.
    fn nowhere() -> (Access, Pace) {
        let (_file, settings) = crate::source::kubernetes::testing::nowhere();
        let never = Duration::from_hours(1);
        (Access::open(&settings).unwrap(), Pace { pause_first: never, pause_last: never, ..Pace::default() })
    }

    fn snapshot(services: &[&ObjectName]) -> Snapshot {
        let mut inventory = Inventory { complete: true, ..Inventory::default() };
        for name in services {
            let service = Service { ingress: vec![], programmed: None, published: false, ..service() };
            inventory.services.insert((*name).clone(), service);
        }
        Snapshot { inventory: Arc::new(inventory), live: true, connected: true, ..Snapshot::default() }
    }

    async fn eventually(what: &str, mut check: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !check() {
            assert!(begun.elapsed() < Duration::from_secs(10), "{what}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn what_is_desired_is_seen_also_when_a_node_comes_with_it() {
        let names: Vec<_> = (0..24).map(|number| ObjectName::new("n", format!("s{number}"))).collect();
        let (access, pace) = nowhere();
        let snapshots = watch::Sender::new(snapshot(&names.iter().collect::<Vec<_>>()));
        let writer = StatusWriter::start_with(&access, snapshots.subscribe(), pace);
        let mut wishes = Wishes::new();
        for (name, writes) in names.into_iter().zip(1..) {
            // There is one thread: the writer finds both changes at once, and takes up any of the two.
            wishes.insert(name.clone(), desired());
            snapshots.send_modify(|snapshot| {
                let nodes = &mut Arc::make_mut(&mut snapshot.inventory).nodes;
                nodes.insert(name.name.clone(), crate::source::Node::default());
            });
            writer.set(wishes.clone());
            eventually(&format!("{name} is written"), || writer.writes() == writes).await;
            // Also the answer has come before the next.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    #[tokio::test]
    async fn trouble_is_told_only_of_what_is_to_be_written() {
        let (kept, left) = (ObjectName::new("n", "kept"), ObjectName::new("n", "left"));
        let (access, pace) = nowhere();
        let all = snapshot(&[&kept, &left]);
        let mut worker = worker(&access, &all, &pace);
        let now = Instant::now();
        for name in [&kept, &left] {
            let mut state = State::new("u", now + pace.pause_first, &pace);
            state.notice = Some(notice("StatusForbidden", name, "no".to_owned()));
            worker.states.insert(name.clone(), state);
        }
        let wishes = Wishes::from([(kept.clone(), desired()), (left, desired())]);
        worker.scan(&all.inventory, &wishes, now);
        worker.tell(true);
        assert_eq!(worker.notices.borrow().len(), 2);
        // A claim that does not have it any more.
        let wishes = Wishes::from([(kept.clone(), desired())]);
        worker.scan(&all.inventory, &wishes, now);
        worker.tell(true);
        let told: Vec<_> = worker.notices.borrow().iter().filter_map(|notice| notice.service.clone()).collect();
        assert_eq!(told.as_slice(), std::slice::from_ref(&kept));
        // Another agent acts.
        worker.tell(false);
        assert!(worker.notices.borrow().is_empty());

        // One that goes while it is being written, and nothing changes after that.
        let answer = Outcome::Failed { text: "no".to_owned(), forbidden: true, retry_after: None };
        worker.names.insert(worker.running.spawn(async { answer }).id(), kept.clone());
        worker.states.get_mut(&kept).unwrap().writing = Some((Some(desired()), false));
        let none = Inventory::default();
        worker.scan(&none, &Wishes::new(), now);
        let (id, outcome) = worker.running.join_next_with_id().await.unwrap().unwrap();
        worker.done(id, outcome);
        worker.write(&none, &Wishes::new(), now, &mut None);
        worker.tell(true);
        assert!(worker.notices.borrow().is_empty() && worker.states.is_empty());
    }

    #[tokio::test]
    async fn what_was_set_by_force_is_looked_at_again_when_it_has_stood_for_a_while() {
        let (access, pace) = nowhere();
        let all = snapshot(&[]);
        let mut worker = worker(&access, &all, &pace);
        let inventory = Inventory { services: [(name(), service())].into(), ..Inventory::default() };
        let wishes = Wishes::from([(name(), desired())]);
        let now = Instant::now();
        let written = Some((Some(desired()), now));
        worker.states.insert(name(), State { written, forced: 1, ..State::new("u", now, &pace) });
        let next = worker.scan(&inventory, &wishes, now);
        assert_eq!(next, Some(now + pace.calm));
        assert_eq!(worker.scan(&inventory, &wishes, now + pace.calm), None);
        assert_eq!(worker.states[&name()].forced, 0);
    }

    fn worker(access: &Access, snapshot: &Snapshot, pace: &Pace) -> Worker {
        let snapshots = watch::Sender::new(snapshot.clone()).subscribe();
        let desired = watch::Sender::new(None).subscribe();
        Worker::new(access.clone(), snapshots, desired, watch::Sender::new(Vec::new()), Arc::default(), pace.clone())
    }

    #[test]
    fn what_is_not_ours_is_not_written() {
        assert!(writable(&service()));
        assert!(writable(&Service { class: Some(CLASS.into()), ..service() }));
        assert!(!writable(&Service { class: Some("loxilb.io/loxilb".into()), ..service() }));
        assert!(!writable(&Service { kind: ServiceKind::NodePort, ..service() }));
        assert!(!writable(&Service { terminating: true, ..service() }));
        assert!(!stale(&service()));
        assert!(stale(&Service { kind: ServiceKind::ClusterIp, ..service() }));
        assert!(!stale(&Service { kind: ServiceKind::ClusterIp, published: false, ..service() }));
        assert!(!stale(&Service { kind: ServiceKind::ClusterIp, ingress: vec![], programmed: None, ..service() }));
    }
}
