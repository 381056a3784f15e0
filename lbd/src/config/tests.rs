use super::*;

const DESIGN: &str = include_str!("testdata/design.yaml");

#[test]
fn design() {
    let mut text = DESIGN.to_owned();
    for (from, to) in [
        ("", ""),
        (" vlan: 2003,", ""),
        ("probe: http, ", ""),
        (", path: /healthz/ready", ""),
        ("        source_ranges: [192.168.203.0/24]\n", ""),
    ] {
        text = text.replace(from, to);
        match parse(&text, "lbd.yaml") {
            Err(e) => println!("{}", e.report()),
            Ok(c) => println!("{c:#?}"),
        }
    }
    for bad in [
        "",
        "{",
        "version: 1\nhubs:\n",
        "version: 1\nhubs: []\ntenants:",
        "a: &a [*a]",
        "a: *b",
        "version: 1\nhubs: [{",
        "foo: \"bar",
        "version: 2",
        "version:",
        "version: 1\n\thubs: 3\n",
        "version: 1\nhubs:\n  -\n",
        "version: 1\nhubs: !x []",
        "version: 1\nhubs: 3",
        "? [1]\n: 3",
        "version: 1\u{0}",
        "---\nversion: 1\n---\nversion: 1\n",
        "{version: 1, version: 1}",
        "{version: 1, hubs: [{<<: {name: 3, interface: a b}, name: x}]}",
    ] {
        println!("== {bad:?}\n{}", parse(bad, "lbd.yaml").unwrap_err().report());
    }
}
