//! What the account of `lbd rbac` may do, and that the server refuses the rest; what a server refuses in general.
//!
//! Against the cluster that `LBD_TEST_KUBECONFIG` names, if it is set: there these tests also show that the test server is as strict.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use lbd::source::PROGRAMMED;
use lbd::source::kubernetes::{check, own_object};
use lbd_tests::apiserver::{Client, Cluster, service};
use serde_json::{Value, json};

const MERGE: &str = "application/merge-patch+json";
const JSON: &str = "application/json";
const APPLY: &str = "application/apply-patch+yaml";

fn configuration(cluster: &Cluster, claim: &str) -> Result<String> {
    Ok(format!(
        "version: 1\nhubs: [{{ name: {}, interface: hub0, kubernetes: {{ {} }} }}]\ntenants:\n  - name: a\n    segment: {{ interface: \
         ten0 }}\n    pools: [192.0.2.32-192.0.2.47, '2001:db8:a::/120']\n    claim: {claim}\n",
        cluster.namespace,
        cluster.settings()?
    ))
}

/// The code and text of a refusal; 0 if there was none.
fn refusal(result: std::result::Result<Value, kube::Error>) -> Result<(u16, String)> {
    match result {
        Ok(_) => Ok((0, String::new())),
        Err(kube::Error::Api(status)) => Ok((status.code, status.message.clone())),
        Err(error) => Err(error).context("no answer"),
    }
}

fn status_of(namespace: &str, name: &str) -> String {
    format!("/api/v1/namespaces/{namespace}/services/{name}/status?fieldManager=lbd")
}

fn ingress(entry: &Value) -> Value {
    json!({"status": {"loadBalancer": {"ingress": [entry]}}})
}

fn condition(kind: &str) -> Value {
    json!({"type": kind, "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"})
}

/// A namespace beside the test's, with labels.
async fn namespace(cluster: &Cluster, suffix: &str, labels: &Value) -> Result<String> {
    let name = format!("{}-{suffix}", cluster.namespace);
    let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}});
    cluster.client.create(&object).await?;
    Ok(name)
}

async fn patch(client: &Client, path: &str, patch: &Value) -> Result<(u16, String)> {
    refusal(client.request("PATCH", path, MERGE, Some(patch)).await)
}

#[tokio::test(flavor = "multi_thread")]
async fn b42_the_account_may_write_our_part_of_a_status_and_nothing_else() -> Result<()> {
    let cluster = Cluster::any().await?;
    let own = cluster.namespace.clone();
    let other = namespace(&cluster, "other", &json!({})).await?;
    cluster.grant(&configuration(&cluster, &format!("[{{ namespaces: [{own}] }}]"))?).await?;
    for place in [&own, &other] {
        cluster.client.create(&service(place, "web", "LoadBalancer", &[(443, 0)])).await?;
    }
    let foreign = json!({"status": {"conditions": [condition("example.com/Theirs")]}});
    cluster.client.patch_status("Service", &own, "web", "other", &foreign).await?;
    let account = cluster.account()?;
    let status = status_of(&own, "web");

    for good in [json!({"ip": "192.0.2.32"}), json!({"ip": "192.0.2.47"}), json!({"ip": "2001:db8:a::7"})] {
        assert_eq!(patch(&account, &status, &ingress(&good)).await?, (0, String::new()), "{good}");
    }
    let ours = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web", "namespace": own},
        "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.33"}]}, "conditions": [condition(PROGRAMMED)]}});
    let applied = account.request("PATCH", &format!("{status}&force=true"), APPLY, Some(&ours)).await;
    assert_eq!(refusal(applied)?, (0, String::new()));
    let now = cluster.client.get("Service", &own, "web").await?;
    assert_eq!(now["status"]["conditions"].as_array().map(Vec::len), Some(2), "{}", now["status"]);

    // Refused by the policy: the right to patch a status cannot say so.
    let theirs = now["status"]["conditions"].as_array().context("conditions")?.clone();
    let without: Vec<_> = theirs.iter().filter(|it| it["type"] == PROGRAMMED).cloned().collect();
    for bad in [
        ingress(&json!({"ip": "192.0.2.48"})),
        ingress(&json!({"ip": "10.96.0.1"})),
        ingress(&json!({"hostname": "elsewhere.example.com"})),
        ingress(&json!({"ip": "192.0.2.34", "hostname": "elsewhere.example.com"})),
        json!({"metadata": {"labels": {"app": "mine"}}}),
        json!({"metadata": {"annotations": {"example.com/a": "b"}}}),
        json!({"metadata": {"finalizers": ["example.com/hold"]}}),
        json!({"status": {"conditions": without}}),
        json!({"status": {"conditions": [condition("example.com/Another")]}}),
    ] {
        let (code, text) = patch(&account, &status, &bad).await?;
        ensure!(code == 422 && text.contains("ValidatingAdmissionPolicy 'lbd-services'"), "{bad}: {code} {text}");
    }
    // To take ours away is right.
    assert_eq!(patch(&account, &status, &json!({"status": {"loadBalancer": null}})).await?.0, 0);

    // Refused without it.
    let own_lease = own_object(&own);
    let refused = [
        ("PATCH", status_of(&other, "web"), ingress(&json!({"ip": "192.0.2.32"}))),
        ("PATCH", format!("/api/v1/namespaces/{own}/services/web"), json!({"spec": {"type": "ClusterIP"}})),
        ("DELETE", format!("/api/v1/namespaces/{own}/services/web"), Value::Null),
        ("GET", format!("/api/v1/namespaces/{own}/secrets"), Value::Null),
        ("GET", "/api/v1/secrets".into(), Value::Null),
        ("GET", "/api/v1/namespaces/lbd-system/configmaps".into(), Value::Null),
        ("GET", "/api/v1/namespaces/lbd-system/configmaps/kube-root-ca.crt".into(), Value::Null),
        ("GET", format!("/api/v1/namespaces/{own}/configmaps/{own_lease}"), Value::Null),
        ("DELETE", format!("/api/v1/namespaces/lbd-system/configmaps/{own_lease}"), Value::Null),
        ("GET", format!("/apis/coordination.k8s.io/v1/namespaces/lbd-system/leases/{own_lease}-2"), Value::Null),
        (
            "POST",
            "/api/v1/namespaces".into(),
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "x"}}),
        ),
        ("POST", format!("/api/v1/namespaces/{own}/services"), service(&own, "more", "ClusterIP", &[(1, 0)])),
    ];
    for (method, path, body) in refused {
        let body = (!body.is_null()).then_some(&body);
        let content = if method == "PATCH" { MERGE } else { "application/json" };
        let (code, text) = refusal(account.request(method, &path, content, body).await)?;
        ensure!(code == 403, "{method} {path}: {code} {text}");
    }
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b42_claims_by_label_bind_the_account_to_what_carries_the_labels() -> Result<()> {
    let cluster = Cluster::any().await?;
    // Labels that nothing else in the cluster has.
    let mark = cluster.namespace.clone();
    let hosted = namespace(&cluster, "hosted", &json!({"test-of": mark, "tier": "hosted"})).await?;
    let shared = namespace(&cluster, "shared", &json!({"test-of": mark})).await?;
    let claim = format!(
        "[{{ namespace_selector: {{ matchLabels: {{ test-of: {mark}, tier: hosted }} }} }}, {{ namespaces: [{shared}], service_selector: \
         {{ matchLabels: {{ tenant: a }} }} }}]"
    );
    for (place, name, labels) in
        [(&hosted, "any", json!({})), (&shared, "ours", json!({"tenant": "a"})), (&shared, "not-ours", json!({}))]
    {
        let mut object = service(place, name, "LoadBalancer", &[(443, 0)]);
        object["metadata"]["labels"] = labels;
        cluster.client.create(&object).await?;
    }
    cluster.client.create(&service(&mark, "outside", "LoadBalancer", &[(443, 0)])).await?;
    cluster.grant(&configuration(&cluster, &claim)?).await?;
    let account = cluster.account()?;
    let address = ingress(&json!({"ip": "192.0.2.40"}));
    // The namespace's labels are read by the policy from a watch of its own.
    let begun = Instant::now();
    while patch(&account, &status_of(&hosted, "any"), &address).await?.0 != 0 {
        ensure!(begun.elapsed() < Duration::from_secs(20), "a Service in a labelled namespace cannot be written to");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(patch(&account, &status_of(&shared, "ours"), &address).await?, (0, String::new()));
    for (place, name) in [(&shared, "not-ours"), (&mark, "outside")] {
        let (code, text) = patch(&account, &status_of(place, name), &address).await?;
        ensure!(code == 422 && text.contains("ValidatingAdmissionPolicy"), "{place}/{name}: {code} {text}");
    }
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b42_the_policy_of_many_tenants_tells_each_from_the_others() -> Result<()> {
    const TENANTS: usize = 150;
    let cluster = Cluster::any().await?;
    let own = cluster.namespace.as_str();
    let mut text = format!(
        "version: 1\nhubs: [{{ name: {own}, interface: hub0, kubernetes: {{ {} }} }}]\ntenants:\n",
        cluster.settings()?
    );
    for tenant in 0..TENANTS {
        // Not a prefix, but many.
        let _ = writeln!(
            text,
            "  - {{ name: t{tenant}, segment: {{ interface: ten{} }}, pools: ['2001:db8:{tenant:x}::1-2001:db8:{tenant:x}::ffff:fffe'], \
             claim: [{{ namespaces: [{own}], service_selector: {{ matchLabels: {{ tenant: t{tenant} }} }} }}] }}",
            tenant % 8
        );
    }
    cluster.grant(&text).await?;
    let account = cluster.account()?;
    for tenant in [0, TENANTS / 2, TENANTS - 1] {
        let mut object = service(own, &format!("of-t{tenant}"), "LoadBalancer", &[(443, 0)]);
        object["metadata"]["labels"] = json!({"tenant": format!("t{tenant}")});
        cluster.client.create(&object).await?;
        let status = status_of(own, &format!("of-t{tenant}"));
        let theirs = ingress(&json!({"ip": format!("2001:db8:{:x}::5", (tenant + 1) % TENANTS)}));
        let (code, text) = patch(&account, &status, &theirs).await?;
        ensure!(code == 422 && text.contains("ValidatingAdmissionPolicy"), "t{tenant}: {code} {text}");
        let ours = ingress(&json!({"ip": format!("2001:db8:{tenant:x}::ffff:fffe")}));
        assert_eq!(patch(&account, &status, &ours).await?, (0, String::new()), "t{tenant}");
    }
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn b42_a_check_finds_nothing_wrong_with_the_rights_that_are_printed() -> Result<()> {
    let cluster = Cluster::any().await?;
    let text = configuration(&cluster, &format!("[{{ namespaces: [{}] }}]", cluster.namespace))?;
    cluster.grant(&text).await?;
    let parsed = |text: &str| lbd::config::parse(text, "lbd.yaml").map_err(|error| anyhow::anyhow!(error.report()));
    assert_eq!(check(&parsed(&text)?).await?, []);
    // Another hub's Lease and ConfigMap are not granted: what is named is one object.
    let other = text.replacen(&format!("name: {}", cluster.namespace), "name: another-hub", 1);
    let missing: Vec<_> = check(&parsed(&other)?).await?.into_iter().map(|finding| finding.message).collect();
    assert_eq!(missing.len(), 4, "{missing:?}");
    assert!(missing.iter().all(|text| text.contains("leases") || text.contains("configmaps")), "{missing:?}");
    // Another namespace's Services are not granted either.
    let other = text.replacen(&format!("namespaces: [{}]", cluster.namespace), "namespaces: [default]", 1);
    let missing: Vec<_> = check(&parsed(&other)?).await?.into_iter().map(|finding| finding.message).collect();
    assert_eq!(missing.len(), 3, "{missing:?}");
    assert!(missing.iter().all(|text| text.contains("in namespace default")), "{missing:?}");
    cluster.finish().await
}

/// A refusal that is expected of a server.
struct Refused {
    what: &'static str,
    method: &'static str,
    path: String,
    content: &'static str,
    body: Value,
    codes: &'static [u16],
}

#[tokio::test(flavor = "multi_thread")]
async fn server_refuses_what_makes_no_sense() -> Result<()> {
    let cluster = Cluster::any().await?;
    let (client, own) = (&cluster.client, cluster.namespace.as_str());
    let made = client.create(&service(own, "web", "LoadBalancer", &[(443, 0)])).await?;
    let stale = made["metadata"]["resourceVersion"].clone();
    client.patch("Service", own, "web", &json!({"metadata": {"labels": {"a": "b"}}})).await?;
    let mut outdated = made.clone();
    outdated["metadata"]["labels"] = json!({"c": "d"});
    let services = format!("/api/v1/namespaces/{own}/services");
    let slices = format!("/apis/discovery.k8s.io/v1/namespaces/{own}/endpointslices");
    let slice = |addresses: Value| {
        json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": {"name": "web-1", "namespace": own},
            "addressType": "IPv4", "ports": [{"name": "p443", "port": 1, "protocol": "TCP"}], "endpoints": [{"addresses": addresses}]})
    };
    let applied = |metadata: Value, status: Value| json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "status": status});
    let policy = |expression: &str| {
        json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy", "metadata": {"name": own},
            "spec": {"matchConstraints": {"resourceRules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["UPDATE"],
                "resources": ["services/status"]}]}, "validations": [{"expression": expression}]}})
    };
    let post = |what, path: &str, body| Refused {
        what,
        method: "POST",
        path: path.to_owned(),
        content: JSON,
        body,
        codes: &[422],
    };
    let mut mixed = service(own, "mixed", "NodePort", &[(80, 0)]);
    mixed["spec"]["loadBalancerClass"] = json!("example.com/x");
    let mut capitals = service(own, "capitals", "ClusterIP", &[(80, 0)]);
    capitals["spec"]["ports"][0]["name"] = json!("HTTP");
    let event = json!({"apiVersion": "v1", "kind": "Event", "metadata": {"name": "web.1", "namespace": own}, "reason": "R", "type": "Warning",
        "involvedObject": {"kind": "Service", "namespace": "default", "name": "web"}});
    let leases = format!("/apis/coordination.k8s.io/v1/namespaces/{own}/leases");
    let lease = |name: &str, spec: Value| json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name, "namespace": own}, "spec": spec});
    client.create(&lease("kept", json!({"holderIdentity": "a"}))).await?;
    let account =
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "brief", "namespace": own}});
    client.create(&account).await?;
    let token =
        json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 599}});
    let twice = json!({"conditions": [condition("example.com/A"), condition("example.com/A")]});
    let long = format!("object.metadata.name != '{}'", "x".repeat(100_000));
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "m", "namespace": own}, "data": {"a/b": "c"}});
    let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "r", "namespace": own},
        "rules": [{"apiGroups": [""], "resources": ["services"], "verbs": []}]});
    let wrong_uid = applied(
        json!({"name": "web", "namespace": own, "uid": "00000000-0000-4000-8000-000000000001"}),
        json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}),
    );
    let all = [
        Refused {
            what: "an object in a namespace that is not there",
            method: "POST",
            path: format!("/api/v1/namespaces/{own}-absent/services"),
            content: JSON,
            body: service(&format!("{own}-absent"), "web", "ClusterIP", &[(80, 0)]),
            codes: &[404],
        },
        post("a Service without ports", &services, service(own, "none", "ClusterIP", &[])),
        post("a class on a NodePort Service", &services, mixed),
        post("a name with capitals", &services, service(own, "Web", "ClusterIP", &[(80, 0)])),
        post("a port of the kubelet", &services, service(own, "kubelet", "LoadBalancer", &[(10250, 0)])),
        post("a port with a name of capitals", &services, capitals),
        post("a NodePort out of the range", &services, service(own, "low", "NodePort", &[(80, 80)])),
        post("a link-local endpoint", &slices, slice(json!(["169.254.0.5"]))),
        post("an endpoint without an address", &slices, slice(json!([]))),
        post("an endpoint of another family", &slices, slice(json!(["2001:db8::1"]))),
        post("an Event about another namespace", &format!("/api/v1/namespaces/{own}/events"), event),
        post("a Lease of no time", &leases, lease("none", json!({"leaseDurationSeconds": 0}))),
        post(
            "a token for less than ten minutes",
            &format!("/api/v1/namespaces/{own}/serviceaccounts/brief/token"),
            token,
        ),
        post("a ConfigMap with a slash in a key", &format!("/api/v1/namespaces/{own}/configmaps"), map),
        post("a Role without verbs", &format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{own}/roles"), role),
        post(
            "a policy that is no CEL",
            "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
            policy("object.spec. == ("),
        ),
        post(
            "a policy with an expression of more than 100,000 characters",
            "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
            policy(&long),
        ),
        Refused {
            codes: &[400],
            ..post(
                "a Lease with a time in whole seconds",
                &leases,
                lease("whole", json!({"renewTime": "2026-01-01T00:00:00Z"})),
            )
        },
        Refused {
            codes: &[400],
            ..post(
                "an object of another namespace",
                &services,
                service("default", "elsewhere", "ClusterIP", &[(80, 0)]),
            )
        },
        Refused { codes: &[400], ..post("an object of another kind", &services, account) },
        Refused {
            method: "PUT",
            ..post("a replacement of a Lease without a version", &format!("{leases}/kept"), lease("kept", json!({})))
        },
        Refused {
            what: "a replacement of an older version",
            method: "PUT",
            path: format!("{services}/web"),
            content: JSON,
            body: outdated,
            codes: &[409],
        },
        Refused {
            what: "a patch of an older version",
            method: "PATCH",
            path: format!("{services}/web"),
            content: MERGE,
            body: json!({"metadata": {"resourceVersion": stale, "labels": {"e": "f"}}}),
            codes: &[409],
        },
        Refused {
            what: "a status for a Service with another UID",
            method: "PATCH",
            path: status_of(own, "web"),
            content: APPLY,
            body: wrong_uid,
            codes: &[409, 422],
        },
        Refused {
            what: "a field that a status does not have",
            method: "PATCH",
            path: status_of(own, "web"),
            content: APPLY,
            body: applied(json!({"name": "web", "namespace": own}), json!({"adress": "192.0.2.1"})),
            codes: &[400, 422, 500],
        },
        Refused {
            what: "a status with two conditions of one type",
            method: "PATCH",
            path: status_of(own, "web"),
            content: APPLY,
            body: applied(json!({"name": "web", "namespace": own}), twice),
            codes: &[400, 422, 500],
        },
        Refused {
            what: "an apply to another name",
            method: "PATCH",
            path: status_of(own, "web"),
            content: APPLY,
            body: applied(json!({"name": "other", "namespace": own}), json!({})),
            codes: &[400],
        },
        Refused {
            what: "a list of a version that is to come",
            method: "GET",
            path: format!("{services}?resourceVersion=9000000000000000000"),
            content: "",
            body: Value::Null,
            codes: &[504],
        },
        Refused {
            what: "a list of a version that is no number",
            method: "GET",
            path: format!("{services}?resourceVersion=latest"),
            content: "",
            body: Value::Null,
            codes: &[400],
        },
        Refused {
            what: "an apply by nobody",
            method: "PATCH",
            path: format!("{services}/web/status"),
            content: APPLY,
            body: applied(json!({"name": "web", "namespace": own}), json!({})),
            codes: &[400, 422],
        },
        Refused {
            what: "a status of a Service that is not there",
            method: "PATCH",
            path: status_of(own, "absent"),
            content: MERGE,
            body: ingress(&json!({"ip": "192.0.2.1"})),
            codes: &[404],
        },
    ];
    let mut otherwise = Vec::new();
    for refused in all {
        let Refused { what, method, path, content, body, codes } = refused;
        let body = (!body.is_null()).then_some(&body);
        let (code, text) = refusal(client.request(method, &path, content, body).await)?;
        if !codes.contains(&code) {
            otherwise.push(format!("{what}: {code} {text}"));
        }
    }
    ensure!(otherwise.is_empty(), "answered otherwise:\n{}", otherwise.join("\n"));
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn server_makes_by_put_what_is_not_there_of_some_kinds() -> Result<()> {
    let cluster = Cluster::any().await?;
    let (client, own) = (&cluster.client, cluster.namespace.as_str());
    let lease = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "new", "namespace": own},
        "spec": {"holderIdentity": "a", "renewTime": "2026-01-01T00:00:00.000000Z"}});
    client.replace("Lease", own, "new", &lease).await?;
    assert_eq!(client.get("Lease", own, "new").await?["spec"]["holderIdentity"], "a");
    // One that is meant to be there is not made.
    let mut known = lease.clone();
    known["metadata"] = json!({"name": "gone", "namespace": own, "uid": "00000000-0000-4000-8000-000000000001"});
    let path = format!("/apis/coordination.k8s.io/v1/namespaces/{own}/leases/gone");
    let (code, text) = refusal(client.request("PUT", &path, JSON, Some(&known)).await)?;
    ensure!(code == 409, "{code} {text}");
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "new", "namespace": own}, "data": {"a": "b"}});
    let path = format!("/api/v1/namespaces/{own}/configmaps/new");
    let (code, text) = refusal(client.request("PUT", &path, JSON, Some(&map)).await)?;
    ensure!(code == 404, "{code} {text}");
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn server_clears_statuses_that_do_not_belong() -> Result<()> {
    let cluster = Cluster::any().await?;
    let (client, own) = (&cluster.client, cluster.namespace.as_str());
    let mut object = service(own, "web", "LoadBalancer", &[(443, 0)]);
    object["status"] = json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}});
    let made = client.create(&object).await?;
    ensure!(made.pointer("/status/loadBalancer/ingress").is_none(), "a Service is born with a status: {made}");
    client.patch_status("Service", own, "web", "m", &ingress(&json!({"ip": "192.0.2.1"}))).await?;
    let changed = client.patch("Service", own, "web", &json!({"spec": {"type": "NodePort"}})).await?;
    ensure!(changed.pointer("/status/loadBalancer/ingress").is_none(), "the address stays: {changed}");
    let refused = client.patch_status("Service", own, "web", "m", &ingress(&json!({"ip": "192.0.2.1"}))).await;
    ensure!(refused.is_err(), "a NodePort Service takes an address: {refused:?}");
    // Labels can be changed through the status, which is why there is a policy.
    let changed = client.patch_status("Service", own, "web", "m", &json!({"metadata": {"labels": {"a": "b"}}})).await?;
    assert_eq!(changed["metadata"]["labels"]["a"], "b");
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn server_makes_nothing_in_a_namespace_that_goes() -> Result<()> {
    let cluster = Cluster::any().await?;
    let going = namespace(&cluster, "going", &json!({})).await?;
    cluster.client.create(&service(&going, "web", "ClusterIP", &[(80, 0)])).await?;
    cluster.client.delete("Namespace", "", &going).await?;
    let path = format!("/api/v1/namespaces/{going}/services");
    // With controllers it may be gone at once; then it is not there.
    let late = service(&going, "b", "ClusterIP", &[(80, 0)]);
    match cluster.client.request("POST", &path, "application/json", Some(&late)).await {
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        Err(kube::Error::Api(status)) if status.code == 403 && status.message.contains("being terminated") => {
            let causes: Vec<_> = status.details.iter().flat_map(|details| &details.causes).collect();
            ensure!(causes.iter().any(|cause| cause.reason == "NamespaceTerminating"), "{causes:?}");
        }
        other => bail!("{other:?}"),
    }
    // It is going already.
    let again = cluster.client.request("DELETE", &format!("/api/v1/namespaces/{going}"), "", None).await;
    let (code, text) = refusal(again)?;
    ensure!(matches!(code, 404 | 409), "{code} {text}");
    cluster.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn server_knows_an_account_by_its_token_while_it_lasts() -> Result<()> {
    let cluster = Cluster::any().await?;
    cluster.grant(&configuration(&cluster, &format!("[{{ namespaces: [{}] }}]", cluster.namespace))?).await?;
    let account = cluster.account()?;
    account.list("Service", "").await?;
    cluster.client.delete("ServiceAccount", "lbd-system", "lbd").await?;
    let begun = Instant::now();
    loop {
        match account.request("GET", "/api/v1/services", "", None).await {
            Err(kube::Error::Api(status)) if status.code == 401 => break,
            Err(kube::Error::Api(status)) => bail!("{}", status.message),
            // What was found out about a token is believed for some seconds.
            _ if begun.elapsed() < Duration::from_secs(40) => tokio::time::sleep(Duration::from_millis(200)).await,
            other => bail!("the token of an account that is gone is good: {other:?}"),
        }
    }
    cluster.finish().await
}
