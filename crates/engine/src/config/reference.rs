//! Tests that the documentation agrees with the rows.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use super::rows::ROWS;
use super::{Config, ConfigRow};

const BEGIN: &str = "<!-- settings: generated, do not edit -->\n";
const END: &str = "<!-- settings: end -->\n";

/// Environment variable that makes the test write the table instead of comparing it.
const BLESS: &str = "TCPX_BLESS";

fn document(path: &str) -> (PathBuf, String) {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let path = PathBuf::from(root).join(path);
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    (path, text)
}

fn table(rows: &[ConfigRow]) -> String {
    let mut out =
        "\n| setting | variables | default | accepts | what it does |\n|---|---|---|---|---|\n"
            .to_owned();
    for row in rows {
        let variables: Vec<_> = row.variables.iter().map(|v| format!("`{v}`")).collect();
        let cells = [
            format!("`{}`", row.key),
            variables.join(", "),
            row.default.clone(),
            row.accepts.clone(),
            row.help.clone(),
        ];
        out += &format!("| {} |\n", cells.map(|c| c.replace('|', "\\|")).join(" | "));
    }
    out + "\n"
}

#[test]
fn the_reference_table_of_settings_is_current() {
    let (path, text) = document("docs/operations.md");
    let begin = text.find(BEGIN).expect("a begin marker") + BEGIN.len();
    let end = text.find(END).expect("an end marker");
    let expected = table(&Config::defaults().rows());
    if std::env::var_os(BLESS).is_some() {
        let blessed = format!("{}{expected}{}", &text[..begin], &text[end..]);
        fs::write(&path, blessed).expect("the document can be written");
        return;
    }
    assert!(
        text[begin..end] == expected,
        "the table of settings in docs/operations.md differs from the rows in \
         crates/engine/src/config/rows; regenerate it: \
         {BLESS}=1 cargo test -p tcpx --lib reference_table"
    );
}

/// Returns the `TCPX_` variables in the first cells of a document's tables.
fn variables_in_tables(text: &str) -> impl Iterator<Item = &str> {
    let rows = text.lines().filter(|line| line.starts_with("| `TCPX_"));
    let cells = rows.filter_map(|row| row.split(" |").next());
    cells
        .flat_map(|cell| cell.split(|c: char| !c.is_ascii_uppercase() && c != '_'))
        .filter(|word| word.len() > "TCPX_".len())
}

#[test]
fn tables_name_settings_that_exist() {
    let known: BTreeSet<_> = ROWS.iter().flat_map(|row| row.variables()).collect();
    let mut found = 0;
    for path in ["README.md", "docs/operations.md", "docs/plugins.md"] {
        let (_, text) = document(path);
        for variable in variables_in_tables(&text) {
            assert!(known.contains(&variable), "{path} has {variable}");
            found += 1;
        }
    }
    assert!(found >= 20, "{found} variables in tables");
}
