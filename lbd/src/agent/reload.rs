//! Reload: all or nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use jiff::Timestamp;

use super::core::{Core, Inputs, Maps, Role, restrain};
use super::events::time;
use crate::api::types::{ReloadReply, ReloadRequest, reload_outcome};
use crate::config::{self, Config, Severity};
use crate::flows::{Flow, State};
use crate::ipam::Ipam;
use crate::plan::Planner;
use crate::plan::model::{FrontendPlan, Plan, Reset};

/// Lines of changes that a reply carries at most.
const SHOWN: usize = 200;

impl<M: Maps> Core<M> {
    /// Takes over the configuration file, if it may be. Nothing changes unless all of it can.
    pub(crate) fn reload(
        &mut self,
        path: &Path,
        request: ReloadRequest,
        inputs: &Inputs,
        now: Timestamp,
    ) -> ReloadReply {
        let reply = self.try_reload(path, request, inputs, now);
        if request.dry_run {
            return reply;
        }
        match reply.outcome.as_str() {
            reload_outcome::APPLIED | reload_outcome::UNCHANGED => {
                self.config_status.stale = false;
                self.config_status.error = None;
                self.counts.reloads += 1;
                let text = format!("{}: {}", self.config_status.file, reply.outcome);
                self.tell(false, "Reloaded", &text, now);
            }
            _ => {
                self.config_status.stale = true;
                self.config_status.error.clone_from(&reply.error);
                self.counts.reloads_refused += 1;
                let first = reply.error.as_deref().and_then(|text| text.lines().next()).unwrap_or_default();
                let text =
                    format!("reload refused ({}), the last configuration stays in force: {first}", reply.outcome);
                self.tell(true, "ReloadRefused", &text, now);
            }
        }
        reply
    }

    fn try_reload(&mut self, path: &Path, request: ReloadRequest, inputs: &Inputs, now: Timestamp) -> ReloadReply {
        let new = match config::load(path) {
            Ok(new) => Arc::new(new),
            Err(error) => return refused(reload_outcome::INVALID, error.report()),
        };
        if *new == *self.config {
            return ReloadReply { outcome: reload_outcome::UNCHANGED.to_owned(), ..ReloadReply::default() };
        }
        if let Some((outcome, why)) = beyond_reload(&self.config, &new) {
            return refused(outcome, why);
        }
        let misfits = config::check_host(&new, &inputs.host);
        let errors: Vec<String> =
            misfits.iter().filter(|misfit| misfit.severity == Severity::Error).map(ToString::to_string).collect();
        if !errors.is_empty() {
            return refused(reload_outcome::INVALID, errors.join("\n"));
        }
        if !self.may_act(inputs) {
            let why = "no complete list of Services has come yet, so it can't be seen what the new configuration would cut: \
                       try again when `lbctl status` shows the source as synced";
            return refused(reload_outcome::FAILED, why.to_owned());
        }
        let plan = if self.waits(inputs) { None } else { Some(self.preview(&new, inputs, now)) };
        let mut changes = plan.as_ref().map(|plan| changes(&self.plan, plan)).unwrap_or_default();
        if changes.is_empty() {
            let text = match &plan {
                Some(_) => "settings only: no frontend changes",
                None => "nothing now: another agent serves this hub",
            };
            changes.push(text.to_owned());
        }
        let cuts = plan.as_ref().map(|plan| Cuts::of(&self.plan, plan)).unwrap_or_default();
        let flows_cut = if cuts.is_empty() {
            0
        } else {
            match self.maps.count_flows(&self.config, &|flow| cuts.hits(flow)) {
                Ok(count) => count,
                Err(error) => return refused(reload_outcome::FAILED, format!("cannot count live flows: {error}")),
            }
        };
        let reply = |outcome: &str, error: Option<String>| ReloadReply {
            outcome: outcome.to_owned(),
            error,
            changes: changes.clone(),
            flows_cut,
        };
        if flows_cut > 0 && !request.accept_loss {
            let why = format!(
                "{flows_cut} live flows would be cut: {}; `lbctl reload --accept-loss` cuts them, `lbctl flows` shows them",
                cuts.names.join(", ")
            );
            return reply(reload_outcome::LOSS, Some(why));
        }
        if request.dry_run {
            return reply(reload_outcome::WOULD_APPLY, None);
        }
        if let Err(error) = self.maps.reconfigure(&new) {
            return reply(reload_outcome::FAILED, Some(error.to_string()));
        }
        self.config_status.loaded = time(now);
        self.config = new;
        // If the maps can't take all of it now, the main loop goes on trying: the new configuration is in force.
        self.reconcile(inputs, now);
        reply(reload_outcome::APPLIED, None)
    }

    /// The plan that [`Self::reconcile`] makes of another configuration. Nothing changes.
    fn preview(&self, config: &Arc<Config>, inputs: &Inputs, now: Timestamp) -> Plan {
        let assignments = if inputs.role == Role::Acting {
            let mut ipam = Ipam::new(self.ipam.record().clone());
            ipam.assign(config, &inputs.inventory, &inputs.host, &inputs.taken, now.as_second())
        } else {
            self.frozen(config, inputs, now)
        };
        let mut planner = Planner::new(self.planner.ids().clone());
        let mut plan = planner.plan(config, &inputs.inventory, &Arc::new(assignments), &inputs.health, &inputs.host);
        restrain(&mut plan, inputs);
        plan
    }
}

fn refused(outcome: &str, error: String) -> ReloadReply {
    ReloadReply { outcome: outcome.to_owned(), error: Some(error), ..ReloadReply::default() }
}

/// What a reload cannot change.
fn beyond_reload(old: &Config, new: &Config) -> Option<(&'static str, String)> {
    /// Keys that change the shape or the place of the maps.
    const MIGRATION: [&str; 3] = ["datapath.max_flows", "datapath.max_flows_v6", "datapath.bpffs"];
    let changes = config::changes_needing_restart(old, new);
    let (migration, restart): (Vec<_>, Vec<_>) =
        changes.iter().partition(|change| MIGRATION.contains(&change.as_str()));
    let named = |changes: Vec<&String>| {
        let with_place = |change: &String| match new.origin.position(change) {
            Some(position) => format!("{change} ({}:{position})", new.origin.file),
            None => change.clone(),
        };
        changes.into_iter().map(with_place).collect::<Vec<_>>().join(", ")
    };
    if !migration.is_empty() {
        let why = format!(
            "a migration of the maps is required: {}; stop the agent, run `lbd detach` (connections are lost), start again",
            named(migration)
        );
        return Some((reload_outcome::MIGRATION, why));
    }
    if !restart.is_empty() {
        let why = format!(
            "a restart of the agent is required: {}; `systemctl restart lbd` (traffic goes on meanwhile)",
            named(restart)
        );
        return Some((reload_outcome::RESTART, why));
    }
    None
}

fn name(frontend: &FrontendPlan) -> String {
    frontend.service.as_ref().map_or_else(|| frontend.name.clone(), ToString::to_string)
}

/// What differs between two plans, one line each.
fn changes(old: &Plan, new: &Plan) -> Vec<String> {
    let mut lines = Vec::new();
    let tenant = |plan: &Plan, id| plan.tenants.get(&id).map_or_else(String::new, |tenant| tenant.name.clone());
    let describe = |plan: &Plan, sign: char, what: &str| {
        let frontends = plan.frontends.iter().map(|(address, frontend)| {
            let socket = SocketAddr::new(address.vip, address.port);
            let line = format!(
                "{sign} {what} {} {socket}/{} of tenant {}",
                name(frontend),
                address.protocol.as_str(),
                tenant(plan, frontend.tenant)
            );
            (*address, line)
        });
        frontends.collect::<BTreeMap<_, _>>()
    };
    let (before, after) = (describe(old, '-', "frontend"), describe(new, '+', "frontend"));
    lines.extend(
        before.iter().filter(|(address, _)| !new.frontends.contains_key(address)).map(|(_, line)| line.clone()),
    );
    lines
        .extend(after.iter().filter(|(address, _)| !old.frontends.contains_key(address)).map(|(_, line)| line.clone()));
    let changed = describe(new, '~', "frontend");
    for (address, line) in changed {
        let (Some(a), Some(b)) = (old.frontends.get(&address), new.frontends.get(&address)) else { continue };
        // Where the table stands and which id it has say nothing to an operator.
        let same = FrontendPlan { table: b.table, id: b.id, ..(**a).clone() } == **b;
        if !same {
            lines.push(line);
        }
    }
    for (id, before) in &old.tenants {
        match new.tenants.get(id) {
            None => lines.push(format!("- tenant {}", before.name)),
            Some(after) if after != before => lines.push(format!("~ tenant {}", after.name)),
            Some(_) => {}
        }
    }
    lines.extend(
        new.tenants.iter().filter(|(id, _)| !old.tenants.contains_key(id)).map(|(_, t)| format!("+ tenant {}", t.name)),
    );
    if lines.len() > SHOWN {
        let more = lines.len() - SHOWN;
        lines.truncate(SHOWN);
        lines.push(format!("… and {more} more"));
    }
    lines
}

/// Flows that a plan ends.
#[derive(Debug, Default)]
struct Cuts {
    /// By frontend id.
    frontends: Vec<u16>,
    resets: Vec<Reset>,
    /// What they are, for an operator.
    names: Vec<String>,
}

impl Cuts {
    fn of(old: &Plan, new: &Plan) -> Self {
        let mut cuts = Self::default();
        let kept: BTreeSet<_> = new.frontends.values().map(|frontend| frontend.id).collect();
        for (address, frontend) in &old.frontends {
            if !kept.contains(&frontend.id) {
                cuts.frontends.push(frontend.id);
                cuts.names.push(format!("{} at {}", name(frontend), SocketAddr::new(address.vip, address.port)));
            }
        }
        for reset in new.resets.difference(&old.resets) {
            cuts.resets.push(reset.clone());
            if matches!(reset, Reset::Frontend(id) if cuts.frontends.contains(id)) {
                continue;
            }
            cuts.names.push(match reset {
                Reset::Frontend(id) | Reset::Backend { frontend: id, .. } => {
                    let named = old.frontends.values().find(|frontend| frontend.id == *id);
                    named.map_or_else(|| format!("frontend #{id}"), |frontend| name(frontend))
                }
                Reset::Address(_, address) => format!("backend {address}"),
                Reset::Source(_, address) => format!("source {address}"),
                Reset::Target { port, .. } => format!("backend port {port}"),
            });
        }
        cuts.names.sort();
        cuts.names.dedup();
        cuts
    }

    fn is_empty(&self) -> bool {
        self.frontends.is_empty() && self.resets.is_empty()
    }

    fn hits(&self, flow: &Flow) -> bool {
        // What is closed or reset loses nothing, and what is half-open has nothing yet.
        if !flow.state.is_open() || flow.state == State::HalfOpen {
            return false;
        }
        self.frontends.contains(&flow.frontend)
            || self.resets.iter().any(|reset| match reset {
                Reset::Frontend(id) => flow.frontend == *id,
                Reset::Backend { frontend, backend } => flow.frontend == *frontend && flow.backend_id == *backend,
                Reset::Address(segment, address) => flow.backend_segment == *segment && *address == flow.backend.ip(),
                Reset::Source(segment, address) => flow.backend_segment == *segment && *address == flow.snat.ip(),
                Reset::Target { segment, protocol, address, port, keep } => {
                    flow.backend_segment == *segment
                        && flow.protocol == *protocol
                        && address.is_none_or(|address| address == flow.backend.ip())
                        && *port == flow.backend.port()
                        && !keep.contains(&flow.frontend)
                }
            })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::core::testing::{Bench, CONFIG};
    use super::*;
    use crate::plan::testing::service;
    use crate::source::{Inventory, Node, ObjectName};

    fn reload(bench: &mut Bench, request: ReloadRequest) -> ReloadReply {
        let path = bench.path();
        bench.core.reload(&path, request, &bench.inputs, Timestamp::UNIX_EPOCH)
    }

    fn with(bench: &Bench, text: &str) {
        // By rename, as an editor or a ConfigMap does it.
        let new = bench.directory.path().join("new");
        fs::write(&new, text).unwrap();
        fs::rename(new, bench.path()).unwrap();
    }

    #[test]
    fn b17_a_bad_file_changes_nothing_and_a_revert_clears_the_alarm() {
        let mut bench = Bench::new();
        bench.round();
        let before = bench.core.config.clone();
        let half = &CONFIG[..CONFIG.len() / 2];
        for bad in [
            "",
            half,
            &format!("{CONFIG}surprise: 1\n"),
            &CONFIG.replace("192.0.2.34", "203.0.113.34"),
            &CONFIG.replace("[192.0.2.32/28]", "[192.0.2.32/28, 192.0.2.40/29]"),
        ] {
            with(&bench, bad);
            let reply = reload(&mut bench, ReloadRequest::default());
            assert_eq!(reply.outcome, reload_outcome::INVALID, "{bad}");
            let error = reply.error.unwrap();
            assert!(error.contains("lbd.yaml:"), "{error}");
            assert!(bench.core.config_status.stale);
            assert_eq!(bench.core.config_status.error.as_deref(), Some(error.as_str()));
            assert_eq!(bench.core.config, before);
        }
        assert_eq!(bench.maps.0.borrow().reconfigured, 0);
        with(&bench, CONFIG);
        assert_eq!(reload(&mut bench, ReloadRequest::default()).outcome, reload_outcome::UNCHANGED);
        assert!(!bench.core.config_status.stale);
        assert_eq!(bench.core.config_status.error, None);
        assert_eq!(bench.core.counts.reloads_refused, 5);
    }

    #[test]
    fn a_good_file_comes_into_force_and_a_dry_run_does_not() {
        let mut bench = Bench::new();
        bench.round();
        with(&bench, &CONFIG.replace("ports: [443]", "ports: [443, 80]"));
        let dry = reload(&mut bench, ReloadRequest { dry_run: true, ..ReloadRequest::default() });
        assert_eq!(dry.outcome, reload_outcome::WOULD_APPLY, "{dry:?}");
        assert_eq!(bench.maps.0.borrow().reconfigured, 0);
        let reply = reload(&mut bench, ReloadRequest::default());
        assert_eq!(reply.outcome, reload_outcome::APPLIED);
        assert_eq!(reply.changes, dry.changes);
        assert_eq!(bench.maps.0.borrow().reconfigured, 1);
        assert_eq!(bench.core.config.tenants[0].frontends[0].ports.len(), 2);
    }

    /// On a cluster with a Service and a node, of which the file claims nothing yet.
    fn with_cluster() -> (Bench, String) {
        let mut bench = Bench::new();
        let text = CONFIG.replace("snat:", "kubernetes: { kubeconfig: /k }, snat:");
        with(&bench, &text);
        bench.core.config = Arc::new(config::load(&bench.path()).unwrap());
        let mut inventory = Inventory { complete: true, ..Inventory::default() };
        inventory.services.insert(ObjectName::new("n", "s"), service("u", &[(6443, 30443)]));
        let node = Node { uid: "n".to_owned(), addresses: vec![[10, 0, 0, 9].into()], excluded: false };
        inventory.nodes.insert("n1".to_owned(), node);
        bench.inputs.inventory = Arc::new(inventory);
        (bench, text.replace("pools:", "claim: [{ namespaces: [n] }]\n    pools:"))
    }

    #[test]
    fn b59_a_standby_that_reloads_gives_out_announces_and_writes_nothing() {
        let (mut bench, claims) = with_cluster();
        let standby = Role::Standby { holder: "other".to_owned() };
        bench.inputs.role = standby.clone();
        bench.round();
        with(&bench, &claims);
        let reply = reload(&mut bench, ReloadRequest::default());
        assert_eq!(reply.outcome, reload_outcome::APPLIED, "{reply:?}");
        assert!(reply.changes[0].contains("another agent"), "{reply:?}");
        assert!(bench.maps.0.borrow().plans.is_empty(), "nothing of ours was in the maps");
        assert_eq!(bench.core.ipam.record().entries, []);

        // One that acted before: what it has stays in the maps, unannounced.
        let (mut bench, claims) = with_cluster();
        bench.round();
        bench.inputs.role = standby;
        bench.round();
        let plans = bench.maps.0.borrow().plans.len();
        with(&bench, &claims.replace("ports: [443]", "ports: [443, 80]"));
        let reply = reload(&mut bench, ReloadRequest::default());
        assert_eq!(reply.outcome, reload_outcome::APPLIED, "{reply:?}");
        assert_eq!(reply.changes, ["+ frontend web 192.0.2.34:80/TCP of tenant a"]);
        assert_eq!(bench.core.ipam.record().entries, []);
        let maps = bench.maps.0.borrow();
        assert!(maps.plans.len() > plans && maps.plans[plans..].iter().all(|plan| plan.quiet));
        drop(maps);
        bench.inputs.role = Role::Acting;
        bench.round();
        assert_eq!(bench.core.ipam.record().entries.len(), 1);
    }

    #[test]
    fn b35_a_reload_while_the_cluster_is_silent_opens_no_connections() {
        let (mut bench, claims) = with_cluster();
        bench.round();
        bench.inputs.blind = Some(std::time::Duration::from_mins(1));
        bench.round();
        with(&bench, &claims);
        let reply = reload(&mut bench, ReloadRequest::default());
        assert_eq!(reply.outcome, reload_outcome::APPLIED, "{reply:?}");
        let mut of_services = bench.core.plan.frontends.values().filter(|frontend| frontend.service.is_some());
        assert!(of_services.next().is_some_and(|frontend| frontend.table.is_none() && !frontend.backends.is_empty()));
        assert!(bench.core.events.lasting().iter().any(|notice| notice.reason == "Blind"), "told at once");
    }

    #[test]
    fn what_needs_more_is_refused_with_that_word() {
        let mut bench = Bench::new();
        bench.round();
        for (text, outcome, word) in [
            (format!("{CONFIG}datapath: {{ max_flows: 1048576 }}\n"), reload_outcome::MIGRATION, "migration"),
            (format!("{CONFIG}metrics: 127.0.0.1:9999\n"), reload_outcome::RESTART, "restart"),
            (CONFIG.replace("ten0", "ten1"), reload_outcome::RESTART, "restart"),
        ] {
            with(&bench, &text);
            let reply = reload(&mut bench, ReloadRequest { accept_loss: true, ..ReloadRequest::default() });
            assert_eq!(reply.outcome, outcome);
            assert!(reply.error.as_ref().unwrap().contains(word), "{reply:?}");
            assert!(bench.core.config_status.stale);
        }
        assert_eq!(bench.maps.0.borrow().reconfigured, 0);
    }

    fn flow(frontend: u16, state: State) -> Flow {
        Flow { frontend, ..Flow::sample("192.0.2.9:40000".parse().unwrap(), state) }
    }

    #[test]
    fn live_flows_are_cut_only_if_that_is_accepted() {
        let mut bench = Bench::new();
        bench.round();
        let id = bench.core.plan.frontends.values().next().unwrap().id;
        let other = id + 1;
        bench.maps.0.borrow_mut().flows = vec![
            flow(id, State::Established),
            flow(id, State::Replied),
            flow(other, State::Established),
            flow(id, State::Reset),
            flow(id, State::HalfOpen),
        ];
        with(&bench, &CONFIG.replace("ports: [443]", "ports: [80]"));
        let reply = reload(&mut bench, ReloadRequest::default());
        assert_eq!((reply.outcome.as_str(), reply.flows_cut), (reload_outcome::LOSS, 2), "{reply:?}");
        let error = reply.error.unwrap();
        // Each once.
        assert!(error.contains("would be cut: web at 192.0.2.34:443; ") && error.contains("--accept-loss"), "{error}");
        assert_eq!(
            reply.changes,
            ["- frontend web 192.0.2.34:443/TCP of tenant a", "+ frontend web 192.0.2.34:80/TCP of tenant a"]
        );
        assert!(bench.core.config_status.stale, "the file is not in force");
        assert!(bench.core.plan.frontends.keys().all(|address| address.port == 443));
        let reply = reload(&mut bench, ReloadRequest { accept_loss: true, ..ReloadRequest::default() });
        assert_eq!((reply.outcome.as_str(), reply.flows_cut), (reload_outcome::APPLIED, 2));
        assert!(bench.core.plan.frontends.keys().all(|address| address.port == 80));
        assert!(!bench.core.config_status.stale);
    }
}
