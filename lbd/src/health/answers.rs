//! Servers of every kind on the loopback interface, and what a probe says of them.

use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU32, Ordering};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, SupportedProtocolVersion};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use super::*;
use crate::plan::testing::settings;

/// What a server saw.
#[derive(Default)]
struct Seen {
    /// Handshakes that failed: each is a line in the log of a real server.
    failed: AtomicU32,
    /// Sessions that broke off without a farewell.
    broken: AtomicU32,
    /// Sessions that ended in good order.
    good: AtomicU32,
    /// Requests, and the names that clients asked for.
    words: std::sync::Mutex<Vec<String>>,
}

impl Seen {
    fn counts(&self) -> (u32, u32, u32) {
        let count = |of: &AtomicU32| of.load(Ordering::SeqCst);
        (count(&self.failed), count(&self.broken), count(&self.good))
    }

    fn words(&self) -> Vec<String> {
        self.words.lock().unwrap().clone()
    }

    async fn ended(&self, sessions: u32) {
        let start = Instant::now();
        while {
            let (failed, broken, good) = self.counts();
            failed + broken + good < sessions
        } {
            assert!(start.elapsed() < Duration::from_secs(5), "a session does not end: {:?}", self.counts());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

/// What a server says after the handshake, if there is one.
#[derive(Clone, Copy)]
enum Says {
    /// Nothing until the client ends.
    Nothing,
    /// This, to a request.
    Http(&'static str),
    /// Not even a handshake.
    Hangs,
}

async fn converse<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S, says: Says, seen: &Seen) {
    let mut head = Vec::new();
    if let Says::Http(answer) = says {
        let mut byte = [0; 1];
        while !head.ends_with(b"\r\n\r\n") {
            match stream.read(&mut byte).await {
                Ok(1) => head.push(byte[0]),
                Ok(_) | Err(_) => break,
            }
        }
        seen.words.lock().unwrap().push(String::from_utf8(head).unwrap());
        stream.write_all(answer.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
    }
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest).await {
        Ok(0) => seen.good.fetch_add(1, Ordering::SeqCst),
        Ok(_) | Err(_) => seen.broken.fetch_add(1, Ordering::SeqCst),
    };
    let _ = stream.shutdown().await;
}

async fn serve(tls: Option<ServerConfig>, says: Says) -> (u16, Arc<Seen>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let seen = Arc::new(Seen::default());
    let acceptor = tls.map(|tls| TlsAcceptor::from(Arc::new(tls)));
    let shared = Arc::clone(&seen);
    tokio::spawn(async move {
        loop {
            let (stream, _): (TcpStream, _) = listener.accept().await.unwrap();
            let (acceptor, seen) = (acceptor.clone(), Arc::clone(&shared));
            tokio::spawn(async move {
                match (says, acceptor) {
                    (Says::Hangs, _) => std::future::pending().await,
                    (_, None) => converse(stream, says, &seen).await,
                    (_, Some(acceptor)) => match acceptor.accept(stream).await {
                        Ok(stream) => {
                            let name = stream.get_ref().1.server_name().unwrap_or("no name").to_owned();
                            seen.words.lock().unwrap().push(name);
                            converse(stream, says, &seen).await;
                        }
                        Err(_) => {
                            seen.failed.fetch_add(1, Ordering::SeqCst);
                        }
                    },
                }
            });
        }
    });
    (port, seen)
}

/// An authority of our own.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut parameters = CertificateParams::default();
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(parameters, KeyPair::generate().unwrap()).unwrap())
    }

    fn server(&self, versions: &[&'static SupportedProtocolVersion], clients: bool) -> ServerConfig {
        let mut parameters = CertificateParams::new(vec!["api.example".to_owned()]).unwrap();
        parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate().unwrap();
        let certificate = parameters.signed_by(&key, &self.0).unwrap().der().clone();
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
        let builder = builder.with_protocol_versions(versions).unwrap();
        let builder = if clients {
            let mut roots = RootCertStore::empty();
            roots.add(self.0.der().clone()).unwrap();
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build().unwrap();
            builder.with_client_cert_verifier(verifier)
        } else {
            builder.with_no_client_auth()
        };
        builder.with_single_cert(vec![certificate], key).unwrap()
    }

    fn any(&self) -> ServerConfig {
        self.server(rustls::ALL_VERSIONS, false)
    }
}

fn target(port: u16, kind: ProbeKind, change: impl FnOnce(&mut Probe)) -> ProbeTarget {
    let mut probe = Probe { kind, path: "/readyz".to_owned(), ..settings().health };
    change(&mut probe);
    ProbeTarget { address: Ipv4Addr::LOCALHOST.into(), port, interface: Arc::from("lo"), probe: Arc::new(probe) }
}

async fn ask(port: u16, kind: ProbeKind, change: impl FnOnce(&mut Probe)) -> Outcome {
    probe(&target(port, kind, change), &Trust::default()).await
}

fn up(how: &str) -> Outcome {
    Outcome::Success(how.to_owned())
}

fn down(why: &str) -> Outcome {
    Outcome::Failure(why.to_owned())
}

const READY: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
const FORBIDDEN: &str = "HTTP/1.1 403 Forbidden\r\nContent-Length: 3\r\n\r\nno\n";

#[tokio::test]
async fn b54_an_api_server_that_is_ready_and_one_without_anonymous_requests() {
    let authority = Authority::new();
    let (port, seen) = serve(Some(authority.any()), Says::Http(READY)).await;
    let named = |probe: &mut Probe| probe.host = Some("api.example".to_owned());
    assert_eq!(ask(port, ProbeKind::Https, named).await, up("HTTP 200"));
    seen.ended(1).await;
    // A whole session with a farewell: nothing for the server's log.
    assert_eq!(seen.counts(), (0, 0, 1));
    let words = seen.words();
    assert_eq!(words[0], "api.example");
    assert!(
        words[1].starts_with("GET /readyz HTTP/1.1\r\n") && words[1].contains("host: api.example\r\n"),
        "{words:?}"
    );
    assert!(!words[1].contains("authorization"), "{words:?}");

    let (port, seen) = serve(Some(authority.any()), Says::Http(FORBIDDEN)).await;
    assert_eq!(ask(port, ProbeKind::Https, |_| ()).await, down("HTTP 403"));
    assert_eq!(ask(port, ProbeKind::Https, |probe| probe.expect = vec![200, 401, 403]).await, up("HTTP 403"));
    assert_eq!(ask(port, ProbeKind::Https, |probe| probe.expect = vec![401]).await, down("HTTP 403"));
    seen.ended(3).await;
    assert_eq!(seen.counts(), (0, 0, 3));
    // Without a name in the file, none is sent.
    assert_eq!(seen.words()[0], "no name");
}

#[tokio::test]
async fn b54_a_handshake_leaves_no_trace_in_a_servers_log() {
    let authority = Authority::new();
    for versions in [&[&rustls::version::TLS13][..], &[&rustls::version::TLS12]] {
        let (port, seen) = serve(Some(authority.server(versions, false)), Says::Nothing).await;
        for _ in 0..3 {
            let named = |probe: &mut Probe| probe.host = Some("api.example".to_owned());
            assert_eq!(ask(port, ProbeKind::Tls, named).await, up("TLS handshake done"));
        }
        seen.ended(3).await;
        assert_eq!(seen.counts(), (0, 0, 3));
        assert_eq!(seen.words(), ["api.example"; 3]);
    }
}

#[tokio::test]
async fn b54_authorities_matter_only_where_they_are_given() {
    let directory = tempfile::tempdir().unwrap();
    let (right, wrong) = (Authority::new(), Authority::new());
    let file = |name: &str, text: String| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let (ours, theirs) = (file("right.pem", right.0.pem()), file("wrong.pem", wrong.0.pem()));
    let (port, _) = serve(Some(right.any()), Says::Nothing).await;
    let with = |ca: &std::path::Path, host: &str| {
        let (ca, host) = (ca.to_owned(), host.to_owned());
        move |probe: &mut Probe| (probe.ca, probe.host) = (Some(ca), Some(host))
    };
    assert_eq!(ask(port, ProbeKind::Tls, |_| ()).await, up("TLS handshake done"));
    assert_eq!(ask(port, ProbeKind::Tls, with(&ours, "api.example")).await, up("TLS handshake done"));
    for outcome in [
        ask(port, ProbeKind::Tls, with(&theirs, "api.example")).await,
        ask(port, ProbeKind::Tls, with(&ours, "other.example")).await,
    ] {
        let Outcome::Failure(why) = outcome else { panic!("{outcome:?}") };
        assert!(why.starts_with("TLS handshake: invalid peer certificate"), "{why}");
    }
    // A file that cannot be used says nothing of the server.
    for path in [directory.path().join("missing.pem"), file("empty.pem", String::new())] {
        let Outcome::Unasked(why) = ask(port, ProbeKind::Tls, with(&path, "api.example")).await else { panic!() };
        assert!(why.contains(&path.display().to_string()), "{why}");
    }
}

#[tokio::test]
async fn b54_a_server_that_wants_a_certificate_is_no_good_and_says_why() {
    let authority = Authority::new();
    for versions in [&[&rustls::version::TLS13][..], &[&rustls::version::TLS12]] {
        let (port, _) = serve(Some(authority.server(versions, true)), Says::Http(READY)).await;
        for kind in [ProbeKind::Tls, ProbeKind::Https] {
            let Outcome::Failure(why) = ask(port, kind, |_| ()).await else { panic!("{versions:?} {kind:?}") };
            assert!(why.contains("the server refused: "), "{why}");
        }
        // Whether its port is open can still be asked.
        assert_eq!(ask(port, ProbeKind::Tcp, |_| ()).await, up("connected"));
    }
}

#[tokio::test]
async fn b54_ports_that_hang_or_speak_something_else_are_down_in_time() {
    let (hanging, _) = serve(None, Says::Hangs).await;
    let short = |probe: &mut Probe| probe.timeout = Duration::from_millis(200);
    for (kind, why) in [
        (ProbeKind::Tls, "timed out after 200ms in the TLS handshake"),
        (ProbeKind::Https, "timed out after 200ms in the TLS handshake"),
        (ProbeKind::Http, "timed out after 200ms waiting for the HTTP answer"),
        (ProbeKind::LocalEndpoints, "timed out after 200ms waiting for the HTTP answer"),
    ] {
        let start = Instant::now();
        assert_eq!(ask(hanging, kind, short).await, down(why));
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    }
    // Only a listener, as a probe that connects sees it.
    assert_eq!(ask(hanging, ProbeKind::Tcp, short).await, up("connected"));
    let (plain, _) = serve(None, Says::Http("SSH-2.0-OpenSSH_9.2\r\n")).await;
    assert!(matches!(ask(plain, ProbeKind::Http, |_| ()).await, Outcome::Failure(why) if why.starts_with("HTTP: ")));
    assert!(matches!(ask(plain, ProbeKind::Tls, short).await, Outcome::Failure(_)));
    let (silent, _) = serve(None, Says::Http("")).await;
    assert_eq!(ask(silent, ProbeKind::Http, |_| ()).await, down("HTTP: the server closed the connection"));
}

#[tokio::test]
async fn answers_of_http_are_read_to_their_end_and_no_further() {
    for (answer, outcome) in [
        ("HTTP/1.1 204 No Content\r\n\r\n", up("HTTP 204")),
        ("HTTP/1.1 301 Moved Permanently\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", up("HTTP 301")),
        ("HTTP/1.0 200 OK\r\n\r\nuntil the end", up("HTTP 200")),
        ("HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n", down("HTTP 500")),
        // Less than was promised: the code counts.
        ("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nless", up("HTTP 200")),
    ] {
        let (port, seen) = serve(None, Says::Http(answer)).await;
        assert_eq!(ask(port, ProbeKind::Http, |_| ()).await, outcome, "{answer}");
        assert!(seen.words()[0].contains(&format!("host: 127.0.0.1:{port}\r\n")), "{:?}", seen.words());
    }
}

#[tokio::test]
async fn b24_a_health_port_counts_endpoints() {
    let json = |status: &str, body: &str| -> &'static str {
        format!("HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len())
            .leak()
    };
    let full = r#"{"service":{"namespace":"ns","name":"web"},"localEndpoints":2,"serviceProxyHealthy":true}"#;
    let none = r#"{"service":{"namespace":"ns","name":"web"},"localEndpoints":0,"serviceProxyHealthy":true}"#;
    for (answer, outcome) in [
        (json("200 OK", full), up("HTTP 200")),
        (json("503 Service Unavailable", none), down("no local endpoint")),
        // Seen in the field: 200 without endpoints.
        (json("200 OK", none), down("no local endpoint")),
        (json("200 OK", r#"{"localEndpoints":"many"}"#), down("no local endpoint")),
        (json("200 OK", r#"{"localEndpoints":-1}"#), down("no local endpoint")),
        // Nothing is said of a count.
        (json("200 OK", "{}"), up("HTTP 200")),
        (json("200 OK", "ok"), up("HTTP 200")),
        (json("204 No Content", ""), down("HTTP 204")),
    ] {
        let (port, _) = serve(None, Says::Http(answer)).await;
        let outcome_of = ask(port, ProbeKind::LocalEndpoints, |probe| probe.expect = vec![200]).await;
        assert_eq!(outcome_of, outcome, "{answer}");
    }
}

#[tokio::test]
async fn a_server_without_end_costs_no_more_than_a_timeout() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
        let block = [b'x'; 4096];
        loop {
            match stream.write_all(&block).await {
                Ok(()) => {}
                Err(error) => {
                    return assert!(matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset));
                }
            }
        }
    });
    let start = Instant::now();
    assert_eq!(ask(port, ProbeKind::Http, |_| ()).await, up("HTTP 200"));
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}
