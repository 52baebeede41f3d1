//! The configurations of the tests. This is the one place where a transport is chosen: to run the
//! whole suite on another one, add its settings to [`Setup::base`] or set them in
//! `TCPX_TEST_CONFIG` (`key=value` pairs separated by spaces).

use tcpx::Config;

/// The settings of every session in a test.
#[derive(Clone, Debug)]
pub struct Setup {
    pairs: Vec<(String, String)>,
}

impl Setup {
    /// Returns the common settings: loopback, and lanes even if memory could be copied directly.
    #[must_use]
    pub fn base() -> Self {
        let mut setup = Self { pairs: Vec::new() }
            .with("interfaces", "lo")
            .with("same_host", "off");
        if let Ok(more) = std::env::var("TCPX_TEST_CONFIG") {
            for pair in more.split_whitespace() {
                let (key, value) = pair.split_once('=').expect("key=value");
                setup = setup.with(key, value);
            }
        }
        setup
    }

    /// Returns whether the tests run on a plugin, whose own variables are then part of the test.
    #[must_use]
    pub fn names_a_plugin() -> bool {
        Self::base().pairs.iter().any(|(key, _)| key == "plugin")
    }

    /// Returns one lane, one worker, otherwise the defaults: the smallest setup.
    #[must_use]
    pub fn lanes1_workers1() -> Self {
        Self::base().with("lanes", 1).with("workers", 1)
    }

    /// Returns more lanes than workers, and so few chunks in flight that every limit is reached.
    #[must_use]
    pub fn lanes4_workers1() -> Self {
        let setup = Self::base().with("lanes", 4).with("workers", 1);
        setup.with("chunk_bytes", "64K").with("window", 2)
    }

    /// Returns idle workers, stop-and-wait on the only lane, the smallest chunk.
    #[must_use]
    pub fn lanes1_workers3() -> Self {
        let setup = Self::base().with("lanes", 1).with("workers", 3);
        setup.with("chunk_bytes", "16K").with("window", 1)
    }

    /// Returns lanes that are driven by different threads.
    #[must_use]
    pub fn lanes4_workers3() -> Self {
        Self::base().with("lanes", 4).with("workers", 3)
    }

    /// Returns sockets that take and give a few pages at a time, and workers that sleep at once:
    /// every frame is sent and received in pieces.
    #[must_use]
    pub fn small_buffers() -> Self {
        let setup = Self::base().with("lanes", 2).with("workers", 2);
        let setup = setup.with("socket_buffer_bytes", "64K").with("spin_us", 0);
        setup.with("chunk_bytes", "256K").with("window", 3)
    }

    /// Returns the same on native lanes, whatever the suite runs on: for tests whose other side is
    /// a raw socket.
    #[must_use]
    pub fn native(&self) -> Self {
        self.with("transport", "tcp")
    }

    /// Returns whether a plugin carries the bytes. While its peer is stuck, a plugin releases
    /// memory only when the connection ends.
    #[must_use]
    pub fn is_plugin(&self) -> bool {
        let is = |(key, value): &(String, String)| key == "transport" && value == "plugin";
        self.pairs.iter().any(is)
    }

    /// Returns the same with one more setting.
    #[must_use]
    pub fn with(&self, key: &str, value: impl std::fmt::Display) -> Self {
        let mut pairs = self.pairs.clone();
        pairs.retain(|(k, _)| k != key);
        pairs.push((key.to_owned(), value.to_string()));
        Self { pairs }
    }

    /// Returns the settings of a session of that name.
    #[must_use]
    pub fn pairs(&self, session: &str) -> Vec<(String, String)> {
        self.with("name", session).pairs
    }

    /// Returns the configuration of a session of that name in this process.
    ///
    /// # Panics
    /// When a setting is invalid.
    #[must_use]
    pub fn config(&self, session: &str) -> Config {
        let mut config = Config::defaults();
        for (key, value) in self.pairs(session) {
            config
                .set(&key, &value)
                .unwrap_or_else(|e| panic!("the test's setup: {e}"));
        }
        config
    }

    /// Number of chunks that keep any machine busy for longer than a test needs to interfere.
    pub(crate) const ENDLESS_CHUNKS: usize = 200_000;
}

/// Generates one test of each function for each setup; the functions take `&Setup`.
#[macro_export]
macro_rules! on_every_setup {
    ($($test:ident),+ $(,)?) => {
        $crate::on_setup!(lanes1_workers1: $($test),+);
        $crate::on_setup!(lanes4_workers1: $($test),+);
        $crate::on_setup!(lanes1_workers3: $($test),+);
        $crate::on_setup!(lanes4_workers3: $($test),+);
        $crate::on_setup!(small_buffers: $($test),+);
    };
}

/// Generates one test of each function for the two setups that differ most.
#[macro_export]
macro_rules! on_main_setups {
    ($($test:ident),+ $(,)?) => {
        $crate::on_setup!(lanes1_workers1: $($test),+);
        $crate::on_setup!(lanes4_workers3: $($test),+);
    };
}

/// Generates one test of each function for one setup.
#[macro_export]
macro_rules! on_setup {
    ($setup:ident: $($test:ident),+ $(,)?) => {
        mod $setup {
            $(
                #[test]
                fn $test() {
                    $crate::story(|| super::$test(&$crate::Setup::$setup()));
                }
            )+
        }
    };
}
