//! Real sockets on the loopback interface.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU32, Ordering};

use tokio::net::TcpListener;
use tokio::time::{sleep, timeout};

use super::*;
use crate::plan::testing::settings;

fn target(port: u16, change: impl FnOnce(&mut Probe)) -> ProbeTarget {
    let mut probe = settings().health;
    change(&mut probe);
    ProbeTarget { address: Ipv4Addr::LOCALHOST.into(), port, interface: Arc::from("lo"), probe: Arc::new(probe) }
}

/// A server that counts who comes, and closes after them.
async fn server() -> (u16, Arc<AtomicU32>, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let count = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&count);
    let task = tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            counted.fetch_add(1, Ordering::Relaxed);
            drop(stream);
        }
    });
    (port, count, task)
}

async fn wait(health: &mut watch::Receiver<Health>, target: &ProbeTarget, up: Option<bool>) -> TargetHealth {
    let found =
        timeout(Duration::from_secs(10), health.wait_for(|all| all.get(target).is_some_and(|it| it.up == up))).await;
    found.expect("no such state in 10 s").unwrap()[target].clone()
}

/// A port that refuses: bound, but nobody listens.
fn refused() -> (std::net::UdpSocket, u16) {
    let holder = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = holder.local_addr().unwrap().port();
    (holder, port)
}

#[tokio::test]
async fn a_new_target_is_probed_at_once_and_then_once_an_interval() {
    let (port, count, _server) = server().await;
    let (prober, mut health) = Prober::start(Health::new());
    let it = target(port, |probe| probe.interval = Duration::from_millis(200));
    let start = Instant::now();
    prober.set_targets([it.clone()].into());
    let known = wait(&mut health, &it, Some(true)).await;
    assert!(start.elapsed() < Duration::from_millis(150), "{:?}", start.elapsed());
    assert_eq!(known.cause, "connected");
    sleep(Duration::from_secs(2)).await;
    let probes = count.load(Ordering::Relaxed);
    assert!((9..=13).contains(&probes), "{probes}");
    // Steady results tell nothing.
    assert!(!health.has_changed().unwrap());
    // Gone is gone.
    prober.set_targets(BTreeSet::new());
    sleep(Duration::from_millis(300)).await;
    let before = count.load(Ordering::Relaxed);
    sleep(Duration::from_millis(500)).await;
    assert_eq!(count.load(Ordering::Relaxed), before);
}

#[tokio::test]
async fn a_refusing_target_is_down_within_the_bound_and_up_again() {
    let (port, _, server) = server().await;
    let (prober, mut health) = Prober::start(Health::new());
    let it = target(port, |_| ());
    prober.set_targets([it.clone()].into());
    wait(&mut health, &it, Some(true)).await;
    server.abort();
    let start = Instant::now();
    let known = wait(&mut health, &it, Some(false)).await;
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    assert_eq!(known.cause, "connection refused");
    let _again = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.unwrap();
    let start = Instant::now();
    wait(&mut health, &it, Some(true)).await;
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
}

/// A listener whose queue is full: further connections get no answer, as from a host that is off.
fn silent() -> (Vec<std::net::TcpStream>, nix::sys::socket::SockaddrIn, std::os::fd::OwnedFd) {
    use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, SockaddrIn, bind, getsockname, listen, socket};
    use std::os::fd::AsRawFd;
    let listener = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
    bind(listener.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, 0)).unwrap();
    listen(&listener, Backlog::new(0).unwrap()).unwrap();
    let address: SockaddrIn = getsockname(listener.as_raw_fd()).unwrap();
    let mut queued = Vec::new();
    loop {
        let to = (Ipv4Addr::LOCALHOST, address.port());
        match std::net::TcpStream::connect_timeout(&to.into(), Duration::from_millis(300)) {
            Ok(stream) => queued.push(stream),
            Err(_) => return (queued, address, listener),
        }
    }
}

#[tokio::test]
async fn a_silent_target_is_down_within_the_bound() {
    let (_queued, address, _listener) = tokio::task::spawn_blocking(silent).await.unwrap();
    let it = target(address.port(), |_| ());
    // It was up a moment ago.
    let up = TargetHealth { up: Some(true), cause: "connected".to_owned(), since: 1 };
    let (prober, mut health) = Prober::start([(it.clone(), up.clone())].into());
    assert_eq!(health.borrow()[&it], up);
    let start = Instant::now();
    prober.set_targets([it.clone()].into());
    let known = wait(&mut health, &it, Some(false)).await;
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    assert_eq!(known.cause, "timed out after 1s");
    assert!(known.since > 1);
}

#[tokio::test]
async fn a_state_survives_a_restart_and_a_change_of_the_interval() {
    let (_holder, port) = refused();
    let (prober, mut health) = Prober::start(Health::new());
    let it = target(port, |_| ());
    prober.set_targets([it.clone()].into());
    let known = wait(&mut health, &it, Some(false)).await;
    let saved = serde_json::to_string(&save(&health.borrow())).unwrap();
    drop(prober);
    let restored = restore(&serde_json::from_str::<Vec<SavedTarget>>(&saved).unwrap());
    assert_eq!(restored, Health::from([(it.clone(), known.clone())]));

    let (prober, mut health) = Prober::start(restored);
    // Known before anything is asked.
    assert_eq!(health.borrow()[&it], known);
    prober.set_targets([it.clone()].into());
    sleep(Duration::from_millis(50)).await;
    assert_eq!(health.borrow()[&it], known);
    let slower = target(port, |probe| probe.interval = Duration::from_secs(5));
    prober.set_targets([slower.clone()].into());
    assert_eq!(wait(&mut health, &slower, Some(false)).await, known);
    assert!(!health.borrow().contains_key(&it));
}

#[tokio::test]
async fn causes_are_named() {
    let (_holder, port) = refused();
    let (prober, mut health) = Prober::start(Health::new());
    let refusing = target(port, |_| ());
    let missing = ProbeTarget { interface: Arc::from("no-such-if"), ..target(port, |_| ()) };
    let unreadable = target(port, |probe| {
        (probe.kind, probe.ca) = (ProbeKind::Tls, Some("/no/such/file".into()));
    });
    prober.set_targets([refusing.clone(), missing.clone(), unreadable.clone()].into());
    assert_eq!(wait(&mut health, &refusing, Some(false)).await.cause, "connection refused");
    assert_eq!(wait(&mut health, &missing, Some(false)).await.cause, "interface no-such-if does not exist");
    let named =
        timeout(Duration::from_secs(5), health.wait_for(|all| all[&unreadable].cause.starts_with("health.ca"))).await;
    assert_eq!(named.unwrap().unwrap()[&unreadable].up, None);
}

#[tokio::test]
async fn b55_many_targets_are_paced_and_leave_no_sockets_behind() {
    let (port, count, _server) = server().await;
    let (prober, mut health) = Prober::start(Health::new());
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = open();
    // 127.0.0.0/8 is all ours: 4,000 targets, half of them refusing.
    let (_holder, closed) = refused();
    let targets: BTreeSet<_> = (0..4000u32)
        .map(|number| ProbeTarget {
            address: Ipv4Addr::from(0x7f00_0101 + number).into(),
            ..target(if number % 2 == 0 { port } else { closed }, |probe| probe.interval = Duration::from_mins(1))
        })
        .collect();
    let start = Instant::now();
    prober.set_targets(targets);
    let all = |health: &Health| health.len() == 4000 && health.values().all(|it| it.up.is_some());
    timeout(Duration::from_secs(30), health.wait_for(all)).await.unwrap().unwrap();
    // 5,000 a second, after a burst of 250.
    assert!(start.elapsed() > Duration::from_millis(700), "{:?}", start.elapsed());
    // The server is bound to one address: only that one answers.
    assert!(count.load(Ordering::Relaxed) <= 1);
    sleep(Duration::from_millis(200)).await;
    assert!(open() <= before + 50, "{} {before}", open());
}

#[tokio::test]
async fn equal_targets_set_again_and_again_change_nothing() {
    let (port, count, _server) = server().await;
    let (prober, mut health) = Prober::start(Health::new());
    let it = target(port, |_| ());
    prober.set_targets([it.clone()].into());
    wait(&mut health, &it, Some(true)).await;
    for _ in 0..50 {
        prober.set_targets([it.clone()].into());
        sleep(Duration::from_millis(2)).await;
    }
    assert!(count.load(Ordering::Relaxed) <= 2);
    assert!(!health.has_changed().unwrap());
}
