//! The computations of a broker for plain sends, in one call for all sends of a read.
//!
//! `Core.read` extracts the sends from the bytes of a connection, up to the first request that needs more than storage.
//! It returns a `Run`. After Python has assigned the queue offsets, the `Run` makes log records, queue entries and
//! responses. Refusals, and all work with files, clocks or tables, are done in Python.

#![forbid(unsafe_code)]

mod acks;
mod grpc;
mod grpc_acks;
mod grpc_headers;
mod grpc_messages;
mod header;
mod hpack;
mod hpack_tables;
mod index;
mod lite;
mod md5;
mod properties;
mod read;
mod record;
mod scan;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::panic::PanicException;
use pyo3::types::{PyBytes, PyDict, PyString};

use header::Header;
use lite::{LitePlace, Moved};
use properties::{Keys, Rules, STORED_BYTES_MAX, Span, is_lite_topic, java_hash, java_hash_behind, key_hash};
use record::{Message, Shared};

/// The version of the calls and their results. Python uses a core only if both have the same version.
const FORMAT: u32 = 13;
const JSON: u8 = 0;
const BINARY: u8 = 1;
const START_BYTES: usize = 8;
pub const ENTRY_BYTES: usize = 20;
const MEMBER_HEAD_BYTES: usize = 20;
const MEMBERS_MAX: usize = 2048;
const MEMBERS_PROPERTIES_BYTES_MAX: usize = 32 << 10;
/// The same for a batch in a lite topic, which Python cannot store in slices.
const LITE_MEMBERS_PROPERTIES_BYTES_MAX: usize = 128 << 10;
const NO_WAIT: &[u8] = b"WAIT\x01false\x02";
/// The maximum growth of the properties of a timed message, without the length of its topic.
const TIMED_BYTES_MAX: usize = 66;
/// The maximum growth of the properties of a message in a lite topic, without the lengths of its topic and lite topic.
const LITE_BYTES_MAX: usize = 98;
const LITE_ENTRY_BYTES: usize = 56;

struct Sent {
    queue: usize,
    code: u16,
    opaque: i32,
    flag: i32,
    sys_flag: i32,
    born_timestamp: i64,
    reconsume_times: i32,
    body: Range<usize>,
    properties: Range<usize>,
    keys: Keys,
    /// The queue id in the response.
    queue_id: i32,
    /// The properties as received: empty if the message is not timed.
    sent_properties: String,
    /// Empty if the message is not timed.
    recall_handle: String,
    lite: LitePlace,
}

struct Place {
    queue_offset: i64,
    physical_offset: i64,
    size: i32,
}

/// A queue with messages of a run: the number of messages, and the total size of their records.
struct Queue {
    topic: String,
    queue_id: i32,
    count: usize,
    bytes: i64,
}

/// The request of a batch, which has one response for all messages.
struct Batch {
    opaque: i32,
    unique_key: String,
    is_fifo: bool,
}

/// An item of `Run.requests`.
type Row<'py> = (
    Bound<'py, PyString>,
    i32,
    i64,
    i64,
    i64,
    i64,
    i32,
    i32,
    Bound<'py, PyBytes>,
    i32,
    Option<i32>,
    Bound<'py, PyBytes>,
);

/// The entries of a queue, and the physical offsets where their records start and end.
type Entries<'py> = (Bound<'py, PyBytes>, i64, i64);

/// The key of counted requests in metrics (topic, request code, `message_type`), and the stored bytes of each request.
type Kind<'a> = (&'a str, u16, &'a str, Vec<i64>);

/// A reader of plain sends.
#[pyclass(frozen)]
struct Core {
    rules: Arc<Rules>,
    frame_bytes_max: usize,
    header_bytes_max: usize,
}

#[pymethods]
impl Core {
    /// `stamps`: the properties that every message gets. `not_plain`: names of properties that need more than storage.
    /// `timed`: names of properties with a delivery time, in order of priority, and their units in ms.
    #[new]
    fn new(
        stamps: Vec<(String, String)>,
        not_plain: Vec<String>,
        timed: Vec<(String, i64)>,
        frame_bytes_max: usize,
        header_bytes_max: usize,
    ) -> Self {
        Core { rules: Arc::new(Rules { stamps, not_plain, timed }), frame_bytes_max, header_bytes_max }
    }

    /// Return the consecutive plain sends from `start`, at most `count_max`, or one batch, or consecutive acks. Return
    /// None if the first frame is none of these.
    #[pyo3(signature = (chunk, start = 0, count_max = usize::MAX))]
    fn read(&self, chunk: Bound<'_, PyBytes>, start: usize, count_max: usize) -> Option<Taken> {
        let data = chunk.as_bytes();
        if let Some(acks) = acks::read(chunk.clone().unbind(), start, |at| self.bare_header(data, at)) {
            return Some(Taken::Acks(acks));
        }
        let mut run = Run::of(chunk.clone().unbind(), start, self.rules.clone());
        let mut known: HashMap<(String, i32), usize> = HashMap::new();
        while run.sent.len() < count_max && let Some(request) = self.request(data, run.end) {
            let end = request.body.end;
            if request.header.is_batch {
                if run.sent.is_empty() {
                    self.read_batch(data, request, &mut run)?;
                    run.end = end;
                }
                break;
            }
            if self.read_one(request, &mut run, &mut known).is_none() {
                break;
            }
            run.end = end;
        }
        (!run.sent.is_empty()).then_some(Taken::Run(run))
    }
}

/// The result of `Core.read`.
#[derive(IntoPyObject)]
enum Taken {
    Run(Run),
    Acks(acks::Acks),
}

/// A request that may be a plain send: its header, and the position of its body.
struct Request<'a> {
    header: Header<'a>,
    body: Range<usize>,
}

impl Core {
    /// Return the length of a frame (without its length field) and of its header. Return None if the splitter would
    /// refuse the frame.
    fn lengths(&self, start: &[u8; START_BYTES]) -> Option<(usize, usize)> {
        let length = usize::try_from(i32::from_be_bytes([start[0], start[1], start[2], start[3]])).ok()?;
        let header_bytes = u32::from_be_bytes([0, start[5], start[6], start[7]]) as usize;
        let is_sound = start[4] <= BINARY
            && length + 4 <= self.frame_bytes_max
            && header_bytes < self.header_bytes_max
            && header_bytes + 4 <= length;
        is_sound.then_some((length, header_bytes))
    }

    /// Return the request at a position, or None if it is incomplete or cannot be a plain send.
    fn request<'a>(&self, data: &'a [u8], at: usize) -> Option<Request<'a>> {
        let (length, header_bytes) = self.lengths(data.get(at..)?.first_chunk()?)?;
        let body = at + START_BYTES + header_bytes..at + 4 + length;
        if body.is_empty() {
            return None;
        }
        let header = data.get(..body.end)?.get(at + START_BYTES..body.start)?;
        let header = match data[at + 4] {
            JSON => header::read_json(header)?,
            BINARY => header::read_binary(header)?,
            _ => return None,
        };
        Some(Request { header, body })
    }

    /// Return the JSON header and the end of a request without a body at a position, or None for other requests.
    fn bare_header<'a>(&self, data: &'a [u8], at: usize) -> Option<(&'a [u8], usize)> {
        let (length, header_bytes) = self.lengths(data.get(at..)?.first_chunk()?)?;
        let end = at + 4 + length;
        let header = data.get(at + START_BYTES..end)?;
        (data[at + 4] == JSON && header.len() == header_bytes).then_some((header, end))
    }

    /// Add a send to the run. If it is not a plain send, leave the run unchanged and return None.
    fn read_one(&self, request: Request, run: &mut Run, known: &mut HashMap<(String, i32), usize>) -> Option<()> {
        let Request { header, body } = request;
        let text_start = run.text.len();
        let keys = self.store(&header.properties, header.topic, &mut run.text)?;
        let properties = text_start..run.text.len();
        run.waits_not |= contains(&run.text[properties.clone()], NO_WAIT);
        let key = (header.topic.to_owned(), header.queue_id);
        let queue = *known.entry(key).or_insert_with_key(|(topic, queue_id)| {
            run.queues.push(Queue { topic: topic.clone(), queue_id: *queue_id, count: 0, bytes: 0 });
            run.queues.len() - 1
        });
        run.queues[queue].count += 1;
        run.has_lite |= keys.lite.end > 0;
        run.body_bytes_max = run.body_bytes_max.max(body.len());
        run.sent.push(Sent {
            queue,
            code: header.code,
            opaque: header.opaque,
            flag: header.flag,
            sys_flag: header.sys_flag,
            born_timestamp: header.born_timestamp,
            reconsume_times: header.reconsume_times,
            body,
            properties,
            keys,
            queue_id: header.queue_id,
            sent_properties: if keys.asked.is_some() { header.properties.into_owned() } else { String::new() },
            recall_handle: String::new(),
            lite: LitePlace::default(),
        });
        Some(())
    }

    /// Append the stored properties of a message. If it is not a plain send, leave the text unchanged and return None.
    fn store(&self, sent: &str, topic: &str, text: &mut Vec<u8>) -> Option<Keys> {
        let text_start = text.len();
        let keys = properties::store(sent, &[], &self.rules, text)?;
        let lite_topic = keys.lite.of(text);
        let more_bytes = match (keys.asked.is_some(), !lite_topic.is_empty()) {
            (true, true) => STORED_BYTES_MAX,
            (true, false) => TIMED_BYTES_MAX + topic.len(),
            (false, true) if !is_lite_topic(lite_topic) => STORED_BYTES_MAX,
            (false, true) => LITE_BYTES_MAX + topic.len() + lite_topic.len(),
            (false, false) => 0,
        };
        if is_odd(keys.unique_key.of(text)) || text.len() - text_start + more_bytes > STORED_BYTES_MAX {
            text.truncate(text_start);
            return None;
        }
        Some(keys)
    }

    /// Add the messages of a batch. They have their properties unchanged, or are all in one lite topic and have the
    /// stored properties of single sends. Return None if Python must decide, for example because the body is malformed.
    /// The caller must discard the run then.
    fn read_batch(&self, data: &[u8], request: Request, run: &mut Run) -> Option<()> {
        let Request { header, body } = request;
        // The properties of the request are not stored. They only decide if the request is plain.
        let mut own = Vec::new();
        let keys = properties::store(&header.properties, &[], &self.rules, &mut own)?;
        if keys.asked.is_some() || keys.lite.end > 0 || own.len() > STORED_BYTES_MAX || is_odd(keys.unique_key.of(&own)) {
            return None;
        }
        let unique_key = String::from_utf8_lossy(keys.unique_key.of(&own)).into_owned();
        run.waits_not = contains(&own, NO_WAIT);
        run.body_bytes_max = body.len();
        let (mut at, end) = (body.start, body.end);
        let (mut lite_topic, mut stored_bytes): (&[u8], usize) = (&[], 0);
        while at < end {
            let number = |from: usize| data.get(at + from..end)?.first_chunk().map(|four| i32::from_be_bytes(*four));
            let body_start = at + MEMBER_HEAD_BYTES;
            let member_end = at.checked_add(usize::try_from(number(0)?).ok()?)?;
            let body_end = body_start.checked_add(usize::try_from(number(16)?).ok()?)?;
            let properties_bytes = i16::from_be_bytes(*data.get(body_end..end)?.first_chunk()?);
            let properties = body_end + 2..body_end + 2 + usize::try_from(properties_bytes).ok()?;
            let stored = data.get(..end)?.get(properties.clone())?;
            if properties.end != member_end || stored.len() > STORED_BYTES_MAX || stored.last() == Some(&0) {
                return None;
            }
            let text_start = run.text.len();
            let text = std::str::from_utf8(stored).ok()?;
            let mut keys = properties::find(text)?;
            let own_lite_topic = keys.lite.of(stored);
            if run.sent.is_empty() {
                lite_topic = own_lite_topic;
            } else if own_lite_topic != lite_topic {
                return None;
            }
            stored_bytes += stored.len();
            let is_lite = !lite_topic.is_empty();
            let bytes_max = if is_lite { LITE_MEMBERS_PROPERTIES_BYTES_MAX } else { MEMBERS_PROPERTIES_BYTES_MAX };
            // Python stores longer batches in slices, so that other requests can be handled in between.
            if run.sent.len() >= MEMBERS_MAX || stored_bytes > bytes_max {
                return None;
            }
            if is_lite {
                keys = self.store(text, header.topic, &mut run.text)?;
            } else {
                run.text.extend_from_slice(stored);
                keys = keys.moved(text_start);
            }
            run.sent.push(Sent {
                queue: 0,
                code: header.code,
                opaque: header.opaque,
                flag: number(12)?,
                sys_flag: header.sys_flag,
                born_timestamp: header.born_timestamp,
                reconsume_times: header.reconsume_times,
                body: body_start..body_end,
                properties: text_start..run.text.len(),
                keys,
                queue_id: header.queue_id,
                sent_properties: String::new(),
                recall_handle: String::new(),
                lite: LitePlace::default(),
            });
            at = member_end;
        }
        run.has_lite = !lite_topic.is_empty();
        let (topic, queue_id) = (header.topic.to_owned(), header.queue_id);
        run.queues.push(Queue { topic, queue_id, count: run.sent.len(), bytes: 0 });
        run.batch = Some(Batch { opaque: header.opaque, unique_key, is_fifo: keys.is_fifo });
        Some(())
    }
}

/// Return true if a unique key does not have the form of clients' keys.
fn is_odd(unique_key: &[u8]) -> bool {
    unique_key.is_empty() || !unique_key.iter().all(u8::is_ascii_alphanumeric)
}

fn key_hash_start(topic: &str) -> i32 {
    java_hash_behind(java_hash(topic), "#")
}

/// Return data as base64url with padding. Source: RFC 4648 §5.
fn base64_url(data: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::with_capacity(data.len().div_ceil(3) * 4);
    for three in data.chunks(3) {
        let bits = three.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
        for place in 0..4 {
            let letter = LETTERS[(bits >> (18 - 6 * place)) as usize & 63];
            text.push(if place <= three.len() { char::from(letter) } else { '=' });
        }
    }
    text
}

/// Append an offset in 16 hexadecimal digits.
fn push_hex(offset: i64, out: &mut Vec<u8>) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    out.extend((0..16).rev().map(|place| DIGITS[(offset >> (4 * place)) as usize & 15]));
}

/// Append the frame of a response. The header consists of the pieces, with the texts between them.
fn push_answer<'a>(pieces: &[PyBackedBytes], texts: impl Iterator<Item = &'a [u8]>, out: &mut Vec<u8>) {
    let start = out.len();
    out.extend_from_slice(&[0; START_BYTES]);
    out.extend_from_slice(&pieces[0]);
    for (text, piece) in texts.zip(&pieces[1..]) {
        out.extend_from_slice(text);
        out.extend_from_slice(piece);
    }
    let header_bytes = (out.len() - start - START_BYTES) as u32;
    out[start..start + 4].copy_from_slice(&(header_bytes + 4).to_be_bytes());
    out[start + 4..start + START_BYTES].copy_from_slice(&header_bytes.to_be_bytes());
}

fn contains(text: &[u8], wanted: &[u8]) -> bool {
    text.windows(wanted.len()).any(|window| window == wanted)
}

/// Consecutive plain sends of a connection, or the messages of a batch. After `encode`, also their offsets in the
/// store.
#[pyclass]
struct Run {
    /// The received bytes, until `forget_bodies`.
    chunk: Option<Py<PyBytes>>,
    /// The start of the first send in the received bytes.
    #[pyo3(get)]
    start: usize,
    /// The end of the last send in the received bytes.
    #[pyo3(get)]
    end: usize,
    sent: Vec<Sent>,
    batch: Option<Batch>,
    queues: Vec<Queue>,
    text: Vec<u8>,
    places: Vec<Place>,
    store_timestamp: i64,
    rules: Arc<Rules>,
    /// True if a send does not wait for the disk (`WAIT` is false).
    #[pyo3(get)]
    waits_not: bool,
    /// True if a message is in a lite topic.
    has_lite: bool,
    /// The size of the longest body; for a batch, the size of its body.
    #[pyo3(get)]
    body_bytes_max: usize,
}

#[pymethods]
impl Run {
    fn __len__(&self) -> usize {
        self.sent.len()
    }

    /// Return the received bytes. Raises ValueError: `forget_bodies` has released the bytes.
    #[getter]
    fn chunk<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        self.chunk_of(py).cloned()
    }

    /// Return the queues: topic, queue id, number of messages, and the size of their records, 0 before `encode`.
    #[getter]
    fn queues(&self) -> Vec<(&str, i32, usize, i64)> {
        self.queues.iter().map(|queue| (queue.topic.as_str(), queue.queue_id, queue.count, queue.bytes)).collect()
    }

    /// Release the received bytes, after the records are stored. The responses do not need the bytes.
    fn forget_bodies(&mut self) {
        self.chunk = None;
    }

    /// Return the concatenated records. `numbers`: the next queue offset of each of `queues`. `is_sealed`: true if
    /// records end with their checksum.
    /// Raises ValueError: the number of offsets is wrong, a record does not fit in the log's numbers, or a message to
    /// seal already has a checksum.
    fn encode<'py>(
        &mut self,
        py: Python<'py>,
        numbers: Vec<i64>,
        physical_offset: i64,
        born_host: &[u8],
        store_timestamp: i64,
        store_host: &[u8],
        is_sealed: bool,
    ) -> PyResult<Bound<'py, PyBytes>> {
        if numbers.len() != self.queues.len() {
            return Err(PyValueError::new_err(format!("{} numbers for {} queues", numbers.len(), self.queues.len())));
        }
        let mut numbers = numbers;
        let shared = Shared { born_host, store_host, store_timestamp, is_sealed };
        let chunk = self.chunk_of(py)?.as_bytes();
        let mut out = Vec::with_capacity(self.end + 200 * self.sent.len());
        let mut places = Vec::with_capacity(self.sent.len());
        let mut bytes = vec![0; self.queues.len()];
        for sent in &self.sent {
            if is_sealed && contains(&self.text[sent.properties.clone()], record::CRC_KEY) {
                return Err(PyValueError::new_err("a message came with a checksum"));
            }
            let queue = &self.queues[sent.queue];
            let message = Message {
                topic: queue.topic.as_bytes(),
                queue_id: queue.queue_id,
                flag: sent.flag,
                queue_offset: numbers[sent.queue],
                sys_flag: sent.sys_flag,
                born_timestamp: sent.born_timestamp,
                reconsume_times: sent.reconsume_times,
                body: &chunk[sent.body.clone()],
                properties: &self.text[sent.properties.clone()],
            };
            let at = i64::try_from(out.len()).ok().and_then(|length| physical_offset.checked_add(length));
            let next = numbers[sent.queue].checked_add(1);
            let written = at.zip(next).and_then(|(at, next)| Some((at, next, record::write(&message, &shared, at, &mut out)?)));
            let Some((at, next, size)) = written else {
                return Err(PyValueError::new_err("a record does not fit into the log's numbers"));
            };
            places.push(Place { queue_offset: numbers[sent.queue], physical_offset: at, size });
            bytes[sent.queue] += i64::from(size);
            numbers[sent.queue] = next;
        }
        self.places = places;
        self.store_timestamp = store_timestamp;
        for (queue, bytes) in self.queues.iter_mut().zip(bytes) {
            queue.bytes = bytes;
        }
        Ok(PyBytes::new(py, &out))
    }

    /// Return the entries for each of `queues`, with the physical offsets where the records start and end.
    /// Raises ValueError: there are no records yet.
    fn queue_entries<'py>(&self, py: Python<'py>) -> PyResult<Vec<Entries<'py>>> {
        self.must_be_encoded()?;
        let mut entries: Vec<(Vec<u8>, i64, i64)> =
            self.queues.iter().map(|queue| (Vec::with_capacity(ENTRY_BYTES * queue.count), -1, -1)).collect();
        for (sent, place) in self.sent.iter().zip(&self.places) {
            let (written, start, end) = &mut entries[sent.queue];
            record::write_entry(place.physical_offset, place.size, self.tags_code(sent), written);
            if *start < 0 {
                *start = place.physical_offset;
            }
            *end = place.physical_offset + i64::from(place.size);
        }
        Ok(entries.iter().map(|(one, start, end)| (PyBytes::new(py, one), *start, *end)).collect())
    }

    /// Return the requested delivery times, and their units in ms.
    #[getter]
    fn asked(&self) -> Vec<(i64, i64)> {
        self.sent.iter().filter_map(|sent| sent.keys.asked).collect()
    }

    /// Put the timed messages into the timer's queue instead of their own. `outs`: the delivery time of each timed
    /// message.
    /// Raises ValueError: the number of times is wrong, or the broker's name contains a blank, which separates the
    /// parts of a handle.
    fn keep(&mut self, outs: Vec<i64>, timer_topic: &str, broker_name: &str) -> PyResult<()> {
        let count = self.sent.iter().filter(|sent| sent.keys.asked.is_some()).count();
        if outs.len() != count || broker_name.is_empty() || broker_name.contains(' ') {
            return Err(PyValueError::new_err(format!("{} times for {count} messages at {broker_name:?}", outs.len())));
        }
        let queues = std::mem::take(&mut self.queues);
        let mut known: HashMap<(String, i32), usize> = HashMap::new();
        let mut outs = outs.into_iter();
        for sent in &mut self.sent {
            let Queue { topic, queue_id, .. } = &queues[sent.queue];
            let mut place = (topic.as_str(), *queue_id);
            if sent.keys.asked.is_some() {
                let out = outs.next().ok_or_else(|| PyValueError::new_err("a time is missing"))?;
                let (at, queue) = (out.to_string(), queue_id.to_string());
                let more = [("TIMER_OUT_MS", at.as_str()), ("REAL_TOPIC", topic.as_str()), ("REAL_QID", queue.as_str())];
                let start = self.text.len();
                let stored = properties::store(&sent.sent_properties, &more, &self.rules, &mut self.text);
                sent.keys = stored.ok_or_else(|| PyValueError::new_err("its properties were stored before"))?;
                sent.properties = start..self.text.len();
                let key = String::from_utf8_lossy(sent.keys.unique_key.of(&self.text));
                sent.recall_handle = base64_url(format!("v1 {topic} {broker_name} {} {key}", out.saturating_add(1)).as_bytes());
                place = (timer_topic, 0);
            }
            sent.queue = *known.entry((place.0.to_owned(), place.1)).or_insert_with_key(|(topic, queue_id)| {
                self.queues.push(Queue { topic: topic.clone(), queue_id: *queue_id, count: 0, bytes: 0 });
                self.queues.len() - 1
            });
            self.queues[sent.queue].count += 1;
        }
        Ok(())
    }

    /// Return the topic and the lite topic of each message, with an empty text for messages in no lite topic. The list
    /// is empty if no message is in a lite topic.
    #[getter]
    fn lite<'py>(&self, py: Python<'py>) -> Vec<(Bound<'py, PyString>, Bound<'py, PyString>)> {
        if !self.has_lite {
            return Vec::new();
        }
        let topics: Vec<Bound<'py, PyString>> = self.queues.iter().map(|queue| PyString::new(py, &queue.topic)).collect();
        let place = |sent: &Sent| (topics[sent.queue].clone(), PyString::new(py, self.part(sent.keys.lite)));
        self.sent.iter().map(place).collect()
    }

    /// Return the topics that have messages in lite topics, in the order of their first messages.
    #[getter]
    fn lite_parents(&self) -> Vec<&str> {
        if self.has_lite { self.parents() } else { Vec::new() }
    }

    /// Return the number of each message in its lite topic, 0 for messages in no lite topic.
    #[getter]
    fn lite_numbers(&self) -> Vec<i64> {
        self.sent.iter().map(|sent| sent.lite.number).collect()
    }

    /// Assign numbers to the messages in lite topics, and add the properties of the light queues. Return false, with
    /// nothing changed, if a lite topic has no slot or does not live. `tables`: for each of `lite_parents`, the slots of
    /// its lite topics. `states`, `nexts`, `epochs`: the state, next number and life of each slot.
    /// Raises ValueError: the number of tables is wrong, or a slot has no row.
    fn enter_lite(
        &mut self,
        py: Python<'_>,
        tables: Vec<Bound<'_, PyDict>>,
        states: PyBuffer<u8>,
        nexts: PyBuffer<i64>,
        epochs: PyBuffer<u32>,
    ) -> PyResult<bool> {
        self.number_lite(py, &tables, &states, &nexts, &epochs)
    }

    /// Set the next number of each lite topic, after the records were stored. Raises ValueError: a slot has no row.
    fn stored_lite(&self, py: Python<'_>, nexts: PyBuffer<i64>) -> PyResult<()> {
        self.keep_lite(py, &nexts)
    }

    /// Return the entries of the light queues, for the messages in lite topics. `first_index`: the index of the first
    /// of these entries. `tails`: the index of the newest entry of each slot. `recent`: cells of three numbers for recent
    /// entries, to which these entries are added. `read`: returns number and jump of another entry, or None.
    /// Raises ValueError: there are no records yet, or a slot has no row.
    fn lite_entries<'py>(
        &self,
        py: Python<'py>,
        first_index: i64,
        tails: PyBuffer<i64>,
        recent: PyBuffer<i64>,
        read: Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        self.must_be_encoded()?;
        let links = self.lite_links(py, first_index, &tails, &recent, &read)?;
        let mut out = Vec::with_capacity(LITE_ENTRY_BYTES * links.len());
        let sent = self.sent.iter().zip(&self.places).filter(|(sent, _)| sent.lite.epoch > 0);
        for ((sent, place), (previous, jump)) in sent.zip(links) {
            out.extend_from_slice(&place.physical_offset.to_be_bytes());
            out.extend_from_slice(&place.size.to_be_bytes());
            out.extend_from_slice(&sent.lite.slot.to_be_bytes());
            out.extend_from_slice(&sent.lite.number.to_be_bytes());
            out.extend_from_slice(&sent.lite.epoch.to_be_bytes());
            out.extend_from_slice(&self.store_timestamp.to_be_bytes());
            out.extend_from_slice(&previous.to_be_bytes());
            out.extend_from_slice(&jump.to_be_bytes());
            out.extend_from_slice(&(self.tags_code(sent) as i32).to_be_bytes());
        }
        Ok(PyBytes::new(py, &out))
    }

    /// Move the ends of the light queues after their entries were written. Return the slots that had no entry before.
    /// `tails`, `firsts`, `ends`, `seconds`: the newest entry, the first number, the end, and the store time in s of
    /// each slot. Raises ValueError: a slot has no row, or a column cannot be written.
    fn entered_lite(
        &self,
        py: Python<'_>,
        first_index: i64,
        tails: PyBuffer<i64>,
        firsts: PyBuffer<i64>,
        ends: PyBuffer<i64>,
        seconds: PyBuffer<u32>,
    ) -> PyResult<Vec<u32>> {
        self.end_lite(py, first_index, &Moved { tails, firsts, ends, seconds })
    }

    /// Return true for the messages of a batch, which has one response.
    #[getter]
    fn is_batch(&self) -> bool {
        self.batch.is_some()
    }

    /// Return the concatenated frames of the responses.
    /// `pieces`: the six pieces of a header around the physical offset in hexadecimal, queue id, queue offset, unique
    /// key and opaque. `timed`: the seven pieces for a timed message, which has its recall handle before the opaque.
    /// `lite`: the eight pieces for a message in a lite topic, which has its number and life before the opaque.
    /// `between`: the bytes between the physical offsets of a batch.
    /// Raises ValueError: there are no records yet, or the number of pieces is wrong.
    fn answers<'py>(
        &self,
        py: Python<'py>,
        pieces: Vec<PyBackedBytes>,
        timed: Vec<PyBackedBytes>,
        lite: Vec<PyBackedBytes>,
        between: &[u8],
    ) -> PyResult<Bound<'py, PyBytes>> {
        self.must_be_encoded()?;
        let counts = [pieces.len(), timed.len(), lite.len()];
        if counts != [6, 7, 8] {
            return Err(PyValueError::new_err(format!("{counts:?} pieces of an answer: it has six, seven or eight")));
        }
        let fixed: usize = pieces.iter().map(|piece| piece.len()).sum();
        if let Some(batch) = &self.batch {
            let id_bytes = between.len() + 16;
            let mut out = Vec::with_capacity(fixed + 96 + id_bytes * self.sent.len());
            let mut ids = Vec::with_capacity(id_bytes * self.sent.len());
            for place in &self.places {
                if !ids.is_empty() {
                    ids.extend_from_slice(between);
                }
                push_hex(place.physical_offset, &mut ids);
            }
            let first = self.places.first().map_or(0, |place| place.queue_offset).to_string();
            let queue_id = self.queues[0].queue_id.to_string();
            let opaque = batch.opaque.to_string();
            let texts = [ids.as_slice(), queue_id.as_bytes(), first.as_bytes(), batch.unique_key.as_bytes()].into_iter();
            let place = self.sent.first().map_or(LitePlace::default(), |sent| sent.lite);
            if place.epoch > 0 {
                let (number, epoch) = (place.number.to_string(), place.epoch.to_string());
                push_answer(&lite, texts.chain([number.as_bytes(), epoch.as_bytes(), opaque.as_bytes()]), &mut out);
            } else {
                push_answer(&pieces, texts.chain([opaque.as_bytes()]), &mut out);
            }
            return Ok(PyBytes::new(py, &out));
        }
        let mut out: Vec<u8> = Vec::with_capacity((fixed + 96) * self.sent.len());
        let mut id = Vec::with_capacity(16);
        for (sent, place) in self.sent.iter().zip(&self.places) {
            id.clear();
            push_hex(place.physical_offset, &mut id);
            let (queue_id, number, opaque) = (sent.queue_id.to_string(), place.queue_offset.to_string(), sent.opaque.to_string());
            let unique_key = sent.keys.unique_key.of(&self.text);
            let texts = [&id, queue_id.as_bytes(), number.as_bytes(), unique_key].into_iter();
            if sent.lite.epoch > 0 {
                let (number, epoch) = (sent.lite.number.to_string(), sent.lite.epoch.to_string());
                push_answer(&lite, texts.chain([number.as_bytes(), epoch.as_bytes(), opaque.as_bytes()]), &mut out);
            } else if sent.recall_handle.is_empty() {
                push_answer(&pieces, texts.chain([opaque.as_bytes()]), &mut out);
            } else {
                push_answer(&timed, texts.chain([sent.recall_handle.as_bytes(), opaque.as_bytes()]), &mut out);
            }
        }
        Ok(PyBytes::new(py, &out))
    }

    /// Return a message: index of its queue in `queues`, request code, opaque, flag, system flag, born timestamp,
    /// reconsume times, body, stored properties, and the values of UNIQ_KEY, KEYS and TAGS.
    #[allow(clippy::type_complexity)]
    fn message<'py>(&self, py: Python<'py>, at: usize) -> PyResult<(usize, u16, i32, i32, i32, i64, i32, [Bound<'py, PyBytes>; 5])> {
        let sent = self.sent.get(at).ok_or_else(|| PyIndexError::new_err("no such message"))?;
        let chunk = self.chunk_of(py)?.as_bytes();
        let bytes = |one: &[u8]| PyBytes::new(py, one);
        Ok((
            sent.queue,
            sent.code,
            sent.opaque,
            sent.flag,
            sent.sys_flag,
            sent.born_timestamp,
            sent.reconsume_times,
            [
                bytes(&chunk[sent.body.clone()]),
                bytes(&self.text[sent.properties.clone()]),
                bytes(sent.keys.unique_key.of(&self.text)),
                bytes(sent.keys.keys.of(&self.text)),
                bytes(sent.keys.tags.of(&self.text)),
            ],
        ))
    }

    /// Return the fields of a dispatch request for each record: topic, queue id, queue offset, tags code, store time,
    /// physical offset, size, system flag, properties, number of messages (1), keys (None), and the hashes for the
    /// index, 4 bytes each in the machine's order. `with_tags`: true if TAGS is a key of the index.
    /// Raises ValueError: there are no records yet.
    fn requests<'py>(&self, py: Python<'py>, with_tags: bool) -> PyResult<Vec<Row<'py>>> {
        self.must_be_encoded()?;
        let before: Vec<i32> = self.queues.iter().map(|queue| key_hash_start(&queue.topic)).collect();
        let topics: Vec<Bound<'py, PyString>> = self.queues.iter().map(|queue| PyString::new(py, &queue.topic)).collect();
        let bytes = |one: &[u8]| PyBytes::new(py, one);
        let request = |(sent, place): (&Sent, &Place)| {
            let mut hashes = Vec::with_capacity(16);
            self.push_hashes(sent, before[sent.queue], with_tags, &mut hashes);
            (
                topics[sent.queue].clone(),
                self.queues[sent.queue].queue_id,
                place.queue_offset,
                self.tags_code(sent),
                self.store_timestamp,
                place.physical_offset,
                place.size,
                sent.sys_flag,
                bytes(&self.text[sent.properties.clone()]),
                1,
                None,
                bytes(&hashes),
            )
        };
        Ok(self.sent.iter().zip(&self.places).map(request).collect())
    }

    /// Return the rows for `index_entries`, and the number of their keys. `with_tags`: true if TAGS is a key of the
    /// index.
    /// Raises ValueError: there are no records yet.
    fn index_rows<'py>(&self, py: Python<'py>, with_tags: bool) -> PyResult<(Bound<'py, PyBytes>, usize)> {
        self.must_be_encoded()?;
        let before: Vec<i32> = self.queues.iter().map(|queue| key_hash_start(&queue.topic)).collect();
        let (mut rows, mut hashes, mut keys) = (Vec::with_capacity(32 * self.sent.len()), Vec::new(), 0);
        for (sent, place) in self.sent.iter().zip(&self.places) {
            hashes.clear();
            self.push_hashes(sent, before[sent.queue], with_tags, &mut hashes);
            keys += hashes.len() / 4;
            index::push_row(place.physical_offset, self.store_timestamp, &hashes, &mut rows);
        }
        Ok((PyBytes::new(py, &rows), keys))
    }

    /// Return the physical offset of the last record. Raises ValueError: there are no records yet.
    #[getter]
    fn last_offset(&self) -> PyResult<i64> {
        self.must_be_encoded()?;
        Ok(self.places.last().map_or(-1, |place| place.physical_offset))
    }

    /// Return the opaques of the requests.
    #[getter]
    fn opaques(&self) -> Vec<i32> {
        if let Some(batch) = &self.batch {
            return vec![batch.opaque];
        }
        self.sent.iter().map(|sent| sent.opaque).collect()
    }

    /// Return the values for metrics: topic, request code, `message_type`, and the size of each record or batch.
    /// Raises ValueError: there are no records yet.
    #[getter]
    fn kinds(&self) -> PyResult<Vec<Kind<'_>>> {
        self.must_be_encoded()?;
        if let (Some(batch), Some(sent), [queue]) = (&self.batch, self.sent.first(), self.queues.as_slice()) {
            let kind = if batch.is_fifo { "fifo" } else { "normal" };
            return Ok(vec![(queue.topic.as_str(), sent.code, kind, vec![queue.bytes])]);
        }
        let mut kinds: Vec<Kind> = Vec::with_capacity(1);
        let mut known: HashMap<(&str, u16, &str), usize> = HashMap::new();
        for (sent, place) in self.sent.iter().zip(&self.places) {
            let (topic, code) = (self.queues[sent.queue].topic.as_str(), sent.code);
            let kind = match (sent.keys.is_fifo, sent.keys.asked) {
                (true, _) => "fifo",
                (false, Some(_)) => "delay",
                (false, None) => "normal",
            };
            let kind = *known.entry((topic, code, kind)).or_insert_with(|| {
                kinds.push((topic, code, kind, Vec::new()));
                kinds.len() - 1
            });
            kinds[kind].3.push(i64::from(place.size));
        }
        Ok(kinds)
    }

    /// Return queue offset, physical offset and size of each record. Raises ValueError: there are no records yet.
    #[getter]
    fn places(&self) -> PyResult<Vec<(i64, i64, i32)>> {
        self.must_be_encoded()?;
        Ok(self.places.iter().map(|place| (place.queue_offset, place.physical_offset, place.size)).collect())
    }
}

impl Run {
    fn of(chunk: Py<PyBytes>, start: usize, rules: Arc<Rules>) -> Run {
        Run {
            chunk: Some(chunk),
            start,
            end: start,
            sent: Vec::new(),
            batch: None,
            queues: Vec::new(),
            text: Vec::new(),
            places: Vec::new(),
            store_timestamp: 0,
            rules,
            waits_not: false,
            has_lite: false,
            body_bytes_max: 0,
        }
    }

    fn chunk_of<'a, 'py>(&'a self, py: Python<'py>) -> PyResult<&'a Bound<'py, PyBytes>> {
        let chunk = self.chunk.as_ref().ok_or_else(|| PyValueError::new_err("the bodies of these messages are forgotten"))?;
        Ok(chunk.bind(py))
    }

    fn must_be_encoded(&self) -> PyResult<()> {
        if self.places.len() == self.sent.len() {
            return Ok(());
        }
        Err(PyValueError::new_err("these messages have no records yet: call encode first"))
    }

    /// Return a part of `text` as a str. The positions are bounds of whole texts.
    fn part(&self, span: Span) -> &str {
        std::str::from_utf8(span.of(&self.text)).expect("it was cut out of a text")
    }

    fn tags_code(&self, sent: &Sent) -> i64 {
        i64::from(java_hash(self.part(sent.keys.tags)))
    }

    /// Append the hashes of a message for the index. `before`: the hash of its topic and `#`.
    fn push_hashes(&self, sent: &Sent, before: i32, with_tags: bool, hashes: &mut Vec<u8>) {
        let unique_key = Some(self.part(sent.keys.unique_key)).filter(|key| !key.is_empty());
        let words = self.part(sent.keys.keys).split(' ').filter(|word| !word.is_empty());
        for key in unique_key.into_iter().chain(words) {
            hashes.extend_from_slice(&key_hash(before, key).to_ne_bytes());
        }
        let tags = self.part(sent.keys.tags);
        if with_tags && !tags.is_empty() {
            hashes.extend_from_slice(&key_hash(java_hash_behind(before, "T#"), tags).to_ne_bytes());
        }
    }
}

#[pymodule]
fn rmqkit_native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    // Do not print panics: a panic becomes a Python exception, which is logged and closes one connection.
    std::panic::set_hook(Box::new(|_| {}));
    module.add("FORMAT", FORMAT)?;
    module.add("PanicException", module.py().get_type::<PanicException>())?;
    module.add_function(wrap_pyfunction!(index::index_entries, module)?)?;
    module.add_function(wrap_pyfunction!(index::set_slots, module)?)?;
    module.add_function(wrap_pyfunction!(read::select_records, module)?)?;
    module.add_function(wrap_pyfunction!(scan::sound_records, module)?)?;
    module.add_function(wrap_pyfunction!(scan::have_sums, module)?)?;
    module.add_class::<grpc::GrpcSends>()?;
    module.add_class::<grpc_messages::GrpcMessages>()?;
    module.add_function(wrap_pyfunction!(grpc_acks::read_grpc_ack, module)?)?;
    module.add_function(wrap_pyfunction!(grpc_headers::read_grpc_call, module)?)?;
    module.add_class::<hpack::HeaderDecoder>()?;
    module.add_class::<Core>()?;
    module.add_class::<acks::Acks>()?;
    module.add_class::<Run>()
}
