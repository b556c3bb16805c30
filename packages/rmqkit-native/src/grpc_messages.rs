//! An encoder that converts popped records to the messages of gRPC's ReceiveMessage, with their receipt handles.
//! Records that are filtered, compressed or unusual are left to Python.
//! Source: grpc.md §5.5, §6.2, §8.1.

use std::collections::HashSet;
use std::net::Ipv4Addr;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::header::digits;
use crate::md5::md5;

const MAGIC_V1: i32 = 0xDAA3_20A7_u32 as i32;
const MAGIC_V2: i32 = 0xDAA3_20AB_u32 as i32;
/// The bits of sysFlag for a compressed body and for IPv6 hosts.
const COMPRESSED_OR_V6: i32 = 0x31;
const HEAD_BYTES: usize = 88;
const HEX: &[u8; 16] = b"0123456789ABCDEF";
const NORMAL_TOPIC: &str = "0";
const DELIVER_DIGITS_MAX: usize = 15;
const PRIORITY_DIGITS_MAX: usize = 9;

/// A response in gRPC's framing, with the message id, receipt handle, queue id and offset of its message.
type Row<'py> = (Bound<'py, PyBytes>, Bound<'py, PyString>, Bound<'py, PyString>, i32, i64);

/// An encoder of popped messages.
#[pyclass(frozen)]
pub struct GrpcMessages {
    hidden: HashSet<String>,
}

#[pymethods]
impl GrpcMessages {
    /// `hidden`: names of properties that applications do not see.
    #[new]
    fn new(hidden: HashSet<String>) -> Self {
        GrpcMessages { hidden }
    }

    /// Encode the popped messages of a topic. Return None if Python must handle one of them. `handle`: pop time,
    /// invisible time and revive queue in the format of handles. `starts`: `startOffsetInfo` of the pop's response.
    /// `deliveries_max`: the maximum number of deliveries. `tags`: the accepted tags, or None for all.
    #[allow(clippy::too_many_arguments)]
    fn encode<'py>(
        &self,
        py: Python<'py>,
        records: &[u8],
        topic: &str,
        broker: &str,
        handle: &str,
        starts: &str,
        deliveries_max: i64,
        tags: Option<Vec<String>>,
    ) -> Option<Vec<Row<'py>>> {
        if topic.contains('%') || broker.is_empty() || broker.contains(' ') {
            return None;
        }
        let starts = read_starts(starts)?;
        let (mut rows, mut rest, mut out) = (Vec::new(), records, Vec::with_capacity(4096));
        while !rest.is_empty() {
            let record = Record::read(&mut rest)?;
            let deliveries = i64::from(record.reconsume_times) + 1;
            if record.topic != topic || deliveries > deliveries_max || i32::try_from(deliveries).is_err() {
                return None;
            }
            let found = Properties::read(record.properties, &self.hidden)?;
            if tags.as_ref().is_some_and(|tags| !tags.iter().any(|tag| tag == found.tag)) {
                return None;
            }
            let (queue_id, offset) = (record.queue_id, record.queue_offset);
            let start = starts.iter().rev().find(|(queue, _)| *queue == queue_id).map_or(offset, |(_, start)| *start);
            let place = record.physical_offset;
            let handle = format!("{start} {handle} {NORMAL_TOPIC} {broker} {queue_id} {offset} {place}");
            let own_id;
            let message_id = if found.message_id.is_empty() {
                own_id = hex(&[record.store_host, &place.to_be_bytes()].concat());
                &own_id
            } else {
                found.message_id
            };
            out.clear();
            write(&record, &found, message_id, &handle, deliveries, &mut out);
            rows.push((
                PyBytes::new(py, &out),
                PyString::new(py, message_id),
                PyString::new(py, &handle),
                queue_id,
                offset,
            ));
        }
        Some(rows)
    }
}

/// Return the start offset of each queue of the topic itself, without retry topics. Return None if the text is
/// malformed.
fn read_starts(text: &str) -> Option<Vec<(i32, i64)>> {
    let mut starts = Vec::new();
    for entry in text.split(';').filter(|_| !text.is_empty()) {
        let mut words = entry.split(' ');
        let (mark, queue, offset) = (words.next()?, words.next()?, words.next()?);
        if !matches!(mark, "0" | "1" | "2") || words.next().is_some() {
            return None;
        }
        let (queue, offset) = (digits(queue, i64::from(i32::MAX))?, digits(offset, i64::MAX)?);
        if mark == NORMAL_TOPIC {
            starts.push((queue as i32, offset));
        }
    }
    Some(starts)
}

/// A stored record with IPv4 hosts and an uncompressed body.
struct Record<'a> {
    queue_id: i32,
    queue_offset: i64,
    physical_offset: i64,
    born_timestamp: i64,
    born_host: &'a [u8],
    store_timestamp: i64,
    store_host: &'a [u8],
    reconsume_times: i32,
    body: &'a [u8],
    topic: &'a str,
    properties: &'a str,
}

impl<'a> Record<'a> {
    /// Read the first record and advance `rest`. Return None if the bytes are not a record, or another kind of record.
    fn read(rest: &mut &'a [u8]) -> Option<Self> {
        let data = *rest;
        let number = |at: usize| data.get(at..)?.first_chunk().map(|four| i32::from_be_bytes(*four));
        let long = |at: usize| data.get(at..)?.first_chunk().map(|eight| i64::from_be_bytes(*eight));
        let (record, behind) = data.split_at_checked(usize::try_from(number(0)?).ok()?)?;
        let magic = number(4)?;
        if record.len() < HEAD_BYTES || !matches!(magic, MAGIC_V1 | MAGIC_V2) || number(36)? & COMPRESSED_OR_V6 != 0 {
            return None;
        }
        let (body, tail) = record[HEAD_BYTES..].split_at_checked(usize::try_from(number(84)?).ok()?)?;
        let (topic_bytes, tail) = if magic == MAGIC_V1 {
            let (length, tail) = tail.split_first()?;
            (i16::from(*length as i8), tail)
        } else {
            let (length, tail) = tail.split_first_chunk()?;
            (i16::from_be_bytes(*length), tail)
        };
        let (topic, tail) = tail.split_at_checked(usize::try_from(topic_bytes).ok()?)?;
        let (length, properties) = tail.split_first_chunk()?;
        if usize::try_from(i16::from_be_bytes(*length)) != Ok(properties.len()) {
            return None;
        }
        *rest = behind;
        Some(Record {
            queue_id: number(12)?,
            queue_offset: long(20)?,
            physical_offset: long(28)?,
            born_timestamp: long(40)?,
            born_host: &record[48..56],
            store_timestamp: long(56)?,
            store_host: &record[64..72],
            reconsume_times: number(72)?,
            body,
            topic: std::str::from_utf8(topic).ok()?,
            properties: std::str::from_utf8(properties).ok()?,
        })
    }
}

/// The values in a property string. Missing texts are empty.
#[derive(Default)]
struct Properties<'a> {
    user: Vec<(&'a str, &'a str)>,
    tag: &'a str,
    keys: &'a str,
    message_id: &'a str,
    born_host: &'a str,
    group: &'a str,
    trace_context: &'a str,
    deliver_ms: Option<i64>,
    priority: Option<i64>,
    is_transaction: bool,
    is_delayed: bool,
}

impl<'a> Properties<'a> {
    /// Read a property string. Return None if a name occurs twice, there is a POP_CK, or a number is malformed.
    fn read(text: &'a str, hidden: &HashSet<String>) -> Option<Self> {
        let mut found = Properties::default();
        let mut names: Vec<&str> = Vec::with_capacity(16);
        for piece in text.split('\u{2}') {
            let Some((name, value)) = piece.split_once('\u{1}') else { continue };
            if name.is_empty() || value.is_empty() {
                continue;
            }
            if names.contains(&name) {
                return None;
            }
            names.push(name);
            match name {
                "POP_CK" => return None,
                "TAGS" => found.tag = value,
                "KEYS" => found.keys = value,
                "UNIQ_KEY" => found.message_id = value,
                "__BORNHOST" => found.born_host = value,
                "__SHARDINGKEY" => found.group = value,
                "TRACE_CONTEXT" => found.trace_context = value,
                "TRAN_MSG" => found.is_transaction = true,
                "TIMER_DELIVER_MS" => {
                    found.is_delayed = true;
                    found.deliver_ms = Some(decimal(value, DELIVER_DIGITS_MAX)?);
                }
                "DELAY" | "TIMER_DELAY_MS" | "TIMER_DELAY_SEC" => found.is_delayed = true,
                "_SYS_MSG_PRIORITY_" => found.priority = Some(decimal(value, PRIORITY_DIGITS_MAX)?),
                _ => {}
            }
            if !hidden.contains(name) {
                found.user.push((name, value));
            }
        }
        Some(found)
    }

    /// Return the `MessageType` of gRPC.
    fn kind(&self) -> u64 {
        match (self.is_transaction, self.is_delayed, self.group.is_empty()) {
            (true, _, _) => 4,
            (_, true, _) => 3,
            (_, _, false) => 2,
            _ if self.priority.is_some() => 6,
            _ => 1,
        }
    }
}

fn decimal(text: &str, digits_max: usize) -> Option<i64> {
    let is_number = text.len() <= digits_max && text.bytes().all(|digit| digit.is_ascii_digit());
    text.parse().ok().filter(|_| is_number)
}

/// Append a `ReceiveMessageResponse` with a message, in gRPC's framing.
fn write(record: &Record, found: &Properties, message_id: &str, handle: &str, deliveries: i64, out: &mut Vec<u8>) {
    let mut system = Vec::with_capacity(512);
    if !found.tag.is_empty() {
        push(1, found.tag.as_bytes(), &mut system);
    }
    for key in found.keys.split(' ').filter(|key| !key.is_empty()) {
        push(2, key.as_bytes(), &mut system);
    }
    push(3, message_id.as_bytes(), &mut system);
    // The type of the digest is 2, MD5.
    let mut digest = vec![8, 2];
    push(2, hex(&md5(record.body)).as_bytes(), &mut digest);
    push(4, &digest, &mut system);
    push_number(5, 1, &mut system); // the encoding is identity
    push_number(6, found.kind(), &mut system);
    push(7, &timestamp(record.born_timestamp), &mut system);
    if found.born_host.is_empty() {
        push(8, host_text(record.born_host).as_bytes(), &mut system);
    } else {
        push(8, found.born_host.as_bytes(), &mut system);
    }
    push(9, &timestamp(record.store_timestamp), &mut system);
    push(10, host_text(record.store_host).as_bytes(), &mut system);
    if let Some(ms) = found.deliver_ms {
        push(11, &timestamp(ms), &mut system);
    }
    push(12, handle.as_bytes(), &mut system);
    if record.queue_id != 0 {
        push_number(13, i64::from(record.queue_id) as u64, &mut system);
    }
    push_number(14, record.queue_offset as u64, &mut system);
    push_number(16, deliveries as u64, &mut system);
    if !found.group.is_empty() {
        push(17, found.group.as_bytes(), &mut system);
    }
    if !found.trace_context.is_empty() {
        push(18, found.trace_context.as_bytes(), &mut system);
    }
    if let Some(priority) = found.priority {
        push_number(22, priority as u64, &mut system);
    }
    let mut message = Vec::with_capacity(system.len() + record.body.len() + 256);
    let (mut topic, mut entry) = (Vec::new(), Vec::new());
    push(2, record.topic.as_bytes(), &mut topic);
    push(1, &topic, &mut message);
    for (name, value) in &found.user {
        entry.clear();
        push(1, name.as_bytes(), &mut entry);
        push(2, value.as_bytes(), &mut entry);
        push(2, &entry, &mut message);
    }
    push(3, &system, &mut message);
    if !record.body.is_empty() {
        push(4, record.body, &mut message);
    }
    let start = out.len();
    out.extend_from_slice(&[0; 5]);
    push(2, &message, out);
    let size = (out.len() - start - 5) as u32;
    out[start + 1..start + 5].copy_from_slice(&size.to_be_bytes());
}

/// Append a field with bytes.
fn push(field: u64, content: &[u8], out: &mut Vec<u8>) {
    push_varint(field << 3 | 2, out);
    push_varint(content.len() as u64, out);
    out.extend_from_slice(content);
}

/// Append a field with a number. Negative numbers have 64 bits.
fn push_number(field: u64, number: u64, out: &mut Vec<u8>) {
    push_varint(field << 3, out);
    push_varint(number, out);
}

fn push_varint(mut number: u64, out: &mut Vec<u8>) {
    while number > 0x7F {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// Return an encoded `Timestamp`.
fn timestamp(ms: i64) -> Vec<u8> {
    let (seconds, nanos) = (ms.div_euclid(1000), ms.rem_euclid(1000) * 1_000_000);
    let mut encoded = Vec::with_capacity(16);
    if seconds != 0 {
        push_number(1, seconds as u64, &mut encoded);
    }
    if nanos != 0 {
        push_number(2, nanos as u64, &mut encoded);
    }
    encoded
}

/// Return a packed address and port as text.
fn host_text(host: &[u8]) -> String {
    let port = i32::from_be_bytes([host[4], host[5], host[6], host[7]]);
    format!("{}:{port}", Ipv4Addr::new(host[0], host[1], host[2], host[3]))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]).map(|four| char::from(HEX[usize::from(four)])).collect()
}
