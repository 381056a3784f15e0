//! The operator's tool. Reads the pinned maps itself, so that it works while the agent is down; health and names come from the
//! agent, names else from the file that the agent leaves behind.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use lbd_common::abi;
use lbd_common::reason::{Reason, Verdict};
use thiserror::Error;

use self::client::{Client, ClientError};
use self::render::{Drop, StatusView};
use crate::api::types::{
    AcceptClusterReply, AdoptReply, AdoptRequest, Backend, Event, InterfaceStatus, KillReply, KillRequest, Names,
    ReloadReply, ReloadRequest, Service, Status, TableFill, TenantVips, paths, reload_outcome, service_state,
};
use crate::dataplane::{DataplaneError, Pins, host_facts};
use crate::flows::whois::Question;
use crate::flows::{By, Directory, Filter, Listing, Live, Matcher, Namer, Top, fill, protocol_name, unmap};

mod client;
mod render;
mod table;
mod vips;
mod watch;

/// Form of the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Output {
    /// For reading.
    #[default]
    Table,
    /// For reading, with every column.
    Wide,
    /// For programs.
    Json,
}

/// Where agent and datapath are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The agent's socket.
    pub socket: PathBuf,
    /// BPF file system.
    pub bpffs: PathBuf,
    /// The agent's state directory.
    pub state_dir: PathBuf,
}

impl Default for Place {
    fn default() -> Self {
        Self { socket: "/run/lbd/lbd.sock".into(), bpffs: "/sys/fs/bpf".into(), state_dir: "/var/lib/lbd".into() }
    }
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// How everything is.
    Status {
        /// The exit code tells.
        check: bool,
    },
    /// Frontends.
    Services,
    /// Backends.
    Backends,
    /// Flows.
    Flows {
        /// Which.
        filter: Filter,
        /// Only so many, in this order.
        top: Option<(usize, By)>,
    },
    /// Flows as they open, change and close.
    Follow {
        /// Which.
        filter: Filter,
        /// Between two looks.
        interval: Duration,
    },
    /// Who is behind a connection seen on a node.
    Whois(Question),
    /// Addresses.
    Vips,
    /// Counters of packets not forwarded.
    Drops {
        /// Only this tenant's, by name or `#index`.
        tenant: Option<String>,
        /// Go on, and say what has been added in each such interval.
        watch: Option<Duration>,
    },
    /// End flows.
    Kill(Filter),
    /// What happened.
    Events,
    /// Reload the configuration file.
    Reload(ReloadRequest),
    /// Take a Service over, `namespace/name`.
    Adopt(String),
    /// Accept the cluster that is there.
    AcceptCluster,
}

/// Why a command failed.
#[derive(Debug, Error)]
pub enum LbctlError {
    /// Agent or datapath is not there.
    #[error("{0}")]
    Absent(String),
    /// The configuration file is wrong.
    #[error("{0}")]
    Invalid(String),
    /// Everything else.
    #[error("{0}")]
    Failed(String),
    /// Health is not what it should be; already printed.
    #[error("degraded")]
    Degraded,
    /// Agent or datapath is not there; already printed.
    #[error("absent")]
    Gone,
    /// Nobody reads any more.
    #[error("broken pipe")]
    BrokenPipe,
}

impl From<ClientError> for LbctlError {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Absent(_) => Self::Absent(error.to_string()),
            ClientError::Denied(_) | ClientError::Broken { .. } | ClientError::Refused(_) => {
                Self::Failed(error.to_string())
            }
        }
    }
}

impl From<DataplaneError> for LbctlError {
    fn from(error: DataplaneError) -> Self {
        match error {
            DataplaneError::NotThere { .. } | DataplaneError::NoBpffs { .. } => Self::Absent(error.to_string()),
            other => Self::Failed(other.to_string()),
        }
    }
}

impl From<io::Error> for LbctlError {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            Self::BrokenPipe
        } else {
            Self::Failed(format!("cannot write the output: {error}"))
        }
    }
}

/// Runs a command; prints to standard output.
pub fn run(place: &Place, command: &Command, output: Output) -> Result<(), LbctlError> {
    let mut out = BufWriter::with_capacity(1 << 16, io::stdout().lock());
    let result = run_to(&mut out, place, command, output);
    out.flush()?;
    result
}

fn run_to(out: &mut dyn Write, place: &Place, command: &Command, output: Output) -> Result<(), LbctlError> {
    let agent = Client::new(&place.socket);
    match command {
        Command::Status { check } => {
            let view = status(place, &agent);
            render::status(out, &view, output)?;
            match (check, view.health) {
                (true, ABSENT) => Err(LbctlError::Gone),
                (true, DEGRADED) => Err(LbctlError::Degraded),
                _ => Ok(()),
            }
        }
        Command::Services => {
            let (services, _) = services(place, &agent)?;
            Ok(render::services(out, &services, output)?)
        }
        Command::Backends => {
            let (_, backends) = services(place, &agent)?;
            Ok(render::backends(out, &backends, output)?)
        }
        Command::Flows { filter, top } => {
            let pins = Pins::open(&place.bpffs)?;
            let directory = Directory::new(&names(place, &agent), &pins.frontends()?);
            let live = Live::new(&pins)?;
            let matcher = Matcher::new(filter, &directory, live.clock);
            let shown = match *top {
                Some((count, by)) => Listing::from(Top::of(live.fold(&matcher, || Top::new(count, by), Top::add)?)),
                None => Listing::sorted(live.fold(&matcher, Vec::new, Vec::push)?),
            };
            Ok(render::flows(out, &shown, &Namer::new(&directory, live.clock), output)?)
        }
        Command::Follow { filter, interval } => watch::follow(out, place, &agent, filter, *interval, output),
        Command::Whois(question) => {
            let pins = Pins::open(&place.bpffs)?;
            let live = Live::new(&pins)?;
            let found = question.answer(&live)?;
            let directory = Directory::new(&names(place, &agent), &pins.frontends()?);
            render::whois(out, &found, &Namer::new(&directory, live.clock), output)?;
            if found.is_empty() { Err(LbctlError::Failed(nobody(question))) } else { Ok(()) }
        }
        Command::Vips => Ok(render::vips(out, &vips(place, &agent)?, output)?),
        Command::Drops { tenant, watch: None } => {
            let pins = Pins::open(&place.bpffs)?;
            let all = drops(&pins.reasons()?, &names(place, &agent));
            let meant: Vec<_> = all.into_iter().filter(|drop| drop.is_of(tenant.as_deref())).collect();
            Ok(render::drops(out, &meant, output)?)
        }
        Command::Drops { tenant, watch: Some(interval) } => {
            watch::drops(out, place, &agent, tenant.as_deref(), *interval, output)
        }
        Command::Kill(filter) => {
            let reply: KillReply = agent.post(paths::KILL, &KillRequest::from(filter))?;
            Ok(render::kill(out, reply, output)?)
        }
        Command::Events => {
            let events: Vec<Event> = agent.get(paths::EVENTS)?;
            Ok(render::events(out, &events, output)?)
        }
        Command::Adopt(service) => {
            let reply: AdoptReply = agent.post(paths::ADOPT, &AdoptRequest { service: service.clone() })?;
            Ok(render::adopt(out, &reply, output)?)
        }
        Command::AcceptCluster => {
            let reply: AcceptClusterReply = agent.post(paths::ACCEPT_CLUSTER, &())?;
            Ok(render::accept_cluster(out, &reply, output)?)
        }
        Command::Reload(request) => {
            let reply: ReloadReply = agent.post(paths::RELOAD, request)?;
            render::reload(out, &reply, output)?;
            let why = || reply.error.clone().unwrap_or_else(|| reply.outcome.clone());
            match reply.outcome.as_str() {
                reload_outcome::APPLIED | reload_outcome::UNCHANGED | reload_outcome::WOULD_APPLY => Ok(()),
                reload_outcome::INVALID => Err(LbctlError::Invalid(why())),
                _ => Err(LbctlError::Failed(why())),
            }
        }
    }
}

const OK: &str = "ok";
const DEGRADED: &str = "degraded";
const ABSENT: &str = "absent";

fn nobody(question: &Question) -> String {
    let to = question.backend.map_or_else(String::new, |backend| format!(" to {backend}"));
    format!(
        "no live connection from {}{to} goes through this host: it may have ended, the host's own connections are not listed, and \
         another hub host may hold it",
        question.snat
    )
}

/// Addresses: the agent's view; without an agent, what the maps and its files say.
fn vips(place: &Place, agent: &Client) -> Result<Vec<TenantVips>, LbctlError> {
    match agent.get(paths::VIPS) {
        Ok(found) => Ok(found),
        Err(asked) => match (Pins::open(&place.bpffs), asked) {
            (Ok(pins), _) => {
                let names = names_on_disk(&place.state_dir).unwrap_or_default();
                let record = vips::record_on_disk(&place.state_dir);
                let now = jiff::Timestamp::now().as_second();
                Ok(vips::from_maps(&names, &pins.addresses()?, &pins.segments()?, &pins.frontends()?, &record, now))
            }
            (Err(error), ClientError::Absent(_)) => Err(LbctlError::Absent(error.to_string())),
            (Err(_), asked) => Err(asked.into()),
        },
    }
}

/// Names from the agent, else from the file that it left, else none: then ids are shown.
fn names(place: &Place, agent: &Client) -> Names {
    agent.get(paths::NAMES).ok().or_else(|| names_on_disk(&place.state_dir)).unwrap_or_default()
}

fn names_on_disk(state_dir: &Path) -> Option<Names> {
    let bytes = std::fs::read(state_dir.join(crate::agent::state::NAMES)).ok()?;
    serde_json::from_slice(&bytes).ok()
}

fn status(place: &Place, agent: &Client) -> StatusView {
    let asked = agent.get::<Status>(paths::STATUS);
    let pins = Pins::open(&place.bpffs);
    let seen = pins.as_ref().map_err(ToString::to_string).and_then(|pins| {
        let attached = pins.attached().map_err(|error| error.to_string())?;
        let fill = pins.fill().map_err(|error| error.to_string())?;
        let names = names(place, agent);
        let tenant = |id: u16| names.tenants.get(&id).cloned().unwrap_or_else(|| format!("#{id}"));
        let tenants = fill::tenants(pins, tenant).map_err(|error| error.to_string())?;
        Ok((attached, fill, tenants, pins.settings().map_err(|error| error.to_string())?))
    });
    let mut view = StatusView {
        agent: match &asked {
            Ok(_) => "running".to_owned(),
            Err(error) => error.to_string(),
        },
        ..StatusView::default()
    };
    let no_agent = asked.is_err();
    view.status = asked.unwrap_or_default();
    match seen {
        Ok((attached, fill, tenants, settings)) => {
            view.status.tenants = tenants;
            let gone: Vec<_> = attached.iter().filter(|interface| interface.mode.is_none()).collect();
            view.datapath = if attached.is_empty() {
                "not attached".to_owned()
            } else if gone.is_empty() {
                "forwarding".to_owned()
            } else {
                format!("not attached to {}", list(gone.iter().map(|interface| interface.interface.as_str())))
            };
            if !gone.is_empty() && no_agent {
                view.status.problems.push(view.datapath.clone());
            }
            if no_agent {
                view.status.abi = settings.abi;
                let labels = names_on_disk(&place.state_dir).unwrap_or_default();
                let facts = host_facts().unwrap_or_default();
                let link = |name: &str| facts.interfaces.get(name);
                view.status.interfaces = attached
                    .iter()
                    .map(|interface| InterfaceStatus {
                        name: interface.interface.clone(),
                        role: role(&labels, &interface.interface),
                        mode: interface.mode.map_or("detached", |mode| mode.as_str()).to_owned(),
                        up: link(&interface.interface).is_some_and(|link| link.up),
                        mtu: link(&interface.interface).map_or(0, |link| link.mtu),
                    })
                    .collect();
            }
            view.status.tables = fill
                .iter()
                .filter_map(|fill| {
                    let used = fill.used?;
                    Some(TableFill { name: fill.name.to_owned(), used, capacity: u64::from(fill.max) })
                })
                .collect();
            view.health = if attached.is_empty() || no_agent {
                ABSENT
            } else if view.status.problems.is_empty() && gone.is_empty() {
                OK
            } else {
                DEGRADED
            };
        }
        Err(why) => {
            let there = matches!(
                pins,
                Err(ref error) if !matches!(error, DataplaneError::NotThere { .. } | DataplaneError::NoBpffs { .. })
            );
            view.datapath = why;
            // A member of the socket's group may not see the pins; then the agent's word counts.
            view.health = match (no_agent, there || pins.is_ok()) {
                (false, true) if view.status.problems.is_empty() => OK,
                (false, true) => DEGRADED,
                _ => ABSENT,
            };
        }
    }
    view
}

/// `tenant`, `hub` or both.
fn role(names: &Names, interface: &str) -> String {
    let labels = || names.segments.values().filter(|label| label.interface == interface);
    match (labels().any(|label| label.tenant_side), labels().any(|label| label.hub_side)) {
        (true, true) => "tenant+hub",
        (true, false) => "tenant",
        (false, true) => "hub",
        (false, false) => "?",
    }
    .to_owned()
}

fn list<'a>(items: impl Iterator<Item = &'a str>) -> String {
    items.collect::<Vec<_>>().join(", ")
}

/// Live flows by frontend, and by frontend and backend.
#[derive(Default)]
struct FlowCounts {
    frontend: BTreeMap<u16, u64>,
    backend: BTreeMap<(u16, u16), u64>,
}

impl FlowCounts {
    fn of(pins: &Pins) -> Result<Self, DataplaneError> {
        let live = Live::new(pins)?;
        let (filter, directory) = (Filter::default(), Directory::default());
        let counted = live.fold(&Matcher::new(&filter, &directory, live.clock), BTreeMap::new, |counts, flow| {
            if flow.state.is_open() {
                *counts.entry((flow.frontend, flow.backend_id)).or_insert(0_u64) += 1;
            }
        })?;
        let mut all = Self::default();
        for ((frontend, backend), count) in counted.into_iter().flatten() {
            *all.frontend.entry(frontend).or_default() += count;
            *all.backend.entry((frontend, backend)).or_default() += count;
        }
        Ok(all)
    }
}

/// Frontends and backends: the agent's view with what the maps count; without an agent, what the maps hold.
fn services(place: &Place, agent: &Client) -> Result<(Vec<Service>, Vec<Backend>), LbctlError> {
    let asked = agent
        .get::<Vec<Service>>(paths::SERVICES)
        .and_then(|services| Ok((services, agent.get::<Vec<Backend>>(paths::BACKENDS)?)));
    let pins = Pins::open(&place.bpffs);
    let (mut services, mut backends) = match (asked, &pins) {
        (Ok(asked), _) => asked,
        (Err(_), Ok(pins)) => {
            let names = names_on_disk(&place.state_dir).unwrap_or_default();
            let frontends = pins.frontends()?;
            let tables = frontends.iter().map(|frontend| pins.table(frontend)).collect::<Result<Vec<_>, _>>()?;
            from_maps(&names, &frontends, &tables, &pins.backends()?)
        }
        (Err(ClientError::Absent(_)), Err(error)) => return Err(LbctlError::Absent(error.to_string())),
        (Err(error), Err(_)) => return Err(error.into()),
    };
    if let Ok(pins) = &pins {
        let counters = pins.frontend_counters()?;
        let counts = FlowCounts::of(pins)?;
        for service in &mut services {
            let counter = counters.get(&service.id).copied().unwrap_or(abi::FrontendCounters::default());
            service.flows = Some(counts.frontend.get(&service.id).copied().unwrap_or_default());
            service.accepted = Some(counter.flows);
            service.refused = Some(counter.refused);
            service.in_packets = Some(counter.in_packets);
            service.in_bytes = Some(counter.in_bytes);
            service.out_packets = Some(counter.out_packets);
            service.out_bytes = Some(counter.out_bytes);
        }
        for backend in &mut backends {
            let flows = counts.backend.get(&(backend.frontend, backend.id)).copied();
            backend.flows = Some(flows.unwrap_or_default());
        }
    }
    services.sort();
    backends.sort();
    Ok((services, backends))
}

/// What the maps alone say: no health, and only the backends that get connections.
fn from_maps(
    names: &Names,
    frontends: &[abi::Frontend],
    tables: &[Vec<u16>],
    backends: &BTreeMap<u16, abi::Backend>,
) -> (Vec<Service>, Vec<Backend>) {
    let directory = Directory::new(names, frontends);
    let mut services = Vec::new();
    let mut all = Vec::new();
    for (frontend, table) in frontends.iter().zip(tables) {
        let label = directory.frontends.get(&frontend.id).cloned().unwrap_or_else(|| Directory::unknown(frontend.id));
        let vip = std::net::SocketAddr::new(unmap(&frontend.vip), u16::from_be(frontend.port_be)).to_string();
        let serving: BTreeSet<u16> = table.iter().copied().filter(|&id| id != 0).collect();
        let proto = protocol_name(frontend.protocol).to_owned();
        let target_port = u16::from_be(frontend.target_port_be);
        services.push(Service {
            tenant: label.tenant.clone(),
            service: label.service.clone(),
            name: label.name,
            vip: vip.clone(),
            proto: proto.clone(),
            state: if serving.is_empty() { service_state::DOWN } else { service_state::SERVING }.to_owned(),
            serving: serving.len() as u32,
            affinity: if frontend.flags & abi::FRONTEND_SOURCE_AFFINITY == 0 { "flow" } else { "source" }.to_owned(),
            target_port,
            snat: (frontend.snat != [0; 16]).then(|| unmap(&frontend.snat)),
            id: frontend.id,
            ..Service::default()
        });
        for id in serving {
            let Some(backend) = backends.get(&id) else { continue };
            let address = unmap(&backend.address);
            let port = if backend.port_be == 0 { target_port } else { u16::from_be(backend.port_be) };
            all.push(Backend {
                tenant: label.tenant.clone(),
                service: label.service.clone(),
                vip: vip.clone(),
                proto: proto.clone(),
                backend: std::net::SocketAddr::new(address, port).to_string(),
                node: directory.node(backend.segment, address).map(str::to_owned),
                state: "unknown".to_owned(),
                cause: "no agent".to_owned(),
                serving: true,
                id,
                frontend: frontend.id,
                ..Backend::default()
            });
        }
    }
    (services, all)
}

/// A counter of packets not forwarded, by the number of its reason; `None` = a reason that this version does not know.
fn named_drop(tenant: u16, number: u8, packets: u64, names: &Names) -> Option<Drop> {
    let reason = Reason::from_number(number.into())?;
    Some(Drop {
        reason: reason.name(),
        verdict: match reason.verdict() {
            Verdict::Drop => "drop",
            Verdict::Pass => "pass",
            Verdict::Reject => "reject",
            Verdict::Answer => "answer",
        },
        tenant: (tenant != 0).then(|| names.tenants.get(&tenant).cloned().unwrap_or_else(|| format!("#{tenant}"))),
        packets,
        meaning: reason.meaning(),
    })
}

fn drops(counters: &BTreeMap<(u16, u8), u64>, names: &Names) -> Vec<Drop> {
    let mut drops: Vec<Drop> = counters
        .iter()
        .filter_map(|(&(tenant, number), &packets)| named_drop(tenant, number, packets, names))
        .collect();
    drops.sort_by(|a, b| b.packets.cmp(&a.packets).then_with(|| (a.reason, &a.tenant).cmp(&(b.reason, &b.tenant))));
    drops
}
