//! Waiting.
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Waits until the question is answered; an error of it is shown when time is up.
pub fn eventually<T>(limit: Duration, what: &str, mut ask: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let end = Instant::now() + limit;
    loop {
        let answer = ask();
        if let Ok(Some(value)) = answer {
            return Ok(value);
        }
        if Instant::now() > end {
            match answer {
                Err(error) => return Err(error.context(format!("after {limit:?} still not so: {what}"))),
                Ok(_) => bail!("after {limit:?} still not so: {what}"),
            }
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until it is so.
pub fn wait_until(limit: Duration, what: &str, mut ask: impl FnMut() -> Result<bool>) -> Result<()> {
    eventually(limit, what, || Ok(ask()?.then_some(())))
}
