//! AckMessage calls of gRPC of one message each: the protobuf as what an ack of the remoting protocol says. What is
//! refused or unusual is left to Python, which finds out why. Source: grpc.md §5.6, §8.1.

use pyo3::prelude::*;

use crate::grpc::{Fields, Value, once, plain};
use crate::header::digits;

/// Topic, group, message id, receipt handle, and what that says: kind of topic, broker, queue id, the message's offset,
/// the pop's start offset, pop time, invisible time, revive queue.
type Ack<'a> = (&'a str, &'a str, &'a str, &'a str, &'a str, &'a str, i64, i64, i64, i64, i64, i64);

/// The one ack of a request; None for others.
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
    // The place in the log stands last, or is not told; nobody needs it here.
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
