"""scripts/lint-warnings finds warnings without a remedy or a limit, and only those."""

import importlib.util
import sys
import unittest
from importlib.machinery import SourceFileLoader
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "lint-warnings"

sys.dont_write_bytecode = True
loader = SourceFileLoader("lint_warnings", str(SCRIPT))
lint = importlib.util.module_from_spec(importlib.util.spec_from_loader("lint_warnings", loader))
loader.exec_module(lint)


class Warnings(unittest.TestCase):
    def test_a_limited_warning_with_a_remedy_is_fine(self):
        good = [
            'limited!(WARN, %error, remedy = "do (this)", "it failed");',
            'limited_warning!(remedy = "do this", "it failed");',
            '// Logged once: why.\n// More.\ntracing::warn!(remedy = "do this", "it failed");',
            '// Logged once for each; the text has the remedy.\ntracing::warn!("{text}");',
            'limited!(DEBUG, "nothing");\ntracing::info!("nothing");',
            '#[cfg(test)]\nmod tests {\n    tracing::warn!("in a test");\n}',
        ]
        for text in good:
            self.assertEqual(lint.violations(text), [], text)

    def test_each_lack_is_found_at_its_line(self):
        remedy = "a warning without the field `remedy`"
        limit = "a warning without a limit: use `limited!`"
        cases = {
            '\nlimited!(\n    WARN, "it failed, remedy = none"\n);': [(2, remedy)],
            'limited_warning!(%error, "it failed");': [(1, remedy)],
            'tracing::error!(remedy = "do this", "it failed");': [(1, limit)],
            '// Once.\n\ntracing::warn!("it failed");': [(3, remedy), (3, limit)],
        }
        for text, found in cases.items():
            self.assertEqual(lint.violations(text), found, text)


if __name__ == "__main__":
    unittest.main()
