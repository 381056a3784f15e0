//! The binary from outside: names, exit codes, messages. Nothing here needs root.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::fs;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

const CONFIG: &str = "\
version: 1
hubs: [{ name: hub, interface: eth0, snat: [10.0.0.2], node_cidrs: [10.0.0.0/24] }]
tenants:
  - name: a
    segment: { interface: eth1, address: 192.0.2.2/24 }
    pools: [192.0.2.32/28]
";

fn lbd(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lbd")).args(arguments).env_remove("RUST_LOG").output().unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn write(directory: &Path, text: &str) -> String {
    let path = directory.join("lbd.yaml");
    fs::write(&path, text).unwrap();
    path.display().to_string()
}

#[test]
fn answers_to_the_name_lbctl() {
    let directory = tempfile::tempdir().unwrap();
    let link = directory.path().join("lbctl");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_lbd"), &link).unwrap();
    let output = Command::new(&link).arg("--help").output().unwrap();
    assert_eq!(code(&output), 0);
    let help = stdout(&output);
    assert!(help.contains("Usage: lbctl"), "{help}");
    for command in ["status", "services", "backends", "flows", "whois", "vips", "kill", "drops", "events", "reload"] {
        assert!(help.contains(&format!("  {command}")), "{command}: {help}");
    }
    let named = Command::new(env!("CARGO_BIN_EXE_lbd")).arg0("/usr/bin/lbctl").arg("--version").output().unwrap();
    assert!(stdout(&named).starts_with("lbctl "), "{named:?}");
    assert!(stdout(&lbd(&["--version"])).starts_with("lbd "));
}

#[test]
fn usage_is_exit_code_2() {
    for arguments in [
        &[][..],
        &["fly"],
        &["lbctl"],
        &["lbctl", "explain", "192.0.2.9", "192.0.2.34:6443"],
        &["lbctl", "kill"],
        &["lbctl", "flows", "--follow", "--top", "3"],
        &["lbctl", "flows", "--interval", "1s"],
        &["lbctl", "drops", "--watch", "--interval", "1ms"],
        &["lbctl", "whois", "10.0.0.2"],
        &["lbctl", "whois"],
        &["lbctl", "flows", "--state", "open"],
        &["detach", "--release"],
        &["run", "--log-format", "xml"],
    ] {
        let output = lbd(arguments);
        assert_eq!(code(&output), 2, "{arguments:?}: {output:?}");
        assert!(!output.stderr.is_empty());
        assert!(output.stdout.is_empty());
    }
    let refused = stderr(&lbd(&["lbctl", "capture", "all"]));
    assert!(refused.contains("'capture'"), "{refused}");
}

#[test]
fn a_bad_file_is_exit_code_2_with_line_and_column() {
    let directory = tempfile::tempdir().unwrap();
    let path = write(directory.path(), &format!("{CONFIG}surprise: 1\n"));
    for arguments in [
        &["run", "--config", &path][..],
        &["check", "--config", &path],
        &["detach", "--config", &path],
        &["lbctl", "status", "--config", &path],
    ] {
        let output = lbd(arguments);
        assert_eq!(code(&output), 2, "{arguments:?}: {output:?}");
        let message = stderr(&output);
        assert!(message.contains(&format!("{path}:7:1:")), "{message}");
        assert!(message.contains("surprise"), "{message}");
    }
    let missing = lbd(&["run", "--config", "/nowhere/lbd.yaml"]);
    assert_eq!(code(&missing), 2);
    assert!(stderr(&missing).contains("/nowhere/lbd.yaml"));
    let filter = lbd(&["run", "--config", &path, "--log", "=="]);
    assert_eq!(code(&filter), 2);
}

#[test]
fn neither_agent_nor_datapath_is_exit_code_3() {
    let directory = tempfile::tempdir().unwrap();
    let text = format!(
        "{CONFIG}state_dir: {0}/state\nsocket: {0}/lbd.sock\ndatapath: {{ bpffs: {0} }}\n",
        directory.path().display()
    );
    let path = write(directory.path(), &text);
    for command in [
        &["services"][..],
        &["backends"],
        &["flows"],
        &["flows", "--follow"],
        &["flows", "--state", "unreplied", "--top", "3"],
        &["whois", "10.0.0.2:1024"],
        &["whois", "[2001:db8::2]:1024", "[2001:db8::11]:443"],
        &["vips"],
        &["kill", "--tenant", "a"],
        &["drops"],
        &["drops", "--watch"],
        &["events"],
        &["reload"],
        &["status", "--check"],
    ] {
        let arguments = [&["lbctl", "--config", &path], command].concat();
        let output = lbd(&arguments);
        assert_eq!(code(&output), 3, "{arguments:?}: {output:?}");
    }
    let status = lbd(&["lbctl", "--config", &path, "status", "-o", "json"]);
    assert_eq!(code(&status), 0);
    let json: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    assert_eq!(json["health"], "absent");
    let socket = format!("{}/lbd.sock", directory.path().display());
    assert!(json["agent"].as_str().unwrap().contains(&socket), "{json}");
}

#[test]
fn a_closed_pipe_is_no_failure() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_lbd"))
        .args(["lbctl", "status"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let status = child.wait().unwrap();
    let mut message = String::new();
    child.stderr.take().unwrap().read_to_string(&mut message).unwrap();
    assert!(status.success(), "{status}: {message}");
    let mut help = Command::new(env!("CARGO_BIN_EXE_lbd"))
        .args(["lbctl", "flows", "--help"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    drop(help.stdout.take());
    assert!(help.wait().unwrap().success());
}

/// What only the host proves wrong is told as what the file proves wrong: on standard error, once, with its place.
#[test]
fn a_missing_interface_is_one_message_with_its_place() {
    let directory = tempfile::tempdir().unwrap();
    let path = write(directory.path(), &CONFIG.replace("eth0", "lbd-none0").replace("eth1", "lbd-none1"));
    let output = lbd(&["check", "--config", &path]);
    assert_eq!(code(&output), 2, "{output:?}");
    let text = stderr(&output);
    assert!(output.stdout.is_empty(), "{output:?}");
    for (place, name) in [(":2:32: ", "lbd-none0"), (":5:27: ", "lbd-none1")] {
        let lines: Vec<_> = text.lines().filter(|line| line.contains(&format!("interface {name}"))).collect();
        assert!(lines.len() == 1 && lines[0].contains(&format!("{path}{place}")), "{text}");
    }
}

/// A path that is no BPF file system is named, and nothing is detached for it.
#[test]
fn detach_from_a_place_that_is_no_bpffs() {
    let directory = tempfile::tempdir().unwrap();
    let output = lbd(&["detach", "--bpffs", &directory.path().display().to_string()]);
    assert_eq!(code(&output), 1, "{output:?}");
    assert!(stderr(&output).contains("is not a BPF file system"), "{output:?}");
}

#[test]
fn the_sample_of_rights_is_what_the_sample_file_needs() {
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy");
    let output = lbd(&["rbac", "--config", &deploy.join("lbd.yaml").display().to_string()]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let sample = fs::read_to_string(deploy.join("rbac.yaml")).unwrap();
    assert!(stdout(&output) == sample, "make it again: lbd rbac --config deploy/lbd.yaml > deploy/rbac.yaml");
}

#[test]
fn rights_without_a_cluster_are_a_failure() {
    let directory = tempfile::tempdir().unwrap();
    let output = lbd(&["rbac", "--config", &write(directory.path(), CONFIG)]);
    assert_eq!((code(&output), stdout(&output).as_str()), (1, ""));
    assert!(stderr(&output).contains("has no `kubernetes`"), "{}", stderr(&output));
}
