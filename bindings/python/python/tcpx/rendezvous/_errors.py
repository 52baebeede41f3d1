"""Errors of a rendezvous."""

from __future__ import annotations

from tcpx import errors


class RendezvousError(errors.Error):
    """The processes of a run could not exchange their data."""


class MissingError(RendezvousError, errors.TimeoutError):
    """Some processes did not arrive in time; `missing` has their ranks."""

    def __init__(self, message: str, missing: list[int]) -> None:
        super().__init__(message)
        self.missing = missing


class PeerFailedError(RendezvousError):
    """Another process of the run has failed; `rank` is its rank."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank
