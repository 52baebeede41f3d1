"""Stands in for the package `uccl`, where it is switched on.

Programs that say `from uccl import p2p` run unchanged with `TCPX_AS_UCCL=1` in their environment, or after `tcpx.uccl.enable()`. A UCCL
that is installed comes first, unless `TCPX_AS_UCCL=replace` or `enable(replace=True)` says otherwise.
"""

import importlib.util
import sys

import _tcpx_uccl  # type: ignore[import-untyped]  # beside the package, for the interpreter's start

__all__ = ["disable", "enable", "enabled"]


def enabled() -> bool:
    """Whether `import uccl` gives tcpx."""
    module = sys.modules.get("uccl")
    if module is not None:
        return getattr(module, "__tcpx__", False)
    spec = importlib.util.find_spec("uccl")
    return spec is not None and spec.origin is not None and spec.origin.endswith("_standin.py")


def enable(*, replace: bool = False) -> None:
    """Makes `import uccl` give tcpx.

    Raises RuntimeError where another UCCL is installed or imported already, unless `replace` says that
    tcpx shall come first.
    """
    imported = sys.modules.get("uccl")
    if imported is not None and not getattr(imported, "__tcpx__", False):
        raise RuntimeError("another uccl has been imported already: call tcpx.uccl.enable() before")
    _tcpx_uccl.start(replace)
    if not enabled():
        _tcpx_uccl.stop()
        raise RuntimeError("another uccl is installed: enable(replace=True) takes its place")


def disable() -> None:
    """Undoes `enable`; what has been imported stays."""
    _tcpx_uccl.stop()
