//! One probe.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tokio::net::TcpSocket;
use tokio::time::timeout;

use crate::config::ProbeKind;
use crate::plan::model::ProbeTarget;

/// What a probe found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The target answered.
    Success,
    /// It did not, and why.
    Failure(String),
    /// This host could not ask: nothing is known of the target.
    Unasked(String),
}

/// Probes once. The connection is closed in the ordinary way: a reset in the middle of an accept looks like an attack in a server's log.
pub(super) async fn probe(target: &ProbeTarget) -> Outcome {
    match target.probe.kind {
        ProbeKind::Tcp => {}
        ProbeKind::Http | ProbeKind::Https | ProbeKind::Tls => {
            return Outcome::Unasked("unsupported: probes other than tcp".to_owned());
        }
    }
    let limit = target.probe.timeout;
    match timeout(limit, connect(target)).await {
        Ok(Ok(())) => Outcome::Success,
        Ok(Err(error)) => judge(&error, target),
        Err(_) => Outcome::Failure(format!("timed out after {}", shown(limit))),
    }
}

async fn connect(target: &ProbeTarget) -> io::Result<()> {
    let socket = match target.address {
        IpAddr::V4(_) => TcpSocket::new_v4()?,
        IpAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // So that neither a route nor an overlapping network elsewhere can answer for the target.
    socket.bind_device(Some(target.interface.as_bytes()))?;
    drop(socket.connect(SocketAddr::new(target.address, target.port)).await?);
    Ok(())
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
