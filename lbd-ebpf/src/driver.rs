//! The driver of the datapath benchmark: restores a packet, makes it the next flow's, and tail-calls the program under test.
//!
//! Its own cost, with a program under test that only returns, is the benchmark's unit.
#![cfg_attr(target_arch = "bpf", no_std, no_main)]

#[cfg(target_arch = "bpf")]
mod driver {
    //! The programs.
    use aya_ebpf::{
        EbpfContext as _, Global,
        bindings::xdp_action,
        helpers::generated::bpf_xdp_adjust_head,
        macros::{map, xdp},
        maps::{Array, HashMap, ProgramArray},
        programs::XdpContext,
    };
    use lbd_common::abi::{FLOW_ENTRIES, Flow4, FlowKey4};
    use lbd_common::packet::{ETHERNET, Ipv4Tcp};

    /// Length of the packet.
    const LENGTH: usize = 64;

    /// Flows to go through.
    #[unsafe(no_mangle)]
    static FLOWS: Global<u32> = Global::new(1);

    /// 0: packets of clients, whose address and port differ. 1: packets of backends, whose address and SNAT port differ.
    #[unsafe(no_mangle)]
    static REVERSE: Global<u32> = Global::new(0);

    /// The packet to restore: 64 bytes, as words.
    #[map(name = "template")]
    static TEMPLATE: Array<[u64; 8]> = Array::with_max_entries(1, 0);

    /// Number of the next flow.
    #[map(name = "next_flow")]
    static NEXT_FLOW: Array<u64> = Array::with_max_entries(1, 0);

    /// The program under test.
    #[map(name = "target")]
    static TARGET: ProgramArray = ProgramArray::with_max_entries(1, 0);

    /// The datapath's flows, for the bare look-up.
    #[map(name = "flows4")]
    static FLOWS4: HashMap<FlowKey4, Flow4> = HashMap::with_max_entries(FLOW_ENTRIES, 0);

    #[xdp]
    pub(crate) fn driver(context: XdpContext) -> u32 {
        drive(&context).unwrap_or(xdp_action::XDP_ABORTED)
    }

    #[inline(always)]
    fn drive(context: &XdpContext) -> Option<u32> {
        let surplus = (context.data_end() - context.data()) as i32 - LENGTH as i32;
        // SAFETY: the helper checks the new length; pointers are made after it.
        if surplus != 0 && unsafe { bpf_xdp_adjust_head(context.as_ptr().cast(), surplus) } != 0 {
            return None;
        }
        let start = context.data();
        if start + LENGTH > context.data_end() {
            return None;
        }
        let template = TEMPLATE.get(0)?;
        let counter = NEXT_FLOW.get_ptr_mut(0)?;
        // SAFETY: LENGTH bytes of the packet were checked; `counter` is a map value.
        unsafe {
            let words = start as *mut u64;
            let mut index = 0;
            while index < LENGTH / 8 {
                *words.add(index) = template[index];
                index += 1;
            }
            let mut flow = *counter;
            *counter = flow + 1;
            if flow >= u64::from(FLOWS.load()) {
                flow = 0;
                *counter = 1;
            }
            let packet = &mut *((start + ETHERNET) as *mut Ipv4Tcp);
            if REVERSE.load() == 0 {
                packet.ip.source_be = (0x0a40_0000 + (flow as u32 & 0x3f_ffff)).to_be();
                packet.tcp.source_port_be = (1024 + (flow.wrapping_mul(7919) % 60_000) as u16).to_be();
            } else {
                packet.ip.source_be = (0x0a00_0100 + (flow / 31_744) as u32).to_be();
                packet.tcp.destination_port_be = (1024 + (flow % 31_744) as u16).to_be();
            }
            TARGET.tail_call(context, 0);
        }
        None
    }

    /// Only returns.
    #[xdp]
    pub(crate) fn nothing(_context: XdpContext) -> u32 {
        xdp_action::XDP_PASS
    }

    /// One look-up in the flows, and nothing else.
    #[xdp]
    pub(crate) fn bare_lookup(context: XdpContext) -> u32 {
        let start = context.data() + ETHERNET;
        if start + size_of::<Ipv4Tcp>() > context.data_end() {
            return xdp_action::XDP_ABORTED;
        }
        // SAFETY: bounds-checked.
        let key = unsafe { (*(start as *const Ipv4Tcp)).key(1) };
        match FLOWS4.get_ptr(key) {
            // SAFETY: a map value, which the verifier checks.
            Some(flow) if unsafe { (*flow).segment } == 1 => xdp_action::XDP_PASS,
            Some(_) | None => xdp_action::XDP_DROP,
        }
    }

    // The licence that the verifier sees.
    #[unsafe(link_section = "license")]
    #[unsafe(no_mangle)]
    static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

    #[panic_handler]
    fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
        loop {}
    }
}

#[cfg(not(target_arch = "bpf"))]
fn main() {}
