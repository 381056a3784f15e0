//! What tenants use of what they may.

use std::collections::BTreeMap;

use lbd_common::abi::{FamilyUse, Settings, Tenant, TenantUse};
use lbd_common::half_open;

use crate::api::types::TenantFill;
use crate::dataplane::{DataplaneError, Pins};

/// Names of the address families, in the order of the maps.
pub const FAMILIES: [&str; 2] = ["IPv4", "IPv6"];

/// What the maps say of all tenants.
pub fn tenants(pins: &Pins, name: impl Fn(u16) -> String) -> Result<Vec<TenantFill>, DataplaneError> {
    Ok(fill(&pins.tenants()?, &pins.settings()?, pins.now()?, name))
}

/// By tenant and family. A family without limits and without use is left out.
fn fill(
    tenants: &BTreeMap<u16, (Tenant, TenantUse)>,
    settings: &Settings,
    now: u32,
    name: impl Fn(u16) -> String,
) -> Vec<TenantFill> {
    // Counts are signed: an end may be counted before its beginning.
    let count = |value: u64| u64::try_from(value as i64).unwrap_or(0);
    let mut all = Vec::new();
    // Index 0 is no tenant.
    for (&id, (limits, used)) in tenants.iter().filter(|&(&id, _)| id != 0) {
        for ((family, limit), used) in FAMILIES.into_iter().zip(&limits.families).zip(&used.families) {
            let fill = TenantFill {
                flows: count(used.flows),
                flows_limit: limit.flows.into(),
                udp: count(used.udp),
                udp_limit: limit.udp.into(),
                half_open: count(waiting(used, settings, now)),
                half_open_limit: limit.half_open.into(),
                ..TenantFill::default()
            };
            if fill != TenantFill::default() {
                all.push(TenantFill { tenant: name(id), family: family.to_owned(), ..fill });
            }
        }
    }
    all
}

/// Half-open connections now: expired ones are taken off when the next one is opened, which may be never.
fn waiting(used: &FamilyUse, settings: &Settings, now: u32) -> u64 {
    let epoch = half_open::epoch(now, settings.half_open_epoch);
    let buckets = used.buckets.len() as u64;
    // Those up to `used.epoch` have been.
    let first = (used.epoch + 1).max(epoch.saturating_sub(buckets - 1));
    (first..=epoch).fold(used.half_open, |left, epoch| left.wrapping_sub(used.buckets[half_open::bucket(epoch)]))
}

#[cfg(test)]
mod tests {
    use lbd_common::abi::FamilyLimits;

    use super::*;

    #[test]
    fn families_that_are_neither_limited_nor_used_are_left_out() {
        let mut tenant = (Tenant::ZERO, TenantUse::ZERO);
        tenant.0.families[0] = FamilyLimits { flows: 100, udp: 25, half_open: 50, pad: 0 };
        tenant.1.families[0] = FamilyUse { flows: 7, udp: u64::MAX, half_open: 3, ..FamilyUse::ZERO };
        let mut other = (Tenant::ZERO, TenantUse::ZERO);
        other.1.families[1].udp = 4;
        let tenants = [(0, tenant), (1, tenant), (2, other)].into();
        let fill = fill(&tenants, &Settings::ZERO, 0, |id| format!("#{id}"));
        let expected = |tenant: &str, family: &str| TenantFill {
            tenant: tenant.to_owned(),
            family: family.to_owned(),
            ..TenantFill::default()
        };
        assert_eq!(
            fill,
            [
                TenantFill {
                    flows: 7,
                    flows_limit: 100,
                    udp: 0,
                    udp_limit: 25,
                    half_open: 3,
                    half_open_limit: 50,
                    ..expected("#1", "IPv4")
                },
                TenantFill { udp: 4, ..expected("#2", "IPv6") },
            ]
        );
    }

    #[test]
    fn half_open_connections_that_have_expired_are_not_counted() {
        let settings = Settings { half_open_epoch: 100, ..Settings::ZERO };
        // Emptied up to epoch 10; 5 expire in epoch 12, 2 in epoch 14.
        let mut used = FamilyUse { half_open: 7, epoch: 10, ..FamilyUse::ZERO };
        used.buckets[half_open::bucket(12)] = 5;
        used.buckets[half_open::bucket(14)] = 2;
        for (now, expected) in [(1000, 7), (1199, 7), (1200, 2), (1399, 2), (1400, 0), (9000, 0), (1_000_000, 0)] {
            assert_eq!(waiting(&used, &settings, now), expected, "{now}");
        }
    }
}
