//! Asks the agent over its Unix socket.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::api::types::ApiError;

/// Why the agent could not be asked.
#[derive(Debug, Error)]
pub(crate) enum ClientError {
    /// Nobody listens.
    #[error("no agent answers at {}: start `lbd run`, or name its socket with --socket or --config", .0.display())]
    Absent(PathBuf),
    /// The socket is not ours to open.
    #[error("{}: permission denied: run lbctl as root or as a member of the socket's group", .0.display())]
    Denied(PathBuf),
    /// It listens, and does not answer as an agent does.
    #[error("the agent at {}: {message}", socket.display())]
    Broken {
        /// Socket.
        socket: PathBuf,
        /// What happened.
        message: String,
    },
    /// The agent refused.
    #[error("{0}")]
    Refused(String),
}

/// The agent's socket.
pub(crate) struct Client {
    socket: PathBuf,
}

impl Client {
    /// Does not connect yet.
    pub(crate) fn new(socket: &Path) -> Self {
        Self { socket: socket.to_owned() }
    }

    /// `GET`.
    pub(crate) fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.request("GET", path, Bytes::new(), Duration::from_secs(5))
    }

    /// `POST`. Waits longer: the agent may have to change the datapath first.
    pub(crate) fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, ClientError> {
        let body = serde_json::to_vec(body).map_err(|error| self.broken(error.to_string()))?;
        self.request("POST", path, body.into(), Duration::from_mins(1))
    }

    fn broken(&self, message: impl Into<String>) -> ClientError {
        ClientError::Broken { socket: self.socket.clone(), message: message.into() }
    }

    fn request<T: DeserializeOwned>(
        &self,
        method: &str,
        path: &str,
        body: Bytes,
        limit: Duration,
    ) -> Result<T, ClientError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| self.broken(error.to_string()))?;
        let (status, body) = runtime
            .block_on(async { tokio::time::timeout(limit, self.exchange(method, path, body)).await })
            .map_err(|_| self.broken(format!("no answer within {} s", limit.as_secs())))??;
        if !status.is_success() {
            let message = serde_json::from_slice::<ApiError>(&body)
                .map_or_else(|_| format!("{method} {path}: {status}"), |error| error.error);
            return Err(ClientError::Refused(message));
        }
        serde_json::from_slice(&body).map_err(|error| {
            self.broken(format!("{method} {path}: {error}; is lbctl of the same version as the agent?"))
        })
    }

    async fn exchange(&self, method: &str, path: &str, body: Bytes) -> Result<(http::StatusCode, Bytes), ClientError> {
        let stream = tokio::net::UnixStream::connect(&self.socket).await.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => ClientError::Absent(self.socket.clone()),
            io::ErrorKind::PermissionDenied => ClientError::Denied(self.socket.clone()),
            _ => self.broken(error.to_string()),
        })?;
        let failed = |error: &dyn std::error::Error| self.broken(error.to_string());
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|error| failed(&error))?;
        let connection = tokio::spawn(connection);
        let request = http::Request::builder()
            .method(method)
            .uri(path)
            .header(http::header::HOST, "lbd")
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|error| failed(&error))?;
        let response = sender.send_request(request).await.map_err(|error| failed(&error))?;
        let status = response.status();
        let body = response.into_body().collect().await.map_err(|error| failed(&error))?.to_bytes();
        connection.abort();
        Ok((status, body))
    }
}
