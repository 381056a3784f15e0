//! Drivers of the datapath: they make packets and tail-call the program under test, as fast as a CPU can.
//!
//! `driver` is the benchmark's: it restores a packet and makes it the next flow's; its own cost, with a program under test that only
//! returns, is the benchmark's unit. `driver6` and `driver_tagged` do the same with IPv6 and with a tag, `opener` on several CPUs that
//! begin together. `claimer` is the race test's: it opens and gives up connections, and watches who owns a port
//! between. `flooder` sends from another spoofed source each time, `checker` looks at what has become of its last packet, `visitor`
//! makes whole short connections: client and backend.
#![cfg_attr(target_arch = "bpf", no_std, no_main, feature(asm_experimental_arch))]

#[cfg(target_arch = "bpf")]
mod driver {
    //! The programs.
    #![expect(clippy::needless_pass_by_value, reason = "entries made by `#[xdp]` take their context by value")]

    use core::ptr::{copy_nonoverlapping, read_volatile};

    use aya_ebpf::{
        EbpfContext as _, Global,
        bindings::xdp_action,
        helpers::generated::{bpf_ktime_get_ns, bpf_xdp_adjust_head, bpf_xdp_adjust_tail},
        macros::{map, xdp},
        maps::{Array, HashMap, ProgramArray},
        programs::XdpContext,
    };
    use lbd_common::abi::{FLOW_ENTRIES, Flow, Flow4, Flow6, FlowKey4, Lookup6};
    use lbd_common::hash::LookupSecret;
    use lbd_common::packet::{ETHERNET, Family, IPV4, IPV6, IPV6_TCP, Ipv4Tcp, TcpPacket, VLAN_TAG};
    use lbd_common::tcp::{ACK, FIN, RST, SYN};

    /// Length of an IPv4 packet.
    const LENGTH: usize = 64;
    /// Length of an IPv6 packet: without payload.
    const LENGTH6: usize = ETHERNET + IPV6_TCP;
    /// Length of a tagged IPv4 packet.
    const LENGTH_TAGGED: usize = LENGTH + VLAN_TAG;
    /// Length of a template, enough for any packet.
    const TEMPLATE_LENGTH: usize = 80;

    /// Flows to go through.
    #[unsafe(no_mangle)]
    static FLOWS: Global<u32> = Global::new(1);

    /// 0: packets of clients, whose address and port differ. 1: packets of backends, whose address and SNAT port differ.
    #[unsafe(no_mangle)]
    static REVERSE: Global<u32> = Global::new(0);

    /// Address of the first client; IPv6: its last 32 bits.
    #[unsafe(no_mangle)]
    static CLIENTS: Global<u32> = Global::new(0x0a40_0000);

    /// What keys of the IPv6 flow table are mixed with: the datapath's.
    #[unsafe(no_mangle)]
    static LOOKUP_SECRET: Global<LookupSecret> = Global::new([0; 4]);

    /// The packet to restore; `visitor`: the client's, then the backend's. It is restored byte by byte, as the C driver does in
    /// whose unit the targets are given.
    #[map(name = "template")]
    static TEMPLATE: Array<[u8; TEMPLATE_LENGTH]> = Array::with_max_entries(2, 0);

    /// Number of the next flow.
    #[map(name = "next_flow")]
    static NEXT_FLOW: Array<u64> = Array::with_max_entries(1, 0);

    /// The program under test; `visitor`: for clients' packets, then for backends'.
    #[map(name = "target")]
    static TARGET: ProgramArray = ProgramArray::with_max_entries(2, 0);

    /// The datapath's flows, for the bare look-up.
    #[map(name = "flows4")]
    static FLOWS4: HashMap<FlowKey4, Flow4> = HashMap::with_max_entries(FLOW_ENTRIES, 0);

    /// The same of IPv6.
    #[map(name = "flows6")]
    static FLOWS6: HashMap<Lookup6, Flow6> = HashMap::with_max_entries(FLOW_ENTRIES, 0);

    /// TCP or UDP over IPv4.
    #[xdp]
    pub(crate) fn driver(context: XdpContext) -> u32 {
        drive::<LENGTH, ETHERNET, false>(&context).unwrap_or(xdp_action::XDP_ABORTED)
    }

    /// TCP over IPv6.
    #[xdp]
    pub(crate) fn driver6(context: XdpContext) -> u32 {
        drive::<LENGTH6, ETHERNET, true>(&context).unwrap_or(xdp_action::XDP_ABORTED)
    }

    /// TCP over IPv4 behind a tag.
    #[xdp]
    pub(crate) fn driver_tagged(context: XdpContext) -> u32 {
        drive::<LENGTH_TAGGED, { ETHERNET + VLAN_TAG }, false>(&context).unwrap_or(xdp_action::XDP_ABORTED)
    }

    #[inline(always)]
    fn drive<const WHOLE: usize, const IP: usize, const V6: bool>(context: &XdpContext) -> Option<u32> {
        let start = whole::<WHOLE>(context)?;
        let template = TEMPLATE.get(0)?;
        let counter = NEXT_FLOW.get_ptr_mut(0)?;
        // SAFETY: WHOLE bytes of the packet were checked; `counter` is a map value.
        unsafe {
            restore::<WHOLE>(start, template);
            let mut flow = *counter;
            *counter = flow + 1;
            if flow >= u64::from(FLOWS.load()) {
                flow = 0;
                *counter = 1;
            }
            let address = (start + IP + if V6 { 20 } else { 12 }) as *mut u32;
            let ports = (start + IP + if V6 { IPV6 } else { IPV4 }) as *mut u16;
            if REVERSE.load() == 0 {
                *address = client(flow).to_be();
                *ports = client_port(flow).to_be();
            } else {
                *address = backend(flow).to_be();
                *ports.add(1) = snat_port(flow).to_be();
            }
            TARGET.tail_call(context, 0);
        }
        None
    }

    /// Address of a flow's client; IPv6: its last 32 bits.
    #[inline(always)]
    fn client(flow: u64) -> u32 {
        CLIENTS.load() + (flow as u32 & 0x3f_ffff)
    }

    /// Port of a flow's client.
    #[inline(always)]
    const fn client_port(flow: u64) -> u16 {
        1024 + (flow.wrapping_mul(7919) % 60_000) as u16
    }

    /// Address of a flow's backend; IPv6: its last 32 bits.
    #[inline(always)]
    const fn backend(flow: u64) -> u32 {
        0x0a00_0100 + (flow / 31_744) as u32
    }

    /// SNAT port of a flow.
    #[inline(always)]
    const fn snat_port(flow: u64) -> u16 {
        1024 + (flow % 31_744) as u16
    }

    /// Where an IPv4 template goes: the VIP.
    #[inline(always)]
    const fn destination_be(template: &[u8; TEMPLATE_LENGTH]) -> u32 {
        const AT: usize = ETHERNET + 16;
        u32::from_ne_bytes([template[AT], template[AT + 1], template[AT + 2], template[AT + 3]])
    }

    /// # Safety
    ///
    /// WHOLE bytes from `start` are packet data, checked.
    #[inline(always)]
    unsafe fn restore<const WHOLE: usize>(start: usize, template: &[u8; TEMPLATE_LENGTH]) {
        // SAFETY: the caller's, and WHOLE is not more than a template. Bytes have no alignment, so that this is a copy byte by byte.
        unsafe { copy_nonoverlapping(template.as_ptr().cast(), start as *mut [u8; WHOLE], 1) };
    }

    /// Where the packet begins; it has WHOLE bytes again, if a refusal has shortened it or its tag was taken off.
    #[inline(always)]
    fn whole<const WHOLE: usize>(context: &XdpContext) -> Option<usize> {
        let missing = WHOLE as i32 - (context.data_end() - context.data()) as i32;
        if WHOLE == LENGTH_TAGGED && missing == VLAN_TAG as i32 {
            // SAFETY: the helper checks that there is room; pointers are made after it.
            if unsafe { bpf_xdp_adjust_head(context.as_ptr().cast(), -missing) } != 0 {
                return None;
            }
        } else if missing != 0 {
            // SAFETY: the helper checks the new length; pointers are made after it.
            if unsafe { bpf_xdp_adjust_tail(context.as_ptr().cast(), missing) } != 0 {
                return None;
            }
        }
        let start = context.data();
        (start + WHOLE <= context.data_end()).then_some(start)
    }

    /// CPUs on which `opener` runs.
    #[unsafe(no_mangle)]
    static CPUS: Global<u32> = Global::new(1);

    /// How many of them are there.
    #[map(name = "gate")]
    static GATE: Array<u64> = Array::with_max_entries(1, 0);

    /// 0: whether this CPU is at the gate. 1: nanosecond at which its first flow was made. 2: at which its last was through.
    #[map(name = "times")]
    static TIMES: Array<u64> = Array::with_max_entries(3, 0);

    /// Goes through the flows once, with all CPUs beginning at the same time.
    #[xdp]
    pub(crate) fn opener(context: XdpContext) -> u32 {
        open(&context).unwrap_or(xdp_action::XDP_ABORTED)
    }

    #[inline(always)]
    fn open(context: &XdpContext) -> Option<u32> {
        let (gate, flow) = (GATE.get_ptr_mut(0)?, NEXT_FLOW.get_ptr(0)?);
        let (joined, begun, done) = (TIMES.get_ptr_mut(0)?, TIMES.get_ptr_mut(1)?, TIMES.get_ptr_mut(2)?);
        // SAFETY: map values; the clock has no preconditions.
        unsafe {
            if *joined == 0 {
                *joined = 1;
                add(gate, 1);
            }
            if read_volatile(gate) < u64::from(CPUS.load()) {
                return Some(xdp_action::XDP_PASS);
            }
            if *begun == 0 {
                *begun = bpf_ktime_get_ns();
            }
            if *flow >= u64::from(FLOWS.load()) {
                if *done == 0 {
                    *done = bpf_ktime_get_ns();
                }
                return Some(xdp_action::XDP_PASS);
            }
        }
        drive::<LENGTH, ETHERNET, false>(context)
    }

    /// Whether each spoofed SYN of `flooder` is followed by an ACK that guesses.
    #[unsafe(no_mangle)]
    static PAIRS: Global<u32> = Global::new(0);

    /// Sends from another source each time, and never ends.
    #[xdp]
    pub(crate) fn flooder(context: XdpContext) -> u32 {
        flood(&context).unwrap_or(xdp_action::XDP_ABORTED)
    }

    #[inline(always)]
    fn flood(context: &XdpContext) -> Option<u32> {
        let start = whole::<LENGTH>(context)?;
        let template = TEMPLATE.get(0)?;
        let counter = NEXT_FLOW.get_ptr_mut(0)?;
        // SAFETY: LENGTH bytes of the packet were checked; `counter` is a map value.
        unsafe {
            restore::<LENGTH>(start, template);
            let number = *counter;
            *counter = number + 1;
            let packet = &mut *((start + ETHERNET) as *mut Ipv4Tcp);
            let pairs = PAIRS.load() != 0;
            let source = if pairs { number / 2 } else { number };
            packet.ip.source_be = (CLIENTS.load() + (source as u32 & 0xff_ffff)).to_be();
            packet.tcp.source_port_be = client_port(source).to_be();
            if pairs && number & 1 == 1 {
                packet.tcp.sequence_be = (u32::from_be(packet.tcp.sequence_be) + 1).to_be();
                packet.tcp.acknowledgement_be = number as u32;
                packet.tcp.flags = ACK;
            }
            TARGET.tail_call(context, 0);
        }
        None
    }

    /// What the source of a packet of `checker` must be translated to.
    #[unsafe(no_mangle)]
    static EXPECTED_SOURCE: Global<u32> = Global::new(0);

    /// Forward: what the destination port must be translated to. Reverse: the source port.
    #[unsafe(no_mangle)]
    static EXPECTED_PORT: Global<u32> = Global::new(0);

    /// `checker`: 0: packets translated as their flow says. 1: others. `visitor`: 0: connections made. 1: refused. 2: packets lost on the way.
    #[map(name = "outcomes")]
    static OUTCOMES: Array<u64> = Array::with_max_entries(3, 0);

    #[inline(always)]
    fn outcome(index: u32) {
        if let Some(count) = OUTCOMES.get_ptr_mut(index) {
            // SAFETY: a map value.
            unsafe { *count += 1 };
        }
    }

    /// Goes through the flows, and looks at what has become of the last one's packet.
    #[xdp]
    pub(crate) fn checker(context: XdpContext) -> u32 {
        check(&context).unwrap_or(xdp_action::XDP_ABORTED)
    }

    #[inline(always)]
    fn check(context: &XdpContext) -> Option<u32> {
        let start = whole::<LENGTH>(context)?;
        let counter = NEXT_FLOW.get_ptr_mut(0)?;
        // SAFETY: LENGTH bytes of the packet were checked; `counter` is a map value.
        unsafe {
            let packet = &*((start + ETHERNET) as *const Ipv4Tcp);
            let number = *counter;
            if number > 0 {
                let last = (number - 1) % u64::from(FLOWS.load()).max(1);
                let (source_port, destination, destination_port) = if REVERSE.load() == 0 {
                    (snat_port(last), backend(last), EXPECTED_PORT.load() as u16)
                } else {
                    (EXPECTED_PORT.load() as u16, client(last), client_port(last))
                };
                let right = packet.ip.source_be == EXPECTED_SOURCE.load().to_be()
                    && packet.ip.destination_be == destination.to_be()
                    && packet.tcp.source_port_be == source_port.to_be()
                    && packet.tcp.destination_port_be == destination_port.to_be();
                outcome(u32::from(!right));
            }
        }
        drive::<LENGTH, ETHERNET, false>(context)
    }

    /// What `visitor` knows of the connection it is making, as on the wire.
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Visit {
        snat: u32,
        node: u32,
        snat_port: u16,
        node_port: u16,
    }

    #[map(name = "visit")]
    static VISIT: Array<Visit> = Array::with_max_entries(1, 0);

    /// Flags, sequence and acknowledgement number of a short connection's packets, client and backend beginning at 1000; and who sends it:
    /// 0 = the client.
    const STEPS: [(u8, u32, u32, u32); 6] = [
        (SYN, 1000, 0, 0),
        (SYN | ACK, 1000, 1001, 1),
        (ACK, 1001, 1001, 0),
        (FIN | ACK, 1001, 1001, 0),
        (FIN | ACK, 1001, 1002, 1),
        (ACK, 1002, 1002, 0),
    ];

    /// Makes whole connections, one after another: each packet follows from what the last has become.
    #[xdp]
    pub(crate) fn visitor(context: XdpContext) -> u32 {
        visit(&context).unwrap_or(xdp_action::XDP_ABORTED)
    }

    #[inline(always)]
    fn visit(context: &XdpContext) -> Option<u32> {
        let start = whole::<LENGTH>(context)?;
        let counter = NEXT_FLOW.get_ptr_mut(0)?;
        let visit = VISIT.get_ptr_mut(0)?;
        let steps = STEPS.len() as u64;
        // SAFETY: LENGTH bytes of the packet were checked; the others are map values.
        unsafe {
            let packet = &mut *((start + ETHERNET) as *mut Ipv4Tcp);
            let vip_be = destination_be(TEMPLATE.get(0)?);
            let mut number = *counter;
            let step = number % steps;
            if number > 0 {
                let forwarded = packet.ip.destination_be != vip_be;
                if step == 1 {
                    // What has become of the SYN.
                    if forwarded && packet.tcp.flags & RST == 0 {
                        *visit = Visit {
                            snat: packet.ip.source_be,
                            node: packet.ip.destination_be,
                            snat_port: packet.tcp.source_port_be,
                            node_port: packet.tcp.destination_port_be,
                        };
                    } else {
                        outcome(1);
                        number += steps - 1;
                    }
                } else {
                    // The backend's packets, steps 1 and 4, come from the VIP now.
                    let right = if step == 2 || step == 5 { packet.ip.source_be == vip_be } else { forwarded };
                    if !right || packet.tcp.flags & RST != 0 {
                        outcome(2);
                    }
                    if step == 0 {
                        outcome(0);
                    }
                }
            }
            *counter = number + 1;
            let mut sent = STEPS[0];
            let mut index = 1;
            while index < STEPS.len() {
                if number % steps == index as u64 {
                    sent = STEPS[index];
                }
                index += 1;
            }
            let (flags, sequence, acknowledgement, side) = sent;
            restore::<LENGTH>(start, TEMPLATE.get(side)?);
            packet.tcp.flags = flags;
            packet.tcp.sequence_be = sequence.to_be();
            packet.tcp.acknowledgement_be = acknowledgement.to_be();
            if side == 0 {
                packet.ip.source_be = client(number / steps).to_be();
                packet.tcp.source_port_be = client_port(number / steps).to_be();
            } else {
                packet.ip.source_be = (*visit).node;
                packet.ip.destination_be = (*visit).snat;
                packet.tcp.source_port_be = (*visit).node_port;
                packet.tcp.destination_port_be = (*visit).snat_port;
            }
            TARGET.tail_call(context, side);
        }
        None
    }

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
        let start = whole::<LENGTH>(context)?;
        let template = TEMPLATE.get(0)?;
        let counter = NEXT_FLOW.get_ptr_mut(0)?;
        let (opened, doubled) = (CLAIMS.get_ptr_mut(0)?, CLAIMS.get_ptr_mut(1)?);
        // SAFETY: LENGTH bytes of the packet were checked; the others are map values.
        unsafe {
            let number = *counter;
            *counter = number + 1;
            let packet = &mut *((start + ETHERNET) as *mut Ipv4Tcp);
            let giving_up = number & 1 == 1;
            // A SYN that was refused has become a RST, or is still to the VIP: above the limit of refusals it is dropped as it came.
            if giving_up && packet.tcp.flags & RST == 0 && packet.ip.destination_be != destination_be(template) {
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
                    read_volatile(owner);
                    waited += 1;
                }
                add(owner, u64::MAX);
            }
            restore::<LENGTH>(start, template);
            packet.ip.source_be = (CLIENTS.load() + (number / 2) as u32 % 65_536).to_be();
            packet.tcp.source_port_be = 1024u16.to_be();
            packet.tcp.flags = if giving_up { RST } else { SYN };
            TARGET.tail_call(context, 0);
        }
        None
    }

    /// Only returns.
    #[xdp]
    pub(crate) fn nothing(_context: XdpContext) -> u32 {
        xdp_action::XDP_PASS
    }

    /// Takes the tag off, and nothing else.
    #[xdp]
    pub(crate) fn pop(context: XdpContext) -> u32 {
        // SAFETY: the helper checks that the packet is longer.
        match unsafe { bpf_xdp_adjust_head(context.as_ptr().cast(), VLAN_TAG as i32) } {
            0 => xdp_action::XDP_PASS,
            _ => xdp_action::XDP_ABORTED,
        }
    }

    /// One look-up in the flows, and nothing else.
    #[xdp]
    pub(crate) fn bare_lookup(context: XdpContext) -> u32 {
        look_up(&context, &FLOWS4)
    }

    /// The same with IPv6.
    #[xdp]
    pub(crate) fn bare_lookup6(context: XdpContext) -> u32 {
        look_up(&context, &FLOWS6)
    }

    #[inline(always)]
    fn look_up<A: Family>(context: &XdpContext, flows: &HashMap<A::Lookup, Flow<A>>) -> u32 {
        let start = context.data() + ETHERNET;
        if start + size_of::<TcpPacket<A>>() > context.data_end() {
            return xdp_action::XDP_ABORTED;
        }
        // SAFETY: bounds-checked.
        let key = unsafe { (*(start as *const TcpPacket<A>)).key(1) }.lookup(LOOKUP_SECRET.load());
        match flows.get_ptr(key) {
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
