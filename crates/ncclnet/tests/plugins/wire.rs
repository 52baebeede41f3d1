//! Two connected comms, memory for sends and receives, and helpers that move messages.

use std::collections::VecDeque;
use std::task::Poll;

use tcpx_ncclnet::{
    Completion, Direction, Error, Handle, MemoryHandle, MemoryKind, Plugin, RecvComm, Request,
    SendComm,
};

/// Connects one device to another of the same plugin. The handle travels as bytes.
pub(crate) fn connect(plugin: &Plugin, from: usize, to: usize) -> (SendComm, RecvComm) {
    let mut listener = plugin.listen(to).unwrap();
    let handle = Handle::from_bytes(listener.handle().as_bytes()).unwrap();
    let mut connecting = plugin.connect(from, &handle).unwrap();
    let (mut send, mut recv) = (None, None);
    while send.is_none() || recv.is_none() {
        if send.is_none()
            && let Poll::Ready(comm) = connecting.poll()
        {
            send = Some(comm.unwrap());
        }
        if recv.is_none()
            && let Poll::Ready(comm) = listener.accept()
        {
            recv = Some(comm.unwrap());
        }
        // Both must tolerate that the objects move.
        (connecting, listener) = *Box::new((connecting, listener));
    }
    (send.unwrap(), recv.unwrap())
}

/// Memory with the alignment that the plugin requires. Accessed by pointer only, since plugins
/// write it.
pub(crate) struct Memory {
    base: *mut u8,
    layout: std::alloc::Layout,
}

impl Memory {
    pub(crate) fn new(bytes: usize) -> Self {
        let layout = std::alloc::Layout::from_size_align(bytes.max(1), 64).unwrap();
        // SAFETY: the layout is not empty.
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        assert!(!base.is_null());
        Self { base, layout }
    }

    pub(crate) fn register<D: Direction>(
        &self,
        comm: &mut tcpx_ncclnet::Comm<D>,
        kind: MemoryKind,
    ) -> Result<MemoryHandle, Error> {
        // SAFETY: the tests keep the memory until the comm is dropped, and access it when requests
        // are done.
        unsafe { comm.register(self.base, self.layout.size(), kind) }
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.base
    }

    /// Returns the bytes. No request may be outstanding.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: allocated in `new`, initialised, and borrowed with `self`.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.layout.size()) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { std::alloc::dealloc(self.base, self.layout) };
    }
}

/// Returns byte `index` of message `message`: messages, and positions in one, soon differ.
pub(crate) fn pattern(message: usize, index: usize) -> u8 {
    let x = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (message as u64) << 17;
    (x ^ (x >> 29)) as u8
}

/// Sends messages of these sizes over the pair, several at a time, and checks every byte at the
/// other end, and that no byte beside them was touched.
pub(crate) fn move_all(
    send: &mut SendComm,
    recv: &mut RecvComm,
    sizes: &[usize],
) -> Vec<Completion> {
    const GAP: usize = 16;
    let total: usize = sizes.iter().map(|size| size + GAP).sum();
    let (mut source, mut target) = (Memory::new(total), Memory::new(total));
    let mut offsets = Vec::new();
    let mut at = 0;
    for (message, size) in sizes.iter().enumerate() {
        for index in 0..*size {
            source.bytes()[at + index] = pattern(message, index);
        }
        offsets.push(at);
        at += size + GAP;
    }
    target.bytes().fill(0xEE);

    let from = source.register(send, MemoryKind::Host).unwrap();
    let to = target.register(recv, MemoryKind::Host).unwrap();
    let (mut sending, mut receiving) = (VecDeque::new(), VecDeque::new());
    let (mut sent, mut received) = (0, 0);
    let mut completions = Vec::new();
    while completions.len() < sizes.len() || !sending.is_empty() {
        if sent < sizes.len()
            && let Some(request) = send.isend(&from, offsets[sent], sizes[sent], 9).unwrap()
        {
            sending.push_back(request);
            sent += 1;
        }
        if received < sizes.len()
            && let Some(request) = recv
                .irecv(&to, offsets[received], sizes[received], 9)
                .unwrap()
        {
            receiving.push_back(request);
            received += 1;
        }
        if step(sending.front(), |request| send.test(request)).is_some() {
            sending.pop_front();
        }
        if let Some(completion) = step(receiving.front(), |request| recv.test(request)) {
            recv.consume(receiving.pop_front().unwrap()).unwrap();
            completions.push(completion);
        }
    }
    assert_eq!((send.in_flight(), recv.in_flight()), (0, 0));
    send.deregister(from).unwrap();
    recv.deregister(to).unwrap();

    for (message, size) in sizes.iter().enumerate() {
        let start = offsets[message];
        let (got, gap) = target.bytes()[start..start + size + GAP].split_at(*size);
        for (index, byte) in got.iter().enumerate() {
            assert_eq!(
                *byte,
                pattern(message, index),
                "message {message} at {index}"
            );
        }
        assert!(gap.iter().all(|byte| *byte == 0xEE), "after {message}");
    }
    completions
}

fn step(
    oldest: Option<&Request>,
    test: impl FnOnce(Request) -> Result<Option<Completion>, Error>,
) -> Option<Completion> {
    test(*oldest?).unwrap()
}

/// Posts until the plugin accepts it.
pub(crate) fn post(
    mut attempt: impl FnMut() -> Result<Option<Request>, Error>,
) -> Result<Request, Error> {
    for _ in 0..10 {
        if let Some(request) = attempt()? {
            return Ok(request);
        }
    }
    panic!("the plugin takes nothing");
}
