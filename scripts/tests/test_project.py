"""Checks that facts written in several places agree, and that the summary of the tests lists
skips."""

import json
import os
import re
import subprocess
import tempfile
import unittest
from pathlib import Path

from test_documents import load

ROOT = Path(__file__).resolve().parent.parent.parent
tests = load("test-all")


def read(name):
    return (ROOT / name).read_text()


class Versions(unittest.TestCase):
    def test_the_oldest_compiler_is_the_same_everywhere(self):
        oldest = re.search(r'^rust-version = "(.*)"$', read("Cargo.toml"), re.MULTILINE)[1]
        for name in ("README.md", "Makefile"):
            self.assertIn(f"Rust {oldest}", read(name), name)
        self.assertIn(f"RUSTUP_TOOLCHAIN: {oldest}\n", read(".github/workflows/ci.yml"))

    def test_crates_ask_for_each_other_in_this_version(self):
        text = read("Cargo.toml")
        version = re.search(r'^version = "(.*)"$', text, re.MULTILINE)[1]
        crates = r'^tcpx[\w-]* = \{ path = ".*", version = "(.*)" \}$'
        asked = re.findall(crates, text, re.MULTILINE)
        self.assertGreaterEqual(len(asked), 6)
        self.assertEqual(set(asked), {version})

    def test_ci_tests_the_versions_of_nixl_that_the_script_tests(self):
        listed = subprocess.run([ROOT / "scripts" / "ci-versions"], capture_output=True, check=True)
        self.assertGreaterEqual(len(json.loads(listed.stdout)), 2)

    def test_ci_names_parts_that_exist(self):
        known = {name for name, *_ in tests.PARTS}
        workflow = read(".github/workflows/ci.yml")
        named = re.findall(r'PARTS="([^"$]*)"|PARTS: >-\n +(.*)', workflow)
        named = set(" ".join(" ".join(each) for each in named).split())
        # CI runs everything that `make test` runs, in one job or another.
        self.assertEqual(named | {"kernels", "quick"}, known)
        self.assertIn("scripts/test-kernels", workflow)

    def test_the_parts_in_rust_are_all_run(self):
        listed = subprocess.run(
            [ROOT / "scripts" / "test", "--list"], capture_output=True, check=True, text=True
        )
        commands = [command[1] for _, _, command in tests.PARTS if command[0] == "scripts/test"]
        self.assertEqual(set(listed.stdout.split()), set(commands) - {"quick"})

    def test_a_part_ends_with_the_first_command_that_fails(self):
        with tempfile.TemporaryDirectory() as folder:
            # Only the first call of cargo fails.
            cargo = Path(folder) / "cargo"
            cargo.write_text(f"#!/bin/sh\n[ -e {folder}/called ] || {{ : >{folder}/called; exit 1; }}\n")
            cargo.chmod(0o755)
            environment = dict(os.environ, PATH=f"{folder}:{os.environ['PATH']}")
            command = [ROOT / "scripts" / "test", "quick"]
            ended = subprocess.run(command, env=environment, capture_output=True)
            self.assertNotEqual(ended.returncode, 0)


class Skips(unittest.TestCase):
    def test_skips_are_found_in_the_words_of_every_suite(self):
        output = """\
running 3 tests
SKIPPED: network::a: network namespaces cannot be made here: Operation not permitted
..SKIPPED: network::a: network namespaces cannot be made here: Operation not permitted
test strangers::measure ... ignored, a measurement
test processes::sender ... ignored, run by the tests below
test unknown_offers_are_ignored ... ok
SKIPPED [2] tests/nixl/test_transfers.py:84: Python has strided lists from NIXL 1.5 on
184 passed, 2 skipped in 91.11s (0:01:31)
"""
        found = [(skip.what, skip.why) for skip in tests.find_skips("x", output)]
        self.assertEqual(
            found,
            [
                (
                    "network::a",
                    "network namespaces cannot be made here: Operation not permitted",
                ),
                ("strangers::measure", "a measurement"),
                ("tests/nixl/test_transfers.py:84", "Python has strided lists from NIXL 1.5 on"),
            ],
        )

    def test_the_summary_groups_skips_by_reason(self):
        skips = [tests.Skip("stories", "a", "no nft"), tests.Skip("plugin", "b", "no nft")]
        text = tests.report([("stories", "passed", 61.0)], skips, ["nixl"])
        self.assertIn("stories     passed     1:01", text)
        self.assertIn("not run: nixl", text)
        self.assertEqual(text.count("no nft"), 1)
        self.assertIn("    stories: a\n    plugin: b", text)
        self.assertIn("skipped: nothing", tests.report([], [], []))


if __name__ == "__main__":
    unittest.main()
