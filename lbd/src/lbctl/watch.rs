//! Commands that go on until they are stopped: they look again and again, and print what has changed.

use std::collections::BTreeMap;
use std::io::Write;
use std::time::{Duration, Instant};

use super::client::Client;
use super::render::{self, Rate};
use super::{LbctlError, Output, Place, named_drop, names};
use crate::api::types::Names;
use crate::dataplane::Pins;
use crate::flows::follow::Follower;
use crate::flows::{Directory, Filter, Live, Matcher, Namer};

/// Prints flows as they open, change and close.
pub(super) fn follow(
    out: &mut dyn Write,
    place: &Place,
    agent: &Client,
    filter: &Filter,
    interval: Duration,
    output: Output,
) -> Result<(), LbctlError> {
    // A flow that gets another state or grows old is still the same flow: these are looked at when something is printed.
    let lasting = Filter { state: None, older: None, ..filter.clone() };
    let mut follower = Follower::default();
    let mut printer = render::Follow::new(output);
    let mut next = Instant::now();
    loop {
        // Opened anew: an upgrade replaces the maps.
        let pins = Pins::open(&place.bpffs)?;
        let directory = Directory::new(&names(place, agent), &pins.frontends()?);
        let live = Live::new(&pins)?;
        let flows = live.fold(&Matcher::new(&lasting, &directory, live.clock), Vec::new, Vec::push)?;
        let mut changes = follower.look(flows.into_iter().flatten());
        let matcher = Matcher::new(filter, &directory, live.clock);
        changes.retain(|(_, flow)| matcher.matches(flow));
        printer.print(out, &changes, &Namer::new(&directory, live.clock))?;
        out.flush()?;
        next = wait(next, interval);
    }
}

/// Prints what counters of packets not forwarded have gained.
pub(super) fn drops(
    out: &mut dyn Write,
    place: &Place,
    agent: &Client,
    tenant: Option<&str>,
    interval: Duration,
    output: Output,
) -> Result<(), LbctlError> {
    let mut before: Option<(Counters, Instant)> = None;
    let mut printer = render::Rates::new(output);
    let mut next = Instant::now();
    loop {
        let counters = Pins::open(&place.bpffs)?.reasons()?;
        let now = Instant::now();
        let mut rates = Vec::new();
        if let Some((before, then)) = &before {
            let time = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
            rates = gained(before, &counters, &names(place, agent), now - *then, &time);
            rates.retain(|rate| rate.total.is_of(tenant));
        }
        printer.print(out, &rates)?;
        out.flush()?;
        before = Some((counters, now));
        next = wait(next, interval);
    }
}

/// Sleeps until the next look is due, and returns when that is. Looks that were missed are not made up for.
fn wait(last: Instant, interval: Duration) -> Instant {
    let next = (last + interval).max(Instant::now());
    std::thread::sleep(next.saturating_duration_since(Instant::now()));
    next
}

type Counters = BTreeMap<(u16, u8), u64>;

/// The counters that have moved in `time`, those that moved most first. `now` is when it ended.
fn gained(before: &Counters, after: &Counters, names: &Names, time: Duration, now: &str) -> Vec<Rate> {
    let mut rates: Vec<Rate> = after
        .iter()
        .filter_map(|(key, &packets)| {
            // Smaller than before: the counters were made anew, by an upgrade.
            let delta = packets.checked_sub(before.get(key).copied().unwrap_or(0)).unwrap_or(packets);
            let total = named_drop(key.0, key.1, packets, names).filter(|_| delta > 0)?;
            let per_second = delta as f64 / time.as_secs_f64().max(1e-3);
            Some(Rate { time: now.to_owned(), delta, per_second, total })
        })
        .collect();
    let order = |rate: &Rate| (std::cmp::Reverse(rate.delta), rate.total.reason, rate.total.tenant.clone());
    rates.sort_by_key(order);
    rates
}

#[cfg(test)]
mod tests {
    use lbd_common::reason::Reason;

    use super::*;

    #[test]
    fn counters_that_have_moved_are_told_with_their_rate() {
        let key = |tenant, reason: Reason| (tenant, reason as u8);
        let (syn, flow) = (Reason::ALL[1], Reason::ALL[2]);
        let before = [(key(1, syn), 10), (key(2, syn), 500), (key(1, flow), 7)].into();
        let after = [(key(1, syn), 110), (key(2, syn), 500), (key(1, flow), 3), (key(2, flow), 1000)].into();
        let names = Names { tenants: [(1, "a".to_owned())].into(), ..Names::default() };
        let rates = gained(&before, &after, &names, Duration::from_secs(2), "t");
        let told: Vec<_> = rates
            .iter()
            .map(|rate| {
                (rate.total.tenant.as_deref(), rate.total.reason, rate.delta, rate.per_second, rate.total.packets)
            })
            .collect();
        assert_eq!(
            told,
            [
                (Some("#2"), flow.name(), 1000, 500.0, 1000),
                (Some("a"), syn.name(), 100, 50.0, 110),
                (Some("a"), flow.name(), 3, 1.5, 3),
            ]
        );
        assert!(rates.iter().all(|rate| rate.total.is_of(None)));
        assert_eq!(rates.iter().filter(|rate| rate.total.is_of(Some("a"))).count(), 2);
    }

    #[test]
    fn looks_are_not_made_up_for() {
        let long_ago = Instant::now().checked_sub(Duration::from_secs(5)).unwrap();
        let started = Instant::now();
        let next = wait(long_ago, Duration::from_secs(1));
        assert!(next >= started);
        let next = wait(Instant::now(), Duration::from_millis(20));
        assert!(next <= Instant::now() && started.elapsed() >= Duration::from_millis(20));
    }
}
