//! The test API server in the lab, and a client of it that waits.
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::{Lab, Namespace, Process, binary, eventually, wait_until};
use crate::apiserver::Client;

/// A running API server.
#[derive(Debug)]
pub struct Api {
    namespace: Namespace,
    kubeconfig: PathBuf,
    process: Process,
}

impl Api {
    /// Starts it at `address:port` in a namespace and waits until it listens.
    pub fn start(lab: &Lab, namespace: &Namespace, listen: &str) -> Result<Self> {
        let kubeconfig = lab.directory().join("kubeconfig");
        let mut command = Command::new(binary("lbd-test-apiserver")?);
        command.args(["--listen", listen, "--kubeconfig"]).arg(&kubeconfig);
        let process = lab.start(namespace, "apiserver", command)?;
        process.wait_for("http", Duration::from_secs(10))?;
        wait_until(Duration::from_secs(5), "the API server writes its kubeconfig", || Ok(kubeconfig.is_file()))?;
        Ok(Self { namespace: namespace.clone(), kubeconfig, process })
    }

    /// The kubeconfig that leads to it.
    pub fn kubeconfig(&self) -> &std::path::Path {
        &self.kubeconfig
    }

    /// The process.
    pub fn process(&self) -> &Process {
        &self.process
    }

    fn call<T: Send>(&self, work: impl AsyncFnOnce(Client) -> Result<T> + Send) -> Result<T> {
        self.namespace.run(|| {
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .context("cannot make a runtime")?
                .block_on(async { work(Client::from_file(&self.kubeconfig)?).await })
        })
    }

    /// Creates an object; its namespace too, if that is missing.
    pub fn create(&self, object: &Value) -> Result<Value> {
        self.call(async |client| client.create(object).await)
    }

    /// Reads an object.
    pub fn get(&self, kind: &str, namespace: &str, name: &str) -> Result<Value> {
        self.call(async |client| client.get(kind, namespace, name).await)
    }

    /// Lists the objects of a namespace.
    pub fn list(&self, kind: &str, namespace: &str) -> Result<Vec<Value>> {
        self.call(async |client| client.list(kind, namespace).await)
    }

    /// Merges a patch into an object.
    pub fn patch(&self, kind: &str, namespace: &str, name: &str, patch: &Value) -> Result<Value> {
        self.call(async |client| client.patch(kind, namespace, name, patch).await)
    }

    /// Merges a patch into the status of an object, as the kubelet does.
    pub fn patch_status(&self, kind: &str, namespace: &str, name: &str, patch: &Value) -> Result<Value> {
        self.call(async |client| client.patch_status(kind, namespace, name, "kubelet", patch).await)
    }

    /// Deletes an object.
    pub fn delete(&self, kind: &str, namespace: &str, name: &str) -> Result<Value> {
        self.call(async |client| client.delete(kind, namespace, name).await)
    }

    /// Sets the NodePort of the first port of a Service.
    pub fn set_node_port(&self, namespace: &str, name: &str, port: u16, node_port: u16) -> Result<()> {
        let ports = json!([{ "name": format!("p{port}"), "port": port, "protocol": "TCP", "nodePort": node_port }]);
        self.patch("Service", namespace, name, &json!({ "spec": { "ports": ports } })).map(drop)
    }

    /// Waits until a Service has an address in its status.
    pub fn wait_address(&self, namespace: &str, name: &str, limit: Duration) -> Result<String> {
        eventually(limit, &format!("{namespace}/{name} has an address"), || {
            let service = self.get("Service", namespace, name)?;
            Ok(service.pointer("/status/loadBalancer/ingress/0/ip").and_then(Value::as_str).map(str::to_owned))
        })
    }
}
