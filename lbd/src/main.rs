//! `lbd`, which also answers to the name `lbctl`.

use std::process::ExitCode;

fn main() -> ExitCode {
    lbd::cli::main()
}
