//! A reader for the headers of plain sends, in JSON and binary form, with long and short names.
//!
//! The results are the same as from the Python decoders. If the results might differ, because of escapes in names,
//! unknown fields or unusual numbers, the reader returns `None` and Python decodes the header.
//! Source: remoting.md §1.2, §1.3, §4.3.1.

use std::borrow::Cow;

const SEND_MESSAGE: i64 = 10;
const SEND_MESSAGE_V2: i64 = 310;
const SEND_BATCH_MESSAGE: i64 = 320;
const FIELDS: usize = 14;
const LONG: [&str; FIELDS] = [
    "producerGroup", "topic", "defaultTopic", "defaultTopicQueueNums", "queueId", "sysFlag", "bornTimestamp", "flag",
    "properties", "reconsumeTimes", "unitMode", "maxReconsumeTimes", "batch", "bname",
];
const REQUIRED: usize = 8;
const TOPIC: usize = 1;
const QUEUE_COUNT: usize = 3;
const QUEUE_ID: usize = 4;
const SYS_FLAG: usize = 5;
const BORN_TIMESTAMP: usize = 6;
const FLAG: usize = 7;
const PROPERTIES: usize = 8;
const RECONSUME_TIMES: usize = 9;
const UNIT_MODE: usize = 10;
const MAX_RECONSUME_TIMES: usize = 11;
const BATCH: usize = 12;
/// The bits of the system flag that plain sends do not have: parts of a transaction (0xC), inner batches (0x80).
const NOT_PLAIN: i64 = 0xC | 0x80;
const TOPIC_BYTES_MAX: usize = 127;

/// The fields of a plain send or a batch. Texts without an escape are slices of the header.
pub struct Header<'a> {
    pub code: u16,
    pub is_batch: bool,
    pub opaque: i32,
    pub topic: &'a str,
    pub queue_id: i32,
    pub sys_flag: i32,
    pub born_timestamp: i64,
    pub flag: i32,
    pub properties: Cow<'a, str>,
    pub reconsume_times: i32,
}

/// Read a JSON header. Return None if Python must decode the header.
pub fn read_json(header: &[u8]) -> Option<Header<'_>> {
    let text = std::str::from_utf8(header).ok()?;
    let mut reader = Reader { text, at: 0 };
    let (mut code, mut opaque, mut flag) = (None, None, Some(0));
    let mut names = [false; 3];
    let mut fields: Option<Fields> = None;
    reader.expect(b'{')?;
    loop {
        let name = reader.plain_string()?;
        reader.expect(b':')?;
        match name {
            "code" => once(&mut names[0]).and_then(|()| reader.number()).map(|n| code = Some(n))?,
            "opaque" => once(&mut names[1]).and_then(|()| reader.number()).map(|n| opaque = Some(n))?,
            "flag" => once(&mut names[2]).and_then(|()| reader.number()).map(|n| flag = Some(n))?,
            "extFields" if fields.is_none() => fields = Some(reader.fields()?),
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
    if reader.at != header.len() || flag != Some(0) {
        return None;
    }
    plain(code?, opaque?, fields?)
}

pub fn once(seen: &mut bool) -> Option<()> {
    (!std::mem::replace(seen, true)).then_some(())
}

/// The values of `extFields` as received, separately for long and short names.
struct Fields<'a> {
    long: [Option<Cow<'a, str>>; FIELDS],
    short: [Option<Cow<'a, str>>; FIELDS],
}

impl<'a> Fields<'a> {
    fn empty() -> Self {
        Fields { long: Default::default(), short: Default::default() }
    }

    /// Store a value. Return None if the name is unknown or has a value already.
    fn set(&mut self, name: &str, value: Cow<'a, str>) -> Option<()> {
        let place = match *name.as_bytes() {
            [letter @ b'a'..=b'n'] => &mut self.short[usize::from(letter - b'a')],
            _ => &mut self.long[LONG.iter().position(|one| *one == name)?],
        };
        place.is_none().then(|| *place = Some(value))
    }
}

/// Return the typed header of a send that only needs storage, or None for other requests.
fn plain<'a>(code: i64, opaque: i64, fields: Fields<'a>) -> Option<Header<'a>> {
    let (mut own, other) = match code {
        SEND_MESSAGE => (fields.long, fields.short),
        SEND_MESSAGE_V2 | SEND_BATCH_MESSAGE => (fields.short, fields.long),
        _ => return None,
    };
    // Python ignores names of the other form instead of refusing them, so leave such headers to Python.
    if other.iter().any(Option::is_some) || own[..REQUIRED].iter().any(Option::is_none) {
        return None;
    }
    if own[UNIT_MODE].as_deref().is_some_and(|value| value != "false") {
        return None;
    }
    let is_batch = match own[BATCH].as_deref() {
        None | Some("false") => false,
        Some("true") => true,
        Some(_) => return None,
    };
    // If code and batch flag contradict each other, the request is not plain.
    if is_batch != (code == SEND_BATCH_MESSAGE) {
        return None;
    }
    let number = |at: usize, most: i64| digits(own[at].as_deref()?, most);
    let int = |at: usize| number(at, i64::from(i32::MAX));
    int(QUEUE_COUNT)?;
    if own[MAX_RECONSUME_TIMES].is_some() {
        int(MAX_RECONSUME_TIMES)?;
    }
    let reconsume_times = if own[RECONSUME_TIMES].is_some() { int(RECONSUME_TIMES)? } else { 0 };
    let sys_flag = int(SYS_FLAG)?;
    let (queue_id, born_timestamp, flag) = (int(QUEUE_ID)?, number(BORN_TIMESTAMP, i64::MAX)?, int(FLAG)?);
    let topic = match own[TOPIC].take()? {
        Cow::Borrowed(topic) => topic,
        Cow::Owned(_) => return None,
    };
    if sys_flag & NOT_PLAIN != 0 || topic.len() > TOPIC_BYTES_MAX || topic.is_empty() || topic.starts_with("%RETRY%") {
        return None;
    }
    if !topic.is_ascii() || !(0..=i64::from(i32::MAX)).contains(&opaque) {
        return None;
    }
    Some(Header {
        code: code as u16,
        is_batch,
        opaque: opaque as i32,
        topic,
        queue_id: queue_id as i32,
        sys_flag: sys_flag as i32,
        born_timestamp,
        flag: flag as i32,
        properties: own[PROPERTIES].take()?,
        reconsume_times: reconsume_times as i32,
    })
}

/// Return a number in plain digits, without sign or leading zeros, or None if the text is malformed or exceeds `most`.
pub fn digits(text: &str, most: i64) -> Option<i64> {
    let bytes = text.as_bytes();
    if bytes.is_empty() || bytes.len() > 19 || (bytes[0] == b'0' && bytes.len() > 1) || !bytes.iter().all(u8::is_ascii_digit) {
        return None;
    }
    text.parse().ok().filter(|number| *number <= most)
}

/// A reader for the JSON of clients, with no spaces except one after a colon or comma, and no nesting.
pub struct Reader<'a> {
    pub text: &'a str,
    pub at: usize,
}

impl<'a> Reader<'a> {
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    pub fn expect(&mut self, wanted: u8) -> Option<()> {
        (self.peek()? == wanted).then(|| self.at += 1)?;
        if wanted != b'{' && self.peek() == Some(b' ') {
            self.at += 1;
        }
        Some(())
    }

    /// Skip a comma and return true, or skip the end of the object and return false.
    pub fn goes_on(&mut self) -> Option<bool> {
        match self.peek()? {
            b',' => self.expect(b',').map(|()| true),
            b'}' => {
                self.at += 1;
                Some(false)
            }
            _ => None,
        }
    }

    pub fn number(&mut self) -> Option<i64> {
        let start = self.at;
        while self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
            self.at += 1;
        }
        digits(&self.text[start..self.at], i64::MAX)
    }

    /// Read a string without escapes.
    pub fn plain_string(&mut self) -> Option<&'a str> {
        match self.string()? {
            Cow::Borrowed(text) => Some(text),
            Cow::Owned(_) => None,
        }
    }

    pub fn string(&mut self) -> Option<Cow<'a, str>> {
        if self.peek()? != b'"' {
            return None;
        }
        let bytes = self.text.as_bytes();
        let start = self.at + 1;
        let mut at = start;
        loop {
            match *bytes.get(at)? {
                b'"' => {
                    self.at = at + 1;
                    return Some(Cow::Borrowed(&self.text[start..at]));
                }
                b'\\' => break,
                0..=0x1f => return None,
                _ => at += 1,
            }
        }
        let mut whole = String::with_capacity(bytes.len() - start);
        let mut from = start;
        loop {
            match *bytes.get(at)? {
                b'"' => {
                    whole.push_str(&self.text[from..at]);
                    self.at = at + 1;
                    return Some(Cow::Owned(whole));
                }
                b'\\' => {
                    whole.push_str(&self.text[from..at]);
                    let (meant, length) = escape(bytes.get(at + 1..)?)?;
                    whole.push(meant);
                    at += 1 + length;
                    from = at;
                }
                0..=0x1f => return None,
                _ => at += 1,
            }
        }
    }

    fn fields(&mut self) -> Option<Fields<'a>> {
        let mut fields = Fields::empty();
        self.expect(b'{')?;
        loop {
            let name = self.plain_string()?;
            self.expect(b':')?;
            let value = self.string()?;
            fields.set(name, value)?;
            if !self.goes_on()? {
                return Some(fields);
            }
        }
    }
}

/// Return the character of an escape, and the length of the escape after the backslash. Return None if the escape is
/// malformed or a surrogate.
fn escape(text: &[u8]) -> Option<(char, usize)> {
    let meant = match *text.first()? {
        b'"' => '"',
        b'\\' => '\\',
        b'/' => '/',
        b'b' => '\u{8}',
        b'f' => '\u{c}',
        b'n' => '\n',
        b'r' => '\r',
        b't' => '\t',
        b'u' => {
            let digits = text.get(1..5)?;
            if !digits.iter().all(u8::is_ascii_hexdigit) {
                return None;
            }
            let digits = std::str::from_utf8(digits).ok()?;
            return Some((char::from_u32(u32::from_str_radix(digits, 16).ok()?)?, 5));
        }
        _ => return None,
    };
    Some((meant, 1))
}

/// Read a binary header: `i16 code | u8 language | i16 version | i32 opaque | i32 flag | i32 n, remark | i32 n, entries`.
pub fn read_binary(header: &[u8]) -> Option<Header<'_>> {
    let mut rest = header;
    let code = i64::from(i16::from_be_bytes(take(&mut rest)?));
    let _: [u8; 3] = take(&mut rest)?;
    let opaque = i64::from(i32::from_be_bytes(take(&mut rest)?));
    let flag = i32::from_be_bytes(take(&mut rest)?);
    let remark = i32::from_be_bytes(take(&mut rest)?);
    let entries = i32::from_be_bytes(take(&mut rest)?);
    if flag != 0 || remark != 0 || usize::try_from(entries).ok()? != rest.len() {
        return None;
    }
    let mut fields = Fields::empty();
    while !rest.is_empty() {
        let name = i16::from_be_bytes(take(&mut rest)?);
        let name = text(&mut rest, usize::try_from(name).ok()?)?;
        let value = i32::from_be_bytes(take(&mut rest)?);
        let value = text(&mut rest, usize::try_from(value).ok()?)?;
        fields.set(name, Cow::Borrowed(value))?;
    }
    plain(code, opaque, fields)
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (head, tail) = rest.split_first_chunk::<N>()?;
    *rest = tail;
    Some(*head)
}

/// Read a text of some bytes. Return None for an empty text, which means null, and for malformed bytes.
fn text<'a>(rest: &mut &'a [u8], length: usize) -> Option<&'a str> {
    if length == 0 || length > rest.len() {
        return None;
    }
    let (head, tail) = rest.split_at(length);
    *rest = tail;
    std::str::from_utf8(head).ok()
}
