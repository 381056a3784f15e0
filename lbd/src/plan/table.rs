//! Lookup tables: each content once, and none computed twice.

use std::collections::HashMap;
use std::sync::Arc;

use lbd_common::abi::{CHUNK_SLOTS, MAGLEV_CHUNKS};
use lbd_common::maglev::{Candidate, Identity, SIZES, build, table_size};

use super::frontend::Shared;
use super::model::BackendId;

/// What a table is made of: identity, weight and id of each backend, sorted.
pub(super) type Content = Vec<(Identity, u16, BackendId)>;

/// Slots.
type Table = Arc<[BackendId]>;

/// Tables of earlier plans. Looked up, never iterated: it has no part in the result.
#[derive(Debug, Default)]
pub(super) struct Cache {
    /// By content and size, with the number of the last plan that used it.
    tables: HashMap<(Content, u32), (Table, u64)>,
    plans: u64,
    /// Other parts of earlier plans.
    pub(super) shared: Shared,
}

/// How many plans an unused table is remembered for: a node that flaps costs its tables once.
const REMEMBERED: u64 = 64;
/// And how many tables, at most.
const MAX_REMEMBERED: usize = 4096;

/// Tables of one plan.
#[derive(Debug, Default)]
pub(super) struct Tables {
    contents: Vec<Content>,
    index: HashMap<Content, usize>,
}

impl Tables {
    /// Index of the table with this content; `None` if it is empty.
    pub(super) fn add(&mut self, mut content: Content) -> Option<usize> {
        if content.is_empty() {
            return None;
        }
        content.sort_unstable();
        if let Some(&index) = self.index.get(&content) {
            return Some(index);
        }
        let index = self.contents.len();
        self.contents.push(content.clone());
        self.index.insert(content, index);
        Some(index)
    }

    /// All tables. The second part says whether they are smaller than they should be for want of room.
    pub(super) fn finish(self, cache: &mut Cache) -> (Vec<Table>, bool) {
        let sizes: Vec<u32> = self
            .contents
            .iter()
            .map(|content| table_size(content.iter().map(|&(_, weight, _)| u32::from(weight)).sum()))
            .collect();
        // Half of the map: while tables change, the old ones stay until nobody reads them.
        let room = |limit: u32| {
            let chunks: u64 = sizes.iter().map(|&size| u64::from(size.min(limit).div_ceil(CHUNK_SLOTS))).sum();
            chunks <= u64::from(MAGLEV_CHUNKS / 2)
        };
        let largest = SIZES.iter().rev().copied().find(|&limit| room(limit)).unwrap_or(SIZES[0]);
        let tight = sizes.iter().any(|&size| size > largest);
        cache.plans += 1;
        let tables = self
            .contents
            .into_iter()
            .zip(sizes)
            .map(|(content, size)| cache.table(content, size.min(largest)))
            .collect();
        let plans = cache.plans;
        let remembered = if cache.tables.len() > MAX_REMEMBERED { 0 } else { REMEMBERED };
        cache.tables.retain(|_, (_, used)| *used + remembered >= plans);
        (tables, tight)
    }
}

impl Cache {
    fn table(&mut self, content: Content, size: u32) -> Table {
        let plans = self.plans;
        let (table, used) = self.tables.entry((content, size)).or_insert_with_key(|(content, size)| {
            let candidates: Vec<_> =
                content.iter().map(|&(identity, weight, _)| Candidate { identity, weight }).collect();
            let slots = build(&candidates, *size);
            (slots.into_iter().map(|slot| content[usize::from(slot)].2).collect(), plans)
        });
        *used = plans;
        Arc::clone(table)
    }
}
