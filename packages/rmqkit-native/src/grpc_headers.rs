//! A reader for the headers of gRPC calls in the form of SDKs. Headers that are unusual, unknown or to be refused are
//! left to Python, which finds the reason.
//! Source: RFC 9113 §8.3, gRPC over HTTP/2, grpc.md §2.1.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString, PyTuple};

const TIMEOUT_DIGITS_MAX: usize = 8;

/// The path, the seconds until the deadline, and the metadata.
type Call<'py> = (Bound<'py, PyBytes>, Option<f64>, Bound<'py, PyDict>);

/// Return the content of the headers of a usual call, or None for other headers.
#[pyfunction]
pub fn read_grpc_call<'py>(py: Python<'py>, headers: &Bound<'py, PyList>) -> PyResult<Option<Call<'py>>> {
    let (mut path, mut seconds, mut pseudo, mut is_grpc) = (None, None, 0, false);
    let metadata = PyDict::new(py);
    for header in headers.iter() {
        let header = header.cast_into::<PyTuple>()?;
        let name = header.get_item(0)?.cast_into::<PyBytes>()?;
        let value = header.get_item(1)?.cast_into::<PyBytes>()?;
        let (name, text) = (name.as_bytes(), value.as_bytes());
        if name.first() == Some(&b':') {
            let (bit, is_right) = match name {
                b":method" => (1, text == b"POST"),
                b":scheme" => (2, true),
                b":path" => (4, !text.is_empty()),
                b":authority" => (8, true),
                _ => return Ok(None),
            };
            if !is_right || pseudo & (bit | 16) != 0 {
                return Ok(None);
            }
            pseudo |= bit;
            if bit == 4 {
                path = Some(value);
            }
            continue;
        }
        pseudo |= 16; // pseudo headers must precede all other headers
        let kept = match name {
            b"x-mq-client-id" => Some(intern!(py, "x-mq-client-id")),
            b"x-mq-language" => Some(intern!(py, "x-mq-language")),
            b"x-mq-client-version" => Some(intern!(py, "x-mq-client-version")),
            b"x-mq-date-time" => Some(intern!(py, "x-mq-date-time")),
            b"authorization" => Some(intern!(py, "authorization")),
            _ => None,
        };
        if let Some(name) = kept {
            let Some(text) = std::str::from_utf8(text).ok().filter(|text| text.is_ascii()) else { return Ok(None) };
            metadata.set_item(name, PyString::new(py, text))?;
            continue;
        }
        let is_usual = match name {
            b"te" => text == b"trailers",
            b"content-type" => {
                let is_first = !is_grpc;
                is_grpc = text.starts_with(b"application/grpc");
                is_first && is_grpc
            }
            b"grpc-timeout" => {
                let is_first = seconds.is_none();
                seconds = timeout(text);
                is_first && seconds.is_some()
            }
            b"grpc-encoding" => text == b"identity",
            b"user-agent" | b"grpc-accept-encoding" | b"accept-encoding" => true,
            b"x-mq-protocol" | b"x-mq-request-id" | b"x-mq-namespace" => true,
            _ => false,
        };
        if !is_usual {
            return Ok(None);
        }
    }
    let is_whole = pseudo & 7 == 7 && is_grpc;
    Ok(path.filter(|_| is_whole).map(|path| (path, seconds, metadata)))
}

/// Return a `grpc-timeout` in seconds, or None if it is malformed.
fn timeout(text: &[u8]) -> Option<f64> {
    let (unit, digits) = text.split_last()?;
    if digits.is_empty() || digits.len() > TIMEOUT_DIGITS_MAX || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let number: f64 = std::str::from_utf8(digits).ok()?.parse().ok()?;
    let seconds = match unit {
        b'H' => 3600.0,
        b'M' => 60.0,
        b'S' => 1.0,
        b'm' => 1e-3,
        b'u' => 1e-6,
        b'n' => 1e-9,
        _ => return None,
    };
    Some(number * seconds)
}
