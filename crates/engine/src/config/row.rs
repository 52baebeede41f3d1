//! What every setting is made of: a [`Row`] of one type, and [`Setting`], the same for any type.

use super::form::Form;
use super::{ConfigError, ConfigRow, Source, Values};

/// A value with where it came from.
#[derive(Clone, Debug, Default)]
pub(super) struct Held<T> {
    pub(super) value: T,
    pub(super) source: Source,
}

/// The default of a setting.
pub(super) enum DefaultValue<T> {
    /// The same everywhere. The form describes it.
    Fixed(fn() -> T),
    /// Derived from the machine, or from settings in rows above.
    Derived {
        of: fn(&Values) -> T,
        /// Describes the default for all machines.
        text: fn() -> String,
    },
}

/// Everything about one setting.
///
/// No other place knows its range or its default: parsing, typed setters, `expected` in errors,
/// `tcpx config` and the reference table of the documentation are made from the row.
pub(super) struct Row<F: Form> {
    pub(super) key: &'static str,
    pub(super) variables: &'static [&'static str],
    /// What the setting does: whole sentences.
    pub(super) help: fn() -> String,
    /// What it accepts.
    pub(super) form: F,
    pub(super) default: DefaultValue<F::Value>,
    /// The reason for the default, to follow "default: ".
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

/// A row of the table, whatever the type of its values.
pub(super) trait Setting: Sync {
    /// The key, as `Config::set` takes it.
    fn key(&self) -> &'static str;

    /// The variables, the one that counts first in front.
    fn variables(&self) -> &'static [&'static str];

    /// Describes what is accepted.
    fn expected(&self) -> String;

    /// Sets the value from text that was found under `name`.
    fn set(
        &self,
        values: &mut Values,
        name: &str,
        text: &str,
        source: Source,
    ) -> Result<(), ConfigError>;

    /// Computes the default again, unless somebody has set the value.
    fn derive(&self, values: &mut Values);

    /// The row as users see it.
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
