//! The agent's main loop: source → addresses → plan → maps, and everything around it that must survive, be told or be asked.

use std::future::pending;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use lbd_common::reason::Reason;
use sd_notify::NotifyState;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use self::core::{Core, Inputs};
use self::exhaustion::{Exhaustion, Look};
use self::hub::{Hub, Patience};
use self::state::{CONTACT, HEALTH, INVENTORY, NAMES, StateDirectory, StateError};
use self::view::{Holders, View};
use crate::api::server::{Api, Call, Order};
use crate::api::types::{AcceptClusterReply, AdoptReply, Names, ReloadRequest, SourceStatus};
use crate::config::{Config, ConfigError, Severity};
use crate::dataplane::{self, Dataplane, DataplaneError, Pins};
use crate::health::{self, Prober, SavedTarget};
use crate::plan::model::{Health, Plan};
use crate::source::Inventory;
use crate::source::kubernetes::SourceError;

mod core;
#[doc(hidden)]
pub mod dry;
mod events;
mod exhaustion;
mod hub;
mod reload;
pub mod state;
pub(crate) mod view;

/// How long a change waits for others that come with it.
const COALESCE: Duration = Duration::from_millis(2);
/// First and longest pause before a failed change of the datapath is tried again.
const RETRY_FIRST: Duration = Duration::from_millis(20);
const RETRY_LAST: Duration = Duration::from_secs(5);
/// How often ages, files and the watchdog are looked after.
const TICK: Duration = Duration::from_secs(1);
/// How often a plan is made although nothing has changed: reservations of addresses end by themselves.
const REPLAN: Duration = Duration::from_mins(1);
/// Shortest pause between two writes of the files that only a restart reads, and between two of the names.
const SAVE_INTERVAL: Duration = Duration::from_secs(5);
const SAVE_NAMES_INTERVAL: Duration = Duration::from_millis(500);
/// Seconds between two writes of when the cluster was last heard of.
const SAVE_CONTACT_INTERVAL: u64 = 60;

/// Why the agent ended.
#[derive(Debug, Error)]
pub enum AgentError {
    /// The configuration file is wrong.
    #[error("{0}")]
    Config(#[from] ConfigError),
    /// The file does not fit the host's interfaces.
    #[error("{0}")]
    Misfit(String),
    /// The host can't carry the datapath.
    #[error("the host is not ready; nothing was changed:\n{0}")]
    Host(String),
    /// The data plane can't start.
    #[error(transparent)]
    Dataplane(#[from] DataplaneError),
    /// The kubeconfig is of no use.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The state directory is of no use.
    #[error(transparent)]
    State(#[from] StateError),
    /// A socket can't be opened.
    #[error("cannot listen on {address}: {source}; {remedy}")]
    Listen {
        /// Path or address.
        address: String,
        /// The kernel's answer.
        source: io::Error,
        /// What to do.
        remedy: &'static str,
    },
    /// The runtime can't start.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// The last list of Services and nodes, on disk.
#[derive(Debug, Serialize, Deserialize)]
struct SavedInventory<I> {
    /// When it was known to be current, in seconds since the epoch.
    synced: i64,
    inventory: I,
}

/// When the cluster was last heard of, on disk: what it says may be the same for days.
#[derive(Debug, Serialize, Deserialize)]
struct SavedContact {
    /// In seconds since the epoch.
    at: i64,
}

/// The last list of Services and nodes, and until when it was current.
fn restore(state: &StateDirectory) -> Option<SavedInventory<Inventory>> {
    let mut saved: SavedInventory<Inventory> = state.load(INVENTORY)?;
    if let Some(contact) = state.load::<SavedContact>(CONTACT) {
        saved.synced = saved.synced.max(contact.at);
    }
    Some(saved)
}

/// Runs until it is told to stop. Whatever the end, the datapath goes on forwarding.
pub fn run(path: &Path) -> Result<(), AgentError> {
    let config = crate::config::load(path)?;
    if dataplane::OBJECT.is_empty() {
        return Err(DataplaneError::NoObject.into());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|source| AgentError::System { what: "cannot start threads", source })?;
    let result = runtime.block_on(serve(path.to_owned(), config));
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

/// Tells systemd, if it listens.
fn tell_systemd(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!(%error, "systemd was not told");
    }
}

/// Waits for a change. A sender that has ended changes nothing any more.
async fn changed<T>(receiver: &mut watch::Receiver<T>) {
    if receiver.changed().await.is_err() {
        pending::<()>().await;
    }
}

async fn changed_if<T>(receiver: Option<&mut watch::Receiver<T>>) {
    match receiver {
        Some(receiver) => changed(receiver).await,
        None => pending().await,
    }
}

async fn at(moment: Option<Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep_until(moment.into()).await,
        None => pending().await,
    }
}

/// Takes over a value, and says whether it is another one.
fn renew<T: Clone + PartialEq>(old: &mut T, new: &T) -> bool {
    let other = old != new;
    if other {
        old.clone_from(new);
    }
    other
}

async fn serve(path: PathBuf, config: Config) -> Result<(), AgentError> {
    let on_signal = |kind| signal(kind).map_err(|source| AgentError::System { what: "cannot handle signals", source });
    let mut hangup = on_signal(SignalKind::hangup())?;
    let mut terminate = on_signal(SignalKind::terminate())?;
    let mut interrupt = on_signal(SignalKind::interrupt())?;

    check_fit(&config)?;
    // Before the host is looked at more closely: what another agent has done there is no fault of the host.
    let state = match StateDirectory::open(&config.state_dir) {
        // Whoever may not attach anything may not write there either: the cause is told, not what follows from it.
        Err(error @ StateError::Io { .. }) => return Err(check_host(&config).err().unwrap_or(error.into())),
        state => Arc::new(state?),
    };
    check_host(&config)?;
    let saved = config.hub.kubernetes.as_ref().and_then(|_| restore(&state));
    let restored_health = health::restore(&state.load::<Vec<SavedTarget>>(HEALTH).unwrap_or_default());
    // A kubeconfig that is wrong is found before anything is attached.
    let restored = saved.as_ref().map(|saved| (saved.synced, &saved.inventory));
    let mut hub = Hub::start(&config, &state, restored, Patience::default()).await?;
    let (order_calls, mut orders) = mpsc::channel::<Order>(4);
    let (publish, views) = watch::channel(Arc::new(View::default()));
    let api = Api::bind(&config, views, order_calls).await?;

    let dataplane = tokio::task::block_in_place(|| Dataplane::start(&config, dataplane::OBJECT))?;
    let mut facts = dataplane.facts();
    let mut taken = dataplane.taken();
    let mut host_notices = dataplane.notices();
    let holders = dataplane.holders();
    let (prober, mut health) = Prober::start(restored_health);
    let now = Timestamp::now();
    let mut agent = Agent {
        core: Core::new(config, dataplane, Arc::clone(&state), now),
        inputs: Inputs::default(),
        holders,
        started: now,
        prober,
        publish,
        state,
        saving: None,
        saved_at: None,
        saved_names_at: None,
        saved_inventory: saved.map(|saved| Arc::new(saved.inventory)),
        saved_health: None,
        saved_names: None,
        saved_contact: None,
        sources: hub.status(),
        exhaustion: Exhaustion::default(),
        looking: None,
        retry: None,
        pause: RETRY_FIRST,
    };
    agent.take_inputs(&mut hub, &mut health, &mut facts, &mut taken, &mut host_notices);
    agent.core.tell(false, "Started", concat!("lbd ", env!("CARGO_PKG_VERSION"), " started"), now);
    agent.round(&mut hub);
    let serving = api.serve()?;
    tell_systemd(&[NotifyState::Ready]);

    let watchdog = sd_notify::watchdog_enabled().is_some();
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut replan = tokio::time::interval(REPLAN);
    loop {
        let mut due = false;
        tokio::select! {
            () = changed_if(hub.snapshots.as_mut()) => {}
            () = changed_if(hub.notices.as_mut()) => {}
            () = changed_if(hub.standing.as_mut()) => {}
            () = changed_if(hub.kept.as_mut()) => {}
            () = changed(&mut health) => {}
            () = changed(&mut facts) => {}
            () = changed(&mut taken) => {}
            () = changed(&mut host_notices) => {}
            () = at(agent.retry) => due = true,
            _ = replan.tick() => due = true,
            _ = tick.tick() => {
                if watchdog {
                    tell_systemd(&[NotifyState::Watchdog]);
                }
                agent.watch_sources(&hub);
                let exhausted = agent.watch_ports();
                agent.keep_files(&hub);
                // What only time changes: how long the cluster has been silent, and what is waited for.
                if !(hub.take(&mut agent.inputs) || exhausted) {
                    hub.flush(agent.core.saved());
                    agent.publish(&hub);
                    continue;
                }
                due = true;
            }
            Some(order) = orders.recv() => {
                agent.obey(order, &path, &mut hub);
                continue;
            }
            _ = hangup.recv() => {
                let mut states = vec![NotifyState::Reloading];
                states.extend(NotifyState::monotonic_usec_now().ok());
                tell_systemd(&states);
                agent.reload(&path, ReloadRequest::default(), &mut hub);
                tell_systemd(&[NotifyState::Ready]);
                continue;
            }
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        }
        tokio::time::sleep(COALESCE).await;
        if agent.take_inputs(&mut hub, &mut health, &mut facts, &mut taken, &mut host_notices) || due {
            agent.round(&mut hub);
        }
    }
    tracing::info!("stopping; the datapath goes on forwarding");
    tell_systemd(&[NotifyState::Stopping]);
    serving.stop();
    agent.finish(&hub).await;
    Ok(())
}

/// Refuses a file that does not fit the host's interfaces.
fn check_fit(config: &Config) -> Result<(), AgentError> {
    let facts = dataplane::host_facts()?;
    let mut misfits = Vec::new();
    for problem in crate::config::check_host(config, &facts) {
        match problem.severity {
            Severity::Error => misfits.push(problem.to_string()),
            Severity::Warning => tracing::warn!("{problem}"),
        }
    }
    if misfits.is_empty() { Ok(()) } else { Err(AgentError::Misfit(misfits.join("\n"))) }
}

/// Refuses a host on which the datapath can't run; says what will be less than good.
fn check_host(config: &Config) -> Result<(), AgentError> {
    let mut fatal = Vec::new();
    for problem in dataplane::preflight(config) {
        if problem.fatal {
            fatal.push(format!("  {}: {}", problem.subject, problem.message));
        } else {
            tracing::warn!(subject = problem.subject, "{}", problem.message);
        }
    }
    if fatal.is_empty() { Ok(()) } else { Err(AgentError::Host(fatal.join("\n"))) }
}

struct Agent {
    core: Core<Dataplane>,
    inputs: Inputs,
    holders: watch::Receiver<Holders>,
    started: Timestamp,
    prober: Prober,
    publish: watch::Sender<Arc<View>>,
    state: Arc<StateDirectory>,
    saving: Option<JoinHandle<Result<(), StateError>>>,
    saved_at: Option<Instant>,
    saved_names_at: Option<Instant>,
    saved_inventory: Option<Arc<Inventory>>,
    saved_health: Option<Arc<Health>>,
    saved_names: Option<Arc<Plan>>,
    /// In seconds since the epoch.
    saved_contact: Option<i64>,
    sources: Vec<SourceStatus>,
    exhaustion: Exhaustion,
    looking: Option<JoinHandle<Result<Look, DataplaneError>>>,
    retry: Option<Instant>,
    pause: Duration,
}

impl Agent {
    /// Looks at everything that may have changed, and says whether anything has: sources also tell that nothing is new.
    fn take_inputs(
        &mut self,
        hub: &mut Hub,
        health: &mut watch::Receiver<Health>,
        facts: &mut watch::Receiver<crate::plan::model::HostFacts>,
        taken: &mut watch::Receiver<std::collections::BTreeSet<(crate::config::SegmentName, std::net::IpAddr)>>,
        host_notices: &mut watch::Receiver<Vec<crate::plan::model::Notice>>,
    ) -> bool {
        let mut news = hub.take(&mut self.inputs);
        hub.flush(self.core.saved());
        let known = health.borrow_and_update();
        if *known != *self.inputs.health {
            let known = Arc::new(known.clone());
            self.core.tell_health(&self.inputs.health, &known, Timestamp::now());
            self.inputs.health = known;
            news = true;
        }
        news |= renew(&mut self.inputs.host, &facts.borrow_and_update());
        news |= renew(&mut self.inputs.taken, &taken.borrow_and_update());
        news |= renew(&mut self.inputs.host_notices, &host_notices.borrow_and_update());
        news
    }

    /// One round: addresses, plan, maps; then everybody is told.
    fn round(&mut self, hub: &mut Hub) {
        let done = tokio::task::block_in_place(|| self.core.reconcile(&self.inputs, Timestamp::now()));
        self.after_apply(done, hub);
        self.keep_files(hub);
    }

    fn after_apply(&mut self, done: bool, hub: &mut Hub) {
        if done {
            self.retry = None;
            self.pause = RETRY_FIRST;
        } else {
            self.retry = Some(Instant::now() + self.pause);
            self.pause = (self.pause * 2).min(RETRY_LAST);
        }
        if self.core.may_act(&self.inputs) {
            self.prober.set_targets(self.core.plan.probes.clone());
            hub.write(&self.core, &self.inputs);
        }
        self.publish(hub);
    }

    /// Carries out what somebody has asked for, and answers. The asker may have gone away.
    fn obey(&mut self, order: Order, path: &Path, hub: &mut Hub) {
        match order {
            Order::Reload(Call { request, reply }) => {
                let _ = reply.send(self.reload(path, request, hub));
            }
            Order::Adopt(Call { request, reply }) => {
                let now = Timestamp::now();
                let adopted = self.core.adopt(&request, &self.inputs, now).map(|uid| {
                    self.round(hub);
                    let found = self.core.assignments.services.get(&request);
                    let addresses = found.map(|found| found.addresses.clone()).unwrap_or_default();
                    AdoptReply { service: request.to_string(), uid, addresses }
                });
                let _ = reply.send(adopted);
            }
            Order::AcceptCluster(Call { request: (), reply }) => {
                let accepted = hub.accept_cluster().map(|uid| {
                    let now = Timestamp::now();
                    self.core.tell(false, "ClusterAccepted", &format!("the cluster {uid} is the right one"), now);
                    hub.take(&mut self.inputs);
                    self.round(hub);
                    AcceptClusterReply { uid }
                });
                let _ = reply.send(accepted);
            }
        }
    }

    fn reload(&mut self, path: &Path, request: ReloadRequest, hub: &mut Hub) -> crate::api::types::ReloadReply {
        let now = Timestamp::now();
        let reply = tokio::task::block_in_place(|| self.core.reload(path, request, &self.inputs, now));
        hub.configure(&self.core.config);
        let done = self.core.apply_status.error.is_none();
        self.after_apply(done, hub);
        self.keep_files(hub);
        reply
    }

    /// Tells when a source goes away and comes back.
    fn watch_sources(&mut self, hub: &Hub) {
        let now = Timestamp::now();
        let sources = hub.status();
        for source in &sources {
            let before = self.sources.iter().find(|before| before.name == source.name);
            match (before.map(|before| before.state.as_str()), source.state.as_str()) {
                (Some(before), after) if before == after => {}
                (_, "synced") => self.core.tell(false, "SourceSynced", &format!("{} is current", source.name), now),
                (_, after) => {
                    let why = source.error.as_deref().unwrap_or("no connection yet");
                    self.core.tell(true, "SourceAway", &format!("{} is {after}: {why}", source.name), now);
                }
            }
        }
        self.sources = sources;
    }

    /// Looks whether SNAT ports have run out, and says whether there is news of it.
    fn watch_ports(&mut self) -> bool {
        let now = Timestamp::now().as_second();
        if let Some(looking) = self.looking.take_if(|looking| looking.is_finished()) {
            match futures::FutureExt::now_or_never(looking) {
                Some(Ok(Ok(look))) => self.exhaustion.looked(look, &self.core.plan, now),
                Some(Ok(Err(error))) => tracing::debug!(%error, "cannot look for the SNAT ports in use"),
                // It has panicked, which was told, or ends with the agent.
                Some(Err(_)) | None => {}
            }
        }
        let bpffs = &self.core.config.datapath.bpffs;
        let tenants = self.core.plan.tenants.keys().copied();
        match Pins::open(bpffs).and_then(|pins| pins.reason_of(Reason::SnatExhausted, tenants)) {
            Ok(counts) => self.exhaustion.counted(counts),
            Err(error) => tracing::debug!(%error, "cannot read refusals"),
        }
        // In the background: a million flows take a while.
        if self.looking.is_none()
            && let Some(ports) = self.exhaustion.wants_look(now)
        {
            let bpffs = bpffs.clone();
            self.looking = Some(tokio::task::spawn_blocking(move || Look::take(&bpffs, ports)));
        }
        renew(&mut self.inputs.exhausted, &self.exhaustion.current(now))
    }

    fn publish(&self, hub: &Hub) {
        let holders = self.holders.borrow().clone();
        let view = View::new(&self.core, &self.inputs, holders, hub, self.started);
        self.publish.send_replace(Arc::new(view));
    }

    /// Writes what only a restart reads, in the background and not too often.
    fn keep_files(&mut self, hub: &Hub) {
        if let Some(saving) = self.saving.take_if(|saving| saving.is_finished()) {
            let now = Timestamp::now();
            // A task that has ended is ready at once.
            if let Some(Ok(Err(error))) = futures::FutureExt::now_or_never(saving) {
                self.core.tell(true, "StateNotSaved", &error.to_string(), now);
            }
        }
        let due = |at: Option<Instant>, interval| at.is_none_or(|at| at.elapsed() >= interval);
        let names = due(self.saved_names_at, SAVE_NAMES_INTERVAL);
        let all = due(self.saved_at, SAVE_INTERVAL);
        if self.saving.is_some() || !(names || all) {
            return;
        }
        if let Some(work) = self.unsaved(hub, all) {
            self.saving = Some(tokio::task::spawn_blocking(work));
        }
    }

    /// What has changed since it was last written, as something that writes it: the names, or everything.
    fn unsaved(&mut self, hub: &Hub, all: bool) -> Option<impl FnOnce() -> Result<(), StateError> + Send + use<>> {
        let changed = |saved: &Option<Arc<Plan>>, plan: &Arc<Plan>| {
            saved.as_ref().is_none_or(|saved| !Arc::ptr_eq(saved, plan) && !view::same_names(saved, plan))
        };
        let plan = Some(&self.core.plan).filter(|plan| self.core.ever && changed(&self.saved_names, plan)).cloned();
        let inventory = hub.live().filter(|inventory| {
            all && self.saved_inventory.as_ref().is_none_or(|saved| !Arc::ptr_eq(saved, inventory))
        });
        let health = Some(&self.inputs.health)
            .filter(|health| all && self.saved_health.as_ref().is_none_or(|saved| !Arc::ptr_eq(saved, health)))
            .cloned();
        if let Some(plan) = &plan {
            self.saved_names = Some(Arc::clone(plan));
            self.saved_names_at = Some(Instant::now());
        }
        if inventory.is_some() || health.is_some() {
            self.saved_at = Some(Instant::now());
        }
        // A change of the clock, too, is news.
        let contact = hub.contact(Timestamp::now().as_second()).filter(|contact| {
            all && self.saved_contact.is_none_or(|saved| saved.abs_diff(*contact) >= SAVE_CONTACT_INTERVAL)
        });
        if inventory.is_none() && health.is_none() && plan.is_none() && contact.is_none() {
            return None;
        }
        self.saved_contact = contact.or(self.saved_contact);
        self.saved_inventory = inventory.clone().or_else(|| self.saved_inventory.take());
        self.saved_health = health.clone().or_else(|| self.saved_health.take());
        let (state, hub_name) = (Arc::clone(&self.state), self.core.config.hub.name.clone());
        Some(move || {
            if let Some(plan) = plan {
                let names = view::names(&plan, &hub_name);
                // Names outlive their ids for as long as flows may: an id that is gone keeps its last name.
                let old = state.load::<Names>(NAMES).unwrap_or_default();
                state.save(NAMES, &view::with_former(names, old))?;
            }
            if let Some(health) = health {
                state.save(HEALTH, &health::save(&health))?;
            }
            if let Some(inventory) = inventory {
                let synced = Timestamp::now().as_second();
                state.save(INVENTORY, &SavedInventory { synced, inventory: &*inventory })?;
            }
            if let Some(at) = contact {
                state.save(CONTACT, &SavedContact { at })?;
            }
            Ok(())
        })
    }

    /// The last writes.
    async fn finish(mut self, hub: &Hub) {
        if let Some(saving) = self.saving.take() {
            // What it could not write is tried again below.
            let _ = saving.await;
        }
        self.saved_contact = None;
        if let Some(work) = self.unsaved(hub, true)
            && let Ok(Err(error)) = tokio::task::spawn_blocking(work).await
        {
            tracing::warn!(%error, "state not saved");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b35_the_age_of_a_restored_inventory_counts_from_the_last_contact() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(directory.path()).unwrap();
        assert!(restore(&state).is_none());
        state.save(INVENTORY, &SavedInventory { synced: 100, inventory: &Inventory::default() }).unwrap();
        assert_eq!(restore(&state).unwrap().synced, 100);
        for (at, expected) in [(5000, 5000), (50, 100)] {
            state.save(CONTACT, &SavedContact { at }).unwrap();
            assert_eq!(restore(&state).unwrap().synced, expected);
        }
    }
}
