//! What `lbctl` prints, as pure functions of what it has found.

use std::io::{self, Write};

use serde::Serialize;

use super::Output;
use super::table::{Age, Bytes, Column, Table};
use crate::api::types::{
    AcceptClusterReply, AdoptReply, ApplyStatus, Backend, Event, KillReply, ReloadReply, Service, Status, TenantVips,
    reload_outcome,
};
use crate::flows::follow::Change;
use crate::flows::{Flow, FlowRecord, Listing, Namer, Position};

/// `lbctl status`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct StatusView {
    /// `ok`, `degraded` or `absent`.
    pub health: &'static str,
    /// `running`, or why it can't be asked.
    pub agent: String,
    /// `forwarding`, or why not or why it can't be seen.
    pub datapath: String,
    /// The agent's own words; without an agent, what the maps say.
    #[serde(flatten)]
    pub status: Status,
}

/// One counter of `lbctl drops`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Drop {
    /// Stable name of the reason.
    pub reason: &'static str,
    /// `drop`, `reject`, `answer` or `pass`.
    pub verdict: &'static str,
    /// Tenant, where it is known.
    pub tenant: Option<String>,
    /// Packets.
    pub packets: u64,
    /// What it means.
    pub meaning: &'static str,
}

impl Drop {
    /// Whether it is counted for this tenant; `None` = any, and none.
    pub(crate) fn is_of(&self, tenant: Option<&str>) -> bool {
        tenant.is_none_or(|wanted| self.tenant.as_deref() == Some(wanted))
    }

    /// Whether packets were dropped or refused, not handed on.
    fn is_loss(&self) -> bool {
        matches!(self.verdict, "drop" | "reject")
    }
}

const STATUS_INTERFACES: &[Column] = &[
    Column::text("INTERFACE"),
    Column::text("ROLE"),
    Column::text("MODE"),
    Column::text("LINK"),
    Column::number("MTU"),
];

const STATUS_SOURCES: &[Column] =
    &[Column::text("SOURCE"), Column::text("STATE"), Column::number("AGE"), Column::text("ERROR")];

const STATUS_TENANTS: &[Column] = &[
    Column::text("TENANT"),
    Column::text("FAMILY"),
    Column::number("FLOWS"),
    Column::number("OF"),
    Column::number("UDP"),
    Column::number("OF"),
    Column::number("HALF-OPEN"),
    Column::number("OF"),
];

const VIPS: &[Column] = &[
    Column::text("TENANT"),
    Column::text("SEGMENT"),
    Column::text("ADDRESS"),
    Column::text("STATE"),
    Column::text("BY"),
    Column::text("MAC"),
    Column::number("UNTIL"),
];

const WHOIS: &[Column] = &[
    Column::text("PROTO"),
    Column::text("CLIENT"),
    Column::text("VIP"),
    Column::text("BACKEND"),
    Column::text("NODE"),
    Column::text("TENANT"),
    Column::text("SERVICE"),
    Column::text("STATE"),
    Column::number("AGE"),
    Column::number("IDLE"),
];

const FOLLOW: &[Column] = &[
    Column::text("EVENT"),
    Column::text("PROTO"),
    Column::text("TENANT"),
    Column::text("CLIENT"),
    Column::text("VIP"),
    Column::text("BACKEND"),
    Column::text("NODE"),
    Column::text("SERVICE"),
    Column::text("STATE"),
    Column::number("AGE"),
    Column::number("IN"),
    Column::number("OUT"),
    Column::text("SNAT").wide(),
    Column::number("IN_PACKETS").wide(),
    Column::number("OUT_PACKETS").wide(),
];

const RATES: &[Column] = &[
    Column::text("TIME"),
    Column::text("TENANT"),
    Column::text("REASON"),
    Column::number("PACKETS"),
    Column::number("PER_S"),
    Column::number("TOTAL"),
    Column::text("VERDICT"),
    Column::text("MEANING").wide(),
];

const STATUS_TABLES: &[Column] =
    &[Column::text("TABLE"), Column::number("USED"), Column::number("OF"), Column::number("FILL")];

const SERVICES: &[Column] = &[
    Column::text("TENANT"),
    Column::text("SERVICE"),
    Column::text("VIP"),
    Column::text("PROTO"),
    Column::text("STATE"),
    Column::text("UP"),
    Column::text("MODE"),
    Column::number("FLOWS"),
    Column::number("IN"),
    Column::number("OUT"),
    Column::text("NAME").wide(),
    Column::text("CLIENTS").wide(),
    Column::text("AFFINITY").wide(),
    Column::number("TARGET").wide(),
    Column::text("SNAT").wide(),
    Column::number("SERVING").wide(),
    Column::number("ACCEPTED").wide(),
    Column::number("REFUSED").wide(),
    Column::number("ID").wide(),
];

const BACKENDS: &[Column] = &[
    Column::text("TENANT"),
    Column::text("SERVICE"),
    Column::text("VIP"),
    Column::text("PROTO"),
    Column::text("BACKEND"),
    Column::text("NODE"),
    Column::text("STATE"),
    Column::number("SINCE"),
    Column::text("SERVING"),
    Column::number("FLOWS"),
    Column::text("CAUSE"),
    Column::number("WEIGHT").wide(),
    Column::number("ID").wide(),
];

const FLOWS: &[Column] = &[
    Column::text("TENANT"),
    Column::text("PROTO"),
    Column::text("CLIENT"),
    Column::text("VIP"),
    Column::text("BACKEND"),
    Column::text("NODE"),
    Column::text("SERVICE"),
    Column::text("STATE"),
    Column::number("AGE"),
    Column::number("IDLE"),
    Column::number("IN"),
    Column::number("OUT"),
    Column::text("SNAT").wide(),
    Column::text("HUB").wide(),
    Column::number("IN_PACKETS").wide(),
    Column::number("OUT_PACKETS").wide(),
    Column::number("IN_BYTES").wide(),
    Column::number("OUT_BYTES").wide(),
];

const DROPS: &[Column] = &[
    Column::text("REASON"),
    Column::text("TENANT"),
    Column::number("PACKETS"),
    Column::text("VERDICT"),
    Column::text("MEANING"),
];

const EVENTS: &[Column] = &[
    Column::text("LAST"),
    Column::number("COUNT"),
    Column::text("LEVEL"),
    Column::text("REASON"),
    Column::text("ABOUT"),
    Column::text("MESSAGE"),
    Column::text("FIRST").wide(),
    Column::text("ACTIVE").wide(),
];

fn json(out: &mut dyn Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, value)?;
    writeln!(out)
}

/// A list as one JSON array, an object a line.
fn json_list(out: &mut dyn Write, items: impl Iterator<Item = impl Serialize>) -> io::Result<()> {
    let mut separator = "[\n";
    for item in items {
        out.write_all(separator.as_bytes())?;
        serde_json::to_writer(&mut *out, &item)?;
        separator = ",\n";
    }
    out.write_all(if separator == "[\n" { b"[]\n" } else { b"\n]\n" })
}

/// Prints `lbctl status`.
pub(crate) fn status(out: &mut dyn Write, view: &StatusView, output: Output) -> io::Result<()> {
    if output == Output::Json {
        return json(out, view);
    }
    let status = &view.status;
    let mut line = |name: &str, value: &dyn std::fmt::Display| writeln!(out, "{name:<10} {value}");
    line("health", &view.health)?;
    line("agent", &view.agent)?;
    line("datapath", &view.datapath)?;
    if !status.version.is_empty() {
        line("version", &status.version)?;
    }
    if status.abi != 0 {
        line("abi", &status.abi)?;
    }
    if !status.started.is_empty() {
        line("started", &status.started)?;
    }
    if !status.config.file.is_empty() {
        let stale = if status.config.stale { ", STALE: the last reload was refused" } else { "" };
        line("config", &format_args!("{} (loaded {}{stale})", status.config.file, status.config.loaded))?;
        for error in status.config.error.iter().flat_map(|error| error.lines()) {
            line("", &error)?;
        }
    }
    if status.apply.applied + status.apply.failed > 0 {
        let ApplyStatus { last, applied, failed, error } = &status.apply;
        line("changes", &format_args!("{applied} applied, {failed} failed, last {last}"))?;
        if let Some(error) = error {
            line("", &format_args!("failing: {error}"))?;
        }
    }
    for problem in &status.problems {
        line("problem", problem)?;
    }
    if !status.interfaces.is_empty() {
        let mut table = Table::new(STATUS_INTERFACES, output == Output::Wide);
        for interface in &status.interfaces {
            let link = if interface.up { "up" } else { "down" };
            table.cell(&interface.name).cell(&interface.role).cell(&interface.mode).cell(link).cell(interface.mtu);
        }
        writeln!(out)?;
        table.print(out)?;
    }
    if !status.sources.is_empty() {
        let mut table = Table::new(STATUS_SOURCES, output == Output::Wide);
        for source in &status.sources {
            table
                .cell(&source.name)
                .cell(&source.state)
                .optional(source.age_s.map(Age))
                .optional(source.error.as_ref());
        }
        writeln!(out)?;
        table.print(out)?;
    }
    if let Some(lease) = &status.lease {
        let holder = lease.holder.as_ref().map_or_else(String::new, |holder| format!(" ({holder})"));
        writeln!(out)?;
        writeln!(out, "{:<10} {}{holder}", "lease", lease.state)?;
    }
    if let Some(cluster) = &status.cluster {
        let uid = if cluster.uid.is_empty() { "not known yet" } else { &cluster.uid };
        writeln!(out, "{:<10} {uid}", "cluster")?;
        if let Some(instead) = &cluster.instead {
            writeln!(out, "{:<10} HELD: {instead} is there instead; `lbctl accept-cluster` accepts it", "")?;
        }
    }
    if !status.tenants.is_empty() {
        let mut table = Table::new(STATUS_TENANTS, output == Output::Wide);
        let limit = |limit: u64| (limit != 0).then_some(limit);
        for fill in &status.tenants {
            table
                .cell(&fill.tenant)
                .cell(&fill.family)
                .cell(fill.flows)
                .optional(limit(fill.flows_limit))
                .cell(fill.udp)
                .optional(limit(fill.udp_limit))
                .cell(fill.half_open)
                .optional(limit(fill.half_open_limit));
        }
        writeln!(out)?;
        table.print(out)?;
    }
    if !status.tables.is_empty() {
        let mut table = Table::new(STATUS_TABLES, output == Output::Wide);
        for fill in &status.tables {
            let percent = if fill.capacity == 0 { 0.0 } else { fill.used as f64 * 100.0 / fill.capacity as f64 };
            table.cell(&fill.name).cell(fill.used).cell(fill.capacity).cell(format_args!("{percent:.1}%"));
        }
        writeln!(out)?;
        table.print(out)?;
    }
    Ok(())
}

/// Prints what came of `lbctl adopt`.
pub(crate) fn adopt(out: &mut dyn Write, reply: &AdoptReply, output: Output) -> io::Result<()> {
    if output == Output::Json {
        return json(out, reply);
    }
    let addresses: Vec<_> = reply.addresses.iter().map(ToString::to_string).collect();
    if addresses.is_empty() {
        writeln!(out, "{} is taken over; it has no address yet, see `lbctl events`", reply.service)
    } else {
        writeln!(out, "{} is taken over: {}", reply.service, addresses.join(", "))
    }
}

/// Prints what came of `lbctl accept-cluster`.
pub(crate) fn accept_cluster(out: &mut dyn Write, reply: &AcceptClusterReply, output: Output) -> io::Result<()> {
    if output == Output::Json {
        return json(out, reply);
    }
    writeln!(out, "the cluster {} is accepted", reply.uid)
}

/// Prints `lbctl services`.
pub(crate) fn services(out: &mut dyn Write, services: &[Service], output: Output) -> io::Result<()> {
    if output == Output::Json {
        return json_list(out, services.iter());
    }
    let mut table = Table::new(SERVICES, output == Output::Wide);
    for service in services {
        let backends = match (service.up, service.backends) {
            (Some(up), Some(all)) => format!("{up}/{all}"),
            _ => format!("?/{}", service.backends.map_or_else(|| "?".to_owned(), |all| all.to_string())),
        };
        table
            .cell(&service.tenant)
            .cell(&service.service)
            .cell(&service.vip)
            .cell(&service.proto)
            .cell(&service.state)
            .cell(backends)
            .optional(service.mode.as_ref())
            .optional(service.flows)
            .optional(service.in_bytes.map(Bytes))
            .optional(service.out_bytes.map(Bytes))
            .cell(&service.name)
            .optional(service.clients.as_ref())
            .cell(&service.affinity)
            .optional((service.target_port != 0).then_some(service.target_port))
            .optional(service.snat)
            .cell(service.serving)
            .optional(service.accepted)
            .optional(service.refused)
            .cell(service.id);
    }
    table.print(out)
}

/// Prints `lbctl backends`.
pub(crate) fn backends(out: &mut dyn Write, backends: &[Backend], output: Output) -> io::Result<()> {
    if output == Output::Json {
        return json_list(out, backends.iter());
    }
    let mut table = Table::new(BACKENDS, output == Output::Wide);
    for backend in backends {
        table
            .cell(&backend.tenant)
            .cell(&backend.service)
            .cell(&backend.vip)
            .cell(&backend.proto)
            .cell(&backend.backend)
            .optional(backend.node.as_ref())
            .cell(&backend.state)
            .optional(backend.since_s.map(Age))
            .cell(if backend.serving { "yes" } else { "no" })
            .optional(backend.flows)
            .optional(Some(&backend.cause).filter(|cause| !cause.is_empty()))
            .optional(backend.weight)
            .cell(backend.id);
    }
    table.print(out)
}

/// Flows that one thread renders at a time.
const CHUNK: usize = 16_384;

/// Does the work on chunks, on all CPUs, and hands the results over in order; few are kept at a time.
fn in_chunks<I: Sync, T: Send>(
    items: &[I],
    chunk: usize,
    work: impl Fn(&[I]) -> T + Sync,
    mut take: impl FnMut(T) -> io::Result<()>,
) -> io::Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    for wave in items.chunks(chunk * threads) {
        let done = std::thread::scope(|scope| {
            let running: Vec<_> = wave.chunks(chunk).map(|chunk| scope.spawn(|| work(chunk))).collect();
            running.into_iter().map(std::thread::ScopedJoinHandle::join).collect::<Vec<_>>()
        });
        for result in done {
            take(result.map_err(|_| io::Error::other("a thread that renders flows has ended"))?)?;
        }
    }
    Ok(())
}

/// Prints `lbctl flows`.
pub(crate) fn flows(out: &mut dyn Write, flows: &Listing, namer: &Namer<'_>, output: Output) -> io::Result<()> {
    if output == Output::Json {
        let mut separator: &[u8] = b"[\n";
        let render = |chunk: &[Position]| {
            let mut text = Vec::with_capacity(chunk.len() * 400);
            for flow in flows.at_all(chunk) {
                if !text.is_empty() {
                    text.extend_from_slice(b",\n");
                }
                serde_json::to_writer(&mut text, &namer.record(&flow))?;
            }
            Ok(text)
        };
        in_chunks(flows.order(), CHUNK, render, |text: io::Result<Vec<u8>>| {
            out.write_all(separator)?;
            separator = b",\n";
            out.write_all(&text?)
        })?;
        return out.write_all(if flows.is_empty() { b"[]\n" } else { b"\n]\n" });
    }
    let render = |chunk: &[Position]| {
        let mut table = Table::new(FLOWS, output == Output::Wide);
        for flow in flows.at_all(chunk) {
            row(&mut table, &namer.record(&flow));
        }
        table
    };
    // The columns' widths are known only when all rows are.
    let mut whole = Table::new(FLOWS, output == Output::Wide);
    let mut tables = Vec::new();
    in_chunks(flows.order(), CHUNK, render, |table| {
        whole.widen(&table);
        tables.push(table);
        Ok(())
    })?;
    whole.print(out)?;
    in_chunks(
        &tables,
        1,
        |tables| tables.iter().map(|table| whole.lines(table)).collect::<String>(),
        |text| out.write_all(text.as_bytes()),
    )
}

fn row(table: &mut Table, record: &FlowRecord<'_>) {
    table
        .text(record.tenant)
        .text(record.proto)
        .socket(record.client)
        .socket(record.vip)
        .socket(record.backend)
        .text(record.node.unwrap_or("-"))
        .text(record.service)
        .text(record.state)
        .cell(Age(record.age_s))
        .cell(Age(record.idle_s))
        .cell(Bytes(record.in_bytes))
        .cell(Bytes(record.out_bytes))
        .socket(record.snat)
        .text(record.hub)
        .cell(record.in_packets)
        .cell(record.out_packets)
        .cell(record.in_bytes)
        .cell(record.out_bytes);
}

/// Prints `lbctl whois`.
pub(crate) fn whois(out: &mut dyn Write, flows: &[Flow], namer: &Namer<'_>, output: Output) -> io::Result<()> {
    if output == Output::Json {
        return json_list(out, flows.iter().map(|flow| namer.record(flow)));
    }
    if flows.is_empty() {
        return Ok(());
    }
    let mut table = Table::new(WHOIS, output == Output::Wide);
    for flow in flows {
        let record = namer.record(flow);
        table
            .text(record.proto)
            .socket(record.client)
            .socket(record.vip)
            .socket(record.backend)
            .text(record.node.unwrap_or("-"))
            .text(record.tenant)
            .text(record.service)
            .text(record.state)
            .cell(Age(record.age_s))
            .cell(Age(record.idle_s));
    }
    table.print(out)
}

/// Prints `lbctl vips`: the addresses that are not free, and how many are.
pub(crate) fn vips(out: &mut dyn Write, tenants: &[TenantVips], output: Output) -> io::Result<()> {
    if output == Output::Json {
        return json_list(out, tenants.iter());
    }
    let mut table = Table::new(VIPS, output == Output::Wide);
    for tenant in tenants {
        let segment =
            if tenant.vlan == 0 { tenant.interface.clone() } else { format!("{}.{}", tenant.interface, tenant.vlan) };
        for vip in &tenant.addresses {
            table
                .cell(&tenant.tenant)
                .cell(&segment)
                .cell(vip.address)
                .cell(&vip.state)
                .optional((!vip.services.is_empty()).then(|| vip.services.join(",")))
                .optional(vip.mac.as_ref())
                .optional(vip.until_s.map(Age));
        }
        if let Some(free) = tenant.free {
            let of =
                if tenant.pools.is_empty() { "no pool".to_owned() } else { format!("of {}", tenant.pools.join(",")) };
            table.cell(&tenant.tenant).cell(&segment).cell(free).cell("free").cell(of).cell("-").cell("-");
        }
    }
    table.print(out)
}

/// A line of `lbctl flows --follow -o json`.
#[derive(Serialize)]
struct ChangeRecord<'a> {
    event: &'static str,
    #[serde(flatten)]
    flow: FlowRecord<'a>,
}

/// Prints changes of flows as they come.
pub(crate) struct Follow {
    output: Output,
    table: Table,
}

impl Follow {
    /// In this form.
    pub(crate) fn new(output: Output) -> Self {
        Self { output, table: Table::new(FOLLOW, output == Output::Wide) }
    }

    /// Prints the changes of one look; the first time with a heading.
    pub(crate) fn print(
        &mut self,
        out: &mut dyn Write,
        changes: &[(Change, Flow)],
        namer: &Namer<'_>,
    ) -> io::Result<()> {
        for (change, flow) in changes {
            let record = namer.record(flow);
            if self.output == Output::Json {
                serde_json::to_writer(&mut *out, &ChangeRecord { event: change.as_str(), flow: record })?;
                writeln!(out)?;
                continue;
            }
            self.table
                .cell(change.as_str())
                .text(record.proto)
                .text(record.tenant)
                .socket(record.client)
                .socket(record.vip)
                .socket(record.backend)
                .text(record.node.unwrap_or("-"))
                .text(record.service)
                .text(record.state)
                .cell(Age(record.age_s))
                .cell(Bytes(record.in_bytes))
                .cell(Bytes(record.out_bytes))
                .socket(record.snat)
                .cell(record.in_packets)
                .cell(record.out_packets);
        }
        if self.output == Output::Json { Ok(()) } else { self.table.print_on(out) }
    }
}

/// What was added to a counter in one interval of `lbctl drops --watch`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Rate {
    /// End of the interval (RFC 3339).
    pub time: String,
    /// Packets in the interval.
    pub delta: u64,
    /// The same for one second.
    pub per_second: f64,
    /// The counter.
    #[serde(flatten)]
    pub total: Drop,
}

/// Prints rates as they come.
pub(crate) struct Rates {
    output: Output,
    table: Table,
}

impl Rates {
    /// In this form.
    pub(crate) fn new(output: Output) -> Self {
        Self { output, table: Table::new(RATES, output == Output::Wide) }
    }

    /// Prints the counters that have moved in one interval; the first time with a heading.
    pub(crate) fn print(&mut self, out: &mut dyn Write, rates: &[Rate]) -> io::Result<()> {
        if self.output == Output::Json {
            for rate in rates {
                serde_json::to_writer(&mut *out, rate)?;
                writeln!(out)?;
            }
            return Ok(());
        }
        for rate in rates.iter().filter(|rate| self.output == Output::Wide || rate.total.is_loss()) {
            self.table
                .cell(&rate.time)
                .optional(rate.total.tenant.as_ref())
                .cell(rate.total.reason)
                .cell(rate.delta)
                .cell(format_args!("{:.1}", rate.per_second))
                .cell(rate.total.packets)
                .cell(rate.total.verdict)
                .cell(rate.total.meaning);
        }
        self.table.print_on(out)
    }
}

/// Prints `lbctl drops`. Packets that were not dropped or refused but handed on are shown in wide tables and JSON.
pub(crate) fn drops(out: &mut dyn Write, drops: &[Drop], output: Output) -> io::Result<()> {
    if output == Output::Json {
        return json_list(out, drops.iter());
    }
    let mut table = Table::new(DROPS, output == Output::Wide);
    let shown = |drop: &&Drop| output == Output::Wide || drop.is_loss();
    for drop in drops.iter().filter(shown) {
        table.cell(drop.reason).optional(drop.tenant.as_ref()).cell(drop.packets).cell(drop.verdict).cell(drop.meaning);
    }
    table.print(out)
}

/// Prints `lbctl events`.
pub(crate) fn events(out: &mut dyn Write, events: &[Event], output: Output) -> io::Result<()> {
    if output == Output::Json {
        return json_list(out, events.iter());
    }
    let mut table = Table::new(EVENTS, output == Output::Wide);
    for event in events {
        table
            .cell(&event.last)
            .cell(event.count)
            .cell(&event.level)
            .cell(&event.reason)
            .optional(event.service.as_ref().or(event.tenant.as_ref()))
            .cell(&event.message)
            .cell(&event.time)
            .cell(if event.active { "yes" } else { "no" });
    }
    table.print(out)
}

/// Prints how many flows were ended.
pub(crate) fn kill(out: &mut dyn Write, reply: KillReply, output: Output) -> io::Result<()> {
    if output == Output::Json { json(out, &reply) } else { writeln!(out, "{} flows killed", reply.killed) }
}

/// Prints what came of a reload.
pub(crate) fn reload(out: &mut dyn Write, reply: &ReloadReply, output: Output) -> io::Result<()> {
    if output == Output::Json {
        return json(out, reply);
    }
    let sentence = match reply.outcome.as_str() {
        reload_outcome::APPLIED => "reloaded",
        reload_outcome::UNCHANGED => "nothing has changed",
        reload_outcome::WOULD_APPLY => "would be reloaded",
        _ => "refused, nothing was changed",
    };
    writeln!(out, "{sentence}")?;
    for change in &reply.changes {
        writeln!(out, "  {change}")?;
    }
    if reply.flows_cut > 0 {
        writeln!(out, "  live flows cut: {}", reply.flows_cut)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::types::{ConfigStatus, InterfaceStatus, SourceStatus, TableFill, TenantFill, Vip};
    use crate::flows::{Clock, Directory, FrontendNames, State};

    fn text(print: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> String {
        let mut out = Vec::new();
        print(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    fn view() -> StatusView {
        StatusView {
            health: "degraded",
            agent: "running".to_owned(),
            datapath: "forwarding".to_owned(),
            status: Status {
                version: "0.1.0".to_owned(),
                abi: 1,
                pid: 7,
                started: "2026-01-01T00:00:00Z".to_owned(),
                config: ConfigStatus {
                    file: "/etc/lbd/lbd.yaml".to_owned(),
                    loaded: "2026-01-01T00:00:00Z".to_owned(),
                    stale: true,
                    error: Some("lbd.yaml:3:1: unknown key\n  |\n3 | x: 1".to_owned()),
                },
                interfaces: vec![InterfaceStatus {
                    name: "eth1".to_owned(),
                    role: "tenant".to_owned(),
                    mode: "native".to_owned(),
                    up: true,
                    mtu: 1500,
                }],
                sources: vec![SourceStatus {
                    name: "kubernetes hub".to_owned(),
                    state: "away".to_owned(),
                    age_s: Some(61),
                    error: Some("connection refused".to_owned()),
                }],
                tenants: vec![TenantFill {
                    tenant: "a".to_owned(),
                    family: "IPv6".to_owned(),
                    flows: 7,
                    flows_limit: 100,
                    half_open: 2,
                    ..TenantFill::default()
                }],
                tables: vec![TableFill { name: "flows4".to_owned(), used: 1000, capacity: 4000 }],
                problems: vec!["config_stale: the last reload was refused".to_owned()],
                ..Status::default()
            },
        }
    }

    #[test]
    fn a_status() {
        assert_eq!(
            text(|out| status(out, &view(), Output::Table)),
            "\
health     degraded
agent      running
datapath   forwarding
version    0.1.0
abi        1
started    2026-01-01T00:00:00Z
config     /etc/lbd/lbd.yaml (loaded 2026-01-01T00:00:00Z, STALE: the last reload was refused)
           lbd.yaml:3:1: unknown key
             |
           3 | x: 1
problem    config_stale: the last reload was refused

INTERFACE  ROLE    MODE    LINK   MTU
eth1       tenant  native  up    1500

SOURCE          STATE   AGE  ERROR
kubernetes hub  away   1m1s  connection refused

TENANT  FAMILY  FLOWS   OF  UDP  OF  HALF-OPEN  OF
a       IPv6        7  100    0   -          2   -

TABLE   USED    OF   FILL
flows4  1000  4000  25.0%
"
        );
        let json: serde_json::Value = serde_json::from_str(&text(|out| status(out, &view(), Output::Json))).unwrap();
        assert_eq!(json["health"], "degraded");
        assert_eq!(json["config"]["stale"], true);
        assert_eq!(json["interfaces"][0]["mode"], "native");
        assert_eq!(json["sources"][0]["age_s"], 61);
    }

    #[test]
    fn services_and_backends() {
        let service = Service {
            tenant: "a".to_owned(),
            service: "ns/api".to_owned(),
            name: "api".to_owned(),
            vip: "192.0.2.34:6443".to_owned(),
            proto: "TCP".to_owned(),
            state: "degraded".to_owned(),
            serving: 1,
            up: Some(1),
            backends: Some(2),
            mode: Some("endpoints".to_owned()),
            clients: Some("all (guest)".to_owned()),
            affinity: "flow".to_owned(),
            flows: Some(3),
            in_bytes: Some(2048),
            ..Service::default()
        };
        assert_eq!(
            text(|out| services(out, std::slice::from_ref(&service), Output::Table)),
            "TENANT  SERVICE  VIP              PROTO  STATE     UP   MODE       FLOWS        IN  OUT\n\
             a       ns/api   192.0.2.34:6443  TCP    degraded  1/2  endpoints      3  2.00 KiB    -\n"
        );
        assert!(text(|out| services(out, std::slice::from_ref(&service), Output::Wide)).contains("all (guest)"));
        let unknown = Service { up: None, backends: None, ..service };
        assert!(text(|out| services(out, &[unknown], Output::Table)).contains("?/?"));
        let backend = Backend {
            tenant: "a".to_owned(),
            service: "ns/api".to_owned(),
            vip: "192.0.2.34:6443".to_owned(),
            proto: "UDP".to_owned(),
            backend: "10.0.0.11:30918".to_owned(),
            node: Some("n1".to_owned()),
            state: "down".to_owned(),
            cause: "connection refused".to_owned(),
            since_s: Some(5),
            ..Backend::default()
        };
        assert_eq!(
            text(|out| backends(out, &[backend], Output::Table)),
            "TENANT  SERVICE  VIP              PROTO  BACKEND          NODE  STATE  SINCE  SERVING  FLOWS  CAUSE\n\
             a       ns/api   192.0.2.34:6443  UDP    10.0.0.11:30918  n1    down      5s  no           -  connection refused\n"
        );
    }

    #[test]
    fn empty_lists_are_json() {
        assert_eq!(text(|out| services(out, &[], Output::Json)), "[]\n");
        assert_eq!(text(|out| events(out, &[], Output::Json)), "[]\n");
    }

    fn many(count: u32) -> Vec<Flow> {
        let flow = |number: u32| Flow {
            age: number,
            idle: 1,
            in_bytes: u64::from(number),
            ..Flow::sample((std::net::Ipv4Addr::from(number), 40000).into(), State::Established)
        };
        (0..count).map(flow).collect()
    }

    fn directory() -> Directory {
        let names = FrontendNames { tenant: "a".to_owned(), service: "ns/api".to_owned(), name: "api".to_owned() };
        Directory { hub: "hub".to_owned(), frontends: [(5, names)].into(), ..Directory::default() }
    }

    #[test]
    fn flows_in_every_form() {
        let directory = directory();
        let clock = Clock { now: 0, ticks_per_second_256: 256 };
        let mut all = many(2);
        all.push(Flow {
            protocol: 17,
            client: "[2001:db8::9]:40000".parse().unwrap(),
            vip: "[2001:db8::34]:53".parse().unwrap(),
            state: State::Unreplied,
            ..all[1]
        });
        let namer = Namer::new(&directory, clock);
        let listing = Listing::from(all[1..].to_vec());
        assert_eq!(
            text(|out| flows(out, &listing, &namer, Output::Table)),
            "TENANT  PROTO  CLIENT               VIP                BACKEND          NODE  SERVICE  STATE        AGE  IDLE   IN  OUT\n\
             a       TCP    0.0.0.1:40000        192.0.2.34:6443    10.0.0.11:30918  -     ns/api   established   1s    1s  1 B  1 B\n\
             a       UDP    [2001:db8::9]:40000  [2001:db8::34]:53  10.0.0.11:30918  -     ns/api   unreplied     1s    1s  1 B  1 B\n"
        );
        let listing = Listing::sorted(vec![all]);
        assert!(text(|out| flows(out, &listing, &namer, Output::Wide)).contains("10.0.0.2:1024"));
        let json: Vec<serde_json::Value> =
            serde_json::from_str(&text(|out| flows(out, &listing, &namer, Output::Json))).unwrap();
        assert_eq!(json.len(), 3);
        assert_eq!(json[1]["client"], "0.0.0.1:40000");
        assert_eq!(json[1]["node"], serde_json::Value::Null);
        assert_eq!((&json[2]["proto"], &json[2]["vip"]), (&"UDP".into(), &"[2001:db8::34]:53".into()));
    }

    #[test]
    fn rows_of_all_threads_have_the_same_widths() {
        let directory = directory();
        let namer = Namer::new(&directory, Clock { now: 0, ticks_per_second_256: 256 });
        let listing = Listing::from(many(3 * CHUNK as u32 + 5));
        let table = text(|out| flows(out, &listing, &namer, Output::Table));
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines.len(), 1 + 3 * CHUNK + 5);
        let state = lines[0].find("STATE").unwrap();
        assert!(lines[1..].iter().all(|line| line[state..].starts_with("established")));
        assert!(lines[lines.len() - 1].contains("0.0.192.4:40000"), "{}", lines[lines.len() - 1]);
    }

    #[test]
    fn changes_are_told_line_by_line() {
        let directory = directory();
        let namer = Namer::new(&directory, Clock { now: 0, ticks_per_second_256: 256 });
        let all = many(2);
        let changes = [(Change::Opened, all[0]), (Change::Closed, all[1])];
        let mut table = Follow::new(Output::Table);
        let mut json = Follow::new(Output::Json);
        let told = text(|out| {
            table.print(out, &changes[..1], &namer)?;
            table.print(out, &changes[1..], &namer)
        });
        assert_eq!(
            told,
            "EVENT   PROTO  TENANT  CLIENT         VIP              BACKEND          NODE  SERVICE  STATE        AGE   IN  OUT\n\
             opened  TCP    a       0.0.0.0:40000  192.0.2.34:6443  10.0.0.11:30918  -     ns/api   established   0s  0 B  1 B\n\
             closed  TCP    a       0.0.0.1:40000  192.0.2.34:6443  10.0.0.11:30918  -     ns/api   established   1s  1 B  1 B\n"
        );
        let lines = text(|out| json.print(out, &changes, &namer));
        let lines: Vec<serde_json::Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((&lines[0]["event"], &lines[1]["event"]), (&"opened".into(), &"closed".into()));
        assert_eq!((&lines[1]["tenant"], &lines[1]["client"]), (&"a".into(), &"0.0.0.1:40000".into()));
    }

    #[test]
    fn whois_names_the_client() {
        let directory = directory();
        let namer = Namer::new(&directory, Clock { now: 0, ticks_per_second_256: 256 });
        let all = many(1);
        assert_eq!(
            text(|out| whois(out, &all, &namer, Output::Table)),
            "PROTO  CLIENT         VIP              BACKEND          NODE  TENANT  SERVICE  STATE        AGE  IDLE\n\
             TCP    0.0.0.0:40000  192.0.2.34:6443  10.0.0.11:30918  -     a       ns/api   established   0s    1s\n"
        );
        assert_eq!(text(|out| whois(out, &[], &namer, Output::Table)), "");
        assert_eq!(text(|out| whois(out, &[], &namer, Output::Json)), "[]\n");
    }

    #[test]
    fn addresses_and_how_many_are_free() {
        let vip = |address: &str, state: &str, services: &[&str]| Vip {
            address: address.parse().unwrap(),
            state: state.to_owned(),
            services: services.iter().map(ToString::to_string).collect(),
            mac: None,
            until_s: None,
        };
        let tenant = TenantVips {
            tenant: "a".to_owned(),
            interface: "eth1".to_owned(),
            vlan: 2003,
            pools: vec!["192.0.2.32-192.0.2.47".to_owned()],
            free: Some(13),
            free_in_pools: vec![13],
            addresses: vec![
                vip("192.0.2.34", "used", &["ns/api", "web"]),
                Vip { mac: Some("02:00:00:00:00:01".to_owned()), ..vip("192.0.2.35", "conflict", &[]) },
                Vip { until_s: Some(3660), ..vip("2001:db8::34", "reserved", &["ns/gone"]) },
            ],
        };
        assert_eq!(
            text(|out| vips(out, std::slice::from_ref(&tenant), Output::Table)),
            "TENANT  SEGMENT    ADDRESS       STATE     BY                        MAC                UNTIL\n\
             a       eth1.2003  192.0.2.34    used      ns/api,web                -                      -\n\
             a       eth1.2003  192.0.2.35    conflict  -                         02:00:00:00:00:01      -\n\
             a       eth1.2003  2001:db8::34  reserved  ns/gone                   -                   1h1m\n\
             a       eth1.2003  13            free      of 192.0.2.32-192.0.2.47  -                      -\n"
        );
        let json: serde_json::Value = serde_json::from_str(&text(|out| vips(out, &[tenant], Output::Json))).unwrap();
        assert_eq!((&json[0]["vlan"], &json[0]["free"]), (&2003.into(), &13.into()));
        assert_eq!(json[0]["addresses"][1]["mac"], "02:00:00:00:00:01");
    }

    #[test]
    fn rates_are_told_as_they_come() {
        let rate = |verdict: &'static str, delta: u64| Rate {
            time: "t".to_owned(),
            delta,
            per_second: delta as f64 / 2.0,
            total: Drop {
                reason: "no_flow",
                verdict,
                tenant: Some("a".to_owned()),
                packets: 100,
                meaning: "of no flow",
            },
        };
        let mut rates = Rates::new(Output::Table);
        assert_eq!(
            text(|out| rates.print(out, &[rate("reject", 5), rate("pass", 9)])),
            "TIME  TENANT  REASON   PACKETS  PER_S  TOTAL  VERDICT\nt     a       no_flow        5    2.5    100  reject\n"
        );
        let lines = text(|out| Rates::new(Output::Json).print(out, &[rate("pass", 9)]));
        let line: serde_json::Value = serde_json::from_str(lines.trim_end()).unwrap();
        assert_eq!((&line["delta"], &line["packets"], &line["tenant"]), (&9.into(), &100.into(), &"a".into()));
    }

    /// Not a unit test of speed: it prints what the machine does, and only a change of order fails it.
    #[test]
    #[ignore = "slow without optimization"]
    fn a_million_flows() {
        let directory = directory();
        let clock = Clock { now: 0, ticks_per_second_256: 256 };
        let all = many(1_000_000);
        for output in [Output::Table, Output::Wide, Output::Json] {
            let start = std::time::Instant::now();
            let shown = Listing::sorted(vec![all.clone()]);
            let sorted = start.elapsed();
            flows(&mut io::sink(), &shown, &Namer::new(&directory, clock), output).unwrap();
            eprintln!("{output:?}: sorted after {sorted:?}, printed after {:?}", start.elapsed());
            assert!(start.elapsed().as_secs() < 20);
        }
    }

    #[test]
    fn drops_and_events() {
        let counters = [
            Drop {
                reason: "no_flow",
                verdict: "reject",
                tenant: Some("a".to_owned()),
                packets: 12,
                meaning: "of no flow",
            },
            Drop { reason: "host", verdict: "pass", tenant: None, packets: 5, meaning: "for the host" },
        ];
        assert_eq!(
            text(|out| drops(out, &counters, Output::Table)),
            "REASON   TENANT  PACKETS  VERDICT  MEANING\nno_flow  a            12  reject   of no flow\n"
        );
        assert!(text(|out| drops(out, &counters, Output::Wide)).contains("host     -             5  pass"));
        let event = Event {
            time: "t0".to_owned(),
            last: "t1".to_owned(),
            count: 2,
            level: "warning".to_owned(),
            reason: "ApplyFailed".to_owned(),
            tenant: Some("a".to_owned()),
            message: "no".to_owned(),
            ..Event::default()
        };
        assert_eq!(
            text(|out| events(out, &[event], Output::Table)),
            "LAST  COUNT  LEVEL    REASON       ABOUT  MESSAGE\nt1        2  warning  ApplyFailed  a      no\n"
        );
    }

    #[test]
    fn a_reload_says_what_changes() {
        let reply = ReloadReply {
            outcome: "applied".to_owned(),
            changes: vec!["+ frontend x".to_owned()],
            flows_cut: 3,
            ..ReloadReply::default()
        };
        assert_eq!(text(|out| reload(out, &reply, Output::Table)), "reloaded\n  + frontend x\n  live flows cut: 3\n");
        let refused = ReloadReply { outcome: "invalid".to_owned(), ..ReloadReply::default() };
        assert_eq!(text(|out| reload(out, &refused, Output::Table)), "refused, nothing was changed\n");
    }
}
