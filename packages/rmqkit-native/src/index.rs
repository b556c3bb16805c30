//! Entries and slots of an index file. Source: store.md §7.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

const HEADER_BYTES: usize = 40;
const SLOT_BYTES: usize = 4;
const HASH_BYTES: usize = 4;
/// The first number of a file.
const FIRST: i32 = 1;

/// The entries, the changes of slots (slot and number, 4 bytes each in the machine's order), and the number of slots
/// that were empty before.
type Entered<'py> = (Bound<'py, PyBytes>, Bound<'py, PyBytes>, usize);

/// Return the entries of records, with the numbers from `first` up to but not including `end`. Return None if there are
/// more keys than numbers. The table (header and slots) is not changed: concurrent readers must find the entries before
/// the slots point to them. `set_slots` changes the slots later.
/// `rows`: for each record its physical offset, storeTimestamp, number of keys, and the hashes of the keys; 8, 8, 4 and
/// 4 bytes, in the machine's order.
/// `begin_timestamp`: the begin timestamp of the file, or of the previous file if the file has no entry.
/// Raises ValueError: the table is shorter than its slots, or the rows are malformed.
#[pyfunction]
pub fn index_entries<'py>(
    py: Python<'py>,
    table: PyBuffer<u8>,
    slot_count: usize,
    first: i32,
    end: i32,
    begin_timestamp: i64,
    rows: &[u8],
) -> PyResult<Option<Entered<'py>>> {
    let cells = table.as_slice(py).ok_or_else(|| PyValueError::new_err("the table is in pieces"))?;
    let slots = slots_of(cells, slot_count)?;
    let mut newest: HashMap<u32, i32, BuildHasherDefault<SlotHasher>> = HashMap::default();
    let (mut entries, mut used, mut number, mut begin) = (Vec::new(), 0, first, begin_timestamp);
    let mut rest = rows;
    while !rest.is_empty() {
        let (row, hashes) = next_row(&mut rest).ok_or_else(|| PyValueError::new_err("rows that are cut off"))?;
        let mut seconds = seconds_after(begin, row.store_timestamp);
        for hash in hashes.chunks_exact(HASH_BYTES) {
            if number >= end {
                return Ok(None);
            }
            let hash = i32::from_ne_bytes([hash[0], hash[1], hash[2], hash[3]]);
            let slot = usize::try_from(hash).map_err(|_| PyValueError::new_err("a hash below zero"))? % slot_count;
            let known = newest.insert(slot as u32, number).unwrap_or_else(|| {
                let at = slot * SLOT_BYTES;
                i32::from_be_bytes([slots[at].get(), slots[at + 1].get(), slots[at + 2].get(), slots[at + 3].get()])
            });
            // A number greater than the entry's own number is damage, and would make an endless chain.
            let previous = if known > 0 && known <= number { known } else { 0 };
            used += usize::from(previous == 0);
            entries.extend_from_slice(&hash.to_be_bytes());
            entries.extend_from_slice(&row.physical_offset.to_be_bytes());
            entries.extend_from_slice(&seconds.to_be_bytes());
            entries.extend_from_slice(&previous.to_be_bytes());
            if number == FIRST {
                (begin, seconds) = (row.store_timestamp, 0); // the first entry of a file sets its begin timestamp
            }
            number += 1;
        }
    }
    let mut changes = Vec::with_capacity(2 * SLOT_BYTES * newest.len());
    for (slot, number) in newest {
        changes.extend_from_slice(&slot.to_ne_bytes());
        changes.extend_from_slice(&number.to_ne_bytes());
    }
    Ok(Some((PyBytes::new(py, &entries), PyBytes::new(py, &changes), used)))
}

struct Row {
    physical_offset: i64,
    store_timestamp: i64,
}

/// Read the next row for `index_entries` and its hashes, and advance `rest`. Return None if the row is incomplete.
fn next_row<'a>(rest: &mut &'a [u8]) -> Option<(Row, &'a [u8])> {
    let (physical_offset, tail) = rest.split_first_chunk()?;
    let (store_timestamp, tail) = tail.split_first_chunk()?;
    let (count, tail) = tail.split_first_chunk()?;
    let (hashes, tail) = tail.split_at_checked(u32::from_ne_bytes(*count) as usize * HASH_BYTES)?;
    *rest = tail;
    let (physical_offset, store_timestamp) = (i64::from_ne_bytes(*physical_offset), i64::from_ne_bytes(*store_timestamp));
    Some((Row { physical_offset, store_timestamp }, hashes))
}

/// Append a row for `index_entries`. `hashes`: 4 bytes per hash, in the machine's order.
pub fn push_row(physical_offset: i64, store_timestamp: i64, hashes: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(&physical_offset.to_ne_bytes());
    out.extend_from_slice(&store_timestamp.to_ne_bytes());
    out.extend_from_slice(&((hashes.len() / HASH_BYTES) as u32).to_ne_bytes());
    out.extend_from_slice(hashes);
}

/// Make slots point to entries that are written. `changes`: the changes that `index_entries` returned.
/// Raises ValueError: the table is shorter than its slots, or cannot be written.
#[pyfunction]
pub fn set_slots(py: Python<'_>, table: PyBuffer<u8>, slot_count: usize, changes: &[u8]) -> PyResult<()> {
    let cells = table.as_mut_slice(py).ok_or_else(|| PyValueError::new_err("the table cannot be written"))?;
    let slots = slots_of(cells, slot_count)?;
    for change in changes.chunks_exact(2 * SLOT_BYTES) {
        let slot = u32::from_ne_bytes([change[0], change[1], change[2], change[3]]) as usize % slot_count;
        let number = i32::from_ne_bytes([change[4], change[5], change[6], change[7]]).to_be_bytes();
        for (cell, byte) in slots[slot * SLOT_BYTES..].iter().zip(number) {
            cell.set(byte);
        }
    }
    Ok(())
}

/// A cheap hasher for the numbers of slots, which are already derived from hashes.
#[derive(Default)]
pub struct SlotHasher(u64);

impl Hasher for SlotHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("a slot is a u32");
    }

    fn write_u32(&mut self, slot: u32) {
        self.0 = u64::from(slot).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

fn slots_of<C>(cells: &[C], slot_count: usize) -> PyResult<&[C]> {
    let slots = cells.get(HEADER_BYTES..).unwrap_or_default();
    if slot_count == 0 || slots.len() / SLOT_BYTES < slot_count {
        return Err(PyValueError::new_err(format!("{} bytes of slots for {slot_count}", slots.len())));
    }
    Ok(slots)
}

fn seconds_after(begin: i64, store_timestamp: i64) -> i32 {
    if begin <= 0 {
        return 0;
    }
    let seconds = store_timestamp.saturating_sub(begin).div_euclid(1000);
    seconds.clamp(0, i64::from(i32::MAX)) as i32
}
