"""Exceptions. Each names the side that must act, and extends the closest built-in exception."""

import builtins


class Error(Exception):
    """Any error that the engine reports."""


class InvalidArgumentError(Error, ValueError):
    """An argument is invalid."""


class NotFoundError(Error, LookupError):
    """The named object does not exist."""


class NotAllowedError(Error):
    """The state of the object forbids the call."""


class BusyError(Error):
    """The transfer is still in flight, or the peer does not keep up. Try again later."""


class TimeoutError(Error, builtins.TimeoutError):
    """The caller's timeout expired; nothing was cancelled."""


class DisconnectedError(Error, ConnectionError):
    """The peer is gone, unreachable or silent."""


class RefusedError(Error):
    """The peer refused."""


class RegionGoneError(RefusedError):
    """The peer no longer has the region: get a new descriptor."""


class AbortedError(Error):
    """The transfer was aborted by this side."""


class TruncatedError(Error):
    """A tagged message was longer than the buffer posted for it."""


class EnvironmentError(Error, OSError):
    """This machine lacks a required resource."""


class ClosedError(Error):
    """The session is closed."""


class ForkedError(Error, RuntimeError):
    """The object belongs to the parent of this forked process: create a session in this process."""


class ProtocolError(Error):
    """The peer broke the protocol."""


class NotSupportedError(Error, NotImplementedError):
    """Not available in this build or on this machine."""
