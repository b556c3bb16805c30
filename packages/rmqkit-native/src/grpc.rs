//! A reader for gRPC's SendMessage requests with one message that only needs storage. It converts the protobuf of the
//! message to the fields of a remoting send. Requests that are unusual, unknown or to be refused are left to Python,
//! which finds the reason.
//! Source: grpc.md §5.4, §6.1.

use std::collections::HashSet;
use std::fmt::Write;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

const USER_PROPERTIES_MAX: usize = 128;
const USER_PROPERTIES_BYTES_MAX: usize = 16_384;
const GROUP_BYTES_MAX: usize = 64;
const GZIP: u64 = 2;
const TRANSACTION: u64 = 4;
const SECONDS_MAX: u64 = 1 << 40;

/// Topic, message id, message group, property string, body, born time in ms.
type Plain<'py> =
    (Bound<'py, PyString>, Bound<'py, PyString>, Bound<'py, PyString>, Bound<'py, PyString>, Bound<'py, PyBytes>, u64);

/// A reader of SendMessage requests.
#[pyclass(frozen)]
pub struct GrpcSends {
    refused: HashSet<String>,
    body_bytes_max: usize,
    properties_bytes_max: usize,
}

#[pymethods]
impl GrpcSends {
    /// `refused`: names of user properties that are refused or need more than storage.
    #[new]
    fn new(refused: HashSet<String>, body_bytes_max: usize, properties_bytes_max: usize) -> Self {
        GrpcSends { refused, body_bytes_max, properties_bytes_max }
    }

    /// Return the message of a plain request, or None for other requests. `born_host`: the origin of the message if the
    /// request does not state one.
    fn read<'py>(&self, py: Python<'py>, request: &[u8], born_host: &str) -> Option<Plain<'py>> {
        let message = only_message(request)?;
        let found = Message::read(message)?;
        let system = System::read(found.system)?;
        if found.body.is_empty() || found.body.len() > self.body_bytes_max || system.message_type == TRANSACTION {
            return None;
        }
        let properties = self.properties(&found, &system, born_host)?;
        Some((
            PyString::new(py, found.topic),
            PyString::new(py, system.message_id),
            PyString::new(py, system.group),
            PyString::new(py, &properties),
            PyBytes::new(py, found.body),
            system.born_ms,
        ))
    }
}

impl GrpcSends {
    /// Return the property string, in the order of `properties_of`.
    fn properties(&self, found: &Message<'_>, system: &System<'_>, born_host: &str) -> Option<String> {
        let mut said = system.tag.len() + system.keys.iter().map(|key| key.len()).sum::<usize>();
        let mut text = String::with_capacity(256);
        let mut add = |name: &str, value: &str| {
            text.push_str(name);
            text.push('\x01');
            text.push_str(value);
            text.push('\x02');
        };
        add("UNIQ_KEY", system.message_id);
        add("PGROUP", found.topic);
        let mut digits = String::new();
        write!(digits, "{}", system.attempt).ok()?;
        add("RECONSUME_TIME", &digits);
        if !system.tag.is_empty() {
            add("TAGS", system.tag);
        }
        if !system.group.is_empty() {
            add("__SHARDINGKEY", system.group);
        }
        if !system.trace_context.is_empty() {
            add("TRACE_CONTEXT", system.trace_context);
        }
        let own = system.born_host.trim_matches(' ');
        add("__BORNHOST", if own.is_empty() { born_host } else { own });
        digits.clear();
        write!(digits, "{}", system.born_ms).ok()?;
        add("BORN_TIMESTAMP", &digits);
        if !system.keys.is_empty() {
            add("KEYS", &system.keys.join(" "));
        }
        if found.user.len() > USER_PROPERTIES_MAX {
            return None;
        }
        for (number, entry) in found.user.iter().enumerate() {
            let (name, value) = user_property(entry)?;
            said += name.len() + value.len();
            let came_before = || found.user[..number].iter().any(|other| user_property(other).is_none_or(|it| it.0 == name));
            if self.refused.contains(name) || came_before() {
                return None;
            }
            if !name.is_empty() && !value.is_empty() {
                add(name, value);
            }
        }
        (said <= USER_PROPERTIES_BYTES_MAX && text.len() <= self.properties_bytes_max).then_some(text)
    }
}

/// The fields of a `Message`.
#[derive(Default)]
struct Message<'a> {
    topic: &'a str,
    user: Vec<&'a [u8]>,
    system: &'a [u8],
    body: &'a [u8],
}

impl<'a> Message<'a> {
    fn read(bytes: &'a [u8]) -> Option<Self> {
        let mut found = Message::default();
        let mut seen = 0;
        for field in Fields(bytes) {
            let (number, Value::Bytes(value)) = field? else { return None };
            match number {
                2 => found.user.push(value),
                1 => found.topic = plain(once(Fields(value), 2)?)?,
                3 => found.system = value,
                4 => found.body = value,
                _ => return None,
            }
            if number != 2 {
                seen = first_time(seen, number)?;
            }
        }
        Some(found)
    }
}

/// The fields of the `SystemProperties` of a sent message.
#[derive(Default)]
struct System<'a> {
    tag: &'a str,
    keys: Vec<&'a str>,
    message_id: &'a str,
    message_type: u64,
    born_ms: u64,
    born_host: &'a str,
    attempt: u64,
    group: &'a str,
    trace_context: &'a str,
}

impl<'a> System<'a> {
    fn read(bytes: &'a [u8]) -> Option<Self> {
        let mut found = System::default();
        let mut seen = 0;
        for field in Fields(bytes) {
            let (number, value) = field?;
            if number != 2 {
                seen = first_time(seen, number)?;
            }
            match (number, value) {
                (1, Value::Bytes(text)) => found.tag = word(text)?,
                (2, Value::Bytes(text)) => found.keys.push(word(text)?),
                (3, Value::Bytes(text)) => found.message_id = word(text)?,
                (5, Value::Number(code)) if code == GZIP => return None,
                (6, Value::Number(code)) => found.message_type = code,
                (7, Value::Bytes(time)) => found.born_ms = ms(time)?,
                (8, Value::Bytes(text)) => found.born_host = plain(text)?,
                // Ignore the queue id: a producer does not know its queue, but some SDKs send 0.
                (5 | 13, Value::Number(_)) => {}
                (16, Value::Number(count)) if count <= i32::MAX as u64 => found.attempt = count,
                (17, Value::Bytes(text)) => found.group = word(text)?,
                (18, Value::Bytes(text)) => found.trace_context = plain(text)?,
                _ => return None,
            }
        }
        let is_usual = !found.message_id.is_empty() && !found.tag.contains('|') && found.group.len() < GROUP_BYTES_MAX;
        is_usual.then_some(found)
    }
}

/// Return the bytes of the message in a request, or None if the request has other fields or several messages.
fn only_message(request: &[u8]) -> Option<&[u8]> {
    once(Fields(request), 1)
}

/// Return the bytes of the only field, or None if there are other fields or the number is wrong.
pub fn once<'a>(mut fields: Fields<'a>, wanted: u64) -> Option<&'a [u8]> {
    match (fields.next()??, fields.next()) {
        ((number, Value::Bytes(value)), None) if number == wanted => Some(value),
        _ => None,
    }
}

/// Return `seen` with the bit of a field, or None if the field occurs for the second time.
fn first_time(seen: u64, number: u64) -> Option<u64> {
    let bit = 1u64.checked_shl(u32::try_from(number).ok()?)?;
    (seen & bit == 0).then_some(seen | bit)
}

fn is_control(letter: char) -> bool {
    matches!(letter, '\0'..='\x1f' | '\x7f'..='\u{9f}')
}

/// Return a text, or None if it is not ASCII or has control characters.
pub fn plain(bytes: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(bytes).ok()?;
    (text.is_ascii() && !text.chars().any(is_control)).then_some(text)
}

/// Return a `plain` text, or None if it is blank.
fn word(bytes: &[u8]) -> Option<&str> {
    plain(bytes).filter(|text| text.bytes().any(|byte| byte != b' '))
}

/// Return name and value of an entry of the map. SDKs always write both.
fn user_property(entry: &[u8]) -> Option<(&str, &str)> {
    let mut fields = Fields(entry);
    match (fields.next()??, fields.next()??, fields.next()) {
        ((1, Value::Bytes(name)), (2, Value::Bytes(value)), None) => {
            let (name, value) = (std::str::from_utf8(name).ok()?, std::str::from_utf8(value).ok()?);
            (!name.chars().chain(value.chars()).any(is_control)).then_some((name, value))
        }
        _ => None,
    }
}

/// Return a `Timestamp` in ms, or None if it is before 1970 or malformed.
fn ms(bytes: &[u8]) -> Option<u64> {
    let (mut seconds, mut nanos, mut last) = (0, 0, 0);
    for field in Fields(bytes) {
        let (number, Value::Number(value)) = field? else { return None };
        match number {
            1 => seconds = value,
            2 => nanos = value,
            _ => return None,
        }
        if number <= last {
            return None;
        }
        last = number;
    }
    (seconds < SECONDS_MAX && nanos < 1_000_000_000).then_some(seconds * 1000 + nanos / 1_000_000)
}

pub enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// An iterator over the fields of a protobuf message. An item is None if the field is malformed or has an unused wire
/// type; the iteration ends after it.
pub struct Fields<'a>(pub &'a [u8]);

impl<'a> Iterator for Fields<'a> {
    type Item = Option<(u64, Value<'a>)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let read = self.field();
        if read.is_none() {
            self.0 = &[];
        }
        Some(read)
    }
}

impl<'a> Fields<'a> {
    fn field(&mut self) -> Option<(u64, Value<'a>)> {
        let key = self.varint()?;
        let number = key >> 3;
        if number == 0 || number >= 64 {
            return None;
        }
        match key & 7 {
            0 => Some((number, Value::Number(self.varint()?))),
            2 => {
                let length = usize::try_from(self.varint()?).ok()?;
                let (value, rest) = self.0.split_at_checked(length)?;
                self.0 = rest;
                Some((number, Value::Bytes(value)))
            }
            _ => None,
        }
    }

    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for (place, &byte) in self.0.iter().enumerate().take(9) {
            value |= u64::from(byte & 0x7F) << (7 * place);
            if byte < 0x80 {
                self.0 = &self.0[place + 1..];
                return Some(value);
            }
        }
        None
    }
}
