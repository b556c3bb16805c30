//! Records of the commit log and entries of consume queues. Source: store.md §3.4, §4.1.

pub const MAGIC_V1: i32 = 0xDAA3_20A7_u32 as i32;
pub const BORN_HOST_V6: i32 = 0x10;
pub const STORE_HOST_V6: i32 = 0x20;
pub const HOST_V6_BYTES: usize = 20;
/// The size of all fixed fields except the two hosts: 12 numbers and the three lengths.
pub const FIXED_BYTES: usize = 75;
/// The mask of checksums, which are stored with the top bit cleared.
pub const CRC_MASK: u32 = 0x7FFF_FFFF;

/// A message to store, without its physical offset and store time.
pub struct Message<'a> {
    pub topic: &'a [u8],
    pub queue_id: i32,
    pub flag: i32,
    pub queue_offset: i64,
    pub sys_flag: i32,
    pub born_timestamp: i64,
    pub reconsume_times: i32,
    pub body: &'a [u8],
    pub properties: &'a [u8],
}

/// The fields that all records of a run share.
pub struct Shared<'a> {
    pub born_host: &'a [u8],
    pub store_host: &'a [u8],
    pub store_timestamp: i64,
    /// True if the records end with their checksum (``appendPropCRC``).
    pub is_sealed: bool,
}

/// The name of the last property of a sealed record. Its value is the checksum of all preceding bytes, in ten digits,
/// least significant first.
pub const CRC_KEY: &[u8] = b"__CRC32#";
const CRC_DIGITS: usize = 10;

/// Return the size of the checksum property, including the mark that ends the properties before it.
fn seal_bytes(properties: &[u8]) -> usize {
    CRC_KEY.len() + 1 + CRC_DIGITS + 1 + usize::from(properties.last().is_some_and(|last| *last != 2))
}

/// Return the size of the record, or None if the size does not fit in 32 bits.
pub fn record_bytes(message: &Message, shared: &Shared) -> Option<i32> {
    let hosts = shared.born_host.len() + shared.store_host.len();
    let seal = if shared.is_sealed { seal_bytes(message.properties) } else { 0 };
    let variable = message.body.len() + message.topic.len() + message.properties.len() + seal;
    i32::try_from(FIXED_BYTES + hosts + variable).ok()
}

/// Append a record and return its size. If a length does not fit in its field, append nothing and return None.
pub fn write(message: &Message, shared: &Shared, physical_offset: i64, out: &mut Vec<u8>) -> Option<i32> {
    let size = record_bytes(message, shared)?;
    let topic_bytes = u8::try_from(message.topic.len()).ok()?;
    let seal = if shared.is_sealed { seal_bytes(message.properties) } else { 0 };
    let properties_bytes = i16::try_from(message.properties.len() + seal).ok()?;
    let mut sys_flag = message.sys_flag & !(BORN_HOST_V6 | STORE_HOST_V6);
    if shared.born_host.len() == HOST_V6_BYTES {
        sys_flag |= BORN_HOST_V6;
    }
    if shared.store_host.len() == HOST_V6_BYTES {
        sys_flag |= STORE_HOST_V6;
    }
    let start = out.len();
    out.extend_from_slice(&size.to_be_bytes());
    out.extend_from_slice(&MAGIC_V1.to_be_bytes());
    out.extend_from_slice(&(crc32fast::hash(message.body) & CRC_MASK).to_be_bytes());
    out.extend_from_slice(&message.queue_id.to_be_bytes());
    out.extend_from_slice(&message.flag.to_be_bytes());
    out.extend_from_slice(&message.queue_offset.to_be_bytes());
    out.extend_from_slice(&physical_offset.to_be_bytes());
    out.extend_from_slice(&sys_flag.to_be_bytes());
    out.extend_from_slice(&message.born_timestamp.to_be_bytes());
    out.extend_from_slice(shared.born_host);
    out.extend_from_slice(&shared.store_timestamp.to_be_bytes());
    out.extend_from_slice(shared.store_host);
    out.extend_from_slice(&message.reconsume_times.to_be_bytes());
    out.extend_from_slice(&0_i64.to_be_bytes());
    out.extend_from_slice(&(message.body.len() as i32).to_be_bytes());
    out.extend_from_slice(message.body);
    out.push(topic_bytes);
    out.extend_from_slice(message.topic);
    out.extend_from_slice(&properties_bytes.to_be_bytes());
    out.extend_from_slice(message.properties);
    if shared.is_sealed {
        if message.properties.last().is_some_and(|last| *last != 2) {
            out.push(2);
        }
        let mut crc = crc32fast::hash(&out[start..]) & CRC_MASK;
        out.extend_from_slice(CRC_KEY);
        out.push(1);
        for _ in 0..CRC_DIGITS {
            out.push(b'0' + (crc % 10) as u8);
            crc /= 10;
        }
        out.push(2);
    }
    assert_eq!(out.len() - start, size as usize, "the size was worked out before");
    Some(size)
}

/// Append an entry of a consume queue.
pub fn write_entry(physical_offset: i64, size: i32, tags_code: i64, out: &mut Vec<u8>) {
    out.extend_from_slice(&physical_offset.to_be_bytes());
    out.extend_from_slice(&size.to_be_bytes());
    out.extend_from_slice(&tags_code.to_be_bytes());
}
