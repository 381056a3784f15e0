//! Which agent may give out and announce addresses: the one whose state directory a Lease names.
//!
//! Time is what passes here between two looks, never what the Lease says of the clocks of others: a clock that jumps takes
//! no Lease away. Nor does an API that was away: before a Lease is taken over it must have been watched unchanged, without a
//! gap, for as long as it is valid.

use std::time::{Duration, Instant};

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::Api;
use kube::api::{ObjectMeta, PostParams};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::access::Access;
use super::follow::{describe, is_namespace_going};
use super::{NAMESPACE, own_object};

/// How often the Lease is renewed or looked at, and how long it is valid.
#[derive(Clone, Debug)]
pub struct LeaseTiming {
    /// Between two looks.
    pub interval: Duration,
    /// How long it is valid without being renewed; whole seconds.
    pub valid: Duration,
    /// Limit for an answer.
    pub request: Duration,
}

impl Default for LeaseTiming {
    fn default() -> Self {
        Self { interval: Duration::from_secs(5), valid: Duration::from_secs(15), request: Duration::from_secs(4) }
    }
}

/// What this agent may do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Standing {
    /// Not known yet.
    #[default]
    Unknown,
    /// The Lease names us.
    Holder {
        /// It named another agent before.
        taken: bool,
    },
    /// The Lease names another agent, which renews it.
    Other {
        /// Whom it names.
        holder: String,
    },
    /// There can be no Lease: whether another agent serves cannot be known.
    Unguarded {
        /// Why, and what to do.
        why: String,
    },
}

impl Standing {
    /// Whether addresses may be given out and announced.
    pub fn acts(&self) -> bool {
        matches!(self, Self::Holder { .. } | Self::Unguarded { .. })
    }
}

/// Keeps the Lease, once it is let. Dropping it stops it; the Lease runs out by itself.
#[derive(Debug)]
pub struct LeaseKeeper {
    enabled: watch::Sender<bool>,
    standing: watch::Receiver<Standing>,
    _tasks: JoinSet<()>,
}

impl LeaseKeeper {
    /// Prepares to hold the Lease of a hub in the name of `identity`. Must be called inside a runtime.
    pub fn start(access: &Access, hub: &str, identity: &str, timing: LeaseTiming) -> Self {
        let enabled = watch::Sender::new(false);
        let (publish, standing) = watch::channel(Standing::Unknown);
        let worker = Worker {
            access: access.clone(),
            name: own_object(hub),
            identity: identity.to_owned(),
            enabled: enabled.subscribe(),
            publish,
            timing,
            watched: None,
            last_look: None,
        };
        let mut tasks = JoinSet::new();
        tasks.spawn(worker.run());
        Self { enabled, standing, _tasks: tasks }
    }

    /// Whether to try: not before the cluster is known to be the right one.
    pub fn enable(&self, enabled: bool) {
        self.enabled.send_if_modified(|current| std::mem::replace(current, enabled) != enabled);
    }

    /// What this agent may do.
    pub fn standing(&self) -> watch::Receiver<Standing> {
        self.standing.clone()
    }
}

/// A Lease as it was last seen to change.
struct Watched {
    holder: String,
    version: String,
    since: Instant,
}

struct Worker {
    access: Access,
    name: String,
    identity: String,
    enabled: watch::Receiver<bool>,
    publish: watch::Sender<Standing>,
    timing: LeaseTiming,
    watched: Option<Watched>,
    last_look: Option<Instant>,
}

/// How a look at the Lease went.
enum Look {
    Known(Standing),
    /// Nothing is known that was not before.
    Nothing,
    /// Somebody was faster: look again at once.
    Again,
}

impl Worker {
    async fn run(mut self) {
        loop {
            if !*self.enabled.borrow_and_update() {
                if self.enabled.changed().await.is_err() {
                    return;
                }
                continue;
            }
            let look = self.look().await;
            let pause = match look {
                Look::Known(standing) => {
                    self.publish.send_if_modified(|current| {
                        let changed = *current != standing;
                        *current = standing;
                        changed
                    });
                    self.timing.interval
                }
                Look::Nothing => self.timing.interval / 4,
                Look::Again => self.timing.interval / 20,
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                changed = self.enabled.changed() => if changed.is_err() { return },
            }
        }
    }

    async fn look(&mut self) -> Look {
        let api: Api<Lease> = Api::namespaced(self.access.client(), NAMESPACE);
        let begun = Instant::now();
        let found = match timeout(self.timing.request, api.get_opt(&self.name)).await {
            Ok(Ok(found)) => found,
            Ok(Err(error)) => return self.failed("get", &error),
            Err(_) => return Look::Nothing,
        };
        // What happened in a gap was not watched; a shorter one leaves the holder time to renew.
        let gap = self.last_look.replace(begun).is_none_or(|last| begun - last > self.timing.valid * 2 / 3);
        let Some(lease) = found else { return self.create(&api).await };
        let version = lease.metadata.resource_version.clone().unwrap_or_default();
        let holder = lease.spec.as_ref().and_then(|spec| spec.holder_identity.clone()).unwrap_or_default();
        if holder == self.identity {
            self.watched = None;
            return self.renew(&api, lease, false).await;
        }
        let seconds = lease.spec.as_ref().and_then(|spec| spec.lease_duration_seconds).unwrap_or_default();
        // What another says of its own patience is believed within limits.
        let valid = Duration::from_secs(u64::try_from(seconds).unwrap_or_default())
            .clamp(self.timing.valid, self.timing.valid * 4);
        let same = self.watched.as_ref().is_some_and(|known| known.holder == holder && known.version == version);
        if !same || gap {
            self.watched = Some(Watched { holder: holder.clone(), version, since: begun });
        }
        let expired = self.watched.as_ref().is_some_and(|known| begun - known.since >= valid);
        if holder.is_empty() || expired {
            let taken = !holder.is_empty();
            return self.renew(&api, lease, taken).await;
        }
        Look::Known(Standing::Other { holder })
    }

    fn spec(&self, transitions: i32, acquired: Option<MicroTime>) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(i32::try_from(self.timing.valid.as_secs()).unwrap_or(i32::MAX).max(1)),
            acquire_time: Some(acquired.unwrap_or_else(|| now.clone())),
            renew_time: Some(now),
            lease_transitions: Some(transitions),
            ..LeaseSpec::default()
        }
    }

    async fn create(&mut self, api: &Api<Lease>) -> Look {
        let metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
        let lease = Lease { metadata, spec: Some(self.spec(0, None)) };
        match timeout(self.timing.request, api.create(&PostParams::default(), &lease)).await {
            Ok(Ok(_)) => Look::Known(Standing::Holder { taken: false }),
            Ok(Err(kube::Error::Api(status))) if status.code == 409 => Look::Again,
            Ok(Err(error)) => self.failed("create", &error),
            Err(_) => Look::Nothing,
        }
    }

    async fn renew(&mut self, api: &Api<Lease>, mut lease: Lease, taken: bool) -> Look {
        let before = lease.spec.take().unwrap_or_default();
        let transitions = before.lease_transitions.unwrap_or_default().saturating_add(i32::from(taken));
        lease.spec = Some(self.spec(transitions, before.acquire_time.filter(|_| !taken)));
        // With the version that was read: of two that try, one fails.
        match timeout(self.timing.request, api.replace(&self.name, &PostParams::default(), &lease)).await {
            Ok(Ok(_)) => {
                if taken {
                    tracing::warn!(lease = self.name, former = before.holder_identity, "Lease taken over");
                }
                self.watched = None;
                // While it is held, it stays what it was.
                let taken = taken || *self.publish.borrow() == Standing::Holder { taken: true };
                Look::Known(Standing::Holder { taken })
            }
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => Look::Again,
            Ok(Err(error)) => self.failed("update", &error),
            Err(_) => Look::Nothing,
        }
    }

    /// Without an answer nothing changes; without the right, or the namespace, there is no Lease to be had.
    fn failed(&self, verb: &str, error: &kube::Error) -> Look {
        let kube::Error::Api(status) = error else {
            tracing::debug!("{verb} leases: {}", describe(error));
            return Look::Nothing;
        };
        let remedy = match status.code {
            403 if is_namespace_going(status) => {
                format!("make the namespace {NAMESPACE} again once it is gone, see `lbd rbac`")
            }
            403 => format!("allow {verb} of leases.coordination.k8s.io in namespace {NAMESPACE}, see `lbd rbac`"),
            404 => format!("make the namespace {NAMESPACE}, see `lbd rbac`"),
            401 => {
                let _ = self.access.reread();
                return Look::Nothing;
            }
            _ => return Look::Nothing,
        };
        // Who has held it goes on: another may hold it now, but nothing says so.
        if matches!(*self.publish.borrow(), Standing::Holder { .. } | Standing::Other { .. }) {
            return Look::Nothing;
        }
        Look::Known(Standing::Unguarded {
            why: format!(
                "no Lease can be had, so a second agent with the same pools would not be noticed: {}; {remedy}",
                describe(error)
            ),
        })
    }
}
