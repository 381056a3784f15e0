//! Command lines of `lbd` and `lbctl`, and the exit codes.

use std::ffi::OsString;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};

use crate::agent::{self, AgentError};
use crate::api::types::ReloadRequest;
use crate::flows::whois::Question;
use crate::flows::{By, Endpoint, Filter, State};
use crate::lbctl::{self, LbctlError, Output, Place};
use crate::source::ObjectName;
use crate::source::kubernetes::rights;

mod check;
mod detach;
mod logging;
mod rollback;

pub use logging::LogFormat;

/// Where the configuration is unless said otherwise.
pub const DEFAULT_CONFIG: &str = "/etc/lbd/lbd.yaml";

/// Done.
const DONE: u8 = 0;
/// Failed.
const FAILED: u8 = 1;
/// Wrong usage or an invalid configuration.
const USAGE: u8 = 2;
/// Agent or datapath is not there.
const ABSENT: u8 = 3;

const EXIT_CODES: &str =
    "Exit codes: 0 done, 1 failed, 2 wrong usage or invalid configuration, 3 agent or datapath not there.";

/// Tenant-edge load balancer.
#[derive(Debug, Parser)]
#[command(name = "lbd", version, after_help = EXIT_CODES)]
pub struct Lbd {
    #[command(subcommand)]
    command: LbdCommand,
}

#[derive(Debug, Subcommand)]
enum LbdCommand {
    /// Run the agent in the foreground.
    ///
    /// Stopping it leaves the datapath forwarding; `lbd detach` removes the datapath.
    Run(RunArgs),
    /// Validate the configuration file and the host; changes nothing.
    Check(CheckArgs),
    /// Print the Kubernetes manifests that grant this configuration's agent what it asks for, and nothing else.
    ///
    /// For `kubectl apply --server-side --force-conflicts -f -`. To be repeated when claims or pools change.
    Rbac(CheckArgs),
    /// Remove programs, pins and announcements from this host: connections through lbd end.
    ///
    /// Works from what is pinned; needs no agent. Stop the agent first.
    Detach(DetachArgs),
    /// Go back to the datapath that was in force before an upgrade to another map ABI; connections go along.
    ///
    /// For 24 hours after such an upgrade the old maps and programs are kept. Stop the agent, run this, and start the lbd of before.
    Rollback(RollbackArgs),
    /// The operator's tool; also answers to the name `lbctl`.
    Lbctl(Lbctl),
}

#[derive(Debug, Args)]
struct RunArgs {
    /// Configuration file.
    #[arg(long, value_name = "FILE", default_value = DEFAULT_CONFIG)]
    config: PathBuf,
    /// Form of the log on standard error.
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t)]
    log_format: LogFormat,
    /// What to log [default: RUST_LOG, else info], e.g. `debug`, or `info,lbd::source=debug`.
    #[arg(long, value_name = "FILTER")]
    log: Option<String>,
}

#[derive(Debug, Args)]
struct CheckArgs {
    /// Configuration file.
    #[arg(long, value_name = "FILE", default_value = DEFAULT_CONFIG)]
    config: PathBuf,
}

#[derive(Debug, Args)]
struct DetachArgs {
    /// Configuration file: says where the BPF file system is.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// BPF file system [default: /sys/fs/bpf].
    #[arg(long, value_name = "PATH", conflicts_with = "config")]
    bpffs: Option<PathBuf>,
    /// Also take our addresses and conditions out of the statuses of Services: the cluster then knows that nobody serves them.
    #[arg(long, requires = "config")]
    release: bool,
}

#[derive(Debug, Args)]
struct RollbackArgs {
    /// Configuration file: says where the BPF file system is.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// BPF file system [default: /sys/fs/bpf].
    #[arg(long, value_name = "PATH", conflicts_with = "config")]
    bpffs: Option<PathBuf>,
    /// Do not go back but give the way back up, and free the memory of the old maps. The agent may run.
    #[arg(long)]
    discard: bool,
}

/// The operator's tool of lbd.
///
/// All but health and names is read from the pinned maps, and works while the agent is down.
#[derive(Debug, Parser)]
#[command(name = "lbctl", version, after_help = EXIT_CODES)]
pub struct Lbctl {
    /// Form of the output.
    #[arg(short, long, value_name = "FORM", value_enum, global = true, default_value_t)]
    output: OutputArg,
    /// Configuration file: says where socket, BPF file system and state are [default: /etc/lbd/lbd.yaml, if it can be read].
    #[arg(long, value_name = "FILE", global = true)]
    config: Option<PathBuf>,
    /// The agent's socket [default: the configuration's, else /run/lbd/lbd.sock].
    #[arg(long, value_name = "PATH", global = true)]
    socket: Option<PathBuf>,
    /// BPF file system [default: the configuration's, else /sys/fs/bpf].
    #[arg(long, value_name = "PATH", global = true)]
    bpffs: Option<PathBuf>,
    #[command(subcommand)]
    command: LbctlCommand,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum OutputArg {
    /// For reading.
    #[default]
    Table,
    /// For reading, every column.
    Wide,
    /// For programs.
    Json,
}

#[derive(Debug, Subcommand)]
enum LbctlCommand {
    /// Version, interfaces, sources and their age, fill of the tables.
    Status {
        /// Exit with 1 if something is degraded, with 3 if agent or datapath is not there.
        #[arg(long)]
        check: bool,
    },
    /// Frontends with VIP, health and counts.
    Services,
    /// Backends with state, cause, since when, and flows.
    Backends,
    /// Live connections.
    Flows(FlowsArgs),
    /// Who is behind a connection that a node or backend shows: which client, through which VIP.
    Whois {
        /// Source of the connection, as the backend sees it.
        #[arg(value_name = "SNAT-IP:PORT")]
        snat: SocketAddr,
        /// The backend: address, or address:port, which is looked up at once. Several may have connections from one source.
        #[arg(value_name = "BACKEND")]
        backend: Option<Endpoint>,
    },
    /// Addresses of tenants: used, reserved, in conflict, and how many are free.
    Vips,
    /// Packets not forwarded, by reason and tenant.
    Drops(DropsArgs),
    /// End connections: the agent makes lbd forget them, and their next packets are refused. At least one filter.
    #[command(arg_required_else_help = true)]
    Kill(FilterArgs),
    /// What happened lately.
    Events,
    /// Take over a Service that shows an address of another load balancer (Warning ForeignAddress): it gets one of ours.
    Adopt {
        /// The Service.
        #[arg(value_name = "NAMESPACE/NAME", value_parser = service_name)]
        service: String,
    },
    /// Accept that the API server is another cluster's than before (Warning ClusterChanged): its state is applied.
    AcceptCluster,
    /// Have the agent reload its configuration file: all of it or nothing.
    Reload {
        /// Only say what would change.
        #[arg(long)]
        dry_run: bool,
        /// Go on although live flows are cut.
        #[arg(long)]
        accept_loss: bool,
    },
}

#[derive(Debug, Args)]
struct FilterArgs {
    /// Only this tenant's.
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Only through this VIP: address, address:port or prefix.
    #[arg(long, value_name = "ADDRESS")]
    vip: Option<Endpoint>,
    /// Only from this client: address, address:port or prefix.
    #[arg(long, value_name = "ADDRESS")]
    client: Option<Endpoint>,
    /// Only to this backend: address, address:port or prefix.
    #[arg(long, value_name = "ADDRESS")]
    backend: Option<Endpoint>,
    /// Only of this Service or frontend: namespace/name, or a name.
    #[arg(long, value_name = "NAME")]
    service: Option<String>,
    /// Only this protocol.
    #[arg(long, value_name = "PROTOCOL", value_enum, ignore_case = true)]
    proto: Option<ProtocolArg>,
    /// Only in this state: half_open, established, closing, closed or reset; UDP: unreplied or replied.
    #[arg(long, value_name = "STATE")]
    state: Option<State>,
    /// Only those opened at least so long ago: 90s, 15m, 2h, 1d.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    older: Option<Duration>,
}

#[derive(Debug, Args)]
struct FlowsArgs {
    #[command(flatten)]
    filter: FilterArgs,
    /// Only the first N, largest first.
    #[arg(long, value_name = "N")]
    top: Option<usize>,
    /// What --top goes by [default: bytes].
    #[arg(long, value_name = "ORDER", value_enum, requires = "top")]
    by: Option<ByArg>,
    /// Print flows as they open, change and close, until interrupted.
    #[arg(long, conflicts_with = "top")]
    follow: bool,
    /// Between two looks of --follow [default: 1s].
    #[arg(long, value_name = "TIME", value_parser = interval, requires = "follow")]
    interval: Option<Duration>,
}

#[derive(Debug, Args)]
struct DropsArgs {
    /// Only this tenant's.
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Print what counters gain in each interval, until interrupted.
    #[arg(long)]
    watch: bool,
    /// Between two looks of --watch [default: 1s].
    #[arg(long, value_name = "TIME", value_parser = interval, requires = "watch")]
    interval: Option<Duration>,
}

impl DropsArgs {
    fn command(&self) -> lbctl::Command {
        let watch = self.watch.then(|| self.interval.unwrap_or(INTERVAL));
        lbctl::Command::Drops { tenant: self.tenant.clone(), watch }
    }
}

/// Between two looks of commands that go on.
const INTERVAL: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ProtocolArg {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ByArg {
    /// Bytes both ways.
    Bytes,
    /// Packets both ways.
    Packets,
    /// Age.
    Age,
}

/// `namespace/name`.
fn service_name(text: &str) -> Result<String, String> {
    ObjectName::try_from(text.to_owned()).map(|name| name.to_string())
}

/// `90s`, `15m`, `2h`, `1d`; a bare number is seconds.
fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("\"{text}\" is no time: write 90s, 15m, 2h or 1d");
    let unit = [('s', 1), ('m', 60), ('h', 3600), ('d', 86_400)];
    let (number, factor) =
        unit.iter().find_map(|&(letter, factor)| Some((text.strip_suffix(letter)?, factor))).unwrap_or((text, 1));
    if !number.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(wrong());
    }
    let seconds = number.parse::<u64>().ok().and_then(|number| number.checked_mul(factor)).ok_or_else(wrong)?;
    Ok(Duration::from_secs(seconds))
}

/// As [`duration`], with milliseconds (`250ms`), and at least 100 of them.
fn interval(text: &str) -> Result<Duration, String> {
    const SHORTEST: Duration = Duration::from_millis(100);
    let interval = match text.strip_suffix("ms") {
        Some(number) if number.bytes().all(|byte| byte.is_ascii_digit()) => {
            Duration::from_millis(number.parse().map_err(|_| format!("\"{text}\" is no time: write 250ms or 5s"))?)
        }
        _ => duration(text)?,
    };
    if interval < SHORTEST { Err("the shortest interval is 100ms".to_owned()) } else { Ok(interval) }
}

impl FlowsArgs {
    fn command(&self) -> lbctl::Command {
        let filter = self.filter.filter();
        if self.follow {
            lbctl::Command::Follow { filter, interval: self.interval.unwrap_or(INTERVAL) }
        } else {
            lbctl::Command::Flows { filter, top: self.top.map(|count| (count, self.order())) }
        }
    }

    fn order(&self) -> By {
        match self.by {
            None | Some(ByArg::Bytes) => By::Bytes,
            Some(ByArg::Packets) => By::Packets,
            Some(ByArg::Age) => By::Age,
        }
    }
}

impl FilterArgs {
    fn filter(&self) -> Filter {
        Filter {
            tenant: self.tenant.clone(),
            vip: self.vip,
            client: self.client,
            backend: self.backend,
            snat: None,
            service: self.service.clone(),
            protocol: self.proto.map(|proto| match proto {
                ProtocolArg::Tcp => 6,
                ProtocolArg::Udp => 17,
            }),
            state: self.state,
            older: self.older,
        }
    }
}

/// The command tree of `lbd`, for manual pages and completions.
pub fn lbd_command() -> clap::Command {
    Lbd::command()
}

/// The command tree of `lbctl`, for manual pages and completions.
pub fn lbctl_command() -> clap::Command {
    Lbctl::command()
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    ExitCode::from(run(&std::env::args_os().collect::<Vec<_>>()))
}

fn run(arguments: &[OsString]) -> u8 {
    let own_name = arguments.first().and_then(|name| Path::new(name).file_name());
    let command = if own_name == Some("lbctl".as_ref()) {
        parse::<Lbctl>(arguments).map(LbdCommand::Lbctl)
    } else {
        parse::<Lbd>(arguments).map(|lbd| lbd.command)
    };
    match command {
        Ok(LbdCommand::Run(arguments)) => run_agent(&arguments),
        Ok(LbdCommand::Check(arguments)) => check::run(&arguments.config),
        Ok(LbdCommand::Rbac(arguments)) => rbac(&arguments.config),
        Ok(LbdCommand::Detach(arguments)) => {
            detach::run(arguments.config.as_deref(), arguments.bpffs.as_deref(), arguments.release)
        }
        Ok(LbdCommand::Rollback(arguments)) => {
            rollback::run(arguments.config.as_deref(), arguments.bpffs.as_deref(), arguments.discard)
        }
        Ok(LbdCommand::Lbctl(arguments)) => run_lbctl(&arguments),
        Err(code) => code,
    }
}

/// Parses; prints help, version and mistakes itself.
fn parse<T: CommandFactory + FromArgMatches>(arguments: &[OsString]) -> Result<T, u8> {
    T::command().try_get_matches_from(arguments).and_then(|matches| T::from_arg_matches(&matches)).map_err(|error| {
        // Nobody may be reading: that is no reason to fail.
        let _ = error.print();
        match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => DONE,
            _ => USAGE,
        }
    })
}

/// Prints a message to standard error and returns the code.
fn complain(message: &str, code: u8) -> u8 {
    // Standard error may be closed: the code still tells.
    let _ = writeln!(io::stderr(), "lbd: {message}");
    code
}

/// Prints to standard output; a reader that has gone away is no failure.
fn say(text: &str) -> u8 {
    match io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush()) {
        Ok(()) => DONE,
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => DONE,
        Err(error) => complain(&format!("cannot write to standard output: {error}"), FAILED),
    }
}

fn run_agent(arguments: &RunArgs) -> u8 {
    if let Err(message) = logging::start(arguments.log_format, arguments.log.as_deref()) {
        return complain(&message, USAGE);
    }
    match agent::run(&arguments.config) {
        Ok(()) => DONE,
        Err(AgentError::Config(error)) => complain(&error.report(), USAGE),
        Err(error @ AgentError::Misfit(_)) => complain(&error.to_string(), USAGE),
        Err(error) => complain(&error.to_string(), FAILED),
    }
}

fn rbac(path: &Path) -> u8 {
    match crate::config::load(path) {
        Ok(config) if config.hub.kubernetes.is_none() => complain(
            &format!("{}: the hub has no `kubernetes`: there is nothing to be allowed", path.display()),
            FAILED,
        ),
        Ok(config) => say(&rights::manifests(&config)),
        Err(error) => complain(&error.report(), USAGE),
    }
}

fn run_lbctl(arguments: &Lbctl) -> u8 {
    let mut place = Place::default();
    let config = match &arguments.config {
        Some(path) => match crate::config::load(path) {
            Ok(config) => Some(config),
            Err(error) => return complain(&error.report(), USAGE),
        },
        // lbctl must work while somebody edits the file: without --config, a bad one is as good as none.
        None => crate::config::load(Path::new(DEFAULT_CONFIG)).ok(),
    };
    if let Some(config) = config {
        place = Place { socket: config.socket, bpffs: config.datapath.bpffs, state_dir: config.state_dir };
    }
    if let Some(socket) = &arguments.socket {
        place.socket.clone_from(socket);
    }
    if let Some(bpffs) = &arguments.bpffs {
        place.bpffs.clone_from(bpffs);
    }
    let command = match &arguments.command {
        LbctlCommand::Status { check } => lbctl::Command::Status { check: *check },
        LbctlCommand::Services => lbctl::Command::Services,
        LbctlCommand::Backends => lbctl::Command::Backends,
        LbctlCommand::Flows(flows) => flows.command(),
        LbctlCommand::Whois { snat, backend } => lbctl::Command::Whois(Question { snat: *snat, backend: *backend }),
        LbctlCommand::Vips => lbctl::Command::Vips,
        LbctlCommand::Drops(drops) => drops.command(),
        LbctlCommand::Kill(filter) => lbctl::Command::Kill(filter.filter()),
        LbctlCommand::Events => lbctl::Command::Events,
        LbctlCommand::Adopt { service } => lbctl::Command::Adopt(service.clone()),
        LbctlCommand::AcceptCluster => lbctl::Command::AcceptCluster,
        LbctlCommand::Reload { dry_run, accept_loss } => {
            lbctl::Command::Reload(ReloadRequest { dry_run: *dry_run, accept_loss: *accept_loss })
        }
    };
    let output = match arguments.output {
        OutputArg::Table => Output::Table,
        OutputArg::Wide => Output::Wide,
        OutputArg::Json => Output::Json,
    };
    match lbctl::run(&place, &command, output) {
        Ok(()) | Err(LbctlError::BrokenPipe) => DONE,
        Err(LbctlError::Degraded) => FAILED,
        Err(LbctlError::Gone) => ABSENT,
        Err(LbctlError::Absent(message)) => complain(&message, ABSENT),
        Err(LbctlError::Invalid(message)) => complain(&message, USAGE),
        Err(LbctlError::Failed(message)) => complain(&message, FAILED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lbctl(arguments: &[&str]) -> Result<Lbctl, clap::Error> {
        Lbctl::try_parse_from([&["lbctl"], arguments].concat())
    }

    #[test]
    fn the_command_trees_are_sound() {
        Lbd::command().debug_assert();
        Lbctl::command().debug_assert();
    }

    #[test]
    fn global_options_stand_anywhere() {
        for arguments in [["-o", "json", "flows"], ["flows", "-o", "json"]] {
            assert!(matches!(lbctl(&arguments).unwrap().output, OutputArg::Json));
        }
        let lbd = Lbd::try_parse_from(["lbd", "lbctl", "flows", "--proto", "TCP", "-o", "wide"]).unwrap();
        assert!(matches!(lbd.command, LbdCommand::Lbctl(Lbctl { output: OutputArg::Wide, .. })));
    }

    #[test]
    fn filters_of_flows() {
        let line = "flows --tenant a --vip 192.0.2.34:6443 --client 10.0.0.0/8 --backend 10.0.0.11 --service ns/name --proto tcp \
                    --state established --older 15m --top 5 --by age";
        let parsed = lbctl(&line.split_whitespace().collect::<Vec<_>>()).unwrap();
        let LbctlCommand::Flows(flows) = parsed.command else { panic!("{parsed:?}") };
        let filter = flows.filter.filter();
        assert_eq!(filter.older, Some(Duration::from_mins(15)));
        assert_eq!((filter.state, filter.protocol), (Some(State::Established), Some(6)));
        assert_eq!((flows.top, flows.order()), (Some(5), By::Age));
        for wrong in [
            "flows --by age",
            "flows --state open",
            "flows --client nobody",
            "flows --older soon",
            "flows --top -1",
            "flows --proto sctp",
        ] {
            assert_eq!(lbctl(&wrong.split(' ').collect::<Vec<_>>()).unwrap_err().exit_code(), 2, "{wrong:?}");
        }
    }

    #[test]
    fn what_is_not_built_is_refused_by_name_and_not_shown() {
        let help = Lbctl::command().render_long_help().to_string();
        for name in ["explain", "capture", "drain", "undrain", "verify", "bundle"] {
            let error = lbctl(&[name]).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(name), "{error}");
            assert!(!help.contains(name), "{help}");
        }
    }

    #[test]
    fn statuses_are_cleared_for_a_configuration_only() {
        assert_eq!(Lbd::try_parse_from(["lbd", "detach", "--release"]).unwrap_err().exit_code(), 2);
        let parsed = Lbd::try_parse_from(["lbd", "detach", "--release", "--config", "/etc/lbd/lbd.yaml"]).unwrap();
        assert!(matches!(parsed.command, LbdCommand::Detach(DetachArgs { release: true, .. })));
    }

    #[test]
    fn what_goes_on_says_how_often() {
        let flows = |line: &str| match lbctl(&line.split(' ').collect::<Vec<_>>()).unwrap().command {
            LbctlCommand::Flows(flows) => flows.command(),
            LbctlCommand::Drops(drops) => drops.command(),
            other => panic!("{other:?}"),
        };
        let tcp = Filter { protocol: Some(6), ..Filter::default() };
        assert_eq!(flows("flows --follow --proto tcp"), lbctl::Command::Follow { filter: tcp, interval: INTERVAL });
        let often = lbctl::Command::Follow { filter: Filter::default(), interval: Duration::from_millis(250) };
        assert_eq!(flows("flows --follow --interval 250ms"), often);
        assert_eq!(flows("drops"), lbctl::Command::Drops { tenant: None, watch: None });
        let tenant = Some("a".to_owned());
        assert_eq!(flows("drops --watch --tenant a"), lbctl::Command::Drops { tenant, watch: Some(INTERVAL) });
        for wrong in [
            "flows --follow --top 3",
            "flows --interval 1s",
            "flows --follow --interval 99ms",
            "flows --follow --interval 0",
            "flows --follow --interval soon",
            "drops --interval 1s",
        ] {
            assert_eq!(lbctl(&wrong.split(' ').collect::<Vec<_>>()).unwrap_err().exit_code(), 2, "{wrong}");
        }
    }

    #[test]
    fn who_is_asked_for() {
        let asked = |arguments: &[&str]| match lbctl(&[&["whois"], arguments].concat())?.command {
            LbctlCommand::Whois { snat, backend } => Ok::<_, clap::Error>((snat, backend)),
            other => panic!("{other:?}"),
        };
        let (snat, backend) = asked(&["[2001:db8::2]:1024", "2001:db8::11"]).unwrap();
        assert_eq!((snat.port(), backend.and_then(|backend| backend.socket())), (1024, None));
        let (_, backend) = asked(&["10.0.0.2:1024", "10.0.0.11:443"]).unwrap();
        assert_eq!(backend.and_then(|backend| backend.socket()), Some("10.0.0.11:443".parse().unwrap()));
        for wrong in [&["10.0.0.2"][..], &[], &["2001:db8::2"], &["10.0.0.2:1024", "node"], &["a", "b", "c"]] {
            assert_eq!(asked(wrong).unwrap_err().exit_code(), 2, "{wrong:?}");
        }
    }

    #[test]
    fn times() {
        for (text, seconds) in [("90", 90), ("90s", 90), ("15m", 900), ("2h", 7200), ("1d", 86_400), ("0s", 0)] {
            assert_eq!(duration(text), Ok(Duration::from_secs(seconds)));
        }
        for wrong in ["", "s", "-1s", "1.5h", "h2", "+1s", "1 h", "٣", "99999999999999999999d", "9999999999999999999d"]
        {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }
}
