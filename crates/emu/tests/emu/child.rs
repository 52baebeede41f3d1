//! Runs tests in processes of their own.

use std::process::Command;

/// Variable that names the test for a child.
const CHILD: &str = "EMU_TEST_CHILD";

/// Defines a test that runs alone in a process with these settings (`TCPX_EMU_` is prepended to
/// each).
macro_rules! isolated {
    ($(#[$meta:meta])* fn $name:ident($($key:ident = $value:expr),*) $body:block) => {
        #[test]
        $(#[$meta])*
        fn $name() {
            let name = concat!(module_path!(), "::", stringify!($name));
            $crate::child::run(name, &[$((stringify!($key), $value)),*], || $body);
        }
    };
}

/// Runs `body` in a child process, which is this test again.
pub(crate) fn run(path: &str, settings: &[(&str, &str)], body: impl FnOnce()) {
    // The first part of a module path is the crate, which the test's name does not have.
    let name = path.split_once("::").map_or(path, |(_, name)| name);
    if std::env::var_os(CHILD).is_some_and(|child| child == name) {
        return body();
    }
    let mut command = Command::new(std::env::current_exe().expect("a test knows where it is"));
    command.args([
        "--exact",
        name,
        "--nocapture",
        "--test-threads=1",
        "--include-ignored",
    ]);
    for (key, _) in std::env::vars_os() {
        if key.to_str().is_some_and(|key| key.starts_with("TCPX_EMU_")) {
            command.env_remove(key);
        }
    }
    command.envs(
        settings
            .iter()
            .map(|(key, value)| (format!("TCPX_EMU_{key}"), value)),
    );
    let output = command
        .env(CHILD, name)
        .output()
        .expect("the test can be run again");
    let (stdout, stderr) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{name} failed\n{stdout}\n{stderr}");
    assert!(stdout.contains("1 passed"), "{name} was not run\n{stdout}");
}
