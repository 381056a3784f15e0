//! Servers and clients for the lab: real TCP and TLS, HTTP/1.1, and UDP, with reports as JSON; and the lab's VLAN tagger.
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, Parser, Subcommand};
use lbd_tests::lab::{Answer, DatagramReport, HoldReport, LoadReport, PacketSocket, Tick, Transfer, tagged};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Mutex, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

/// Bytes of a digest.
const DIGEST: usize = 32;
/// The name in the servers' certificates.
const SERVER_NAME: &str = "lab.test";

#[derive(Parser)]
#[command(about = "Servers and clients for lbd's lab")]
struct Cli {
    #[command(subcommand)]
    mode: Mode,
}

#[derive(Subcommand)]
enum Mode {
    /// Answer requests until killed; SIGUSR1: refuse new connections from then on.
    Serve {
        /// Name in the answers.
        #[arg(long)]
        name: String,
        /// Address:port for HTTP.
        #[arg(long)]
        listen: Vec<SocketAddr>,
        /// Address:port for HTTPS.
        #[arg(long)]
        tls_listen: Vec<SocketAddr>,
        /// Address:port for datagrams, which come back.
        #[arg(long)]
        udp_listen: Vec<SocketAddr>,
    },
    /// One request; its answer is printed.
    Get {
        #[command(flatten)]
        client: Client,
    },
    /// Many short connections.
    Load {
        #[command(flatten)]
        client: Client,
        /// How many.
        #[arg(long)]
        connections: u64,
        /// How many at a time.
        #[arg(long, default_value_t = 64)]
        parallel: usize,
    },
    /// Datagrams, which the server sends back.
    Datagrams {
        #[command(flatten)]
        client: Client,
        #[command(flatten)]
        datagrams: DatagramOptions,
    },
    /// Connections that only listen to what the server says unasked, one line each time, until SIGTERM.
    Watch {
        #[command(flatten)]
        client: Client,
        /// How many.
        #[arg(long)]
        connections: u64,
        /// Milliseconds from one line of the server to the next.
        #[arg(long)]
        every_ms: u64,
    },
    /// Give frames a VLAN tag from one interface to another, and take it off on the way back, until killed.
    Tagger {
        /// Interface without tags.
        #[arg(long)]
        access: String,
        /// Interface with tags.
        #[arg(long)]
        trunk: String,
        /// VLAN id.
        #[arg(long)]
        vlan: u16,
    },
    /// Long connections with requests at a steady rate, until SIGTERM.
    Hold {
        #[command(flatten)]
        client: Client,
        /// How many.
        #[arg(long)]
        connections: u64,
        /// Requests a second, each; 0: one at the beginning, and one at the end.
        #[arg(long, default_value_t = 10)]
        rate: u32,
    },
    /// New connections at a steady pace, one line each, until SIGTERM.
    Tick {
        #[command(flatten)]
        client: Client,
        /// Milliseconds from one to the next.
        #[arg(long, default_value_t = 20)]
        every_ms: u64,
    },
    /// Bytes down, then up, with digests.
    Transfer {
        #[command(flatten)]
        client: Client,
        /// Bytes each way.
        #[arg(long)]
        bytes: u64,
    },
}

#[derive(Args, Clone)]
struct Client {
    /// Whom to connect to.
    #[arg(long)]
    target: SocketAddr,
    /// Over TLS; certificates are not verified.
    #[arg(long)]
    tls: bool,
    /// Connect from this address.
    #[arg(long)]
    source: Option<IpAddr>,
    /// Connect from this many addresses, from `source` upwards, in turn.
    #[arg(long, default_value_t = 1)]
    sources: u32,
    /// Connect from this port.
    #[arg(long, default_value_t = 0)]
    source_port: u16,
    /// Seconds that a connection, or an answer, may take.
    #[arg(long, default_value_t = 10)]
    limit: u64,
}

#[derive(Args, Clone)]
struct DatagramOptions {
    /// How many; 0: until SIGTERM.
    #[arg(long)]
    datagrams: u64,
    /// From so many sockets.
    #[arg(long, default_value_t = 1)]
    sockets: u64,
    /// So many on the way at a time, each socket.
    #[arg(long, default_value_t = 16)]
    window: u64,
    /// Bytes of the largest.
    #[arg(long, default_value_t = 1200)]
    size: u64,
    /// Datagrams a second, each socket, one at a time; 0: as fast as they come back.
    #[arg(long, default_value_t = 0)]
    rate: u32,
    /// Without checksums (IPv4 only).
    #[arg(long)]
    zero_checksum: bool,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(async {
        match cli.mode {
            Mode::Serve { name, listen, tls_listen, udp_listen } => {
                serve(name, &listen, &tls_listen, &udp_listen).await
            }
            Mode::Datagrams { client, datagrams } => exchange(client, datagrams).await,
            Mode::Watch { client, connections, every_ms } => watch_all(client, connections, every_ms).await,
            Mode::Tagger { access, trunk, vlan } => tagger(&access, &trunk, vlan),
            Mode::Get { client } => {
                println!("{}", serde_json::to_string(&client.once(0, "").await?)?);
                Ok(())
            }
            Mode::Load { client, connections, parallel } => load(client, connections, parallel).await,
            Mode::Hold { client, connections, rate } => hold(client, connections, rate).await,
            Mode::Tick { client, every_ms } => tick(client, every_ms).await,
            Mode::Transfer { client, bytes } => transfer(&client, bytes).await,
        }
    })
}

// ---- what both sides share

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

type Connection = BufReader<Box<dyn Stream>>;

/// First line and the headers that matter here.
struct Head {
    first: String,
    length: u64,
    close: bool,
}

/// Reads a head; `None` at the end of the stream.
async fn read_head(connection: &mut Connection) -> Result<Option<Head>> {
    let mut head = Head { first: String::new(), length: 0, close: false };
    let mut line = String::new();
    loop {
        line.clear();
        if connection.read_line(&mut line).await? == 0 {
            ensure!(head.first.is_empty(), "the stream ended within a head");
            return Ok(None);
        }
        let text = line.trim_end();
        if text.is_empty() {
            return Ok(Some(head));
        }
        if head.first.is_empty() {
            text.clone_into(&mut head.first);
        } else if let Some((key, value)) = text.split_once(':') {
            match key.to_ascii_lowercase().as_str() {
                "content-length" => head.length = value.trim().parse().context("content-length")?,
                "connection" => head.close = value.trim().eq_ignore_ascii_case("close"),
                _ => {}
            }
        }
    }
}

/// SHA-256 of a stream, of the provider that TLS uses anyway.
struct Digest(Box<dyn rustls::crypto::hash::Context>);

impl Digest {
    fn new() -> Self {
        let suite = rustls::crypto::ring::cipher_suite::TLS13_AES_128_GCM_SHA256;
        match suite {
            rustls::SupportedCipherSuite::Tls12(suite) => Self(suite.common.hash_provider.start()),
            rustls::SupportedCipherSuite::Tls13(suite) => Self(suite.common.hash_provider.start()),
        }
    }

    fn finish(self) -> Vec<u8> {
        self.0.finish().as_ref().to_vec()
    }
}

/// Bytes that never repeat, so that nothing lost, doubled or moved goes unseen.
struct Noise {
    block: Vec<u8>,
    serial: u64,
}

impl Noise {
    fn new() -> Self {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let block = std::iter::repeat_with(|| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        });
        Self { block: block.take(64 << 10).collect(), serial: 0 }
    }

    fn next(&mut self) -> &[u8] {
        self.serial += 1;
        for chunk in self.block.chunks_exact_mut(1024) {
            chunk[..8].copy_from_slice(&self.serial.to_le_bytes());
        }
        &self.block
    }
}

/// Sends that many bytes and returns their digest.
async fn send(connection: &mut Connection, bytes: u64) -> Result<Vec<u8>> {
    let (mut noise, mut digest, mut left) = (Noise::new(), Digest::new(), bytes);
    while left > 0 {
        let block = noise.next();
        let part = &block[..usize::try_from(left).unwrap_or(usize::MAX).min(block.len())];
        digest.0.update(part);
        connection.write_all(part).await?;
        left -= part.len() as u64;
    }
    Ok(digest.finish())
}

/// Takes that many bytes and returns their digest.
async fn take(connection: &mut Connection, bytes: u64) -> Result<Vec<u8>> {
    let (mut digest, mut left, mut buffer) = (Digest::new(), bytes, vec![0; 64 << 10]);
    while left > 0 {
        let room = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        let length = connection.read(&mut buffer[..room]).await?;
        ensure!(length > 0, "the stream ended {left} bytes early");
        digest.0.update(&buffer[..length]);
        left -= length as u64;
    }
    Ok(digest.finish())
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

// ---- server

async fn serve(
    name: String,
    listen: &[SocketAddr],
    tls_listen: &[SocketAddr],
    udp_listen: &[SocketAddr],
) -> Result<()> {
    let name: Arc<str> = name.into();
    let certified = rcgen::generate_simple_self_signed([SERVER_NAME.to_owned()])?;
    let key = PrivateKeyDer::try_from(certified.signing_key.serialize_der()).map_err(anyhow::Error::msg)?;
    let tls = rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(vec![CertificateDer::from(certified.cert.der().to_vec())], key)?;
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(tls));
    let (closed, _) = watch::channel(false);
    let mut refuse = signal(SignalKind::user_defined1())?;
    for (&address, secure) in
        listen.iter().map(|address| (address, false)).chain(tls_listen.iter().map(|address| (address, true)))
    {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        socket.bind(address).with_context(|| format!("cannot listen on {address}"))?;
        // Deep enough for all of a load at once.
        let listener = socket.listen(4096)?;
        let acceptor = secure.then(|| acceptor.clone());
        tokio::spawn(accept(listener, acceptor, Arc::clone(&name), closed.subscribe()));
    }
    for address in udp_listen {
        let socket = UdpSocket::bind(address).with_context(|| format!("cannot listen on {address}"))?;
        deepen(&socket)?;
        let name = Arc::clone(&name);
        std::thread::spawn(move || echo(&socket, &name));
    }
    println!("listening");
    loop {
        refuse.recv().await;
        let _ = closed.send(true);
    }
}

/// Room for all of a burst at once.
fn deepen(socket: &UdpSocket) -> Result<()> {
    nix::sys::socket::setsockopt(socket, nix::sys::socket::sockopt::RcvBufForce, &(8 << 20))?;
    Ok(())
}

/// Sends every datagram back, after a line with the server's name and one with whom it came from.
fn echo(socket: &UdpSocket, name: &str) {
    let mut buffer = vec![0; 1 << 16];
    loop {
        // Errors are of earlier answers: the client is gone.
        let Ok((length, peer)) = socket.recv_from(&mut buffer) else { continue };
        let mut answer = format!("{name}\n{}\n", peer.ip()).into_bytes();
        answer.extend(&buffer[..length]);
        let _ = socket.send_to(&answer, peer);
    }
}

async fn accept(
    listener: TcpListener,
    acceptor: Option<tokio_rustls::TlsAcceptor>,
    name: Arc<str>,
    mut closed: watch::Receiver<bool>,
) {
    loop {
        let (stream, peer) = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(_) => continue,
            },
            _ = closed.wait_for(|closed| *closed) => return,
        };
        let (acceptor, name) = (acceptor.clone(), Arc::clone(&name));
        tokio::spawn(async move {
            // A client that goes away ends its own connection only.
            let _ = converse(stream, peer, acceptor, &name).await;
        });
    }
}

async fn converse(
    stream: TcpStream,
    peer: SocketAddr,
    acceptor: Option<tokio_rustls::TlsAcceptor>,
    name: &str,
) -> Result<()> {
    stream.set_nodelay(true)?;
    let local = stream.local_addr()?;
    let stream: Box<dyn Stream> = match acceptor {
        Some(acceptor) => Box::new(acceptor.accept(stream).await?),
        None => Box::new(stream),
    };
    let mut connection = BufReader::with_capacity(64 << 10, stream);
    while let Some(head) = read_head(&mut connection).await? {
        let path = head.first.split(' ').nth(1).unwrap_or("/").to_owned();
        let (path, query) = path.split_once('?').unwrap_or((&path, ""));
        match path {
            "/down" => {
                let bytes: u64 = query.parse().context("bytes")?;
                let length = bytes + DIGEST as u64;
                connection.write_all(format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n").as_bytes()).await?;
                let digest = send(&mut connection, bytes).await?;
                connection.write_all(&digest).await?;
            }
            "/push" => {
                let mut beat = interval(Duration::from_millis(query.parse().context("milliseconds")?));
                connection.write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n").await?;
                for serial in 0_u64.. {
                    beat.tick().await;
                    connection.write_all(format!("{serial}\n").as_bytes()).await?;
                    connection.flush().await?;
                }
            }
            "/up" => {
                let digest = hexadecimal(&take(&mut connection, head.length).await?);
                let length = digest.len();
                connection
                    .write_all(format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{digest}").as_bytes())
                    .await?;
            }
            _ => {
                let answer = Answer {
                    name: name.to_owned(),
                    local: local.to_string(),
                    peer: peer.to_string(),
                    token: query.to_owned(),
                };
                let body = serde_json::to_string(&answer)?;
                let close = if head.close { "connection: close\r\n" } else { "" };
                let length = body.len();
                connection
                    .write_all(
                        format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n{close}content-length: {length}\r\n\r\n{body}")
                            .as_bytes(),
                    )
                    .await?;
            }
        }
        connection.flush().await?;
        if head.close {
            break;
        }
    }
    connection.shutdown().await?;
    Ok(())
}

// ---- clients

#[derive(Debug)]
struct NoVerification(rustls::crypto::CryptoProvider);

impl rustls::client::danger::ServerCertVerifier for NoVerification {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: rustls::pki_types::UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(
            message,
            certificate,
            signature,
            &self.0.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(
            message,
            certificate,
            signature,
            &self.0.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

fn connector() -> Result<tokio_rustls::TlsConnector> {
    static CONNECTOR: std::sync::OnceLock<tokio_rustls::TlsConnector> = std::sync::OnceLock::new();
    if let Some(connector) = CONNECTOR.get() {
        return Ok(connector.clone());
    }
    let provider = rustls::crypto::ring::default_provider();
    let mut config = rustls::ClientConfig::builder_with_provider(Arc::new(provider.clone()))
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(NoVerification(provider)))
        .with_no_client_auth();
    // Every connection makes a whole handshake.
    config.resumption = rustls::client::Resumption::disabled();
    Ok(CONNECTOR.get_or_init(|| tokio_rustls::TlsConnector::from(Arc::new(config))).clone())
}

fn plus(address: IpAddr, step: u32) -> IpAddr {
    match address {
        IpAddr::V4(address) => Ipv4Addr::from_bits(address.to_bits().wrapping_add(step)).into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits().wrapping_add(u128::from(step))).into(),
    }
}

impl Client {
    fn limit(&self) -> Duration {
        Duration::from_secs(self.limit)
    }

    async fn connect(&self, serial: u64) -> Result<Connection> {
        timeout(self.limit(), async {
            let socket = if self.target.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
            if let Some(source) = self.source {
                socket.set_reuseaddr(true)?;
                let step = (serial % u64::from(self.sources.max(1))) as u32;
                socket.bind(SocketAddr::new(plus(source, step), self.source_port))?;
            }
            let stream = socket.connect(self.target).await?;
            stream.set_nodelay(true)?;
            let stream: Box<dyn Stream> = if self.tls {
                Box::new(connector()?.connect(ServerName::try_from(SERVER_NAME)?, stream).await?)
            } else {
                Box::new(stream)
            };
            Ok(BufReader::with_capacity(64 << 10, stream))
        })
        .await
        .context("timed out (connecting)")?
    }

    async fn ask(&self, connection: &mut Connection, token: &str, close: bool) -> Result<Answer> {
        timeout(self.limit(), async {
            let last = if close { "connection: close\r\n" } else { "" };
            connection
                .write_all(format!("GET /?{token} HTTP/1.1\r\nhost: {SERVER_NAME}\r\n{last}\r\n").as_bytes())
                .await?;
            connection.flush().await?;
            let Some(head) = read_head(connection).await? else { bail!("closed by the other side") };
            ensure!(head.first.contains(" 200 "), "answered {}", head.first);
            let mut body = vec![0; usize::try_from(head.length)?];
            connection.read_exact(&mut body).await?;
            Ok(serde_json::from_slice(&body)?)
        })
        .await
        .context("timed out (waiting for the answer)")?
    }

    async fn once(&self, serial: u64, token: &str) -> Result<Answer> {
        let mut connection = self.connect(serial).await?;
        let answer = self.ask(&mut connection, token, true).await?;
        ensure!(answer.token == token, "the answer is another request's");
        let _ = connection.shutdown().await;
        Ok(answer)
    }
}

/// The kind of a failure in a few words, for counting.
fn kind(error: &anyhow::Error) -> String {
    match error.downcast_ref::<std::io::Error>() {
        Some(error) => error.kind().to_string(),
        None => error.to_string(),
    }
}

fn is_reset(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset)
}

fn milliseconds(since: Instant) -> u64 {
    since.elapsed().as_millis() as u64
}

async fn load(client: Client, connections: u64, parallel: usize) -> Result<()> {
    let begun = Instant::now();
    let report = Arc::new(Mutex::new(LoadReport { connections, ..LoadReport::default() }));
    let places = Arc::new(Semaphore::new(parallel));
    let mut tasks = JoinSet::new();
    for serial in 0..connections {
        let place = Arc::clone(&places).acquire_owned().await?;
        let (client, report) = (client.clone(), Arc::clone(&report));
        tasks.spawn(async move {
            let one = Instant::now();
            let result = client.once(serial, &format!("load-{serial}")).await;
            let mut report = report.lock().await;
            report.slowest_ms = report.slowest_ms.max(milliseconds(one));
            match result {
                Ok(answer) => *report.servers.entry(answer.name).or_default() += 1,
                Err(error) => {
                    report.failed += 1;
                    *report.errors.entry(kind(&error)).or_default() += 1;
                }
            }
            drop(place);
        });
        while tasks.try_join_next().is_some() {}
    }
    while tasks.join_next().await.is_some() {}
    let mut report = report.lock().await;
    report.elapsed_ms = milliseconds(begun);
    println!("{}", serde_json::to_string(&*report)?);
    Ok(())
}

async fn hold(client: Client, connections: u64, rate: u32) -> Result<()> {
    let report = Arc::new(Mutex::new(HoldReport::default()));
    let (stop, stopped) = watch::channel(false);
    let mut end = signal(SignalKind::terminate())?;
    let mut tasks = JoinSet::new();
    let open = Arc::new(AtomicU64::new(0));
    for serial in 0..connections {
        let (client, report, stopped, open) = (client.clone(), Arc::clone(&report), stopped.clone(), Arc::clone(&open));
        tasks.spawn(async move { hold_one(&client, serial, rate, &report, stopped, &open).await });
    }
    while open.load(Ordering::Relaxed) < connections {
        sleep(Duration::from_millis(5)).await;
    }
    println!("established");
    end.recv().await;
    let _ = stop.send(true);
    while tasks.join_next().await.is_some() {}
    println!("{}", serde_json::to_string(&*report.lock().await)?);
    Ok(())
}

async fn hold_one(
    client: &Client,
    serial: u64,
    rate: u32,
    report: &Mutex<HoldReport>,
    mut stopped: watch::Receiver<bool>,
    open: &AtomicU64,
) {
    let first = async {
        let mut connection = client.connect(serial).await?;
        let answer = client.ask(&mut connection, &format!("hold-{serial}-0"), false).await?;
        anyhow::Ok((connection, answer))
    }
    .await;
    open.fetch_add(1, Ordering::Relaxed);
    let (mut connection, home) = match first {
        Ok(opened) => opened,
        Err(error) => {
            let mut report = report.lock().await;
            report.refused += 1;
            *report.errors.entry(kind(&error)).or_default() += 1;
            return;
        }
    };
    {
        let mut report = report.lock().await;
        report.connections += 1;
        *report.servers.entry(home.name.clone()).or_default() += 1;
    }
    // Nobody sits through a period of a day.
    let period = if rate == 0 { Duration::from_hours(24) } else { Duration::from_secs(1) / rate };
    // Spread over the period.
    let begin =
        tokio::time::Instant::now() + if rate == 0 { period } else { period.mul_f64((serial % 97) as f64 / 97.0) };
    let mut beat = tokio::time::interval_at(begin, period);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for request in 1_u64.. {
        let last = tokio::select! {
            _ = beat.tick() => false,
            _ = stopped.wait_for(|stopped| *stopped) => true,
        };
        if last && rate > 0 {
            break;
        }
        let token = format!("hold-{serial}-{request}");
        let begun = Instant::now();
        let result = client.ask(&mut connection, &token, false).await;
        let mut report = report.lock().await;
        report.slowest_ms = report.slowest_ms.max(milliseconds(begun));
        match result {
            Ok(answer) if answer.token == token && answer.local == home.local && answer.peer == home.peer => {
                report.requests += 1;
            }
            Ok(_) => report.wrong += 1,
            Err(error) => {
                if is_reset(&error) {
                    report.reset += 1;
                } else {
                    report.lost += 1;
                }
                *report.lost_servers.entry(home.name).or_default() += 1;
                *report.errors.entry(kind(&error)).or_default() += 1;
                return;
            }
        }
        if last {
            break;
        }
    }
    let _ = connection.shutdown().await;
}

async fn tick(client: Client, every_ms: u64) -> Result<()> {
    let mut end = signal(SignalKind::terminate())?;
    let mut beat = interval(Duration::from_millis(every_ms));
    beat.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut tasks = JoinSet::new();
    loop {
        tokio::select! {
            _ = beat.tick() => {}
            _ = end.recv() => break,
        }
        let client = client.clone();
        tasks.spawn(async move {
            let at_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
            let begun = Instant::now();
            let result = client.once(0, "tick").await;
            let took_ms = milliseconds(begun);
            let tick = match result {
                Ok(answer) => {
                    Tick { at_ms, took_ms, server: Some(answer.name), local: Some(answer.local), error: None }
                }
                Err(error) => Tick { at_ms, took_ms, server: None, local: None, error: Some(kind(&error)) },
            };
            if let Ok(line) = serde_json::to_string(&tick) {
                println!("{line}");
            }
        });
        while tasks.try_join_next().is_some() {}
    }
    while tasks.join_next().await.is_some() {}
    Ok(())
}

async fn transfer(client: &Client, bytes: u64) -> Result<()> {
    let begun = Instant::now();
    let mut connection = client.connect(0).await?;
    connection.write_all(format!("GET /down?{bytes} HTTP/1.1\r\nhost: {SERVER_NAME}\r\n\r\n").as_bytes()).await?;
    connection.flush().await?;
    let head = read_head(&mut connection).await?.context("closed by the other side")?;
    ensure!(head.length == bytes + DIGEST as u64, "the server wants to send {} bytes", head.length);
    let digest = take(&mut connection, bytes).await?;
    let mut theirs = [0; DIGEST];
    connection.read_exact(&mut theirs).await?;
    let down_ms = milliseconds(begun);

    let begun = Instant::now();
    connection
        .write_all(format!("PUT /up HTTP/1.1\r\nhost: {SERVER_NAME}\r\ncontent-length: {bytes}\r\n\r\n").as_bytes())
        .await?;
    let sent = send(&mut connection, bytes).await?;
    connection.flush().await?;
    let head = read_head(&mut connection).await?.context("closed by the other side")?;
    let mut body = vec![0; usize::try_from(head.length)?];
    connection.read_exact(&mut body).await?;
    let report = Transfer {
        bytes,
        down_equal: digest == theirs,
        up_equal: hexadecimal(&sent).as_bytes() == body,
        down_ms,
        up_ms: milliseconds(begun),
    };
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}

async fn watch_all(client: Client, connections: u64, every_ms: u64) -> Result<()> {
    let mut end = signal(SignalKind::terminate())?;
    let open = Arc::new(AtomicU64::new(0));
    let mut tasks = JoinSet::new();
    for connection in 0..connections {
        let (client, open) = (client.clone(), Arc::clone(&open));
        tasks.spawn(async move { watch_one(&client, connection, every_ms, &open).await });
    }
    let mut said = false;
    loop {
        tokio::select! {
            _ = end.recv() => return Ok(()),
            Some(ended) = tasks.join_next() => ended?.context("a connection has ended")?,
            () = sleep(Duration::from_millis(5)), if !said => {
                if open.load(Ordering::Relaxed) == connections {
                    println!("established");
                    said = true;
                }
            }
        }
    }
}

async fn watch_one(client: &Client, number: u64, every_ms: u64, open: &AtomicU64) -> Result<()> {
    let mut connection = client.connect(number).await?;
    connection.write_all(format!("GET /push?{every_ms} HTTP/1.1\r\nhost: {SERVER_NAME}\r\n\r\n").as_bytes()).await?;
    connection.flush().await?;
    read_head(&mut connection).await?.context("closed by the other side")?;
    let mut line = String::new();
    while connection.read_line(&mut line).await? > 0 {
        let at_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        println!("{at_ms} {number} {}", line.trim_end());
        if line == "0\n" {
            open.fetch_add(1, Ordering::Relaxed);
        }
        line.clear();
    }
    bail!("closed by the other side")
}

// ---- datagrams

/// What goes into a datagram: two numbers, then bytes that no other one has.
fn content(socket: u64, serial: u64, largest: u64) -> Vec<u8> {
    /// Bytes of both numbers.
    const NUMBERS: u64 = 16;
    let size = NUMBERS + serial.wrapping_mul(131) % (largest.saturating_sub(NUMBERS) + 1);
    let mut state = (socket << 32 | serial).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = [socket.to_be_bytes(), serial.to_be_bytes()].concat();
    while (bytes.len() as u64) < size {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.push(state as u8);
    }
    bytes
}

async fn exchange(client: Client, options: DatagramOptions) -> Result<()> {
    let begun = Instant::now();
    let stop = Arc::new(AtomicBool::new(false));
    let mut end = signal(SignalKind::terminate())?;
    let sockets = options.sockets.max(1);
    let mut threads = Vec::new();
    for number in 0..sockets {
        let (client, options, stop) = (client.clone(), options.clone(), Arc::clone(&stop));
        let share = options.datagrams / sockets + u64::from(number < options.datagrams % sockets);
        let share = if options.datagrams == 0 { u64::MAX } else { share };
        threads.push(std::thread::spawn(move || exchange_one(&client, &options, number, share, &stop)));
    }
    let joined =
        tokio::task::spawn_blocking(move || threads.into_iter().map(std::thread::JoinHandle::join).collect::<Vec<_>>());
    tokio::pin!(joined);
    let reports = loop {
        tokio::select! {
            reports = &mut joined => break reports?,
            _ = end.recv() => stop.store(true, Ordering::Relaxed),
        }
    };
    let mut report = DatagramReport::default();
    for one in reports {
        let one = one.map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        report.sent += one.sent;
        report.received += one.received;
        report.wrong += one.wrong;
        if one.refused > 0 {
            report.refused_ms =
                if report.refused == 0 { one.refused_ms } else { report.refused_ms.min(one.refused_ms) };
        }
        report.refused += one.refused;
        report.servers_of_a_socket = report.servers_of_a_socket.max(one.servers.len() as u64);
        for (all, some) in [(&mut report.servers, one.servers), (&mut report.peers, one.peers)] {
            for (name, count) in some {
                *all.entry(name).or_default() += count;
            }
        }
    }
    report.elapsed_ms = milliseconds(begun);
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}

/// One socket's share.
fn exchange_one(
    client: &Client,
    options: &DatagramOptions,
    number: u64,
    share: u64,
    stop: &AtomicBool,
) -> Result<DatagramReport> {
    let any = if client.target.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let source = client.source.map_or(any, |source| plus(source, (number % u64::from(client.sources.max(1))) as u32));
    let socket = UdpSocket::bind(SocketAddr::new(source, client.source_port))?;
    deepen(&socket)?;
    socket.connect(client.target)?;
    if options.zero_checksum {
        let on: libc::c_int = 1;
        // SAFETY: the kernel reads one integer, which outlives the call.
        let set = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_NO_CHECK,
                (&raw const on).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        ensure!(set == 0, "cannot turn checksums off: {}", std::io::Error::last_os_error());
    }
    let (begun, mut report) = (Instant::now(), DatagramReport::default());
    let (mut waited_for, mut next) = (BTreeSet::new(), 0);
    let window = if options.rate > 0 { 1 } else { options.window.max(1) };
    let mut last = begun;
    while next < share && !stop.load(Ordering::Relaxed) {
        let first = next;
        for _ in 0..window.min(share - next) {
            match socket.send(&content(number, next, options.size)) {
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                    return Ok(refused(report, begun));
                }
                Err(error) => return Err(error).context("cannot send"),
            }
            waited_for.insert(next);
            report.sent += 1;
            next += 1;
        }
        last = Instant::now();
        // What comes later still counts.
        let patience = client.limit().min(Duration::from_secs(2));
        if !take_answers(&socket, last + patience, (number, first), options.size, &mut waited_for, &mut report)? {
            return Ok(refused(report, begun));
        }
        if options.rate > 0 {
            std::thread::sleep(Duration::from_secs(1) / options.rate);
        }
    }
    if !take_answers(&socket, last + client.limit(), (number, 0), options.size, &mut waited_for, &mut report)? {
        return Ok(refused(report, begun));
    }
    Ok(report)
}

/// Takes answers until none from that serial number on is missing, or the time is up. False: nobody listens there.
fn take_answers(
    socket: &UdpSocket,
    end: Instant,
    (number, first): (u64, u64),
    size: u64,
    waited_for: &mut BTreeSet<u64>,
    report: &mut DatagramReport,
) -> Result<bool> {
    /// Time to take what is there already, also for one who was not let run until the time was up.
    const LEAST: Duration = Duration::from_millis(1);
    let mut buffer = vec![0; 1 << 16];
    while waited_for.range(first..).next().is_some() {
        let left = end.saturating_duration_since(Instant::now());
        socket.set_read_timeout(Some(left.max(LEAST)))?;
        match socket.recv(&mut buffer) {
            Ok(length) => take_answer(&buffer[..length], number, size, waited_for, report),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => return Ok(false),
            Err(_) if left.is_zero() => break,
            Err(_) => {}
        }
    }
    Ok(true)
}

fn refused(mut report: DatagramReport, begun: Instant) -> DatagramReport {
    report.refused = 1;
    report.refused_ms = milliseconds(begun);
    report
}

fn take_answer(answer: &[u8], number: u64, size: u64, waited_for: &mut BTreeSet<u64>, report: &mut DatagramReport) {
    let mut parts = answer.splitn(3, |&byte| byte == b'\n');
    let (Some(server), Some(peer), Some(bytes)) = (parts.next(), parts.next(), parts.next()) else {
        report.wrong += 1;
        return;
    };
    let serial = bytes.get(8..16).and_then(|bytes| bytes.try_into().ok()).map(u64::from_be_bytes);
    match serial {
        Some(serial) if waited_for.contains(&serial) && content(number, serial, size) == bytes => {
            waited_for.remove(&serial);
            report.received += 1;
            let count = |all: &mut BTreeMap<String, u64>, name: &[u8]| {
                *all.entry(String::from_utf8_lossy(name).into_owned()).or_default() += 1;
            };
            count(&mut report.servers, server);
            count(&mut report.peers, peer);
        }
        _ => report.wrong += 1,
    }
}

// ---- VLAN

fn tagger(access: &str, trunk: &str, vlan: u16) -> Result<()> {
    let inside = Arc::new(PacketSocket::open(Some(access), false)?);
    let outside = Arc::new(PacketSocket::open(Some(trunk), false)?);
    println!("joined");
    let back = std::thread::spawn({
        let (inside, outside) = (Arc::clone(&inside), Arc::clone(&outside));
        move || carry(&outside, &inside, |frame| untagged(frame, vlan))
    });
    // Within an access network nothing has a tag.
    carry(&inside, &outside, |frame| (!is_tagged(frame)).then(|| tagged(frame, vlan)))?;
    back.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?
}

fn is_tagged(frame: &[u8]) -> bool {
    matches!(frame.get(12..14), Some([0x81, 0] | [0x88, 0xa8]))
}

/// The frame without its tag, if it has the one of this VLAN.
fn untagged(frame: &[u8], vlan: u16) -> Option<Vec<u8>> {
    let tag = u16::from_be_bytes(frame.get(14..16)?.try_into().ok()?);
    (is_tagged(frame) && tag & 0xfff == vlan).then(|| [&frame[..12], &frame[16..]].concat())
}

fn carry(from: &PacketSocket, to: &PacketSocket, change: impl Fn(&[u8]) -> Option<Vec<u8>>) -> Result<()> {
    let mut buffer = vec![0; 1 << 16];
    loop {
        let length = match from.receive(&mut buffer) {
            Ok(arrival) => arrival.length,
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR | libc::ENETDOWN)) => continue,
            Err(error) => return Err(error).context("cannot receive"),
        };
        if let Some(frame) = change(&buffer[..length]) {
            // A frame that is too large, or that finds no room, is lost as on any wire.
            let _ = to.send(None, &frame);
        }
    }
}
