"""Move memory between processes over plain TCP as if by RDMA.

A Session registers memory and knows peers by their connection info; a Transfer reads from or writes to
a peer's memory while the peer's program does nothing.
"""

from tcpx import errors
from tcpx._tcpx import (
    Interface,
    Lane,
    Notification,
    Peer,
    Region,
    RemoteRegion,
    SameHost,
    Session,
    Setting,
    Transfer,
    __version__,
    interfaces,
    settings,
)
from tcpx.errors import Error

__all__ = [
    "Error",
    "Interface",
    "Lane",
    "Notification",
    "Peer",
    "Region",
    "RemoteRegion",
    "SameHost",
    "Session",
    "Setting",
    "Transfer",
    "__version__",
    "errors",
    "interfaces",
    "settings",
]
