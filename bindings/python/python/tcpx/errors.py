"""What can go wrong. Each exception says who has to act, and is also the built-in one that comes closest."""

import builtins


class Error(Exception):
    """Anything that the engine reports."""


class InvalidArgumentError(Error, ValueError):
    """The call made no sense: fix the arguments."""


class NotFoundError(Error, LookupError):
    """What was named does not exist."""


class NotAllowedError(Error):
    """The state of the object forbids the call."""


class BusyError(Error):
    """Not now: the transfer is still in flight, or the peer does not keep up. Try again later."""


class TimeoutError(Error, builtins.TimeoutError):
    """The caller's own time limit ran out; nothing was cancelled."""


class DisconnectedError(Error, ConnectionError):
    """The peer is gone, unreachable or silent."""


class RefusedError(Error):
    """The peer answered and said no."""


class RegionGoneError(RefusedError):
    """The peer does not have the region any more: get a new descriptor."""


class AbortedError(Error):
    """The transfer was aborted by this side."""


class TruncatedError(Error):
    """A tagged message was longer than the buffer posted for it."""


class EnvironmentError(Error, OSError):
    """This machine did not give what was needed."""


class ClosedError(Error):
    """The session is closed."""


class ForkedError(Error, RuntimeError):
    """The object is of the process that this one was forked from: create a session in this one."""


class ProtocolError(Error):
    """The peer broke the protocol."""


class NotSupportedError(Error, NotImplementedError):
    """Not available in this build or on this machine."""
