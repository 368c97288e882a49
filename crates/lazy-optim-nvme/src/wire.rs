//! The envelope that all three file formats share: magic, version, length, body, CRC32C, little-endian throughout.

/// Magic, version and length.
const PREFIX: usize = 16;

/// Bytes an envelope adds to its body.
pub(crate) const OVERHEAD: usize = PREFIX + 4;

/// Builds one envelope.
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub(crate) fn new(magic: &[u8; 8], version: u32) -> Self {
        let mut bytes = Vec::with_capacity(256);
        bytes.extend_from_slice(magic);
        bytes.extend_from_slice(&version.to_le_bytes());
        bytes.extend_from_slice(&[0; 4]);
        Writer(bytes)
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(crate) fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn f64(&mut self, value: f64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    /// The finished bytes and their checksum, which is also the last field.
    pub(crate) fn seal(mut self) -> (Vec<u8>, u32) {
        let length = (self.0.len() + 4) as u32;
        self.0[12..16].copy_from_slice(&length.to_le_bytes());
        let crc = crc32c::crc32c(&self.0);
        self.u32(crc);
        (self.0, crc)
    }
}

/// Why an envelope cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Damage {
    #[error("it does not begin with the format's magic bytes")]
    Magic,
    #[error("its format version is {0}, which this build does not read")]
    Version(u32),
    #[error("its length field does not fit the file")]
    Length,
    #[error("its checksum does not match its bytes")]
    Checksum,
    #[error("a field inside it is out of range")]
    Field,
}

/// Walks the body of an envelope whose checksum has been verified.
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
    /// The envelope's checksum.
    pub(crate) crc: u32,
}

impl<'a> Reader<'a> {
    /// Checks the envelope at the start of `bytes`; what follows it is ignored.
    pub(crate) fn open(bytes: &'a [u8], magic: &[u8; 8], version: u32) -> Result<Self, Damage> {
        let mut prefix = Reader { rest: bytes, crc: 0 };
        if prefix.bytes(8)? != magic {
            return Err(Damage::Magic);
        }
        let found = prefix.u32()?;
        let length = prefix.u32()? as usize;
        if length < OVERHEAD || length > bytes.len() {
            return Err(Damage::Length);
        }
        let mut last = Reader { rest: &bytes[length - 4..length], crc: 0 };
        let crc = last.u32()?;
        if crc32c::crc32c(&bytes[..length - 4]) != crc {
            return Err(Damage::Checksum);
        }
        // After the checksum: a flipped bit in the version field is damage, not another version.
        if found != version {
            return Err(Damage::Version(found));
        }
        Ok(Reader { rest: &bytes[PREFIX..length - 4], crc })
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Result<&'a [u8], Damage> {
        let (head, rest) = self.rest.split_at_checked(count).ok_or(Damage::Length)?;
        self.rest = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Damage> {
        self.bytes(N)?.try_into().map_err(|_| Damage::Length)
    }

    pub(crate) fn id(&mut self) -> Result<[u8; 16], Damage> {
        self.array()
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Damage> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Damage> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn usize(&mut self) -> Result<usize, Damage> {
        usize::try_from(self.u64()?).map_err(|_| Damage::Field)
    }

    pub(crate) fn f64(&mut self) -> Result<f64, Damage> {
        self.array().map(f64::from_le_bytes)
    }

    /// Refuses bytes left over.
    pub(crate) fn finish(self) -> Result<(), Damage> {
        if self.rest.is_empty() { Ok(()) } else { Err(Damage::Length) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_of_an_envelope_is_noticed() {
        let mut writer = Writer::new(b"TESTFILE", 3);
        writer.u32(7).u64(1 << 40).f64(0.25);
        let (bytes, crc) = writer.seal();
        let mut reader = Reader::open(&bytes, b"TESTFILE", 3).unwrap();
        assert_eq!(
            (reader.u32(), reader.u64(), reader.f64(), reader.crc),
            (Ok(7), Ok(1 << 40), Ok(0.25), crc)
        );
        reader.finish().unwrap();
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(Reader::open(&damaged, b"TESTFILE", 3).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn another_version_is_named() {
        let (bytes, _) = Writer::new(b"TESTFILE", 4).seal();
        assert_eq!(Reader::open(&bytes, b"TESTFILE", 3).err(), Some(Damage::Version(4)));
    }
}
