//! Configurations.

use std::ffi::{CString, c_char, c_void};

use tcpx::Config;

use crate::ffi::{self, Boxed, borrow, borrow_mut, out, take, text};
use crate::status::{Failure, c_text, tcpx_status};

/// Configuration of a session: defaults of this machine, then the environment, then values set.
pub struct tcpx_config {
    pub(crate) config: Config,
}

impl Boxed for tcpx_config {
    const BELONGS_TO_PROCESS: bool = false;
}

/// One setting; valid while the callback that received it runs.
#[repr(C)]
#[derive(Debug)]
pub struct tcpx_config_row {
    /// Size of this struct in bytes; later versions add fields at its end.
    pub size: usize,
    /// The key, as passed to `tcpx_config_set`.
    pub key: *const c_char,
    /// The environment variable.
    pub variable: *const c_char,
    /// The value in force.
    pub value: *const c_char,
    /// The origin of the value.
    pub source: *const c_char,
    /// A description of the setting.
    pub help: *const c_char,
    /// The reason for the default.
    pub reason: *const c_char,
}

/// Receives one setting. Must not unwind.
pub type tcpx_config_row_fn =
    Option<unsafe extern "C" fn(context: *mut c_void, row: *const tcpx_config_row)>;

/// Creates a configuration with the defaults of this machine; ignores the environment.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_config_defaults(config: *mut *mut tcpx_config) -> tcpx_status {
    ffi::call(|| {
        let out = out!(config)?;
        out.give(tcpx_config {
            config: Config::defaults(),
        });
        Ok(())
    })
}

/// Creates a configuration with the defaults, overridden by the `TCPX_` variables of the
/// environment.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_config_from_env(config: *mut *mut tcpx_config) -> tcpx_status {
    ffi::call(|| {
        let out = out!(config)?;
        out.give(tcpx_config {
            config: Config::from_env()?,
        });
        Ok(())
    })
}

/// Sets one value by its key, such as "lanes", or by its variable, such as "TCPX_LANES".
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_config_set(
    config: *mut tcpx_config,
    key: *const c_char,
    value: *const c_char,
) -> tcpx_status {
    ffi::call(|| {
        let config = borrow_mut!(config)?;
        Ok(config.config.set(text!(key)?, text!(value)?)?)
    })
}

/// Passes every setting to `callback`, with `context`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_config_each(
    config: *const tcpx_config,
    callback: tcpx_config_row_fn,
    context: *mut c_void,
) -> tcpx_status {
    ffi::call(|| {
        let config = borrow!(config)?;
        let callback = callback.ok_or(Failure::Null("callback"))?;
        for row in config.config.rows() {
            let variable = row.variables.first().copied().unwrap_or_default();
            let source = row.source.to_string();
            let texts: [CString; 6] = [
                row.key,
                variable,
                &row.value,
                &source,
                &row.help,
                &row.reason,
            ]
            .map(c_text);
            let [key, variable, value, source, help, reason] = texts.each_ref().map(|t| t.as_ptr());
            let row = tcpx_config_row {
                size: size_of::<tcpx_config_row>(),
                key,
                variable,
                value,
                source,
                help,
                reason,
            };
            // SAFETY: C passed the function to be called with its context; `row` outlives the call.
            unsafe { callback(context, &raw const row) };
        }
        Ok(())
    })
}

/// Frees a configuration; sessions made from it are not affected.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tcpx_config_free(config: *mut tcpx_config) {
    ffi::end(take!(config));
}
