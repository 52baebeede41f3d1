"""Tests the checks of scripts/docs, on generated documents."""

import importlib.machinery
import importlib.util
import tempfile
import unittest
from pathlib import Path
from unittest import mock

SCRIPTS = Path(__file__).resolve().parent.parent


def load(name):
    """Imports a script, which has no suffix."""
    loader = importlib.machinery.SourceFileLoader(name.replace("-", "_"), str(SCRIPTS / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


docs = load("docs")
figures = load("../benchmarks/figures")


class Documents(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name).resolve()

    def page(self, name, text):
        page = self.root / name
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text)
        return page

    def test_links_lead_to_files_and_headings(self):
        self.page("docs/b.md", "# Title\n\n## A `b`, and C++\n\n## Twice\n\n## Twice\n")
        good = "[x](docs/b.md) [y](docs/b.md#a-b-and-c) [z](docs/b.md#twice-1) [h](https://x.y/z)"
        bad = "[x](docs/c.md) [y](docs/b.md#c) [z](../outside.md) [o](#nowhere)"
        page = self.page("a.md", f"# A\n\n{good} [s](#a)\n")
        self.assertEqual(docs.check_links(self.root, page), [])
        page = self.page("a.md", f"# A\n\n{bad}\n")
        self.assertEqual(len(docs.check_links(self.root, page)), 4)

    def test_code_holds_no_links_and_no_headings(self):
        page = self.page("a.md", "# A\n\n`[x](gone.md)`\n\n```text\n[x](gone.md)\n# B\n```\n")
        self.assertEqual(docs.check_links(self.root, page), [])
        self.assertEqual(docs.anchors(page.read_text()), {"a"})

    def test_blocks_are_accounted_for(self):
        self.page("tests/t.py", "def test_it(): ...\n")
        block = "```sh\nls\n```\n"
        for before, problems in [
            ("", 1),
            ("<!-- not run: needs a GPU -->\n", 0),
            ("<!-- test: tests/t.py::test_it -->\n\n", 0),
            ("<!-- test: tests/t.py::test_gone -->\n", 1),
            ("<!-- test: tests/t.py::test_i -->\n", 1),
            ("<!-- test: tests/gone.py -->\n", 1),
            ("<!-- not run: needs a GPU -->\nMore words.\n\n", 1),
        ]:
            page = self.page("a.md", f"Words.\n\n{before}{block}")
            self.assertEqual(len(docs.check_blocks(self.root, page)), problems, before)
        page = self.page("a.md", "```text\nx\n```\n")
        self.assertEqual(docs.check_blocks(self.root, page), [])

    def test_a_test_gets_the_blocks_that_name_it(self):
        marked = "<!-- test: tests/t.py::test_it -->\n```sh\nls\n\npwd\n```\n"
        indented = "1. First:\n\n   <!-- test: tests/t.py::test_it -->\n   ```sh\n   id\n   ```\n"
        one = self.page("a.md", f"{marked}\n```sh\nrm\n```\n")
        two = self.page("b.md", indented)
        self.assertEqual(docs.blocks_of(self.root, [one, two], "tests/t.py::test_it"), ["ls\n\npwd\n", "id\n"])
        self.assertEqual(docs.blocks_of(self.root, [one, two], "tests/t.py::test"), [])

    def test_translations_repeat_the_code(self):
        marked = "<!-- test: tests/t.py::test_it -->\n```sh\nls\n```\n"
        page = self.page("README.zh.md", marked)
        self.assertEqual(docs.blocks_of(self.root, [page], "tests/t.py::test_it"), [])

    def test_code_of_a_translation_differs_by_words_alone(self):
        account = "<!-- test: tests/t.py::test_it -->\n"
        block = '```sh\nls  # lists\n\n# Prints.\npwd\n```\n```python\n"""Does\nit."""\n```\n'
        source = self.page("docs/a.md", f"# A\n\n{account}{block}")
        line = f"<!-- translates: docs/a.md at {docs.fingerprint(source)} -->\n"
        same = account + block.replace("lists", "列出").replace("Prints.", "打印。")
        same = same.replace("Does\nit.", "做。")
        for text, problems in [
            (same, 0),
            (same.replace("ls ", "ls -l "), 1),
            (same.replace("test_it", "test_other"), 1),
            (same.replace("```sh", "```text"), 1),
            (block, 1),
            (f"{same}{block}", 1),
            ("", 1),
        ]:
            page = self.page("docs/zh/a.md", f"{line}# 甲\n\n{text}")
            self.assertEqual(len(docs.check_translation(self.root, page)), problems, text)

    def test_prose_ends_by_column_100(self):
        long = "word " * 20 + "x"
        fits = f"[{'word ' * 19}w](https://example.org/{'x' * 80})"
        for text, problems in [
            (long, 1),
            (f"- {long}", 1),
            (long[:100], 0),
            (fits, 0),
            (f"| {long} |", 0),
            (f"```text\n{long}\n```", 0),
            (f"```text\nx\n```\n{long}", 1),
            (f"<!-- not run: {long} -->", 0),
        ]:
            page = self.page("a.md", f"{text}\n")
            self.assertEqual(len(docs.check_width(self.root, page)), problems, text)

    def test_a_translation_is_as_old_as_its_source(self):
        source = self.page("docs/a.md", "# A\n")
        line = f"<!-- translates: docs/a.md at {docs.fingerprint(source)} -->\n"
        page = self.page("docs/zh/a.md", f"{line}# 甲\n")
        self.assertTrue(docs.is_translation(self.root, page))
        self.assertTrue(docs.is_translation(self.root, self.root / "README.zh.md"))
        self.assertFalse(docs.is_translation(self.root, source))
        self.assertEqual(docs.check_translation(self.root, page), [])
        source.write_text("# A and more\n")
        self.assertIn("has changed", docs.check_translation(self.root, page)[0])
        source.unlink()
        self.assertIn("does not exist", docs.check_translation(self.root, page)[0])
        page.write_text("# 甲\n")
        self.assertIn("begins with", docs.check_translation(self.root, page)[0])


class Figures(unittest.TestCase):
    RESULT = """{
        "date": "2026-01-01", "machine": "one",
        "tables": {"t": {
            "columns": {"case": "case", "speed": "GB/s", "p50": "p50"},
            "rows": [
                ["a", 1.50, {"value": 10.0, "unit": "µs"}],
                ["b", [1797, 1811], {"each": [2.0, 30]}],
                ["c", null, ""]
            ]
        }}
    }"""
    TABLE = """| case | GB/s | p50 |
|---|---|---|
| a | 1.50 | 10.0 µs |
| b | 1,797 to 1,811 | 2.0, 30 |
| c | – | |"""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name).resolve()
        results = self.root / "benchmarks" / "results"
        results.mkdir(parents=True)
        (results / "day.json").write_text(self.RESULT)

    def test_numbers_keep_their_digits(self):
        self.assertEqual("\n".join(figures.markdown(figures.load(self.root, "day", "t"))), self.TABLE)

    def test_tables_are_made_anew(self):
        right = f"# A\n\n<!-- table: day t -->\n\n{self.TABLE}\n\nWords.\n"
        self.assertEqual(figures.renew(self.root, right), right)
        self.assertEqual(figures.renew(self.root, right.replace("1.50", "1.60")), right)
        self.assertEqual(figures.renew(self.root, right.replace(self.TABLE + "\n\n", "")), right)
        self.assertEqual(figures.renew(self.root, right.replace("-->\n\n", "-->\n")), right)

    def test_columns_are_chosen(self):
        page = figures.renew(self.root, "<!-- table: day t p50,case -->\n")
        self.assertIn("| p50 | case |\n|---|---|\n| 10.0 µs | a |", page)

    def test_heads_and_cells_are_translated(self):
        page = figures.renew(self.root, "<!-- table: day t -->\n", {"case": "场景", "a": "甲"})
        self.assertIn("| 场景 | GB/s | p50 |\n|---|---|---|\n| 甲 | 1.50 |", page)

    def test_a_wrong_name_is_an_error(self):
        for mark in ("gone t", "day gone", "day t gone"):
            with self.assertRaises(figures.Problem):
                figures.renew(self.root, f"<!-- table: {mark} -->\n")

    def test_a_result_names_its_machine(self):
        path = self.root / "benchmarks" / "results" / "day.json"
        path.write_text(self.RESULT.replace('"machine": "one",', ""))
        with self.assertRaises(figures.Problem):
            figures.load(self.root, "day", "t")

    def test_a_picture_that_differs_is_found(self):
        root = SCRIPTS.parent
        self.assertEqual(figures.check(root), [])
        with mock.patch.object(figures, "picture", return_value="another"):
            (problem,) = figures.check(root)
        self.assertIn(figures.PICTURE, problem)


if __name__ == "__main__":
    unittest.main()
