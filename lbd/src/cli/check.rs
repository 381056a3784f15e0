//! `lbd check`.

use std::fmt::Write;
use std::path::Path;

use super::{DONE, FAILED, USAGE, complain, say};
use crate::config::{self, Severity};
use crate::dataplane::{self, Problem};
use crate::source::kubernetes;

/// Validates file and host, changes nothing.
pub(super) fn run(path: &Path) -> u8 {
    let config = match config::load(path) {
        Ok(config) => config,
        Err(error) => return complain(&error.report(), USAGE),
    };
    let facts = match dataplane::host_facts() {
        Ok(facts) => facts,
        Err(error) => return complain(&error.to_string(), FAILED),
    };
    let misfits = config::check_host(&config, &facts);
    let mistakes: Vec<String> =
        misfits.iter().filter(|misfit| misfit.severity == Severity::Error).map(ToString::to_string).collect();
    // As `lbd run` says it: what else there may be follows from the file, and is told once that is right.
    if !mistakes.is_empty() {
        return complain(&mistakes.join("\n"), USAGE);
    }
    let mut problems = dataplane::preflight(&config);
    problems.extend(cluster(&config));
    let memory = dataplane::map_memory(&config, possible_cpus());
    let printed = say(&report(path, &misfits, &problems, &memory));
    if printed != DONE {
        printed
    } else if problems.iter().any(|problem| problem.fatal) {
        FAILED
    } else {
        DONE
    }
}

/// What the hub's cluster thinks of us.
fn cluster(config: &config::Config) -> Vec<Problem> {
    let Some(settings) = &config.hub.kubernetes else { return Vec::new() };
    let subject = settings.kubeconfig.display().to_string();
    let problem = |fatal, message| Problem { fatal, subject: subject.clone(), message };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return vec![problem(true, format!("no runtime to ask the cluster with: {error}"))],
    };
    match runtime.block_on(kubernetes::check(config)) {
        Ok(findings) => findings.into_iter().map(|finding| problem(finding.fatal, finding.message)).collect(),
        Err(error) => vec![problem(true, error.to_string())],
    }
}

fn possible_cpus() -> u32 {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/possible").unwrap_or_default();
    parse_cpus(&text).unwrap_or(1)
}

/// `0-3,5` → 6: the kernel sizes per-CPU maps by the highest possible CPU.
fn parse_cpus(text: &str) -> Option<u32> {
    let last = text.trim().rsplit([',', '-']).next()?;
    last.parse::<u32>().ok()?.checked_add(1)
}

fn report(path: &Path, misfits: &[config::Problem], problems: &[Problem], memory: &[(&str, u64)]) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = writeln!(text, "{}: the file is valid", path.display());
    for misfit in misfits {
        let _ = writeln!(text, "warning: {misfit}");
    }
    for problem in problems {
        let level = if problem.fatal { "error" } else { "warning" };
        let _ = writeln!(text, "{level}: {}: {}", problem.subject, problem.message);
    }
    if !memory.is_empty() {
        let total: u64 = memory.iter().map(|(_, bytes)| bytes).sum();
        let _ = writeln!(text, "map memory: {}", mebibytes(total));
        for (name, bytes) in memory {
            let _ = writeln!(text, "  {name:<15} {:>12}", mebibytes(*bytes));
        }
    }
    let fatal = problems.iter().filter(|problem| problem.fatal).count();
    let _ = match (fatal, problems.len() + misfits.len()) {
        (0, 0) => writeln!(text, "the host is ready"),
        (0, warnings) => writeln!(text, "the host is ready, with {warnings} warning(s)"),
        (errors, _) => writeln!(text, "the host is not ready: {errors} error(s)"),
    };
    text
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus() {
        for (text, count) in [("0\n", Some(1)), ("0-3\n", Some(4)), ("0-3,5", Some(6)), ("", None), ("x", None)] {
            assert_eq!(parse_cpus(text), count, "{text}");
        }
    }

    #[test]
    fn a_report() {
        let problems = [
            Problem { fatal: true, subject: "eth9".to_owned(), message: "does not exist".to_owned() },
            Problem { fatal: false, subject: "eth1".to_owned(), message: "GRO is on".to_owned() },
        ];
        let text = report(Path::new("f.yaml"), &[], &problems, &[("flows4", 3 << 20), ("maglev", 1 << 19)]);
        assert_eq!(
            text,
            "f.yaml: the file is valid\nerror: eth9: does not exist\nwarning: eth1: GRO is on\nmap memory: 3.5 MiB\n  \
             flows4               3.0 MiB\n  maglev               0.5 MiB\nthe host is not ready: 1 error(s)\n"
        );
        assert!(report(Path::new("f"), &[], &[], &[]).ends_with("the host is ready\n"));
    }
}
