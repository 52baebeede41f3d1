//! Simulates the work of a model, so that a device is busy while memory is moved.

use std::ffi::{CStr, c_uint, c_void};
use std::sync::Arc;

use crate::buffer::DeviceBuffer;
use crate::context::{Context, log};
use crate::error::Error;
use crate::stream::Stream;
use crate::sys;

/// The kernels, as PTX.
const PTX: &CStr = match CStr::from_bytes_with_nul(
    concat!(include_str!("../kernels/load.ptx"), "\0").as_bytes(),
) {
    Ok(text) => text,
    Err(_) => panic!("load.ptx contains a zero byte"),
};

/// Threads of a block, rows of a block's tile, as in `kernels/load.cu`.
const THREADS: c_uint = 256;
const TILE: usize = 128;

/// Columns of the matrix that [`Work::Decode`] reads: rows of 8 KiB.
const DECODE_COLUMNS: usize = 2048;

/// Number of results that [`Load::is_right`] recomputes.
const SAMPLES: usize = 16;

/// The work of one iteration of a [`Load`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Multiplies two square matrices of halves on the tensor cores, as prefill does. The side is
    /// rounded up to a multiple of 128.
    Matmul {
        /// Rows and columns of each matrix.
        side: usize,
    },
    /// Copies memory within the device, by the driver.
    Copy {
        /// Length in bytes.
        bytes: usize,
    },
    /// Multiplies a matrix and a vector many times, each by a launch of its own, all in one CUDA
    /// graph, as decoding does.
    Decode {
        /// Rows of the matrix, 8 KiB each.
        rows: usize,
        /// Launches of the graph.
        launches: usize,
    },
}

/// Repeats work on a device, on a stream of its own.
///
/// [`Load::start`] queues one iteration, [`Load::wait`] waits for all of them.
#[derive(Debug)]
pub struct Load {
    work: Work,
    graph: Option<Graph>,
    kernels: Option<Kernels>,
    /// Two sources, if any, and the target, which is the last.
    buffers: Vec<DeviceBuffer>,
    stream: Stream,
    context: Arc<Context>,
}

// SAFETY: memory, a stream and a graph of the device: handles that the driver allows on any thread.
unsafe impl Send for Load {}

impl Load {
    /// Allocates and fills the memory for the work on device `ordinal`.
    ///
    /// # Errors
    /// There is no such device, it has not enough memory, or the driver refuses the kernels.
    pub fn new(ordinal: u32, work: Work) -> Result<Self, Error> {
        let context = Context::primary(sys::initialised()?, ordinal)?;
        let work = match work {
            Work::Matmul { side } => Work::Matmul {
                side: side.max(1).next_multiple_of(TILE),
            },
            other => other,
        };
        let halves = |seed| move |i: usize| half(seed, i).to_le_bytes();
        let floats = |seed| move |i: usize| value(half(seed, i)).to_le_bytes();
        let buffers = match work {
            Work::Matmul { side } => vec![
                filled(ordinal, side * side, halves(1))?,
                filled(ordinal, side * side, halves(2))?,
                DeviceBuffer::alloc(ordinal, side * side * size_of::<f32>())?,
            ],
            Work::Copy { bytes } => {
                let source = DeviceBuffer::alloc(ordinal, bytes)?;
                source.fill(0x5a)?;
                vec![source, DeviceBuffer::alloc(ordinal, bytes)?]
            }
            Work::Decode { rows, .. } => vec![
                filled(ordinal, rows * DECODE_COLUMNS, floats(1))?,
                filled(ordinal, DECODE_COLUMNS, floats(2))?,
                DeviceBuffer::alloc(ordinal, rows * size_of::<f32>())?,
            ],
        };
        // Cleared, so that old content cannot pass for a result.
        buffers[buffers.len() - 1].fill(0)?;
        let mut load = Self {
            work,
            graph: None,
            kernels: match work {
                Work::Copy { .. } => None,
                _ => Some(Kernels::new(&context)?),
            },
            buffers,
            stream: Stream::new(&context)?,
            context,
        };
        if let Work::Decode { rows, launches } = work {
            load.graph = Some(load.capture(rows, launches)?);
        }
        Ok(load)
    }

    /// Queues one iteration, and does not wait for it.
    ///
    /// # Errors
    /// The driver refuses, or an earlier iteration has failed.
    pub fn start(&self) -> Result<(), Error> {
        let api = self.context.api;
        let _scope = self.context.enter()?;
        match (self.work, &self.graph) {
            (Work::Matmul { side }, _) => {
                let tiles = (side / TILE) as c_uint;
                self.launch(c"tcpx_load_matmul", (tiles, tiles), side)
            }
            (Work::Copy { bytes }, _) => {
                let (from, to) = (self.buffers[0].address(), self.buffers[1].address());
                // SAFETY: both buffers have that many bytes and live until `drop` has waited.
                let code = unsafe {
                    (api.memcpy_dtod_async)(to as u64, from as u64, bytes, self.stream.raw)
                };
                api.check(code, "copying within the device")
            }
            (Work::Decode { .. }, None) => Ok(()),
            (Work::Decode { .. }, Some(graph)) => {
                // SAFETY: the graph's kernels use buffers that live until `drop` has waited.
                let code = unsafe { (api.graph_launch)(graph.raw, self.stream.raw) };
                api.check(code, "launching a graph")
            }
        }
    }

    /// Waits until every started iteration is done.
    ///
    /// # Errors
    /// One of them has failed.
    pub fn wait(&self) -> Result<(), Error> {
        let _scope = self.context.enter()?;
        // SAFETY: the stream belongs to this value.
        let code = unsafe { (self.context.api.stream_synchronize)(self.stream.raw) };
        self.context.api.check(code, "working on the device")
    }

    /// Returns whether the results of the iterations so far, at least one, are right: the CPU
    /// recomputes a few of them. Blocks.
    ///
    /// # Errors
    /// As [`Load::wait`].
    pub fn is_right(&self) -> Result<bool, Error> {
        self.wait()?;
        let target = &self.buffers[self.buffers.len() - 1];
        let float = |at: usize| {
            let mut bytes = [0; size_of::<f32>()];
            target.copy_to_host(at * bytes.len(), &mut bytes)?;
            Ok::<_, Error>(f64::from(f32::from_le_bytes(bytes)))
        };
        // `inner` products were added; their factors are at most 1.
        let is_near =
            |found: f64, right: f64, inner: usize| (found - right).abs() < inner as f64 * 1e-5;
        match self.work {
            Work::Matmul { side } => all(side * side, |at| {
                let products = (0..side)
                    .map(|k| product(half(1, at / side * side + k), half(2, k * side + at % side)));
                Ok(is_near(float(at)?, products.sum(), side))
            }),
            Work::Copy { bytes } => all(bytes, |at| {
                let mut byte = [0];
                target.copy_to_host(at, &mut byte)?;
                Ok(byte == [0x5a])
            }),
            Work::Decode { rows, .. } => all(rows, |row| {
                let products = (0..DECODE_COLUMNS)
                    .map(|k| product(half(1, row * DECODE_COLUMNS + k), half(2, k)));
                Ok(is_near(float(row)?, products.sum(), DECODE_COLUMNS))
            }),
        }
    }

    /// Captures the graph of [`Work::Decode`].
    fn capture(&self, rows: usize, launches: usize) -> Result<Graph, Error> {
        let api = self.context.api;
        let _scope = self.context.enter()?;
        // SAFETY: the stream belongs to this value, and nothing else uses it.
        let code = unsafe { (api.stream_begin_capture)(self.stream.raw, sys::CAPTURE_RELAXED) };
        api.check(code, "beginning a graph")?;
        let launched = (0..launches).try_for_each(|_| {
            let grid = (rows as c_uint, 1);
            self.launch(c"tcpx_load_decode", grid, DECODE_COLUMNS)
        });
        let mut graph = std::ptr::null_mut();
        // SAFETY: as above; stores a handle. The capture ends also if a launch was refused.
        let code = unsafe { (api.stream_end_capture)(self.stream.raw, &mut graph) };
        launched?;
        api.check(code, "ending a graph")?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: stores a handle; the instantiated graph does not need the captured one.
        let code = unsafe {
            let code = (api.graph_instantiate)(&mut raw, graph, 0);
            log(api, (api.graph_destroy)(graph), "closing a graph");
            code
        };
        api.check(code, "instantiating a graph")?;
        Ok(Graph {
            context: Arc::clone(&self.context),
            raw,
        })
    }

    /// Launches a kernel on the three buffers and a length. The context must be current.
    fn launch(&self, name: &CStr, grid: (c_uint, c_uint), len: usize) -> Result<(), Error> {
        let api = self.context.api;
        let kernels = self.kernels.as_ref().expect("the work has kernels");
        let function = kernels.function(name)?;
        let mut addresses = [0, 1, 2].map(|i| self.buffers[i].address() as sys::DevicePtr);
        let mut len = len as c_uint;
        let [a, b, c] = &mut addresses;
        let mut arguments: [*mut c_void; 4] = [
            (&raw mut *a).cast(),
            (&raw mut *b).cast(),
            (&raw mut *c).cast(),
            (&raw mut len).cast(),
        ];
        // SAFETY: the arguments are those of both kernels, which stay within the buffers for these
        // grids. The driver copies the arguments before it returns.
        let code = unsafe {
            (api.launch_kernel)(
                function,
                grid.0,
                grid.1,
                1,
                THREADS,
                1,
                1,
                0,
                self.stream.raw,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        api.check(code, "launching a kernel of the load")
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // Before the memory is freed. A failure was reported to the caller that waited for the
        // work.
        let _ = self.wait();
    }
}

/// The module of the kernels.
#[derive(Debug)]
struct Kernels {
    context: Arc<Context>,
    module: sys::Module,
}

impl Kernels {
    fn new(context: &Arc<Context>) -> Result<Self, Error> {
        let _scope = context.enter()?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the text ends with a zero byte.
        let code =
            unsafe { (context.api.module_load_data)(&mut module, PTX.as_ptr().cast::<c_void>()) };
        context
            .api
            .check(code, "compiling the kernels of the load")?;
        Ok(Self {
            context: Arc::clone(context),
            module,
        })
    }

    /// Finds a kernel. The context must be current.
    fn function(&self, name: &CStr) -> Result<sys::Function, Error> {
        let mut function = std::ptr::null_mut();
        // SAFETY: the module belongs to this value, and the name ends with a zero byte.
        let code = unsafe {
            (self.context.api.module_get_function)(&mut function, self.module, name.as_ptr())
        };
        let asked = "finding a kernel of the load";
        self.context.api.check(code, asked).map(|()| function)
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        if let Ok(_scope) = self.context.enter() {
            // SAFETY: the load, the only user of the kernels, has waited for them.
            let code = unsafe { (self.context.api.module_unload)(self.module) };
            log(self.context.api, code, "unloading the kernels of the load");
        }
    }
}

/// A graph that can be launched.
#[derive(Debug)]
struct Graph {
    context: Arc<Context>,
    raw: sys::GraphExec,
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(_scope) = self.context.enter() {
            // SAFETY: the graph belongs to this value; the load has waited for it.
            let code = unsafe { (self.context.api.graph_exec_destroy)(self.raw) };
            log(self.context.api, code, "closing a graph");
        }
    }
}

/// Allocates memory of `count` elements and fills it.
fn filled<const N: usize>(
    ordinal: u32,
    count: usize,
    element: impl Fn(usize) -> [u8; N],
) -> Result<DeviceBuffer, Error> {
    let buffer = DeviceBuffer::alloc(ordinal, count * N)?;
    let bytes: Vec<u8> = (0..count).flat_map(element).collect();
    buffer.copy_from_host(0, &bytes)?;
    Ok(buffer)
}

/// Returns a half of either sign, 0.5 or more and below 1. The values differ, since a GPU's clock
/// depends on the values that its multipliers process.
fn half(seed: u64, index: usize) -> u16 {
    let mixed = (index as u64 ^ (seed << 40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    0x3800 | ((mixed >> 48) as u16 & 0x83ff)
}

/// Returns the numeric value of a [`half`].
fn value(half: u16) -> f32 {
    let sign = if half & 0x8000 == 0 { 1.0 } else { -1.0 };
    sign * (1024 + (half & 0x3ff)) as f32 / 2048.0
}

fn product(left: u16, right: u16) -> f64 {
    f64::from(value(left)) * f64::from(value(right))
}

/// Returns whether a few results below `count`, including the first and the last, are right.
fn all(
    count: usize,
    mut is_right: impl FnMut(usize) -> Result<bool, Error>,
) -> Result<bool, Error> {
    for sample in 0..SAMPLES {
        // Steps that are no multiple of any tile size.
        let spread = sample * (count / SAMPLES) + sample * 37;
        let at = if sample + 1 == SAMPLES {
            count - 1
        } else {
            spread.min(count - 1)
        };
        if !is_right(at)? {
            return Ok(false);
        }
    }
    Ok(true)
}
