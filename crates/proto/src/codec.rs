//! Reading and writing little-endian fields.
//!
//! Every number from the wire is read by a [`Reader`] in this crate. It cannot run past its end and
//! never allocates, and a length from the wire goes through [`Reader::bytes_within`] together with
//! the limit of its format.

use alloc::vec::Vec;

/// The reason a [`Reader`] failed.
///
/// The errors of a format wrap this one; on its own it describes the layout only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// The input ended inside a field. Typical cause: the bytes were cut short on their way.
    #[error("input truncated: a field needs {needed} bytes, {left} are left")]
    Truncated {
        /// Bytes that the field occupies.
        needed: usize,
        /// Bytes that were left; always fewer than `needed`.
        left: usize,
    },

    /// Bytes remain after the last field. Typical cause: one format mistaken for another.
    #[error("{left} bytes remain after the last field")]
    Trailing {
        /// Bytes left over; never zero.
        left: usize,
    },

    /// A length field is outside of what its format allows.
    #[error("length {len} is outside of {min}..={max}")]
    LengthOutOfRange {
        /// The length that was found.
        len: usize,
        /// The smallest legal length.
        min: usize,
        /// The largest legal length.
        max: usize,
    },

    /// A reserved byte is set. Typical cause: the sender uses a later version.
    #[error("a reserved byte is {found}, expected 0")]
    ReservedNotZero {
        /// The value that was found; never zero.
        found: u8,
    },
}

/// A cursor over received bytes that cannot run past their end.
///
/// A method that fails leaves the cursor where it was.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    /// The bytes not read yet.
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Starts at the first byte of `input`.
    #[inline]
    pub const fn new(input: &'a [u8]) -> Self {
        Self { rest: input }
    }

    /// Returns how many bytes have not been read yet.
    #[inline]
    pub const fn left(&self) -> usize {
        self.rest.len()
    }

    /// Reads one byte.
    #[inline]
    pub fn u8(&mut self) -> Result<u8, CodecError> {
        let [byte] = self.array()?;
        Ok(byte)
    }

    /// Reads a little-endian `u16`.
    #[inline]
    pub fn u16(&mut self) -> Result<u16, CodecError> {
        self.array().map(u16::from_le_bytes)
    }

    /// Reads a little-endian `u32`.
    #[inline]
    pub fn u32(&mut self) -> Result<u32, CodecError> {
        self.array().map(u32::from_le_bytes)
    }

    /// Reads a little-endian `u64`.
    #[inline]
    pub fn u64(&mut self) -> Result<u64, CodecError> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads `N` bytes by value.
    #[inline]
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], CodecError> {
        let Some((head, rest)) = self.rest.split_first_chunk::<N>() else {
            return Err(self.truncated(N));
        };
        self.rest = rest;
        Ok(*head)
    }

    /// Borrows the next `n` bytes.
    #[inline]
    pub fn bytes(&mut self, n: usize) -> Result<&'a [u8], CodecError> {
        let Some((head, rest)) = self.rest.split_at_checked(n) else {
            return Err(self.truncated(n));
        };
        self.rest = rest;
        Ok(head)
    }

    /// Borrows the next `len` bytes, where `len` came from the wire and must lie within
    /// `min..=max`.
    ///
    /// The limit is checked first: a forbidden length is an error even when the bytes are there.
    #[inline]
    pub fn bytes_within(
        &mut self,
        len: usize,
        min: usize,
        max: usize,
    ) -> Result<&'a [u8], CodecError> {
        if len < min || len > max {
            return Err(CodecError::LengthOutOfRange { len, min, max });
        }
        self.bytes(len)
    }

    /// Skips one byte that is reserved; fails when it is not zero.
    #[inline]
    pub fn reserved(&mut self) -> Result<(), CodecError> {
        match self.rest.split_first() {
            Some((0, rest)) => {
                self.rest = rest;
                Ok(())
            }
            Some((found, _)) => Err(CodecError::ReservedNotZero { found: *found }),
            None => Err(self.truncated(1)),
        }
    }

    /// Borrows everything that is left; the reader is empty afterwards.
    #[inline]
    pub fn rest(&mut self) -> &'a [u8] {
        core::mem::take(&mut self.rest)
    }

    /// Ends the reading; fails when bytes remain.
    #[inline]
    pub fn finish(self) -> Result<(), CodecError> {
        match self.rest.len() {
            0 => Ok(()),
            left => Err(CodecError::Trailing { left }),
        }
    }

    #[cold]
    fn truncated(&self, needed: usize) -> CodecError {
        CodecError::Truncated {
            needed,
            left: self.rest.len(),
        }
    }
}

/// Appends little-endian fields to a buffer: the mirror image of [`Reader`].
pub trait Writer {
    /// Appends one byte.
    fn put_u8(&mut self, value: u8);
    /// Appends a little-endian `u16`.
    fn put_u16(&mut self, value: u16);
    /// Appends a little-endian `u32`.
    fn put_u32(&mut self, value: u32);
    /// Appends a little-endian `u64`.
    fn put_u64(&mut self, value: u64);
    /// Appends bytes as they are, with no length in front.
    fn put_bytes(&mut self, bytes: &[u8]);
}

impl Writer for Vec<u8> {
    #[inline]
    fn put_u8(&mut self, value: u8) {
        self.push(value);
    }

    #[inline]
    fn put_u16(&mut self, value: u16) {
        self.extend_from_slice(&value.to_le_bytes());
    }

    #[inline]
    fn put_u32(&mut self, value: u32) {
        self.extend_from_slice(&value.to_le_bytes());
    }

    #[inline]
    fn put_u64(&mut self, value: u64) {
        self.extend_from_slice(&value.to_le_bytes());
    }

    #[inline]
    fn put_bytes(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn fields_are_little_endian() {
        let mut out = Vec::new();
        out.put_u8(1);
        out.put_u16(0x0302);
        out.put_u32(0x0706_0504);
        out.put_u64(0x0f0e_0d0c_0b0a_0908);
        out.put_bytes(&[16, 17]);
        assert_eq!(out, (1..=17).collect::<Vec<u8>>());

        let mut reader = Reader::new(&out);
        assert_eq!(reader.u8(), Ok(1));
        assert_eq!(reader.u16(), Ok(0x0302));
        assert_eq!(reader.u32(), Ok(0x0706_0504));
        assert_eq!(reader.u64(), Ok(0x0f0e_0d0c_0b0a_0908));
        assert_eq!(reader.array(), Ok([16, 17]));
        assert_eq!(reader.finish(), Ok(()));
    }

    #[test]
    fn a_failed_read_moves_nothing() {
        let mut reader = Reader::new(&[1, 2, 3]);
        assert_eq!(
            reader.u32(),
            Err(CodecError::Truncated { needed: 4, left: 3 })
        );
        assert_eq!(
            reader.u64(),
            Err(CodecError::Truncated { needed: 8, left: 3 })
        );
        assert_eq!(
            reader.bytes(usize::MAX),
            Err(CodecError::Truncated {
                needed: usize::MAX,
                left: 3
            })
        );
        assert_eq!(reader.bytes(3), Ok(&[1, 2, 3][..]));
        assert_eq!(
            reader.u8(),
            Err(CodecError::Truncated { needed: 1, left: 0 })
        );
        assert_eq!(reader.bytes(0), Ok(&[][..]));
    }

    #[test]
    fn a_forbidden_length_is_refused_although_the_bytes_are_there() {
        let input = vec![0; 64];
        let out_of_range = |len| {
            Err(CodecError::LengthOutOfRange {
                len,
                min: 2,
                max: 8,
            })
        };
        assert_eq!(Reader::new(&input).bytes_within(1, 2, 8), out_of_range(1));
        assert_eq!(Reader::new(&input).bytes_within(9, 2, 8), out_of_range(9));
        assert_eq!(Reader::new(&input).bytes_within(2, 2, 8), Ok(&input[..2]));
        assert_eq!(Reader::new(&input).bytes_within(8, 2, 8), Ok(&input[..8]));
        let short = CodecError::Truncated { needed: 8, left: 3 };
        assert_eq!(Reader::new(&input[..3]).bytes_within(8, 2, 8), Err(short));
    }

    #[test]
    fn a_reserved_byte_is_zero() {
        assert_eq!(Reader::new(&[0]).reserved(), Ok(()));
        let set = CodecError::ReservedNotZero { found: 9 };
        assert_eq!(Reader::new(&[9]).reserved(), Err(set));
        let short = CodecError::Truncated { needed: 1, left: 0 };
        assert_eq!(Reader::new(&[]).reserved(), Err(short));
    }

    #[test]
    fn rest_empties_and_finish_reports_what_remains() {
        let mut reader = Reader::new(&[1, 2, 3]);
        assert_eq!(reader.u8(), Ok(1));
        assert_eq!(
            reader.clone().finish(),
            Err(CodecError::Trailing { left: 2 })
        );
        assert_eq!(reader.rest(), &[2, 3]);
        assert_eq!(reader.left(), 0);
        assert_eq!(reader.finish(), Ok(()));
    }

    proptest! {
        /// For any sequence of calls, the bytes read and the bytes left make up the input.
        #[test]
        fn reads_concatenate_to_the_input(input: Vec<u8>, sizes: Vec<u8>) {
            let mut reader = Reader::new(&input);
            let mut seen = Vec::new();
            for size in sizes {
                if let Ok(bytes) = reader.bytes(usize::from(size)) {
                    seen.extend_from_slice(bytes);
                }
                prop_assert_eq!(seen.len() + reader.left(), input.len());
            }
            seen.extend_from_slice(reader.rest());
            prop_assert_eq!(seen, input);
        }
    }
}
