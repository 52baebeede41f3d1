//! Tests a plugin that fails and logs the reason on a thread of its own. Alone in its process: the
//! plugin and thread of a warning are unknown, so the last one of all is reported.

#[allow(
    dead_code,
    reason = "shared with the other tests, which use more of it"
)]
#[path = "plugins/build.rs"]
mod build;

use tcpx_ncclnet::{Code, Error, Plugin};

#[test]
fn a_warning_of_the_plugins_own_thread_is_not_lost() {
    let library = build::plugin("log-thread", 7, &["-DLOG_THREAD"]);
    assert_eq!(
        Plugin::open(build::path(&library)).unwrap_err(),
        Error::Call {
            call: "init",
            code: Code(2),
            warning: Some("said by a thread of the plugin".into()),
        }
    );
}
