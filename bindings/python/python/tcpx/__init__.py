"""Move memory between processes over plain TCP as if by RDMA.

A Session registers memory and knows peers by their connection info; a Transfer reads from or writes
to a peer's memory without any action of the peer's program. In asyncio, `await` a transfer and
iterate over `session.notifications()` with `async for`.
"""

from tcpx import errors
from tcpx._notifications import Notifications
from tcpx._tcpx import (
    Events,
    Happened,
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
    "Events",
    "Happened",
    "Interface",
    "Lane",
    "Notification",
    "Notifications",
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
