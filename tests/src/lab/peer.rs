//! Servers and clients of the lab: `lbd-test-peer`, started in namespaces, and what it reports.
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

use super::{Lab, Namespace, Process, binary};

/// `address:port`, with brackets around an IPv6 address.
pub fn socket(address: &str, port: u16) -> String {
    address.parse::<IpAddr>().map_or_else(|_| format!("{address}:{port}"), |ip| SocketAddr::new(ip, port).to_string())
}

/// Where a server listens.
#[derive(Clone, Debug)]
pub struct Listener {
    /// `address:port`.
    pub address: String,
    /// The option of `lbd-test-peer serve` for what it speaks there.
    option: &'static str,
}

impl Listener {
    /// Plain.
    pub fn plain(address: &str, port: u16) -> Self {
        Self { address: socket(address, port), option: "--listen" }
    }

    /// TLS, with a certificate made on the spot.
    pub fn tls(address: &str, port: u16) -> Self {
        Self { address: socket(address, port), option: "--tls-listen" }
    }

    /// UDP: every datagram comes back.
    pub fn udp(address: &str, port: u16) -> Self {
        Self { address: socket(address, port), option: "--udp-listen" }
    }
}

/// A running server.
#[derive(Debug)]
pub struct Peer {
    process: Process,
}

impl Peer {
    /// Starts a server that answers with this name, and waits until it listens.
    pub fn serve(lab: &Lab, namespace: &Namespace, name: &str, listeners: &[Listener]) -> Result<Self> {
        let mut command = Command::new(binary("lbd-test-peer")?);
        command.args(["serve", "--name", name]);
        for listener in listeners {
            command.args([listener.option, &listener.address]);
        }
        let process = lab.start(namespace, &format!("serve-{name}"), command)?;
        process.wait_for("listening", Duration::from_secs(10))?;
        Ok(Self { process })
    }

    /// Refuses new connections from now on; open ones stay.
    pub fn refuse(&self) {
        self.process.signal(Signal::SIGUSR1);
    }

    /// Ends it; its connections are reset by the kernel or closed.
    pub fn kill(&self) {
        self.process.kill();
    }

    /// The process.
    pub fn process(&self) -> &Process {
        &self.process
    }
}

/// What a server says of a request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Answer {
    /// The server's name.
    pub name: String,
    /// The server's `address:port`.
    pub local: String,
    /// Whom the server sees.
    pub peer: String,
    /// The token of the request.
    #[serde(default)]
    pub token: String,
}

/// What came of many short connections.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct LoadReport {
    /// Connections tried.
    pub connections: u64,
    /// Those that did not get a right answer.
    pub failed: u64,
    /// Connections by the name of the server that answered.
    pub servers: BTreeMap<String, u64>,
    /// Failures by kind.
    pub errors: BTreeMap<String, u64>,
    /// Milliseconds of the slowest.
    pub slowest_ms: u64,
    /// Milliseconds of all of them.
    pub elapsed_ms: u64,
}

/// What came of long connections.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct HoldReport {
    /// Connections opened.
    pub connections: u64,
    /// Connections that could not be opened.
    pub refused: u64,
    /// Requests answered.
    pub requests: u64,
    /// Connections that ended or went silent.
    pub lost: u64,
    /// Connections that were reset.
    pub reset: u64,
    /// Answers that were another request's or another server's.
    pub wrong: u64,
    /// Open connections by server.
    pub servers: BTreeMap<String, u64>,
    /// Lost and reset connections by server.
    pub lost_servers: BTreeMap<String, u64>,
    /// Losses by kind.
    pub errors: BTreeMap<String, u64>,
    /// Milliseconds of the slowest answer.
    pub slowest_ms: u64,
}

impl HoldReport {
    /// Fails if anything was lost, reset or wrong.
    pub fn assert_whole(&self) -> Result<()> {
        ensure!(
            self.connections > 0 && self.refused == 0 && self.lost == 0 && self.reset == 0 && self.wrong == 0,
            "connections did not all live on: {self:?}"
        );
        Ok(())
    }
}

/// One connection of a ticker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Tick {
    /// When it was begun, milliseconds since the epoch.
    pub at_ms: u64,
    /// Milliseconds until the answer or the failure.
    pub took_ms: u64,
    /// The server that answered.
    pub server: Option<String>,
    /// That server's `address:port`.
    pub local: Option<String>,
    /// Why not.
    pub error: Option<String>,
}

/// What came of many datagrams.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct DatagramReport {
    /// Datagrams sent.
    pub sent: u64,
    /// Datagrams that came back as they were sent.
    pub received: u64,
    /// Datagrams that came back otherwise, or twice, or to another socket.
    pub wrong: u64,
    /// Sockets that were told that nobody listens.
    pub refused: u64,
    /// Milliseconds until the first of them was told.
    pub refused_ms: u64,
    /// Datagrams received, by the server that sent them back.
    pub servers: BTreeMap<String, u64>,
    /// Whom the servers saw: datagrams by address, without port.
    pub peers: BTreeMap<String, u64>,
    /// Servers that one and the same socket heard of, at most.
    pub servers_of_a_socket: u64,
    /// Milliseconds of all of them.
    pub elapsed_ms: u64,
}

impl DatagramReport {
    /// Fails unless everything came back as it was sent.
    pub fn assert_whole(&self) -> Result<()> {
        ensure!(
            self.sent > 0 && self.received == self.sent && self.wrong == 0 && self.refused == 0,
            "datagrams did not all come back: {self:?}"
        );
        Ok(())
    }
}

/// A line that a server sent unasked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrived {
    /// When it came, milliseconds since the epoch.
    pub at_ms: u64,
    /// The connection that it came on.
    pub connection: u64,
    /// Its number on this connection, from 0.
    pub serial: u64,
}

/// What came of a transfer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Transfer {
    /// Bytes each way.
    pub bytes: u64,
    /// What came down had the digest that the server sent.
    pub down_equal: bool,
    /// What went up had the digest that the server computed.
    pub up_equal: bool,
    /// Milliseconds down.
    pub down_ms: u64,
    /// Milliseconds up.
    pub up_ms: u64,
}

fn client(namespace: &Namespace, mode: &str, target: &str, tls: bool) -> Result<Command> {
    let mut command = namespace.command(binary("lbd-test-peer")?);
    command.args([mode, "--target", target]);
    if tls {
        command.arg("--tls");
    }
    Ok(command)
}

fn report<T: serde::de::DeserializeOwned>(text: &str) -> Result<T> {
    serde_json::from_str(text).with_context(|| format!("a report of the client was not readable: {text}"))
}

/// One request over a new connection; the error says how it failed.
pub fn get(namespace: &Namespace, target: &str, tls: bool) -> Result<Answer> {
    get_with(namespace, target, tls, &[])
}

/// Like `get`, with more options of `lbd-test-peer get`.
pub fn get_with(namespace: &Namespace, target: &str, tls: bool, options: &[&str]) -> Result<Answer> {
    let text = super::output(client(namespace, "get", target, tls)?.args(options))?;
    serde_json::from_str(&text).with_context(|| format!("the server at {target} answered: {text}"))
}

/// Many short connections, one request each.
pub fn load(namespace: &Namespace, target: &str, tls: bool, connections: u32) -> Result<LoadReport> {
    load_with(namespace, target, tls, connections, &[])
}

/// Like `load`, with more options of `lbd-test-peer load`.
pub fn load_with(
    namespace: &Namespace,
    target: &str,
    tls: bool,
    connections: u32,
    options: &[&str],
) -> Result<LoadReport> {
    let mut command = client(namespace, "load", target, tls)?;
    report(&super::output(command.args(["--connections", &connections.to_string()]).args(options))?)
}

/// Many datagrams to a server that sends them back.
pub fn datagrams(namespace: &Namespace, target: &str, datagrams: u32, options: &[&str]) -> Result<DatagramReport> {
    let mut command = client(namespace, "datagrams", target, false)?;
    report(&super::output(command.args(["--datagrams", &datagrams.to_string()]).args(options))?)
}

/// Bytes down, then up, with digests.
pub fn transfer(namespace: &Namespace, target: &str, tls: bool, bytes: u64) -> Result<Transfer> {
    let mut command = client(namespace, "transfer", target, tls)?;
    report(&super::output(command.args(["--bytes", &bytes.to_string()]))?)
}

/// Long connections with requests at a steady rate.
#[derive(Debug)]
pub struct Hold {
    process: Process,
}

impl Hold {
    /// Opens the connections and returns when all are open.
    pub fn start(
        lab: &Lab,
        namespace: &Namespace,
        target: &str,
        tls: bool,
        connections: u32,
        rate: u32,
    ) -> Result<Self> {
        Self::start_with(lab, namespace, target, tls, connections, rate, &[])
    }

    /// Like `start`, with more options of `lbd-test-peer hold`.
    pub fn start_with(
        lab: &Lab,
        namespace: &Namespace,
        target: &str,
        tls: bool,
        connections: u32,
        rate: u32,
        options: &[&str],
    ) -> Result<Self> {
        let mut command = Command::new(binary("lbd-test-peer")?);
        command.args(["hold", "--target", target, "--connections", &connections.to_string()]);
        command.args(["--rate", &rate.to_string()]).args(options);
        if tls {
            command.arg("--tls");
        }
        let process = lab.start(namespace, "hold", command)?;
        process.wait_for("established", Duration::from_secs(30))?;
        Ok(Self { process })
    }

    /// Ends the connections and tells what came of them.
    pub fn finish(self) -> Result<HoldReport> {
        self.process.signal(Signal::SIGTERM);
        let text = self.process.succeed(Duration::from_secs(30))?;
        report(text.lines().last().unwrap_or_default())
    }
}

/// New connections at a steady pace, each on record.
#[derive(Debug)]
pub struct Ticker {
    process: Process,
}

impl Ticker {
    /// Starts: one connection every so many milliseconds.
    pub fn start(lab: &Lab, namespace: &Namespace, target: &str, tls: bool, every_ms: u32) -> Result<Self> {
        let mut command = Command::new(binary("lbd-test-peer")?);
        command.args(["tick", "--target", target, "--every-ms", &every_ms.to_string()]);
        if tls {
            command.arg("--tls");
        }
        let process = lab.start(namespace, "tick", command)?;
        Ok(Self { process })
    }

    /// The connections that have ended so far, by the time they were begun.
    pub fn ticks(&self) -> Result<Vec<Tick>> {
        let text = self.process.output();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let mut ticks = whole
            .lines()
            .map(|line| serde_json::from_str(line).with_context(|| format!("not a tick: {line}")))
            .collect::<Result<Vec<Tick>>>()?;
        ticks.sort_by_key(|tick| tick.at_ms);
        Ok(ticks)
    }

    /// Ends it, when its last connections have ended.
    pub fn finish(self) -> Result<Vec<Tick>> {
        self.process.signal(Signal::SIGTERM);
        self.process.succeed(Duration::from_secs(30))?;
        self.ticks()
    }
}

/// Datagrams at a steady pace from sockets that stay open.
#[derive(Debug)]
pub struct Datagrams {
    process: Process,
}

impl Datagrams {
    /// Starts: from so many sockets, so many datagrams a second each.
    pub fn start(lab: &Lab, namespace: &Namespace, target: &str, sockets: u32, rate: u32) -> Result<Self> {
        let mut command = Command::new(binary("lbd-test-peer")?);
        command.args(["datagrams", "--target", target, "--sockets", &sockets.to_string()]);
        command.args(["--rate", &rate.to_string(), "--datagrams", "0"]);
        Ok(Self { process: lab.start(namespace, "datagrams", command)? })
    }

    /// Ends it and tells what came of it.
    pub fn finish(self) -> Result<DatagramReport> {
        self.process.signal(Signal::SIGTERM);
        let text = self.process.succeed(Duration::from_secs(30))?;
        report(text.lines().last().unwrap_or_default())
    }
}

/// Connections whose servers send lines unasked, at a steady pace; the client only listens.
#[derive(Debug)]
pub struct Watch {
    process: Process,
}

impl Watch {
    /// Opens the connections and returns when all have heard something.
    pub fn start(lab: &Lab, namespace: &Namespace, target: &str, connections: u32, every_ms: u32) -> Result<Self> {
        let mut command = Command::new(binary("lbd-test-peer")?);
        command.args(["watch", "--target", target, "--connections", &connections.to_string()]);
        command.args(["--every-ms", &every_ms.to_string()]);
        let process = lab.start(namespace, "watch", command)?;
        process.wait_for("established", Duration::from_secs(30))?;
        Ok(Self { process })
    }

    /// The lines that have come so far.
    pub fn arrived(&self) -> Result<Vec<Arrived>> {
        let text = self.process.output();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole
            .lines()
            .filter(|line| *line != "established")
            .map(|line| {
                let mut words = line.split(' ').map(str::parse::<u64>);
                let mut word = || words.next().and_then(Result::ok);
                let (at_ms, connection, serial) = (word(), word(), word());
                at_ms.zip(connection).zip(serial).map(|((at_ms, connection), serial)| Arrived {
                    at_ms,
                    connection,
                    serial,
                })
            })
            .map(|arrived| arrived.context("a line of the client was not readable"))
            .collect()
    }

    /// Ends it. Fails if a connection has ended, or a line is missing, doubled or out of its order.
    pub fn finish(self) -> Result<Vec<Arrived>> {
        self.process.signal(Signal::SIGTERM);
        self.process.succeed(Duration::from_secs(30))?;
        let arrived = self.arrived()?;
        let mut next: BTreeMap<u64, u64> = BTreeMap::new();
        for line in &arrived {
            let wanted = next.entry(line.connection).or_default();
            ensure!(line.serial == *wanted, "connection {}: line {} after {}", line.connection, line.serial, *wanted);
            *wanted += 1;
        }
        Ok(arrived)
    }
}
