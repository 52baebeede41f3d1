"""Tests scripts/lint-layers on made-up trees: python3 -m unittest discover scripts/tests"""

import importlib.util
import subprocess
import sys
import tempfile
import unittest
from importlib.machinery import SourceFileLoader
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "lint-layers"

sys.dont_write_bytecode = True
loader = SourceFileLoader("lint_layers", str(SCRIPT))
spec = importlib.util.spec_from_loader("lint_layers", loader)
lint = importlib.util.module_from_spec(spec)
loader.exec_module(lint)

LAYERS = (("lib",), ("top", "side"), ("middle",), ("low",), ("error", "config"))

LONG = "    x();\n"


class Trees(unittest.TestCase):
    def check(self, files):
        """Returns the violations in a tree of `files`, without the folder's name."""
        with tempfile.TemporaryDirectory() as folder:
            for name, text in {"lib.rs": "", **files}.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            return [line.replace(folder + "/", "") for line in lint.check(Path(folder), LAYERS)]

    def expect(self, files, *violations):
        self.assertEqual(self.check(files), list(violations))


class Layers(Trees):
    MODULES = {"top.rs": "", "middle/mod.rs": "", "low/mod.rs": "", "error.rs": "", "config/mod.rs": ""}

    def test_downwards_and_sideways(self):
        self.expect(
            {
                **self.MODULES,
                "lib.rs": "mod top; pub use top::Top; use crate::low::x;",
                "top.rs": "use crate::side::A; use crate::low::{B, C};",
                "side.rs": "use crate::top::A;",
                "middle/mod.rs": "use crate::{error::E, low::{self, B as C}};",
                "middle/deep/part.rs": "use super::super::x; use super::super::super::low::B; use crate::middle::x;",
                "error.rs": "use crate::config::C;",
            }
        )

    def test_upwards(self):
        above = "which is a layer above it"
        for text, line in [
            ("use crate::top::A;", 1),
            ("\nuse crate::{\n    error::E,\n    top::A,\n};", 4),
            ("use crate::{error::{A, B}, top::{A, B}};", 1),
            ("use super::super::top::A;", 1),
            ("use super::super::{error::A, top};", 1),
            ("use super::{super::top::A, x};", 1),
            ("fn f() {\n    crate::top::f::<u8>();\n}", 2),
            ("mod inner {\n    use super::super::super::top::A;\n}", 2),
            ("/* a /* nested */ comment */ use crate::top::A;", 1),
            ("const C: char = '\"'; use crate::top::A; const D: char = '\"';", 1),
            ("fn f<'a>(x: &'a u8) { crate::top::g(x) }", 1),
            ('const S: &str = r#"a "quote"#; use crate::top::A;', 1),
            ("pub(in crate::top) fn f() {}", 1),
        ]:
            with self.subTest(text):
                self.expect(
                    {**self.MODULES, "low/part.rs": text},
                    f"low/part.rs:{line}: `low` imports from `top`, {above}",
                )

    def test_comments_and_strings_do_not_count(self):
        self.expect(
            {
                **self.MODULES,
                "low/mod.rs": "//! See [`crate::top`].\n"
                "/* use crate::top; /* use crate::top; */ use crate::top; */\n"
                'const S: &str = "\\"crate::top::A"; const R: &str = r#"" crate::top::A"#;\n',
            }
        )

    def test_own_modules_count_from_where_they_are(self):
        # One `super` too few to leave the folder.
        self.expect(
            {**self.MODULES, "low/part.rs": "use super::top::A; mod inner { use super::super::top::A; }"}
        )

    def test_items_of_lib(self):
        message = "an item of lib.rs is imported: name the module that defines it"
        for text in ("use crate::Top;", "use super::Top;", "use super::*;", "use crate::{Top, error::E};"):
            with self.subTest(text):
                self.expect({**self.MODULES, "low.rs": text}, f"low.rs:1: {message}")

    def test_module_without_a_layer(self):
        message = "`new` has no layer: add it to LAYERS in scripts/lint-layers"
        self.expect({"new/mod.rs": "use crate::low::A;", "low.rs": ""}, f"new/mod.rs:1: {message}")

    def test_tests_are_exempt(self):
        self.expect(
            {
                **self.MODULES,
                "lib.rs": "#[cfg(test)]\nmod testing;\nmod top;",
                "testing.rs": "use crate::Top;",
                "testing/part.rs": "use crate::Top;",
                "low/mod.rs": "#[cfg(test)]\nuse crate::{top::A, middle::B};\n"
                "#[cfg(test)]\n#[allow(unused)]\nmod tests { fn f() { crate::top::f() } }\n"
                "struct S {\n #[cfg(test)] a: crate::top::A,\n b: u8 }\n"
                "#[cfg(all(test, unix))]\nfn f<A, B>() -> [u8; 2] { crate::top::f() }\n",
                "low/tests.rs": "use crate::top::A;",
                "low/tests/part.rs": "use crate::top::A;",
                "low/whole.rs": "#![cfg(test)]\nuse crate::top::A;\nuse crate::top::B;",
            }
        )

    def test_what_follows_a_test_is_not_exempt(self):
        for test in (
            "#[cfg(test)]\nuse crate::{top::A};",
            "#[cfg(test)]\nmod t { }",
            "#[cfg(test)]\nmod t;",
            "#[cfg(not(test))]\n",
            "#[cfg(any(test, unix))]\n",
            "struct S {\n #[cfg(test)] a: u8 }",
            "struct S {\n #[cfg(test)] a: u8, b: crate::error::E }",
            "struct S(\n #[cfg(test)] u8,",
        ):
            with self.subTest(test):
                self.expect(
                    {**self.MODULES, "low/mod.rs": test + "\ncrate::top::A"},
                    "low/mod.rs:3: `low` imports from `top`, which is a layer above it",
                )


class Cycles(Trees):
    def test_cycle_names_its_path(self):
        violations = self.check(
            {
                "top/mod.rs": "use crate::middle::A;",
                "middle/a.rs": "\nuse crate::low::A;",
                "low/b.rs": "\n\nuse crate::top::A;",
            }
        )
        self.assertEqual(
            violations,
            [
                "low/b.rs:3: `low` imports from `top`, which is a layer above it",
                "low/b.rs:3: cycle of folders: low (b.rs:3) -> top (mod.rs:1) -> middle (a.rs:2) -> low",
            ],
        )

    def test_cycle_in_one_layer(self):
        self.expect(
            {"top/mod.rs": "use crate::side::A;", "side/mod.rs": "use crate::top::A;"},
            "side/mod.rs:1: cycle of folders: side (mod.rs:1) -> top (mod.rs:1) -> side",
        )

    def test_files_may_import_each_other(self):
        self.expect({"top.rs": "use crate::side::A;", "side.rs": "use crate::top::A;"})


class Sizes(Trees):
    def test_files(self):
        self.expect({"low.rs": "//\n" * lint.MAX_FILE_LINES})
        self.expect(
            {"low/tests.rs": "//\n" * (lint.MAX_FILE_LINES + 1)},
            "low/tests.rs:1: the file has 601 lines, at most 600",
        )

    def test_functions(self):
        def function(lines):
            return "fn before();\n\npub(crate) fn long(\n) {\n" + LONG * (lines - 3) + "}\n"

        self.expect({"low.rs": function(lint.MAX_FUNCTION_LINES)})
        long = function(lint.MAX_FUNCTION_LINES + 1)
        self.expect({"low.rs": long}, "low.rs:3: `long` has 101 lines, at most 100")
        self.expect(
            {"low.rs": "impl S {\n" + long + "}\n"}, "low.rs:4: `long` has 101 lines, at most 100"
        )
        self.expect({"low.rs": "#[cfg(test)]\nmod tests {\n" + long + "}\n", "low/tests.rs": long})

    def test_braces_in_literals_do_not_count(self):
        text = "fn f() {\n" + "    g('{', \"{\", b'\"'); // {\n" * 50 + "}\n"
        self.expect({"low.rs": text * 2})


class Command(unittest.TestCase):
    def test_status(self):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "lib.rs").write_text("mod error;")
            Path(folder, "error.rs").write_text("")
            good = subprocess.run([SCRIPT, folder], capture_output=True, text=True)
            self.assertEqual((good.returncode, good.stdout), (0, ""))
            Path(folder, "error.rs").write_text("use crate::X;")
            bad = subprocess.run([SCRIPT, folder], capture_output=True, text=True)
            self.assertEqual(bad.returncode, 1)
            self.assertTrue(bad.stdout.startswith(f"{folder}/error.rs:1: "), bad.stdout)


if __name__ == "__main__":
    unittest.main()
