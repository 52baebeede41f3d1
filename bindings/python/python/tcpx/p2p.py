"""The interface of `uccl.p2p`, on tcpx: same names, arguments, defaults and results.

Differences that a program may notice: a failed transfer is reported (`poll_async` returns `(False,
True)`, the blocking calls False) instead of never ending; Ctrl-C works; and since connecting needs
the secret in a peer's metadata, `connect` works for peers whose metadata this process has passed to
`Endpoint.parse_metadata`.
"""

import enum

from tcpx._tcpx import Endpoint, XferDesc, XferHandle, get_oob_ip


class FloatType(enum.Enum):
    """The type of a buffer's elements: a hint for compression, which is not used here."""

    kUndefined = 0
    kFloat16 = 1
    kBFloat16 = 2
    kFloat32 = 3
    kFloat8E4M3FN = 4
    kFloat8E5M2 = 5


kUndefined = FloatType.kUndefined
kFloat16 = FloatType.kFloat16
kBFloat16 = FloatType.kBFloat16
kFloat32 = FloatType.kFloat32
kFloat8E4M3FN = FloatType.kFloat8E4M3FN
kFloat8E5M2 = FloatType.kFloat8E5M2

__all__ = [
    "Endpoint",
    "FloatType",
    "XferDesc",
    "XferHandle",
    "get_oob_ip",
    "kBFloat16",
    "kFloat16",
    "kFloat32",
    "kFloat8E4M3FN",
    "kFloat8E5M2",
    "kUndefined",
]
