//! Property strings (`name 0x01 value 0x02` repeated) in the order in which a broker stores them.
//! Source: remoting.md §7.3, store.md §3.4.

use std::ops::Range;
use std::sync::LazyLock;

const BUCKETS: u32 = 128;
/// The maximum number of entries in a Java map with 128 buckets.
const ENTRIES_MAX: usize = 96;
/// The maximum size of a stored string. Longer strings are left to Python, which checks that recovery does not consider
/// them torn. The limit also bounds the search for duplicate names.
pub const STORED_BYTES_MAX: usize = 511;

/// Return Java's `String.hashCode` of a text.
pub fn java_hash(text: &str) -> i32 {
    java_hash_behind(0, text)
}

/// Return the `java_hash` of a text that follows a text with the hash `before`.
pub fn java_hash_behind(before: i32, text: &str) -> i32 {
    let next = |hash: i32, unit: u16| hash.wrapping_mul(31).wrapping_add(i32::from(unit));
    if text.is_ascii() {
        return text.bytes().fold(before, |hash, byte| next(hash, u16::from(byte)));
    }
    text.encode_utf16().fold(before, next)
}

fn bucket(name: &str) -> u32 {
    let hash = java_hash(name) as u32;
    (hash ^ (hash >> 16)) % BUCKETS
}

/// The position of a value in the stored string. It is empty if there is no value.
#[derive(Clone, Copy, Default)]
pub struct Span {
    pub start: usize,
    pub end: usize,
}

impl Span {
    pub fn moved(self, by: usize) -> Span {
        if self.end == 0 { self } else { Span { start: self.start + by, end: self.end + by } }
    }

    pub fn of<'a>(&self, text: &'a [u8]) -> &'a [u8] {
        &text[self.start..self.end]
    }
}

/// Return the hash of a key in an index file: `abs` of Java's hash of topic, `#` and key. Source: store.md §7.2.
/// `before`: the hash of topic and `#`.
pub fn key_hash(before: i32, key: &str) -> i32 {
    java_hash_behind(before, key).checked_abs().unwrap_or(0)
}

/// The values of a property string that the dispatch needs.
#[derive(Clone, Copy, Default)]
pub struct Keys {
    pub unique_key: Span,
    pub keys: Span,
    pub tags: Span,
    /// The lite topic.
    pub lite: Span,
    /// The positions of `LIGHT_NAMES` if they are added to the stored string. They are set if there is a lite topic.
    pub light_at: [usize; 3],
    /// True if there is a sharding key, which ordered messages have.
    pub is_fifo: bool,
    /// The requested delivery time, and its unit in ms.
    pub asked: Option<(i64, i64)>,
}

impl Keys {
    /// Return the same values for a string that begins `by` bytes later.
    pub fn moved(self, by: usize) -> Keys {
        let (unique_key, keys, tags) = (self.unique_key.moved(by), self.keys.moved(by), self.tags.moved(by));
        Keys { unique_key, keys, tags, lite: self.lite.moved(by), ..self }
    }
}

/// The broker's own properties (`stamps`), and the names of properties that need more than storage (`not_plain`).
/// `timed`: names of properties with a delivery time, in order of priority, and their units in ms.
#[derive(Default)]
pub struct Rules {
    pub stamps: Vec<(String, String)>,
    pub not_plain: Vec<String>,
    pub timed: Vec<(String, i64)>,
}

const LITE_TOPIC: &str = "__LITE_TOPIC";
const LITE_TOPIC_BYTES_MAX: usize = 64;
/// The properties of the light queue of a lite topic: its name, the life of the lite topic, the number of the message.
/// The name is added before the broker's own properties, the others after them.
const LIGHT_NAMES: [&str; 3] = ["INNER_MULTI_DISPATCH", "__LITE_EPOCH", "INNER_MULTI_QUEUE_OFFSET"];
/// The buckets of `LIGHT_NAMES` and their indexes, in the stored order.
static LIGHT_ORDER: LazyLock<[(u32, usize); 3]> = LazyLock::new(|| {
    let mut order = [0, 1, 2].map(|at| (bucket(LIGHT_NAMES[at]), at));
    order.sort();
    order
});
const DIGITS_MAX: usize = 17;

/// Return true if the name of a lite topic is allowed. Source: lite.md §3.
pub fn is_lite_topic(name: &[u8]) -> bool {
    let is_legal = |one: &u8| one.is_ascii_alphanumeric() || *one == b'-' || *one == b'_';
    !name.is_empty() && name.len() <= LITE_TOPIC_BYTES_MAX && name.iter().all(is_legal)
}

/// Return the positions of UNIQ_KEY, KEYS, TAGS and the lite topic in a property string that is stored unchanged, as for
/// messages of a batch. Return None if Python must decide: an entry has no name or no value, or one of the four names
/// occurs twice.
pub fn find(stored: &str) -> Option<Keys> {
    let mut keys = Keys::default();
    let mut start = 0;
    let body = stored.strip_suffix('\u{2}').unwrap_or(stored);
    if stored.is_empty() {
        return Some(keys);
    }
    for piece in body.split('\u{2}') {
        let (name, value) = piece.split_once('\u{1}')?;
        if name.is_empty() || value.is_empty() || value.contains('\u{1}') {
            return None;
        }
        let value_start = start + name.len() + 1;
        let span = Span { start: value_start, end: value_start + value.len() };
        let place = match name {
            "UNIQ_KEY" => Some(&mut keys.unique_key),
            "KEYS" => Some(&mut keys.keys),
            "TAGS" => Some(&mut keys.tags),
            LITE_TOPIC => Some(&mut keys.lite),
            _ => None,
        };
        if let Some(place) = place {
            if place.end > 0 {
                return None;
            }
            *place = span;
        }
        keys.is_fifo |= name == "__SHARDINGKEY";
        start = span.end + 1;
    }
    Some(keys)
}

/// Append the stored form of a property string to `out`. If Python must decide, leave `out` unchanged and return None:
/// a name occurs twice, an entry has no name or no value, a name needs more than storage, or a delivery time is
/// malformed. `more`: properties to add before the broker's own properties.
pub fn store(sent: &str, more: &[(&str, &str)], rules: &Rules, out: &mut Vec<u8>) -> Option<Keys> {
    if sent.len() > STORED_BYTES_MAX {
        return None;
    }
    let mut entries: Vec<(u32, &str, &str)> = Vec::with_capacity(12);
    let body = sent.strip_suffix('\u{2}').unwrap_or(sent);
    for piece in body.split('\u{2}') {
        let (name, value) = piece.split_once('\u{1}')?;
        if name.is_empty() || value.is_empty() || value.contains('\u{1}') {
            return None;
        }
        if entries.iter().any(|(_, known, _)| *known == name) {
            return None;
        }
        if rules.not_plain.iter().any(|one| one == name) || rules.stamps.iter().any(|(one, _)| one == name) {
            return None;
        }
        entries.push((bucket(name), name, value));
    }
    let mut asked: Option<(usize, i64)> = None;
    for (_, name, value) in &entries {
        if let Some(at) = rules.timed.iter().position(|(one, _)| one == name) {
            let is_time = value.len() <= DIGITS_MAX && value.bytes().all(|digit| digit.is_ascii_digit());
            let time = value.parse().ok().filter(|_| is_time)?;
            if asked.is_none_or(|(first, _)| at < first) {
                asked = Some((at, time));
            }
        }
    }
    let own = rules.stamps.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    for (name, value) in more.iter().copied().chain(own) {
        entries.push((bucket(name), name, value));
    }
    if entries.len() > ENTRIES_MAX {
        return None;
    }
    entries.sort_by_key(|entry| entry.0);
    let asked = asked.map(|(at, time)| (time, rules.timed[at].1));
    let mut keys = Keys { asked, ..Keys::default() };
    let is_lite = entries.iter().any(|(_, name, _)| *name == LITE_TOPIC);
    if is_lite {
        keys.light_at = light_places(&entries, rules, out.len());
    }
    for (_, name, value) in entries {
        out.extend_from_slice(name.as_bytes());
        out.push(1);
        let span = Span { start: out.len(), end: out.len() + value.len() };
        out.extend_from_slice(value.as_bytes());
        out.push(2);
        match name {
            "UNIQ_KEY" => keys.unique_key = span,
            "KEYS" => keys.keys = span,
            "TAGS" => keys.tags = span,
            LITE_TOPIC => keys.lite = span,
            "__SHARDINGKEY" => keys.is_fifo = true,
            _ => {}
        }
    }
    Some(keys)
}

/// Return the positions of `LIGHT_NAMES` in a string that is stored at a position. `entries`: its sorted entries.
fn light_places(entries: &[(u32, &str, &str)], rules: &Rules, start: usize) -> [usize; 3] {
    let mut places = [start; 3];
    let mut end = start;
    for (bucket, name, value) in entries {
        end += name.len() + value.len() + 2;
        for (own, at) in *LIGHT_ORDER {
            // Entries of one bucket are in the order in which they are added.
            let is_own_stamp = at == 0 && *bucket == own && rules.stamps.iter().any(|(one, _)| one == name);
            if *bucket <= own && !is_own_stamp {
                places[at] = end;
            }
        }
    }
    places
}

/// Append a stored string with the properties of a light queue. Return the positions of its values. `stored`, `keys`: the
/// string, and the positions of its values. `values`: the values of `LIGHT_NAMES`, of which an empty one is left out.
pub fn store_light(stored: Range<usize>, keys: &Keys, values: [&[u8]; 3], text: &mut Vec<u8>) -> Keys {
    let (start, mut from) = (text.len(), stored.start);
    let mut added = [(0, 0); 3];
    for (place, (_, at)) in LIGHT_ORDER.iter().enumerate() {
        let (name, value, to) = (LIGHT_NAMES[*at], values[*at], keys.light_at[*at]);
        if value.is_empty() {
            continue;
        }
        text.extend_from_within(from..to);
        text.extend_from_slice(name.as_bytes());
        text.push(1);
        text.extend_from_slice(value);
        text.push(2);
        (from, added[place]) = (to, (to, name.len() + value.len() + 2));
    }
    text.extend_from_within(from..stored.end);
    let moved = |span: Span| {
        let more: usize = added.iter().filter(|(to, _)| *to <= span.start).map(|(_, bytes)| bytes).sum();
        if span.end == 0 {
            return span;
        }
        Span { start: span.start - stored.start + start + more, end: span.end - stored.start + start + more }
    };
    let (unique_key, tags) = (moved(keys.unique_key), moved(keys.tags));
    Keys { unique_key, keys: moved(keys.keys), tags, lite: moved(keys.lite), ..*keys }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_javas() {
        assert_eq!(java_hash(""), 0);
        assert_eq!(java_hash("TagA"), 2598919);
        assert_eq!(java_hash("polygenelubricants"), i32::MIN);
    }

    #[test]
    fn odd_strings_are_left() {
        let rules = Rules { stamps: vec![], not_plain: vec!["DELAY".into()], timed: vec![] };
        for odd in ["", "a", "\u{1}b\u{2}", "a\u{1}\u{2}", "a\u{1}b\u{2}a\u{1}c\u{2}", "DELAY\u{1}3\u{2}", "a\u{1}b\u{2}\u{2}"] {
            let mut out = vec![];
            assert!(store(odd, &[], &rules, &mut out).is_none(), "{odd:?}");
            assert!(out.is_empty());
        }
    }
}
