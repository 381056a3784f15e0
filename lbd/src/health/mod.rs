//! Probes of backends: whether a target answers, decided by `state`, asked by `probe`, paced here.
//!
//! One task owns all states and a queue of what is due. Probes run beside it, a bounded number at once, and no more than
//! [`PROBES_PER_SECOND`] are started; what does not fit waits its turn, oldest first, so that a burst or a wall of dead targets delays
//! nobody for long.

#[cfg(test)]
mod answers;
mod probe;
mod state;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::sys::resource::{Resource, getrlimit};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use self::probe::{Outcome, Trust, probe};
use self::state::Machine;
use crate::config::{Probe, ProbeKind, ProbePort};
use crate::plan::model::{Health, ProbeTarget, TargetHealth};

/// Probes started in a second, at most, over all targets.
pub const PROBES_PER_SECOND: u32 = 5000;
/// Probes under way at once, at most.
const PARALLEL: usize = 4096;
/// Share of a second in which a burst may use up its probes.
const BURST: u32 = PROBES_PER_SECOND / 20;
/// Changes closer together than this are told together.
const GATHER: Duration = Duration::from_millis(20);
/// New targets are first probed within this time.
const FIRST: Duration = Duration::from_millis(10);
/// How long a restored state waits for its target to be wanted again.
const RESTORED: Duration = Duration::from_mins(1);

/// State of a target as kept on disk, so that a restart does not forget what is down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedTarget {
    address: IpAddr,
    port: u16,
    interface: String,
    #[serde(with = "SavedProbe")]
    probe: Probe,
    up: bool,
    cause: String,
    since: i64,
}

/// [`Probe`] as on disk.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Probe")]
struct SavedProbe {
    #[serde(with = "SavedKind")]
    kind: ProbeKind,
    /// Resolved in every target.
    #[serde(skip)]
    port: Option<ProbePort>,
    path: String,
    host: Option<String>,
    expect: Vec<u16>,
    interval: Duration,
    timeout: Duration,
    fall: u32,
    rise: u32,
    fast_interval: Duration,
    #[serde(default)]
    ca: Option<PathBuf>,
}

/// [`ProbeKind`] as on disk.
#[derive(Serialize, Deserialize)]
#[serde(remote = "ProbeKind", rename_all = "lowercase")]
enum SavedKind {
    Tcp,
    Http,
    Https,
    Tls,
    LocalEndpoints,
}

/// What is worth keeping on disk.
pub fn save(health: &Health) -> Vec<SavedTarget> {
    let known = health.iter().filter_map(|(target, health)| {
        Some(SavedTarget {
            address: target.address,
            port: target.port,
            interface: target.interface.to_string(),
            probe: (*target.probe).clone(),
            up: health.up?,
            cause: health.cause.clone(),
            since: health.since,
        })
    });
    known.collect()
}

/// The reverse of [`save`].
pub fn restore(saved: &[SavedTarget]) -> Health {
    let mut probes: BTreeMap<&Probe, Arc<Probe>> = BTreeMap::new();
    let mut interfaces: BTreeMap<&str, Arc<str>> = BTreeMap::new();
    let mut health = Health::new();
    for saved in saved {
        let target = ProbeTarget {
            address: saved.address,
            port: saved.port,
            interface: Arc::clone(
                interfaces.entry(&saved.interface).or_insert_with(|| Arc::from(saved.interface.as_str())),
            ),
            probe: Arc::clone(probes.entry(&saved.probe).or_insert_with(|| Arc::new(saved.probe.clone()))),
        };
        let known = TargetHealth { up: Some(saved.up), cause: saved.cause.clone(), since: saved.since };
        health.insert(target, known);
    }
    health
}

/// Probes targets in a task of its own until it is dropped.
#[derive(Debug)]
pub struct Prober {
    targets: mpsc::UnboundedSender<BTreeSet<ProbeTarget>>,
}

impl Prober {
    /// Starts, with states of an earlier life. Needs a running tokio runtime. The receiver changes only when a state or its cause does.
    pub fn start(restored: Health) -> (Self, watch::Receiver<Health>) {
        let (targets, wanted) = mpsc::unbounded_channel();
        let (told, receiver) = watch::channel(Health::new());
        let task = Task::new(&restored, told);
        task.told.send_replace(restored);
        tokio::spawn(task.run(wanted));
        (Self { targets }, receiver)
    }

    /// Replaces the set of targets. New ones are probed at once; those that are gone are forgotten.
    pub fn set_targets(&self, targets: BTreeSet<ProbeTarget>) {
        // The task ends with the prober, or with the runtime.
        let _ = self.targets.send(targets);
    }
}

/// A target that is probed.
struct Slot {
    target: Arc<ProbeTarget>,
    machine: Machine,
    /// Start of the last probe.
    started: Instant,
    /// When the next is due; an entry of the queue with another time is stale.
    due: Option<Instant>,
    /// Probes under way.
    running: u32,
}

/// What makes two targets ask the same question, however often they ask it.
type Question = (IpAddr, u16, Arc<str>, ProbeKind);

fn question(target: &ProbeTarget) -> Question {
    (target.address, target.port, Arc::clone(&target.interface), target.probe.kind)
}

struct Task {
    health: Health,
    told: watch::Sender<Health>,
    changed: bool,
    last_told: Option<Instant>,
    restored: HashMap<Question, TargetHealth>,
    restored_until: Instant,
    slots: HashMap<u64, Slot>,
    by_target: BTreeMap<Arc<ProbeTarget>, u64>,
    queue: BinaryHeap<Reverse<(Instant, u64)>>,
    running: JoinSet<(u64, Outcome)>,
    trust: Trust,
    /// Probes under way to targets that are down: a wall of silent ones must not take the places of all others.
    running_down: usize,
    limit: usize,
    next_id: u64,
    random: u64,
    /// Token bucket: when it was looked at, and what was in it, in probes.
    bucket: (Instant, f64),
}

impl Task {
    fn new(restored: &Health, told: watch::Sender<Health>) -> Self {
        let now = Instant::now();
        // The API, its watches and the maps need file descriptors too.
        let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft);
        let limit = PARALLEL.min(usize::try_from(files / 2).unwrap_or(PARALLEL)).max(16);
        let seed = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_nanos() as u64);
        Self {
            restored: restored.iter().map(|(target, known)| (question(target), known.clone())).collect(),
            health: Health::new(),
            told,
            changed: false,
            last_told: None,
            restored_until: now + RESTORED,
            slots: HashMap::new(),
            by_target: BTreeMap::new(),
            queue: BinaryHeap::new(),
            running: JoinSet::new(),
            trust: Trust::default(),
            running_down: 0,
            limit,
            next_id: 0,
            random: seed,
            bucket: (now, f64::from(BURST)),
        }
    }

    async fn run(mut self, mut wanted: mpsc::UnboundedReceiver<BTreeSet<ProbeTarget>>) {
        loop {
            let wake = self.launch();
            let tell = self.tell();
            let until = [wake, tell].into_iter().flatten().min();
            tokio::select! {
                targets = wanted.recv() => match targets {
                    Some(mut targets) => {
                        // Only the last one counts.
                        while let Ok(newer) = wanted.try_recv() {
                            targets = newer;
                        }
                        self.replace(targets);
                    }
                    None => return,
                },
                Some(result) = self.running.join_next() => {
                    // A probe neither panics nor is cancelled while the task lives.
                    if let Ok((id, outcome)) = result {
                        self.finished(id, outcome);
                    }
                }
                () = sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => {}
            }
        }
    }

    /// A time in `0..limit`.
    fn jitter(&mut self, limit: Duration) -> Duration {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        limit.mul_f64((mixed >> 40) as f64 / f64::from(1 << 24))
    }

    fn replace(&mut self, targets: BTreeSet<ProbeTarget>) {
        let mut lent: HashMap<Question, TargetHealth> = HashMap::new();
        let gone: Vec<_> = self.by_target.keys().filter(|target| !targets.contains(&***target)).cloned().collect();
        for target in gone {
            if let Some(slot) = self.by_target.remove(&target).and_then(|id| self.slots.remove(&id)) {
                // What is still under way ends within its timeout; nobody waits for it.
                if slot.machine.up == Some(false) {
                    self.running_down = self.running_down.saturating_sub(slot.running as usize);
                }
            }
            if let Some(known) = self.health.remove(&target) {
                lent.insert(question(&target), known);
            }
        }
        let now = Instant::now();
        if now > self.restored_until {
            self.restored.clear();
        }
        for target in targets {
            if self.by_target.contains_key(&target) {
                continue;
            }
            let question = question(&target);
            let known = lent.get(&question).cloned().or_else(|| self.restored.remove(&question));
            let known = known.filter(|known| known.up.is_some());
            // What is known already need not be asked at once: no burst after a restart.
            let delay = if known.is_some() { self.jitter(target.probe.interval) } else { self.jitter(FIRST) };
            let known = known.unwrap_or_else(|| TargetHealth {
                up: None,
                cause: "not probed yet".to_owned(),
                since: seconds(),
            });
            if known.up.is_some() && self.told.borrow().get(&target) != Some(&known) {
                self.changed = true;
            }
            let target = Arc::new(target);
            let id = self.next_id;
            self.next_id += 1;
            let due = now + delay;
            let machine = Machine::new(known.up);
            self.slots
                .insert(id, Slot { target: Arc::clone(&target), machine, started: now, due: Some(due), running: 0 });
            self.queue.push(Reverse((due, id)));
            self.health.insert((*target).clone(), known);
            self.by_target.insert(target, id);
        }
    }

    /// Starts what is due. Returns when to look again; results wake the task too.
    fn launch(&mut self) -> Option<Instant> {
        let now = Instant::now();
        let (at, tokens) = self.bucket;
        let refill = (now - at).as_secs_f64() * f64::from(PROBES_PER_SECOND);
        let mut tokens = (tokens + refill).min(f64::from(BURST));
        let mut wake = None;
        while let Some(&Reverse((due, id))) = self.queue.peek() {
            if due > now {
                wake = Some(due);
                break;
            }
            let Some(slot) = self.slots.get_mut(&id).filter(|slot| slot.due == Some(due)) else {
                self.queue.pop();
                continue;
            };
            if self.running.len() >= self.limit {
                break;
            }
            if tokens < 1.0 {
                wake = Some(now + Duration::from_secs_f64((1.0 - tokens) / f64::from(PROBES_PER_SECOND)));
                break;
            }
            self.queue.pop();
            let down = slot.machine.up == Some(false);
            if down && self.running_down >= self.limit / 2 {
                let later = now + GATHER;
                slot.due = Some(later);
                self.queue.push(Reverse((later, id)));
                continue;
            }
            tokens -= 1.0;
            slot.started = now;
            slot.due = None;
            slot.running += 1;
            self.running_down += usize::from(down);
            let target = Arc::clone(&slot.target);
            let trust = self.trust.clone();
            self.running.spawn(async move { (id, probe(&target, &trust).await) });
            self.schedule(id);
        }
        self.bucket = (now, tokens);
        wake
    }

    /// Notes when a target is next due, if it may be probed now.
    fn schedule(&mut self, id: u64) {
        let Some(slot) = self.slots.get(&id) else { return };
        let settings = &slot.target.probe;
        if slot.running >= slot.machine.parallel(settings) {
            return;
        }
        let (started, pause) = (slot.started, slot.machine.pause(settings));
        // Earlier rather than later: the bounds on detection hold.
        let due = (started + pause - self.jitter(pause / 10)).max(Instant::now());
        if let Some(slot) = self.slots.get_mut(&id)
            && slot.due.is_none_or(|known| due < known)
        {
            slot.due = Some(due);
            self.queue.push(Reverse((due, id)));
        }
    }

    fn finished(&mut self, id: u64, outcome: Outcome) {
        let Some(slot) = self.slots.get_mut(&id) else { return };
        slot.running = slot.running.saturating_sub(1);
        let was_down = slot.machine.up == Some(false);
        if was_down {
            self.running_down = self.running_down.saturating_sub(1);
        }
        let (changed, cause) = match outcome {
            Outcome::Success(how) => (slot.machine.observe(true, &slot.target.probe), how),
            Outcome::Failure(cause) => (slot.machine.observe(false, &slot.target.probe), cause),
            Outcome::Unasked(cause) => (false, cause),
        };
        let down = slot.machine.up == Some(false);
        if down != was_down {
            let running = slot.running as usize;
            self.running_down =
                if down { self.running_down + running } else { self.running_down.saturating_sub(running) };
        }
        let up = slot.machine.up;
        let settled = !slot.machine.in_doubt();
        if let Some(known) = self.health.get_mut(&*slot.target) {
            if changed {
                *known = TargetHealth { up, cause, since: seconds() };
                self.changed = true;
            } else if settled && known.cause != cause {
                // Still as it was, for another reason.
                known.cause = cause;
                self.changed = true;
            }
        }
        self.schedule(id);
    }

    /// Tells what has changed, if it is time; else returns when that is.
    fn tell(&mut self) -> Option<Instant> {
        if !self.changed {
            return None;
        }
        let now = Instant::now();
        if let Some(last) = self.last_told
            && now < last + GATHER
        {
            return Some(last + GATHER);
        }
        self.changed = false;
        self.last_told = Some(now);
        self.told.send_replace(self.health.clone());
        None
    }
}

/// Seconds since the epoch; for display only, so a clock that jumps does no harm.
fn seconds() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64)
}
