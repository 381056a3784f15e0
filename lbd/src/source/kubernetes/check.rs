//! Asks a cluster what the account of a kubeconfig may do.

use std::time::Duration;

use http::Request;
use serde_json::{Value, json};

use super::NAMESPACE;
use super::access::{Access, SourceError};
use super::follow::describe;
use crate::config;

/// Limit for one question.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

const NO_LEASE: &str = "Lease that keeps a second agent from giving out the same addresses";
const NO_RECORD: &str = "record of addresses in the cluster, only the one on disk";

/// Group, resource, subresource, verb, and what does not work without it.
const RIGHTS: [(&str, &str, &str, &str, Option<&str>); 17] = [
    ("", "services", "", "list", None),
    ("", "services", "", "watch", None),
    ("", "nodes", "", "list", None),
    ("", "nodes", "", "watch", None),
    ("", "namespaces", "", "list", None),
    ("", "namespaces", "", "watch", None),
    ("discovery.k8s.io", "endpointslices", "", "list", Some("backends that are endpoints")),
    ("discovery.k8s.io", "endpointslices", "", "watch", Some("backends that are endpoints")),
    ("", "services", "status", "patch", Some("addresses in the status of Services")),
    ("", "events", "", "create", Some("Warning Events")),
    ("", "events", "", "patch", Some("Warning Events")),
    ("coordination.k8s.io", "leases", "", "get", Some(NO_LEASE)),
    ("coordination.k8s.io", "leases", "", "create", Some(NO_LEASE)),
    ("coordination.k8s.io", "leases", "", "update", Some(NO_LEASE)),
    ("", "configmaps", "", "get", Some(NO_RECORD)),
    ("", "configmaps", "", "create", Some(NO_RECORD)),
    ("", "configmaps", "", "update", Some(NO_RECORD)),
];

/// Something that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The agent can do nothing with this cluster.
    pub fatal: bool,
    /// What, and what to do.
    pub message: String,
}

/// Checks the kubeconfig, the server and the rights of the account. Changes nothing.
pub async fn check(settings: &config::Kubernetes) -> Result<Vec<Finding>, SourceError> {
    let access = Access::open(settings)?;
    let mut findings = Vec::new();
    for (group, resource, subresource, verb, without) in RIGHTS {
        let mut attributes = json!({"group": group, "resource": resource, "subresource": subresource, "verb": verb});
        let own = matches!(resource, "leases" | "configmaps");
        if own {
            attributes["namespace"] = json!(NAMESPACE);
        }
        let review = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes}});
        let answer = match ask(&access, &review).await {
            Ok(answer) => answer,
            Err(error) => {
                // The agent starts without the server too, so this is no reason to refuse.
                let message = format!("the rights of the account cannot be asked for: {error}");
                findings.push(Finding { fatal: false, message });
                break;
            }
        };
        if answer["status"]["allowed"] != true {
            let place = if own { format!(" in namespace {NAMESPACE}") } else { String::new() };
            let name = if subresource.is_empty() { resource.to_owned() } else { format!("{resource}/{subresource}") };
            let message = match without {
                None => format!("the account may not {verb} {name}: nothing works without it; apply deploy/rbac.yaml"),
                Some(what) => format!("the account may not {verb} {name}{place}: no {what}; apply deploy/rbac.yaml"),
            };
            findings.push(Finding { fatal: without.is_none(), message });
        }
    }
    Ok(findings)
}

async fn ask(access: &Access, review: &Value) -> Result<Value, String> {
    let request = Request::post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews")
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(review.to_string().into_bytes())
        .map_err(|error| error.to_string())?;
    match tokio::time::timeout(REQUEST_TIMEOUT, access.client().request(request)).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(describe(&error)),
        Err(_) => Err(format!("no answer within {REQUEST_TIMEOUT:?}")),
    }
}
