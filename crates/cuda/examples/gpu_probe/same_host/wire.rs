//! Messages between the two processes: bytes and file descriptors.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use crate::Outcome;

/// Maximum file descriptors that the kernel accepts in one call.
const AT_ONCE: usize = 253;
const ROOM: usize = 2048;

/// Buffer for control messages, aligned as required.
#[repr(C, align(16))]
struct Control([u8; ROOM]);

pub(crate) fn send(socket: &mut UnixStream, bytes: &[u8], fds: &[OwnedFd]) -> Outcome {
    socket.write_all(&(bytes.len() as u32).to_le_bytes())?;
    socket.write_all(&(fds.len() as u32).to_le_bytes())?;
    socket.write_all(bytes)?;
    for part in fds.chunks(AT_ONCE) {
        let raw: Vec<RawFd> = part.iter().map(AsRawFd::as_raw_fd).collect();
        with_control(|message| {
            let len = size_of_val(&raw[..]) as u32;
            // SAFETY: the control buffer has room for one message of so many descriptors.
            unsafe {
                message.msg_controllen = libc::CMSG_SPACE(len) as usize;
                let head = libc::CMSG_FIRSTHDR(message);
                (*head).cmsg_level = libc::SOL_SOCKET;
                (*head).cmsg_type = libc::SCM_RIGHTS;
                (*head).cmsg_len = libc::CMSG_LEN(len) as usize;
                std::ptr::copy_nonoverlapping(
                    raw.as_ptr().cast(),
                    libc::CMSG_DATA(head),
                    len as usize,
                );
                libc::sendmsg(socket.as_raw_fd(), message, libc::MSG_NOSIGNAL)
            }
        })?;
    }
    Ok(())
}

pub(crate) fn receive(socket: &mut UnixStream) -> Outcome<(Vec<u8>, Vec<OwnedFd>)> {
    let mut number = || -> Outcome<usize> {
        let mut number = [0; 4];
        socket.read_exact(&mut number)?;
        Ok(u32::from_le_bytes(number) as usize)
    };
    let (len, count) = (number()?, number()?);
    let mut bytes = vec![0; len];
    socket.read_exact(&mut bytes)?;
    let mut fds = Vec::new();
    while fds.len() < count {
        with_control(|message| {
            // SAFETY: the kernel fills the control buffer, and reports how much of it.
            unsafe {
                let got = libc::recvmsg(socket.as_raw_fd(), message, libc::MSG_CMSG_CLOEXEC);
                let head = libc::CMSG_FIRSTHDR(message);
                if got == 1 && !head.is_null() {
                    let len = (*head).cmsg_len - libc::CMSG_LEN(0) as usize;
                    for i in 0..len / size_of::<RawFd>() {
                        let fd = libc::CMSG_DATA(head).cast::<RawFd>().add(i);
                        fds.push(OwnedFd::from_raw_fd(fd.read_unaligned()));
                    }
                }
                got
            }
        })?;
    }
    Ok((bytes, fds))
}

/// Makes a call with a message of one byte and room for descriptors; the byte must be transferred.
fn with_control(call: impl FnOnce(&mut libc::msghdr) -> isize) -> Outcome {
    let (mut byte, mut control) = (0_u8, Control([0; ROOM]));
    let mut part = libc::iovec {
        iov_base: (&raw mut byte).cast(),
        iov_len: 1,
    };
    // SAFETY: all zeros is an empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    message.msg_controllen = ROOM;
    match call(&mut message) {
        1 => Ok(()),
        0 => Err("the other process is gone".into()),
        _ => Err(std::io::Error::last_os_error().into()),
    }
}
