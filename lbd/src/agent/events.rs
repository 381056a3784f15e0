//! What happened lately, for `lbctl events`: a ring in memory.

use std::collections::{BTreeSet, VecDeque};

use jiff::Timestamp;

use crate::api::types::Event;
use crate::plan::model::Notice;

/// Events kept beside those that last.
const KEPT: usize = 512;

/// Something that happened at a moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Happening {
    /// It needs somebody's attention.
    pub warning: bool,
    /// Stable reason, CamelCase.
    pub reason: &'static str,
    /// Tenant concerned.
    pub tenant: Option<String>,
    /// Service concerned.
    pub service: Option<String>,
    /// Text.
    pub message: String,
}

/// Events, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Events {
    ring: VecDeque<Event>,
    lasting: BTreeSet<Notice>,
}

impl Events {
    /// Adds an event that is over as soon as it is told. The same one again in direct succession only counts.
    pub(crate) fn tell(&mut self, happening: Happening, now: Timestamp) {
        let Happening { warning, reason, tenant, service, message } = happening;
        if warning {
            tracing::warn!(reason, tenant, service, "{message}");
        } else {
            tracing::info!(reason, tenant, service, "{message}");
        }
        let event = Event {
            time: time(now),
            last: time(now),
            count: 1,
            level: level(warning),
            reason: reason.to_owned(),
            tenant,
            service,
            message,
            active: false,
        };
        match self.ring.back_mut() {
            Some(last) if !last.active && same(last, &event) => {
                last.count += 1;
                last.last = event.last;
            }
            _ => self.push(event),
        }
    }

    /// Replaces what lasts. Returns whether anything changed.
    pub(crate) fn set_lasting(&mut self, notices: BTreeSet<Notice>, now: Timestamp) -> bool {
        if self.lasting == notices {
            return false;
        }
        for gone in self.lasting.difference(&notices) {
            let event = from_notice(gone, now);
            if let Some(known) = self.ring.iter_mut().rev().find(|known| known.active && same(known, &event)) {
                known.active = false;
                known.last = event.last;
            }
        }
        let fresh: Vec<Event> = notices.difference(&self.lasting).map(|notice| from_notice(notice, now)).collect();
        for event in fresh {
            tracing::warn!(reason = event.reason, tenant = event.tenant, service = event.service, "{}", event.message);
            match self.ring.iter().rposition(|known| !known.active && same(known, &event)) {
                // Trouble that comes and goes is one event with a count, not a ring full of copies.
                Some(index) => {
                    if let Some(mut known) = self.ring.remove(index) {
                        known.count += 1;
                        known.last = event.last;
                        known.active = true;
                        self.push(known);
                    }
                }
                None => self.push(event),
            }
        }
        self.lasting = notices;
        true
    }

    /// What lasts now.
    pub(crate) fn lasting(&self) -> &BTreeSet<Notice> {
        &self.lasting
    }

    /// All events, oldest first.
    pub(crate) fn all(&self) -> Vec<Event> {
        self.ring.iter().cloned().collect()
    }

    fn push(&mut self, event: Event) {
        self.ring.push_back(event);
        while self.ring.len() > KEPT + self.lasting.len() {
            match self.ring.iter().position(|event| !event.active) {
                Some(oldest) => self.ring.remove(oldest),
                None => break,
            };
        }
    }
}

fn same(a: &Event, b: &Event) -> bool {
    (&a.reason, &a.tenant, &a.service, &a.message) == (&b.reason, &b.tenant, &b.service, &b.message)
}

fn from_notice(notice: &Notice, now: Timestamp) -> Event {
    Event {
        time: time(now),
        last: time(now),
        count: 1,
        level: level(true),
        reason: notice.reason.to_owned(),
        tenant: notice.tenant.clone(),
        service: notice.service.as_ref().map(ToString::to_string),
        message: notice.message.clone(),
        active: true,
    }
}

fn level(warning: bool) -> String {
    if warning { "warning" } else { "normal" }.to_owned()
}

/// RFC 3339, to the second.
pub(crate) fn time(now: Timestamp) -> String {
    now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notice(message: &str) -> Notice {
        Notice { reason: "Test", service: None, tenant: Some("a".to_owned()), message: message.to_owned() }
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn trouble_lasts_ends_and_comes_back_as_one_event() {
        let mut events = Events::default();
        assert!(events.set_lasting([notice("x")].into(), at(0)));
        assert!(!events.set_lasting([notice("x")].into(), at(1)));
        assert!(events.all()[0].active);
        events.set_lasting(BTreeSet::new(), at(2));
        assert!(!events.all()[0].active);
        events.set_lasting([notice("x"), notice("y")].into(), at(3));
        let all = events.all();
        assert_eq!(
            all.iter().map(|event| (event.message.as_str(), event.count)).collect::<Vec<_>>(),
            [("x", 2), ("y", 1)]
        );
        assert_eq!((all[0].time.as_str(), all[0].last.as_str()), ("1970-01-01T00:00:00Z", "1970-01-01T00:00:03Z"));
    }

    #[test]
    fn the_ring_is_bounded_and_keeps_what_lasts() {
        let mut events = Events::default();
        events.set_lasting([notice("lasting")].into(), at(0));
        for number in 0..2 * KEPT {
            let happening = Happening { reason: "Many", message: number.to_string(), ..Happening::default() };
            events.tell(happening.clone(), at(1));
            events.tell(happening, at(2));
        }
        let all = events.all();
        assert_eq!(all.len(), KEPT + 1);
        assert_eq!(all.iter().filter(|event| event.active).count(), 1);
        assert_eq!(all.last().map(|event| event.count), Some(2));
    }
}
