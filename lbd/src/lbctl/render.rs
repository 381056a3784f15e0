//! What `lbctl` prints, as pure functions of what it has found.

use std::io::{self, Write};

use serde::Serialize;

use super::Output;
use super::table::{Column, Table, age, bytes};
use crate::api::types::{ApplyStatus, Backend, Event, ReloadReply, Service, Status, reload_outcome};
use crate::flows::{Flow, FlowRecord, Namer};

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

const STATUS_INTERFACES: &[Column] = &[
    Column::text("INTERFACE"),
    Column::text("ROLE"),
    Column::text("MODE"),
    Column::text("LINK"),
    Column::number("MTU"),
];

const STATUS_SOURCES: &[Column] =
    &[Column::text("SOURCE"), Column::text("STATE"), Column::number("AGE"), Column::text("ERROR")];

const STATUS_TABLES: &[Column] =
    &[Column::text("TABLE"), Column::number("USED"), Column::number("OF"), Column::number("FILL")];

const SERVICES: &[Column] = &[
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

const BACKENDS: &[Column] = &[
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

const FLOWS: &[Column] = &[
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
                .optional(source.age_s.map(age))
                .optional(source.error.as_ref());
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
    table.print(out)
}

/// Flows that one thread renders at a time.
const CHUNK: usize = 16_384;

/// Does the work on chunks of the flows, on all CPUs, and hands the results over in order; few are kept at a time.
fn in_chunks<T: Send>(
    flows: &[Flow],
    work: impl Fn(&[Flow]) -> T + Sync,
    mut take: impl FnMut(T) -> io::Result<()>,
) -> io::Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    for wave in flows.chunks(CHUNK * threads) {
        let done = std::thread::scope(|scope| {
            let running: Vec<_> = wave.chunks(CHUNK).map(|chunk| scope.spawn(|| work(chunk))).collect();
            running.into_iter().map(std::thread::ScopedJoinHandle::join).collect::<Vec<_>>()
        });
        for result in done {
            take(result.map_err(|_| io::Error::other("a thread that renders flows has ended"))?)?;
        }
    }
    Ok(())
}

/// Prints `lbctl flows`.
pub(crate) fn flows(out: &mut dyn Write, flows: &[Flow], namer: &Namer<'_>, output: Output) -> io::Result<()> {
    if output == Output::Json {
        let mut separator: &[u8] = b"[\n";
        let render = |chunk: &[Flow]| {
            let mut text = Vec::with_capacity(chunk.len() * 400);
            for (flow, number) in chunk.iter().zip(0..) {
                if number > 0 {
                    text.extend_from_slice(b",\n");
                }
                serde_json::to_writer(&mut text, &namer.record(flow))?;
            }
            Ok(text)
        };
        in_chunks(flows, render, |text: io::Result<Vec<u8>>| {
            out.write_all(separator)?;
            separator = b",\n";
            out.write_all(&text?)
        })?;
        return out.write_all(if flows.is_empty() { b"[]\n" } else { b"\n]\n" });
    }
    let render = |chunk: &[Flow]| {
        let mut table = Table::new(FLOWS, output == Output::Wide);
        for flow in chunk {
            row(&mut table, &namer.record(flow));
        }
        table
    };
    let mut table = Table::new(FLOWS, output == Output::Wide);
    in_chunks(flows, render, |rows| {
        table.append(rows);
        Ok(())
    })?;
    table.print(out)
}

fn row(table: &mut Table, record: &FlowRecord<'_>) {
    table
        .cell(record.tenant)
        .socket(record.client)
        .socket(record.vip)
        .socket(record.backend)
        .optional(record.node)
        .cell(record.service)
        .cell(record.state)
        .cell(age(record.age_s))
        .cell(age(record.idle_s))
        .cell(bytes(record.in_bytes))
        .cell(bytes(record.out_bytes))
        .cell(record.proto)
        .socket(record.snat)
        .cell(record.hub)
        .cell(record.in_packets)
        .cell(record.out_packets)
        .cell(record.in_bytes)
        .cell(record.out_bytes);
}

/// Prints `lbctl drops`. Packets that were not dropped or refused but handed on are shown in wide tables and JSON.
pub(crate) fn drops(out: &mut dyn Write, drops: &[Drop], output: Output) -> io::Result<()> {
    if output == Output::Json {
        return json_list(out, drops.iter());
    }
    let mut table = Table::new(DROPS, output == Output::Wide);
    let shown = |drop: &&Drop| output == Output::Wide || matches!(drop.verdict, "drop" | "reject");
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
    use crate::api::types::{ConfigStatus, InterfaceStatus, SourceStatus, TableFill};
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
            affinity: "flow".to_owned(),
            flows: Some(3),
            in_bytes: Some(2048),
            ..Service::default()
        };
        assert_eq!(
            text(|out| services(out, std::slice::from_ref(&service), Output::Table)),
            "TENANT  SERVICE  VIP              PROTO  STATE     UP   FLOWS        IN  OUT\n\
             a       ns/api   192.0.2.34:6443  TCP    degraded  1/2      3  2.00 KiB    -\n"
        );
        let unknown = Service { up: None, backends: None, ..service };
        assert!(text(|out| services(out, &[unknown], Output::Table)).contains("?/?"));
        let backend = Backend {
            tenant: "a".to_owned(),
            service: "ns/api".to_owned(),
            vip: "192.0.2.34:6443".to_owned(),
            backend: "10.0.0.11:30918".to_owned(),
            node: Some("n1".to_owned()),
            state: "down".to_owned(),
            cause: "connection refused".to_owned(),
            since_s: Some(5),
            ..Backend::default()
        };
        assert_eq!(
            text(|out| backends(out, &[backend], Output::Table)),
            "TENANT  SERVICE  VIP              BACKEND          NODE  STATE  SINCE  SERVING  FLOWS  CAUSE\n\
             a       ns/api   192.0.2.34:6443  10.0.0.11:30918  n1    down      5s  no           -  connection refused\n"
        );
    }

    #[test]
    fn empty_lists_are_json() {
        assert_eq!(text(|out| services(out, &[], Output::Json)), "[]\n");
        assert_eq!(text(|out| events(out, &[], Output::Json)), "[]\n");
    }

    fn many(count: u32) -> Vec<Flow> {
        let flow = |number: u32| Flow {
            protocol: 6,
            segment: 2,
            client: (std::net::Ipv4Addr::from(number), 40000).into(),
            vip: "192.0.2.34:6443".parse().unwrap(),
            backend: "10.0.0.11:30918".parse().unwrap(),
            backend_segment: 1,
            snat: "10.0.0.2:1024".parse().unwrap(),
            frontend: 5,
            backend_id: 1,
            state: State::Established,
            age: number,
            idle: 1,
            in_packets: 1,
            in_bytes: u64::from(number),
            out_packets: 1,
            out_bytes: 1,
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
        let all = many(2);
        let namer = Namer::new(&directory, clock, &all);
        assert_eq!(
            text(|out| flows(out, &all[1..], &namer, Output::Table)),
            "TENANT  CLIENT         VIP              BACKEND          NODE  SERVICE  STATE        AGE  IDLE   IN  OUT\n\
             a       0.0.0.1:40000  192.0.2.34:6443  10.0.0.11:30918  -     ns/api   established   1s    1s  1 B  1 B\n"
        );
        assert!(text(|out| flows(out, &all, &namer, Output::Wide)).contains("10.0.0.2:1024"));
        let json: Vec<serde_json::Value> =
            serde_json::from_str(&text(|out| flows(out, &all, &namer, Output::Json))).unwrap();
        assert_eq!(json.len(), 2);
        assert_eq!(json[1]["client"], "0.0.0.1:40000");
        assert_eq!(json[1]["node"], serde_json::Value::Null);
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
            let shown = crate::flows::sorted(all.iter().copied());
            let sorted = start.elapsed();
            flows(&mut io::sink(), &shown, &Namer::new(&directory, clock, &shown), output).unwrap();
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
