//! The selection of matching queue entries and their records for a pull. Source: store.md §4.1, §16.1.

use pyo3::buffer::{PyBuffer, ReadOnlyCell};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyFrozenSet};

use crate::ENTRY_BYTES;

/// The number of records, the number of processed entries, the bytes of the records, the position of the first record
/// in the file, and a concatenated copy of the records, or None if the records are contiguous in the file.
type Selected<'py> = (usize, usize, i64, i64, Option<Bound<'py, PyBytes>>);

/// Select the records of matching queue entries from one file of the log: at most `count_max` records of at most
/// `bytes_max` bytes, or one larger record.
/// `log`: the file, of which the first `end - start` bytes are written. `start`: the physical offset of the file.
/// `codes`: the accepted tag codes, or None for all.
/// Return None if a record is in another file or not after the previous record, or if an entry has the address of a tag
/// code.
/// Raises ValueError: the file has fewer than `end - start` bytes.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub fn select_records<'py>(
    py: Python<'py>,
    entries: &[u8],
    log: PyBuffer<u8>,
    start: i64,
    end: i64,
    codes: Option<&Bound<'py, PyFrozenSet>>,
    count_max: usize,
    bytes_max: i64,
) -> PyResult<Option<Selected<'py>>> {
    let cells = log.as_slice(py).ok_or_else(|| PyValueError::new_err("the file is in pieces"))?;
    let written = usize::try_from(end.saturating_sub(start)).ok().and_then(|bytes| cells.get(..bytes));
    let written = written.ok_or_else(|| PyValueError::new_err("the file ends before its end"))?;
    let codes = codes.map(|codes| codes.iter().map(|code| code.extract()).collect::<PyResult<Vec<i64>>>()).transpose()?;
    let (mut parts, mut passed, mut size) = (Vec::<&[ReadOnlyCell<u8>]>::with_capacity(count_max.min(64)), 0, 0);
    let (mut first, mut is_run, mut run_end, mut least) = (0, true, 0, 0);
    for entry in entries.chunks_exact(ENTRY_BYTES) {
        let (offset, record_bytes, code) = fields(entry);
        if !parts.is_empty() && (record_bytes > bytes_max - size || parts.len() == count_max) {
            break;
        }
        let at = usize::try_from(offset.saturating_sub(start)).ok();
        let record = at.and_then(|at| written.get(at..)?.get(..usize::try_from(record_bytes).ok()?));
        let (Some(at), Some(record)) = (at, record) else { return Ok(None) };
        if record.is_empty() || at < least {
            return Ok(None);
        }
        least = at + record.len();
        if codes.as_ref().is_some_and(|codes| !codes.contains(&code)) {
            if i32::try_from(code).is_err() {
                return Ok(None);
            }
            passed += 1;
            continue;
        }
        passed += 1;
        if parts.is_empty() {
            first = at;
        } else {
            is_run &= at == run_end;
        }
        run_end = least;
        size += record_bytes;
        parts.push(record);
    }
    let body = if is_run {
        None
    } else {
        let bytes = parts.iter().map(|part| part.len()).sum();
        Some(PyBytes::new_with(py, bytes, |mut out| {
            for part in &parts {
                let (place, rest) = out.split_at_mut(part.len());
                place.iter_mut().zip(*part).for_each(|(byte, cell)| *byte = cell.get());
                out = rest;
            }
            Ok(())
        })?)
    };
    Ok(Some((parts.len(), passed, size, first as i64, body)))
}

/// Return the physical offset, the size and the tag code in an entry.
fn fields(entry: &[u8]) -> (i64, i64, i64) {
    let number = |at: usize| {
        let eight: [u8; 8] = entry[at..at + 8].try_into().expect("an entry has twenty bytes");
        i64::from_be_bytes(eight)
    };
    (number(0), number(8) >> 32, number(12))
}
