//! A cluster as a source: Services, Nodes, Namespaces and EndpointSlices, followed by list and watch.

mod access;
mod assemble;
mod check;
pub(crate) mod convert;
mod expiry;
mod follow;
mod lease;
mod record;
pub mod rights;
#[cfg(test)]
pub(crate) mod testing;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

pub(crate) use access::lock;
pub use access::{Access, SourceError};
use assemble::Assembler;
pub use check::{Finding, check};
pub use expiry::Validity;
use follow::{Follower, Kind, Update};
pub(crate) use follow::{describe, is_namespace_going};
pub use lease::{LeaseKeeper, LeaseTiming, Standing};
pub use record::{Failure, Kept, RecordKeeper};

use super::{Inventory, ObjectName, ServiceKind};
use crate::config;

/// The namespace of our own objects.
pub const NAMESPACE: &str = "lbd-system";

/// Name of the Lease, and of the ConfigMap with the record, of a hub: two load balancers of one cluster that have different tenants
/// give the hub different names.
pub fn own_object(hub: &str) -> String {
    let plain = |letter: char| if letter.is_ascii_alphanumeric() { letter.to_ascii_lowercase() } else { '-' };
    format!("lbd-{}", hub.chars().map(plain).collect::<String>())
}

/// Shortest pause between two snapshots.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(5);
/// Longest pause between two snapshots, however many objects there are.
const PUBLISH_INTERVAL_MAX: Duration = Duration::from_millis(200);

/// Limits and pauses of the conversation with the server.
#[derive(Clone, Debug)]
pub struct Timing {
    /// Limit for an answer, except to a watch.
    pub request: Duration,
    /// How long a watch lasts before the server ends it.
    pub watch_seconds: u32,
    /// How much longer than that it may be silent.
    pub silence: Duration,
    /// First pause after a failure.
    pub retry_first: Duration,
    /// Longest pause after failures.
    pub retry_last: Duration,
    /// Objects per page of a list.
    pub page: u32,
    /// For how long what is hard to believe is held: a list that lacks most of what is in use, a server that goes back in time.
    pub hold: Duration,
    /// How long a watch may be broken and still be resumed; after that everything is listed.
    pub resume: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            request: Duration::from_secs(15),
            // Short, so that a connection that died silently is noticed; resuming costs the server next to nothing.
            watch_seconds: 60,
            silence: Duration::from_secs(10),
            retry_first: Duration::from_millis(100),
            retry_last: Duration::from_secs(5),
            page: 500,
            hold: Duration::from_mins(1),
            resume: Duration::from_secs(30),
        }
    }
}

/// How to start.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The inventory of an earlier life, shown until a complete one has come.
    pub restored: Option<Inventory>,
    /// Annotations of Services to keep beside ours (`address_annotations`).
    pub annotations: BTreeSet<String>,
    /// Limits and pauses.
    pub timing: Timing,
}

/// A state of the source.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// What is known; a new one only when something that lbd reads has changed.
    pub inventory: Arc<Inventory>,
    /// The inventory comes from complete lists of this life, not from disk.
    pub live: bool,
    /// Every watch is open that may be.
    pub connected: bool,
    /// When the inventory was last known to be what the server has; `None` if not in this life.
    pub last_sync: Option<Instant>,
    /// What of the lists is not believed yet, and why.
    pub held: Option<String>,
    /// What is wrong, while it is.
    pub last_error: Option<String>,
    /// Failed lists and watches since the start, by kind of object.
    pub failures: BTreeMap<&'static str, u64>,
    /// Lists that arrived since the start, of any kind.
    pub lists: u64,
}

/// Whether a Service is one of ours.
pub type Ours = Arc<dyn Fn(&ObjectName) -> bool + Send + Sync>;

/// A running source; dropping it stops it.
pub struct KubernetesSource {
    access: Access,
    annotations: watch::Sender<BTreeSet<String>>,
    relist: watch::Sender<u64>,
    trust: watch::Sender<u64>,
    ours: watch::Sender<Option<Ours>>,
    _tasks: JoinSet<()>,
}

impl KubernetesSource {
    /// Checks the kubeconfig and starts to follow the cluster. Fails only for what is wrong with the file: a server
    /// that does not answer is told by the snapshots, and tried again for ever.
    #[expect(clippy::unused_async, reason = "must be called inside a runtime, and says so")]
    pub async fn start(
        settings: &config::Kubernetes,
        options: Options,
    ) -> Result<(Self, watch::Receiver<Snapshot>), SourceError> {
        let access = Access::open(settings)?;
        let snapshot = Snapshot { inventory: Arc::new(options.restored.unwrap_or_default()), ..Snapshot::default() };
        let (snapshots, receiver) = watch::channel(snapshot);
        let annotations = watch::Sender::new(options.annotations);
        let (relist, trust) = (watch::Sender::new(0), watch::Sender::new(0));
        let ours = watch::Sender::new(None);
        let assembler = Assembler::new(&snapshots.borrow().inventory, options.timing.hold);
        let (updates, incoming) = mpsc::channel(1024);
        let mut tasks = JoinSet::new();
        for kind in Kind::ALL {
            let follower = Follower {
                access: access.clone(),
                annotations: annotations.subscribe(),
                relist: relist.subscribe(),
                updates: updates.clone(),
                timing: options.timing.clone(),
            };
            match kind {
                Kind::Services => tasks.spawn(follower.run::<v1::Service>()),
                Kind::Nodes => tasks.spawn(follower.run::<v1::Node>()),
                Kind::Namespaces => tasks.spawn(follower.run::<v1::Namespace>()),
                Kind::EndpointSlices => tasks.spawn(follower.run::<EndpointSlice>()),
            };
        }
        let publisher = Publisher {
            assembler,
            snapshots,
            relist: relist.clone(),
            trust: trust.subscribe(),
            ours: ours.subscribe(),
        };
        tasks.spawn(publisher.run(incoming));
        tasks.spawn(access.clone().follow());
        Ok((Self { access, annotations, relist, trust, ours, _tasks: tasks }, receiver))
    }

    /// The client, for those who write.
    pub fn access(&self) -> &Access {
        &self.access
    }

    /// Lists everything again.
    pub fn relist(&self) {
        self.relist.send_modify(|count| *count += 1);
    }

    /// Believes what is held.
    pub fn trust(&self) {
        self.trust.send_modify(|count| *count += 1);
    }

    /// Says which Services are ours; without a word all of type LoadBalancer are, whatever their class.
    pub fn set_ours(&self, ours: Ours) {
        self.ours.send_replace(Some(ours));
    }

    /// Replaces the annotations to keep; lists again if they changed.
    pub fn set_annotations(&self, annotations: BTreeSet<String>) {
        let changed = self.annotations.send_if_modified(|current| {
            let changed = *current != annotations;
            *current = annotations;
            changed
        });
        if changed {
            self.relist();
        }
    }
}

/// What is known of one kind's watch.
#[derive(Default)]
struct Stream {
    alive: bool,
    heard: Option<Instant>,
    /// The server refuses to show the kind, which can be done without.
    forbidden: bool,
    error: Option<String>,
}

/// Assembles updates and publishes snapshots.
struct Publisher {
    assembler: Assembler,
    snapshots: watch::Sender<Snapshot>,
    relist: watch::Sender<u64>,
    trust: watch::Receiver<u64>,
    ours: watch::Receiver<Option<Ours>>,
}

impl Publisher {
    /// Until nobody sends.
    async fn run(self, mut updates: mpsc::Receiver<Update>) {
        let Self { mut assembler, snapshots, relist, mut trust, ours } = self;
        let mut streams: BTreeMap<Kind, Stream> = Kind::ALL.into_iter().map(|kind| (kind, Stream::default())).collect();
        let mut changed = false;
        let mut interval = PUBLISH_INTERVAL;
        let mut last = Instant::now().checked_sub(PUBLISH_INTERVAL_MAX).unwrap_or_else(Instant::now);
        let mut failures: BTreeMap<_, _> = Kind::ALL.into_iter().map(|kind| (kind.as_str(), 0)).collect();
        let mut lists = 0;
        // Not before: a list that was asked for takes its time.
        let mut asked = Instant::now();
        loop {
            let due = assembler.due().map(|due| due.max(asked));
            let mut next = tokio::select! {
                first = updates.recv() => match first {
                    None => return,
                    first => first,
                },
                () = tokio::time::sleep_until(due.unwrap_or(asked).into()), if due.is_some() => {
                    asked = Instant::now() + assembler.hold.max(PUBLISH_INTERVAL_MAX);
                    relist.send_modify(|count| *count += 1);
                    continue;
                }
                Ok(()) = trust.changed() => {
                    changed |= assembler.trust();
                    None
                }
            };
            let started = Instant::now();
            // Whatever arrives before the next snapshot is due goes into it.
            while let Some(update) = next {
                let now = Instant::now();
                match &update {
                    Update::Alive(kind) => {
                        let stream = streams.entry(*kind).or_default();
                        *stream = Stream { alive: true, heard: Some(now), ..Stream::default() };
                    }
                    Update::Failed { kind, error, forbidden } => {
                        *failures.entry(kind.as_str()).or_default() += 1;
                        tracing::debug!("{error}");
                        let stream = streams.entry(*kind).or_default();
                        stream.alive = false;
                        stream.error = Some(error.clone());
                        // Endpoints are only needed where a Service is served by them: without the right to see them
                        // everything else works.
                        if *kind == Kind::EndpointSlices && *forbidden {
                            stream.forbidden = true;
                            changed |= assembler.do_without(*kind);
                        }
                    }
                    Update::Listed(kind, _) => {
                        lists += 1;
                        streams.entry(*kind).or_default().heard = Some(now);
                    }
                    Update::Set(_) | Update::Gone(_) => {}
                }
                let complete_before = assembler.complete();
                let is_ours = ours.borrow().clone();
                let is_ours = |name: &ObjectName, service: &super::Service| match &is_ours {
                    Some(is_ours) => is_ours(name),
                    None => service.kind == ServiceKind::LoadBalancer,
                };
                changed |= assembler.apply(update, &is_ours) | (assembler.complete() && !complete_before);
                next = if started.elapsed() < PUBLISH_INTERVAL_MAX {
                    match updates.try_recv() {
                        Ok(update) => Some(update),
                        Err(_) if changed && last.elapsed() < interval => {
                            tokio::time::timeout(interval.saturating_sub(last.elapsed()), updates.recv())
                                .await
                                .ok()
                                .flatten()
                        }
                        Err(_) => None,
                    }
                } else {
                    None
                };
            }
            let connected = streams.values().all(|stream| stream.alive || stream.forbidden);
            let error = streams.values().find_map(|stream| stream.error.clone());
            let heard = streams.values().filter(|stream| !stream.forbidden).map(|stream| stream.heard).min().flatten();
            let complete = assembler.complete();
            if complete && !assembler.inventory.complete {
                Arc::make_mut(&mut assembler.inventory).complete = true;
            }
            let held = assembler.held();
            let show = changed && complete;
            let begun = Instant::now();
            snapshots.send_if_modified(|snapshot| {
                let state_changed = snapshot.connected != connected
                    || snapshot.last_error != error
                    || snapshot.live != complete
                    || snapshot.held != held;
                snapshot.connected = connected;
                snapshot.last_error = error;
                snapshot.held = held;
                snapshot.live = complete;
                if complete {
                    snapshot.last_sync = heard;
                }
                snapshot.failures.clone_from(&failures);
                snapshot.lists = lists;
                if show {
                    snapshot.inventory = Arc::clone(&assembler.inventory);
                }
                state_changed || show
            });
            if show {
                changed = false;
                last = begun;
                // The next change copies the names of one kind: the more there are, the less often that may happen.
                let size = assembler.inventory.services.len() + assembler.inventory.nodes.len();
                interval = (PUBLISH_INTERVAL + Duration::from_micros(2) * u32::try_from(size).unwrap_or(u32::MAX))
                    .min(PUBLISH_INTERVAL_MAX);
            }
        }
    }
}

impl std::fmt::Debug for KubernetesSource {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("KubernetesSource").field("access", &self.access).finish_non_exhaustive()
    }
}
