//! Messages in lite topics: their numbers there, and the entries of their light queues.
//!
//! The table of lite topics is in Python. It has a row (slot) for each lite topic, and its columns are arrays of numbers.
//! Source: lite.md §4, §5.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;

use pyo3::buffer::{Element, PyBuffer, ReadOnlyCell};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::index::SlotHasher;
use crate::properties::store_light;
use crate::{Run, Sent};

/// The state of a lite topic that has messages.
const LIVE: u8 = 1;
/// The numbers of a cell of recent entries: the index of the entry, its number in the light queue, and its jump.
const CELL_NUMBERS: usize = 3;

type BySlot<T> = HashMap<u32, T, BuildHasherDefault<SlotHasher>>;

/// The place of a message in a lite topic. The life is 0 if the message is in no lite topic.
#[derive(Clone, Copy, Default)]
pub struct LitePlace {
    pub slot: u32,
    pub number: i64,
    pub epoch: u32,
}

/// The columns of the table that change when entries are written.
pub struct Moved {
    pub tails: PyBuffer<i64>,
    pub firsts: PyBuffer<i64>,
    pub ends: PyBuffer<i64>,
    pub seconds: PyBuffer<u32>,
}

impl Run {
    /// Return the topics that have messages in lite topics, in the order of their first messages.
    pub fn parents(&self) -> Vec<&str> {
        let mut parents: Vec<&str> = Vec::new();
        for sent in self.sent.iter().filter(|sent| is_lite(sent)) {
            let topic = self.queues[sent.queue].topic.as_str();
            if parents.last() != Some(&topic) && !parents.contains(&topic) {
                parents.push(topic);
            }
        }
        parents
    }

    /// Return the slot of each message in a lite topic, or None if a lite topic has no row or does not live.
    fn slots(&self, py: Python<'_>, tables: &[Bound<'_, PyDict>], states: &PyBuffer<u8>) -> PyResult<Option<Vec<u32>>> {
        let parents = self.parents();
        if parents.len() != tables.len() {
            return Err(PyValueError::new_err(format!("{} tables for {} topics", tables.len(), parents.len())));
        }
        let states = column(py, states)?;
        let mut slots = Vec::with_capacity(self.sent.len());
        let mut before: Option<(usize, &str, u32)> = None;
        for sent in self.sent.iter().filter(|sent| is_lite(sent)) {
            let name = self.part(sent.keys.lite);
            if let Some((queue, known, slot)) = before
                && (queue, known) == (sent.queue, name)
            {
                slots.push(slot);
                continue;
            }
            let topic = self.queues[sent.queue].topic.as_str();
            let table = parents.iter().position(|parent| *parent == topic).map_or(0, |at| at);
            let Some(found) = tables[table].get_item(PyString::new(py, name))? else {
                return Ok(None);
            };
            let slot: u32 = found.extract()?;
            if number_at(states, slot)? != LIVE {
                return Ok(None);
            }
            before = Some((sent.queue, name, slot));
            slots.push(slot);
        }
        Ok(Some(slots))
    }

    /// Assign numbers to the messages in lite topics, and add the properties of the light queues.
    pub fn number_lite(
        &mut self,
        py: Python<'_>,
        tables: &[Bound<'_, PyDict>],
        states: &PyBuffer<u8>,
        nexts: &PyBuffer<i64>,
        epochs: &PyBuffer<u32>,
    ) -> PyResult<bool> {
        let Some(slots) = self.slots(py, tables, states)? else {
            return Ok(false);
        };
        let (nexts, epochs) = (column(py, nexts)?, column(py, epochs)?);
        let mut ends: BySlot<i64> = BySlot::default();
        let mut places = Vec::with_capacity(slots.len());
        for slot in slots {
            let next = number_at(nexts, slot)?;
            let end = ends.entry(slot).or_insert(next);
            places.push(LitePlace { slot, number: *end, epoch: number_at(epochs, slot)? });
            *end += 1;
        }
        for (sent, place) in self.sent.iter_mut().filter(|sent| is_lite(sent)).zip(places) {
            let mut queue = Vec::with_capacity(128);
            queue.extend_from_slice(b"%LMQ%$");
            queue.extend_from_slice(self.queues[sent.queue].topic.as_bytes());
            queue.push(b'$');
            queue.extend_from_slice(sent.keys.lite.of(&self.text));
            let (number, epoch) = (place.number.to_string(), place.epoch.to_string());
            let life = if place.epoch > 1 { epoch.as_bytes() } else { &[] };
            let start = self.text.len();
            sent.keys = store_light(sent.properties.clone(), &sent.keys, [&queue, life, number.as_bytes()], &mut self.text);
            sent.properties = start..self.text.len();
            sent.lite = place;
        }
        Ok(true)
    }

    /// Return the previous entry and the jump of each entry of a light queue: indexes of earlier entries of the queue.
    pub fn lite_links(
        &self,
        py: Python<'_>,
        first_index: i64,
        tails: &PyBuffer<i64>,
        recent: &PyBuffer<i64>,
        read: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<(i64, i64)>> {
        let tails = column(py, tails)?;
        let cells = recent.as_mut_slice(py).ok_or_else(|| PyValueError::new_err("the recent entries are no array"))?;
        let count = (cells.len() / CELL_NUMBERS) as i64;
        if count == 0 || first_index < 0 {
            return Err(PyValueError::new_err(format!("{count} cells, first index {first_index}")));
        }
        let cell = |index: i64| (index % count) as usize * CELL_NUMBERS;
        let entry = |index: i64| -> PyResult<Option<(i64, i64)>> {
            if index < 0 {
                return Ok(None);
            }
            let at = cell(index);
            if cells[at].get() == index {
                return Ok(Some((cells[at + 1].get(), cells[at + 2].get())));
            }
            read.call1((index,))?.extract()
        };
        let mut own: BySlot<i64> = BySlot::default();
        let mut links = Vec::with_capacity(self.sent.len());
        for (index, sent) in (first_index..).zip(self.sent.iter().filter(|sent| sent.lite.epoch > 0)) {
            let LitePlace { slot, number, .. } = sent.lite;
            let previous = match own.insert(slot, index) {
                Some(before) => before,
                None => number_at(tails, slot)?,
            };
            let jump = jump_after(previous, &entry)?;
            links.push((previous, jump));
            let at = cell(index);
            cells[at].set(index);
            cells[at + 1].set(number);
            cells[at + 2].set(jump);
        }
        Ok(links)
    }

    /// Move the ends of the light queues after their entries were written. Return the slots that had no entry.
    pub fn end_lite(&self, py: Python<'_>, first_index: i64, columns: &Moved) -> PyResult<Vec<u32>> {
        let (tails, firsts) = (columns.tails.as_mut_slice(py), columns.firsts.as_mut_slice(py));
        let (ends, seconds) = (columns.ends.as_mut_slice(py), columns.seconds.as_mut_slice(py));
        let (Some(tails), Some(firsts), Some(ends), Some(seconds)) = (tails, firsts, ends, seconds) else {
            return Err(PyValueError::new_err("a column cannot be written"));
        };
        let count = tails.len().min(firsts.len()).min(ends.len()).min(seconds.len());
        let second = u32::try_from((self.store_timestamp / 1000).max(0)).unwrap_or(u32::MAX);
        let mut opened = Vec::new();
        for (index, sent) in (first_index..).zip(self.sent.iter().filter(|sent| sent.lite.epoch > 0)) {
            let slot = sent.lite.slot as usize;
            if slot >= count {
                return Err(no_row(sent.lite.slot, count));
            }
            if tails[slot].get() < 0 {
                firsts[slot].set(sent.lite.number);
                opened.push(sent.lite.slot);
            }
            tails[slot].set(index);
            ends[slot].set(sent.lite.number + 1);
            seconds[slot].set(second);
        }
        Ok(opened)
    }

    /// Set the numbers of the next messages, after the records were stored.
    pub fn keep_lite(&self, py: Python<'_>, nexts: &PyBuffer<i64>) -> PyResult<()> {
        let nexts = nexts.as_mut_slice(py).ok_or_else(|| PyValueError::new_err("a column cannot be written"))?;
        for sent in self.sent.iter().filter(|sent| sent.lite.epoch > 0) {
            let next = nexts.get(sent.lite.slot as usize).ok_or_else(|| no_row(sent.lite.slot, nexts.len()))?;
            next.set(sent.lite.number + 1);
        }
        Ok(())
    }
}

pub fn is_lite(sent: &Sent) -> bool {
    sent.keys.lite.end > 0
}

/// Return the jump of an entry after the entry at index `previous`. The jumps make a skip list (Myers 1983).
fn jump_after(previous: i64, entry: &impl Fn(i64) -> PyResult<Option<(i64, i64)>>) -> PyResult<i64> {
    let Some((number, jump)) = entry(previous)? else {
        return Ok(previous);
    };
    let Some((target, target_jump)) = entry(jump)? else {
        return Ok(previous);
    };
    let Some((further, _)) = entry(target_jump)? else {
        return Ok(previous);
    };
    Ok(if number - target == target - further { target_jump } else { previous })
}

fn column<'a, T: Element>(py: Python<'a>, buffer: &'a PyBuffer<T>) -> PyResult<&'a [ReadOnlyCell<T>]> {
    buffer.as_slice(py).ok_or_else(|| PyValueError::new_err("a column is no array"))
}

fn number_at<T: Element>(column: &[ReadOnlyCell<T>], slot: u32) -> PyResult<T> {
    column.get(slot as usize).map(ReadOnlyCell::get).ok_or_else(|| no_row(slot, column.len()))
}

fn no_row(slot: u32, count: usize) -> PyErr {
    PyValueError::new_err(format!("slot {slot} of a table with {count} rows"))
}
