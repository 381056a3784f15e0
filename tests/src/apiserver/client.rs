//! A client for tests: the same calls against the test server and against any real cluster.

use std::path::Path;

use anyhow::{Context, Result, bail};
use http::Request;
use kube::config::Kubeconfig;
use serde_json::{Value, json};

use super::store::KINDS;

/// A client.
#[derive(Clone)]
pub struct Client {
    kube: kube::Client,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Client").finish_non_exhaustive()
    }
}

impl Client {
    /// From the text of a kubeconfig.
    pub fn from_kubeconfig(text: &str) -> Result<Self> {
        Self::from_parsed(Kubeconfig::from_yaml(text).context("parse the kubeconfig")?)
    }

    /// From a kubeconfig file.
    pub fn from_file(path: &Path) -> Result<Self> {
        Self::from_parsed(Kubeconfig::read_from(path).with_context(|| format!("read {}", path.display()))?)
    }

    fn from_parsed(kubeconfig: Kubeconfig) -> Result<Self> {
        let mut config = kube::Config::try_from(kubeconfig).context("use the kubeconfig")?;
        config.proxy_url = None;
        config.default_retry = false;
        Ok(Self { kube: kube::Client::try_from(config).context("make a client")? })
    }

    fn path(kind: &str, namespace: &str, name: &str) -> Result<String> {
        let Some(kind) = KINDS.iter().find(|known| known.name == kind) else { bail!("unknown kind {kind}") };
        let base = if kind.api_version == "v1" { "/api/v1".to_owned() } else { format!("/apis/{}", kind.api_version) };
        let base =
            if kind.namespaced && !namespace.is_empty() { format!("{base}/namespaces/{namespace}") } else { base };
        Ok(if name.is_empty() { format!("{base}/{}", kind.plural) } else { format!("{base}/{}/{name}", kind.plural) })
    }

    /// Any request.
    pub async fn request(
        &self,
        method: &str,
        path: &str,
        content_type: &str,
        body: Option<&Value>,
    ) -> Result<Value, kube::Error> {
        let mut request = Request::builder().method(method).uri(path);
        if body.is_some() {
            request = request.header(http::header::CONTENT_TYPE, content_type);
        }
        let bytes = body.map(|body| body.to_string().into_bytes()).unwrap_or_default();
        self.kube.request(request.body(bytes).map_err(kube::Error::HttpError)?).await
    }

    /// A token of an account, for an hour.
    pub async fn token(&self, namespace: &str, account: &str) -> Result<String> {
        let path = format!("{}/token", Self::path("ServiceAccount", namespace, account)?);
        let request = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
            "metadata": {"namespace": namespace, "name": account}, "spec": {"expirationSeconds": 3600}});
        let answer = self.call("POST", &path, "application/json", Some(&request)).await?;
        answer["status"]["token"].as_str().map(str::to_owned).context("the answer has no token")
    }

    async fn call(&self, method: &str, path: &str, content_type: &str, body: Option<&Value>) -> Result<Value> {
        self.request(method, path, content_type, body).await.with_context(|| format!("{method} {path}"))
    }

    /// Creates an object; its namespace too, if that is missing. What of the status of a Node is not taken, is patched.
    pub async fn create(&self, object: &Value) -> Result<Value> {
        let created = self.create_only(object).await?;
        let (wanted, name) = (&object["status"], created["metadata"]["name"].as_str().unwrap_or_default());
        if object["kind"] == "Node" && !wanted.is_null() && created["status"]["addresses"] != wanted["addresses"] {
            return self.patch_status("Node", "", name, "kubelet", &json!({"status": wanted})).await;
        }
        Ok(created)
    }

    async fn create_only(&self, object: &Value) -> Result<Value> {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        let (kind, namespace) = (text("/kind"), text("/metadata/namespace"));
        let path = Self::path(kind, namespace, "")?;
        match self.request("POST", &path, "application/json", Some(object)).await {
            Err(kube::Error::Api(status)) if status.code == 404 && !namespace.is_empty() => {
                let missing = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}});
                self.call("POST", "/api/v1/namespaces", "application/json", Some(&missing)).await?;
                self.call("POST", &path, "application/json", Some(object)).await
            }
            other => other.with_context(|| format!("create {kind} {namespace}/{}", text("/metadata/name"))),
        }
    }

    /// Reads an object.
    pub async fn get(&self, kind: &str, namespace: &str, name: &str) -> Result<Value> {
        self.call("GET", &Self::path(kind, namespace, name)?, "", None).await
    }

    /// Lists objects; an empty namespace is all.
    pub async fn list(&self, kind: &str, namespace: &str) -> Result<Vec<Value>> {
        let mut list = self.call("GET", &Self::path(kind, namespace, "")?, "", None).await?;
        Ok(list["items"].as_array_mut().map(std::mem::take).unwrap_or_default())
    }

    /// Lists the objects of all namespaces that have a label.
    pub async fn list_labelled(&self, kind: &str, label: &str) -> Result<Vec<Value>> {
        let path = format!("{}?labelSelector={label}", Self::path(kind, "", "")?);
        let mut list = self.call("GET", &path, "", None).await?;
        Ok(list["items"].as_array_mut().map(std::mem::take).unwrap_or_default())
    }

    /// Replaces an object.
    pub async fn replace(&self, kind: &str, namespace: &str, name: &str, object: &Value) -> Result<Value> {
        self.call("PUT", &Self::path(kind, namespace, name)?, "application/json", Some(object)).await
    }

    /// Removes a namespace that is being deleted and is empty, as the controller of namespaces does.
    pub async fn finalize(&self, namespace: &Value) -> Result<Value> {
        let name = namespace["metadata"]["name"].as_str().unwrap_or_default();
        let mut empty = namespace.clone();
        empty["spec"] = json!({});
        let path = format!("{}/finalize", Self::path("Namespace", "", name)?);
        self.call("PUT", &path, "application/json", Some(&empty)).await
    }

    /// Whether the account of this client may do something.
    pub async fn may(&self, verb: &str, group: &str, resource: &str, namespace: &str, name: &str) -> Result<bool> {
        let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
        let review = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {"verb": verb, "group": group, "resource": resource,
                "subresource": subresource, "namespace": namespace, "name": name}}});
        let path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
        let answer = self.call("POST", path, "application/json", Some(&review)).await?;
        Ok(answer["status"]["allowed"] == true)
    }

    /// Merges a patch into an object.
    pub async fn patch(&self, kind: &str, namespace: &str, name: &str, patch: &Value) -> Result<Value> {
        let path = Self::path(kind, namespace, name)?;
        self.call("PATCH", &path, "application/merge-patch+json", Some(patch)).await
    }

    /// Merges a patch into the status of an object, as the named field manager.
    pub async fn patch_status(
        &self,
        kind: &str,
        namespace: &str,
        name: &str,
        manager: &str,
        patch: &Value,
    ) -> Result<Value> {
        let path = format!("{}/status?fieldManager={manager}", Self::path(kind, namespace, name)?);
        self.call("PATCH", &path, "application/merge-patch+json", Some(patch)).await
    }

    /// Deletes an object.
    pub async fn delete(&self, kind: &str, namespace: &str, name: &str) -> Result<Value> {
        self.call("DELETE", &Self::path(kind, namespace, name)?, "", None).await
    }
}

/// A Service of a type with TCP ports, each with a NodePort or 0 for any.
pub fn service(namespace: &str, name: &str, kind: &str, ports: &[(u16, u16)]) -> Value {
    let ports: Vec<_> = ports
        .iter()
        .map(|(port, node_port)| {
            let mut entry = json!({"name": format!("p{port}"), "port": port, "protocol": "TCP"});
            if *node_port != 0 {
                entry["nodePort"] = json!(node_port);
            }
            entry
        })
        .collect();
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"namespace": namespace, "name": name},
        "spec": {"type": kind, "selector": {"app": name}, "ports": ports},
    })
}

/// A ready Node with an address.
pub fn node(name: &str, address: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": name},
        "status": {
            "addresses": [{"type": "InternalIP", "address": address}, {"type": "Hostname", "address": name}],
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "",
                "lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z"}],
        },
    })
}
