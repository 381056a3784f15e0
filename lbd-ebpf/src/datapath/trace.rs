//! What goes wrong after our verdict: frames that a driver does not send. Attached to the kernel's tracepoints, which fire for every
//! program on the host, in every network namespace: those of others are passed over.

use aya_ebpf::{EbpfContext, programs::TracePointContext};
use lbd_common::abi;
use lbd_common::reason::Reason;

use super::context::count;
use super::maps::OWN;

/// Offsets in the records, after the 8 bytes that all have in common (`include/trace/events/xdp.h`).
const PROGRAM: usize = 8;
const FROM: usize = 8;
const TO: usize = 16;
const DROPS: usize = 20;

/// Four bytes of the record.
#[inline(always)]
fn field(context: &TracePointContext, offset: usize) -> u32 {
    // SAFETY: the records are longer than any offset above, and the verifier checks it.
    unsafe { *context.as_ptr().byte_add(offset).cast::<u32>() }
}

#[inline(always)]
fn own(key: u32) -> bool {
    // SAFETY: only whether there is an element matters.
    unsafe { OWN.get(key) }.is_some()
}

/// `xdp_redirect_err`, `xdp_exception`: the record begins with the id of the program at the NIC.
#[inline(always)]
pub(crate) fn failed(context: &TracePointContext) {
    if own(field(context, PROGRAM)) {
        count(Reason::RedirectFailed, 0);
    }
}

/// `xdp_devmap_xmit`: a batch of redirected frames, some of which the driver may not have taken.
#[inline(always)]
pub(crate) fn transmitted(context: &TracePointContext) {
    let drops = field(context, DROPS);
    if drops == 0 || drops > 1024 {
        return;
    }
    if own(abi::OWN_INTERFACE | field(context, FROM)) && own(abi::OWN_INTERFACE | field(context, TO)) {
        // Batches have 16 frames at the most.
        let mut left = drops & 0x1f;
        while left > 0 {
            count(Reason::RedirectFailed, 0);
            left -= 1;
        }
    }
}
