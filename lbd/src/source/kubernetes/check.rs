//! Asks a cluster what the account of a kubeconfig may do.

use std::time::Duration;

use http::Request;
use serde_json::{Value, json};

use super::access::{Access, SourceError};
use super::follow::describe;
use super::own_object;
use super::rights::{self, RIGHTS, Reach};
use crate::config::Config;

/// Limit for one question.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Something that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The agent can do nothing with this cluster.
    pub fatal: bool,
    /// What, and what to do.
    pub message: String,
}

/// Checks the kubeconfig, the server and the rights of the account, as this configuration needs them. Changes nothing. A configuration
/// without a cluster has nothing to check.
pub async fn check(config: &Config) -> Result<Vec<Finding>, SourceError> {
    let Some(settings) = &config.hub.kubernetes else { return Ok(Vec::new()) };
    let access = Access::open(settings)?;
    let mut findings = Vec::new();
    let own = own_object(&config.hub.name);
    for right in RIGHTS {
        let (resource, subresource) = right.resource.split_once('/').unwrap_or((right.resource, ""));
        let places = rights::places(config, right.reach);
        let places: Vec<_> = places.map_or_else(|| vec![""], |places| places.into_iter().collect());
        for namespace in places {
            // Of our own objects the right is for the one that is ours; creating knows no names.
            let name = if right.reach == Reach::Own && right.verb != "create" { own.as_str() } else { "" };
            let attributes = json!({"group": right.group, "resource": resource, "subresource": subresource,
                "verb": right.verb, "namespace": namespace, "name": name});
            let review = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": attributes}});
            let answer = match ask(&access, &review).await {
                Ok(answer) => answer,
                Err(error) => {
                    // The agent starts without the server too, so this is no reason to refuse.
                    let message = format!("the rights of the account cannot be asked for: {error}");
                    findings.push(Finding { fatal: false, message });
                    return Ok(findings);
                }
            };
            if answer["status"]["allowed"] != true {
                let place = if namespace.is_empty() { String::new() } else { format!(" in namespace {namespace}") };
                let without =
                    right.without.map_or_else(|| "nothing works without it".to_owned(), |what| format!("no {what}"));
                let message = format!(
                    "the account may not {} {}{place}: {without}; apply what `lbd rbac` prints",
                    right.verb, right.resource
                );
                findings.push(Finding { fatal: right.without.is_none(), message });
            }
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
