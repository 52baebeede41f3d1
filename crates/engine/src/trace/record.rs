//! One event of a trace: a record of fixed size, without any text.

/// The number of words of a record in a ring.
pub(super) const WORDS: usize = 8;

/// The kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    // Spans of the thread that records them.
    /// The application posts a transfer.
    Post,
    Sendmsg,
    Recvmsg,
    ProcessVmReadv,
    ProcessVmWritev,
    /// A chunk is copied within the host, from start to end.
    CopyChunk,
    /// The CPU copies memory.
    CpuCopy,
    /// A worker sleeps until the kernel reports something.
    Sleep,
    // Spans of a lane's sending half.
    /// A WRITE chunk of this session, from the start of its frame until the kernel has its last
    /// byte.
    SendWrite,
    /// The answer to a READ of the peer, from the start of its frame until the kernel has its last
    /// byte.
    SendAnswer,
    /// The socket accepts no more bytes.
    WaitSocket,
    /// The window is full: as many chunks as allowed are in flight.
    WaitWindow,
    /// The device has not yet copied the payload to be sent, or no slot is free for it.
    WaitStaging,
    // Spans of a lane's receiving half.
    /// The answer to a READ of this session, from its header to its last byte.
    ReceiveAnswer,
    /// A WRITE chunk of the peer, from its header to its last byte.
    ReceiveWrite,
    /// No slot is free to receive into.
    WaitSlot,
    /// The application has not taken earlier messages of the peer: the lane stops reading.
    WaitRoom,
    // Asynchronous events, which overlap.
    /// A transfer was posted.
    Posted,
    /// A transfer waits for a connection, or for the end of an aborted one.
    Queued,
    /// A transfer has ended.
    Ended,
    /// A lane has taken a chunk of this session.
    Taken,
    /// A chunk of this session is settled.
    Settled,
    /// A device has copied memory to the host.
    CopyToHost,
    /// A device has copied memory from the host.
    CopyToDevice,
    /// A device has copied a whole transfer from or to a process on this host.
    CopyOnDevice,
    // Instants.
    /// No pinned slot is free.
    NoSlot,
    /// A lane has lost its stream.
    LaneLost,
    /// A lane has a new stream.
    LaneBack,
}

impl Kind {
    const LAST: Self = Self::LaneBack;

    fn from_u8(value: u8) -> Option<Self> {
        // Every value up to `LAST` is a kind; a test compares them.
        Self::ALL.get(usize::from(value)).copied()
    }

    pub(super) const ALL: [Self; Self::LAST as usize + 1] = [
        Self::Post,
        Self::Sendmsg,
        Self::Recvmsg,
        Self::ProcessVmReadv,
        Self::ProcessVmWritev,
        Self::CopyChunk,
        Self::CpuCopy,
        Self::Sleep,
        Self::SendWrite,
        Self::SendAnswer,
        Self::WaitSocket,
        Self::WaitWindow,
        Self::WaitStaging,
        Self::ReceiveAnswer,
        Self::ReceiveWrite,
        Self::WaitSlot,
        Self::WaitRoom,
        Self::Posted,
        Self::Queued,
        Self::Ended,
        Self::Taken,
        Self::Settled,
        Self::CopyToHost,
        Self::CopyToDevice,
        Self::CopyOnDevice,
        Self::NoSlot,
        Self::LaneLost,
        Self::LaneBack,
    ];
}

/// How a transfer, a chunk or a frame has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum End {
    #[default]
    Done,
    Failed,
    Aborted,
    /// The lane was lost.
    LaneLost,
}

impl End {
    fn from_u8(value: u8) -> Self {
        match value {
            1 => Self::Failed,
            2 => Self::Aborted,
            3 => Self::LaneLost,
            _ => Self::Done,
        }
    }
}

/// The number of a text that is kept beside the records; 0 is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Text(pub(super) u32);

/// A pair of tracks of a lane; 0 is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Track(pub(super) u32);

/// The additional value of a record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Value {
    #[default]
    Nothing,
    /// The result of a system call that moved this many bytes.
    Bytes(u64),
    /// The error of a system call.
    Errno(i32),
    Text(Text),
}

/// One event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(super) kind: Kind,
    pub(super) end: End,
    pub(super) session: u32,
    /// Nanoseconds since the trace was opened.
    pub(super) start: u64,
    pub(super) nanos: u64,
    pub(super) transfer: u64,
    pub(super) seq: u32,
    pub(super) bytes: u64,
    pub(super) track: Track,
    pub(super) text: Text,
    pub(super) value: Value,
}

impl Record {
    pub(crate) fn new(kind: Kind) -> Self {
        Self {
            kind,
            end: End::Done,
            session: 0,
            start: 0,
            nanos: 0,
            transfer: 0,
            seq: 0,
            bytes: 0,
            track: Track(0),
            text: Text(0),
            value: Value::Nothing,
        }
    }

    /// Sets the chunk that the record is about.
    pub(crate) fn chunk(self, transfer: u64, seq: u32) -> Self {
        Self {
            transfer,
            seq,
            ..self
        }
    }

    pub(crate) fn bytes(self, bytes: u64) -> Self {
        Self { bytes, ..self }
    }

    pub(crate) fn track(self, track: Track) -> Self {
        Self { track, ..self }
    }

    pub(crate) fn end(self, end: End) -> Self {
        Self { end, ..self }
    }

    pub(crate) fn value(self, value: Value) -> Self {
        Self { value, ..self }
    }

    pub(crate) fn text(self, text: Text) -> Self {
        Self { text, ..self }
    }

    /// Makes a record of a system call for the same chunk.
    pub(crate) fn of_call(self, kind: Kind) -> Self {
        Self::new(kind).chunk(self.transfer, self.seq)
    }

    pub(super) fn between(self, session: u32, start: u64, end: u64) -> Self {
        Self {
            session,
            start,
            nanos: end.saturating_sub(start),
            ..self
        }
    }

    pub(super) fn encode(&self) -> [u64; WORDS] {
        let (tag, value) = match self.value {
            Value::Nothing => (0, 0),
            Value::Bytes(bytes) => (1, bytes),
            Value::Errno(errno) => (2, u64::from(errno as u32)),
            Value::Text(text) => (3, u64::from(text.0)),
        };
        [
            u64::from_le_bytes([self.kind as u8, self.end as u8, tag, 0, 0, 0, 0, 0])
                | u64::from(self.session) << 32,
            self.start,
            self.nanos,
            self.transfer,
            self.bytes,
            u64::from(self.seq) | u64::from(self.track.0) << 32,
            value,
            u64::from(self.text.0),
        ]
    }

    /// Returns none if the words are not a record.
    pub(super) fn decode(words: &[u64; WORDS]) -> Option<Self> {
        let [kind, end, tag, ..] = words[0].to_le_bytes();
        let value = match tag {
            1 => Value::Bytes(words[6]),
            2 => Value::Errno(words[6] as u32 as i32),
            3 => Value::Text(Text(words[6] as u32)),
            _ => Value::Nothing,
        };
        Some(Self {
            kind: Kind::from_u8(kind)?,
            end: End::from_u8(end),
            session: (words[0] >> 32) as u32,
            start: words[1],
            nanos: words[2],
            transfer: words[3],
            bytes: words[4],
            seq: words[5] as u32,
            track: Track((words[5] >> 32) as u32),
            value,
            text: Text(words[7] as u32),
        })
    }
}
