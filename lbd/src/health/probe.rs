//! One probe.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::{Request, StatusCode, header};
use http_body_util::{BodyExt as _, Collected, Empty, Limited};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::config::{Probe, ProbeKind};
use crate::plan::model::ProbeTarget;

/// Bytes of an HTTP answer's body that are looked at.
const BODY: usize = 64 * 1024;
/// How long the other side may take to close what has been answered.
const FAREWELL: Duration = Duration::from_millis(250);
/// How long authorities that were read from a file are believed.
const FRESH: Duration = Duration::from_secs(10);

/// What a probe found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The target answered as it should, and how.
    Success(String),
    /// It did not, and why.
    Failure(String),
    /// This host could not ask: nothing is known of the target.
    Unasked(String),
}

/// Probes once. Connections are closed in the ordinary way: a reset in the middle of an accept, or a handshake that is not finished, looks
/// like an attack in a server's log.
pub(super) async fn probe(target: &ProbeTarget, trust: &Trust) -> Outcome {
    ask(target, trust).await.unwrap_or_else(|outcome| outcome)
}

async fn ask(target: &ProbeTarget, trust: &Trust) -> Result<Outcome, Outcome> {
    let limit = Limit { at: Instant::now() + target.probe.timeout, all: target.probe.timeout };
    let kind = target.probe.kind;
    // What is missing here must not look like a fault of the target.
    let tls = match kind {
        ProbeKind::Https | ProbeKind::Tls => Some(trust.tls(&target.probe)?),
        ProbeKind::Tcp | ProbeKind::Http | ProbeKind::LocalEndpoints => None,
    };
    let stream = limit.keep("", connect(target)).await?.map_err(|error| judge(&error, target))?;
    match (kind, tls) {
        (ProbeKind::Tcp, _) => Ok(Outcome::Success("connected".to_owned())),
        (ProbeKind::Tls, Some(tls)) => {
            let stream = handshake(stream, tls, target, limit).await?;
            farewell(stream).await
        }
        (_, Some(tls)) => {
            let stream = handshake(stream, tls, target, limit).await?;
            exchange(stream, target, limit).await
        }
        (_, None) => exchange(stream, target, limit).await,
    }
}

/// Until when a probe may take.
#[derive(Clone, Copy)]
struct Limit {
    at: Instant,
    all: Duration,
}

impl Limit {
    /// Waits for a step of the probe; `step` is told if it takes too long.
    async fn keep<T>(self, step: &str, work: impl Future<Output = T>) -> Result<T, Outcome> {
        timeout_at(self.at, work)
            .await
            .map_err(|_| Outcome::Failure(format!("timed out after {}{step}", shown(self.all))))
    }
}

async fn connect(target: &ProbeTarget) -> io::Result<TcpStream> {
    let socket = match target.address {
        IpAddr::V4(_) => TcpSocket::new_v4()?,
        IpAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // So that neither a route nor an overlapping network elsewhere can answer for the target.
    socket.bind_device(Some(target.interface.as_bytes()))?;
    socket.connect(SocketAddr::new(target.address, target.port)).await
}

async fn handshake(
    stream: TcpStream,
    tls: Arc<ClientConfig>,
    target: &ProbeTarget,
    limit: Limit,
) -> Result<TlsStream<TcpStream>, Outcome> {
    let host = target.probe.host.as_deref().and_then(|host| ServerName::try_from(host.to_owned()).ok());
    let name = host.unwrap_or_else(|| ServerName::IpAddress(target.address.into()));
    let done = limit.keep(" in the TLS handshake", TlsConnector::from(tls).connect(name, stream)).await?;
    done.map_err(|error| Outcome::Failure(format!("TLS handshake: {}", tls_cause(&error))))
}

/// Ends a session whose handshake is all that was wanted. A server that wants a certificate says so only now, with TLS 1.3.
async fn farewell(mut stream: TlsStream<TcpStream>) -> Result<Outcome, Outcome> {
    let mut rest = [0; 512];
    let end = async {
        stream.shutdown().await?;
        while stream.read(&mut rest).await? > 0 {}
        Ok(())
    };
    match timeout(FAREWELL, end).await {
        Ok(Err(error)) if alert(&error) => Err(Outcome::Failure(format!("TLS handshake: {}", tls_cause(&error)))),
        // Silence, or an end without ceremony, after a handshake that was complete.
        Ok(_) | Err(_) => Ok(Outcome::Success("TLS handshake done".to_owned())),
    }
}

/// Asks by HTTP.
async fn exchange<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    target: &ProbeTarget,
    limit: Limit,
) -> Result<Outcome, Outcome> {
    const STEP: &str = " waiting for the HTTP answer";
    let failed = |error: hyper::Error| Outcome::Failure(format!("HTTP: {}", http_cause(&error)));
    let probe = &target.probe;
    let host = probe.host.clone().unwrap_or_else(|| SocketAddr::new(target.address, target.port).to_string());
    let request = Request::get(probe.path.as_str())
        .header(header::HOST, host)
        .header(header::USER_AGENT, concat!("lbd/", env!("CARGO_PKG_VERSION")))
        .header(header::ACCEPT, "*/*")
        .header(header::CONNECTION, "close")
        .body(Empty::<Bytes>::new())
        .map_err(|error| Outcome::Unasked(format!("cannot ask: {error}")))?;
    let (mut sender, connection) =
        limit.keep(STEP, hyper::client::conn::http1::handshake(TokioIo::new(stream))).await?.map_err(failed)?;
    let mut connection = pin!(connection);
    let mut ended = false;
    let answer = async move {
        let response = sender.send_request(request).await?;
        let status = response.status();
        // Read, so that closing is no reset; what is longer or breaks off says nothing about the code.
        let body = Limited::new(response.into_body(), BODY).collect().await;
        Ok((status, body.map(Collected::to_bytes).unwrap_or_default()))
    };
    let answer = async {
        let mut answer = pin!(answer);
        loop {
            tokio::select! {
                biased;
                answer = &mut answer => return answer,
                _ = &mut connection, if !ended => ended = true,
            }
        }
    };
    let (status, body) = limit.keep(STEP, answer).await?.map_err(failed)?;
    if !ended {
        // What is left to say is the end.
        let _ = timeout(FAREWELL, connection).await;
    }
    verdict(probe, status, &body)
}

fn verdict(probe: &Probe, status: StatusCode, body: &[u8]) -> Result<Outcome, Outcome> {
    let code = status.as_u16();
    let expected = if probe.expect.is_empty() { (200..=399).contains(&code) } else { probe.expect.contains(&code) };
    if probe.kind == ProbeKind::LocalEndpoints {
        // Proxies that answer 200 without a single endpoint have been seen.
        let counted = serde_json::from_slice::<serde_json::Value>(body).ok();
        let count = counted.as_ref().and_then(|body| body.get("localEndpoints")).map(serde_json::Value::as_f64);
        if code == 503 || count.is_some_and(|count| count.is_none_or(|count| count <= 0.0)) {
            return Err(Outcome::Failure("no local endpoint".to_owned()));
        }
    }
    let text = format!("HTTP {code}");
    if expected { Ok(Outcome::Success(text)) } else { Err(Outcome::Failure(text)) }
}

/// Whose certificates are accepted.
#[derive(Clone, Debug, Default)]
pub(super) struct Trust {
    /// By file, with the time it was read.
    known: Arc<Mutex<Known>>,
}

type Known = HashMap<Option<PathBuf>, (Instant, Arc<ClientConfig>)>;

impl Trust {
    /// How TLS is spoken for a probe.
    fn tls(&self, probe: &Probe) -> Result<Arc<ClientConfig>, Outcome> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if let Some((read, tls)) = known.get(&probe.ca)
            && (probe.ca.is_none() || now < *read + FRESH)
        {
            return Ok(Arc::clone(tls));
        }
        let tls = Arc::new(tls(probe.ca.as_deref()).map_err(Outcome::Unasked)?);
        known.insert(probe.ca.clone(), (now, Arc::clone(&tls)));
        Ok(tls)
    }
}

/// Settings of TLS: without authorities, any certificate will do.
fn tls(authorities: Option<&Path>) -> Result<ClientConfig, String> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| format!("no TLS here: {error}"))?;
    let mut settings = if let Some(path) = authorities {
        let unreadable = |why: String| format!("health.ca: cannot read {}: {why}", path.display());
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(path).map_err(|error| unreadable(error.to_string()))? {
            let certificate = certificate.map_err(|error| unreadable(error.to_string()))?;
            roots.add(certificate).map_err(|error| unreadable(error.to_string()))?;
        }
        if roots.is_empty() {
            return Err(unreadable("there is no certificate in it".to_owned()));
        }
        builder.with_root_certificates(roots).with_no_client_auth()
    } else {
        builder.dangerous().with_custom_certificate_verifier(Arc::new(Anybody(provider))).with_no_client_auth()
    };
    // A resumed session would not show that the server can still make a new one.
    settings.resumption = Resumption::disabled();
    Ok(settings)
}

/// Accepts every certificate: a probe asks whether a server works, and tells it nothing.
#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

fn tls_error(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// Whether the server has refused what it got.
fn alert(error: &io::Error) -> bool {
    matches!(tls_error(error), Some(rustls::Error::AlertReceived(_)))
}

fn tls_cause(error: &io::Error) -> String {
    match tls_error(error) {
        Some(rustls::Error::AlertReceived(alert)) => format!("the server refused: {alert:?}"),
        Some(error) => error.to_string(),
        None if error.kind() == ErrorKind::UnexpectedEof => "the server closed the connection".to_owned(),
        None => error.to_string(),
    }
}

/// The innermost reason: hyper's own text says only that something went wrong.
fn http_cause(error: &hyper::Error) -> String {
    let source = std::error::Error::source(error);
    match source.and_then(|source| source.downcast_ref::<io::Error>()) {
        Some(inner) => tls_cause(inner),
        None if error.is_incomplete_message() => "the server closed the connection".to_owned(),
        None => error.to_string(),
    }
}

fn judge(error: &io::Error, target: &ProbeTarget) -> Outcome {
    match (error.kind(), error.raw_os_error()) {
        (ErrorKind::ConnectionRefused, _) => Outcome::Failure("connection refused".to_owned()),
        (ErrorKind::ConnectionReset, _) => Outcome::Failure("connection reset".to_owned()),
        (ErrorKind::HostUnreachable, _) => Outcome::Failure("host unreachable".to_owned()),
        (ErrorKind::NetworkUnreachable, _) => Outcome::Failure("network unreachable".to_owned()),
        (ErrorKind::TimedOut, _) => Outcome::Failure("timed out".to_owned()),
        (_, Some(libc::ENODEV)) => Outcome::Failure(format!("interface {} does not exist", target.interface)),
        (_, Some(libc::EPERM | libc::EACCES)) => {
            Outcome::Unasked(format!("not allowed to send through {}: needs CAP_NET_RAW", target.interface))
        }
        (_, Some(libc::EMFILE | libc::ENFILE)) => Outcome::Unasked("this host has no file descriptors left".to_owned()),
        (_, Some(libc::ENOBUFS | libc::ENOMEM)) => {
            Outcome::Unasked("this host has no memory left for sockets".to_owned())
        }
        (_, Some(libc::EADDRNOTAVAIL)) => {
            Outcome::Unasked("this host has no address or port left to probe from".to_owned())
        }
        _ => Outcome::Failure(error.to_string()),
    }
}

fn shown(duration: Duration) -> String {
    if duration.subsec_millis() == 0 {
        format!("{}s", duration.as_secs())
    } else {
        format!("{}ms", duration.as_millis())
    }
}
