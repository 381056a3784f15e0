//! The control program: what the agent asks of the datapath, run with `BPF_PROG_TEST_RUN`.

use aya_ebpf::{
    bindings::xdp_action,
    helpers::generated::{bpf_jiffies64, bpf_ktime_get_ns},
    programs::XdpContext,
};
use lbd_common::abi::{Address4, Address6, ControlRequest, ControlRequest4, control};

use super::age::kill;
use super::context::{at, now, opaque};
use super::maps::Tables;
use super::migrate;
use super::words::Key;

/// Entries of each family that one run ages at the most.
const AGE_STEPS: u32 = 64;

/// Answers a request in place.
#[inline(always)]
pub(crate) fn control(context: &XdpContext) -> u32 {
    let Some(request) = at::<ControlRequest4>(context, 0) else { return xdp_action::XDP_ABORTED };
    // SAFETY: `at` has bounds-checked the request.
    let request = unsafe { &mut *request };
    match request.command {
        control::MARK => return kill_flow::<Address4>(context),
        control::MARK6 => return kill_flow::<Address6>(context),
        control::CLOCK => {
            // SAFETY: helpers without arguments or effects.
            unsafe {
                request.jiffies = bpf_jiffies64();
                request.nanoseconds = bpf_ktime_get_ns();
            }
        }
        control::AGE => {
            let count = request.count;
            request.result += age::<Address4>(count) + age::<Address6>(count);
        }
        control::RESTORE => return migrate::restore::<Address4>(context),
        control::GROW => return migrate::grow::<Address4>(context),
        control::RESTORE_HALF_OPEN => return migrate::restore_half_open::<Address4>(context),
        control::CREDIT => migrate::credit(request),
        _ => return xdp_action::XDP_ABORTED,
    }
    xdp_action::XDP_PASS
}

#[inline(always)]
fn age<A: Tables>(count: u32) -> u64 {
    let now = now();
    let (mut done, steps) = (0, opaque::<AGE_STEPS>());
    while done < steps && done < count && A::age_step(now) | A::bury(now) != 0 {
        done += 1;
    }
    u64::from(done)
}

#[inline(always)]
fn kill_flow<A: Tables>(context: &XdpContext) -> u32 {
    let Some(request) = at::<ControlRequest<A>>(context, 0) else { return xdp_action::XDP_ABORTED };
    // SAFETY: `at` has bounds-checked the request.
    let request = unsafe { &mut *request };
    request.result = 0;
    // SAFETY: a key in a packet, checked.
    if let Some(flow) = unsafe { Key::of(&raw const request.key) }.live() {
        request.result = u64::from(kill(flow, now()));
    }
    xdp_action::XDP_PASS
}
