//! Tables on their way from one set of maps to another: in passes while the old programs forward, and what those changed since the last
//! pass by the new control program, when the new ones do.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::io;
use std::path::Path;

use bytemuck::Pod;
use lbd_common::abi::{self, AgeEntry, Flow};

use super::super::bpf::{Map, PerCpu, Queue};
use super::super::pins::KeyHasher;
use super::v1;

/// Elements written at once.
const BATCH: usize = 8192;

/// Copies a table once. Elements that `convert` does not take are left out.
pub(super) fn copy<K1: Pod, V1: Pod, K2: Pod, V2: Pod>(
    from: &Path,
    to: &Path,
    mut convert: impl FnMut(&K1, &V1) -> Option<(K2, V2)>,
) -> io::Result<u64> {
    let (from, to) = (Map::<K1, V1>::open(from)?, Map::<K2, V2>::open(to)?);
    let mut writer = Batch::new(&to);
    from.for_each(|key, value| {
        if let Some((key, value)) = convert(key, value) {
            writer.put(key, value);
        }
    })?;
    writer.finish()
}

/// Copies an array; elements that are zero in both are passed over.
pub(super) fn copy_array<V1: Pod, V2: Pod>(
    from: &Path,
    to: &Path,
    mut convert: impl FnMut(u32, &V1) -> V2,
) -> io::Result<u64> {
    let zeros = vec![0_u8; size_of::<V1>().max(size_of::<V2>())];
    copy(from, to, |&index: &u32, old: &V1| {
        let new = convert(index, old);
        let is_zero = bytemuck::bytes_of(old) == &zeros[..size_of::<V1>()]
            && bytemuck::bytes_of(&new) == &zeros[..size_of::<V2>()];
        (!is_zero).then_some((index, new))
    })
}

/// Writes elements in batches and remembers the first failure.
struct Batch<'a, K, V> {
    map: &'a Map<K, V>,
    keys: Vec<K>,
    values: Vec<V>,
    written: u64,
    failed: Option<io::Error>,
}

impl<'a, K: Pod, V: Pod> Batch<'a, K, V> {
    fn new(map: &'a Map<K, V>) -> Self {
        Self { map, keys: Vec::new(), values: Vec::new(), written: 0, failed: None }
    }

    fn put(&mut self, key: K, value: V) {
        self.keys.push(key);
        self.values.push(value);
        if self.keys.len() == BATCH {
            self.flush();
        }
    }

    fn flush(&mut self) {
        if self.failed.is_none() {
            match self.map.set_many(&self.keys, &self.values) {
                Ok(()) => self.written += self.keys.len() as u64,
                Err((_, error)) => self.failed = Some(error),
            }
        }
        self.keys.clear();
        self.values.clear();
    }

    fn finish(mut self) -> io::Result<u64> {
        self.flush();
        self.failed.map_or(Ok(self.written), Err)
    }
}

/// A key by its bytes.
#[derive(Clone, Copy)]
struct Bytes<K>(K);

impl<K: Pod> PartialEq for Bytes<K> {
    fn eq(&self, other: &Self) -> bool {
        bytemuck::bytes_of(&self.0) == bytemuck::bytes_of(&other.0)
    }
}

impl<K: Pod> Eq for Bytes<K> {}

impl<K: Pod> Hash for Bytes<K> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write(bytemuck::bytes_of(&self.0));
    }
}

/// One half of a flow, of either ABI.
pub(super) trait Half: Pod {
    /// Its key.
    type Key: Pod;
    /// The clock hand's entry for a forward half.
    type Entry: Pod;
    /// `FLOW_*` bits.
    fn state(&self) -> u16;
    /// Frontend id.
    fn frontend(&self) -> u16;
    /// Of a forward half: tick at which the flow was made.
    fn created(&self) -> u32;
    /// Bytes so far.
    fn bytes(&self) -> u64;
    /// Packets so far, low 32 bits.
    fn packets(&self) -> u32;
    /// The same with counters that say how much they have grown since then.
    fn grown(self, bytes: u64, packets: u32) -> Self;
    /// The clock hand's entry.
    fn entry(&self, key: Self::Key) -> Self::Entry;

    /// A live forward half: a connection.
    fn is_connection(&self) -> bool {
        self.state() & (abi::FLOW_REVERSE | abi::FLOW_DEAD) == 0
    }
}

impl<A: abi::Address> Half for Flow<A> {
    type Key = A::Lookup;
    type Entry = AgeEntry<A>;

    fn state(&self) -> u16 {
        self.state
    }

    fn frontend(&self) -> u16 {
        self.frontend
    }

    fn created(&self) -> u32 {
        Self::created(self)
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn packets(&self) -> u32 {
        self.packets
    }

    fn grown(self, bytes: u64, packets: u32) -> Self {
        let (grown, more) = (self.bytes.wrapping_sub(bytes), self.packets.wrapping_sub(packets));
        Self { bytes: grown, packets: more, packets_high: 0, ..self }
    }

    fn entry(&self, key: A::Lookup) -> AgeEntry<A> {
        AgeEntry { lookup: key, created: self.created() }
    }
}

impl Half for v1::Flow {
    type Key = v1::FlowKey;
    type Entry = v1::AgeEntry;

    fn state(&self) -> u16 {
        self.state
    }

    fn frontend(&self) -> u16 {
        self.frontend
    }

    fn created(&self) -> u32 {
        v1::flow(self).created()
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn packets(&self) -> u32 {
        self.packets
    }

    fn grown(self, bytes: u64, packets: u32) -> Self {
        let (grown, more) = (self.bytes.wrapping_sub(bytes), self.packets.wrapping_sub(packets));
        Self { bytes: grown, packets: more, packets_high: 0, ..self }
    }

    fn entry(&self, key: v1::FlowKey) -> v1::AgeEntry {
        v1::AgeEntry { key, created: Half::created(self) }
    }
}

/// What was copied of a half: enough to tell whether it has changed, and by how much its counters have grown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Copied {
    bytes: u64,
    packets: u32,
    /// Hash of the whole value; the lowest bit is the parity of the pass that has seen it.
    mark: u32,
}

impl Copied {
    fn of(half: &impl Half) -> Self {
        let mut hasher = KeyHasher::default();
        hasher.write(bytemuck::bytes_of(half));
        Self { bytes: half.bytes(), packets: half.packets(), mark: hasher.finish() as u32 & !1 }
    }

    /// Whether it is another value than before.
    const fn differs(self, before: Self) -> bool {
        self.bytes != before.bytes || self.packets != before.packets || self.mark != before.mark & !1
    }
}

/// What the programs of before did to a half after it was copied, or that they made it.
pub(super) enum Late<H: Half> {
    /// It was not there.
    New(H::Key, H),
    /// It has changed: the value holds how much its counters have grown, and all else as it is now.
    Grown(H::Key, H),
    /// It is gone, or over.
    Ended(H::Key),
}

/// A flow table on its way.
pub(super) struct Flows<K, V, H: Half> {
    from: Map<K, V>,
    to: Map<H::Key, H>,
    queue: Queue<H::Entry>,
    copied: HashMap<Bytes<H::Key>, Copied, BuildHasherDefault<KeyHasher>>,
    parity: u32,
}

/// Live flows by frontend id, and how many of them are UDP.
pub(super) type Living = HashMap<u16, (u64, u64)>;

impl<K: Pod, V: Pod, H: Half> Flows<K, V, H> {
    /// Opens the maps.
    pub(super) fn open(from: &Path, to: &Path, queue: &Path) -> io::Result<Self> {
        Ok(Self {
            from: Map::open(from)?,
            to: Map::open(to)?,
            queue: Queue::open(queue)?,
            copied: HashMap::default(),
            parity: 0,
        })
    }

    /// Empties the table, which nobody reads, and its queue.
    pub(super) fn clear(&self) -> io::Result<()> {
        let mut keys = Vec::new();
        self.to.for_each(|key, _| keys.push(*key))?;
        for key in keys {
            self.to.delete(&key)?;
        }
        while self.queue.pop()?.is_some() {}
        Ok(())
    }

    /// Halves that the new table has room for, and halves that were copied.
    pub(super) fn room(&self) -> (u32, usize) {
        (self.to.info().max_entries, self.copied.len())
    }

    /// Brings the new table, which nobody reads yet, up to date. `since` is the tick at which the last pass began. Returns what lives
    /// and the number of halves that had changed.
    pub(super) fn pass(
        &mut self,
        since: Option<u32>,
        mut convert: impl FnMut(&K, &V) -> Option<(H::Key, H)>,
    ) -> io::Result<(Living, u64)> {
        self.parity ^= 1;
        let (parity, copied, queue) = (self.parity, &mut self.copied, &self.queue);
        let mut living = Living::new();
        let mut writer = Batch::new(&self.to);
        let mut failed = None;
        self.from.for_each(|key, value| {
            let Some((key, half)) = convert(key, value) else { return };
            if half.is_connection() {
                let counts = living.entry(half.frontend()).or_default();
                counts.0 += 1;
                counts.1 += u64::from(half.state() & abi::FLOW_UDP != 0);
            }
            let now = Copied::of(&half);
            let before = copied.insert(Bytes(key), Copied { mark: now.mark | parity, ..now });
            if before.is_some_and(|before| !now.differs(before)) {
                return;
            }
            writer.put(key, half);
            // The clock hand must know it. What is no longer there when it comes by is passed over.
            let reused = since.is_some_and(|since| half.created().wrapping_sub(since) <= u32::MAX / 2);
            if half.state() & abi::FLOW_REVERSE == 0 && (before.is_none() || reused) {
                failed = failed.take().or_else(|| queue.push(&half.entry(key)).err());
            }
        })?;
        let changed = writer.finish()?;
        if let Some(error) = failed {
            return Err(error);
        }
        let gone: Vec<H::Key> =
            copied.iter().filter(|(_, kept)| kept.mark & 1 != parity).map(|(key, _)| key.0).collect();
        for key in &gone {
            self.to.delete(key)?;
            copied.remove(&Bytes(*key));
        }
        Ok((living, changed + gone.len() as u64))
    }

    /// What the programs of before did after the last pass, in the order in which it is to be handed over: what ended, then reverse
    /// halves, then forward halves. They do not run any more. Without a pass before (an interrupted migration goes on) all is new.
    pub(super) fn late(&mut self, mut convert: impl FnMut(&K, &V) -> Option<(H::Key, H)>) -> io::Result<Vec<Late<H>>> {
        self.parity ^= 1;
        let (parity, copied) = (self.parity, &mut self.copied);
        let (mut ended, mut reverse, mut forward) = (Vec::new(), Vec::new(), Vec::new());
        self.from.for_each(|key, value| {
            let Some((key, half)) = convert(key, value) else { return };
            let now = Copied::of(&half);
            let place = if half.state() & abi::FLOW_REVERSE != 0 { &mut reverse } else { &mut forward };
            match copied.insert(Bytes(key), Copied { mark: now.mark | parity, ..now }) {
                None => place.push(Late::New(key, half)),
                // The client's next connection over a flow that was over: counted from the beginning.
                Some(before) if now.differs(before) && now.bytes < before.bytes => {
                    place.push(Late::New(key, half));
                    ended.push(Late::Ended(key));
                }
                Some(before) if now.differs(before) => {
                    place.push(Late::Grown(key, half.grown(before.bytes, before.packets)));
                }
                Some(_) => {}
            }
        })?;
        ended.extend(copied.iter().filter(|(_, kept)| kept.mark & 1 != parity).map(|(key, _)| Late::Ended(key.0)));
        ended.append(&mut reverse);
        ended.append(&mut forward);
        Ok(ended)
    }

    /// The value in the new table.
    pub(super) fn get(&self, key: &H::Key) -> io::Result<Option<H>> {
        self.to.get(key)
    }

    /// Adds a half to the new table, if its key is absent, and to the clock hand's queue if it is a forward half.
    pub(super) fn insert(&self, key: &H::Key, half: &H) -> io::Result<bool> {
        let inserted = self.to.insert(key, half)?;
        if inserted && half.state() & abi::FLOW_REVERSE == 0 {
            self.queue.push(&half.entry(*key))?;
        }
        Ok(inserted)
    }
}

/// Counters of each CPU on their way.
pub(super) struct Counters<V> {
    from: PerCpu<V>,
    to: PerCpu<V>,
    /// What was copied, all CPUs together.
    copied: HashMap<u32, V>,
}

impl<V: Pod + PartialEq> Counters<V> {
    /// Opens the maps.
    pub(super) fn open(from: &Path, to: &Path) -> io::Result<Self> {
        Ok(Self { from: PerCpu::open(from)?, to: PerCpu::open(to)?, copied: HashMap::new() })
    }

    /// Copies what has changed; nobody counts in the new map yet.
    pub(super) fn pass(&mut self, sum: impl Fn(&[V]) -> V) -> io::Result<()> {
        let mut changed = Vec::new();
        let copied = &mut self.copied;
        self.from.for_each(|index, values| {
            let total = sum(values);
            if total != V::zeroed() && copied.insert(index, total) != Some(total) {
                changed.push((index, values.to_vec()));
            }
        })?;
        changed.iter().try_for_each(|(index, values)| self.to.set(*index, values))
    }

    /// What was counted after the last pass: index, total then, total now.
    pub(super) fn late(&self, sum: impl Fn(&[V]) -> V) -> io::Result<Vec<(u32, V, V)>> {
        let mut late = Vec::new();
        self.from.for_each(|index, values| {
            let total = sum(values);
            let before = self.copied.get(&index).copied().unwrap_or_else(V::zeroed);
            if total != before {
                late.push((index, before, total));
            }
        })?;
        Ok(late)
    }
}
