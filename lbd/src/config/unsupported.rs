//! What the file can say and this version cannot do yet: refused by name, never guessed.
//!
//! This is the only place that knows. To serve one more thing, remove its variant here; the compiler then shows the
//! places that refused it.

/// Something that is not supported yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unsupported {
    /// `protocol: SCTP`.
    Sctp,
    /// `source_ranges` with something in it.
    SourceRanges,
    /// `matchExpressions` of a selector.
    MatchExpressions,
}

impl Unsupported {
    /// The end of the message: what is not supported, and what to do.
    pub(super) const fn refusal(self) -> &'static str {
        match self {
            Self::Sctp => "protocol SCTP is not supported: remove this port or make it TCP",
            Self::SourceRanges => {
                "is not supported yet by this version: remove it, and filter before this host until it is"
            }
            Self::MatchExpressions => "is not supported yet by this version: remove it or write matchLabels",
        }
    }
}
