//! MD5, the digest of message bodies in gRPC. It detects damage, but not manipulation. Source: RFC 1321.

/// The rotations of the steps in bits. Each round repeats its four rotations.
const TURNS: [[u32; 4]; 4] = [[7, 12, 17, 22], [5, 9, 14, 20], [4, 11, 16, 23], [6, 10, 15, 21]];
/// `floor(2^32 * abs(sin(step + 1)))`.
#[rustfmt::skip]
const SINES: [u32; 64] = [
    0xd76aa478, 0xe8c7b756, 0x242070db, 0xc1bdceee, 0xf57c0faf, 0x4787c62a, 0xa8304613, 0xfd469501,
    0x698098d8, 0x8b44f7af, 0xffff5bb1, 0x895cd7be, 0x6b901122, 0xfd987193, 0xa679438e, 0x49b40821,
    0xf61e2562, 0xc040b340, 0x265e5a51, 0xe9b6c7aa, 0xd62f105d, 0x02441453, 0xd8a1e681, 0xe7d3fbc8,
    0x21e1cde6, 0xc33707d6, 0xf4d50d87, 0x455a14ed, 0xa9e3e905, 0xfcefa3f8, 0x676f02d9, 0x8d2a4c8a,
    0xfffa3942, 0x8771f681, 0x6d9d6122, 0xfde5380c, 0xa4beea44, 0x4bdecfa9, 0xf6bb4b60, 0xbebfbc70,
    0x289b7ec6, 0xeaa127fa, 0xd4ef3085, 0x04881d05, 0xd9d4d039, 0xe6db99e5, 0x1fa27cf8, 0xc4ac5665,
    0xf4292244, 0x432aff97, 0xab9423a7, 0xfc93a039, 0x655b59c3, 0x8f0ccc92, 0xffeff47d, 0x85845dd1,
    0x6fa87e4f, 0xfe2ce6e0, 0xa3014314, 0x4e0811a1, 0xf7537e82, 0xbd3af235, 0x2ad7d2bb, 0xeb86d391,
];
const BLOCK_BYTES: usize = 64;

pub fn md5(data: &[u8]) -> [u8; 16] {
    let mut state = [0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476];
    let blocks = data.chunks_exact(BLOCK_BYTES);
    let rest = blocks.remainder();
    blocks.for_each(|block| add_block(&mut state, block));
    // Padding: a bit 1, zeros, and the number of bits of the data.
    let mut end = [0; 2 * BLOCK_BYTES];
    end[..rest.len()].copy_from_slice(rest);
    end[rest.len()] = 0x80;
    let size = if rest.len() < BLOCK_BYTES - 8 { BLOCK_BYTES } else { 2 * BLOCK_BYTES };
    end[size - 8..size].copy_from_slice(&(data.len() as u64).wrapping_mul(8).to_le_bytes());
    end[..size].chunks_exact(BLOCK_BYTES).for_each(|block| add_block(&mut state, block));
    let mut digest = [0; 16];
    for (four, word) in digest.chunks_exact_mut(4).zip(state) {
        four.copy_from_slice(&word.to_le_bytes());
    }
    digest
}

fn add_block(state: &mut [u32; 4], block: &[u8]) {
    let mut words = [0; 16];
    for (word, four) in words.iter_mut().zip(block.chunks_exact(4)) {
        *word = u32::from_le_bytes([four[0], four[1], four[2], four[3]]);
    }
    let [mut a, mut b, mut c, mut d] = *state;
    // Each round has its own loop, so that the compiler can unroll the steps.
    macro_rules! round {
        ($number:literal, $mixed:expr, $word:expr) => {
            for step in 0..16 {
                let mixed: u32 = $mixed(b, c, d);
                let word: usize = $word(step);
                let sum = a.wrapping_add(mixed).wrapping_add(words[word & 15]).wrapping_add(SINES[$number * 16 + step]);
                (a, d, c) = (d, c, b);
                b = b.wrapping_add(sum.rotate_left(TURNS[$number][step & 3]));
            }
        };
    }
    round!(0, |b: u32, c: u32, d: u32| (b & c) | (!b & d), |step| step);
    round!(1, |b: u32, c: u32, d: u32| (d & b) | (!d & c), |step| 5 * step + 1);
    round!(2, |b: u32, c: u32, d: u32| b ^ c ^ d, |step| 3 * step + 5);
    round!(3, |b: u32, c: u32, d: u32| c ^ (b | !d), |step| 7 * step);
    for (word, more) in state.iter_mut().zip([a, b, c, d]) {
        *word = word.wrapping_add(more);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_those_of_the_rfc() {
        let hex = |data: &[u8]| md5(data).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        assert_eq!(hex(b""), "d41d8cd98f00b204e9800998ecf8427e");
        assert_eq!(hex(b"message digest"), "f96b697d7cb7938d525a2f31aaf161d0");
        assert_eq!(hex(&b"1234567890".repeat(8)), "57edf4a22be3c955ac49da2e2107b67a");
    }
}
