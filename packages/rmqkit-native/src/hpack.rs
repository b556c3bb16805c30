//! A decoder for the HTTP/2 header blocks that a server reads. `rmqkit.proxy.transport.plain_header_blocks` does the
//! same in plain Python. Repeated headers are the same Python objects.
//! Source: RFC 7541.

use std::collections::VecDeque;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyList, PyTuple};

use crate::hpack_tables::{CODES, STATIC};

const ENTRY_BYTES: usize = 32;
const TABLE_BYTES: usize = 4096;
const NUMBER_MAX: usize = 1 << 20;
const SYMBOLS: usize = 256;
/// The Huffman tree. A node has the next node for each bit, or `-1 - symbol` at the end of a code.
type Tree = Vec<[i32; 2]>;

/// A name with its value, and their size in a table.
struct Entry {
    header: Py<PyTuple>,
    size: usize,
}

/// The data that all decoders share.
struct Shared {
    entries: Vec<Entry>,
    tree: Tree,
}

static SHARED: PyOnceLock<Shared> = PyOnceLock::new();

fn shared(py: Python<'_>) -> PyResult<&'static Shared> {
    SHARED.get_or_try_init(py, || {
        let made = |(name, value): &(&str, &str)| {
            entry(PyBytes::new(py, name.as_bytes()), PyBytes::new(py, value.as_bytes()), name.len() + value.len())
        };
        Ok(Shared { entries: STATIC.iter().map(made).collect::<PyResult<_>>()?, tree: code_tree() })
    })
}

fn code_tree() -> Tree {
    let mut tree: Tree = vec![[0, 0]];
    for (symbol, &(code, bits)) in CODES.iter().enumerate() {
        let mut at = 0;
        for place in (0..bits).rev() {
            let bit = (code >> place & 1) as usize;
            if place == 0 {
                tree[at][bit] = -1 - symbol as i32;
            } else {
                if tree[at][bit] <= 0 {
                    tree.push([0, 0]);
                    tree[at][bit] = tree.len() as i32 - 1;
                }
                at = tree[at][bit] as usize;
            }
        }
    }
    tree
}

/// A decoder for the header blocks of one side of a connection, in order.
#[pyclass]
pub struct HeaderDecoder {
    shared: &'static Shared,
    list_bytes_max: usize,
    /// The dynamic table, newest entry first.
    dynamic: VecDeque<Entry>,
    size: usize,
    size_max: usize,
}

#[pymethods]
impl HeaderDecoder {
    /// `list_bytes_max`: the maximum size of the headers of a block.
    #[new]
    fn new(py: Python<'_>, list_bytes_max: usize) -> PyResult<Self> {
        let shared = shared(py)?;
        Ok(HeaderDecoder { shared, list_bytes_max, dynamic: VecDeque::new(), size: 0, size_max: TABLE_BYTES })
    }

    /// Return the headers of a block. Raises ValueError: the block cannot be decoded. The arguments of the error are a
    /// text, and a bool that is true if the only fault is too many bytes of headers.
    fn decode<'py>(&mut self, py: Python<'py>, block: &[u8]) -> PyResult<Bound<'py, PyList>> {
        let headers = PyList::empty(py);
        let (mut at, mut left) = (0, self.list_bytes_max);
        while at < block.len() {
            let first = block[at];
            let (header, size) = if first & 0x80 != 0 {
                let index = number(block, &mut at, 0x7F)?;
                let found = self.entry(index)?;
                (found.header.bind(py).clone(), found.size)
            } else if first & 0x60 == 0x20 {
                if !headers.is_empty() {
                    return Err(unreadable("the size of the table changes within a header block"));
                }
                let wanted = number(block, &mut at, 0x1F)?;
                if wanted > TABLE_BYTES {
                    return Err(unreadable(&format!("a table of {wanted} bytes is wanted; it has {TABLE_BYTES}")));
                }
                self.size_max = wanted;
                self.shrink(wanted);
                continue;
            } else {
                let is_kept = first & 0x40 != 0;
                let index = number(block, &mut at, if is_kept { 0x3F } else { 0x0F })?;
                let name = if index > 0 {
                    self.entry(index)?.header.bind(py).get_item(0)?.cast_into::<PyBytes>()?
                } else {
                    self.text(py, block, &mut at)?
                };
                let value = self.text(py, block, &mut at)?;
                let bytes = name.as_bytes().len() + value.as_bytes().len();
                let made = entry(name, value, bytes)?;
                let (header, size) = (made.header.bind(py).clone(), made.size);
                if is_kept {
                    self.keep(made);
                }
                (header, size)
            };
            if size > left {
                let text = format!("headers of more than {} bytes", self.list_bytes_max);
                return Err(PyValueError::new_err((text, true)));
            }
            left -= size;
            headers.append(header)?;
        }
        Ok(headers)
    }
}

impl HeaderDecoder {
    fn entry(&self, index: usize) -> PyResult<&Entry> {
        let fixed = self.shared.entries.len();
        let found = match index {
            0 => None,
            _ if index <= fixed => self.shared.entries.get(index - 1),
            _ => self.dynamic.get(index - fixed - 1),
        };
        found.ok_or_else(|| unreadable(&format!("the table has no entry {index}")))
    }

    fn keep(&mut self, made: Entry) {
        if made.size > self.size_max {
            self.shrink(0);
        } else {
            self.shrink(self.size_max - made.size);
            self.size += made.size;
            self.dynamic.push_front(made);
        }
    }

    fn shrink(&mut self, size_max: usize) {
        while self.size > size_max {
            match self.dynamic.pop_back() {
                Some(oldest) => self.size -= oldest.size,
                None => break,
            }
        }
    }

    /// Read a string of a block (RFC 7541 §5.2).
    fn text<'py>(&self, py: Python<'py>, block: &[u8], at: &mut usize) -> PyResult<Bound<'py, PyBytes>> {
        let Some(first) = block.get(*at) else {
            return Err(unreadable("a header block ends within a header"));
        };
        let is_coded = first & 0x80 != 0;
        let length = number(block, at, 0x7F)?;
        let Some(text) = block.get(*at..*at + length) else {
            return Err(unreadable("a header block ends within a string"));
        };
        *at += length;
        if !is_coded {
            return Ok(PyBytes::new(py, text));
        }
        match decoded(&self.shared.tree, text) {
            Some(plain) => Ok(PyBytes::new(py, &plain)),
            None => Err(unreadable("a string cannot be read: Invalid Huffman String")),
        }
    }
}

fn entry(name: Bound<'_, PyBytes>, value: Bound<'_, PyBytes>, bytes: usize) -> PyResult<Entry> {
    let header = PyTuple::new(name.py(), [&name, &value])?;
    Ok(Entry { header: header.unbind(), size: bytes + ENTRY_BYTES })
}

fn unreadable(text: &str) -> PyErr {
    PyValueError::new_err((text.to_owned(), false))
}

/// Read a number. The bits of `mask` in the first byte contain the number or its beginning (RFC 7541 §5.1).
fn number(block: &[u8], at: &mut usize, mask: u8) -> PyResult<usize> {
    let mut value = usize::from(block[*at] & mask);
    *at += 1;
    if value < usize::from(mask) {
        return Ok(value);
    }
    let mut shift = 0;
    while *at < block.len() && value <= NUMBER_MAX && shift <= 28 {
        let more = block[*at];
        *at += 1;
        value += usize::from(more & 0x7F) << shift;
        if more < 0x80 {
            return Ok(value);
        }
        shift += 7;
    }
    Err(unreadable("a number in a header block does not end, or is too large"))
}

/// Decode a Huffman-coded text. Return None if the code is malformed, or not padded with the first bits of the end.
fn decoded(tree: &Tree, text: &[u8]) -> Option<Vec<u8>> {
    let mut plain = Vec::with_capacity(text.len() * 8 / 5);
    let (mut at, mut bits, mut is_filled) = (0, 0, true);
    for byte in text {
        for place in (0..8).rev() {
            let bit = usize::from(byte >> place & 1);
            let next = tree[at][bit];
            if next > 0 {
                at = next as usize;
                bits += 1;
                is_filled &= bit == 1;
                continue;
            }
            let symbol = -1 - next;
            if next == 0 || symbol as usize >= SYMBOLS {
                return None;
            }
            plain.push(symbol as u8);
            (at, bits, is_filled) = (0, 0, true);
        }
    }
    (bits < 8 && is_filled).then_some(plain)
}
