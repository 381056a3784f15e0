//! From results of probes to a state: pure.

use std::time::Duration;

use crate::config::Probe;

/// What is known of a target. The first result decides; after that, `fall` failures or `rise` successes in a row change it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Machine {
    /// `None` until the first result.
    pub(super) up: Option<bool>,
    /// Results in a row that speak against `up`.
    against: u32,
}

impl Machine {
    pub(super) fn new(up: Option<bool>) -> Self {
        Self { up, against: 0 }
    }

    /// Takes in a result. True if `up` changed.
    pub(super) fn observe(&mut self, success: bool, probe: &Probe) -> bool {
        match self.up {
            Some(up) if up == success => {
                self.against = 0;
                false
            }
            Some(up) => {
                self.against = self.against.saturating_add(1);
                let enough = if up { probe.fall } else { probe.rise };
                if self.against < enough.max(1) {
                    return false;
                }
                *self = Self::new(Some(success));
                true
            }
            None => {
                *self = Self::new(Some(success));
                true
            }
        }
    }

    /// The last result speaks against the state.
    pub(super) fn in_doubt(self) -> bool {
        self.against > 0
    }

    /// Time from the start of one probe to the start of the next.
    pub(super) fn pause(self, probe: &Probe) -> Duration {
        if self.in_doubt() { probe.fast_interval.min(probe.interval) } else { probe.interval }
    }

    /// How many probes may be under way at once. A target that has failed once is not given a full timeout for each further probe:
    /// what silence costs is then one timeout and a few fast intervals, not `fall` timeouts.
    pub(super) fn parallel(self, probe: &Probe) -> u32 {
        if self.up == Some(true) && self.in_doubt() { probe.fall.saturating_sub(self.against).max(1) } else { 1 }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::plan::testing::settings;

    fn run(start: Option<bool>, results: &str) -> String {
        let probe = settings().health;
        let mut machine = Machine::new(start);
        results
            .chars()
            .map(|result| {
                machine.observe(result == 'S', &probe);
                match (machine.up, machine.in_doubt()) {
                    (Some(true), false) => 'U',
                    (Some(true), true) => 'u',
                    (Some(false), false) => 'D',
                    (Some(false), true) => 'd',
                    (None, _) => '?',
                }
            })
            .collect()
    }

    #[rstest]
    #[case::first_success(None, "S", "U")]
    #[case::first_failure(None, "F", "D")]
    #[case::falls_at_the_third(Some(true), "FFF", "uuD")]
    #[case::rises_at_the_second(Some(false), "SS", "dU")]
    #[case::one_lost_probe_changes_nothing(Some(true), "SFSFFSS", "UuUuuUU")]
    #[case::flapping_never_falls(Some(true), "FSFSFSFS", "uUuUuUuU")]
    #[case::flapping_never_rises(Some(false), "SFSFSF", "dDdDdD")]
    #[case::down_and_up_again(Some(true), "FFFFFSS", "uuDDDdU")]
    #[case::a_lost_first_probe_heals(None, "FSS", "DdU")]
    fn b57_rise_and_fall_are_respected_exactly(
        #[case] start: Option<bool>,
        #[case] results: &str,
        #[case] expected: &str,
    ) {
        assert_eq!(run(start, results), expected);
    }

    #[test]
    fn thresholds_of_zero_are_one() {
        let probe = Probe { fall: 0, rise: 0, ..settings().health };
        let mut machine = Machine::new(Some(true));
        assert!(machine.observe(false, &probe));
        assert!(machine.observe(true, &probe));
    }

    #[test]
    fn only_doubt_is_probed_faster() {
        let probe = settings().health;
        let mut machine = Machine::new(Some(true));
        assert_eq!((machine.pause(&probe), machine.parallel(&probe)), (probe.interval, 1));
        machine.observe(false, &probe);
        assert_eq!((machine.pause(&probe), machine.parallel(&probe)), (probe.fast_interval, 2));
        machine.observe(false, &probe);
        assert_eq!(machine.parallel(&probe), 1);
        // Down for good: no faster than a healthy one.
        machine.observe(false, &probe);
        assert_eq!((machine.pause(&probe), machine.parallel(&probe)), (probe.interval, 1));
        machine.observe(true, &probe);
        assert_eq!((machine.pause(&probe), machine.parallel(&probe)), (probe.fast_interval, 1));
    }
}
