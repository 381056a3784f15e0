//! Why a packet was not forwarded. One enum for datapath, counters, metrics and `lbctl drops`.

/// What the XDP program does with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Gone.
    Drop,
    /// To the kernel, unchanged.
    Pass,
    /// Answered with a RST or ICMP error (the answer replaces the packet), rate-limited; over the limit, or if nothing may be answered:
    /// dropped.
    Reject,
    /// Answered (ARP, echo); the answer replaces the packet.
    Answer,
}

macro_rules! reasons {
    ($($(#[doc = $meaning:literal])+ $variant:ident = $value:literal, $name:literal, $verdict:ident;)*) => {
        /// Why a packet was not forwarded. The numbers are stable: they index [`crate::abi::names::REASONS`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum Reason {
            $($(#[doc = $meaning])+ $variant = $value,)*
        }

        impl Reason {
            /// All reasons, in the order of their numbers.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// Stable name, as in metrics and JSON.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// What it means, for an operator.
            pub const fn meaning(self) -> &'static str {
                match self { $(Self::$variant => concat!($($meaning),+).trim_ascii(),)* }
            }

            /// What happens to the packet. No wildcard arm: a new reason needs a decision.
            #[inline(always)]
            pub const fn verdict(self) -> Verdict {
                match self { $(Self::$variant => Verdict::$verdict,)* }
            }

            /// The reason with this number.
            pub const fn from_number(number: u32) -> Option<Self> {
                match number { $($value => Some(Self::$variant),)* _ => None }
            }
        }
    };
}

// 29 was `ipv6_unserved`, in ABI 1.
reasons! {
    /// frame too short, or a length field that lies
    Malformed = 1, "malformed", Drop;
    /// frame for another station's MAC address
    NotOurMac = 2, "not_our_mac", Pass;
    /// VLAN tag of no configured segment
    UnknownVlan = 3, "unknown_vlan", Pass;
    /// frame larger than the MTU: an offload made it, see `lbd check`
    GsoFrame = 4, "gso_frame", Drop;
    /// neither IPv4, IPv6 nor ARP: the kernel's business
    OtherProtocol = 5, "other_protocol", Pass;
    /// address that no client can have (loopback, multicast, our own, the other side's)
    BadSource = 6, "bad_source", Drop;
    /// IPv4 options or IPv6 extension headers
    IpOptions = 7, "ip_options", Drop;
    /// fragment without its first one, or fragments not served
    FragmentOrphan = 8, "fragment_orphan", Drop;
    /// for the host itself, allowed
    Host = 9, "host", Pass;
    /// for the host itself, closed by `host_access`
    HostClosed = 10, "host_closed", Drop;
    /// for an address that is neither a VIP nor the host's here: lbd is not a router
    NotLocal = 11, "not_local", Drop;
    /// router advertisement or redirect on a tenant segment
    RouterControl = 12, "router_control", Drop;
    /// VIP port that no frontend serves
    Unserved = 13, "unserved", Reject;
    /// frontend without any backend
    NoBackend = 14, "no_backend", Reject;
    /// client not in the frontend's source ranges
    SourceRange = 15, "source_range", Drop;
    /// TCP packet of no known flow
    NoFlow = 16, "no_flow", Reject;
    /// reply of a backend that matches no flow
    StrayReply = 17, "stray_reply", Reject;
    /// reply of a backend that matches no flow, while starting or migrating
    StrayReplyQuiet = 18, "stray_reply_quiet", Drop;
    /// all SNAT ports to this backend are in use
    SnatExhausted = 19, "snat_exhausted", Reject;
    /// the flow table is full
    TableFull = 20, "table_full", Reject;
    /// the tenant has all the flows it may have
    TenantFlows = 21, "tenant_flows", Reject;
    /// the tenant opens connections faster than it may
    TenantRate = 22, "tenant_rate", Drop;
    /// too many half-open connections
    HalfOpenFull = 23, "half_open_full", Drop;
    /// acknowledgement that does not acknowledge the backend's sequence number
    Unproven = 24, "unproven", Drop;
    /// TTL or hop limit used up
    TtlExceeded = 25, "ttl_exceeded", Reject;
    /// larger than the egress interface's MTU
    TooBig = 26, "too_big", Reject;
    /// next hop's MAC address not known yet
    NoNeighbour = 27, "no_neighbour", Drop;
    /// protocol that lbd does not serve on this address (yet)
    UnservedProtocol = 28, "unserved_protocol", Drop;
    /// ICMP to a VIP or SNAT address, not served yet
    Icmp = 30, "icmp_unserved", Drop;
    /// traffic for a VIP that arrived on a segment where the VIP does not live
    WrongSegment = 31, "wrong_segment", Drop;
    /// RST with a sequence number outside the window: forwarded, state unchanged
    BlindReset = 32, "blind_reset", Pass;
    /// ARP request for one of our addresses, answered
    Arp = 33, "arp_answered", Answer;
    /// ARP that is not about our addresses
    ArpOther = 34, "arp_other", Pass;
    /// more refusals than the rate limit allows
    RejectLimit = 35, "reject_limit", Drop;
    /// the client's own address as source in `preserve_client` is in use by another flow, or (IPv6) the flow table has another flow at its place
    TupleInUse = 36, "tuple_in_use", Reject;
    /// a flag combination that no TCP sends
    BadFlags = 37, "bad_flags", Drop;
    /// connection refused by its backend
    BackendRefused = 38, "backend_refused", Pass;
    /// broadcast or multicast
    Multicast = 39, "multicast", Pass;
    /// multicast or broadcast frame with a unicast address inside
    BadDestination = 40, "bad_destination", Drop;
    /// a bug in lbd: an index or a program that must exist does not
    Internal = 41, "internal", Drop;
    /// source and destination are the same (LAND)
    Land = 42, "land", Drop;
    /// two CPUs promoted one connection; the second packet went through
    PromoteRace = 43, "promote_race", Pass;
    /// frontend without any backend, set to `unserved: drop`
    NoBackendQuiet = 44, "no_backend_quiet", Drop;
    /// answer of a backend to an older connection on the same tuple: reset there, as the client would (RFC 9293 §3.10.7.3)
    StaleAnswer = 45, "stale_answer", Reject;
    /// translated and sent, but not taken by the outgoing interface's driver: see `lbd check`
    RedirectFailed = 46, "redirect_failed", Drop;
    /// UDP over IPv6 without a checksum
    UdpNoChecksum = 47, "udp_no_checksum", Drop;
    /// the tenant has all the half-open connections it may have
    TenantHalfOpen = 48, "tenant_half_open", Drop;
    /// the tenant has all the UDP flows it may have
    TenantUdp = 49, "tenant_udp", Drop;
    /// the search for a free SNAT port was put off: too many at once
    SnatBusy = 50, "snat_busy", Drop;
    /// more than one VLAN tag
    DoubleTag = 51, "double_tag", Drop;
    /// neighbour solicitation for one of our addresses, answered
    Neighbour = 52, "neighbour_answered", Answer;
    /// neighbour discovery that is not about our addresses
    NeighbourOther = 53, "neighbour_other", Pass;
    /// UDP datagram to a SNAT port that matches no flow
    StrayDatagram = 54, "stray_datagram", Drop;
    /// TCP packet of no known flow, while flows are handed over
    NoFlowQuiet = 55, "no_flow_quiet", Drop;
    /// port that no frontend of the VIP serves, all of which are set to `unserved: drop`
    UnservedQuiet = 56, "unserved_quiet", Drop;
}

const _: () = {
    let mut index = 0;
    while index < Reason::ALL.len() {
        assert!((Reason::ALL[index] as u32) < crate::abi::REASON_SLOTS);
        index += 1;
    }
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names_are_unique() {
        let mut names = std::collections::BTreeSet::new();
        for &reason in Reason::ALL {
            assert_eq!(Reason::from_number(reason as u32), Some(reason));
            assert!(names.insert(reason.name()), "{reason:?}");
            assert!(!reason.meaning().is_empty());
        }
    }
}
