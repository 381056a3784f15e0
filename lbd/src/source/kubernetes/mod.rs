//! A cluster as a source: Services, Nodes, Namespaces and EndpointSlices, followed by list and watch.

mod access;
mod assemble;
mod check;
pub(crate) mod convert;
mod follow;

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
pub(crate) use follow::describe;
use follow::{Follower, Kind, Update};

use super::Inventory;
use crate::config;

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
    /// Every watch is open.
    pub connected: bool,
    /// When the inventory was last known to be what the server has; `None` if not in this life.
    pub last_sync: Option<Instant>,
    /// What is wrong, while it is.
    pub last_error: Option<String>,
    /// Failed lists and watches since the start.
    pub failures: u64,
    /// Lists that arrived since the start, of any kind.
    pub lists: u64,
}

/// A running source; dropping it stops it.
#[derive(Debug)]
pub struct KubernetesSource {
    access: Access,
    annotations: watch::Sender<BTreeSet<String>>,
    relist: watch::Sender<u64>,
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
        let relist = watch::Sender::new(0);
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
        tasks.spawn(publish(incoming, snapshots));
        tasks.spawn(access.clone().follow());
        Ok((Self { access, annotations, relist, _tasks: tasks }, receiver))
    }

    /// The client, for those who write.
    pub fn access(&self) -> &Access {
        &self.access
    }

    /// Lists everything again.
    pub fn relist(&self) {
        self.relist.send_modify(|count| *count += 1);
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
    error: Option<String>,
}

/// Assembles updates and publishes snapshots until nobody sends.
async fn publish(mut updates: mpsc::Receiver<Update>, snapshots: watch::Sender<Snapshot>) {
    let mut assembler = Assembler::default();
    let mut streams: BTreeMap<Kind, Stream> = Kind::ALL.into_iter().map(|kind| (kind, Stream::default())).collect();
    let mut changed = false;
    let mut interval = PUBLISH_INTERVAL;
    let mut last = Instant::now().checked_sub(PUBLISH_INTERVAL_MAX).unwrap_or_else(Instant::now);
    let (mut failures, mut lists) = (0, 0);
    while let Some(first) = updates.recv().await {
        let mut next = Some(first);
        let started = Instant::now();
        // Whatever arrives before the next snapshot is due goes into it.
        while let Some(update) = next {
            let now = Instant::now();
            match &update {
                Update::Alive(kind) => {
                    let stream = streams.entry(*kind).or_default();
                    *stream = Stream { alive: true, heard: Some(now), error: None };
                }
                Update::Failed { kind, error, forbidden } => {
                    failures += 1;
                    tracing::debug!("{error}");
                    let stream = streams.entry(*kind).or_default();
                    stream.alive = false;
                    stream.error = Some(error.clone());
                    // Endpoints are only needed where a Service is served by them: without the right to see them
                    // everything else works.
                    if *kind == Kind::EndpointSlices && *forbidden {
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
            changed |= assembler.apply(update) | (assembler.complete() && !complete_before);
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
        let connected = streams.values().all(|stream| stream.alive);
        let error = streams.values().find_map(|stream| stream.error.clone());
        let heard = streams.values().map(|stream| stream.heard).min().flatten();
        let complete = assembler.complete();
        if complete && !assembler.inventory.complete {
            Arc::make_mut(&mut assembler.inventory).complete = true;
        }
        let show = changed && complete;
        let begun = Instant::now();
        snapshots.send_if_modified(|snapshot| {
            let state_changed =
                snapshot.connected != connected || snapshot.last_error != error || snapshot.live != complete;
            snapshot.connected = connected;
            snapshot.last_error = error;
            snapshot.live = complete;
            if complete {
                snapshot.last_sync = heard;
            }
            snapshot.failures = failures;
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
