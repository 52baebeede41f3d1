//! Configurations.

use std::ffi::{CString, c_char, c_void};

use tcpx::Config;

use crate::ffi::{self, Boxed, borrow, borrow_mut, out, take, text};
use crate::status::{Failure, c_text, tcpx_status};

/// How a session behaves: defaults of this machine, then the environment, then what is set.
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
    /// Bytes in this struct; later versions add fields at its end.
    pub size: usize,
    /// The key, as `tcpx_config_set` takes it.
    pub key: *const c_char,
    /// The environment variable.
    pub variable: *const c_char,
    /// The value in force.
    pub value: *const c_char,
    /// Where the value came from.
    pub source: *const c_char,
    /// What the setting does.
    pub help: *const c_char,
    /// Why the default is what it is.
    pub reason: *const c_char,
}

/// Receives one setting. Must not unwind.
pub type tcpx_config_row_fn =
    Option<unsafe extern "C" fn(context: *mut c_void, row: *const tcpx_config_row)>;

/// The defaults of this machine; the environment is not looked at.
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

/// The defaults, overridden by the `TCPX_` variables of the environment.
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

/// Sets one value by its key, such as "lanes", or by the name of its variable, such as "TCPX_LANES".
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

/// Hands every setting to `callback`, with `context`.
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
            // SAFETY: C gave the function to be called with its context; `row` outlives the call.
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
