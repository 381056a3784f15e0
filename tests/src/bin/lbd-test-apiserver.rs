//! The test API server as a program, for demonstrations and tests in network namespaces.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use lbd_tests::apiserver::{self, Options};

const USAGE: &str = "usage: lbd-test-apiserver --kubeconfig FILE [--listen ADDRESS:PORT] [--token TOKEN] [--plain]

Serves a small, stateful Kubernetes API until it is stopped, and writes a kubeconfig for it into FILE once it listens.
  --listen  where (default 127.0.0.1:0, a free port)
  --token   bearer token to ask for (default: none)
  --plain   HTTP instead of HTTPS";

#[tokio::main]
async fn main() -> Result<()> {
    let mut options = Options { tls: true, dual_stack: true, ..Options::default() };
    let mut kubeconfig: Option<PathBuf> = None;
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().with_context(|| format!("{argument} needs a value\n{USAGE}"));
        match argument.as_str() {
            "--listen" => options.listen = value()?.parse().context("--listen wants ADDRESS:PORT")?,
            "--kubeconfig" => kubeconfig = Some(value()?.into()),
            "--token" => options.token = Some(value()?),
            "--plain" => options.tls = false,
            "--help" | "-h" => {
                println!("{USAGE}");
                return Ok(());
            }
            other => bail!("unknown argument `{other}`\n{USAGE}"),
        }
    }
    let Some(kubeconfig) = kubeconfig else { bail!("--kubeconfig is missing\n{USAGE}") };
    let mut server = apiserver::start(options).await?;
    server.write_kubeconfig(&kubeconfig)?;
    println!("{}", server.url());
    server.wait().await;
    Ok(())
}
