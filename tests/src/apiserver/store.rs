//! The state of the server: objects, their versions, and what a real server does to Services on the way in.

use std::collections::hash_map::RandomState;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::access::{self, User};
use super::fields::{self, Manager, Managers};
use super::{admission, validate};

/// Changes kept for watches.
const LOG_LENGTH: usize = 200_000;

/// A kind of object.
#[derive(Debug)]
pub(super) struct Kind {
    pub(super) plural: &'static str,
    pub(super) name: &'static str,
    pub(super) api_version: &'static str,
    pub(super) namespaced: bool,
    pub(super) has_status: bool,
}

const fn kind(
    plural: &'static str,
    name: &'static str,
    api_version: &'static str,
    namespaced: bool,
    has_status: bool,
) -> Kind {
    Kind { plural, name, api_version, namespaced, has_status }
}

impl Kind {
    /// Whether a PUT of one that is not there makes it.
    fn made_by_put(&self) -> bool {
        matches!(self.name, "Service" | "Lease" | "Event") || self.api_version == RBAC
    }

    /// Whether a PUT may leave out the version that it replaces.
    fn replaced_unseen(&self) -> bool {
        self.name != "Lease" && self.api_version != ADMISSION
    }

    /// Name of the resource, with its group.
    pub(super) fn resource(&self) -> String {
        let group = self.api_version.split_once('/').map_or(String::new(), |(group, _)| format!(".{group}"));
        format!("{}{group}", self.plural)
    }
}

/// Everything that is served.
pub(super) const KINDS: [Kind; 15] = [
    kind("services", "Service", "v1", true, true),
    kind("nodes", "Node", "v1", false, true),
    kind("namespaces", "Namespace", "v1", false, true),
    kind("endpointslices", "EndpointSlice", "discovery.k8s.io/v1", true, false),
    kind("configmaps", "ConfigMap", "v1", true, false),
    kind("leases", "Lease", "coordination.k8s.io/v1", true, false),
    kind("events", "Event", "v1", true, false),
    kind("secrets", "Secret", "v1", true, false),
    kind("serviceaccounts", "ServiceAccount", "v1", true, false),
    kind("roles", "Role", RBAC, true, false),
    kind("rolebindings", "RoleBinding", RBAC, true, false),
    kind("clusterroles", "ClusterRole", RBAC, false, false),
    kind("clusterrolebindings", "ClusterRoleBinding", RBAC, false, false),
    kind("validatingadmissionpolicies", "ValidatingAdmissionPolicy", ADMISSION, false, true),
    kind("validatingadmissionpolicybindings", "ValidatingAdmissionPolicyBinding", ADMISSION, false, false),
];

const RBAC: &str = "rbac.authorization.k8s.io/v1";
const ADMISSION: &str = "admissionregistration.k8s.io/v1";
const NAMESPACES: usize = 2;

/// Namespaces that cannot be deleted.
const PROTECTED: [&str; 2] = ["default", "kube-system"];

/// An answer other than success.
#[derive(Clone, Debug, Default)]
pub(super) struct ApiError {
    pub(super) code: u16,
    pub(super) reason: String,
    pub(super) message: String,
    pub(super) causes: Vec<Value>,
    pub(super) retry_after: Option<u32>,
}

impl ApiError {
    pub(super) fn new(code: u16, reason: &str, message: impl Into<String>) -> Self {
        Self { code, reason: reason.into(), message: message.into(), ..Self::default() }
    }

    pub(super) fn invalid(what: &str, field: &str, message: &str) -> Self {
        let mut error = Self::new(422, "Invalid", format!("{what} is invalid: {field}: {message}"));
        error.causes.push(json!({"reason": "FieldValueInvalid", "message": message, "field": field}));
        error
    }

    pub(super) fn status(&self) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "code": self.code, "reason": self.reason, "message": self.message,
        });
        if !self.causes.is_empty() {
            status["details"]["causes"] = json!(self.causes);
        }
        if let Some(seconds) = self.retry_after {
            status["details"]["retryAfterSeconds"] = json!(seconds);
        }
        status
    }
}

type Key = (String, String);
pub(super) type Result<T> = std::result::Result<T, ApiError>;

/// A change, as a watch tells it.
#[derive(Clone, Debug)]
pub(super) struct Change {
    pub(super) version: u64,
    pub(super) kind: usize,
    pub(super) verb: &'static str,
    pub(super) object: Arc<Value>,
}

/// Who changes something, and under what name.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    pub(super) user: User,
    pub(super) manager: String,
}

impl Caller {
    /// The server itself, or a test by its hand.
    pub(super) fn server(manager: &str) -> Self {
        Self { user: User::administrator(), manager: manager.to_owned() }
    }
}

/// Where an object is.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) kind: usize,
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) status: bool,
}

impl Target {
    fn key(&self) -> Key {
        (self.namespace.clone(), self.name.clone())
    }

    fn kind(&self) -> &'static Kind {
        &KINDS[self.kind]
    }

    fn not_found(&self) -> ApiError {
        ApiError::new(404, "NotFound", format!("{} \"{}\" not found", self.kind().plural, self.name))
    }
}

/// All state.
#[derive(Clone, Debug)]
pub(super) struct Store {
    pub(super) version: u64,
    pub(super) compacted: u64,
    objects: Vec<BTreeMap<Key, Arc<Value>>>,
    log: VecDeque<Change>,
    /// Whose a NodePort is: a number has one owner, whatever the protocol.
    node_ports: BTreeMap<u16, Key>,
    ports_of: BTreeMap<Key, BTreeSet<u16>>,
    node_port_range: (u16, u16),
    cluster_ips: u32,
    /// Since when roles, bindings and policies are as they are.
    pub(super) since: BTreeMap<(usize, Key), Instant>,
    /// Whether Services can have both families.
    pub(super) dual_stack: bool,
}

pub(super) fn now() -> String {
    Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

pub(super) fn uid() -> String {
    let (a, b) = (random(), random());
    format!(
        "{:08x}-{:04x}-4{:03x}-{:04x}-{:012x}",
        a >> 32,
        (a >> 16) & 0xffff,
        a & 0xfff,
        0x8000 | (b >> 48) & 0x3fff,
        b & 0xffff_ffff_ffff
    )
}

fn text<'value>(value: &'value Value, pointer: &str) -> &'value str {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

/// The families that a Service gets for those that it asks for.
fn families(spec: &mut Value, dual_stack: bool) -> std::result::Result<Vec<String>, (&'static str, &'static str)> {
    let mut families: Vec<String> =
        spec["ipFamilies"].as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect();
    if spec["ipFamilyPolicy"].is_null() {
        spec["ipFamilyPolicy"] = json!(if families.len() > 1 { "RequireDualStack" } else { "SingleStack" });
    }
    if families.iter().any(|family| !matches!(family.as_str(), "IPv4" | "IPv6")) || families.len() > 2 {
        return Err(("spec.ipFamilies", "Unsupported value"));
    }
    if families.len() == 2 && families[0] == families[1] {
        return Err(("spec.ipFamilies", "Duplicate value"));
    }
    if families.iter().any(|family| family == "IPv6") && !dual_stack {
        return Err(("spec.ipFamilies[0]", "Invalid value: \"IPv6\": not configured on this cluster"));
    }
    if families.is_empty() {
        families.push("IPv4".into());
    }
    let other = if families[0] == "IPv4" { "IPv6" } else { "IPv4" };
    match spec["ipFamilyPolicy"].as_str().unwrap_or_default() {
        "SingleStack" => families.truncate(1),
        "PreferDualStack" if !dual_stack => families.truncate(1),
        "RequireDualStack" if !dual_stack => {
            return Err((
                "spec.ipFamilyPolicy",
                "Invalid value: \"RequireDualStack\": this cluster is not configured for dual-stack services",
            ));
        }
        "PreferDualStack" | "RequireDualStack" => {
            if families.len() == 1 {
                families.push(other.into());
            }
        }
        _ => return Err(("spec.ipFamilyPolicy", "Unsupported value")),
    }
    Ok(families)
}

impl Store {
    pub(super) fn new() -> Self {
        let mut store = Self {
            version: 1000,
            compacted: 0,
            objects: KINDS.iter().map(|_| BTreeMap::new()).collect(),
            log: VecDeque::new(),
            node_ports: BTreeMap::new(),
            ports_of: BTreeMap::new(),
            node_port_range: (30000, 32767),
            cluster_ips: 0,
            since: BTreeMap::new(),
            dual_stack: false,
        };
        for namespace in ["default", "kube-system", "lbd-system"] {
            let _ = store.ensure_namespace(namespace);
        }
        store
    }

    pub(super) fn ensure_namespace(&mut self, name: &str) -> Result<()> {
        let target = Target { kind: NAMESPACES, namespace: String::new(), name: name.to_owned(), status: false };
        if self.objects[NAMESPACES].contains_key(&target.key()) {
            return Ok(());
        }
        self.create(&target, json!({"metadata": {"name": name}}), &Caller::server("apiserver")).map(|_| ())
    }

    /// An object by its key.
    pub(super) fn object(&self, kind: usize, key: &(String, String)) -> Option<&Arc<Value>> {
        self.objects[kind].get(key)
    }

    fn namespace(&self, name: &str) -> Option<&Arc<Value>> {
        self.objects[NAMESPACES].get(&(String::new(), name.to_owned()))
    }

    pub(super) fn get(&self, target: &Target) -> Result<Arc<Value>> {
        self.objects[target.kind].get(&target.key()).cloned().ok_or_else(|| target.not_found())
    }

    /// Objects of a kind after a key, in order.
    pub(super) fn list(&self, kind: usize, after: Option<&Key>) -> impl Iterator<Item = (&Key, &Arc<Value>)> {
        let from = after.map_or(std::ops::Bound::Unbounded, std::ops::Bound::Excluded);
        self.objects[kind].range::<Key, _>((from, std::ops::Bound::Unbounded))
    }

    /// Changes of a kind after a version; `None` if they are not all known any more.
    pub(super) fn changes(&self, kind: usize, after: u64) -> Option<impl Iterator<Item = &Change>> {
        if after < self.log.front().map_or(0, |change| change.version.saturating_sub(1)) && self.log.len() >= LOG_LENGTH
        {
            return None;
        }
        let from = self.log.partition_point(|change| change.version <= after);
        Some(self.log.range(from..).filter(move |change| change.kind == kind))
    }

    fn record(&mut self, target: &Target, verb: &'static str, object: Arc<Value>) {
        self.log.push_back(Change { version: self.version, kind: target.kind, verb, object });
        if self.log.len() > LOG_LENGTH {
            self.log.pop_front();
        }
    }

    fn put(&mut self, target: &Target, verb: &'static str, mut object: Value) -> Arc<Value> {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let object = Arc::new(object);
        if target.kind().api_version == RBAC || target.kind().api_version == ADMISSION {
            self.since.insert((target.kind, target.key()), Instant::now());
        }
        if verb == "DELETED" {
            self.objects[target.kind].remove(&target.key());
            if target.kind().name == "Service" {
                self.free_ports(&target.key());
            }
        } else {
            self.objects[target.kind].insert(target.key(), Arc::clone(&object));
        }
        self.record(target, verb, Arc::clone(&object));
        object
    }

    /// Loses an object: no watch is told.
    pub(super) fn forget(&mut self, kind: usize, namespace: &str, name: &str) {
        self.version += 1;
        let key = (namespace.to_owned(), name.to_owned());
        self.objects[kind].remove(&key);
        self.free_ports(&key);
    }

    fn free_ports(&mut self, key: &Key) {
        for port in self.ports_of.remove(key).unwrap_or_default() {
            self.node_ports.remove(&port);
        }
    }

    pub(super) fn create(&mut self, target: &Target, object: Value, caller: &Caller) -> Result<Arc<Value>> {
        self.create_by(target, object, caller, None)
    }

    /// With the managers of what was applied, or as an update by the caller.
    fn create_by(
        &mut self,
        target: &Target,
        mut object: Value,
        caller: &Caller,
        managers: Option<Managers>,
    ) -> Result<Arc<Value>> {
        let kind = target.kind();
        if self.objects[target.kind].contains_key(&target.key()) {
            let message = format!("{} \"{}\" already exists", kind.plural, target.name);
            return Err(ApiError::new(409, "AlreadyExists", message));
        }
        if kind.namespaced {
            let Some(namespace) = self.namespace(&target.namespace) else {
                return Err(ApiError::new(404, "NotFound", format!("namespaces \"{}\" not found", target.namespace)));
            };
            if !namespace["metadata"]["deletionTimestamp"].is_null() {
                let message = format!(
                    "{} \"{}\" is forbidden: unable to create new content in namespace {} because it is being terminated",
                    kind.plural, target.name, target.namespace
                );
                let mut error = ApiError::new(403, "Forbidden", message);
                error.causes = vec![json!({"reason": "NamespaceTerminating", "field": "metadata.namespace",
                    "message": format!("namespace {} is being terminated", target.namespace)})];
                return Err(error);
            }
        }
        object["apiVersion"] = json!(kind.api_version);
        object["kind"] = json!(kind.name);
        if let Some(map) = object.as_object_mut().filter(|_| kind.name == "Service") {
            map.remove("status");
        }
        let time = now();
        let metadata = &mut object["metadata"];
        metadata["name"] = json!(target.name);
        if kind.namespaced {
            metadata["namespace"] = json!(target.namespace);
        }
        metadata["uid"] = json!(uid());
        metadata["creationTimestamp"] = json!(time);
        if let Some(metadata) = metadata.as_object_mut() {
            for name in ["deletionTimestamp", "resourceVersion", "managedFields", "generateName", "selfLink"] {
                metadata.remove(name);
            }
        }
        if target.kind == NAMESPACES {
            metadata["labels"]["kubernetes.io/metadata.name"] = json!(target.name);
            object["spec"]["finalizers"] = json!(["kubernetes"]);
            object["status"] = json!({"phase": "Active"});
        }
        self.prepare(target, &mut object, None, caller)?;
        let managers = managers.unwrap_or_else(|| {
            let mut managers = Managers::default();
            let manager = Manager { name: caller.manager.clone(), apply: false, status: false };
            managers.updated(kind.name, &manager, &json!({}), &object, &time);
            managers
        });
        managers.store(&mut object, kind.api_version);
        Ok(self.put(target, "ADDED", object))
    }

    /// Replaces an object by another; of some kinds, also one that is not there.
    pub(super) fn replace(&mut self, target: &Target, new: Value, caller: &Caller) -> Result<Arc<Value>> {
        let kind = target.kind();
        match self.get(target) {
            Err(error) if !kind.made_by_put() || target.status => return Err(error),
            Err(_) => {
                Self::check_uid_precondition(target, &json!({}), &new)?;
                return self.create(target, new, caller);
            }
            Ok(_) => {}
        }
        if !kind.replaced_unseen() && text(&new, "/metadata/resourceVersion").is_empty() {
            return Err(ApiError::invalid(
                &format!("{} \"{}\"", kind.resource(), target.name),
                "metadata.resourceVersion",
                "Invalid value: 0: must be specified for an update",
            ));
        }
        self.update(target, caller, |old| {
            Self::check_uid_precondition(target, old, &new)?;
            Ok(new)
        })
    }

    /// Replaces an object by what `change` makes of it.
    pub(super) fn update(
        &mut self,
        target: &Target,
        caller: &Caller,
        change: impl FnOnce(&Value) -> Result<Value>,
    ) -> Result<Arc<Value>> {
        let old = self.get(target)?;
        let mut new = change(&old)?;
        Self::check_preconditions(target, &old, &new)?;
        Self::keep_other_half(target, &old, &mut new);
        self.prepare(target, &mut new, Some(&old), caller)?;
        let mut managers = Managers::of(&old);
        let manager = Manager { name: caller.manager.clone(), apply: false, status: target.status };
        managers.updated(target.kind().name, &manager, &old, &new, &now());
        Ok(self.finish(target, &old, new, &managers))
    }

    /// Server-side apply.
    pub(super) fn apply(
        &mut self,
        target: &Target,
        mut config: Value,
        caller: &Caller,
        force: bool,
    ) -> Result<Arc<Value>> {
        let kind = target.kind();
        validate::strict(kind, &config)?;
        let manager = Manager { name: caller.manager.clone(), apply: true, status: target.status };
        let old = match self.get(target) {
            Ok(old) => old,
            Err(error) if target.status => return Err(error),
            Err(_) if !text(&config, "/metadata/uid").is_empty() => {
                let message = "uid mismatch: the provided object specified uid, and no existing object was found";
                return Err(ApiError::new(409, "Conflict", message));
            }
            Err(_) => {
                let (object, managers) =
                    fields::apply(kind.name, &json!({}), &config, &manager, true, &now()).unwrap_or_default();
                return self.create_by(target, object, caller, Some(managers));
            }
        };
        Self::check_preconditions(target, &old, &config)?;
        Self::check_uid(target, &old, &config)?;
        if let Some(map) = config.as_object_mut() {
            if target.status {
                // Labels and annotations can be set through the status too.
                map.retain(|name, _| matches!(name.as_str(), "metadata" | "status"));
            } else if kind.has_status {
                map.remove("status");
            }
        }
        let applied = fields::apply(kind.name, &old, &config, &manager, force, &now());
        let (mut new, managers) = applied.map_err(|conflicts| {
            let told = |conflict: &fields::Conflict| {
                let manager = &conflict.manager;
                let subresource = if manager.status { " with subresource \"status\"" } else { "" };
                let using = if manager.apply { String::new() } else { format!(" using {}", kind.api_version) };
                format!("conflict with \"{}\"{subresource}{using}", manager.name)
            };
            let message = match conflicts.as_slice() {
                [one] => format!("Apply failed with 1 conflict: {}: {}", told(one), one.field),
                all => format!("Apply failed with {} conflicts: {}", all.len(), told(&all[0])),
            };
            let mut error = ApiError::new(409, "Conflict", message);
            error.causes = conflicts
                .iter()
                .map(|conflict| json!({"reason": "FieldManagerConflict", "message": told(conflict), "field": conflict.field}))
                .collect();
            error
        })?;
        self.prepare(target, &mut new, Some(&old), caller)?;
        Ok(self.finish(target, &old, new, &managers))
    }

    /// A patch cannot change the UID; that it names another one is no conflict to a real server.
    pub(super) fn check_uid(target: &Target, old: &Value, new: &Value) -> Result<()> {
        let (wanted, actual) = (text(new, "/metadata/uid"), text(old, "/metadata/uid"));
        if wanted.is_empty() || wanted == actual {
            return Ok(());
        }
        let what = format!("{} \"{}\"", target.kind().name, target.name);
        Err(ApiError::invalid(&what, "metadata.uid", &format!("Invalid value: \"{wanted}\": field is immutable")))
    }

    /// The UID that a replacement or deletion asks for.
    pub(super) fn check_uid_precondition(target: &Target, old: &Value, new: &Value) -> Result<()> {
        let (wanted, actual) = (text(new, "/metadata/uid"), text(old, "/metadata/uid"));
        if wanted.is_empty() || wanted == actual {
            return Ok(());
        }
        let message = format!(
            "Operation cannot be fulfilled on {} \"{}\": Precondition failed: UID in precondition: {wanted}, UID in object meta: {actual}",
            target.kind().plural,
            target.name
        );
        Err(ApiError::new(409, "Conflict", message))
    }

    fn check_preconditions(target: &Target, old: &Value, new: &Value) -> Result<()> {
        let (wanted, actual) = (text(new, "/metadata/resourceVersion"), text(old, "/metadata/resourceVersion"));
        if !wanted.is_empty() && wanted != actual {
            let message = format!(
                "Operation cannot be fulfilled on {} \"{}\": the object has been modified; please apply your changes to the latest version and try again",
                target.kind().plural,
                target.name
            );
            return Err(ApiError::new(409, "Conflict", message));
        }
        Ok(())
    }

    /// What the other subresource is for does not change through this one.
    fn keep_other_half(target: &Target, old: &Value, new: &mut Value) {
        let kind = target.kind();
        if target.status {
            // Nor does it for a Service: but labels, annotations and finalizers do.
            let (status, metadata) = (new.get("status").cloned(), new.get("metadata").cloned());
            *new = old.clone();
            if let Some(metadata) = metadata {
                new["metadata"] = metadata;
            }
            match (status, new.as_object_mut()) {
                (Some(status), _) => new["status"] = status,
                (None, Some(map)) => {
                    map.remove("status");
                }
                (None, None) => {}
            }
        } else if kind.has_status {
            match (old.get("status"), new.as_object_mut()) {
                (Some(status), _) => new["status"] = status.clone(),
                (None, Some(map)) => {
                    map.remove("status");
                }
                (None, None) => {}
            }
        }
        new["apiVersion"] = json!(kind.api_version);
        new["kind"] = json!(kind.name);
        for name in ["name", "namespace", "uid", "creationTimestamp", "deletionTimestamp"] {
            match old["metadata"].get(name) {
                Some(value) => new["metadata"][name] = value.clone(),
                None => {
                    if let Some(metadata) = new["metadata"].as_object_mut() {
                        metadata.remove(name);
                    }
                }
            }
        }
    }

    fn finish(&mut self, target: &Target, old: &Arc<Value>, mut new: Value, managers: &Managers) -> Arc<Value> {
        let mut before = (**old).clone();
        for object in [&mut before, &mut new] {
            if let Some(metadata) = object["metadata"].as_object_mut() {
                metadata.remove("managedFields");
                metadata.remove("resourceVersion");
            }
        }
        if before == new && Managers::of(old).sets() == managers.sets() {
            return Arc::clone(old);
        }
        managers.store(&mut new, target.kind().api_version);
        let dying = !new["metadata"]["deletionTimestamp"].is_null();
        let held = new["metadata"]["finalizers"].as_array().is_some_and(|finalizers| !finalizers.is_empty());
        self.put(target, if dying && !held { "DELETED" } else { "MODIFIED" }, new)
    }

    pub(super) fn delete(&mut self, target: &Target, options: &Value) -> Result<Arc<Value>> {
        let old = self.get(target)?;
        let preconditions = json!({"metadata": options.get("preconditions").cloned().unwrap_or_default()});
        Self::check_preconditions(target, &old, &preconditions)?;
        Self::check_uid_precondition(target, &old, &preconditions)?;
        if target.kind == NAMESPACES {
            if PROTECTED.contains(&target.name.as_str()) {
                let message = format!("namespaces \"{}\" is forbidden: this namespace may not be deleted", target.name);
                return Err(ApiError::new(403, "Forbidden", message));
            }
            if !old["metadata"]["deletionTimestamp"].is_null() {
                let message = format!(
                    "Operation cannot be fulfilled on namespaces \"{}\": The system is ensuring all content is removed from this namespace.  \
                     Upon completion, this namespace will automatically be purged by the system.",
                    target.name
                );
                return Err(ApiError::new(409, "Conflict", message));
            }
            // What is in it, and in the end the namespace, is for a controller to remove.
            let mut new = (*old).clone();
            new["metadata"]["deletionTimestamp"] = json!(now());
            new["status"]["phase"] = json!("Terminating");
            return Ok(self.put(target, "MODIFIED", new));
        }
        let mut new = (*old).clone();
        if new["metadata"]["finalizers"].as_array().is_some_and(|finalizers| !finalizers.is_empty()) {
            if new["metadata"]["deletionTimestamp"].is_null() {
                new["metadata"]["deletionTimestamp"] = json!(now());
                return Ok(self.put(target, "MODIFIED", new));
            }
            return Ok(old);
        }
        Ok(self.put(target, "DELETED", new))
    }

    /// What the controller of namespaces says when one is empty: it goes, if it is to go.
    pub(super) fn finalize(&mut self, target: &Target, wanted: &Value) -> Result<Arc<Value>> {
        let old = self.get(target)?;
        Self::check_preconditions(target, &old, wanted)?;
        let mut new = (*old).clone();
        new["spec"]["finalizers"] = wanted["spec"]["finalizers"].clone();
        let held = new["spec"]["finalizers"].as_array().is_some_and(|finalizers| !finalizers.is_empty());
        let going = !new["metadata"]["deletionTimestamp"].is_null();
        Ok(self.put(target, if going && !held { "DELETED" } else { "MODIFIED" }, new))
    }

    /// Defaults, allocation, validation and admission.
    fn prepare(&mut self, target: &Target, object: &mut Value, old: Option<&Value>, caller: &Caller) -> Result<()> {
        let kind = target.kind();
        validate::prune(kind, object)?;
        if kind.name == "ValidatingAdmissionPolicy" && text(object, "/spec/failurePolicy").is_empty() {
            object["spec"]["failurePolicy"] = json!("Fail");
        }
        validate::check(kind, object, old)?;
        if kind.name == "Service" {
            let ports = self.prepare_service(target, object, old)?;
            validate::without_empty(object, "");
            self.admit(target, object, old, caller)?;
            // Only now, when nothing can fail any more.
            self.free_ports(&target.key());
            for port in &ports {
                self.node_ports.insert(*port, target.key());
            }
            self.ports_of.insert(target.key(), ports);
            return Ok(());
        }
        self.admit(target, object, old, caller)
    }

    fn admit(&self, target: &Target, object: &Value, old: Option<&Value>, caller: &Caller) -> Result<()> {
        let policies = access::policies(self);
        let change = admission::Change {
            user: &caller.user,
            operation: if old.is_some() { "UPDATE" } else { "CREATE" },
            kind: target.kind(),
            subresource: if target.status { "status" } else { "" },
            namespace: self.namespace(&target.namespace).map(AsRef::as_ref),
            name: &target.name,
            old,
            new: object,
        };
        admission::admit(policies.iter().map(|(policy, binding)| (&**policy, &**binding)), &change)
    }

    fn prepare_service(&mut self, target: &Target, object: &mut Value, old: Option<&Value>) -> Result<BTreeSet<u16>> {
        let what = format!("Service \"{}\"", target.name);
        let invalid = |field: &str, message: &str| ApiError::invalid(&what, field, message);
        let spec = &mut object["spec"];
        if !spec.is_object() {
            *spec = json!({});
        }
        let default = |spec: &mut Value, name: &str, value: Value| {
            if spec[name].is_null() {
                spec[name] = value;
            }
        };
        default(spec, "type", json!("ClusterIP"));
        default(spec, "sessionAffinity", json!("None"));
        if spec["sessionAffinity"] == "ClientIP" {
            if spec["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"].is_null() {
                spec["sessionAffinityConfig"] = json!({"clientIP": {"timeoutSeconds": 10800}});
            }
        } else if let Some(map) = spec.as_object_mut() {
            map.remove("sessionAffinityConfig");
        }
        let kind = spec["type"].as_str().unwrap_or_default().to_owned();
        let external = matches!(kind.as_str(), "NodePort" | "LoadBalancer");
        if !external && !matches!(kind.as_str(), "ClusterIP" | "ExternalName") {
            return Err(invalid("spec.type", "Unsupported value"));
        }
        if kind != "ExternalName" {
            default(spec, "internalTrafficPolicy", json!("Cluster"));
            let families = families(spec, self.dual_stack).map_err(|(field, message)| invalid(field, message))?;
            if old.is_some_and(|old| {
                text(old, "/spec/ipFamilies/0") != families[0] && text(old, "/spec/type") != "ExternalName"
            }) {
                return Err(invalid(
                    "spec.ipFamilies[0]",
                    "Invalid value: primary ipFamily can not be unset or changed",
                ));
            }
            let own = spec["clusterIP"].as_str().unwrap_or_default().to_owned();
            if own == "None" {
                spec["clusterIPs"] = json!(["None"]);
            } else {
                if own.is_empty() {
                    self.cluster_ips += 1;
                }
                let number = self.cluster_ips;
                let mut addresses = Vec::new();
                for (index, family) in families.iter().enumerate() {
                    let known = spec["clusterIPs"][index]
                        .as_str()
                        .or_else(|| (index == 0 && !own.is_empty()).then_some(own.as_str()));
                    addresses.push(match (known, family.as_str()) {
                        (Some(known), _) => known.to_owned(),
                        (None, "IPv6") => format!("fd00:96::{number:x}"),
                        (None, _) => format!("10.{}.{}.{}", 96 + (number >> 16), (number >> 8) & 255, number & 255),
                    });
                }
                spec["clusterIP"] = json!(addresses[0]);
                spec["clusterIPs"] = json!(addresses);
            }
            spec["ipFamilies"] = json!(families);
        }
        if external {
            default(spec, "externalTrafficPolicy", json!("Cluster"));
        }
        if kind == "LoadBalancer" {
            default(spec, "allocateLoadBalancerNodePorts", json!(true));
            let class_before = old
                .filter(|old| text(old, "/spec/type") == "LoadBalancer")
                .map(|old| &old["spec"]["loadBalancerClass"]);
            if class_before.is_some_and(|class| *class != spec["loadBalancerClass"]) {
                return Err(invalid("spec.loadBalancerClass", "may not change once set"));
            }
        } else if let Some(map) = spec.as_object_mut() {
            if old.is_none() && map.get("loadBalancerClass").is_some_and(|class| !class.is_null()) {
                return Err(invalid("spec.loadBalancerClass", "may only be used when `type` is 'LoadBalancer'"));
            }
            map.remove("loadBalancerClass");
            map.remove("allocateLoadBalancerNodePorts");
            map.remove("healthCheckNodePort");
            if !external {
                map.remove("externalTrafficPolicy");
            }
        }
        let allocate = external && spec["allocateLoadBalancerNodePorts"] != json!(false);
        let old_ports = old.map(|old| old["spec"]["ports"].clone()).unwrap_or_default();
        let old_external = old.is_some_and(|old| matches!(text(old, "/spec/type"), "NodePort" | "LoadBalancer"));
        let mut ports = spec["ports"].as_array().cloned().unwrap_or_default();
        if ports.is_empty() && kind != "ExternalName" && spec["clusterIP"] != "None" {
            return Err(invalid("spec.ports", "Required value"));
        }
        let mut taken: BTreeSet<u16> = BTreeSet::new();
        let mut pairs = BTreeSet::new();
        let (mut seen, mut names) = (BTreeSet::new(), BTreeSet::new());
        let many = ports.len() > 1;
        for (index, port) in ports.iter_mut().enumerate() {
            let field = |name: &str| format!("spec.ports[{index}].{name}");
            default(port, "protocol", json!("TCP"));
            let number = port["port"].as_i64().unwrap_or(0);
            if !(1..=65535).contains(&number) {
                return Err(invalid(&field("port"), "must be between 1 and 65535, inclusive"));
            }
            let protocol = port["protocol"].as_str().unwrap_or_default().to_owned();
            if !matches!(protocol.as_str(), "TCP" | "UDP" | "SCTP") {
                return Err(invalid(&field("protocol"), "Unsupported value"));
            }
            default(port, "targetPort", json!(number));
            let name = port["name"].as_str().unwrap_or_default().to_owned();
            if many && name.is_empty() {
                return Err(invalid(&field("name"), "Required value"));
            }
            if !name.is_empty() && !validate::is_label(&name) {
                return Err(invalid(
                    &field("name"),
                    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-'",
                ));
            }
            if kind == "LoadBalancer" && number == 10250 {
                return Err(invalid(
                    &field("port"),
                    "may not expose port 10250 externally since it is used by kubelet",
                ));
            }
            if !seen.insert((protocol.clone(), number)) || !names.insert(name) {
                return Err(invalid(&field("port"), "Duplicate value"));
            }
            if !external {
                // A number that was allocated for the old type goes with it; one that is asked for is a mistake.
                let had = old_external
                    && old_ports.as_array().into_iter().flatten().any(|old| old["nodePort"] == port["nodePort"]);
                if port["nodePort"].as_i64().unwrap_or(0) != 0 && !had {
                    return Err(invalid(&field("nodePort"), "may not be used when `type` is 'ClusterIP'"));
                }
                if let Some(map) = port.as_object_mut() {
                    map.remove("nodePort");
                }
                continue;
            }
            let mut node_port = port["nodePort"].as_i64().unwrap_or(0);
            if node_port == 0 && old_external {
                let same = |old: &&Value| old["port"] == port["port"] && old["protocol"] == port["protocol"];
                node_port = old_ports
                    .as_array()
                    .into_iter()
                    .flatten()
                    .find(same)
                    .map_or(0, |old| old["nodePort"].as_i64().unwrap_or(0));
            }
            if node_port == 0 {
                if let Some(map) = port.as_object_mut() {
                    map.remove("nodePort");
                }
                continue;
            }
            let number = u16::try_from(node_port).unwrap_or(0);
            if !(self.node_port_range.0..=self.node_port_range.1).contains(&number) {
                let message = format!(
                    "provided port is not in the valid range. The range of valid ports is {}-{}",
                    self.node_port_range.0, self.node_port_range.1
                );
                return Err(invalid(&field("nodePort"), &message));
            }
            if self.node_ports.get(&number).is_some_and(|owner| *owner != target.key()) {
                return Err(invalid(&field("nodePort"), "provided port is already allocated"));
            }
            if !pairs.insert((protocol, number)) {
                return Err(invalid(&field("nodePort"), "Duplicate value"));
            }
            taken.insert(number);
            port["nodePort"] = json!(number);
        }
        for index in 0..ports.len() {
            if !allocate || !ports[index]["nodePort"].is_null() {
                continue;
            }
            // A new Service has one number for a port of two protocols.
            let twin = ports.iter().find(|port| port["port"] == ports[index]["port"] && !port["nodePort"].is_null());
            let number = match twin.filter(|_| old.is_none()).and_then(|twin| twin["nodePort"].as_u64()) {
                Some(number) => number as u16,
                None => self.allocate(&taken)?,
            };
            taken.insert(number);
            ports[index]["nodePort"] = json!(number);
        }
        if !ports.is_empty() {
            spec["ports"] = Value::Array(ports);
        }
        if kind == "LoadBalancer" && spec["externalTrafficPolicy"] == "Local" {
            let number = match spec["healthCheckNodePort"].as_u64().and_then(|number| u16::try_from(number).ok()) {
                Some(number) if number != 0 => number,
                _ => self.allocate(&taken)?,
            };
            let owner = self.node_ports.get(&number);
            if owner.is_some_and(|owner| *owner != target.key()) || !taken.insert(number) {
                return Err(invalid("spec.healthCheckNodePort", "provided port is already allocated"));
            }
            spec["healthCheckNodePort"] = json!(number);
        } else if let Some(map) = spec.as_object_mut() {
            map.remove("healthCheckNodePort");
        }
        if object["status"].is_null() {
            object["status"] = json!({"loadBalancer": {}});
        }
        if kind != "LoadBalancer" && old.is_some() && !target.status {
            object["status"]["loadBalancer"] = json!({});
        }
        let changed_status = old.is_none_or(|old| old["status"] != object["status"]);
        if let Some(ingress) = object.pointer_mut("/status/loadBalancer/ingress").and_then(Value::as_array_mut) {
            if target.status && kind != "LoadBalancer" && changed_status && !ingress.is_empty() {
                return Err(invalid(
                    "status.loadBalancer.ingress",
                    "may only be used when `spec.type` is \"LoadBalancer\"",
                ));
            }
            for entry in ingress {
                if let Some(ip) = entry["ip"].as_str() {
                    if ip.parse::<std::net::IpAddr>().is_err() {
                        return Err(invalid("status.loadBalancer.ingress[0].ip", "must be a valid IP address"));
                    }
                    default(entry, "ipMode", json!("VIP"));
                } else if !entry["ipMode"].is_null() {
                    return Err(invalid(
                        "status.loadBalancer.ingress[0].ipMode",
                        "may not be set when `ip` is not set",
                    ));
                }
            }
        }
        for condition in object["status"]["conditions"].as_array().into_iter().flatten() {
            for name in ["type", "status", "reason", "lastTransitionTime"] {
                if condition[name].as_str().unwrap_or_default().is_empty() {
                    return Err(invalid(&format!("status.conditions[0].{name}"), "Required value"));
                }
            }
            if !matches!(condition["status"].as_str(), Some("True" | "False" | "Unknown")) {
                return Err(invalid("status.conditions[0].status", "Unsupported value"));
            }
        }
        Ok(taken)
    }

    fn allocate(&self, taken: &BTreeSet<u16>) -> Result<u16> {
        let (first, last) = self.node_port_range;
        let span = u64::from(last - first) + 1;
        let start = random() % span;
        (0..span)
            .map(|step| first + ((start + step) % span) as u16)
            .find(|number| !self.node_ports.contains_key(number) && !taken.contains(number))
            .ok_or_else(|| ApiError::new(500, "InternalError", "failed to allocate a nodePort: range is full"))
    }

    /// Widens the range of NodePorts, for tests with more Services than a real cluster has ports.
    pub(super) fn set_node_port_range(&mut self, range: (u16, u16)) {
        self.node_port_range = range;
    }
}
