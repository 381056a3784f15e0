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
use super::groups;
use super::loader::Loader;
use super::ndisc;
use super::netlink::{Client, Event, Events};
use super::offload::Record;
use super::packet::{FrameSocket, wait};
use super::resolver::{Asker, Resolver};
use super::steady::Steady;
use crate::config::SegmentName;
use crate::plan::model::{HostFacts, Notice};

/// What the threads share with [`super::Dataplane`].
pub(super) struct Shared {
    pub(super) engine: Mutex<Engine>,
    pub(super) loader: Mutex<Loader>,
    pub(super) facts: watch::Sender<HostFacts>,
    pub(super) taken: watch::Sender<BTreeSet<(SegmentName, IpAddr)>>,
    pub(super) holders: watch::Sender<BTreeMap<(SegmentName, IpAddr), [u8; 6]>>,
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
            holders: watch::Sender::default(),
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
    let mut steady = Steady::new(shared.engine().facts.clone());
    let record = Record::new(&shared.loader.lock().unwrap_or_else(PoisonError::into_inner).paths.root);
    while !shared.stopping() {
        let next = resolver.next().into_iter().chain(steady.next()).min();
        let pause = next.map_or(PAUSE, |next| next.saturating_duration_since(Instant::now()).min(PAUSE));
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
        if ask_facts || steady.next().is_some_and(|next| next <= Instant::now()) {
            match client.facts() {
                Ok(facts) => new_facts(shared, facts, &mut steady),
                Err(error) => tracing::warn!("cannot list interfaces: {error}"),
            }
        }
        if attach_again(shared, &mut attempts) || ask_facts {
            show_tags(shared, &record);
        }
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

fn new_facts(shared: &Shared, facts: HostFacts, steady: &mut Steady) {
    let mut engine = shared.engine();
    let attached = engine.nics.values().map(|nic| (nic.interface.as_str(), nic.index)).collect();
    let facts = steady.tell(facts, &attached, Instant::now()).clone();
    if engine.facts == facts {
        return;
    }
    let index = |facts: &HostFacts, name: &str| facts.interfaces.get(name).map(|interface| interface.index);
    let moved: Vec<(u32, u32)> = engine
        .nics
        .keys()
        .filter_map(|name| index(&engine.facts, name).zip(index(&facts, name)))
        .filter(|(old, new)| old != new)
        .collect();
    for (old, new) in moved {
        engine.claims.moved(old, new);
    }
    engine.facts = facts.clone();
    engine.refresh();
    engine.claim_addresses(Instant::now());
    drop(engine);
    shared.facts.send_replace(facts);
}

/// Whoever turns rx-vlan offload on again hides tags from XDP.
fn show_tags(shared: &Shared, record: &Record) {
    let interfaces = shared.engine().tagged_interfaces();
    let mut hidden = BTreeMap::new();
    for (interface, vlans) in interfaces {
        match record.show_tags(&interface) {
            Ok(true) => tracing::warn!("{interface}: rx-vlan offload was on: turned off"),
            Ok(false) => {}
            Err(error) if vlans => {
                hidden.insert(interface, error.to_string());
            }
            Err(error) => tracing::debug!("{error}"),
        }
    }
    shared.engine().hidden_tags = hidden;
}

/// An interface that was made anew has lost its program. What fails is tried again. Whether something was attached.
fn attach_again(shared: &Shared, attempts: &mut BTreeMap<String, Instant>) -> bool {
    const PAUSE: Duration = Duration::from_secs(1);
    let lost: Vec<(String, u32, bool)> = {
        let engine = shared.engine();
        let index = |name: &str| engine.facts.interfaces.get(name).map(|interface| interface.index);
        // All in one mode, as at the start.
        let generic = |name: &str| engine.nics.values().any(|nic| nic.interface != name && nic.mode == Mode::Generic);
        engine
            .nics
            .values()
            .filter(|nic| index(&nic.interface).is_some_and(|index| index != nic.index))
            .map(|nic| (nic.interface.clone(), nic.slot, generic(&nic.interface)))
            .collect()
    };
    let now = Instant::now();
    let mut any = false;
    for (interface, slot, generic) in lost {
        if attempts.get(&interface).is_some_and(|last| now.duration_since(*last) < PAUSE) {
            continue;
        }
        attempts.insert(interface.clone(), now);
        let mut loader = shared.loader.lock().unwrap_or_else(PoisonError::into_inner);
        // Not while the engine is locked: the kernel's verifier takes its time.
        let attached = loader
            .prepare(&interface, slot)
            .and_then(|loaded| if generic { loader.attach_generic(&loaded) } else { loader.attach(&loaded) });
        match attached {
            Ok(nic) => {
                tracing::warn!("{interface} was made anew: attached again");
                let mut engine = shared.engine();
                // What was announced before there was somebody to answer.
                engine.claims.came_up(nic.index, Instant::now());
                engine.nics.insert(interface, nic);
                any = true;
                if let Err(error) = loader.own(engine.nics.values()) {
                    tracing::warn!("redirects that a driver refuses are not counted: {error}");
                }
            }
            Err(error) => tracing::error!("{interface} was made anew: {error}"),
        }
    }
    any
}

/// Frames that the interfaces' sockets have received, but for this host's own.
fn receive(sockets: &BTreeMap<u32, FrameSocket>, own: &BTreeSet<[u8; 6]>) -> Vec<(u32, u16, Heard)> {
    let mut buffer = [0; 2048];
    let mut heard = Vec::new();
    for socket in sockets.values() {
        while let Some((vlan, frame)) = socket.receive(&mut buffer) {
            let read = arp::parse(frame).or_else(|| ndisc::parse(frame)).filter(|heard| !own.contains(&heard.mac));
            heard.extend(read.map(|heard| (socket.ifindex(), vlan, heard)));
        }
    }
    heard
}

/// Follows the neighbours in VLANs that the kernel has no interface for, and returns the requests to send.
fn ask(
    engine: &mut Engine,
    asker: &mut Asker,
    heard: &[(u32, u16, Heard)],
    up: &BTreeMap<u32, [u8; 6]>,
    now: Instant,
) -> Vec<(Place, Vec<u8>)> {
    let wanted: BTreeSet<Place> =
        engine.to_resolve().into_iter().filter(|place| place.vlan != 0 && up.contains_key(&place.interface)).collect();
    engine.neighbours.retain(|place, _| place.vlan == 0 || wanted.contains(place));
    for (interface, vlan, heard) in heard {
        let place = Place { interface: *interface, vlan: *vlan, address: heard.sender };
        if wanted.contains(&place)
            && let Some(neighbour) = asker.heard(place, heard, engine.neighbours.get(&place), now)
            && engine.neighbours.get(&place) != Some(&neighbour)
        {
            engine.neighbour(place, Some(neighbour));
        }
    }
    for place in asker.silent(now) {
        if let Some(mut neighbour) = engine.neighbours.get(&place).copied() {
            neighbour.valid = false;
            engine.neighbour(place, Some(neighbour));
        }
    }
    let due = asker.due(&wanted, &engine.neighbours, now);
    due.into_iter()
        .filter_map(|place| {
            let mac = *up.get(&place.interface)?;
            let frame = match (engine.asks_from(place, mac), place.address) {
                (IpAddr::V4(own), IpAddr::V4(address)) => arp::request(mac, own, address).to_vec(),
                (IpAddr::V6(own), IpAddr::V6(address)) => ndisc::solicitation(mac, own, address),
                _ => return None,
            };
            Some((place, frame))
        })
        .collect()
}

/// Keeps the groups of IPv6 addresses joined.
struct Groups {
    client: Option<Client>,
    last: Option<(Instant, groups::Wanted)>,
    failed: Vec<String>,
}

impl Groups {
    /// How often it is looked at though nothing has changed, and when something has failed.
    const AGAIN: Duration = Duration::from_secs(30);
    const RETRY: Duration = Duration::from_secs(5);

    fn due(&self, wanted: &groups::Wanted, now: Instant) -> bool {
        let pause = if self.failed.is_empty() { Self::AGAIN } else { Self::RETRY };
        !matches!(&self.last, Some((last, had)) if had == wanted && now.duration_since(*last) < pause)
    }

    fn set(&mut self, wanted: groups::Wanted, ours: &BTreeSet<u32>, now: Instant) {
        if self.client.is_none() {
            self.client = Client::new().ok();
        }
        let Some(client) = &mut self.client else { return };
        let failed = groups::set(client, &wanted, |index| ours.contains(&index));
        for message in failed.iter().filter(|message| !self.failed.contains(message)) {
            tracing::warn!("{message}");
        }
        self.failed = failed;
        self.last = Some((now, wanted));
    }
}

fn addresses(shared: &Shared, woken: &UnixStream) {
    const PAUSE: Duration = Duration::from_millis(500);
    let mut sockets: BTreeMap<u32, FrameSocket> = BTreeMap::new();
    let mut answered = BTreeSet::new();
    let mut before: BTreeMap<u32, [u8; 6]> = BTreeMap::new();
    let mut timeout = Duration::ZERO;
    let mut asker = Asker::default();
    let mut joined = Groups { client: None, last: None, failed: Vec::new() };
    while !shared.stopping() {
        let mut descriptors: Vec<i32> = sockets.values().map(FrameSocket::fd).collect();
        descriptors.push(woken.as_raw_fd());
        wait(&descriptors, timeout);
        drain(woken);
        let now = Instant::now();
        let mut engine = shared.engine();
        let own: BTreeSet<[u8; 6]> = engine.facts.interfaces.values().map(|interface| interface.mac).collect();
        let heard = receive(&sockets, &own);
        let mut actions = Vec::new();
        for (interface, vlan, heard) in &heard {
            actions.extend(engine.claims.heard(*interface, *vlan, heard, now));
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
        let changed = before != up;
        before.clone_from(&up);
        actions.extend(engine.claims.due(now, |interface| up.contains_key(&interface)));
        let ours = engine.claims.ours();
        if ours != answered {
            // Before the announcement: whoever believes it asks next.
            engine.write_addresses();
            answered = ours;
        }
        publish(shared, &engine);
        let mut frames = ask(&mut engine, &mut asker, &heard, &up, now);
        let next = engine.claims.next(|interface| up.contains_key(&interface)).into_iter().chain(asker.next()).min();
        timeout =
            next.map_or(PAUSE, |next| next.saturating_duration_since(now).clamp(Duration::from_millis(10), PAUSE));
        let groups = engine.groups().filter(|wanted| changed || joined.due(wanted, now));
        let indexes = engine.own_indexes();
        drop(engine);

        // Before the announcement, too: what is asked for next must arrive.
        if let Some(wanted) = groups {
            joined.set(wanted, &indexes, now);
        }
        sockets.retain(|interface, _| up.contains_key(interface));
        for &interface in up.keys() {
            if let std::collections::btree_map::Entry::Vacant(entry) = sockets.entry(interface) {
                match FrameSocket::new(interface) {
                    Ok(socket) => {
                        entry.insert(socket);
                    }
                    Err(error) => tracing::warn!("cannot announce addresses on interface {interface}: {error}"),
                }
            }
        }
        frames.extend(actions.into_iter().flat_map(|action| claim_frames(action, &up)));
        for (place, frame) in frames {
            let Some(socket) = sockets.get(&place.interface) else { continue };
            if let Err(error) = socket.send(place.vlan, &frame) {
                let Place { interface, vlan, address } = place;
                tracing::debug!(
                    "ARP or neighbour discovery for {address} on interface {interface}, VLAN {vlan}: {error}"
                );
            }
        }
    }
}

/// What to send to find out whether an address is free, or to say that it is ours.
fn claim_frames(action: Action, up: &BTreeMap<u32, [u8; 6]>) -> Vec<(Place, Vec<u8>)> {
    let (Action::Probe(place) | Action::Announce(place)) = action;
    let Some(&mac) = up.get(&place.interface) else { return Vec::new() };
    let frames = match (action, place.address) {
        (Action::Probe(_), IpAddr::V4(address)) => vec![arp::probe(mac, address).to_vec()],
        (Action::Probe(_), IpAddr::V6(address)) => vec![ndisc::probe(mac, address)],
        (Action::Announce(_), IpAddr::V4(address)) => arp::announcements(mac, address).map(|it| it.to_vec()).to_vec(),
        (Action::Announce(_), IpAddr::V6(address)) => vec![ndisc::announcement(mac, address)],
    };
    frames.into_iter().map(|frame| (place, frame)).collect()
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
    let holders = (engine.claims.taken().into_iter().chain(engine.claims.conflicts()))
        .filter_map(|(place, mac)| Some(((engine.whose(place)?.segment, place.address), mac)))
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
    notices.extend(engine.hidden_tags.values().map(|message| Notice {
        reason: "HiddenVlanTags",
        service: None,
        tenant: None,
        message: message.clone(),
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
    shared.holders.send_if_modified(|old| replace(old, holders));
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
