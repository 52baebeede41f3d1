"""Tests that scripts/try-nixl finds changes in NIXL's table of functions."""

import importlib.machinery
import importlib.util
import pathlib
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "try-nixl"
loader = importlib.machinery.SourceFileLoader("try_nixl", str(SCRIPT))
try_nixl = importlib.util.module_from_spec(importlib.util.spec_from_loader("try_nixl", loader))
loader.exec_module(try_nixl)


def tables(methods):
    """Returns a backend's tables: functions 2 to 14 are pure virtual in the base class, an
    engine has all."""
    engine = [f"_ZN9SomeEngin{method}" for method in methods]
    base = [None, None, *[try_nixl.PURE] * 13, *(f"_ZN17nixlBackendEngine{m}" for m in methods[15:])]
    return {try_nixl.BASE: base, "_ZTV9SomeEngin": [*engine, "_ZN9SomeEngin3ownEv"]}


class TryNixl(unittest.TestCase):
    def test_the_known_table_is_the_same(self):
        known = try_nixl.known()
        self.assertEqual(len(known), 27)
        self.assertEqual(try_nixl.differences(tables(known), known), [])

    def test_changes_are_named(self):
        known = try_nixl.known()
        inserted = [*known[:18], "11getDoorbellEPv", *known[18:]]
        said = try_nixl.differences(tables(inserted), known)
        self.assertEqual(len(said), 2, said)
        self.assertIn("28 functions, not 27", said[0])
        self.assertTrue(said[1].startswith("+ 18: ") and "getDoorbell" in said[1], said)
        swapped = [*known[:7], known[8], known[7], *known[9:]]
        self.assertTrue(try_nixl.differences(tables(swapped), known))

    def test_supported_versions_are_in_order(self):
        numbers = [tuple(map(int, version.split("."))) for version in try_nixl.supported()]
        self.assertEqual(numbers, sorted(set(numbers)))
        self.assertGreater(len(numbers), 1)


if __name__ == "__main__":
    unittest.main()
