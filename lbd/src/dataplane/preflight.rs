//! What `lbd check` says about the host, without changing it.

use caps::{CapSet, Capability};

use super::bpf;
use super::engine;
use super::loader::{Loader, Paths, VETH_MTU};
use super::migrate;
use super::netlink::{Client, LinkDetails};
use super::offload::{self, FLAG_LRO, FLAG_RX_VLAN, GET_FLAGS, GET_GRO, GET_TX_CHECKSUM};
use super::{DataplaneError, Mode, OBJECT, Problem, interfaces};
use crate::config::{Config, XdpMode};
use crate::plan::model::HostFacts;

/// See [`super::preflight()`].
pub(super) fn preflight(config: &Config) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (capability, name, fatal, why) in [
        (Capability::CAP_BPF, "CAP_BPF", true, "to load programs and maps"),
        (Capability::CAP_NET_ADMIN, "CAP_NET_ADMIN", true, "to attach programs"),
        (Capability::CAP_NET_RAW, "CAP_NET_RAW", true, "to announce addresses"),
        (Capability::CAP_SYS_ADMIN, "CAP_SYS_ADMIN", false, "to name XDP programs of others and recognise left-overs"),
    ] {
        if !caps::has_cap(None, CapSet::Effective, capability).unwrap_or(false) {
            problems.push(problem(
                fatal,
                name,
                format!("missing, needed {why}: run as root or as the systemd unit does"),
            ));
        }
    }
    kernel(&mut problems);
    let paths = Paths::new(&config.datapath.bpffs);
    let bpffs = config.datapath.bpffs.display().to_string();
    match bpf::is_bpffs(&paths.bpffs) {
        Err(found) => {
            let error = DataplaneError::NoBpffs { path: paths.bpffs.clone(), found };
            problems.push(problem(true, &bpffs, error.to_string()));
        }
        Ok(()) => match migrate::check(&paths) {
            Ok(None) => {}
            Ok(Some(message)) => problems.push(problem(false, &bpffs, message)),
            Err(error) => problems.push(problem(true, &bpffs, error.to_string())),
        },
    }
    let mut loader = match Loader::new(config, OBJECT) {
        Ok(loader) => Some(loader),
        // Said above.
        Err(DataplaneError::NoBpffs { .. } | DataplaneError::Abi { .. }) => None,
        Err(error) => {
            problems.push(problem(true, "datapath", error.to_string()));
            None
        }
    };
    if let Some(message) = local_ports(config) {
        problems.push(problem(false, "net.ipv4.ip_local_port_range", message));
    }
    let Ok(mut client) = Client::new() else {
        problems.push(problem(true, "netlink", "cannot open a netlink socket".to_owned()));
        return problems;
    };
    if let Ok(facts) = client.facts() {
        weak_settings(config, &facts, &mut problems);
    }
    for interface in interfaces(config) {
        let Ok(index) = nix::net::if_::if_nametoindex(interface.as_str()) else {
            let error = DataplaneError::NoInterface { interface: interface.clone() };
            problems.push(problem(true, &interface, error.to_string()));
            continue;
        };
        match client.link(index) {
            Ok(details) => {
                nic(config, &interface, &details, &mut client, &mut problems);
                // Who else is there is known only from the pins.
                if let Some(Err(error)) = loader.as_mut().map(|loader| loader.check(&interface)) {
                    problems.push(problem(true, &interface, error.to_string()));
                }
            }
            Err(error) => problems.push(problem(true, &interface, format!("cannot ask for its state: {error}"))),
        }
    }
    problems.sort();
    problems.dedup();
    problems
}

fn problem(fatal: bool, subject: &str, message: String) -> Problem {
    Problem { fatal, subject: subject.to_owned(), message }
}

/// Settings under which tenants could change the host or cross it, if lbd were not there.
fn weak_settings(config: &Config, facts: &HostFacts, problems: &mut Vec<Problem>) {
    let set = |name: &str| {
        let value = std::fs::read_to_string(format!("/proc/sys/net/{name}")).unwrap_or_default();
        !matches!(value.trim(), "" | "0")
    };
    for name in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
        if set(name) {
            let subject = format!("net.{}", name.replace('/', "."));
            let message = format!(
                "is on: lbd does not need it, and while lbd is not attached the host is a router between tenants and hub; \
                 run `sysctl -w {subject}=0` unless something else needs it"
            );
            problems.push(problem(false, &subject, message));
        }
    }
    for segment in config.segment_names().iter().filter(|&name| config.tenants.iter().any(|it| it.segment == *name)) {
        let Some(own) = facts.of(segment) else { continue };
        let Some(interface) = facts.interfaces.iter().find(|(_, it)| it.index == own.index).map(|(name, _)| name)
        else {
            continue;
        };
        let found: Vec<String> =
            ["ipv6/conf/IF/accept_ra", "ipv6/conf/IF/accept_redirects", "ipv4/conf/IF/accept_redirects"]
                .iter()
                .map(|name| name.replace("IF", interface))
                .filter(|name| set(name))
                .map(|name| format!("net/{name}=0"))
                .collect();
        if !found.is_empty() {
            let message = format!(
                "while lbd is not attached the host believes router advertisements and redirects of this tenant (lbd drops them); \
                 run `sysctl -w {}`",
                found.join(" ")
            );
            problems.push(problem(false, interface, message));
        }
    }
}

/// What is wrong if the host takes ports for its own connections, probes above all, from those for clients: replies to a port for
/// clients never reach the host's TCP.
fn local_ports(config: &Config) -> Option<String> {
    let read = |name: &str| std::fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).ok();
    let range = read("ip_local_port_range")?;
    let mut numbers = range.split_whitespace().map(|number| number.parse::<u16>().ok());
    let (first, last) = (numbers.next()??, numbers.next()??);
    clash(config.hub.snat_ports, (first, last), &read("ip_local_reserved_ports").unwrap_or_default())
}

fn clash(ports: (u16, u16), (first, last): (u16, u16), reserved: &str) -> Option<String> {
    let common = ports.0.max(first)..=ports.1.min(last);
    let spared = |port: u16| {
        reserved.trim().split(',').any(|part| {
            let (from, to) = part.split_once('-').unwrap_or((part, part));
            matches!((from.parse::<u16>(), to.parse::<u16>()), (Ok(from), Ok(to)) if (from..=to).contains(&port))
        })
    };
    if common.clone().all(spared) {
        return None;
    }
    Some(format!(
        "{first}-{last} overlaps the ports for clients {}-{} (snat_ports): probes and other connections of the host to backends would \
         fail at random; keep them apart with snat_ports, or run `sysctl -w net.ipv4.ip_local_reserved_ports={}-{}`",
        ports.0,
        ports.1,
        common.start(),
        common.end()
    ))
}

fn kernel(problems: &mut Vec<Problem>) {
    let Ok(name) = nix::sys::utsname::uname() else { return };
    let release = name.release().to_string_lossy().into_owned();
    let mut parts =
        release.split(|character: char| !character.is_ascii_digit()).map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    for (since, fatal, what) in [
        ((5, 9), true, "XDP attachments that survive the agent (bpf_link)"),
        ((5, 12), true, "atomic instructions in BPF"),
        ((5, 16), false, "neighbours that it keeps fresh itself: lbd looks after them every 30 s instead"),
    ] {
        if version < since {
            let message = format!("is {release}; since {}.{} it has {what}", since.0, since.1);
            problems.push(problem(fatal, "kernel", message));
        }
    }
}

fn nic(config: &Config, interface: &str, details: &LinkDetails, client: &mut Client, problems: &mut Vec<Problem>) {
    let mut warn = |message: String| problems.push(problem(false, interface, message));
    let generic =
        config.datapath.mode == XdpMode::Generic || details.xdp.iter().any(|xdp| xdp.mode == Some(Mode::Generic));
    if generic {
        if offload::get(interface, GET_GRO).is_ok_and(|on| on != 0) {
            warn(format!(
                "generic mode with GRO on: merged packets cannot be forwarded; run `ethtool -K {interface} gro off`"
            ));
        }
        if offload::get(interface, GET_FLAGS).is_ok_and(|flags| flags & FLAG_LRO != 0) {
            warn(format!("LRO is on: merged packets cannot be forwarded; run `ethtool -K {interface} lro off`"));
        }
    }
    if let Some(&vlans) = engine::tagged_interfaces(config).get(interface) {
        if offload::get(interface, GET_FLAGS).is_ok_and(|flags| flags & FLAG_RX_VLAN != 0) {
            warn(format!(
                "rx-vlan offload hides VLAN tags from XDP: lbd turns it off when it starts, as `ethtool -K {interface} rxvlan off` does, \
                 and on again with `lbd detach`"
            ));
        }
        if let Some(peer) = offload::hiding_peer(interface) {
            problems.push(problem(vlans, interface, offload::peer_hides(interface, &peer).to_string()));
        }
    }
    if details.kind != "veth" {
        return;
    }
    if details.mtu > VETH_MTU && !generic {
        let message = format!(
            "MTU {} is more than native XDP takes on a veth ({VETH_MTU}); run `ip link set dev {interface} mtu {VETH_MTU}` on both ends",
            details.mtu
        );
        match config.datapath.mode {
            XdpMode::Native => problems.push(problem(true, interface, message)),
            XdpMode::Auto | XdpMode::Generic => {
                problems.push(problem(false, interface, format!("{message}, else generic mode is used")));
            }
        }
    }
    let Some(peer) = details.peer.and_then(|peer| client.link(peer).ok()) else {
        problems.push(problem(
            false,
            interface,
            "is a veth whose peer is in another network namespace, out of sight: the peer needs `ethtool -K PEER tx off` (XDP \
             forwards unfinished checksums as they are), `ethtool -K PEER txvlan off` (XDP does not see the tags) and, to receive what lbd sends, an XDP program or `ethtool -K PEER gro on`"
                .to_owned(),
        ));
        return;
    };
    let name = &peer.name;
    if offload::get(name, GET_TX_CHECKSUM).is_ok_and(|on| on != 0) {
        let message = format!(
            "veth peer {name} leaves checksums unfinished, which XDP forwards as they are; run `ethtool -K {name} tx off`"
        );
        problems.push(problem(false, interface, message));
    }
    if peer.xdp.is_empty() && offload::get(name, GET_GRO).is_ok_and(|on| on == 0) {
        let message = format!(
            "veth peer {name} cannot receive what lbd sends: attach an XDP program to it, or run `ethtool -K {name} gro on`"
        );
        problems.push(problem(false, interface, message));
    }
}

#[cfg(test)]
mod tests {
    use super::clash;

    #[test]
    fn ports_of_the_host_and_ports_for_clients_are_apart() {
        assert_eq!(clash((1024, 32767), (32768, 60999), ""), None);
        let message = clash((1024, 32767), (1024, 65535), "\n").unwrap_or_default();
        assert!(message.contains("1024-65535") && message.contains("reserved_ports=1024-32767"), "{message}");
        // What is reserved is not taken.
        assert_eq!(clash((1024, 32767), (1024, 65535), "80,1024-20000,20001-32767\n"), None);
        assert!(clash((1024, 32767), (1024, 65535), "1024-20000\n").is_some());
        assert!(clash((30000, 32768), (32768, 60999), "").is_some());
    }
}
