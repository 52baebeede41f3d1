//! Checks that every way of copying gives the right bytes and touches no others.

use tcpx_cuda::{Device, DeviceBuffer, Entry, Error, Path, Pinned, Queue, Range, StandIn, device};

use crate::Outcome;
use crate::bytes::{Random, expect_equal, random_ranges, total};
use crate::rows;

const LEN: usize = 8 << 20;
const POISON: u8 = 0xa5;
const PATHS: [Path; 3] = [Path::Auto, Path::Engine, Path::Kernel];

pub(crate) fn run(ordinal: u32) -> Outcome {
    alignments(ordinal)?;
    for path in PATHS {
        Bench::new(ordinal, path, 1)?.random_lists(12)?;
        println!("check {path:?}: random lists are right");
    }
    Bench::new(ordinal, Path::Kernel, 2)?.lists_alike()?;
    println!("check: lists of ranges that are alike are right");
    for path in [Path::Auto, Path::Engine] {
        Bench::new(ordinal, path, 3)?.grids()?;
    }
    println!("check: ranges at one distance are right");
    rows::run(ordinal)?;
    many_entries(ordinal)?;
    many_lists(ordinal)?;
    many_prepared(ordinal)?;
    full_queue(ordinal)?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|i| {
                scope.spawn(move || Bench::new(ordinal, PATHS[i % 3], i as u64)?.random_lists(4))
            })
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| "a thread panicked")?)
    })?;
    println!("check: 8 threads at once are right");
    Ok(())
}

/// A source and a target on the device, and one on the host.
struct Bench {
    path: Path,
    queue: Box<dyn Queue>,
    source: DeviceBuffer,
    target: DeviceBuffer,
    host: Pinned,
    /// The content of `source`.
    bytes: Vec<u8>,
    random: Random,
}

impl Bench {
    fn new(ordinal: u32, path: Path, seed: u64) -> Outcome<Self> {
        let device = device(ordinal)?;
        let mut random = Random::new(seed + 1);
        let source = DeviceBuffer::alloc(ordinal, LEN)?;
        let bytes = random.bytes(LEN);
        source.copy_from_host(0, &bytes)?;
        Ok(Self {
            path,
            queue: device.queue_by(path)?,
            source,
            target: DeviceBuffer::alloc(ordinal, LEN)?,
            host: device.pin(LEN + 4096)?,
            bytes,
            random,
        })
    }

    fn host(&mut self) -> &mut [u8] {
        // SAFETY: this value owns the memory, and no copy is in flight when this is called.
        unsafe { std::slice::from_raw_parts_mut(self.host.address(), self.host.len()) }
    }

    fn random_lists(&mut self, rounds: usize) -> Outcome {
        for _ in 0..rounds {
            self.gather()?;
            self.scatter()?;
            self.copy()?;
        }
        Ok(())
    }

    fn picked(&self, ranges: &[Range]) -> Vec<u8> {
        let base = self.source.address();
        let slice = |r: &Range| &self.bytes[r.address - base..][..r.len];
        ranges.iter().flat_map(slice).copied().collect()
    }

    /// Returns an offset that is not always aligned.
    fn skew(&mut self) -> usize {
        [0, self.random.below(64)][self.random.below(2)]
    }

    fn gather(&mut self) -> Outcome {
        let ranges = random_ranges(&mut self.random, &self.source, LEN);
        self.gather_of(&ranges)
    }

    fn gather_of(&mut self, ranges: &[Range]) -> Outcome {
        let skip = self.skew();
        self.host().fill(POISON);
        // SAFETY: the buffers stay valid, and nothing else uses them, until the copy is done.
        let ticket = unsafe { self.queue.gather(ranges, self.host.address().add(skip)) }?;
        self.queue.wait(ticket)?;
        let mut expected = vec![POISON; self.host.len()];
        expected[skip..][..total(ranges)].copy_from_slice(&self.picked(ranges));
        let what = format!("gather of {} ranges by {:?}", ranges.len(), self.path);
        expect_equal(&what, self.host(), &expected)
    }

    fn scatter(&mut self) -> Outcome {
        let ranges = random_ranges(&mut self.random, &self.target, LEN);
        self.scatter_of(&ranges)
    }

    fn scatter_of(&mut self, ranges: &[Range]) -> Outcome {
        let skip = self.skew();
        let fresh = self.random.bytes(self.host.len());
        self.host().copy_from_slice(&fresh);
        self.target.fill(POISON)?;
        // SAFETY: the buffers stay valid, and nothing else uses them, until the copy is done.
        let ticket = unsafe { self.queue.scatter(self.host.address().add(skip), ranges) }?;
        self.queue.wait(ticket)?;
        let mut expected = vec![POISON; LEN];
        spread(&fresh[skip..], ranges, self.target.address(), &mut expected);
        self.expect_target("scatter", ranges.len(), &expected)
    }

    /// Copies device to device, once by ranges and once by entries.
    fn copy(&mut self) -> Outcome {
        let (mut from, mut to) = (
            random_ranges(&mut self.random, &self.source, LEN),
            random_ranges(&mut self.random, &self.target, LEN),
        );
        let bytes = total(&from).min(total(&to));
        cut(&mut from, bytes);
        cut(&mut to, bytes);
        self.copy_of(&from, &to)?;

        // Copies the same bytes again, by entries that have the targets' lengths and consecutive
        // sources.
        self.target.fill(POISON)?;
        let mut at = 0;
        let entries: Vec<Entry> = to
            .iter()
            .map(|range| {
                at += range.len;
                Entry {
                    from: (at - range.len) as u32,
                    len: range.len as u32,
                    to: (range.address - self.target.address()) as u64,
                }
            })
            .collect();
        let (from_base, to_base) = (self.source.address(), self.target.address());
        // SAFETY: as above.
        let ticket = unsafe { self.queue.unpack(from_base, to_base, &entries) }?;
        self.queue.wait(ticket)?;
        let mut expected = vec![POISON; LEN];
        spread(&self.bytes, &to, self.target.address(), &mut expected);
        self.expect_target("unpack", entries.len(), &expected)
    }

    fn copy_of(&mut self, from: &[Range], to: &[Range]) -> Outcome {
        let mut expected = vec![POISON; LEN];
        let picked = self.picked(from);
        spread(&picked, to, self.target.address(), &mut expected);
        self.target.fill(POISON)?;
        // SAFETY: the buffers stay valid, and nothing else uses them, until the copy is done.
        let ticket = unsafe { self.queue.copy(from, to) }?;
        self.queue.wait(ticket)?;
        self.expect_target("copy", from.len(), &expected)?;
        self.target.fill(POISON)?;
        let prepared = self.source.device().prepare(from, to)?;
        // SAFETY: as above.
        let ticket = unsafe { self.queue.run(&prepared) }?;
        self.queue.wait(ticket)?;
        self.expect_target("prepared copy", from.len(), &expected)
    }

    /// Checks lists whose ranges all have the same length, with counts around all limits.
    fn lists_alike(&mut self) -> Outcome {
        const COUNTS: [usize; 9] = [63, 64, 65, 127, 300, 496, 497, 1500, 5000];
        for len in [
            1_usize, 15, 16, 33, 48, 512, 1000, 4096, 4100, 9000, 40_000, 65_535,
        ] {
            let apart = len.next_multiple_of(16) + 16 * self.random.below(3);
            let most = (LEN - 64) / apart;
            for count in COUNTS.into_iter().filter(|&count| count <= most) {
                let mut places = |base: usize| {
                    let start = base + [0, self.random.below(64)][self.random.below(2)];
                    let place = |i: usize| Range {
                        address: start + i * apart,
                        len,
                    };
                    let mut places: Vec<Range> = (0..most).map(place).collect();
                    self.random.shuffle(&mut places);
                    places.truncate(count);
                    places
                };
                let (from, to) = (places(self.source.address()), places(self.target.address()));
                self.gather_of(&from)?;
                self.scatter_of(&to)?;
                self.copy_of(&from, &to)?;
            }
        }
        Ok(())
    }

    /// Checks ranges of one length at one distance, with others before and after.
    fn grids(&mut self) -> Outcome {
        for len in [1_usize, 255, 256, 1000, 4096, 4100, 16_384, 70_000] {
            let odd = [1, 3 * len + 5][self.random.below(2)];
            for gap in [16, odd] {
                let most = LEN / 2 / (len + gap);
                for count in [2 + self.random.below(2), most.min(900)] {
                    let mut list = |base: usize| {
                        let odd = |at: usize| Range {
                            address: base + at,
                            len: 1 + self.random.below(5000),
                        };
                        let edges = [0, LEN - 5000].map(odd);
                        let start = base + 5000 + self.random.below(64);
                        let row = |i: usize| Range {
                            address: start + i * (len + gap),
                            len,
                        };
                        let mut list: Vec<Range> = (0..count).map(row).collect();
                        list.insert(0, edges[0]);
                        list.push(edges[1]);
                        list
                    };
                    let (from, to) = (list(self.source.address()), list(self.target.address()));
                    self.gather_of(&from)?;
                    self.scatter_of(&to)?;
                }
            }
        }
        Ok(())
    }

    fn expect_target(&self, what: &str, ranges: usize, expected: &[u8]) -> Outcome {
        let mut found = vec![0; LEN];
        self.target.copy_to_host(0, &mut found)?;
        expect_equal(
            &format!("{what} of {ranges} ranges by {:?}", self.path),
            &found,
            expected,
        )
    }
}

/// Shortens a list to a number of bytes.
fn cut(ranges: &mut Vec<Range>, mut bytes: usize) {
    ranges.retain_mut(|range| {
        range.len = range.len.min(bytes);
        bytes -= range.len;
        range.len > 0
    });
}

/// Applies to `memory`, which begins at `base`, the effect of a scatter of `bytes`.
fn spread(bytes: &[u8], ranges: &[Range], base: usize, memory: &mut [u8]) {
    let mut rest = bytes;
    for range in ranges {
        let (now, later) = rest.split_at(range.len);
        memory[range.address - base..][..range.len].copy_from_slice(now);
        rest = later;
    }
}

/// Checks every alignment of source and target, with lengths around all limits, in one launch.
fn alignments(ordinal: u32) -> Outcome {
    const LENGTHS: [usize; 22] = [
        1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 100, 255, 511, 1000, 4095, 4096, 4097, 8191, 8192,
        8193, 100_000,
    ];
    let mut random = Random::new(3);
    let source = DeviceBuffer::alloc(ordinal, 1 << 20)?;
    let bytes = random.bytes(source.len());
    source.copy_from_host(0, &bytes)?;
    let (mut from, mut to, mut at) = (Vec::new(), Vec::new(), 0);
    for source_skew in 0..16 {
        for target_skew in 0..16 {
            for len in LENGTHS {
                let start = random.below(source.len() - len - 32) & !15;
                at = (at + 32) & !15;
                from.push((start + source_skew, len));
                to.push((at + target_skew, len));
                at += target_skew + len;
            }
        }
    }
    let target = DeviceBuffer::alloc(ordinal, at + 32)?;
    let mut expected = vec![POISON; target.len()];
    for (&(from, len), &(to, _)) in from.iter().zip(&to) {
        expected[to..][..len].copy_from_slice(&bytes[from..][..len]);
    }
    let ranges = |list: &[(usize, usize)], base: usize| -> Vec<Range> {
        let range = |&(at, len): &(usize, usize)| Range {
            address: base + at,
            len,
        };
        list.iter().map(range).collect()
    };
    let (from, to) = (
        ranges(&from, source.address()),
        ranges(&to, target.address()),
    );
    for path in [Path::Engine, Path::Kernel] {
        let mut queue = device(ordinal)?.queue_by(path)?;
        target.fill(POISON)?;
        // SAFETY: the buffers stay valid, and nothing else uses them, until the copy is done.
        let ticket = unsafe { queue.copy(&from, &to) }?;
        queue.wait(ticket)?;
        let mut found = vec![0; target.len()];
        target.copy_to_host(0, &mut found)?;
        expect_equal(&format!("alignments by {path:?}"), &found, &expected)?;
    }
    println!(
        "check: {} pieces of all alignments and lengths are right",
        to.len()
    );
    Ok(())
}

/// Checks more entries than fit the queue at once.
fn many_entries(ordinal: u32) -> Outcome {
    const COUNT: usize = 200_000;
    const SIZE: usize = 48;
    let mut random = Random::new(5);
    let source = DeviceBuffer::alloc(ordinal, COUNT * SIZE)?;
    let bytes = random.bytes(source.len());
    source.copy_from_host(0, &bytes)?;
    let mut order: Vec<usize> = (0..COUNT).collect();
    random.shuffle(&mut order);
    let ranges: Vec<Range> = order
        .iter()
        .map(|i| Range {
            address: source.address() + i * SIZE,
            len: SIZE,
        })
        .collect();
    let expected: Vec<u8> = order
        .iter()
        .flat_map(|i| &bytes[i * SIZE..][..SIZE])
        .copied()
        .collect();
    let device = device(ordinal)?;
    let host = device.pin(source.len())?;
    for path in [Path::Auto, Path::Kernel] {
        let mut queue = device.queue_by(path)?;
        // SAFETY: the buffers stay valid, and nothing else uses them, until the copy is done.
        let found = unsafe {
            std::ptr::write_bytes(host.address(), POISON, host.len());
            let ticket = queue.gather(&ranges, host.address())?;
            queue.wait(ticket)?;
            std::slice::from_raw_parts(host.address(), host.len())
        };
        expect_equal(&format!("{COUNT} entries by {path:?}"), found, &expected)?;
    }
    println!("check: {COUNT} entries in one call are right");
    Ok(())
}

/// Checks prepared lists in flight at once, each dropped as soon as it was started: the layout of
/// one is not overwritten by the next before it was read. Queues of other devices refuse them.
fn many_prepared(ordinal: u32) -> Outcome {
    const SIZE: usize = 16;
    const LISTS: usize = 200;
    let mut random = Random::new(11);
    let source = DeviceBuffer::alloc(ordinal, 1 << 20)?;
    let bytes = random.bytes(source.len());
    source.copy_from_host(0, &bytes)?;
    let target = DeviceBuffer::alloc(ordinal, LISTS * 1000 * SIZE)?;
    target.fill(POISON)?;
    let device = device(ordinal)?;
    let mut queue = device.queue()?;
    let mut others = vec![StandIn::new(1).queue()?];
    for info in tcpx_cuda::devices()? {
        if info.ordinal != ordinal {
            others.push(tcpx_cuda::device(info.ordinal)?.queue()?);
        }
    }
    let mut expected = vec![POISON; target.len()];
    for list in 0..LISTS {
        // Some become kernel parameters, some a table; some have equal lengths, some do not.
        let (count, shorter) = ([100, 700, 1000][random.below(3)], random.below(2));
        let (mut from, mut to) = (Vec::new(), Vec::new());
        for i in 0..count {
            let len = SIZE - shorter * (i % 2);
            let (start, end) = (
                SIZE * random.below(source.len() / SIZE),
                (list * 1000 + i) * SIZE,
            );
            from.push(Range {
                address: source.address() + start,
                len,
            });
            to.push(Range {
                address: target.address() + end,
                len,
            });
            expected[end..][..len].copy_from_slice(&bytes[start..][..len]);
        }
        let prepared = device.prepare(&from, &to)?;
        if prepared.bytes() != total(&from) as u64 {
            return Err(format!("{prepared:?} is not {} bytes long", total(&from)).into());
        }
        // SAFETY: the buffers stay valid, and nothing else uses them, until the copies are done.
        while let Err(error) = unsafe { queue.run(&prepared) } {
            match error {
                Error::QueueFull { .. } => std::thread::yield_now(),
                error => return Err(error.into()),
            }
        }
        for other in &mut others {
            // SAFETY: nothing is started.
            match unsafe { other.run(&prepared) } {
                Err(Error::OtherDevice) => {}
                other => return Err(format!("another device's queue gives {other:?}").into()),
            }
        }
    }
    drop(queue);
    let mut found = vec![0; target.len()];
    target.copy_to_host(0, &mut found)?;
    expect_equal("prepared lists", &found, &expected)?;
    println!("check: {LISTS} prepared lists, dropped while they run, are right");
    Ok(())
}

/// Checks lists of all sizes in flight at once, as many as the queue takes: none disturbs another.
fn many_lists(ordinal: u32) -> Outcome {
    const SIZE: usize = 64;
    let mut random = Random::new(7);
    let source = DeviceBuffer::alloc(ordinal, 1 << 20)?;
    let bytes = random.bytes(source.len());
    source.copy_from_host(0, &bytes)?;
    let device = device(ordinal)?;
    let mut expected = Vec::new();
    let lists: Vec<(usize, Vec<Range>)> = (0..600)
        .map(|_| {
            // Mostly few enough to be kernel parameters, at times so many that the table grows.
            // Some have equal lengths, some do not.
            let count = [3, 100, 600, 9000][random.below(40).min(3 * 13) / 13];
            let shorter = random.below(2);
            let at = expected.len();
            let list = (0..1 + random.below(count)).map(|i| {
                let from = random.below(source.len() / SIZE) * SIZE;
                let len = if i == 0 { SIZE - shorter } else { SIZE };
                expected.extend_from_slice(&bytes[from..][..len]);
                Range {
                    address: source.address() + from,
                    len,
                }
            });
            (at, list.collect())
        })
        .collect();
    let host = device.pin(expected.len())?;
    let mut queue = device.queue()?;
    let mut last = None;
    for (at, list) in &lists {
        last = loop {
            // SAFETY: the buffers stay valid, and nothing else uses them, until the copies are
            // done.
            match unsafe { queue.gather(list, host.address().add(*at)) } {
                Err(Error::QueueFull { .. }) => std::thread::yield_now(),
                other => break Some(other?),
            }
        };
    }
    queue.wait(last.ok_or("no list")?)?;
    // SAFETY: no copy is in flight.
    let found = unsafe { std::slice::from_raw_parts(host.address(), host.len()) };
    expect_equal("many lists at once", found, &expected)?;
    println!("check: {} lists at once are right", lists.len());
    Ok(())
}

/// Checks that a full queue reports it, starts nothing, and works again later, and that an empty
/// list completes with the copies before it.
fn full_queue(ordinal: u32) -> Outcome {
    let buffer = DeviceBuffer::alloc(ordinal, 256 << 20)?;
    let device = device(ordinal)?;
    let mut queue = device.queue()?;
    let half = buffer.len() / 2;
    let range = |at: usize| {
        [Range {
            address: buffer.address() + at,
            len: half,
        }]
    };
    let mut last = None;
    let mut was_full = false;
    for _ in 0..300 {
        // SAFETY: the buffer stays valid, and nothing else uses it, until the copies are done.
        match unsafe { queue.copy(&range(0), &range(half)) } {
            Ok(ticket) => last = Some(ticket),
            Err(Error::QueueFull { .. }) => {
                was_full = true;
                break;
            }
            Err(error) => return Err(error.into()),
        }
    }
    let last = last.ok_or("not even one copy was accepted")?;
    if !was_full {
        return Err("300 copies of 128 MiB never filled a queue".into());
    }
    queue.wait(last)?;
    // SAFETY: nothing is copied.
    let empty = unsafe { queue.copy(&[], &[]) }?;
    queue.wait(empty)?;
    println!("check: a full queue says so and recovers");
    Ok(())
}
