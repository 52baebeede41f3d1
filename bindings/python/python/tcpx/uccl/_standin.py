"""The package `uccl` while tcpx stands in for it."""

import sys

import tcpx
from tcpx import p2p
from tcpx.uccl import utils

__tcpx__ = True
# The version of the interface, and of this implementation.
__version__ = f"0.1.1+tcpx.{tcpx.__version__}"
is_efa = False


def has_efa() -> bool:
    """Returns whether this package uses EFA devices: never."""
    return False


def _no_plugin() -> str:
    raise FileNotFoundError("tcpx stands in for uccl.p2p: it has no NCCL plugin")


nccl_plugin_path = rccl_plugin_path = efa_plugin_path = efa_nccl_path = _no_plugin

sys.modules["uccl.p2p"] = p2p
sys.modules["uccl.utils"] = utils
