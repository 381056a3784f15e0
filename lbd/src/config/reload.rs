//! What a reload cannot change. Pure, and from the two configurations alone; what a reload would cut is seen from the plans.

use super::Config;

/// Key paths whose change a reload cannot carry out, and interfaces that come or go.
///
/// Most need a restart of the agent, which costs no connection; those of the maps (`datapath.max_flows`,
/// `datapath.max_flows_v6`, `datapath.bpffs`) need other maps.
pub fn changes_needing_restart(old: &Config, new: &Config) -> Vec<String> {
    // All fields are named, so that a new one must be thought about here.
    let Config {
        hub,
        tenants: _,
        timeouts: _,
        datapath,
        address_annotations: _,
        state_dir,
        socket,
        metrics,
        origin: _,
    } = new;
    let changed = [
        // Lease and record have its name.
        ("hubs[0].name", hub.kubernetes.is_some() && hub.name != old.hub.name),
        ("hubs[0].interface", hub.segment.interface != old.hub.segment.interface),
        ("hubs[0].vlan", hub.segment.vlan != old.hub.segment.vlan),
        ("hubs[0].kubernetes", hub.kubernetes != old.hub.kubernetes),
        ("datapath.mode", datapath.mode != old.datapath.mode),
        ("datapath.max_flows", datapath.max_flows != old.datapath.max_flows),
        ("datapath.max_flows_v6", datapath.max_flows_v6 != old.datapath.max_flows_v6),
        ("datapath.bpffs", datapath.bpffs != old.datapath.bpffs),
        ("datapath.mss_clamp", datapath.mss_clamp != old.datapath.mss_clamp),
        ("state_dir", *state_dir != old.state_dir),
        ("socket", *socket != old.socket),
        ("metrics", *metrics != old.metrics),
    ];
    let mut changes: Vec<String> =
        changed.iter().filter(|(_, differs)| *differs).map(|(key, _)| (*key).to_owned()).collect();
    // Offloads that hide tags are turned off, and that is verified, at the start.
    let (before, after) = (old.tagged(), new.tagged());
    changes.extend(after.difference(&before).map(|interface| format!("interface {interface} gets its first VLAN")));
    let (before, after) = (old.interfaces(), new.interfaces());
    changes.extend(after.difference(&before).map(|interface| format!("interface {interface} is new")));
    changes.extend(before.difference(&after).map(|interface| format!("interface {interface} is gone")));
    changes
}
