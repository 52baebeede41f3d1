"""Lets `import uccl` find tcpx. Beside the package, so that starting Python does not load it."""

import importlib.util
import os
import sys


class Finder:
    """Finds `uccl` in tcpx's stand-in, unless another one is installed and takes precedence."""

    def __init__(self, replace):
        self.replace = replace

    def find_spec(self, name, path=None, target=None):
        if name != "uccl" or (not self.replace and self._installed()):
            return None
        package = importlib.util.find_spec("tcpx")
        if package is None or package.origin is None:
            return None
        standin = os.path.join(os.path.dirname(package.origin), "uccl", "_standin.py")
        return importlib.util.spec_from_file_location("uccl", standin, submodule_search_locations=[])

    def _installed(self):
        others = (finder for finder in sys.meta_path if not isinstance(finder, Finder))
        specs = (finder.find_spec("uccl", None) for finder in others)
        # A folder of that name is no package.
        return any(spec is not None and spec.origin is not None for spec in specs)


def start(replace=False):
    """Makes `import uccl` import tcpx if no UCCL is installed; with `replace`, also if one is."""
    stop()
    sys.meta_path.insert(0, Finder(replace))


def stop():
    """Undoes `start`."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]


def start_by_environment():
    """Returns the mode that `TCPX_AS_UCCL` requests: nothing, 1, or replace."""
    wanted = os.environ.get("TCPX_AS_UCCL", "").lower()
    if wanted in ("", "0", "no", "off", "false"):
        return
    if wanted not in ("1", "yes", "on", "true", "replace"):
        sys.stderr.write(f"TCPX_AS_UCCL={wanted!r} is not understood: expected 1 or replace\n")
        return
    start(replace=wanted == "replace")
