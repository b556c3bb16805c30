//! A reader for consecutive acks of popped messages. Most clients send the acks of a pop consecutively.
//! Source: remoting.md §4.6.1.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::header::{Reader, digits, once};

/// The beginning of an ACK_MESSAGE header. The code does not fit in a binary header.
const BEGINNING: &[u8] = b"{\"code\":200051,";
const NAMES: [&str; 5] = ["consumerGroup", "topic", "queueId", "extraInfo", "offset"];

/// The identity of a pop, the offsets of its acknowledged messages, and the opaques of the acks.
struct Pop {
    topic: String,
    group: String,
    queue_id: i64,
    start_offset: i64,
    pop_time: i64,
    revive_queue_id: i64,
    offsets: Vec<i64>,
    opaques: Vec<i64>,
}

/// An item of `Acks.pops`.
type Row<'a> = (&'a str, &'a str, i64, i64, i64, i64, &'a [i64], &'a [i64]);

/// Consecutive requests that each acknowledge one message.
#[pyclass(frozen)]
pub struct Acks {
    chunk: Py<PyBytes>,
    /// The start of the first request in the received bytes.
    #[pyo3(get)]
    start: usize,
    /// The end of the last request in the received bytes.
    #[pyo3(get)]
    end: usize,
    pops: Vec<Pop>,
}

#[pymethods]
impl Acks {
    /// The received bytes.
    #[getter]
    fn chunk<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        self.chunk.bind(py).clone()
    }

    /// For each pop, in the order of the first ack: topic, group, queue id, start offset, pop time, revive queue, the
    /// acknowledged offsets, and the opaques of the requests.
    #[getter]
    fn pops(&self) -> Vec<Row<'_>> {
        self.pops
            .iter()
            .map(|pop| {
                let (topic, group) = (pop.topic.as_str(), pop.group.as_str());
                let numbers = (pop.queue_id, pop.start_offset, pop.pop_time, pop.revive_queue_id);
                (topic, group, numbers.0, numbers.1, numbers.2, numbers.3, &pop.offsets[..], &pop.opaques[..])
            })
            .collect()
    }
}

/// Read the consecutive acks from `start`, or return None if the first frame is not an ack. `header_of`: returns the
/// JSON header and the end of a frame without a body that begins at a position.
pub fn read<'a>(
    chunk: Py<PyBytes>,
    start: usize,
    header_of: impl Fn(usize) -> Option<(&'a [u8], usize)>,
) -> Option<Acks> {
    let (mut pops, mut at): (Vec<Pop>, usize) = (Vec::new(), start);
    while let Some((header, end)) = header_of(at)
        && let Some(ack) = read_header(header)
    {
        match pops.last_mut().filter(|pop| ack.is_of(pop)) {
            Some(pop) => {
                pop.offsets.push(ack.offset);
                pop.opaques.push(ack.opaque);
            }
            None => pops.push(Pop {
                topic: ack.topic.to_owned(),
                group: ack.group.to_owned(),
                queue_id: ack.queue_id,
                start_offset: ack.start_offset,
                pop_time: ack.pop_time,
                revive_queue_id: ack.revive_queue_id,
                offsets: vec![ack.offset],
                opaques: vec![ack.opaque],
            }),
        }
        at = end;
    }
    (!pops.is_empty()).then_some(Acks { chunk, start, end: at, pops })
}

struct Ack<'a> {
    topic: &'a str,
    group: &'a str,
    queue_id: i64,
    start_offset: i64,
    pop_time: i64,
    revive_queue_id: i64,
    offset: i64,
    opaque: i64,
}

impl Ack<'_> {
    fn is_of(&self, pop: &Pop) -> bool {
        self.start_offset == pop.start_offset
            && self.pop_time == pop.pop_time
            && self.queue_id == pop.queue_id
            && self.revive_queue_id == pop.revive_queue_id
            && self.topic == pop.topic
            && self.group == pop.group
    }
}

/// Read a header in the form of clients. Return None if Python must decode the header.
fn read_header(header: &[u8]) -> Option<Ack<'_>> {
    if !header.starts_with(BEGINNING) {
        return None;
    }
    let text = std::str::from_utf8(header).ok()?;
    let mut reader = Reader { text, at: BEGINNING.len() };
    let (mut opaque, mut flag, mut names, mut fields) = (None, 0, [false; 2], None);
    loop {
        let name = reader.plain_string()?;
        reader.expect(b':')?;
        match name {
            "opaque" => once(&mut names[0]).and_then(|()| reader.number()).map(|number| opaque = Some(number))?,
            "flag" => once(&mut names[1]).and_then(|()| reader.number()).map(|number| flag = number)?,
            "extFields" if fields.is_none() => fields = Some(read_fields(&mut reader)?),
            "language" | "serializeTypeCurrentRPC" => {
                reader.plain_string()?;
            }
            "version" => {
                reader.number()?;
            }
            _ => return None,
        }
        if !reader.goes_on()? {
            break;
        }
    }
    if reader.at != header.len() || flag != 0 {
        return None;
    }
    let [Some(group), Some(topic), Some(queue_id), Some(handle), Some(offset)] = fields? else { return None };
    // Check point offset, pop time, invisible time, revive queue, kind of topic, broker, queue, and optionally the
    // message's offset and its physical offset.
    let words: Vec<&str> = handle.split(' ').collect();
    if !(7..=9).contains(&words.len()) || !matches!(words[4], "0" | "1" | "2") || words[5].is_empty() {
        return None;
    }
    let number = |text: &str| digits(text, i64::MAX);
    for word in words[6..].iter().chain([&words[2]]) {
        number(word)?;
    }
    Some(Ack {
        topic,
        group,
        queue_id: digits(queue_id, i64::from(i32::MAX))?,
        start_offset: number(words[0])?,
        pop_time: number(words[1])?,
        revive_queue_id: number(words[3])?,
        offset: number(offset)?,
        opaque: opaque.filter(|number| *number <= i64::from(i32::MAX))?,
    })
}

/// Read the values of `extFields` that an ack needs. Other values are ignored, as in Python.
fn read_fields<'a>(reader: &mut Reader<'a>) -> Option<[Option<&'a str>; NAMES.len()]> {
    let mut values = [None; NAMES.len()];
    reader.expect(b'{')?;
    loop {
        let name = reader.plain_string()?;
        reader.expect(b':')?;
        match NAMES.iter().position(|one| *one == name) {
            Some(place) if values[place].is_none() => values[place] = Some(reader.plain_string()?),
            Some(_) => return None,
            None => {
                reader.string()?;
            }
        }
        if !reader.goes_on()? {
            return Some(values);
        }
    }
}
