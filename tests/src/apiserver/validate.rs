//! What a real server says of objects before it keeps them: fields that it does not know, values that it does not take.

use std::collections::BTreeSet;
use std::net::IpAddr;

use k8s_openapi::api::{admissionregistration, coordination, core, discovery, rbac};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::admission;
use super::store::{ApiError, Kind, Result};

/// Bytes that the data of a ConfigMap may have.
const DATA_LIMIT: usize = 1 << 20;

fn typed<T: DeserializeOwned + Serialize>(object: &Value) -> std::result::Result<Value, String> {
    let read: T = serde_json::from_value(object.clone()).map_err(|error| error.to_string())?;
    serde_json::to_value(read).map_err(|error| error.to_string())
}

/// The object as the server reads it; `unknown` gets the fields that it does not have.
fn read(kind: &Kind, object: &Value) -> Result<(Value, Vec<String>)> {
    let read = match kind.name {
        "Service" => typed::<core::v1::Service>(object),
        "Node" => typed::<core::v1::Node>(object),
        "Namespace" => typed::<core::v1::Namespace>(object),
        "EndpointSlice" => typed::<discovery::v1::EndpointSlice>(object),
        "ConfigMap" => typed::<core::v1::ConfigMap>(object),
        "Lease" => typed::<coordination::v1::Lease>(object),
        "Event" => typed::<core::v1::Event>(object),
        "Secret" => typed::<core::v1::Secret>(object),
        "ServiceAccount" => typed::<core::v1::ServiceAccount>(object),
        "Role" => typed::<rbac::v1::Role>(object),
        "ClusterRole" => typed::<rbac::v1::ClusterRole>(object),
        "RoleBinding" => typed::<rbac::v1::RoleBinding>(object),
        "ClusterRoleBinding" => typed::<rbac::v1::ClusterRoleBinding>(object),
        "ValidatingAdmissionPolicy" => typed::<admissionregistration::v1::ValidatingAdmissionPolicy>(object),
        "ValidatingAdmissionPolicyBinding" => {
            typed::<admissionregistration::v1::ValidatingAdmissionPolicyBinding>(object)
        }
        other => Err(format!("no kind {other}")),
    };
    let read = read.map_err(|text| {
        ApiError::new(
            400,
            "BadRequest",
            format!("{} in version \"{}\" cannot be handled: {text}", kind.name, kind.api_version),
        )
    })?;
    let mut unknown = Vec::new();
    missing(object, &read, "", &mut unknown);
    Ok((read, unknown))
}

fn missing(given: &Value, read: &Value, place: &str, unknown: &mut Vec<String>) {
    match (given, read) {
        (Value::Object(given), Value::Object(read)) => {
            for (name, value) in given.iter().filter(|(_, value)| !value.is_null()) {
                let place = format!("{place}.{name}");
                match read.get(name) {
                    Some(read) => missing(value, read, &place, unknown),
                    None => unknown.push(place),
                }
            }
        }
        (Value::Array(given), Value::Array(read)) => {
            for (given, read) in given.iter().zip(read) {
                missing(given, read, place, unknown);
            }
        }
        _ => {}
    }
}

/// Refuses a time that has not the six digits of a fraction which some fields want.
pub(super) fn micro_times(kind: &Kind, given: &Value) -> Result<()> {
    let fields: &[&str] = match kind.name {
        "Lease" => &["/spec/acquireTime", "/spec/renewTime"],
        "Event" => &["/eventTime", "/series/lastObservedTime"],
        _ => &[],
    };
    let exact = |time: &str| {
        let fraction = time.get(19..).and_then(|rest| rest.strip_prefix('.')).unwrap_or_default();
        let digits = fraction.bytes().take_while(u8::is_ascii_digit).count();
        digits == 6 && fraction.len() > 6
    };
    for time in fields.iter().map(|field| text(given, field)).filter(|time| !time.is_empty()) {
        if !exact(time) {
            let message = format!(
                "{0} in version \"{1}\" cannot be handled as a {0}: parsing time \"{time}\" as \"2006-01-02T15:04:05.000000Z07:00\"",
                kind.name, kind.api_version
            );
            return Err(ApiError::new(400, "BadRequest", message));
        }
    }
    Ok(())
}

/// Refuses a configuration to apply that has fields which the server does not know, or two entries of one key: both are an error of its
/// own to a real server, without a reason.
pub(super) fn strict(kind: &Kind, config: &Value) -> Result<()> {
    let fault = |wrong: String| {
        let what = format!(
            "{}/{}; {}, Kind={}",
            text(config, "/metadata/namespace"),
            text(config, "/metadata/name"),
            kind.api_version,
            kind.name
        );
        Err(ApiError::new(500, "", format!("failed to create typed patch object ({what}): {wrong}")))
    };
    let (_, unknown) = read(kind, config)?;
    if let Some(field) = unknown.first() {
        return fault(format!("{field}: field not declared in schema"));
    }
    let mut types = BTreeSet::new();
    for condition in list(config, "/status/conditions") {
        let kind = text(condition, "/type");
        if !types.insert(kind) {
            return fault(format!(".status.conditions: duplicate entries for key [type=\"{kind}\"]"));
        }
    }
    Ok(())
}

/// Leaves out what the server does not know, and what is empty.
pub(super) fn prune(kind: &Kind, object: &mut Value) -> Result<()> {
    let (mut read, _) = read(kind, object)?;
    without_empty(&mut read, "");
    *object = read;
    Ok(())
}

/// Leaves out what is null or empty, as a server does.
pub(super) fn without_empty(value: &mut Value, name: &str) {
    match value {
        Value::Object(map) => {
            // The map of managed fields is a form of its own.
            if name == "fieldsV1" {
                return;
            }
            for (name, value) in map.iter_mut() {
                without_empty(value, name);
            }
            map.retain(|name, value| match value {
                Value::Null => false,
                Value::Array(items) => !items.is_empty() || name == "endpoints",
                Value::Object(inner) => {
                    !inner.is_empty()
                        || !matches!(
                            name.as_str(),
                            "labels" | "annotations" | "data" | "binaryData" | "selector" | "matchLabels"
                        )
                }
                _ => true,
            });
        }
        Value::Array(items) => items.iter_mut().for_each(|item| without_empty(item, "")),
        _ => {}
    }
}

/// What is wrong: field and message.
type Fault = (String, String);

fn text<'value>(value: &'value Value, pointer: &str) -> &'value str {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

fn list<'value>(value: &'value Value, pointer: &str) -> &'value [Value] {
    value.pointer(pointer).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// Whether a text is a label of a DNS name.
pub(super) fn is_label(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    (1..=63).contains(&text.len())
        && text.bytes().all(|byte| inner(byte) || byte == b'-')
        && text.bytes().next().is_some_and(inner)
        && text.bytes().last().is_some_and(inner)
}

fn is_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_label)
}

fn is_qualified(text: &str) -> bool {
    let (prefix, name) = text.split_once('/').map_or((None, text), |(prefix, name)| (Some(prefix), name));
    let inner = |byte: u8| byte.is_ascii_alphanumeric();
    prefix.is_none_or(is_subdomain)
        && (1..=63).contains(&name.len())
        && name.bytes().all(|byte| inner(byte) || matches!(byte, b'-' | b'_' | b'.'))
        && name.bytes().next().is_some_and(inner)
        && name.bytes().last().is_some_and(inner)
}

/// Checks an object that is to replace another, or to be made.
pub(super) fn check(kind: &Kind, object: &Value, old: Option<&Value>) -> Result<()> {
    let name = text(object, "/metadata/name");
    let fault = metadata(kind, object, old).and_then(|()| match kind.name {
        "EndpointSlice" => slice(object, old),
        "Event" => event(object),
        "Lease" => lease(object),
        "ConfigMap" => config_map(object),
        "Node" => node(object),
        "Role" | "ClusterRole" => role(kind, object),
        "RoleBinding" | "ClusterRoleBinding" => binding(kind, object, old),
        "ValidatingAdmissionPolicy" => admission::check(object),
        "ValidatingAdmissionPolicyBinding" => policy_binding(object),
        _ => Ok(()),
    });
    fault.map_err(|(field, message)| ApiError::invalid(&format!("{} \"{name}\"", kind.name), &field, &message))
}

fn refuse<T>(field: impl Into<String>, message: impl Into<String>) -> std::result::Result<T, Fault> {
    Err((field.into(), message.into()))
}

fn metadata(kind: &Kind, object: &Value, old: Option<&Value>) -> std::result::Result<(), Fault> {
    let name = text(object, "/metadata/name");
    let good = match kind.name {
        "Namespace" => is_label(name),
        // The relaxed form is newer than the oldest server that lbd is for.
        "Service" => is_label(name) && name.bytes().next().is_some_and(|byte| byte.is_ascii_lowercase()),
        "Role" | "ClusterRole" | "RoleBinding" | "ClusterRoleBinding" => {
            !name.is_empty() && !matches!(name, "." | "..") && !name.contains(['/', '%'])
        }
        _ => is_subdomain(name),
    };
    if !good {
        return refuse("metadata.name", format!("Invalid value: \"{name}\": not a name for this kind"));
    }
    for (field, values) in [("labels", true), ("annotations", false)] {
        for (key, value) in object["metadata"][field].as_object().into_iter().flatten() {
            let value = value.as_str().unwrap_or_default();
            if !is_qualified(key) {
                return refuse(
                    format!("metadata.{field}"),
                    format!("Invalid value: \"{key}\": name part must consist of …"),
                );
            }
            if values && !value.is_empty() && (value.contains('/') || !is_qualified(value)) {
                return refuse(
                    format!("metadata.{field}"),
                    format!("Invalid value: \"{value}\": a valid label must be …"),
                );
            }
        }
    }
    let finalizers = |object: &Value| -> BTreeSet<String> {
        list(object, "/metadata/finalizers").iter().filter_map(Value::as_str).map(str::to_owned).collect()
    };
    for finalizer in finalizers(object) {
        if !is_qualified(&finalizer) {
            return refuse("metadata.finalizers", format!("Invalid value: \"{finalizer}\""));
        }
    }
    if let Some(old) = old.filter(|old| !old["metadata"]["deletionTimestamp"].is_null())
        && !finalizers(object).is_subset(&finalizers(old))
    {
        return refuse(
            "metadata.finalizers",
            "Forbidden: no new finalizers can be added if the object is being deleted",
        );
    }
    Ok(())
}

fn slice(object: &Value, old: Option<&Value>) -> std::result::Result<(), Fault> {
    let family = text(object, "/addressType");
    if !matches!(family, "IPv4" | "IPv6" | "FQDN") {
        return refuse("addressType", format!("Unsupported value: \"{family}\""));
    }
    if old.is_some_and(|old| text(old, "/addressType") != family) {
        return refuse("addressType", "Invalid value: field is immutable");
    }
    for (index, endpoint) in list(object, "/endpoints").iter().enumerate() {
        let addresses = list(endpoint, "/addresses");
        let place = format!("endpoints[{index}].addresses");
        if !(1..=100).contains(&addresses.len()) {
            return refuse(place, "must contain at least 1 address and at most 100");
        }
        for address in addresses.iter().filter_map(Value::as_str).filter(|_| family != "FQDN") {
            let local = match (address.parse::<IpAddr>(), family) {
                (Ok(IpAddr::V4(address)), "IPv4") => address.is_link_local(),
                (Ok(IpAddr::V6(address)), "IPv6") => address.is_unicast_link_local(),
                _ => return refuse(place, format!("Invalid value: \"{address}\": must be a valid {family} address")),
            };
            let address = address.parse::<IpAddr>().unwrap_or(IpAddr::from([0, 0, 0, 0]));
            if local || address.is_loopback() || address.is_unspecified() || address.is_multicast() {
                return refuse(
                    place,
                    format!("Invalid value: \"{address}\": may not be loopback, link-local, unspecified or multicast"),
                );
            }
        }
    }
    let mut names = BTreeSet::new();
    for (index, port) in list(object, "/ports").iter().enumerate() {
        let name = text(port, "/name");
        if !name.is_empty() && !is_label(name) || !names.insert(name) {
            return refuse(format!("ports[{index}].name"), format!("Invalid or duplicate value: \"{name}\""));
        }
        if !matches!(text(port, "/protocol"), "" | "TCP" | "UDP" | "SCTP") {
            return refuse(format!("ports[{index}].protocol"), "Unsupported value");
        }
    }
    Ok(())
}

fn event(object: &Value) -> std::result::Result<(), Fault> {
    let (own, involved) = (text(object, "/metadata/namespace"), text(object, "/involvedObject/namespace"));
    if involved.is_empty() && own != "default" || !involved.is_empty() && involved != own {
        return refuse(
            "involvedObject.namespace",
            format!("Invalid value: \"{involved}\": does not match event.namespace"),
        );
    }
    if object["eventTime"].is_null() {
        return Ok(());
    }
    for field in ["reportingComponent", "reportingInstance", "action", "reason"] {
        if text(object, &format!("/{field}")).is_empty() {
            return refuse(field, "Required value");
        }
    }
    Ok(())
}

fn lease(object: &Value) -> std::result::Result<(), Fault> {
    let number = |field: &str| object["spec"][field].as_i64();
    if number("leaseDurationSeconds").is_some_and(|seconds| seconds <= 0) {
        return refuse("spec.leaseDurationSeconds", "must be greater than 0");
    }
    if number("leaseTransitions").is_some_and(|count| count < 0) {
        return refuse("spec.leaseTransitions", "must be greater than or equal to 0");
    }
    Ok(())
}

fn config_map(object: &Value) -> std::result::Result<(), Fault> {
    let mut size = 0;
    for (key, value) in object["data"].as_object().into_iter().flatten() {
        let good = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        if key.is_empty() || key.len() > 253 || !key.bytes().all(good) {
            return refuse(format!("data[{key}]"), "Invalid value: a valid config key must consist of …");
        }
        size += value.as_str().map_or(0, str::len);
    }
    if size > DATA_LIMIT {
        return refuse("", format!("Too long: may not be more than {DATA_LIMIT} bytes"));
    }
    Ok(())
}

fn node(object: &Value) -> std::result::Result<(), Fault> {
    let mut seen = BTreeSet::new();
    for (index, taint) in list(object, "/spec/taints").iter().enumerate() {
        let (key, effect) = (text(taint, "/key"), text(taint, "/effect"));
        if !is_qualified(key) || !seen.insert((key, effect)) {
            return refuse(format!("spec.taints[{index}].key"), "Invalid or duplicate value");
        }
        if !matches!(effect, "NoSchedule" | "PreferNoSchedule" | "NoExecute") {
            return refuse(format!("spec.taints[{index}].effect"), "Unsupported value");
        }
    }
    Ok(())
}

fn role(kind: &Kind, object: &Value) -> std::result::Result<(), Fault> {
    for (index, rule) in list(object, "/rules").iter().enumerate() {
        let place = |field: &str| format!("rules[{index}].{field}");
        if list(rule, "/verbs").is_empty() {
            return refuse(place("verbs"), "Required value: verbs must contain at least one value");
        }
        if !list(rule, "/nonResourceURLs").is_empty() {
            if kind.namespaced {
                return refuse(place("nonResourceURLs"), "namespaced rules cannot apply to non-resource URLs");
            }
            continue;
        }
        for field in ["apiGroups", "resources"] {
            if list(rule, &format!("/{field}")).is_empty() {
                return refuse(place(field), "Required value: resource rules must supply at least one");
            }
        }
    }
    Ok(())
}

fn binding(kind: &Kind, object: &Value, old: Option<&Value>) -> std::result::Result<(), Fault> {
    let role = &object["roleRef"];
    if text(role, "/apiGroup") != "rbac.authorization.k8s.io" {
        return refuse("roleRef.apiGroup", "Unsupported value");
    }
    if !(text(role, "/kind") == "ClusterRole" || kind.namespaced && text(role, "/kind") == "Role") {
        return refuse("roleRef.kind", "Unsupported value");
    }
    if text(role, "/name").is_empty() {
        return refuse("roleRef.name", "Required value");
    }
    if old.is_some_and(|old| old["roleRef"] != *role) {
        return refuse("roleRef", "Invalid value: cannot change roleRef");
    }
    for (index, subject) in list(object, "/subjects").iter().enumerate() {
        let account = text(subject, "/kind") == "ServiceAccount";
        if text(subject, "/name").is_empty() || account && text(subject, "/namespace").is_empty() {
            return refuse(format!("subjects[{index}]"), "Required value: name and, of an account, namespace");
        }
    }
    Ok(())
}

fn policy_binding(object: &Value) -> std::result::Result<(), Fault> {
    if text(object, "/spec/policyName").is_empty() {
        return refuse("spec.policyName", "Required value");
    }
    let actions = list(object, "/spec/validationActions");
    if actions.is_empty() {
        return refuse("spec.validationActions", "Required value");
    }
    if actions.iter().any(|action| !matches!(action.as_str(), Some("Deny" | "Warn" | "Audit"))) {
        return refuse("spec.validationActions", "Unsupported value");
    }
    Ok(())
}
