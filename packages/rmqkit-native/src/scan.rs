//! The iteration over the records of a log file, for all code that reads a whole log. Source: store.md §3, §12.1.

use pyo3::buffer::{PyBuffer, ReadOnlyCell};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::record::{BORN_HOST_V6, CRC_MASK, FIXED_BYTES, HOST_V6_BYTES, MAGIC_V1, STORE_HOST_V6};

const MAGIC_V2: i32 = 0xDAA3_20AB_u32 as i32;
const HOST_V4_BYTES: usize = 8;
/// The bytes of each record in `heads`: all fields before the body, if both hosts are IPv4.
const HEAD_BYTES: usize = FIXED_BYTES - 3 + 2 * HOST_V4_BYTES;
const RECORD_BYTES_MIN: usize = HEAD_BYTES + 3;
const SYS_FLAG_AT: usize = 36;
const PHYSICAL_OFFSET_AT: usize = 28;
const V1_TOPIC_BYTES_MAX: usize = 127;
const BLOCK_BYTES: usize = 16 << 10;

/// Columns with eight bytes per number in the machine's order (positions, sizes, body_at, body_bytes, topic_at,
/// topic_bytes, properties_at, properties_bytes), the heads of the records, and the layout of each record in one byte.
type Columns<'py> = (Bound<'py, PyBytes>, Bound<'py, PyBytes>, Bound<'py, PyBytes>);

/// Return the consecutive sound records between `low` and `high`: at most `rows_max`, up to the record that reaches
/// `bytes_max` bytes. `base_offset`: the physical offset of the buffer's first byte. With None, the physical offsets of
/// records are not checked.
/// Raises ValueError: the buffer is in pieces, or ends before `high`.
#[pyfunction]
pub fn sound_records<'py>(
    py: Python<'py>,
    buffer: PyBuffer<u8>,
    base_offset: Option<i64>,
    low: usize,
    high: usize,
    rows_max: usize,
    bytes_max: usize,
) -> PyResult<Columns<'py>> {
    let cells = whole(py, &buffer)?.get(..high).ok_or_else(|| PyValueError::new_err("the buffer ends before its end"))?;
    let (mut numbers, mut heads, mut layouts) = (<[Vec<i64>; 8]>::default(), Vec::new(), Vec::new());
    let (mut position, last) = (low, low.saturating_add(bytes_max));
    while position < last && layouts.len() < rows_max
        && let Some(record) = Place::of(cells, position, base_offset)
    {
        for (column, number) in numbers.iter_mut().zip(record.numbers()) {
            column.push(number as i64);
        }
        heads.extend(cells[position..position + HEAD_BYTES].iter().map(ReadOnlyCell::get));
        layouts.push(record.layout);
        position += record.size;
    }
    let numbers = PyBytes::new_with(py, 8 * 8 * layouts.len(), |out| {
        for (place, number) in out.chunks_exact_mut(8).zip(numbers.iter().flatten()) {
            place.copy_from_slice(&number.to_ne_bytes());
        }
        Ok(())
    })?;
    Ok((numbers, PyBytes::new(py, &heads), PyBytes::new(py, &layouts)))
}

/// The positions of the parts of a record.
struct Place {
    position: usize,
    size: usize,
    layout: u8,
    body: (usize, usize),
    topic: (usize, usize),
    properties: (usize, usize),
}

impl Place {
    /// Return the record at a position, or None if it is not sound. The magic of a sound record is known, its physical
    /// offset is right, and its parts add up to its size.
    fn of(cells: &[ReadOnlyCell<u8>], position: usize, base_offset: Option<i64>) -> Option<Place> {
        let size = usize::try_from(i32::from_be_bytes(octets(cells.get(position..)?, 0)?)).ok()?;
        let record = cells.get(position..)?.get(..size)?;
        if size < RECORD_BYTES_MIN {
            return None;
        }
        let magic = i32::from_be_bytes(octets(record, 4)?);
        let is_long = magic == MAGIC_V2;
        if !is_long && magic != MAGIC_V1 {
            return None;
        }
        if base_offset.is_some_and(|base| {
            let said = octets(record, PHYSICAL_OFFSET_AT).map(i64::from_be_bytes);
            said != Some(base.wrapping_add(position as i64))
        }) {
            return None;
        }
        let sys_flag = i32::from_be_bytes(octets(record, SYS_FLAG_AT)?);
        let wide = usize::from(sys_flag & BORN_HOST_V6 != 0) + usize::from(sys_flag & STORE_HOST_V6 != 0);
        let body_at = HEAD_BYTES + wide * (HOST_V6_BYTES - HOST_V4_BYTES);
        let body_bytes = usize::try_from(i32::from_be_bytes(octets(record, body_at - 4)?)).ok()?;
        let length_at = body_at + body_bytes;
        let (topic_at, topic_bytes) = if is_long {
            (length_at + 2, usize::try_from(i16::from_be_bytes(octets(record, length_at)?)).ok()?)
        } else {
            (length_at + 1, usize::from(record.get(length_at)?.get()))
        };
        if !is_long && topic_bytes > V1_TOPIC_BYTES_MAX {
            return None;
        }
        let properties_at = topic_at + topic_bytes + 2;
        let properties_bytes = usize::try_from(i16::from_be_bytes(octets(record, properties_at - 2)?)).ok()?;
        (properties_at + properties_bytes == size).then_some(Place {
            position,
            size,
            layout: ((sys_flag & (BORN_HOST_V6 | STORE_HOST_V6)) >> 4) as u8,
            body: (body_at, body_bytes),
            topic: (topic_at, topic_bytes),
            properties: (properties_at, properties_bytes),
        })
    }

    fn numbers(&self) -> [usize; 8] {
        let (body, topic, properties) = (self.body, self.topic, self.properties);
        let at = |inside: usize| self.position + inside;
        [self.position, self.size, at(body.0), body.1, at(topic.0), topic.1, at(properties.0), properties.1]
    }
}

/// Return one byte for each part of a buffer: 1 if the part has its checksum in `sums`, otherwise 0. `starts`, `sizes`:
/// eight bytes per number in the machine's order. `sums`: four bytes each, CRC-32 with the top bit cleared, big-endian.
/// Raises ValueError: the buffer is in pieces, a part is outside of the buffer, or the numbers of items differ.
#[pyfunction]
pub fn have_sums<'py>(
    py: Python<'py>,
    buffer: PyBuffer<u8>,
    starts: &[u8],
    sizes: &[u8],
    sums: &[u8],
) -> PyResult<Bound<'py, PyBytes>> {
    let cells = whole(py, &buffer)?;
    if starts.len() != sizes.len() || starts.len() != 2 * sums.len() {
        return Err(PyValueError::new_err("not as many starts as sizes and sums"));
    }
    let mut block = vec![0; BLOCK_BYTES];
    let mut found = Vec::with_capacity(sums.len() / 4);
    for ((start, size), sum) in starts.chunks_exact(8).zip(sizes.chunks_exact(8)).zip(sums.chunks_exact(4)) {
        let part = number(start).zip(number(size)).and_then(|(start, size)| cells.get(start..)?.get(..size));
        let part = part.ok_or_else(|| PyValueError::new_err("a part lies outside of the buffer"))?;
        let mut hasher = crc32fast::Hasher::new();
        for cells in part.chunks(BLOCK_BYTES) {
            let piece = &mut block[..cells.len()];
            piece.iter_mut().zip(cells).for_each(|(byte, cell)| *byte = cell.get());
            hasher.update(piece);
        }
        found.push(u8::from((hasher.finalize() & CRC_MASK).to_be_bytes() == *sum));
    }
    Ok(PyBytes::new(py, &found))
}

fn number(eight: &[u8]) -> Option<usize> {
    usize::try_from(i64::from_ne_bytes(eight.try_into().ok()?)).ok()
}

fn whole<'a>(py: Python<'a>, buffer: &'a PyBuffer<u8>) -> PyResult<&'a [ReadOnlyCell<u8>]> {
    buffer.as_slice(py).ok_or_else(|| PyValueError::new_err("the buffer is in pieces"))
}

/// Return the octets at a position, or None if the buffer is too short.
fn octets<const N: usize>(cells: &[ReadOnlyCell<u8>], at: usize) -> Option<[u8; N]> {
    let part = cells.get(at..)?.get(..N)?;
    Some(std::array::from_fn(|index| part[index].get()))
}
