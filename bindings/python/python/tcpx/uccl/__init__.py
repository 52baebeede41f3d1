"""Stands in for the package `uccl`, if enabled.

Programs that say `from uccl import p2p` run unchanged with `TCPX_AS_UCCL=1` in their environment,
or after `tcpx.uccl.enable()`. An installed UCCL takes precedence, unless `TCPX_AS_UCCL=replace` or
`enable(replace=True)` is used.
"""

import importlib.util
import sys

import _tcpx_uccl  # type: ignore[import-untyped]  # beside the package, loaded at interpreter start

__all__ = ["disable", "enable", "enabled"]


def enabled() -> bool:
    """Returns whether `import uccl` imports tcpx."""
    module = sys.modules.get("uccl")
    if module is not None:
        return getattr(module, "__tcpx__", False)
    spec = importlib.util.find_spec("uccl")
    return spec is not None and spec.origin is not None and spec.origin.endswith("_standin.py")


def enable(*, replace: bool = False) -> None:
    """Makes `import uccl` import tcpx.

    Raises RuntimeError if another UCCL is already installed or imported, unless `replace` is set.
    """
    imported = sys.modules.get("uccl")
    if imported is not None and not getattr(imported, "__tcpx__", False):
        raise RuntimeError("another uccl has been imported already: call tcpx.uccl.enable() before")
    _tcpx_uccl.start(replace)
    if not enabled():
        _tcpx_uccl.stop()
        raise RuntimeError("another uccl is installed: enable(replace=True) takes its place")


def disable() -> None:
    """Undoes `enable`; modules already imported stay."""
    _tcpx_uccl.stop()
