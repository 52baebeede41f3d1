//! Parts of a setting: a [`Row`] with a value type, and [`Setting`], which hides the type.

use super::form::Form;
use super::{ConfigError, ConfigRow, Source, Values};

/// A value with its source.
#[derive(Clone, Debug, Default)]
pub(super) struct Held<T> {
    pub(super) value: T,
    pub(super) source: Source,
}

/// The default of a setting.
pub(super) enum DefaultValue<T> {
    /// The same on all machines; formatted by the form.
    Fixed(fn() -> T),
    /// Derived from the machine, or from settings in rows above.
    Derived {
        of: fn(&Values) -> T,
        /// Describes the default for all machines.
        text: fn() -> String,
    },
}

/// The definition of one setting.
///
/// The row is the only place that knows a setting's range and default: parsing, typed setters,
/// `expected` in errors, `tcpx config` and the reference table in the documentation are derived
/// from it.
pub(super) struct Row<F: Form> {
    pub(super) key: &'static str,
    pub(super) variables: &'static [&'static str],
    /// Describes the effect of the setting in complete sentences.
    pub(super) help: fn() -> String,
    /// The accepted values.
    pub(super) form: F,
    pub(super) default: DefaultValue<F::Value>,
    /// Explains the default, as a continuation of "default: ".
    pub(super) why: fn() -> String,
    pub(super) get: fn(&Values) -> &Held<F::Value>,
    pub(super) get_mut: fn(&mut Values) -> &mut Held<F::Value>,
}

impl<F: Form> Row<F> {
    /// Sets a typed value on behalf of the program.
    pub(super) fn put(&self, values: &mut Values, value: F::Value) -> Result<(), ConfigError> {
        if !self.form.accepts(&value) {
            return Err(self.bad(self.key, &self.form.show(&value)));
        }
        *(self.get_mut)(values) = Held {
            value,
            source: Source::Explicit,
        };
        Ok(())
    }

    fn bad(&self, name: &str, value: &str) -> ConfigError {
        ConfigError::BadValue {
            name: name.to_owned(),
            value: value.to_owned(),
            expected: self.form.expected(),
        }
    }
}

/// A row of the table, independent of its value type.
pub(super) trait Setting: Sync {
    /// Returns the key, as `Config::set` accepts it.
    fn key(&self) -> &'static str;

    /// Returns the variables, in order of precedence.
    fn variables(&self) -> &'static [&'static str];

    /// Describes the accepted values.
    fn expected(&self) -> String;

    /// Sets the value from text found under `name`.
    fn set(
        &self,
        values: &mut Values,
        name: &str,
        text: &str,
        source: Source,
    ) -> Result<(), ConfigError>;

    /// Recomputes the default, unless the value was set.
    fn derive(&self, values: &mut Values);

    /// Returns the row as shown to users.
    fn describe(&self, values: &Values) -> ConfigRow;
}

impl<F: Form> Setting for Row<F> {
    fn key(&self) -> &'static str {
        self.key
    }

    fn variables(&self) -> &'static [&'static str] {
        self.variables
    }

    fn expected(&self) -> String {
        self.form.expected()
    }

    fn set(
        &self,
        values: &mut Values,
        name: &str,
        text: &str,
        source: Source,
    ) -> Result<(), ConfigError> {
        let value = self.form.parse(text).ok_or_else(|| self.bad(name, text))?;
        *(self.get_mut)(values) = Held { value, source };
        Ok(())
    }

    fn derive(&self, values: &mut Values) {
        if (self.get)(values).source == Source::Default {
            let value = match self.default {
                DefaultValue::Fixed(of) => of(),
                DefaultValue::Derived { of, .. } => of(values),
            };
            (self.get_mut)(values).value = value;
        }
    }

    fn describe(&self, values: &Values) -> ConfigRow {
        let held = (self.get)(values);
        let default = match self.default {
            DefaultValue::Fixed(of) => self.form.describe(&of()),
            DefaultValue::Derived { text, .. } => text(),
        };
        ConfigRow {
            key: self.key,
            variables: self.variables,
            value: self.form.show(&held.value),
            source: held.source.clone(),
            accepts: self.form.expected(),
            reason: format!("{default}: {}", (self.why)()),
            default,
            help: (self.help)(),
        }
    }
}
