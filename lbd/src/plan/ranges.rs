//! Who may connect to a Service: `loadBalancerSourceRanges`, or its annotation form, → intervals.

use std::sync::Arc;

use ipnet::IpNet;

use crate::config::{AddressRange, following};
use crate::source::Service;

/// The older way to say `loadBalancerSourceRanges`; what the field says goes before it.
pub(crate) const SOURCE_RANGES_ANNOTATION: &str = "service.beta.kubernetes.io/load-balancer-source-ranges";

/// Clients of a Service, by family (IPv4, IPv6): sorted intervals that do not touch, or `None` = everybody.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clients(pub(crate) [Option<Arc<[AddressRange]>>; 2]);

impl Clients {
    /// Whether somebody is kept out in a family that the Service has.
    pub(crate) fn is_limited(&self, service: &Service) -> bool {
        families(service).iter().any(|&v6| self.0[usize::from(v6)].is_some())
    }
}

fn families(service: &Service) -> &[bool] {
    if service.families_v6.is_empty() { &[false] } else { &service.families_v6 }
}

/// Who may connect. What cannot be read is an error: it must close the Service, never open it.
///
/// As in kube-proxy, ranges of one family say nothing of the other, if they let everybody in; else nobody of the other may connect.
pub(crate) fn clients(service: &Service) -> Result<Clients, String> {
    let annotation = service.annotations.get(SOURCE_RANGES_ANNOTATION).map_or("", String::as_str);
    let (key, texts): (_, Vec<&str>) = if service.source_ranges.is_empty() {
        let texts = annotation.split(',').map(str::trim).filter(|range| !range.is_empty());
        (SOURCE_RANGES_ANNOTATION, texts.collect())
    } else {
        ("loadBalancerSourceRanges", service.source_ranges.iter().map(|range| range.trim()).collect())
    };
    if texts.is_empty() {
        return Ok(Clients::default());
    }
    let mut ranges: [Vec<AddressRange>; 2] = Default::default();
    let mut open = [false; 2];
    for text in texts {
        let range: IpNet =
            text.parse().map_err(|_| format!("{key} holds {}, which is not a prefix", shortened(text)))?;
        let family = usize::from(range.addr().is_ipv6());
        open[family] |= range.prefix_len() == 0;
        ranges[family].push(AddressRange { first: range.network(), last: range.broadcast() });
    }
    let everybody_somewhere = families(service).iter().any(|&v6| open[usize::from(v6)]);
    let mut family = 0;
    Ok(Clients(ranges.map(|ranges| {
        let all = open[family] || (ranges.is_empty() && everybody_somewhere);
        family += 1;
        (!all).then(|| merged(ranges).into())
    })))
}

/// The same addresses in the fewest intervals.
fn merged(mut ranges: Vec<AddressRange>) -> Vec<AddressRange> {
    ranges.sort_unstable();
    let mut all: Vec<AddressRange> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match all.last_mut() {
            // Without a following address it reaches to the end.
            Some(last) if following(last.last).is_none_or(|next| range.first <= next) => {
                last.last = last.last.max(range.last);
            }
            Some(_) | None => all.push(range),
        }
    }
    all
}

/// Enough of an untrusted text to find it again.
pub(crate) fn shortened(text: &str) -> String {
    let mut short: String = text.chars().take(40).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    format!("{short:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(families: &[bool], ranges: &[&str]) -> Service {
        Service {
            families_v6: families.to_vec(),
            source_ranges: ranges.iter().map(ToString::to_string).collect(),
            ..Service::default()
        }
    }

    fn shown(clients: &Clients) -> [Option<Vec<String>>; 2] {
        clients.0.clone().map(|family| Some(family?.iter().map(ToString::to_string).collect()))
    }

    #[test]
    fn ranges_become_the_fewest_intervals() {
        let many = service(
            &[false],
            &["203.0.113.128/25", "198.51.100.7/32", "203.0.113.0/25", " 203.0.113.64/26 ", "198.51.100.9/32"],
        );
        let expected = ["198.51.100.7", "198.51.100.9", "203.0.113.0-203.0.113.255"].map(str::to_owned).to_vec();
        assert_eq!(shown(&clients(&many).unwrap()), [Some(expected), Some(vec![])]);
        let end = service(&[true], &["ffff:8000::/17", "ffff::/16", "::/8"]);
        let expected = ["::-ff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "ffff::-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"];
        assert_eq!(shown(&clients(&end).unwrap())[1], Some(expected.map(str::to_owned).to_vec()));
    }

    #[test]
    fn everybody_is_everybody_and_what_cannot_be_read_is_an_error() {
        for (families, ranges, limited) in [
            (&[][..], &[][..], false),
            (&[], &["0.0.0.0/0"], false),
            (&[], &["203.0.113.0/24", "0.0.0.0/0"], false),
            (&[], &["203.0.113.0/24"], true),
            // Bits behind the prefix are no mistake to Kubernetes.
            (&[], &["203.0.113.77/24"], true),
            // Of the other family only: nobody of this one.
            (&[], &["2001:db8::/32"], true),
            (&[], &["::/0"], true),
            (&[false, true], &["0.0.0.0/0"], false),
            (&[false, true], &["0.0.0.0/0", "2001:db8::/32"], true),
            (&[false, true], &["203.0.113.0/24"], true),
        ] {
            let service = service(families, ranges);
            assert_eq!(clients(&service).unwrap().is_limited(&service), limited, "{families:?} {ranges:?}");
        }
        for bad in ["", "203.0.113.9", "not-a-cidr", "203.0.113.0/33", "\u{0}", "0.0.0.0/0,10.0.0.0/8"] {
            let error = clients(&service(&[], &["0.0.0.0/0", bad])).unwrap_err();
            assert!(error.starts_with("loadBalancerSourceRanges holds"), "{error}");
        }
        let mut annotated = service(&[], &[]);
        let mut says = |text: &str| {
            annotated.annotations.insert(SOURCE_RANGES_ANNOTATION.to_owned(), text.to_owned());
            clients(&annotated).map(|clients| shown(&clients)[0].clone())
        };
        let two = vec!["198.51.100.7".to_owned(), "203.0.113.0-203.0.113.255".to_owned()];
        assert_eq!(says("203.0.113.0/24, 198.51.100.7/32"), Ok(Some(two)));
        assert_eq!(says(" , "), Ok(None));
        assert!(says("203.0.113.0/24; 198.51.100.7/32").unwrap_err().contains(SOURCE_RANGES_ANNOTATION));
    }
}
