//! Validating admission policies, evaluated: what they match, what they say.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use cel::extractors::This;
use cel::{Context, ExecutionError, Program, Value as Cel};
use serde_json::{Value, json};

use super::access::User;
use super::store::{ApiError, Kind, Result};

/// Characters that an expression may have.
const EXPRESSION: usize = 100_000;

fn text<'value>(value: &'value Value, pointer: &str) -> &'value str {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

fn list<'value>(value: &'value Value, pointer: &str) -> &'value [Value] {
    value.pointer(pointer).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

fn contains(list: &[Value], wanted: &str) -> bool {
    list.iter().any(|item| item == wanted || item == "*")
}

/// What is wrong with a policy: field and message.
pub(super) fn check(policy: &Value) -> std::result::Result<(), (String, String)> {
    let fault = |field: String, message: &str| Err((field, message.to_owned()));
    let rules = list(policy, "/spec/matchConstraints/resourceRules");
    if rules.is_empty() {
        return fault("spec.matchConstraints.resourceRules".into(), "Required value");
    }
    for (index, rule) in rules.iter().enumerate() {
        for field in ["apiGroups", "apiVersions", "operations", "resources"] {
            if list(rule, &format!("/{field}")).is_empty() {
                return fault(format!("spec.matchConstraints.resourceRules[{index}].{field}"), "Required value");
            }
        }
        for operation in list(rule, "/operations") {
            if !matches!(operation.as_str(), Some("*" | "CREATE" | "UPDATE" | "DELETE" | "CONNECT")) {
                return fault(format!("spec.matchConstraints.resourceRules[{index}].operations"), "Unsupported value");
            }
        }
    }
    if !matches!(text(policy, "/spec/failurePolicy"), "" | "Fail" | "Ignore") {
        return fault("spec.failurePolicy".into(), "Unsupported value");
    }
    if list(policy, "/spec/validations").is_empty() && list(policy, "/spec/auditAnnotations").is_empty() {
        return fault(
            "spec.validations".into(),
            "Required value: validations or auditAnnotations must contain at least one item",
        );
    }
    for (field, named) in [("matchConditions", true), ("variables", true), ("validations", false)] {
        let mut names = BTreeSet::new();
        for (index, entry) in list(policy, &format!("/spec/{field}")).iter().enumerate() {
            let place = |name: &str| format!("spec.{field}[{index}].{name}");
            if named && (text(entry, "/name").is_empty() || !names.insert(text(entry, "/name"))) {
                return fault(place("name"), "Required or duplicate value");
            }
            if text(entry, "/message").contains('\n') {
                return fault(place("message"), "message must not contain line breaks");
            }
            let expression = text(entry, "/expression");
            if expression.trim().is_empty() {
                return fault(place("expression"), "Required value: expression is not specified");
            }
            let size = expression.chars().count();
            if size > EXPRESSION {
                let message = format!(
                    "compilation failed: ERROR: <input>:-1:0: expression code point size exceeds limit: size: {size}, limit {EXPRESSION}"
                );
                return fault(place("expression"), &message);
            }
            if let Err(error) = Program::compile(expression) {
                return fault(place("expression"), &format!("compilation failed: {error}"));
            }
        }
    }
    Ok(())
}

/// A request that would change something.
pub(super) struct Change<'a> {
    pub(super) user: &'a User,
    pub(super) operation: &'static str,
    pub(super) kind: &'static Kind,
    pub(super) subresource: &'static str,
    pub(super) namespace: Option<&'a Value>,
    pub(super) name: &'a str,
    pub(super) old: Option<&'a Value>,
    pub(super) new: &'a Value,
}

/// Whether bound policies admit a change.
pub(super) fn admit<'a>(policies: impl Iterator<Item = (&'a Value, &'a Value)>, change: &Change<'_>) -> Result<()> {
    for (policy, binding) in policies {
        if !matches(policy, change) || !list(binding, "/spec/validationActions").contains(&json!("Deny")) {
            continue;
        }
        let denied = match evaluate(&policy["spec"], change) {
            Ok(denied) => denied,
            Err(_) if text(policy, "/spec/failurePolicy") == "Ignore" => None,
            Err(error) => Some(error),
        };
        let Some(message) = denied else { continue };
        let message = format!(
            "{} \"{}\" is forbidden: ValidatingAdmissionPolicy '{}' with binding '{}' denied request: {message}",
            change.kind.plural,
            change.name,
            text(policy, "/metadata/name"),
            text(binding, "/metadata/name")
        );
        return Err(ApiError::new(422, "Invalid", message));
    }
    Ok(())
}

fn matches(policy: &Value, change: &Change<'_>) -> bool {
    let (group, version) = change.kind.api_version.split_once('/').unwrap_or(("", change.kind.api_version));
    let slash = if change.subresource.is_empty() { "" } else { "/" };
    let resource = format!("{}{slash}{}", change.kind.plural, change.subresource);
    list(policy, "/spec/matchConstraints/resourceRules").iter().any(|rule| {
        contains(list(rule, "/apiGroups"), group)
            && contains(list(rule, "/apiVersions"), version)
            && contains(list(rule, "/operations"), change.operation)
            && list(rule, "/resources").iter().any(|wanted| wanted == resource.as_str() || wanted == "*/*")
    })
}

fn context(change: &Change<'_>) -> std::result::Result<Context<'static, 'static>, String> {
    let mut context = Context::default();
    context
        .add_function("cidr", |text: Arc<String>| -> std::result::Result<Arc<String>, ExecutionError> {
            text.parse::<ipnet::IpNet>().map_err(|error| ExecutionError::function_error("cidr", error))?;
            Ok(text)
        })
        .map_err(|error| error.to_string())?;
    context
        .add_function(
            "containsIP",
            |This(net): This<Arc<String>>, address: Arc<String>| -> std::result::Result<bool, ExecutionError> {
                let fault = |error: String| ExecutionError::function_error("containsIP", error);
                let net: ipnet::IpNet = net.parse().map_err(|_| fault("not a prefix".into()))?;
                let address: IpAddr = address.parse().map_err(|_| fault("not an address".into()))?;
                Ok(net.contains(&address))
            },
        )
        .map_err(|error| error.to_string())?;
    let request = json!({
        "namespace": change.namespace.map_or("", |namespace| text(namespace, "/metadata/name")), "name": change.name,
        "operation": change.operation, "subResource": change.subresource,
        "userInfo": {"username": change.user.name, "groups": change.user.groups},
    });
    let null = Value::Null;
    for (name, value) in [
        ("request", &request),
        ("object", change.new),
        ("oldObject", change.old.unwrap_or(&null)),
        ("namespaceObject", change.namespace.unwrap_or(&null)),
    ] {
        context.add_variable(name, value).map_err(|error| error.to_string())?;
    }
    Ok(context)
}

fn run(context: &Context<'_, '_>, entry: &Value) -> std::result::Result<Cel, String> {
    let expression = text(entry, "/expression");
    let program = Program::compile(expression).map_err(|error| format!("expression '{expression}': {error}"))?;
    program.execute(context).map_err(|error| format!("expression '{expression}' resulted in error: {error}"))
}

/// Why the policy denies the change; an error if it cannot say.
fn evaluate(spec: &Value, change: &Change<'_>) -> std::result::Result<Option<String>, String> {
    let mut context = context(change)?;
    for condition in list(spec, "/matchConditions") {
        if run(&context, condition)? != Cel::Bool(true) {
            return Ok(None);
        }
    }
    let mut variables: HashMap<String, Cel> = HashMap::new();
    for variable in list(spec, "/variables") {
        context.add_variable_from_value("variables", variables.clone());
        variables.insert(text(variable, "/name").to_owned(), run(&context, variable)?);
    }
    context.add_variable_from_value("variables", variables);
    for rule in list(spec, "/validations") {
        if run(&context, rule)? != Cel::Bool(true) {
            let message = text(rule, "/message");
            let message = if message.is_empty() {
                format!("failed expression: {}", text(rule, "/expression"))
            } else {
                message.to_owned()
            };
            return Ok(Some(message));
        }
    }
    Ok(None)
}
