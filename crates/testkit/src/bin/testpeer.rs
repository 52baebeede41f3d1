//! The second process of the integration tests: see `tcpx_testkit::serve`, and
//! `tcpx_testkit::flood`.

use rustix::process::{Signal, set_parent_process_death_signal};

fn main() {
    // Ends this process also if the test is killed while this process is stopped.
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        eprintln!("tcpx-testpeer may outlive its test: {error}");
    }
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() == Some("flood") {
        tcpx_testkit::flood::flood(arguments);
    }
    tcpx_testkit::story::log_if_asked();
    tcpx_testkit::serve::serve();
}
