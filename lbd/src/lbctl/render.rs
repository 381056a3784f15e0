//! What `lbctl` prints, as pure functions of what it has found.

use std::io::{self, Write};

use serde::Serialize;

use super::Output;
use super::table::{Column, Table, age, bytes};
use crate::api::types::{ApplyStatus, Backend, Event, ReloadReply, Service, Status};
use crate::flows::{Flow, Namer};

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
        const COLUMNS: &[Column] = &[
            Column::text("INTERFACE"),
            Column::text("ROLE"),
            Column::text("MODE"),
            Column::text("LINK"),
            Column::number("MTU"),
        ];
        let mut table = Table::new(COLUMNS);
        for interface in &status.interfaces {
            let link = if interface.up { "up" } else { "down" };
            table.cell(&interface.name).cell(&interface.role).cell(&interface.mode).cell(link).cell(interface.mtu);
        }
        writeln!(out)?;
        table.print(out, output == Output::Wide)?;
    }
    if !status.sources.is_empty() {
        const COLUMNS: &[Column] =
            &[Column::text("SOURCE"), Column::text("STATE"), Column::number("AGE"), Column::text("ERROR")];
        let mut table = Table::new(COLUMNS);
        for source in &status.sources {
            table
                .cell(&source.name)
                .cell(&source.state)
                .optional(source.age_s.map(age))
                .optional(source.error.as_ref());
        }
        writeln!(out)?;
        table.print(out, output == Output::Wide)?;
    }
    if !status.tables.is_empty() {
        const COLUMNS: &[Column] =
            &[Column::text("TABLE"), Column::number("USED"), Column::number("OF"), Column::number("FILL")];
        let mut table = Table::new(COLUMNS);
        for fill in &status.tables {
            let percent = if fill.capacity == 0 { 0.0 } else { fill.used as f64 * 100.0 / fill.capacity as f64 };
            table.cell(&fill.name).cell(fill.used).cell(fill.capacity).cell(format_args!("{percent:.1}%"));
        }
        writeln!(out)?;
        table.print(out, output == Output::Wide)?;
    }
    Ok(())
}

/// Prints `lbctl services`.
pub(crate) fn services(out: &mut dyn Write, services: &[Service], output: Output) -> io::Result<()> {
    if output == Output::Json {
        return json_list(out, services.iter());
    }
    const COLUMNS: &[Column] = &[
        Column::text("TENANT"),
        Column::text("SERVICE"),
        Column::text("VIP"),
        Column::text("PROTO"),
        Column::text("STATE"),
        Column::text("UP"),
        Column::number("FLOWS"),
        Column::number("IN"),
        Column::number("OUT"),
        Column::text("NAME").wide(),
        Column::text("AFFINITY").wide(),
        Column::number("TARGET").wide(),
        Column::text("SNAT").wide(),
        Column::number("SERVING").wide(),
        Column::number("ACCEPTED").wide(),
        Column::number("REFUSED").wide(),
        Column::number("ID").wide(),
    ];
    let mut table = Table::new(COLUMNS);
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
            .optional(service.flows)
            .optional(service.in_bytes.map(bytes))
            .optional(service.out_bytes.map(bytes))
            .cell(&service.name)
            .cell(&service.affinity)
            .optional((service.target_port != 0).then_some(service.target_port))
            .optional(service.snat)
            .cell(service.serving)
            .optional(service.accepted)
            .optional(service.refused)
            .cell(service.id);
    }
    table.print(out, output == Output::Wide)
}

/// Prints `lbctl backends`.
pub(crate) fn backends(out: &mut dyn Write, backends: &[Backend], output: Output) -> io::Result<()> {
    if output == Output::Json {
        return json_list(out, backends.iter());
    }
    const COLUMNS: &[Column] = &[
        Column::text("TENANT"),
        Column::text("SERVICE"),
        Column::text("VIP"),
        Column::text("BACKEND"),
        Column::text("NODE"),
        Column::text("STATE"),
        Column::number("SINCE"),
        Column::text("SERVING"),
        Column::number("FLOWS"),
        Column::text("CAUSE"),
        Column::text("PROTO").wide(),
        Column::number("WEIGHT").wide(),
        Column::number("ID").wide(),
    ];
    let mut table = Table::new(COLUMNS);
    for backend in backends {
        table
            .cell(&backend.tenant)
            .cell(&backend.service)
            .cell(&backend.vip)
            .cell(&backend.backend)
            .optional(backend.node.as_ref())
            .cell(&backend.state)
            .optional(backend.since_s.map(age))
            .cell(if backend.serving { "yes" } else { "no" })
            .optional(backend.flows)
            .optional(Some(&backend.cause).filter(|cause| !cause.is_empty()))
            .cell(&backend.proto)
            .optional(backend.weight)
            .cell(backend.id);
    }
    table.print(out, output == Output::Wide)
}

/// Prints `lbctl flows`.
pub(crate) fn flows(out: &mut dyn Write, flows: &[Flow], namer: &Namer<'_>, output: Output) -> io::Result<()> {
    if output == Output::Json {
        return json_list(out, flows.iter().map(|flow| namer.record(flow)));
    }
    const COLUMNS: &[Column] = &[
        Column::text("TENANT"),
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
        Column::text("PROTO").wide(),
        Column::text("SNAT").wide(),
        Column::text("HUB").wide(),
        Column::number("IN_PACKETS").wide(),
        Column::number("OUT_PACKETS").wide(),
        Column::number("IN_BYTES").wide(),
        Column::number("OUT_BYTES").wide(),
    ];
    let mut table = Table::new(COLUMNS);
    for flow in flows {
        let record = namer.record(flow);
        table
            .cell(record.tenant)
            .cell(record.client)
            .cell(record.vip)
            .cell(record.backend)
            .optional(record.node)
            .cell(record.service)
            .cell(record.state)
            .cell(age(record.age_s))
            .cell(age(record.idle_s))
            .cell(bytes(record.in_bytes))
            .cell(bytes(record.out_bytes))
            .cell(record.proto)
            .cell(record.snat)
            .cell(record.hub)
            .cell(record.in_packets)
            .cell(record.out_packets)
            .cell(record.in_bytes)
            .cell(record.out_bytes);
    }
    table.print(out, output == Output::Wide)
}

/// Prints `lbctl drops`. Packets that were not dropped or refused but handed on are shown in wide tables and JSON.
pub(crate) fn drops(out: &mut dyn Write, drops: &[Drop], output: Output) -> io::Result<()> {
    if output == Output::Json {
        return json_list(out, drops.iter());
    }
    const COLUMNS: &[Column] = &[
        Column::text("REASON"),
        Column::text("TENANT"),
        Column::number("PACKETS"),
        Column::text("VERDICT"),
        Column::text("MEANING"),
    ];
    let mut table = Table::new(COLUMNS);
    let shown = |drop: &&Drop| output == Output::Wide || matches!(drop.verdict, "drop" | "reject");
    for drop in drops.iter().filter(shown) {
        table.cell(drop.reason).optional(drop.tenant.as_ref()).cell(drop.packets).cell(drop.verdict).cell(drop.meaning);
    }
    table.print(out, output == Output::Wide)
}

/// Prints `lbctl events`.
pub(crate) fn events(out: &mut dyn Write, events: &[Event], output: Output) -> io::Result<()> {
    if output == Output::Json {
        return json_list(out, events.iter());
    }
    const COLUMNS: &[Column] = &[
        Column::text("LAST"),
        Column::number("COUNT"),
        Column::text("LEVEL"),
        Column::text("REASON"),
        Column::text("ABOUT"),
        Column::text("MESSAGE"),
        Column::text("FIRST").wide(),
        Column::text("ACTIVE").wide(),
    ];
    let mut table = Table::new(COLUMNS);
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
    table.print(out, output == Output::Wide)
}

/// Prints what came of a reload.
pub(crate) fn reload(out: &mut dyn Write, reply: &ReloadReply, output: Output) -> io::Result<()> {
    use crate::api::types::reload_outcome::{APPLIED, UNCHANGED, WOULD_APPLY};
    if output == Output::Json {
        return json(out, reply);
    }
    let sentence = match reply.outcome.as_str() {
        APPLIED => "reloaded",
        UNCHANGED => "nothing has changed",
        WOULD_APPLY => "would be reloaded",
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
