//! Drivers of the datapath: they make packets and tail-call the program under test, as fast as a CPU can.
//!
//! `driver` is the benchmark's: it restores a packet and makes it the next flow's; its own cost, with a program under test that only
//! returns, is the benchmark's unit. `claimer` is the race test's: it opens and gives up connections, and watches who owns a port
//! between.
#![cfg_attr(target_arch = "bpf", no_std, no_main, feature(asm_experimental_arch))]

#[cfg(target_arch = "bpf")]
mod driver {
    //! The programs.
    #![expect(clippy::needless_pass_by_value, reason = "entries made by `#[xdp]` take their context by value")]

    use aya_ebpf::{
        EbpfContext as _, Global,
        bindings::xdp_action,
        helpers::generated::bpf_xdp_adjust_tail,
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

    /// The packet to restore. It is restored byte by byte, as the C driver does in whose unit the targets are given.
    #[map(name = "template")]
    static TEMPLATE: Array<[u8; LENGTH]> = Array::with_max_entries(1, 0);

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
        let start = whole(context)?;
        let template = TEMPLATE.get(0)?;
        let counter = NEXT_FLOW.get_ptr_mut(0)?;
        // SAFETY: LENGTH bytes of the packet were checked; `counter` is a map value.
        unsafe {
            restore(start, template);
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

    /// # Safety
    ///
    /// LENGTH bytes from `start` are packet data, checked.
    #[inline(always)]
    unsafe fn restore(start: usize, template: &[u8; LENGTH]) {
        // SAFETY: the caller's. Bytes have no alignment, so that this is a copy byte by byte.
        unsafe { core::ptr::copy_nonoverlapping(template, start as *mut [u8; LENGTH], 1) };
    }

    /// Where the packet begins; it has LENGTH bytes again, if a refusal has shortened it.
    #[inline(always)]
    fn whole(context: &XdpContext) -> Option<usize> {
        let missing = LENGTH as i32 - (context.data_end() - context.data()) as i32;
        // SAFETY: the helper checks the new length; pointers are made after it.
        if missing != 0 && unsafe { bpf_xdp_adjust_tail(context.as_ptr().cast(), missing) } != 0 {
            return None;
        }
        let start = context.data();
        (start + LENGTH <= context.data_end()).then_some(start)
    }

    /// First client of the claimer.
    #[unsafe(no_mangle)]
    static CLIENTS: Global<u32> = Global::new(0);

    /// By SNAT port (14 bits) and backend (2 bits): how many connections own the tuple now, as far as this test's CPUs know.
    #[map(name = "owners")]
    static OWNERS: Array<u64> = Array::with_max_entries(65_536, 0);

    /// 0: connections opened. 1: tuples that had two owners at once.
    #[map(name = "claims")]
    static CLAIMS: Array<u64> = Array::with_max_entries(2, 0);

    #[inline(always)]
    unsafe fn add(word: *mut u64, value: u64) -> u64 {
        let old: u64;
        // SAFETY: the caller's pointer is to a map value.
        unsafe {
            core::arch::asm!(
                "{value} = atomic_fetch_add((u64 *)({word} + 0), {value})",
                word = in(reg) word,
                value = inout(reg) value => old,
            );
        }
        old
    }

    /// Opens a connection with every other packet and gives it up with the next. The packet that comes in is what the last one has become: its
    /// source port is the SNAT port, owned until the RST.
    #[xdp]
    pub(crate) fn claimer(context: XdpContext) -> u32 {
        claim(&context).unwrap_or(xdp_action::XDP_ABORTED)
    }

    #[inline(always)]
    fn claim(context: &XdpContext) -> Option<u32> {
        let start = whole(context)?;
        let template = TEMPLATE.get(0)?;
        let counter = NEXT_FLOW.get_ptr_mut(0)?;
        let (opened, doubled) = (CLAIMS.get_ptr_mut(0)?, CLAIMS.get_ptr_mut(1)?);
        // SAFETY: LENGTH bytes of the packet were checked; the others are map values.
        unsafe {
            let number = *counter;
            *counter = number + 1;
            let packet = &mut *((start + ETHERNET) as *mut Ipv4Tcp);
            let giving_up = number & 1 == 1;
            // A SYN that was refused has become a RST.
            if giving_up && packet.tcp.flags & 4 == 0 {
                let port = u32::from(u16::from_be(packet.tcp.source_port_be)) & 0x3fff;
                let node = u32::from_be(packet.ip.destination_be) & 3;
                let owner = OWNERS.get_ptr_mut(port << 2 | node)?;
                if add(owner, 1) != 0 {
                    add(doubled, 1);
                }
                add(opened, 1);
                // Long enough for the other CPU to come by as well.
                let mut waited = 0;
                while waited < 200 {
                    core::ptr::read_volatile(owner);
                    waited += 1;
                }
                add(owner, u64::MAX);
            }
            restore(start, template);
            packet.ip.source_be = (CLIENTS.load() + (number / 2) as u32 % 65_536).to_be();
            packet.tcp.source_port_be = 1024u16.to_be();
            packet.tcp.flags = if giving_up { 4 } else { 2 };
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
