//! What the file can say and this version cannot do yet: refused by name, never guessed.
//!
//! This is the only place that knows. To serve one more thing, remove its variant here; the compiler then shows the
//! places that refused it.

/// Something that is not supported yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unsupported {
    /// An IPv6 address, prefix or range.
    Ipv6,
    /// `protocol: UDP`.
    Udp,
    /// `protocol: SCTP`.
    Sctp,
    /// `vlan:` at a segment or at the hub.
    Vlan,
    /// `preserve_client: true`.
    PreserveClient,
    /// `source_ranges` with something in it.
    SourceRanges,
    /// `adopt: takeover`.
    Takeover,
    /// `snat` at a tenant, a frontend or the defaults.
    Snat,
    /// More than one address in the hub's `snat`.
    ManySnat,
    /// `probe: http`, `https` or `tls`.
    Probe,
    /// `mode: endpoints`.
    Endpoints,
    /// Ports in `host_access`.
    HostAccessPorts,
    /// `pools` of a claim's `guest`.
    GuestPools,
    /// `timeouts` anywhere but at the defaults.
    InnerTimeouts,
    /// `udp_unreplied` and `udp_replied`.
    UdpTimeouts,
    /// `matchExpressions` of a selector.
    MatchExpressions,
}

impl Unsupported {
    /// The end of the message: what is not supported, and what to do.
    pub(super) const fn refusal(self) -> &'static str {
        match self {
            Self::Ipv6 => "IPv6 is not supported yet by this version: remove it or write an IPv4 address",
            Self::Udp => "protocol UDP is not supported yet by this version: remove this port or make it TCP",
            Self::Sctp => "protocol SCTP is not supported: remove this port or make it TCP",
            Self::Vlan => {
                "VLAN segments are not supported yet by this version: remove it and give the segment an interface where \
                 its frames are untagged"
            }
            Self::PreserveClient => "is not supported yet by this version: remove it or write false",
            Self::SourceRanges => {
                "is not supported yet by this version: remove it, and filter before this host until it is"
            }
            Self::Takeover => "takeover is not supported yet by this version: remove it or write never",
            Self::Snat => {
                "SNAT addresses of a tenant or frontend are not supported yet by this version: remove it or write it \
                 at the hub"
            }
            Self::ManySnat => {
                "more than one SNAT address is not supported yet by this version: leave one, or none for the \
                 interface's own"
            }
            Self::Probe => "this probe is not supported yet by this version: remove it or write tcp",
            Self::Endpoints => "endpoints is not supported yet by this version: remove it or write nodes",
            Self::HostAccessPorts => {
                "single ports are not supported yet by this version: remove them or write own, none or [icmp]"
            }
            Self::GuestPools => "is not supported yet by this version: remove it; max_vips is supported",
            Self::InnerTimeouts => {
                "timeouts of a tenant or frontend are not supported yet by this version: remove them or write them at \
                 the defaults, for all"
            }
            Self::UdpTimeouts => "timeouts of UDP are not supported yet by this version: remove it",
            Self::MatchExpressions => "is not supported yet by this version: remove it or write matchLabels",
        }
    }
}
