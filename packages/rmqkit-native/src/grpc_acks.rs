//! A reader for gRPC's AckMessage requests with one message. It converts the protobuf to the fields of a remoting ack.
//! Requests that are unusual or to be refused are left to Python, which finds the reason. Source: grpc.md §5.6, §8.1.

use pyo3::prelude::*;

use crate::grpc::{Fields, Value, once, plain};
use crate::header::digits;

/// Topic, group, message id, receipt handle, and the content of the handle: kind of topic, broker, queue id, offset of
/// the message, start offset of the pop, pop time, invisible time, revive queue.
type Ack<'a> = (&'a str, &'a str, &'a str, &'a str, &'a str, &'a str, i64, i64, i64, i64, i64, i64);

/// Return the ack of a request with one entry, or None for other requests.
#[pyfunction]
pub fn read_grpc_ack(request: &[u8]) -> Option<Ack<'_>> {
    let (mut group, mut topic, mut entry) = (None, None, None);
    for field in Fields(request) {
        let (number, Value::Bytes(value)) = field? else { return None };
        let place = match number {
            1 => &mut group,
            2 => &mut topic,
            3 => &mut entry,
            _ => return None,
        };
        if place.replace(value).is_some() {
            return None;
        }
    }
    let (mut message_id, mut handle) = (None, None);
    for field in Fields(entry?) {
        let (number, Value::Bytes(value)) = field? else { return None };
        let place = match number {
            1 => &mut message_id,
            2 => &mut handle,
            _ => return None,
        };
        if place.replace(plain(value)?).is_some() {
            return None;
        }
    }
    let handle = handle?;
    let mut words = [""; 9];
    let mut count = 0;
    for word in handle.split(' ') {
        *words.get_mut(count)? = word;
        count += 1;
    }
    let number = |text: &str| digits(text, i64::MAX);
    // The ninth word, the physical offset, is optional and not used here.
    if count < 8 || (count == 9 && number(words[8]).is_none()) || !matches!(words[4], "0" | "1" | "2") || words[5].is_empty() {
        return None;
    }
    Some((
        plain(once(Fields(topic?), 2)?)?,
        plain(once(Fields(group?), 2)?)?,
        message_id.unwrap_or_default(),
        handle,
        words[4],
        words[5],
        digits(words[6], i64::from(i32::MAX))?,
        number(words[7])?,
        number(words[0])?,
        number(words[1])?,
        number(words[2])?,
        number(words[3])?,
    ))
}
