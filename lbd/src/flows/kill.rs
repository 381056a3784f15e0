//! The end of flows by an operator's word.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use lbd_common::abi::{Address4, Address6, FlowKey, Tuple};

use super::{Directory, Filter, Flow, Live, Matcher, State};
use crate::api::types::KillRequest;
use crate::dataplane::{DataplaneError, Pins};

impl TryFrom<&KillRequest> for Filter {
    type Error = String;

    fn try_from(request: &KillRequest) -> Result<Self, String> {
        // Fields that a later version adds narrow the choice: they are refused when they are read, not left out.
        let KillRequest { tenant, vip, client, backend, service, protocol, state, older_s } = request;
        let endpoint = |text: &Option<String>| text.as_deref().map(str::parse).transpose();
        let filter = Self {
            tenant: tenant.clone(),
            vip: endpoint(vip)?,
            client: endpoint(client)?,
            backend: endpoint(backend)?,
            snat: None,
            service: service.clone(),
            protocol: *protocol,
            state: state.as_deref().map(str::parse).transpose()?,
            older: older_s.map(Duration::from_secs),
        };
        if filter == Self::default() {
            return Err("say which flows: none are meant when nothing is said".to_owned());
        }
        Ok(filter)
    }
}

impl From<&Filter> for KillRequest {
    fn from(filter: &Filter) -> Self {
        let Filter { tenant, vip, client, backend, snat: _, service, protocol, state, older } = filter;
        Self {
            tenant: tenant.clone(),
            vip: vip.map(|vip| vip.to_string()),
            client: client.map(|client| client.to_string()),
            backend: backend.map(|backend| backend.to_string()),
            service: service.clone(),
            protocol: *protocol,
            state: state.map(|state| state.as_str().to_owned()),
            older_s: older.map(|older| older.as_secs()),
        }
    }
}

/// Ends the flows that are meant; returns how many. Half-open connections are left to their timeout: nothing is lost with them.
pub fn kill(pins: &Pins, filter: &Filter, directory: &Directory) -> Result<u64, DataplaneError> {
    let live = Live::new(pins)?;
    let meant = live.fold(&Matcher::new(filter, directory, live.clock), Keys::default, Keys::add)?;
    let mut killed = 0;
    for keys in meant {
        killed += pins.remove_flows::<Address4>(&keys.four)? + pins.remove_flows::<Address6>(&keys.six)?;
    }
    Ok(killed)
}

/// Forward keys.
#[derive(Debug, Default)]
struct Keys {
    four: Vec<FlowKey<Address4>>,
    six: Vec<FlowKey<Address6>>,
}

impl Keys {
    fn add(&mut self, flow: Flow) {
        if flow.state == State::HalfOpen {
            return;
        }
        let (Flow { segment, protocol, client, vip, .. }, pad) = (flow, 0);
        match (client, vip.ip()) {
            (SocketAddr::V4(from), IpAddr::V4(to)) => {
                let tuple = Tuple::new((*from.ip(), from.port()), (to, vip.port()));
                self.four.push(FlowKey { tuple, segment, protocol, pad });
            }
            (SocketAddr::V6(from), IpAddr::V6(to)) => {
                let tuple = Tuple::new((*from.ip(), from.port()), (to, vip.port()));
                self.six.push(FlowKey { tuple, segment, protocol, pad });
            }
            // No flow is of two families.
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_is_the_same_at_the_other_end_of_the_socket() {
        let filter = Filter {
            tenant: Some("a".to_owned()),
            vip: Some("[2001:db8::34]:443".parse().unwrap()),
            client: Some("192.0.2.0/24".parse().unwrap()),
            backend: Some("10.0.0.11".parse().unwrap()),
            snat: None,
            service: Some("ns/api".to_owned()),
            protocol: Some(17),
            state: Some(State::Unreplied),
            older: Some(Duration::from_secs(90)),
        };
        let sent = serde_json::to_string(&KillRequest::from(&filter)).unwrap();
        let received: KillRequest = serde_json::from_str(&sent).unwrap();
        assert_eq!(Filter::try_from(&received), Ok(filter));
    }

    #[test]
    fn a_filter_that_says_nothing_or_something_unknown_kills_nothing() {
        assert!(Filter::try_from(&KillRequest::default()).is_err());
        let wrong = KillRequest { vip: Some("everything".to_owned()), ..KillRequest::default() };
        assert!(Filter::try_from(&wrong).unwrap_err().contains("everything"));
        assert!(serde_json::from_str::<KillRequest>(r#"{"tenant":"a","node":"n1"}"#).is_err());
    }

    #[test]
    fn keys_are_those_of_the_maps() {
        let flow = |client: &str, vip: &str, state| Flow {
            protocol: 17,
            vip: vip.parse().unwrap(),
            ..Flow::sample(client.parse().unwrap(), state)
        };
        let mut keys = Keys::default();
        keys.add(flow("192.0.2.9:40000", "192.0.2.34:53", State::Replied));
        keys.add(flow("192.0.2.9:40001", "192.0.2.34:53", State::HalfOpen));
        keys.add(flow("[2001:db8::9]:40000", "[2001:db8::34]:53", State::Replied));
        assert_eq!((keys.four.len(), keys.six.len()), (1, 1));
        let (four, six) = (keys.four[0], keys.six[0]);
        assert_eq!((four.segment, four.protocol, four.tuple.source()), (2, 17, "192.0.2.9:40000".parse().unwrap()));
        assert_eq!(six.tuple.destination(), "[2001:db8::34]:53".parse().unwrap());
    }
}
