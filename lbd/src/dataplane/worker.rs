//! The threads of the data plane: one follows netlink, one looks after addresses, one lets flows end.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::Mode;
use super::arp::{self, Heard};
use super::bpf;
use super::claims::{Action, Place};
use super::engine::Engine;
use super::loader::Loader;
use super::netlink::{Client, Event, Events};
use super::packet::{ArpSocket, wait};
use super::resolver::Resolver;
use crate::config::SegmentName;
use crate::plan::model::{HostFacts, Notice};

/// What the threads share with [`super::Dataplane`].
pub(super) struct Shared {
    pub(super) engine: Mutex<Engine>,
    pub(super) loader: Mutex<Loader>,
    pub(super) facts: watch::Sender<HostFacts>,
    pub(super) taken: watch::Sender<BTreeSet<(SegmentName, IpAddr)>>,
    pub(super) notices: watch::Sender<Vec<Notice>>,
    stop: AtomicBool,
}

impl Shared {
    pub(super) fn new(engine: Engine, loader: Loader) -> Self {
        let facts = watch::Sender::new(engine.facts.clone());
        Self {
            engine: Mutex::new(engine),
            loader: Mutex::new(loader),
            facts,
            taken: watch::Sender::default(),
            notices: watch::Sender::default(),
            stop: AtomicBool::new(false),
        }
    }

    pub(super) fn engine(&self) -> MutexGuard<'_, Engine> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// The running threads.
pub(super) struct Workers {
    shared: Arc<Shared>,
    wakers: Vec<UnixStream>,
    threads: Vec<JoinHandle<()>>,
}

impl Workers {
    /// Starts them.
    pub(super) fn start(shared: &Arc<Shared>, events: Events, client: Client) -> io::Result<Self> {
        let mut workers = Self { shared: Arc::clone(shared), wakers: Vec::new(), threads: Vec::new() };
        let (waker, woken) = pair()?;
        let (waker2, woken2) = pair()?;
        let (waker3, woken3) = pair()?;
        let for_netlink = Arc::clone(shared);
        let for_addresses = Arc::clone(shared);
        let for_flows = Arc::clone(shared);
        workers.wakers = vec![waker, waker2, waker3];
        let spawn =
            |name: &str, body: Box<dyn FnOnce() + Send>| std::thread::Builder::new().name(name.to_owned()).spawn(body);
        workers.threads.push(spawn("lbd-netlink", Box::new(move || netlink(&for_netlink, events, client, &woken)))?);
        workers.threads.push(spawn("lbd-addresses", Box::new(move || addresses(&for_addresses, &woken2)))?);
        workers.threads.push(spawn("lbd-flows", Box::new(move || flows(&for_flows, &woken3)))?);
        Ok(workers)
    }

    /// There is something new to look at.
    pub(super) fn wake(&mut self) {
        for waker in &mut self.wakers {
            // A full pipe wakes as well.
            let _ = waker.write(&[0]);
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.wake();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the data plane has panicked");
            }
        }
    }
}

fn pair() -> io::Result<(UnixStream, UnixStream)> {
    let (left, right) = UnixStream::pair()?;
    left.set_nonblocking(true)?;
    right.set_nonblocking(true)?;
    Ok((left, right))
}

fn drain(mut woken: &UnixStream) {
    let mut buffer = [0; 64];
    while woken.read(&mut buffer).is_ok_and(|length| length == buffer.len()) {}
}

fn netlink(shared: &Shared, mut events: Events, mut client: Client, woken: &UnixStream) {
    const PAUSE: Duration = Duration::from_secs(1);
    /// How long the kernel looks after a neighbour that no plan needs any more.
    const RELEASE: Duration = Duration::from_mins(1);
    let mut idle: BTreeMap<Place, Instant> = BTreeMap::new();
    let mut resolver = Resolver::default();
    let mut attempts: BTreeMap<String, Instant> = BTreeMap::new();
    while !shared.stopping() {
        let pause = resolver.next().map_or(PAUSE, |next| next.saturating_duration_since(Instant::now()).min(PAUSE));
        wait(&[events.fd(), woken.as_raw_fd()], pause);
        drain(woken);
        let (mut ask_facts, mut ask_neighbours) = (false, false);
        let heard = events.read().unwrap_or_else(|error| {
            tracing::warn!("netlink events: {error}");
            vec![Event::Lost]
        });
        for event in heard {
            match event {
                Event::Facts => ask_facts = true,
                Event::Neighbour(place, neighbour) => shared.engine().neighbour(place, Some(neighbour)),
                Event::NeighbourGone(place) => {
                    shared.engine().neighbour(place, None);
                    resolver.gone(place, Instant::now());
                }
                Event::Lost => (ask_facts, ask_neighbours) = (true, true),
            }
        }
        if ask_facts {
            match client.facts() {
                Ok(facts) => new_facts(shared, facts),
                Err(error) => tracing::warn!("cannot list interfaces: {error}"),
            }
        }
        attach_again(shared, &mut attempts);
        if ask_neighbours {
            match client.neighbours() {
                Ok(found) => {
                    let mut engine = shared.engine();
                    let by_kernel = engine.neighbours.keys().filter(|place| place.vlan == 0);
                    let gone: Vec<Place> = by_kernel.filter(|place| !found.contains_key(place)).copied().collect();
                    for place in gone {
                        engine.neighbour(place, None);
                    }
                    for (place, neighbour) in found {
                        engine.neighbour(place, Some(neighbour));
                    }
                }
                Err(error) => tracing::warn!("cannot list neighbours: {error}"),
            }
        }
        let now = Instant::now();
        let (due, unneeded) = {
            let engine = shared.engine();
            let wanted = engine.to_resolve().into_iter().filter(|place| place.vlan == 0).collect();
            (resolver.due(&wanted, &engine.neighbours, now), engine.unneeded_neighbours(&wanted))
        };
        // What is not needed for a while: an interface that is down for a moment, or a node that comes back, keeps its entries.
        idle.retain(|place, _| unneeded.contains(place));
        for place in unneeded {
            let since = *idle.entry(place).or_insert(now);
            if now.duration_since(since) >= RELEASE {
                idle.insert(place, now);
                if let Err(error) = client.release(place) {
                    let (address, interface) = (place.address, place.interface);
                    tracing::debug!("cannot release the neighbour {address} on interface {interface}: {error}");
                }
            }
        }
        for place in due {
            if let Err(error) = client.resolve(place) {
                tracing::debug!("cannot have {} resolved on interface {}: {error}", place.address, place.interface);
            }
        }
    }
}

fn new_facts(shared: &Shared, facts: HostFacts) {
    let mut engine = shared.engine();
    if engine.facts == facts {
        return;
    }
    engine.facts = facts.clone();
    engine.refresh();
    engine.claim_addresses(Instant::now());
    drop(engine);
    shared.facts.send_replace(facts);
}

/// An interface that was made anew has lost its program. What fails is tried again.
fn attach_again(shared: &Shared, attempts: &mut BTreeMap<String, Instant>) {
    const PAUSE: Duration = Duration::from_secs(1);
    let mut engine = shared.engine();
    let index = |name: &str| engine.facts.interfaces.get(name).map(|interface| interface.index);
    let lost: Vec<(String, u32)> = engine
        .nics
        .values()
        .filter(|nic| index(&nic.interface).is_some_and(|index| index != nic.index))
        .map(|nic| (nic.interface.clone(), nic.slot))
        .collect();
    let now = Instant::now();
    for (interface, slot) in lost {
        if attempts.get(&interface).is_some_and(|last| now.duration_since(*last) < PAUSE) {
            continue;
        }
        attempts.insert(interface.clone(), now);
        let mut loader = shared.loader.lock().unwrap_or_else(PoisonError::into_inner);
        // All in one mode, as at the start.
        let generic = engine.nics.values().any(|nic| nic.interface != interface && nic.mode == Mode::Generic);
        let attached = loader
            .prepare(&interface, slot)
            .and_then(|loaded| if generic { loader.attach_generic(&loaded) } else { loader.attach(&loaded) });
        match attached {
            Ok(nic) => {
                tracing::warn!("{interface} was made anew: attached again");
                engine.nics.insert(interface, nic);
                if let Err(error) = loader.own(engine.nics.values()) {
                    tracing::warn!("redirects that a driver refuses are not counted: {error}");
                }
            }
            Err(error) => tracing::error!("{interface} was made anew: {error}"),
        }
    }
}

fn addresses(shared: &Shared, woken: &UnixStream) {
    let mut sockets: BTreeMap<u32, ArpSocket> = BTreeMap::new();
    let mut answered = BTreeSet::new();
    let mut before: BTreeMap<u32, [u8; 6]> = BTreeMap::new();
    let mut buffer = [0; 2048];
    let mut timeout = Duration::ZERO;
    while !shared.stopping() {
        let mut descriptors: Vec<i32> = sockets.values().map(ArpSocket::fd).collect();
        descriptors.push(woken.as_raw_fd());
        wait(&descriptors, timeout);
        drain(woken);
        let mut heard: Vec<(u32, Heard)> = Vec::new();
        for socket in sockets.values() {
            while let Some(frame) = socket.receive(&mut buffer) {
                heard.extend(arp::parse(frame).map(|heard| (socket.ifindex(), heard)));
            }
        }
        let now = Instant::now();
        let mut engine = shared.engine();
        let own: BTreeSet<[u8; 6]> = engine.facts.interfaces.values().map(|interface| interface.mac).collect();
        let mut actions = Vec::new();
        for (interface, heard) in heard {
            if !own.contains(&heard.mac) {
                actions.extend(engine.claims.heard(interface, 0, &heard, now));
            }
        }
        let up: BTreeMap<u32, [u8; 6]> = engine
            .facts
            .interfaces
            .iter()
            .filter(|(name, interface)| interface.up && engine.nics.contains_key(*name))
            .map(|(_, interface)| (interface.index, interface.mac))
            .collect();
        for (&interface, mac) in &up {
            if before.get(&interface) != Some(mac) {
                engine.claims.came_up(interface, now);
            }
        }
        before.clone_from(&up);
        actions.extend(engine.claims.due(now, |interface| up.contains_key(&interface)));
        let ours = engine.claims.ours();
        if ours != answered {
            // Before the announcement: whoever believes it asks next.
            engine.write_addresses();
            answered = ours;
        }
        publish(shared, &engine);
        timeout =
            engine.claims.next(|interface| up.contains_key(&interface)).map_or(Duration::from_millis(500), |next| {
                next.saturating_duration_since(now).clamp(Duration::from_millis(10), Duration::from_millis(500))
            });
        drop(engine);

        sockets.retain(|interface, _| up.contains_key(interface));
        for &interface in up.keys() {
            if let std::collections::btree_map::Entry::Vacant(entry) = sockets.entry(interface) {
                match ArpSocket::new(interface) {
                    Ok(socket) => {
                        entry.insert(socket);
                    }
                    Err(error) => tracing::warn!("cannot announce addresses on interface {interface}: {error}"),
                }
            }
        }
        for action in actions {
            let Place { interface, address, .. } = match action {
                Action::Probe(place) | Action::Announce(place) => place,
            };
            let (Some(socket), Some(&mac)) = (sockets.get(&interface), up.get(&interface)) else { continue };
            let IpAddr::V4(address) = address else { continue };
            let frames = match action {
                Action::Probe(_) => vec![arp::probe(mac, address)],
                Action::Announce(_) => arp::announcements(mac, address).to_vec(),
            };
            for frame in frames {
                if let Err(error) = socket.send(&frame) {
                    tracing::debug!("ARP for {address} on interface {interface}: {error}");
                }
            }
        }
    }
}

fn publish(shared: &Shared, engine: &Engine) {
    /// How long failed redirects are shown after the last one.
    const SHOWN: Duration = Duration::from_mins(1);
    let taken: BTreeSet<(SegmentName, IpAddr)> = engine
        .claims
        .taken()
        .into_keys()
        .filter_map(|place| Some((engine.whose(place)?.segment, place.address)))
        .collect();
    let mut notices: Vec<Notice> = engine
        .claims
        .conflicts()
        .into_iter()
        .filter_map(|(place, mac)| {
            let whose = engine.whose(place)?;
            let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
            Some(Notice {
                reason: "AddressConflict",
                service: whose.service,
                tenant: whose.tenant,
                message: format!(
                    "address {} on {} is also claimed by the station with MAC {mac}: stop that station; lbd looks again every 5 s",
                    place.address, whose.segment
                ),
            })
        })
        .collect();
    notices.extend(engine.nics.values().filter_map(|nic| {
        let message = nic.warning.clone()?;
        Some(Notice { reason: "GenericMode", service: None, tenant: None, message })
    }));
    if let Some((_, failures)) = engine.redirects_failed.filter(|(seen, _)| seen.elapsed() < SHOWN) {
        let message = format!(
            "{failures} packets were translated but not taken by the outgoing interface's driver: a veth's peer needs an XDP program \
             or `ethtool -K PEER gro on`, a NIC a driver with XDP redirect; see `lbd check`"
        );
        notices.push(Notice { reason: "RedirectFailed", service: None, tenant: None, message });
    }
    notices.sort();
    shared.taken.send_if_modified(|old| replace(old, taken));
    shared.notices.send_if_modified(|old| replace(old, notices));
}

fn replace<T: PartialEq>(old: &mut T, new: T) -> bool {
    let changed = *old != new;
    *old = new;
    changed
}

fn flows(shared: &Shared, woken: &UnixStream) {
    /// Seconds in which the clock hand passes over all flows, at least.
    const ROUND: u64 = 8;
    let mut last = Instant::now();
    let mut seen = None;
    while !shared.stopping() {
        wait(&[woken.as_raw_fd()], Duration::from_secs(1));
        drain(woken);
        let retired = shared.engine().take_retired();
        if !retired.is_empty() {
            bpf::barrier();
            shared.engine().release(&retired);
        }
        if last.elapsed() < Duration::from_millis(900) {
            continue;
        }
        last = Instant::now();
        let reset = shared.engine().reset_again(last);
        if reset != 0 {
            tracing::info!("{reset} flows removed that were half-open when their target went away");
        }
        let Some(programs) = shared.engine().programs.clone() else { continue };
        if let Ok(failures) = programs.redirects_failed() {
            if failures != *seen.get_or_insert(failures) {
                shared.engine().redirects_failed = Some((last, failures));
            }
            seen = Some(failures);
        }
        let result = programs.live_flows().and_then(|live| programs.age(live / ROUND + 1024));
        if let Err(error) = result {
            tracing::warn!("cannot let flows end: {error}");
        }
    }
}
