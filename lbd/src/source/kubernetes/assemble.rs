//! Puts what the followers tell together into one [`Inventory`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::convert::Slice;
use super::follow::{Item, Kind, Update};
use crate::config::Protocol;
use crate::source::{Endpoint, Inventory, ObjectName, Service, ServiceKind};

/// The namespace whose UID is the cluster's identity.
const IDENTITY_NAMESPACE: &str = "kube-system";

/// The inventory under construction. It is shared with those who read it and copied only when something changes.
#[derive(Debug, Default)]
pub(super) struct Assembler {
    pub(super) inventory: Arc<Inventory>,
    listed: BTreeSet<Kind>,
    slices: BTreeMap<ObjectName, Slice>,
    slices_of: BTreeMap<ObjectName, BTreeSet<ObjectName>>,
    /// Endpoints come from an earlier life, for as long as no slice can be seen.
    old_endpoints: bool,
    /// What a list lacked that lacked too much to be believed at once, and since when.
    suspects: BTreeMap<(Kind, ObjectName), Instant>,
    /// For how long.
    pub(super) hold: Duration,
}

/// As many may vanish from one list to the next, whatever share of all they are.
const FEW: usize = 2;

impl Assembler {
    /// Starts from what an earlier life knew: the first lists are compared with that.
    pub(super) fn new(restored: &Inventory, hold: Duration) -> Self {
        let base = Inventory { complete: false, cluster: None, ..restored.clone() };
        let old_endpoints = !base.endpoints.is_empty();
        Self { inventory: Arc::new(base), hold, old_endpoints, ..Self::default() }
    }

    /// What is held, in words.
    pub(super) fn held(&self) -> Option<String> {
        let kinds: Vec<_> = [Kind::Services, Kind::Nodes, Kind::Namespaces]
            .into_iter()
            .filter_map(|kind| {
                let count = self.suspects.keys().filter(|(of, _)| *of == kind).count();
                (count > 0).then(|| format!("{count} {}", kind.as_str()))
            })
            .collect();
        (!kinds.is_empty()).then(|| {
            format!(
                "the cluster's list lacks {}, more than half of those in use: they stay as they are until another list, {} s later, lacks \
                 them too",
                kinds.join(" and "),
                self.hold.as_secs()
            )
        })
    }

    /// When to list again because of what is held.
    pub(super) fn due(&self) -> Option<Instant> {
        self.suspects.values().min().map(|since| *since + self.hold)
    }

    /// Believes the lists at once. Returns whether that changes the inventory.
    pub(super) fn trust(&mut self) -> bool {
        let mut changed = false;
        for ((kind, name), _) in std::mem::take(&mut self.suspects) {
            changed |= self.gone(&nothing(kind, name));
        }
        changed
    }

    /// Whether every kind has been listed.
    pub(super) fn complete(&self) -> bool {
        self.listed.len() == Kind::ALL.len()
    }

    /// Goes on without a kind that the server refuses to show. Returns whether that completes the inventory.
    pub(super) fn do_without(&mut self, kind: Kind) -> bool {
        self.listed.insert(kind) && self.complete()
    }

    /// Takes an update in. Returns whether the inventory changed.
    /// `ours` says which Services are in use.
    pub(super) fn apply(&mut self, update: Update, ours: &dyn Fn(&ObjectName, &Service) -> bool) -> bool {
        match update {
            Update::Listed(kind, items) => {
                let changed = self.listed_all(kind, items, ours);
                self.listed.insert(kind);
                self.end_displaced() || changed
            }
            Update::Set(item) => {
                let changed = self.set(item);
                self.end_displaced() || changed
            }
            Update::Gone(item) => self.gone(&item),
            Update::Alive(_) | Update::Failed { .. } => false,
        }
    }

    fn set(&mut self, item: Item) -> bool {
        self.forget_suspect(&item);
        match item {
            Item::Service(name, service) => {
                let known = self.inventory.services.get(&name);
                if known == Some(&*service) {
                    return false;
                }
                // Another of the same name has none of its endpoints.
                if self.old_endpoints && known.is_none_or(|known| known.uid != service.uid) {
                    Arc::make_mut(&mut self.inventory).endpoints.remove(&name);
                }
                Arc::make_mut(&mut self.inventory).services.insert(name.clone(), *service);
                self.merge_endpoints(&name);
                true
            }
            Item::Node(name, node) => {
                let changed = self.inventory.nodes.get(&name) != Some(&node);
                if changed {
                    Arc::make_mut(&mut self.inventory).nodes.insert(name, node);
                }
                changed
            }
            Item::Namespace(name, namespace) => {
                let identity = name == IDENTITY_NAMESPACE && self.inventory.cluster.as_ref() != Some(&namespace.uid);
                let changed = identity || self.inventory.namespaces.get(&name) != Some(&namespace.labels);
                if changed {
                    let inventory = Arc::make_mut(&mut self.inventory);
                    if name == IDENTITY_NAMESPACE && !namespace.uid.is_empty() {
                        inventory.cluster = Some(namespace.uid);
                    }
                    inventory.namespaces.insert(name, namespace.labels);
                }
                changed
            }
            Item::Slice(name, slice) => {
                let before = self.slices.get(&name).map(|slice| slice.service.clone());
                let service = slice.service.clone();
                self.slices.insert(name.clone(), slice);
                let mut changed = false;
                if let Some(before) = before.filter(|before| *before != service) {
                    self.forget_slice(&name, &before);
                    changed = self.merge_endpoints(&before);
                }
                self.slices_of.entry(service.clone()).or_default().insert(name);
                self.merge_endpoints(&service) || changed
            }
        }
    }

    /// Of what is there, or is said to be gone, nothing must be guessed any more.
    fn forget_suspect(&mut self, item: &Item) {
        if self.suspects.is_empty() {
            return;
        }
        let key = match item {
            Item::Service(name, _) => (Kind::Services, name.clone()),
            Item::Node(name, _) => (Kind::Nodes, ObjectName::new("", name)),
            Item::Namespace(name, _) => (Kind::Namespaces, ObjectName::new("", name)),
            Item::Slice(..) => return,
        };
        self.suspects.remove(&key);
    }

    /// Holds nothing any more whose NodePort or address another has by now: what still goes there would reach that one.
    /// Returns whether that changes the inventory.
    fn end_displaced(&mut self) -> bool {
        if self.suspects.is_empty() {
            return false;
        }
        let is_held = |kind, name: &ObjectName| self.suspects.contains_key(&(kind, name.clone()));
        let services = self.inventory.services.iter().filter(|(name, _)| !is_held(Kind::Services, name));
        let ports: BTreeSet<_> = services.flat_map(|(_, service)| node_ports(service)).collect();
        let nodes = self.inventory.nodes.iter().filter(|(name, _)| !is_held(Kind::Nodes, &ObjectName::new("", *name)));
        let addresses: BTreeSet<IpAddr> = nodes.flat_map(|(_, node)| node.addresses.iter().copied()).collect();
        let displaced = self.suspects.keys().filter(|(kind, name)| match kind {
            Kind::Services => {
                self.inventory.services.get(name).is_some_and(|held| node_ports(held).any(|port| ports.contains(&port)))
            }
            Kind::Nodes => self
                .inventory
                .nodes
                .get(&name.name)
                .is_some_and(|held| held.addresses.iter().any(|address| addresses.contains(address))),
            Kind::Namespaces | Kind::EndpointSlices => false,
        });
        let displaced: Vec<_> = displaced.cloned().collect();
        displaced.into_iter().fold(false, |changed, (kind, name)| self.gone(&nothing(kind, name)) || changed)
    }

    fn gone(&mut self, item: &Item) -> bool {
        self.forget_suspect(item);
        match item {
            Item::Service(name, _) => {
                if !self.inventory.services.contains_key(name) {
                    return false;
                }
                Arc::make_mut(&mut self.inventory).services.remove(name);
                self.merge_endpoints(name);
                true
            }
            Item::Node(name, _) => {
                self.inventory.nodes.contains_key(name)
                    && Arc::make_mut(&mut self.inventory).nodes.remove(name).is_some()
            }
            Item::Namespace(name, _) => {
                self.inventory.namespaces.contains_key(name)
                    && Arc::make_mut(&mut self.inventory).namespaces.remove(name).is_some()
            }
            Item::Slice(name, _) => {
                let Some(slice) = self.slices.remove(name) else { return false };
                self.forget_slice(name, &slice.service);
                self.merge_endpoints(&slice.service)
            }
        }
    }

    fn forget_slice(&mut self, name: &ObjectName, service: &ObjectName) {
        if let Some(names) = self.slices_of.get_mut(service) {
            names.remove(name);
            if names.is_empty() {
                self.slices_of.remove(service);
            }
        }
    }

    /// How many of a kind are in use.
    fn in_use(&self, kind: Kind, ours: &dyn Fn(&ObjectName, &Service) -> bool) -> usize {
        match kind {
            Kind::Services => self.inventory.services.iter().filter(|(name, service)| ours(name, service)).count(),
            Kind::Nodes => self.inventory.nodes.len(),
            Kind::Namespaces => self.inventory.namespaces.len(),
            Kind::EndpointSlices => usize::MAX,
        }
    }

    /// Replaces everything of a kind. What is missing from a list that lacks more than half of what is in use stays for a while.
    fn listed_all(&mut self, kind: Kind, items: Vec<Item>, ours: &dyn Fn(&ObjectName, &Service) -> bool) -> bool {
        let in_use = self.in_use(kind, ours);
        let mut missing: BTreeSet<ObjectName> = match kind {
            Kind::Services => self.inventory.services.keys().cloned().collect(),
            Kind::Nodes => self.inventory.nodes.keys().map(|name| ObjectName::new("", name)).collect(),
            Kind::Namespaces => self.inventory.namespaces.keys().map(|name| ObjectName::new("", name)).collect(),
            Kind::EndpointSlices => self.slices.keys().cloned().collect(),
        };
        let mut changed = false;
        for item in items {
            match &item {
                Item::Service(name, _) | Item::Slice(name, _) => missing.remove(name),
                Item::Node(name, _) | Item::Namespace(name, _) => missing.remove(&ObjectName::new("", name)),
            };
            changed |= self.set(item);
        }
        let matters = |inventory: &Inventory, name: &ObjectName| match kind {
            Kind::Services => inventory.services.get(name).is_some_and(|service| ours(name, service)),
            Kind::Nodes | Kind::Namespaces => true,
            Kind::EndpointSlices => false,
        };
        if kind == Kind::EndpointSlices && std::mem::take(&mut self.old_endpoints) {
            let old: Vec<_> = self.inventory.endpoints.keys().cloned().collect();
            for service in self.slices_of.keys().cloned().chain(old).collect::<BTreeSet<_>>() {
                changed |= self.merge_endpoints(&service);
            }
        }
        let lost = missing.iter().filter(|name| matters(&self.inventory, name)).count();
        let incredible = lost > FEW && lost > in_use / 2;
        let now = Instant::now();
        for name in missing {
            if incredible && matters(&self.inventory, &name) {
                let since = *self.suspects.entry((kind, name.clone())).or_insert(now);
                if now.duration_since(since) < self.hold {
                    continue;
                }
            }
            changed |= self.gone(&nothing(kind, name));
        }
        changed
    }

    /// Makes the endpoints of a Service from its slices. Returns whether they changed.
    fn merge_endpoints(&mut self, service: &ObjectName) -> bool {
        let wanted = self.inventory.services.get(service).is_some_and(reads_endpoints);
        if self.old_endpoints && wanted {
            return false;
        }
        let names = self.slices_of.get(service).filter(|_| wanted);
        let mut merged: BTreeMap<(IpAddr, Option<String>, bool), BTreeSet<_>> = BTreeMap::new();
        for endpoint in
            names.into_iter().flatten().filter_map(|name| self.slices.get(name)).flat_map(|slice| &slice.endpoints)
        {
            let key = (endpoint.address, endpoint.node.clone(), endpoint.ready);
            merged.entry(key).or_default().extend(endpoint.ports.iter().cloned());
        }
        let merged: Vec<_> = merged
            .into_iter()
            .map(|((address, node, ready), ports)| Endpoint { address, node, ready, ports })
            .collect();
        let before = self.inventory.endpoints.get(service);
        if merged.is_empty() {
            before.is_some() && Arc::make_mut(&mut self.inventory).endpoints.remove(service).is_some()
        } else if before == Some(&merged) {
            false
        } else {
            Arc::make_mut(&mut self.inventory).endpoints.insert(service.clone(), merged);
            true
        }
    }
}

/// An object that is gone.
fn nothing(kind: Kind, name: ObjectName) -> Item {
    match kind {
        Kind::Services => Item::Service(name, Box::default()),
        Kind::Nodes => Item::Node(name.name, crate::source::Node::default()),
        Kind::Namespaces => Item::Namespace(name.name, super::convert::Namespace::default()),
        Kind::EndpointSlices => Item::Slice(name, Slice::default()),
    }
}

/// The ports that a Service has on the nodes.
fn node_ports(service: &Service) -> impl Iterator<Item = (Protocol, u16)> {
    let ports = service.ports.iter().filter_map(|port| Some((port.protocol()?, port.node_port)));
    ports.chain(service.health_port.map(|port| (Protocol::Tcp, port))).filter(|(_, port)| *port != 0)
}

/// Whether lbd could ever use the endpoints of a Service: pods behind a cluster-internal Service come and go all day.
fn reads_endpoints(service: &Service) -> bool {
    match service.kind {
        ServiceKind::LoadBalancer | ServiceKind::NodePort => true,
        ServiceKind::ClusterIp => !service.selector,
        ServiceKind::ExternalName => false,
    }
}

#[cfg(test)]
mod tests {
    use super::super::convert::Namespace;
    use super::*;
    use crate::source::{Node, ServicePort};

    fn apply(assembler: &mut Assembler, update: Update) -> bool {
        assembler.apply(update, &|_, _| true)
    }

    fn name(text: &str) -> ObjectName {
        ObjectName::new("s", text)
    }

    fn service(kind: ServiceKind) -> Box<Service> {
        Box::new(Service { kind, selector: true, ..Service::default() })
    }

    fn slice(of: &str, addresses: &[&str]) -> Slice {
        let endpoints = addresses.iter().map(|address| Endpoint {
            address: address.parse().unwrap(),
            node: None,
            ready: true,
            ports: BTreeSet::from([("p".to_owned(), "TCP".to_owned(), 80)]),
        });
        Slice { service: name(of), endpoints: endpoints.collect() }
    }

    #[test]
    fn an_equal_object_changes_nothing_and_copies_nothing() {
        let mut assembler = Assembler::default();
        let node = Node { uid: "u".into(), ..Node::default() };
        assert!(apply(&mut assembler, Update::Set(Item::Node("n1".into(), node.clone()))));
        let shared = Arc::clone(&assembler.inventory);
        assert!(!apply(&mut assembler, Update::Set(Item::Node("n1".into(), node))));
        assert!(Arc::ptr_eq(&shared, &assembler.inventory));
        assert!(!apply(&mut assembler, Update::Gone(Item::Node("n2".into(), Node::default()))));
        assert!(Arc::ptr_eq(&shared, &assembler.inventory));
    }

    #[test]
    fn a_list_finds_what_was_deleted_unseen() {
        let mut assembler = Assembler::default();
        assert!(apply(&mut assembler, Update::Set(Item::Service(name("a"), service(ServiceKind::NodePort)))));
        assert!(apply(&mut assembler, Update::Set(Item::Service(name("b"), service(ServiceKind::NodePort)))));
        let items = vec![Item::Service(name("b"), service(ServiceKind::NodePort))];
        assert!(apply(&mut assembler, Update::Listed(Kind::Services, items)));
        assert_eq!(assembler.inventory.services.keys().collect::<Vec<_>>(), [&name("b")]);
        let items = vec![Item::Service(name("b"), service(ServiceKind::NodePort))];
        assert!(!apply(&mut assembler, Update::Listed(Kind::Services, items)));
    }

    #[test]
    fn complete_only_after_all_first_lists() {
        let mut assembler = Assembler::default();
        for kind in [Kind::Services, Kind::Nodes, Kind::Namespaces] {
            apply(&mut assembler, Update::Listed(kind, Vec::new()));
            assert!(!assembler.complete());
        }
        assert!(assembler.do_without(Kind::EndpointSlices));
        assert!(assembler.complete());
    }

    #[test]
    fn the_cluster_is_known_by_the_uid_of_kube_system() {
        let mut assembler = Assembler::default();
        let namespace = |uid: &str| Namespace { uid: uid.into(), ..Namespace::default() };
        assert!(apply(&mut assembler, Update::Set(Item::Namespace("other".into(), namespace("u1")))));
        assert_eq!(assembler.inventory.cluster, None);
        assert!(apply(&mut assembler, Update::Set(Item::Namespace("kube-system".into(), namespace("u2")))));
        assert_eq!(assembler.inventory.cluster.as_deref(), Some("u2"));
        assert!(!apply(&mut assembler, Update::Set(Item::Namespace("kube-system".into(), namespace("u2")))));
    }

    #[test]
    fn endpoints_are_merged_over_slices_and_follow_the_service() {
        let mut assembler = Assembler::default();
        assert!(!apply(&mut assembler, Update::Set(Item::Slice(name("web-1"), slice("web", &["192.0.2.2"])))));
        assert!(apply(&mut assembler, Update::Set(Item::Service(name("web"), service(ServiceKind::LoadBalancer)))));
        assert_eq!(assembler.inventory.endpoints[&name("web")].len(), 1);
        assert!(apply(
            &mut assembler,
            Update::Set(Item::Slice(name("web-2"), slice("web", &["192.0.2.1", "192.0.2.2"])))
        ));
        let addresses: Vec<_> =
            assembler.inventory.endpoints[&name("web")].iter().map(|endpoint| endpoint.address.to_string()).collect();
        assert_eq!(addresses, ["192.0.2.1", "192.0.2.2"]);
        assert!(apply(&mut assembler, Update::Gone(Item::Slice(name("web-2"), Slice::default()))));
        assert!(apply(&mut assembler, Update::Set(Item::Service(name("web"), service(ServiceKind::ClusterIp)))));
        assert!(assembler.inventory.endpoints.is_empty());
        assert!(!apply(&mut assembler, Update::Set(Item::Slice(name("web-3"), slice("web", &["192.0.2.9"])))));
    }

    #[test]
    fn a_slice_can_move_to_another_service() {
        let mut assembler = Assembler::default();
        for service_name in ["a", "b"] {
            apply(&mut assembler, Update::Set(Item::Service(name(service_name), service(ServiceKind::LoadBalancer))));
        }
        apply(&mut assembler, Update::Set(Item::Slice(name("x"), slice("a", &["192.0.2.2"]))));
        assert!(apply(&mut assembler, Update::Set(Item::Slice(name("x"), slice("b", &["192.0.2.2"])))));
        assert_eq!(assembler.inventory.endpoints.keys().collect::<Vec<_>>(), [&name("b")]);
    }

    fn listed(names: &[&str]) -> Update {
        let items = names.iter().map(|text| Item::Service(name(text), service(ServiceKind::LoadBalancer)));
        Update::Listed(Kind::Services, items.collect())
    }

    #[test]
    fn b37_a_list_that_lacks_more_than_half_is_held_until_another_agrees() {
        let restored = {
            let mut first = Assembler::default();
            apply(&mut first, listed(&["a", "b", "c", "d", "e"]));
            Arc::clone(&first.inventory)
        };
        let hold = Duration::from_millis(50);
        let mut assembler = Assembler::new(&restored, hold);
        assert!(!apply(&mut assembler, listed(&["a", "b"])), "three of five went at once");
        assert_eq!(assembler.inventory.services.len(), 5);
        assert!(assembler.held().unwrap().contains("lacks 3 services"), "{:?}", assembler.held());
        // An early second list does not decide, but events do.
        assert!(!apply(&mut assembler, listed(&["a", "b"])));
        assert!(apply(&mut assembler, Update::Gone(Item::Service(name("c"), Box::default()))));
        apply(&mut assembler, Update::Set(Item::Service(name("d"), service(ServiceKind::LoadBalancer))));
        assert_eq!(assembler.suspects.len(), 1);
        std::thread::sleep(hold);
        assert!(assembler.due().unwrap() <= Instant::now());
        assert!(apply(&mut assembler, listed(&["a", "b", "d"])));
        assert_eq!(assembler.inventory.services.keys().collect::<Vec<_>>(), [&name("a"), &name("b"), &name("d")]);
        assert_eq!((assembler.held(), assembler.due()), (None, None));
    }

    #[test]
    fn b37_an_empty_list_that_lasts_is_believed_and_one_that_does_not_never_was() {
        let hold = Duration::from_millis(50);
        let mut assembler = Assembler { hold, ..Assembler::default() };
        apply(&mut assembler, listed(&["a", "b", "c"]));
        assert!(!apply(&mut assembler, listed(&[])));
        std::thread::sleep(hold);
        assert!(!apply(&mut assembler, listed(&["a", "b", "c"])));
        assert_eq!((assembler.held(), assembler.inventory.services.len()), (None, 3));
        assert!(!apply(&mut assembler, listed(&[])));
        std::thread::sleep(hold);
        assert!(apply(&mut assembler, listed(&[])));
        assert!(assembler.inventory.services.is_empty() && assembler.suspects.is_empty());
    }

    fn on_port(text: &str, protocol: &str, node_port: u16) -> Item {
        let port = ServicePort { protocol: protocol.into(), port: 443, node_port, ..ServicePort::default() };
        Item::Service(name(text), Box::new(Service { ports: vec![port], ..*service(ServiceKind::LoadBalancer) }))
    }

    #[test]
    fn b37_what_is_held_goes_at_once_when_another_has_its_node_port() {
        let mut assembler = Assembler { hold: Duration::from_mins(1), ..Assembler::default() };
        let all =
            [("a", 30001), ("b", 30002), ("c", 30003), ("d", 30004)].map(|(text, port)| on_port(text, "TCP", port));
        apply(&mut assembler, Update::Listed(Kind::Services, all.into()));
        // Theirs of another protocol is another port.
        let next = vec![on_port("new", "TCP", 30001), on_port("other", "UDP", 30002)];
        assert!(apply(&mut assembler, Update::Listed(Kind::Services, next)));
        let names = |assembler: &Assembler| {
            assembler.inventory.services.keys().map(|name| name.name.clone()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(names(&assembler), "b c d new other");
        assert_eq!(assembler.suspects.len(), 3);
        assert!(apply(&mut assembler, Update::Set(on_port("later", "TCP", 30003))));
        assert_eq!(names(&assembler), "b d later new other");
        let local = Service { health_port: Some(30004), ..*service(ServiceKind::LoadBalancer) };
        assert!(apply(&mut assembler, Update::Set(Item::Service(name("local"), Box::new(local)))));
        assert_eq!(names(&assembler), "b later local new other");
    }

    #[test]
    fn b37_a_node_that_is_held_goes_at_once_when_another_has_its_address() {
        let node = |text: &str, address: &str| {
            Item::Node(text.into(), Node { addresses: vec![address.parse().unwrap()], ..Node::default() })
        };
        let mut assembler = Assembler { hold: Duration::from_mins(1), ..Assembler::default() };
        let all = vec![node("n1", "10.0.0.1"), node("n2", "10.0.0.2"), node("n3", "10.0.0.3")];
        apply(&mut assembler, Update::Listed(Kind::Nodes, all));
        assert!(apply(&mut assembler, Update::Listed(Kind::Nodes, vec![node("n4", "10.0.0.2")])));
        assert_eq!(assembler.inventory.nodes.keys().collect::<Vec<_>>(), ["n1", "n3", "n4"]);
    }

    #[test]
    fn few_and_those_of_others_go_at_once_and_trust_ends_the_wait() {
        let hold = Duration::from_mins(1);
        let mut assembler = Assembler { hold, ..Assembler::default() };
        apply(&mut assembler, listed(&["a", "b"]));
        assert!(apply(&mut assembler, listed(&[])), "two are few");
        apply(&mut assembler, listed(&["a", "b", "c", "d"]));
        assert!(assembler.apply(listed(&["a"]), &|name, _| name.name == "a"), "three of others");
        assert_eq!(assembler.inventory.services.len(), 1);
        apply(&mut assembler, listed(&["a", "b", "c", "d"]));
        assert!(!apply(&mut assembler, listed(&[])));
        assert!(assembler.trust());
        assert!(assembler.inventory.services.is_empty() && assembler.held().is_none());
    }

    #[test]
    fn b42_without_the_right_to_see_slices_endpoints_of_an_earlier_life_stay() {
        let mut first = Assembler::default();
        let with_uid = |text: &str, uid: &str| {
            let service = Service { uid: uid.into(), ..*service(ServiceKind::LoadBalancer) };
            Item::Service(name(text), Box::new(service))
        };
        let all = ["same", "new", "gone"];
        apply(&mut first, Update::Listed(Kind::Services, all.map(|text| with_uid(text, "1")).into()));
        for text in all {
            apply(&mut first, Update::Set(Item::Slice(name(text), slice(text, &["192.0.2.2"]))));
        }
        let mut second = Assembler::new(&first.inventory, Duration::ZERO);
        let mut services = vec![with_uid("same", "1"), with_uid("new", "2")];
        if let Item::Service(_, service) = &mut services[0] {
            service.ingress.push("192.0.2.34".into());
        }
        apply(&mut second, Update::Listed(Kind::Services, services));
        second.do_without(Kind::EndpointSlices);
        assert_eq!(second.inventory.endpoints.keys().collect::<Vec<_>>(), [&name("same")]);
        // The right comes: what is seen counts.
        assert!(apply(&mut second, Update::Listed(Kind::EndpointSlices, Vec::new())));
        assert!(second.inventory.endpoints.is_empty());
    }

    #[test]
    fn what_a_restored_inventory_said_of_endpoints_is_not_believed() {
        let mut first = Assembler::default();
        apply(&mut first, listed(&["web", "other"]));
        apply(&mut first, Update::Set(Item::Slice(name("web-1"), slice("web", &["192.0.2.2"]))));
        apply(&mut first, Update::Set(Item::Slice(name("other-1"), slice("other", &["192.0.2.3"]))));
        let mut second = Assembler::new(&first.inventory, Duration::ZERO);
        let slices = vec![Item::Slice(name("web-1"), slice("web", &["192.0.2.9"]))];
        apply(&mut second, Update::Listed(Kind::EndpointSlices, slices));
        apply(&mut second, listed(&["web", "other"]));
        assert_eq!(second.inventory.endpoints.keys().collect::<Vec<_>>(), [&name("web")]);
        assert_eq!(second.inventory.endpoints[&name("web")][0].address.to_string(), "192.0.2.9");
    }
}
