//! The control program: what the agent asks of the datapath, run with `BPF_PROG_TEST_RUN`.

use aya_ebpf::{
    bindings::xdp_action,
    helpers::generated::{bpf_jiffies64, bpf_ktime_get_ns},
    programs::XdpContext,
};
use lbd_common::abi::{ControlRequest, control};

use super::age::{kill, lbd_age_step};
use super::context::{at, now, opaque};
use super::edge::read;
use super::maps::FLOWS4;

/// Entries that one run ages at the most.
const AGE_STEPS: u32 = 64;

/// Answers a request in place.
#[inline(always)]
pub(crate) fn control(context: &XdpContext) -> u32 {
    let Some(request) = at::<ControlRequest>(context, 0) else { return xdp_action::XDP_ABORTED };
    // SAFETY: `at` has bounds-checked the request.
    let request = unsafe { &mut *request };
    match request.command {
        control::MARK => {
            let key = request.key;
            request.result = match FLOWS4.get_ptr_mut(key) {
                Some(flow) => match read(flow, &key) {
                    Some((to, next_hop, _)) => u64::from(kill(flow, &to, next_hop, now())),
                    None => 0,
                },
                None => 0,
            };
        }
        control::CLOCK => {
            // SAFETY: helpers without arguments or effects.
            unsafe {
                request.jiffies = bpf_jiffies64();
                request.nanoseconds = bpf_ktime_get_ns();
            }
        }
        control::AGE => {
            let (count, now) = (request.count, now());
            let (mut done, steps) = (0, opaque::<AGE_STEPS>());
            while done < steps && done < count && lbd_age_step(now) != 0 {
                done += 1;
            }
            request.result += u64::from(done);
        }
        _ => return xdp_action::XDP_ABORTED,
    }
    xdp_action::XDP_PASS
}
