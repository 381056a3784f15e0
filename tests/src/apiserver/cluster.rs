//! A cluster for tests: the test server, or the real one that `LBD_TEST_KUBECONFIG` names.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};
use serde_json::json;

use super::{Client, Handle, Options};

/// Names the kubeconfig of a real cluster to test against.
pub const KUBECONFIG: &str = "LBD_TEST_KUBECONFIG";

/// A cluster with a namespace of one's own in it.
#[derive(Debug)]
pub struct Cluster {
    /// The test server; `None` if the cluster is real.
    pub server: Option<Handle>,
    /// A client.
    pub client: Client,
    /// A namespace that nobody else uses.
    pub namespace: String,
    kubeconfig: PathBuf,
    _directory: tempfile::TempDir,
}

impl Cluster {
    /// The real cluster if one is named, otherwise a test server.
    pub async fn any() -> Result<Self> {
        match std::env::var_os(KUBECONFIG) {
            Some(path) => Self::real(Path::new(&path)).await,
            None => Self::test(Options::default()).await,
        }
    }

    /// A test server, for what a real cluster cannot be made to do.
    pub async fn test(options: Options) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let server = super::start(options).await?;
        let kubeconfig = directory.path().join("kubeconfig");
        server.write_kubeconfig(&kubeconfig)?;
        let client = server.client()?;
        Self::with(Some(server), client, kubeconfig, directory).await
    }

    async fn real(path: &Path) -> Result<Self> {
        let client = Client::from_file(path)?;
        // It may be there already; then this fails.
        let own = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "lbd-system"}});
        if client.get("Namespace", "", "lbd-system").await.is_err() {
            client.create(&own).await?;
        }
        Self::with(None, client, path.to_owned(), tempfile::tempdir()?).await
    }

    async fn with(
        server: Option<Handle>,
        client: Client,
        kubeconfig: PathBuf,
        directory: tempfile::TempDir,
    ) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let namespace = format!("lbd-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}});
        client.create(&object).await?;
        Ok(Self { server, client, namespace, kubeconfig, _directory: directory })
    }

    /// The kubeconfig file.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// The test server.
    pub fn server(&self) -> Result<&Handle> {
        self.server.as_ref().context("this needs the test server")
    }

    /// The test server, to stop and start it.
    pub fn server_mut(&mut self) -> Result<&mut Handle> {
        self.server.as_mut().context("this needs the test server")
    }

    /// Removes what the test made in a real cluster.
    pub async fn finish(self) -> Result<()> {
        if self.server.is_none() {
            self.client.delete("Namespace", "", &self.namespace).await?;
        }
        Ok(())
    }
}
