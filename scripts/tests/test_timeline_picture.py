"""Tests that scripts/timeline-picture reads the traces of processes that were killed."""

import importlib.machinery
import importlib.util
import json
import pathlib
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "timeline-picture"
loader = importlib.machinery.SourceFileLoader("timeline_picture", str(SCRIPT))
timeline_picture = importlib.util.module_from_spec(importlib.util.spec_from_loader("timeline_picture", loader))
loader.exec_module(timeline_picture)

EVENTS = [
    {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "bench on höst"}},
    {"name": "sendmsg", "ph": "X", "pid": 1, "tid": 2, "ts": 3.5, "dur": 1.25, "args": {"of": [1]}},
]
LINES = [json.dumps(event, ensure_ascii=False).encode() for event in EVENTS]


def load(content):
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        return timeline_picture.load(file.name)


class Load(unittest.TestCase):
    def test_a_complete_file(self):
        self.assertEqual(load(b"[\n" + b",\n".join(LINES) + b"\n]\n"), EVENTS)

    def test_a_file_that_ends_anywhere(self):
        text = b"[\n" + b",\n".join(LINES)
        first = len(b"[\n" + LINES[0])
        for end in range(1, len(text) + 1):
            whole = (end >= first) + (end == len(text))
            self.assertEqual(load(text[:end]), EVENTS[:whole], text[:end])

    def test_a_defect_elsewhere_is_an_error(self):
        with self.assertRaises(json.JSONDecodeError):
            load(b"[\n" + LINES[0][:20] + b",\n" + LINES[1] + b"\n]\n")


if __name__ == "__main__":
    unittest.main()
