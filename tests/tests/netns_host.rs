//! The host behind the datapath: what a tenant reaches of it, and what it must not be told.
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Result, ensure};
use lbd_tests::lab::{self, Agent, Bench, Capture, Datagrams, Hold, Keep, Listener, Namespace, Peer, Untouched, fast};

const LB_MAC: &str = "02:00:00:00:01:02";
const ROUTER: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0x66);
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// What a connection comes to within a second.
fn reaches(client: &Namespace, target: &str) -> bool {
    lab::get_with(client, target, false, &["--limit", "1"]).is_ok()
}

fn counted(agent: &Agent, tenant: &str, reason: &str) -> Result<u64> {
    Ok(agent.reasons(Some(tenant))?.get(reason).copied().unwrap_or_default())
}

/// Ports and ping that `host_access` opens are open, in both families, and nothing else.
#[test]
#[ignore = "needs root"]
fn host_access_opens_what_it_names() -> Result<()> {
    let (bench, _servers, agent) = Bench::dual_running("access", |text| {
        text.replace(
            "    segment: { interface: ten0 }\n",
            "    segment: { interface: ten0 }\n    host_access: [22, icmp]\n",
        )
        .replace("    segment: { interface: ten1 }\n", "    segment: { interface: ten1 }\n    host_access: none\n")
    })?;
    let listeners: Vec<_> =
        ["192.0.2.2", "2001:db8:a::2", "198.51.100.2", "2001:db8:b::2", "10.0.0.2", "2001:db8:f::2"]
            .iter()
            .flat_map(|address| [Listener::plain(address, 22), Listener::plain(address, 8080)])
            .collect();
    let _host = Peer::serve(&bench.lab, &bench.lb, "host", &listeners)?;
    for (address, family) in [("192.0.2.2", "IPv4"), ("2001:db8:a::2", "IPv6")] {
        for client in [&bench.near, &bench.far] {
            let before = counted(&agent, "a", "host_closed")?;
            ensure!(reaches(client, &lab::socket(address, 22)), "{family}: port 22 is closed to {}", client.name());
            ensure!(!reaches(client, &lab::socket(address, 8080)), "{family}: 8080 is open to {}", client.name());
            ensure!(counted(&agent, "a", "host_closed")? > before, "{family}: not counted");
            ensure!(lab::ping(client, address)?, "{family}: no ping from {}", client.name());
        }
        // A datagram is no TCP.
        let before = counted(&agent, "a", "host_closed")?;
        lab::datagrams(&bench.near, &lab::socket(address, 22), 1, &["--limit", "1"])?;
        ensure!(counted(&agent, "a", "host_closed")? > before, "{family}: 22/udp is open");
    }
    let a = Untouched::since_now(&agent, "a")?;
    for (address, node) in [("198.51.100.2", "10.0.0.2"), ("2001:db8:b::2", "2001:db8:f::2")] {
        let before = counted(&agent, "b", "host_closed")?;
        ensure!(!reaches(&bench.other, &lab::socket(address, 22)), "{address}: 22 is open to tenant b");
        ensure!(!lab::ping(&bench.other, address)?, "{address}: tenant b pings the host");
        ensure!(counted(&agent, "b", "host_closed")? > before, "{address}: not counted");
        // The hub's side is the host's own life.
        ensure!(reaches(&bench.nodes[0], &lab::socket(node, 8080)), "{node}: closed to the hub");
        ensure!(lab::ping(&bench.nodes[0], node)?, "{node}: a node cannot ping the host");
    }
    for (client, target) in [(&bench.other, Bench::OTHER_VIP), (&bench.other, Bench::OTHER_VIP6)] {
        ensure!(lab::load(client, &lab::socket(target, 6443), false, 20)?.failed == 0, "{target} is not served");
    }
    a.check(&agent)
}

/// Linux answers on any interface for the addresses of all of them; a tenant gets nothing of that.
#[test]
#[ignore = "needs root"]
fn addresses_of_other_interfaces_are_out_of_reach() -> Result<()> {
    let (bench, _servers, agent) = Bench::dual_running("weak", |text| text)?;
    let own = ["192.0.2.2", "2001:db8:a::2"];
    let others = ["10.0.0.2", "198.51.100.2", "2001:db8:f::2", "2001:db8:b::2", "10.0.0.11", "2001:db8:f::11"];
    let listeners: Vec<_> = own.iter().chain(&others[..4]).map(|address| Listener::plain(address, 8080)).collect();
    let _host = Peer::serve(&bench.lab, &bench.lb, "host", &listeners)?;
    let b = Untouched::since_now(&agent, "b")?;
    let hub = Capture::start(
        &bench.switches[2],
        Keep::Matching(Box::new(|frame| {
            lab::packet(frame).is_some_and(|packet| {
                packet.from().ip().to_string().starts_with("192.0.2.")
                    || packet.source.to_string().starts_with("2001:db8:a:")
            })
        })),
    )?;
    for (client, gateway) in [(&bench.near, own)] {
        for address in others {
            let (gateway, length) = if address.contains(':') { (gateway[1], 128) } else { (gateway[0], 32) };
            client.ip(&format!("route add {address}/{length} via {gateway}"))?;
            let before = counted(&agent, "a", "not_local")?;
            let port = if address.ends_with("11") { Bench::NODE_PORT } else { 8080 };
            ensure!(!reaches(client, &lab::socket(address, port)), "the tenant reaches {address}");
            ensure!(counted(&agent, "a", "not_local")? > before, "{address}: not counted");
        }
    }
    for address in own {
        ensure!(reaches(&bench.near, &lab::socket(address, 8080)), "the host's own address {address} is closed");
    }
    ensure!(hub.finish()?.kept.is_empty(), "packets of the tenant on the hub");
    b.check(&agent)
}

/// A router advertisement with a prefix and a default route.
fn advertise(station: &Namespace) -> Result<()> {
    let mac = lab::mac_bytes(&station.mac("eth0")?)?;
    let prefix = Ipv6Addr::new(0x2001, 0xdb8, 0xbad, 0, 0, 0, 0, 0);
    // Reachable time and retransmission timer unspecified; source link layer address; prefix information: on-link, autonomous, one hour.
    let payload = [
        [0; 8].as_slice(),
        &[1, 1],
        &mac,
        &[3, 4, 64, 0xc0, 0, 0, 0x0e, 0x10, 0, 0, 0x0e, 0x10, 0, 0, 0, 0],
        &prefix.octets(),
    ]
    .concat();
    // Hop limit 64, no flags, router lifetime 1800 s.
    let rest = [64, 0, 0x07, 0x08];
    let frame = lab::icmp6_frame((mac, [0x33, 0x33, 0, 0, 0, 1]), ROUTER, ALL_NODES, (134, 0), rest, &payload)?;
    lab::send_frame(station, "eth0", &frame)
}

fn believed(lb: &Namespace) -> Result<bool> {
    let text = lb.shell("ip -6 address show; ip -6 route show")?;
    Ok(text.contains("2001:db8:bad:") || text.contains("fe80::66"))
}

/// Router advertisements and redirects of a tenant change nothing on the host; without lbd, the same frames would.
#[test]
#[ignore = "needs root"]
fn router_advertisements_and_redirects_of_a_tenant_are_dropped() -> Result<()> {
    let (bench, _servers, agent) = Bench::dual_running("advert", |text| text)?;
    for key in ["accept_ra", "autoconf", "accept_redirects"] {
        bench.lb.sysctl(&format!("net/ipv6/conf/ten0/{key}"), "1")?;
    }
    let b = Untouched::since_now(&agent, "b")?;
    let (near_mac, lb_mac) = (lab::mac_bytes(&bench.near.mac("eth0")?)?, lab::mac_bytes(LB_MAC)?);
    let before = counted(&agent, "a", "router_control")?;
    for _ in 0..3 {
        advertise(&bench.near)?;
    }
    // ICMP redirect: "192.0.2.60 is a better way to 203.0.113.9", as the router would say.
    let mut quoted = lab::protocol_frame(
        (lb_mac, near_mac),
        "192.0.2.2".parse()?,
        "203.0.113.9".parse()?,
        17,
        &[0x10, 0, 0x20, 0, 0, 8, 0, 0],
    )?;
    quoted.drain(..14);
    let redirect = lab::icmp_frame(
        (near_mac, lb_mac),
        Ipv4Addr::new(192, 0, 2, 1),
        Ipv4Addr::new(192, 0, 2, 2),
        (5, 1),
        [192, 0, 2, 60],
        &quoted,
    )?;
    lab::send_frame(&bench.near, "eth0", &redirect)?;
    let payload =
        [Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0x60).octets(), "2001:db8:c::9".parse::<Ipv6Addr>()?.octets()]
            .concat();
    let redirect =
        lab::icmp6_frame((near_mac, lb_mac), "fe80::1".parse()?, "2001:db8:a::2".parse()?, (137, 0), [0; 4], &payload)?;
    lab::send_frame(&bench.near, "eth0", &redirect)?;
    lab::wait_until(Duration::from_secs(2), "all are counted", || {
        let counted = counted(&agent, "a", "router_control")? - before;
        ensure!(counted == 5, "{counted} of 5");
        Ok(true)
    })?;
    ensure!(
        !believed(&bench.lb)?,
        "the host believes a tenant: {}",
        bench.lb.shell("ip -6 address show; ip -6 route")?
    );
    for target in Bench::targets() {
        for client in [&bench.near, &bench.far] {
            ensure!(lab::load(client, &target, false, 20)?.failed == 0, "{target} is not served any more");
        }
    }
    b.check(&agent)?;
    // Is it us who dropped it?
    agent.stop()?;
    let output = agent.lbd(&["detach"])?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    lab::wait_until(Duration::from_secs(3), "without lbd the advertisement is believed", || {
        advertise(&bench.near)?;
        believed(&bench.lb)
    })
}

/// A VIP lives in its own segment: what comes for it from the hub, or from another tenant, is dropped and counted.
#[test]
#[ignore = "needs root"]
fn arrivals_for_a_vip_in_another_segment_are_dropped_and_counted() -> Result<()> {
    let (bench, _servers, agent) = Bench::dual_running("hubside", |text| text)?;
    let a = Untouched::since_now(&agent, "a")?;
    let flows = agent.flows(&[])?.len();
    for (vip, hub, b) in [(Bench::VIP, "10.0.0.2", "198.51.100.2"), (Bench::VIP6, "2001:db8:f::2", "2001:db8:b::2")] {
        let length = if vip == Bench::VIP { 32 } else { 128 };
        for (station, gateway, reason) in [(&bench.nodes[0], hub, "wrong_segment"), (&bench.other, b, "wrong_segment")]
        {
            station.ip(&format!("route add {vip}/{length} via {gateway}"))?;
            let before = agent.reason(reason)? + agent.reason("not_local")?;
            let capture = Capture::start(
                station,
                Keep::Matching(Box::new(move |frame| {
                    lab::packet(frame).is_some_and(|packet| packet.source.to_string() == vip)
                })),
            )?;
            for port in [6443, 81] {
                ensure!(!reaches(station, &lab::socket(vip, port)), "{} reaches {vip}", station.name());
            }
            lab::datagrams(station, &lab::socket(vip, Bench::UDP_PORTS.0), 2, &["--limit", "1"])?;
            ensure!(!lab::ping(station, vip)?, "{} pings {vip}", station.name());
            let answers = capture.finish()?.kept.iter().filter(|frame| !frame.outgoing).count();
            ensure!(answers == 0, "{}: {answers} answers from {vip}", station.name());
            let counted = agent.reason(reason)? + agent.reason("not_local")? - before;
            ensure!(counted >= 5, "{}, {vip}: {counted} counted", station.name());
        }
    }
    ensure!(agent.reason("wrong_segment")? >= 10, "{} arrivals counted as such", agent.reason("wrong_segment")?);
    ensure!(agent.flows(&[])?.len() == flows, "a flow was made");
    a.check(&agent)
}

/// Spoofed SYNs, SYNs with an ACK after them, and datagrams of one tenant: its own connections live on, and the other tenant's open as if
/// nothing were.
#[test]
#[ignore = "needs root"]
fn a_flood_of_one_tenant_does_not_touch_the_other() -> Result<()> {
    let (bench, _servers, agent) = Bench::dual_running("flood", |text| text)?;
    let rate = 10_000;
    let frames: u32 = if fast() { 25_000 } else { 150_000 };
    let other = [lab::socket(Bench::OTHER_VIP, 6443), lab::socket(Bench::OTHER_VIP6, 6443)];
    let way = (lab::mac_bytes(&bench.near.mac("eth0")?)?, lab::mac_bytes(LB_MAC)?);
    let calm = Untouched::since_now(&agent, "b")?;
    let holds = [
        (&bench.far, &Bench::targets()[0]),
        (&bench.far, &Bench::targets()[1]),
        (&bench.other, &other[0]),
        (&bench.other, &other[1]),
    ]
    .map(|(client, target)| Hold::start(&bench.lab, client, target, false, 20, 10));
    // Hosts of the tenant's segment that there are not, so that nobody resets what is answered.
    let from = |number: u32, v6: bool| -> SocketAddr {
        let (host, port) = (100 + number % 100, 1024 + (number / 100 % 60_000) as u16);
        if v6 {
            SocketAddr::new(Ipv6Addr::new(0x2001, 0xdb8, 0xa, 0, 0, 0, 1, host as u16).into(), port)
        } else {
            SocketAddr::new(Ipv4Addr::new(192, 0, 2, host as u8).into(), port)
        }
    };
    let datagrams = lab::socket(Bench::OTHER_VIP, Bench::UDP_PORTS.0);
    for kind in ["SYN", "SYN and ACK", "UDP"] {
        let craft = |number: u32| -> Result<Vec<u8>> {
            let v6 = number % 4 == 3;
            let vip = if v6 { Bench::VIP6 } else { Bench::VIP };
            let port = if kind == "UDP" { Bench::UDP_PORTS.0 } else { 6443 };
            let to = SocketAddr::new(vip.parse()?, port);
            match kind {
                "UDP" => lab::udp_frame(way, from(number, v6), to, &[0; 18]),
                "SYN" => lab::tcp_frame(way, from(number, v6), to, 2, (number, 0)),
                // The ACK guesses at the node's sequence number.
                _ if number % 8 < 4 => lab::tcp_frame(way, from(number, v6), to, 2, (7, 0)),
                _ => lab::tcp_frame(way, from(number - 4, v6), to, 16, (8, number.wrapping_mul(0x9e37_79b9))),
            }
        };
        bench.lab.all_come_back(|| {
            let steady = Datagrams::start(&bench.lab, &bench.other, &datagrams, 5, 50)?;
            let before = agent.losses(Some("a"))?;
            std::thread::scope(|scope| -> Result<()> {
                let flood = scope.spawn(|| {
                    lab::send_frames(&bench.near, "eth0", rate, (0..frames).filter_map(|number| craft(number).ok()))
                });
                let mut opened = 0;
                while !flood.is_finished() {
                    for target in &other {
                        let report = lab::load(&bench.other, target, false, 50)?;
                        ensure!(
                            report.failed == 0,
                            "{kind}: tenant b's connections fail: {report:?}; {:?}",
                            agent.losses(Some("b"))?
                        );
                        opened += 50;
                    }
                }
                let sent = flood.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
                let after = agent.losses(Some("a"))?;
                let refused: u64 = after.values().sum::<u64>() - before.values().sum::<u64>();
                println!(
                    "{kind}: {sent} frames, {refused} refused; {opened} connections of tenant b meanwhile; {after:?}"
                );
                ensure!(opened >= 100 && sent > u64::from(frames) / 2, "{kind}: {opened} connections, {sent} frames");
                if kind != "UDP" {
                    let proven = agent.flows(&["--client", "192.0.2.100", "--state", "established"])?.len();
                    ensure!(proven == 0, "{kind}: {proven} flows were made of nothing");
                }
                Ok(())
            })?;
            steady.finish()
        })?;
    }
    for hold in holds {
        hold?.finish()?.assert_whole()?;
    }
    calm.check(&agent)?;
    // The tenant that flooded is served again.
    lab::wait_until(Duration::from_mins(1), "tenant a is served", || {
        let report = lab::load_with(&bench.far, &Bench::targets()[0], false, 20, &["--limit", "3"])?;
        ensure!(report.failed == 0, "{report:?}");
        Ok(true)
    })
}
