//! Asks a cluster what the account of a kubeconfig may do.

use std::time::Duration;

use http::Request;
use serde_json::{Value, json};

use super::access::{Access, SourceError};
use super::follow::describe;
use crate::config;

/// Limit for one question.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Group, resource, subresource, verb, and what does not work without it.
const RIGHTS: [(&str, &str, &str, &str, Option<&str>); 11] = [
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
        let attributes = json!({"group": group, "resource": resource, "subresource": subresource, "verb": verb});
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
            let name = if subresource.is_empty() { resource.to_owned() } else { format!("{resource}/{subresource}") };
            let message = match without {
                None => format!("the account may not {verb} {name}: nothing works without it; apply deploy/rbac.yaml"),
                Some(what) => format!("the account may not {verb} {name}: no {what}; apply deploy/rbac.yaml"),
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
