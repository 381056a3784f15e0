//! Metrics: everything is read when somebody asks, from the agent's last view and from the maps.

use std::fmt;
use std::sync::Arc;

use lbd_common::abi::{Address4, Address6};
use lbd_common::reason::{Reason, Verdict};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use tokio::sync::watch;

use crate::agent::view::{self, Tallies, Tally, View};
use crate::api::types::{TenantFill, lease_state};
use crate::dataplane::Pins;
use crate::flows::fill::FAMILIES;

/// What is served at `/metrics`.
#[derive(Debug)]
pub(super) struct Metrics {
    registry: Registry,
}

impl Metrics {
    pub(super) fn new(views: watch::Receiver<Arc<View>>) -> Self {
        let mut registry = Registry::with_prefix("lbd");
        registry.register_collector(Box::new(Everything { views }));
        Self { registry }
    }

    /// OpenMetrics text.
    pub(super) fn encode(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

#[derive(Debug)]
struct Everything {
    views: watch::Receiver<Arc<View>>,
}

/// Picks one number of a tally.
type Value = fn(&Tally) -> u32;

type Labels = Vec<(&'static str, String)>;

/// One metric with all its label sets. Nothing is written if there are none.
fn counter(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    values: impl IntoIterator<Item = (Labels, u64)>,
) -> fmt::Result {
    let mut values = values.into_iter().peekable();
    if values.peek().is_none() {
        return Ok(());
    }
    let mut metric = encoder.encode_descriptor(name, help, unit, MetricType::Counter)?;
    for (labels, value) in values {
        metric.encode_family(&labels)?.encode_counter::<NoLabelSet, _, u64>(&value, None)?;
    }
    Ok(())
}

fn gauge(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    values: impl IntoIterator<Item = (Labels, f64)>,
) -> fmt::Result {
    let mut values = values.into_iter().peekable();
    if values.peek().is_none() {
        return Ok(());
    }
    let mut metric = encoder.encode_descriptor(name, help, unit, MetricType::Gauge)?;
    for (labels, value) in values {
        metric.encode_family(&labels)?.encode_gauge(&value)?;
    }
    Ok(())
}

fn one<T>(value: T) -> [(Labels, T); 1] {
    [(Labels::new(), value)]
}

fn truth(value: bool) -> f64 {
    if value { 1.0 } else { 0.0 }
}

impl Collector for Everything {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let view = Arc::clone(&self.views.borrow());
        agent(&mut encoder, &view)?;
        plan(&mut encoder, &view)?;
        // Without readable maps there is nothing to count; `lbd_datapath_readable` says so.
        let pins = Pins::open(&view.bpffs);
        let readable = truth(pins.is_ok());
        gauge(&mut encoder, "datapath_readable", "The pinned maps can be read", None, one(readable))?;
        match pins {
            Ok(pins) => datapath(&mut encoder, &view, &pins),
            Err(_) => Ok(()),
        }
    }
}

fn agent(encoder: &mut DescriptorEncoder<'_>, view: &View) -> fmt::Result {
    let status = &view.status;
    let build = vec![("version", status.version.clone()), ("abi", status.abi.to_string())];
    gauge(encoder, "build_info", "Version of the agent and of the map ABI", None, [(build, 1.0)])?;
    let stale = truth(status.config.stale);
    gauge(encoder, "config_stale", "The configuration file is not what is in force", None, one(stale))?;
    let results =
        |ok: u64, not: u64| [(vec![("result", "ok".to_owned())], ok), (vec![("result", "refused".to_owned())], not)];
    let reloads = results(view.counts.reloads, view.counts.reloads_refused);
    counter(encoder, "config_reloads", "Reloads of the configuration file", None, reloads)?;
    let applies = [
        (vec![("result", "ok".to_owned())], status.apply.applied),
        (vec![("result", "failed".to_owned())], status.apply.failed),
    ];
    counter(encoder, "applies", "Changes of the datapath", None, applies)?;
    let failing = truth(status.apply.error.is_some());
    gauge(encoder, "apply_failing", "The last change of the datapath failed and is tried again", None, one(failing))?;
    let writes = view.counts.map_writes;
    counter(encoder, "map_writes", "Map elements written or deleted by the agent", None, one(writes))?;
    let reset = view.counts.flows_reset;
    counter(encoder, "flows_reset", "Flows removed because their backend is gone or another's", None, one(reset))?;
    gauge(encoder, "problems", "What `lbctl status` shows as problems", None, one(status.problems.len() as f64))?;
    let notices = view.notices.iter().map(|(reason, count)| (vec![("reason", (*reason).to_owned())], *count as f64));
    gauge(encoder, "notices", "Notices that last, by reason", None, notices)?;
    let synced = status.sources.iter().map(|source| (source_label(&source.name), truth(source.state == "synced")));
    gauge(encoder, "source_synced", "The source is connected and current", None, synced)?;
    let ages = status.sources.iter().filter_map(|source| Some((source_label(&source.name), source.age_s? as f64)));
    gauge(encoder, "source_age", "Time since the source was last known to be current", Some(&Unit::Seconds), ages)?;
    if let Some(lease) = &status.lease {
        let held = truth(lease.state == lease_state::HELD);
        gauge(encoder, "lease_held", "This agent holds the Lease of its hub", None, one(held))?;
        let acts = truth(lease.state != lease_state::OTHER);
        gauge(encoder, "acting", "This agent gives out and announces addresses", None, one(acts))?;
    }
    let generation = view.addresses.record.generation as f64;
    gauge(encoder, "record_generation", "Generation of the record of addresses", None, one(generation))?;
    let failures = view.source_failures.iter().map(|(kind, count)| (vec![("kind", (*kind).to_owned())], *count));
    counter(encoder, "source_failures", "Failed requests to the source, by kind of object", None, failures)?;
    let left = view.credentials_until.map(|until| (Labels::new(), until.saturating_sub(view.made) as f64));
    let help = "Time until the credentials for the cluster run out";
    gauge(encoder, "credentials_left", help, Some(&Unit::Seconds), left)?;
    let free = view::vips(&view.addresses, &view.plan, view.made).into_iter().flat_map(|tenant| {
        let pools = tenant.pools.into_iter().zip(tenant.free_in_pools);
        pools.map(move |(pool, free)| (vec![("tenant", tenant.tenant.clone()), ("pool", pool)], free as f64))
    });
    gauge(encoder, "pool_addresses_free", "Addresses of a pool that can be given out", None, free)?;
    counter(encoder, "status_writes", "Writes of Service statuses", None, one(view.status_writes))?;
    let attached = status.interfaces.iter().map(|interface| {
        let labels = vec![
            ("interface", interface.name.clone()),
            ("role", interface.role.clone()),
            ("mode", interface.mode.clone()),
        ];
        (labels, truth(interface.mode != "detached"))
    });
    gauge(encoder, "interface_attached", "The program is on the interface", None, attached)
}

fn source_label(name: &str) -> Labels {
    vec![("source", name.to_owned())]
}

fn plan(encoder: &mut DescriptorEncoder<'_>, view: &View) -> fmt::Result {
    let mut counted = Tallies::new(&view.health);
    let tallies: Vec<_> = view
        .plan
        .frontends
        .iter()
        .map(|(address, frontend)| {
            let labels = view::labels(&view.plan, address, frontend);
            (labels, counted.of(frontend))
        })
        .collect();
    let gauges: [(&str, &str, Value); 4] = [
        ("frontend_backends", "Backends of a frontend", |tally| tally.all),
        ("frontend_backends_up", "Backends of a frontend that pass their probe", |tally| tally.up),
        ("frontend_backends_down", "Backends of a frontend that fail their probe", |tally| tally.down),
        ("frontend_backends_serving", "Backends of a frontend that get new connections", |tally| tally.serving),
    ];
    for (name, help, value) in gauges {
        let values = tallies.iter().map(|(labels, tally)| (labels.clone(), f64::from(value(tally))));
        gauge(encoder, name, help, None, values)?;
    }
    let exhausted = view.exhausted.iter().map(|one| {
        let labels = vec![
            ("tenant", one.tenant.clone()),
            ("service", one.service.as_ref().map_or_else(|| one.frontend.clone(), ToString::to_string)),
            ("vip", one.vip.to_string()),
            ("proto", one.protocol.as_str().to_owned()),
            ("snat", one.snat.to_string()),
            ("backend", one.backend.map_or_else(String::new, |backend| backend.to_string())),
            ("node", one.node.as_ref().map_or_else(String::new, ToString::to_string)),
        ];
        (labels, 1.0)
    });
    gauge(encoder, "snat_exhausted", "Connections are refused: no SNAT port is left towards a backend", None, exhausted)
}

fn datapath(encoder: &mut DescriptorEncoder<'_>, view: &View, pins: &Pins) -> fmt::Result {
    let tenant = |index: u16| match view.plan.tenants.get(&index) {
        Some(tenant) => tenant.name.clone(),
        None if index == 0 => String::new(),
        None => format!("#{index}"),
    };
    if let Ok(fill) = crate::flows::fill::tenants(pins, tenant) {
        tenants(encoder, &fill)?;
        tables(encoder, pins, &fill)?;
    }
    if let Ok(reasons) = pins.reasons() {
        let values = reasons.iter().filter_map(|(&(id, number), &count)| {
            let reason = Reason::from_number(number.into())?;
            let verdict = match reason.verdict() {
                Verdict::Drop => "drop",
                Verdict::Pass => "pass",
                Verdict::Reject => "reject",
                Verdict::Answer => "answer",
            };
            let labels =
                vec![("reason", reason.name().to_owned()), ("verdict", verdict.to_owned()), ("tenant", tenant(id))];
            Some((labels, count))
        });
        counter(encoder, "packets_not_forwarded", "Packets not forwarded, by reason", None, values)?;
    }
    if let Ok(counters) = pins.frontend_counters() {
        let labelled: Vec<_> = view
            .plan
            .frontends
            .iter()
            .filter_map(|(address, frontend)| {
                Some((view::labels(&view.plan, address, frontend), *counters.get(&frontend.id)?))
            })
            .collect();
        let both = |pick: fn(&lbd_common::abi::FrontendCounters) -> [u64; 2]| {
            let mut values = Vec::with_capacity(labelled.len() * 2);
            for (labels, counters) in &labelled {
                for (direction, value) in ["in", "out"].into_iter().zip(pick(counters)) {
                    let mut labels = labels.clone();
                    labels.push(("direction", direction.to_owned()));
                    values.push((labels, value));
                }
            }
            values
        };
        let packets = both(|counters| [counters.in_packets, counters.out_packets]);
        counter(encoder, "frontend_packets", "Packets forwarded; in = client to backend", None, packets)?;
        let bytes = both(|counters| [counters.in_bytes, counters.out_bytes]);
        let help = "Bytes of IP packets forwarded; in = client to backend";
        counter(encoder, "frontend_traffic", help, Some(&Unit::Bytes), bytes)?;
        let flows = labelled.iter().map(|(labels, counters)| (labels.clone(), counters.flows));
        counter(encoder, "frontend_flows", "Connections accepted", None, flows)?;
        let refused = labelled.iter().map(|(labels, counters)| (labels.clone(), counters.refused));
        counter(encoder, "frontend_refused", "Connections refused by lbd", None, refused)?;
    }
    Ok(())
}

/// What tenants use, by tenant and family.
fn tenants(encoder: &mut DescriptorEncoder<'_>, fill: &[TenantFill]) -> fmt::Result {
    type Pick = fn(&TenantFill) -> u64;
    let gauges: [(&str, &str, Pick); 6] = [
        ("flows", "Live flows, UDP among them", |fill| fill.flows),
        ("flows_limit", "Live flows that the tenant may have, 0 = no limit", |fill| fill.flows_limit),
        ("udp_flows", "Live UDP flows", |fill| fill.udp),
        ("udp_flows_limit", "Live UDP flows that the tenant may have, 0 = no limit", |fill| fill.udp_limit),
        ("half_open", "Half-open connections", |fill| fill.half_open),
        ("half_open_limit", "Half-open connections that the tenant may have, 0 = no limit", |fill| {
            fill.half_open_limit
        }),
    ];
    for (name, help, pick) in gauges {
        let values = fill.iter().map(|fill| {
            let labels = vec![("tenant", fill.tenant.clone()), ("family", fill.family.clone())];
            (labels, pick(fill) as f64)
        });
        gauge(encoder, name, help, None, values)?;
    }
    Ok(())
}

/// Fill of the flow tables, by family.
fn tables(encoder: &mut DescriptorEncoder<'_>, pins: &Pins, fill: &[TenantFill]) -> fmt::Result {
    let labels = |family: &str| vec![("family", family.to_owned())];
    let used = FAMILIES.map(|family| {
        let flows: u64 = fill.iter().filter(|fill| fill.family == family).map(|fill| fill.flows).sum();
        (labels(family), flows as f64)
    });
    gauge(encoder, "flow_table_flows", "Live flows of all tenants", None, used)?;
    let capacities = [pins.flow_capacity::<Address4>(), pins.flow_capacity::<Address6>()];
    let room = FAMILIES
        .into_iter()
        .zip(capacities)
        .filter_map(|(family, capacity)| Some((labels(family), f64::from(capacity.ok()?))));
    gauge(encoder, "flow_table_capacity", "Flows that the table has room for", None, room)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::types::{ConfigStatus, Status};

    /// Encodes what a function encodes.
    #[derive(Debug)]
    struct One<F>(F);

    impl<F: Fn(&mut DescriptorEncoder<'_>) -> fmt::Result + fmt::Debug + Send + Sync + 'static> Collector for One<F> {
        fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
            (self.0)(&mut encoder)
        }
    }

    #[test]
    fn each_family_of_a_tenant_has_its_figures() {
        fn both(encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
            let of = |family: &str, flows| TenantFill {
                tenant: "a".to_owned(),
                family: family.to_owned(),
                flows,
                half_open: 3,
                udp_limit: 7,
                ..TenantFill::default()
            };
            tenants(encoder, &[of("IPv4", 20), of("IPv6", 30)])
        }
        let mut registry = Registry::with_prefix("lbd");
        registry.register_collector(Box::new(One(both as fn(&mut DescriptorEncoder<'_>) -> fmt::Result)));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            "lbd_flows{tenant=\"a\",family=\"IPv4\"} 20.0",
            "lbd_flows{tenant=\"a\",family=\"IPv6\"} 30.0",
            "lbd_half_open{tenant=\"a\",family=\"IPv6\"} 3.0",
            "lbd_udp_flows_limit{tenant=\"a\",family=\"IPv4\"} 7.0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in:\n{text}");
        }
    }

    #[test]
    fn metrics_are_openmetrics() {
        let view = View {
            status: Status { config: ConfigStatus { stale: true, ..ConfigStatus::default() }, ..Status::default() },
            notices: [("ForeignAddress", 2)].into(),
            source_failures: [("services", 3)].into(),
            credentials_until: Some(700_000),
            made: 95_200,
            addresses: view::Addresses { config: Some(Arc::new(crate::plan::testing::config())), ..Default::default() },
            ..View::default()
        };
        let (_sender, views) = watch::channel(Arc::new(view));
        let text = Metrics::new(views).encode().unwrap();
        for line in [
            "# TYPE lbd_config_stale gauge",
            "lbd_config_stale 1.0",
            "lbd_applies_total{result=\"failed\"} 0",
            "lbd_notices{reason=\"ForeignAddress\"} 2.0",
            "lbd_datapath_readable 0.0",
            "lbd_credentials_left_seconds 604800.0",
            "lbd_source_failures_total{kind=\"services\"} 3",
            "lbd_pool_addresses_free{tenant=\"tenant-a\",pool=\"192.168.203.110-192.168.203.119\"} 10.0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in:\n{text}");
        }
        assert!(text.ends_with("# EOF\n"), "{text}");
    }
}
