//! Finds the library: the names that NCCL would try, in its order.
//!
//! A list is the value of `NCCL_NET_PLUGIN`: names or paths, separated by commas.
//!
//! | list | meaning |
//! |---|---|
//! | empty | `libnccl-net.so`, as when `NCCL_NET_PLUGIN` is not set |
//! | `none`, in any case | no plugin |
//! | an entry with a `/` in it | that file |
//! | an entry `lib….so` | that library, through the system's search path |
//! | `STATIC_PLUGIN` | the program itself: the plugin is linked into it |
//! | any other entry `x` | `x`, then `libnccl-net-x.so` |
//!
//! NCCL uses at most [`MAX_ENTRIES`] entries of at most [`MAX_NAME`] bytes each; further or longer
//! ones are skipped here too, and named in the error if no other can be used.

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::error::{Error, Tried};

/// The default library.
pub const DEFAULT_LIBRARY: &str = "libnccl-net.so";

/// Maximum entries of a list that are used.
pub const MAX_ENTRIES: usize = 14;

/// Maximum length of an entry, in bytes.
pub const MAX_NAME: usize = 254;

/// One entry of a list and the names to try for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The text of the entry.
    pub text: String,
    /// The names to pass to the system's loader, in this order.
    pub names: Vec<String>,
    /// The reason the entry is skipped, if it is; then there are no names.
    pub skipped: Option<String>,
}

/// Parses a list.
///
/// # Errors
///
/// [`Error::Disabled`] if the list is `none`; [`Error::NoneUsable`] if it has no names.
pub fn entries(list: &str) -> Result<Vec<Entry>, Error> {
    if list.is_empty() {
        return Ok(vec![entry(DEFAULT_LIBRARY, 0)]);
    }
    if list.eq_ignore_ascii_case("none") {
        return Err(Error::Disabled);
    }
    let mut counted = 0;
    let mut found = Vec::new();
    for text in list.split(',').filter(|text| !text.is_empty()) {
        let entry = entry(text, counted);
        counted += usize::from(text.len() <= MAX_NAME);
        found.push(entry);
    }
    if found.is_empty() {
        return Err(Error::NoneUsable { tried: Vec::new() });
    }
    Ok(found)
}

fn entry(text: &str, before: usize) -> Entry {
    let skipped = if text.len() > MAX_NAME {
        Some(format!("the name is longer than {MAX_NAME} bytes"))
    } else if before >= MAX_ENTRIES {
        Some(format!("only the first {MAX_ENTRIES} names are tried"))
    } else {
        None
    };
    let mut names = Vec::new();
    if skipped.is_none() {
        names.push(text.to_owned());
        let is_library = text.starts_with("lib") && text.ends_with(".so");
        if !text.contains('/') && !is_library && !is_static(text) {
            names.push(format!("libnccl-net-{text}.so"));
        }
    }
    Entry {
        text: text.to_owned(),
        names,
        skipped,
    }
}

fn is_static(name: &str) -> bool {
    name.eq_ignore_ascii_case("STATIC_PLUGIN")
}

/// An opened library.
pub(crate) struct Opened {
    pub(crate) library: Library,
    /// The name by which it was opened.
    pub(crate) name: String,
    /// Whether this process had already loaded it.
    pub(crate) was_loaded: bool,
}

/// Opens the first of an entry's names that can be opened. Adds failures before it to `tried`.
pub(crate) fn open(entry: &Entry, tried: &mut Vec<Tried>) -> Option<Opened> {
    if let Some(reason) = &entry.skipped {
        tried.push(Tried {
            name: entry.text.clone(),
            reason: reason.clone(),
        });
    }
    for name in &entry.names {
        let file = (!is_static(name)).then_some(name);
        // SAFETY: finds only a library that is already loaded, which stays loaded when this
        // reference goes.
        let found = || unsafe { Library::open(file, RTLD_NOW | libc::RTLD_NOLOAD) };
        let was_loaded = file.is_some() && found().is_ok();
        // SAFETY: opening a library runs its initialisers. The user chose this library to run in
        // this process; there is no way to check foreign machine code.
        match unsafe { Library::open(file, RTLD_NOW | RTLD_LOCAL) } {
            Ok(library) => {
                return Some(Opened {
                    library,
                    name: name.clone(),
                    was_loaded,
                });
            }
            Err(error) => tried.push(Tried {
                name: name.clone(),
                reason: reason_of(name, error),
            }),
        }
    }
    None
}

/// Returns the loader's message, without the name, which precedes it already.
fn reason_of(name: &str, error: libloading::Error) -> String {
    let text = match error {
        libloading::Error::DlOpen { source, .. } => source.to_string(),
        other => other.to_string(),
    };
    match text.strip_prefix(&format!("{name}: ")) {
        Some(rest) => rest.to_owned(),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn names(list: &str) -> Vec<Vec<String>> {
        entries(list)
            .unwrap()
            .into_iter()
            .map(|entry| entry.names)
            .collect()
    }

    #[test]
    fn each_form_of_an_entry_gives_the_names_nccl_would_try() {
        assert_eq!(names(""), [["libnccl-net.so"]]);
        assert_eq!(names("tcpx"), [["tcpx", "libnccl-net-tcpx.so"]]);
        assert_eq!(names("/opt/p.so"), [["/opt/p.so"]]);
        assert_eq!(names("./p"), [["./p"]]);
        assert_eq!(names("libfoo.so"), [["libfoo.so"]]);
        assert_eq!(
            names("libfoo.so.1"),
            [["libfoo.so.1", "libnccl-net-libfoo.so.1.so"]]
        );
        assert_eq!(names("foo.so"), [["foo.so", "libnccl-net-foo.so.so"]]);
        assert_eq!(names("STATIC_PLUGIN"), [["STATIC_PLUGIN"]]);
        assert_eq!(
            names(",a,,/b,"),
            [
                vec!["a".to_owned(), "libnccl-net-a.so".to_owned()],
                vec!["/b".to_owned()]
            ]
        );
    }

    #[test]
    fn none_and_nothing_are_errors_of_their_own() {
        assert_eq!(entries("none"), Err(Error::Disabled));
        assert_eq!(entries("NoNe"), Err(Error::Disabled));
        assert_eq!(entries(",,"), Err(Error::NoneUsable { tried: vec![] }));
        // `none` counts only as the whole list.
        assert_eq!(names("none,")[0][0], "none");
    }

    #[test]
    fn what_nccl_ignores_is_passed_over_and_said() {
        let long = "x".repeat(MAX_NAME + 1);
        let many = vec!["y"; MAX_ENTRIES + 1].join(",");
        let all = entries(&format!("{long},{many}")).unwrap();
        assert!(all[0].skipped.as_ref().unwrap().contains("254"));
        assert!(all[1..=MAX_ENTRIES].iter().all(|e| e.skipped.is_none()));
        assert!(
            all[MAX_ENTRIES + 1]
                .skipped
                .as_ref()
                .unwrap()
                .contains("14")
        );
        assert_eq!(entries(&"x".repeat(MAX_NAME)).unwrap()[0].skipped, None);
    }

    #[test]
    fn every_name_tried_is_reported_with_its_reason() {
        let mut tried = Vec::new();
        let entry = &entries("no-such-plugin").unwrap()[0];
        assert!(open(entry, &mut tried).is_none());
        assert_eq!(tried[0].name, "no-such-plugin");
        assert_eq!(tried[1].name, "libnccl-net-no-such-plugin.so");
        assert!(tried.iter().all(|t| t.reason.contains("No such file")));
    }

    proptest! {
        /// For any text: no panic, entries in order, limits respected, no entry lost.
        #[test]
        fn lists_are_taken_apart_without_loss(list in "[a-z/.,]{0,600}") {
            let parts: Vec<&str> = list.split(',').filter(|p| !p.is_empty()).collect();
            match entries(&list) {
                Ok(all) if list.is_empty() => prop_assert_eq!(all.len(), 1),
                Ok(all) => {
                    let texts: Vec<&str> = all.iter().map(|e| e.text.as_str()).collect();
                    prop_assert_eq!(texts, parts);
                    let tried = all.iter().filter(|e| e.skipped.is_none()).count();
                    prop_assert!(tried <= MAX_ENTRIES);
                    for entry in &all {
                        prop_assert_eq!(entry.names.is_empty(), entry.skipped.is_some());
                        if let Some(first) = entry.names.first() {
                            prop_assert_eq!(first, &entry.text);
                        }
                        prop_assert!(entry.names.len() <= 2);
                    }
                }
                Err(Error::NoneUsable { .. }) => prop_assert!(parts.is_empty()),
                Err(other) => prop_assert_eq!(other, Error::Disabled),
            }
        }
    }
}
