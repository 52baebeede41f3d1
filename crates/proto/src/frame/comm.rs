//! The payload of [`Kind::Comm`](super::Kind::Comm): how to connect to the comms of one end of a
//! lane.

use alloc::vec::Vec;

/// The most bytes of a comm's handle.
pub const MAX_HANDLE_BYTES: usize = 128;
/// The most bytes of a plugin's name.
pub const MAX_NAME_BYTES: usize = 255;
/// The most bytes of a set-up.
pub const MAX_SETUP_BYTES: usize = FIXED_BYTES + MAX_HANDLE_BYTES + MAX_NAME_BYTES;

const FIXED_BYTES: usize = 6;

/// The data that the peer needs to connect to this end's receiving comm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setup<'a> {
    /// The largest message that this end sends and receives; the lane uses the smaller of the two.
    /// Not 0.
    pub message_bytes: u32,
    /// The handle from the plugin's `listen`; 1 to 128 bytes.
    pub handle: &'a [u8],
    /// The plugin's name; both ends must use the same plugin.
    pub plugin: &'a str,
}

/// Reports a set-up that breaks the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a malformed set-up of comms")]
pub struct SetupError;

impl<'a> Setup<'a> {
    /// Appends the set-up. Names that are too long are cut.
    ///
    /// # Errors
    /// The handle has no bytes or too many.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), SetupError> {
        if self.handle.is_empty() || self.handle.len() > MAX_HANDLE_BYTES {
            return Err(SetupError);
        }
        let mut end = self.plugin.len().min(MAX_NAME_BYTES);
        while !self.plugin.is_char_boundary(end) {
            end -= 1;
        }
        out.extend_from_slice(&self.message_bytes.to_le_bytes());
        out.push(self.handle.len() as u8);
        out.push(end as u8);
        out.extend_from_slice(self.handle);
        out.extend_from_slice(&self.plugin.as_bytes()[..end]);
        Ok(())
    }

    /// Decodes a set-up, which is all of `bytes`.
    ///
    /// # Errors
    /// The sender broke the protocol.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, SetupError> {
        let (fixed, rest) = bytes.split_first_chunk::<FIXED_BYTES>().ok_or(SetupError)?;
        let message_bytes = u32::from_le_bytes([fixed[0], fixed[1], fixed[2], fixed[3]]);
        let (handle, name) = (usize::from(fixed[4]), usize::from(fixed[5]));
        let fits = message_bytes > 0
            && (1..=MAX_HANDLE_BYTES).contains(&handle)
            && name > 0
            && rest.len() == handle + name;
        if !fits {
            return Err(SetupError);
        }
        let (handle, name) = rest.split_at(handle);
        let plugin = core::str::from_utf8(name).map_err(|_| SetupError)?;
        Ok(Self {
            message_bytes,
            handle,
            plugin,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::String;

    #[test]
    fn a_set_up_comes_back_as_it_went() {
        let handle = [7; 128];
        let long: String = core::iter::repeat_n('ä', 200).collect();
        for (handle, plugin, name) in [
            (&handle[..], "GPUDirectTCPX_v7", "GPUDirectTCPX_v7"),
            (&handle[..1], long.as_str(), &long[..254]),
        ] {
            let setup = Setup {
                message_bytes: 1 << 20,
                handle,
                plugin,
            };
            let mut bytes = Vec::new();
            setup.encode(&mut bytes).unwrap();
            assert!(bytes.len() <= MAX_SETUP_BYTES);
            assert_eq!(
                Setup::decode(&bytes),
                Ok(Setup {
                    plugin: name,
                    ..setup
                })
            );
            for len in 0..bytes.len() {
                assert_eq!(Setup::decode(&bytes[..len]), Err(SetupError));
            }
            bytes.push(0);
            assert_eq!(Setup::decode(&bytes), Err(SetupError));
        }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let setup = Setup {
            message_bytes: 1,
            handle: &[],
            plugin: "x",
        };
        assert_eq!(setup.encode(&mut Vec::new()), Err(SetupError));
        // No messages, no handle, no name, a name that is no text.
        for bytes in [
            &[0, 0, 0, 0, 1, 1, 9, b'x'][..],
            &[1, 0, 0, 0, 0, 1, b'x'],
            &[1, 0, 0, 0, 1, 0, 9],
            &[1, 0, 0, 0, 1, 1, 9, 0xff],
        ] {
            assert_eq!(Setup::decode(bytes), Err(SetupError));
        }
    }
}
