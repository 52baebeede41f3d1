"""Checks that facts written in several places agree, and that the summary of the tests lists
skips."""

import io
import json
import os
import re
import subprocess
import tempfile
import threading
import time
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
        known = {name for name, *_ in tests.PARTS + tests.VARIANTS}
        workflow = read(".github/workflows/ci.yml")
        named = re.findall(r'PARTS="([^"$]*)"|PARTS: >-\n +(.*)', workflow)
        named = set(" ".join(" ".join(each) for each in named).split())
        # CI runs everything that `make test` and `make test-variants` run, in one job or another.
        self.assertEqual(named | {"kernels"}, known)
        self.assertIn("scripts/test-kernels", workflow)

    def test_the_parts_in_rust_are_all_run(self):
        listed = subprocess.run(
            [ROOT / "scripts" / "test", "--list"], capture_output=True, check=True, text=True
        )
        parts = tests.PARTS + tests.VARIANTS
        commands = [command[1] for _, _, command in parts if command[0] == "scripts/test"]
        self.assertEqual(set(listed.stdout.split()), set(commands))

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
        text = tests.report([("stories", "passed", 61.0)], skips, ["nixl"], 130.0)
        self.assertIn("stories       passed     1:01", text)
        self.assertIn("all                      2:10", text)
        self.assertIn("not run: nixl", text)
        self.assertEqual(text.count("no nft"), 1)
        self.assertIn("    stories: a\n    plugin: b", text)
        self.assertIn("skipped: nothing", tests.report([], [], [], 0.0))

    def test_output_of_parts_is_not_mixed(self):
        out = io.BytesIO()
        terminal = tests.Terminal(out)
        terminal.begin("a", "a")
        terminal.begin("b", "b")
        terminal.begin("c", "c")
        terminal.show("b", b"b1 ")
        terminal.show("a", b"a1 ")
        self.assertEqual(out.getvalue(), b"\n=== a\na1 ")
        terminal.end("b", "b is over")
        terminal.show("c", b"c1 ")
        terminal.end("a", "a is over")
        terminal.show("c", b"c2 ")
        terminal.end("c", "c is over")
        self.assertEqual(
            out.getvalue(),
            b"\n=== a\na1 === a is over\n"
            b"\n=== b\nb1 === b is over\n"
            b"\n=== c\nc1 c2 === c is over\n",
        )

    def run_parts(self, chosen, failing, keep_going=False):
        """Runs parts, two at once; returns the names in the order in which they ended, and the most
        that ran beside `build` and beside another part."""
        lock, running, most = threading.Lock(), set(), {True: 0, False: 0}

        def execute(name):
            with lock:
                running.add(name)
                is_build = "build" in running
                most[is_build] = max(most[is_build], len(running))
            time.sleep(0.01)
            with lock:
                running.remove(name)
            return tests.Result(name, int(name in failing), "", 0.0)

        results = tests.run_all(chosen, 2, keep_going, execute)
        return [result.part for result in results], most

    def test_parts_run_two_at_once_after_the_build(self):
        parts, most = self.run_parts(["build", "a", "b", "c", "d"], [])
        self.assertEqual(sorted(parts), ["a", "b", "build", "c", "d"])
        self.assertEqual(parts[0], "build")
        self.assertEqual(most[True], 1)
        self.assertLessEqual(most[False], 2)

    def test_nothing_is_started_after_a_failure(self):
        self.assertEqual(self.run_parts(["build", "a"], ["build"])[0], ["build"])
        parts, _ = self.run_parts(["a", "b", "c", "d", "e", "f"], ["a", "b"])
        self.assertEqual(sorted(parts), ["a", "b"])
        parts, _ = self.run_parts(["a", "b", "c"], ["a"], keep_going=True)
        self.assertEqual(sorted(parts), ["a", "b", "c"])


if __name__ == "__main__":
    unittest.main()
