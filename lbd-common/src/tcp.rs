//! Sequence arithmetic and the flow state machine.
