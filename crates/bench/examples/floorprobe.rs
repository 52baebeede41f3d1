use std::io::*;
use std::time::*;
use tcpx_bench::floor::*;
use tcpx_bench::workload::*;
fn cpu() -> f64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 / 1e9
}
const NONCE: Nonce = [7; 16];
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let child = a[1] == "child";
    let streams: usize = a[2].parse().unwrap();
    let total: u64 = a[3].parse().unwrap();
    let block: u64 = a[4].parse().unwrap();
    let call: usize = a[5].parse().unwrap();
    let op = if a[6] == "r" { Op::Read } else { Op::Write };
    let iters: u32 = a[7].parse().unwrap();
    let waiting = if a[8] == "poll" {
        Waiting::Poll
    } else {
        Waiting::Block
    };
    let shape = Shape::new(op, total, block, true).unwrap();
    let t = Tuning {
        call_bytes: call,
        waiting,
    };
    let mut mem = vec![1u8; total as usize + 4096];
    let pad = mem.as_ptr().align_offset(4096);
    let mem = &mut mem[pad..][..total as usize];
    let d = Duration::from_secs(5);
    if child {
        let l = Listener::bind([127, 0, 0, 1].into(), NONCE).unwrap();
        println!("{}", l.port().unwrap());
        let s = l.accept(streams, d).unwrap();
        let spans = shape.spans(Side::Target);
        s.serve(op, mem, &spans, 3, t).unwrap();
        let c = cpu();
        s.serve(op, mem, &spans, iters, t).unwrap();
        println!("{}", cpu() - c);
        if op == Op::Write {
            verify(&shape, Pattern::new(1), mem).unwrap();
        }
    } else {
        Pattern::new(1).fill(0, mem);
        let mut c = std::process::Command::new(std::env::current_exe().unwrap())
            .arg("child")
            .args(&a[2..])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = BufReader::new(c.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let port: u16 = line.trim().parse().unwrap();
        let s = Streams::connect(([127, 0, 0, 1], port).into(), NONCE, streams, d).unwrap();
        let spans = shape.spans(Side::Initiator);
        s.initiate(op, mem, &spans, 3, t).unwrap();
        let c0 = cpu();
        let mut v = s.initiate(op, mem, &spans, iters, t).unwrap();
        let own = cpu() - c0;
        line.clear();
        out.read_line(&mut line).unwrap();
        let theirs: f64 = line.trim().parse().unwrap();
        assert!(c.wait().unwrap().success());
        v.sort();
        let med = v[v.len() / 2].as_secs_f64();
        println!(
            "{op} total {total} block {block} streams {streams} call {call} {waiting:?}: median {:.2} GB/s (best {:.2} worst {:.2})  {:.1} us  cpu {:.3} s/GB (init {:.3})",
            total as f64 / 1e9 / med,
            total as f64 / 1e9 / v[0].as_secs_f64(),
            total as f64 / 1e9 / v[v.len() - 1].as_secs_f64(),
            med * 1e6,
            (own + theirs) / (total as f64 * iters as f64 / 1e9),
            own / (total as f64 * iters as f64 / 1e9)
        );
    }
}
