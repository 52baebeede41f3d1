"""Lets the processes of one run find each other through their cluster, and exchange a few bytes.

    from tcpx.rendezvous import Rendezvous

    with tcpx.Session() as session, Rendezvous.from_env() as meeting:
        infos = meeting.exchange(session.connection_info)      # one of each process, by rank
        peers = [session.add_peer(info) for info in infos]
        meeting.barrier()

Every process makes the same calls in the same order. `rendezvous("etcd://host:2379/prefix")`,
`rendezvous("file:///shared/directory")` and `rendezvous("tcp://host:port")` name the place; rank
and size come from torchrun, Slurm or Kubernetes, or are passed.

Every reader of the place can read the exchanged bytes, and connection infos contain a secret.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from urllib.parse import parse_qs, unquote, urlsplit

from tcpx import errors
from tcpx.rendezvous._errors import MissingError, PeerFailedError, RendezvousError
from tcpx.rendezvous._etcd import EtcdStore
from tcpx.rendezvous._file import FileStore
from tcpx.rendezvous._launch import Launch, detect
from tcpx.rendezvous._store import MAX_VALUE, Gathered, Store
from tcpx.rendezvous._tcp import TcpStore

__all__ = ["MAX_VALUE", "MissingError", "PeerFailedError", "Rendezvous", "RendezvousError", "rendezvous"]

# How long processes wait for each other by default, in seconds: nodes and pods take minutes to
# start.
DEFAULT_TIMEOUT = 300.0

# Maximum processes that an error names.
NAMED = 8

ETCD_PORT = 2379


def rendezvous(
    url: str = "env",
    *,
    rank: int | None = None,
    size: int | None = None,
    run: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    environ: Mapping[str, str] | None = None,
) -> Rendezvous:
    """Joins the processes of a run.

    `url` is `etcd://HOST:PORT[,HOST:PORT…]/PREFIX` (`etcds://` with TLS), `file:///DIRECTORY`,
    `tcp://HOST:PORT`, which rank 0 serves, or `env`: the value of the variable TCPX_RENDEZVOUS,
    else the launcher's own address of rank 0. `rank` and `size` come from the launcher unless they
    are passed.

    `run` distinguishes runs: the same text in all processes of a run, and in no other run. It may
    also be in the URL (`?run=…`) or in TCPX_RENDEZVOUS_RUN; Slurm's job id is used by default. etcd
    and directories need it, since they keep data of earlier runs.

    `timeout` is how many seconds processes wait for each other, here and in each exchange.
    """
    environ = os.environ if environ is None else environ
    deadline = time.monotonic() + timeout
    launch = detect(environ, socket.getfqdn) if rank is None or size is None or url == "env" else None
    rank, size = _identity(rank, size, launch)
    if url == "env":
        url = environ.get("TCPX_RENDEZVOUS", "") or _launched(launch)
    parts = urlsplit(url)
    run = run or parse_qs(parts.query).get("run", [""])[0] or environ.get("TCPX_RENDEZVOUS_RUN")
    run = run or (launch.run if launch else None)
    store = _store(url, run, rank, timeout, deadline)
    return Rendezvous(store, rank, size, url=url, run=run, timeout=timeout, places=launch.places if launch else {})


class Rendezvous:
    """A process among those of its run: created by `rendezvous` or `Rendezvous.from_env`.

    Every process calls `exchange` and `barrier` in the same order, and `close` (or leaves the
    `with` block) at the end. An exception that leaves the `with` block is reported to the others,
    whose next or current call raises PeerFailedError.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        url: str,
        run: str | None,
        timeout: float,
        places: Mapping[int, str],
    ) -> None:
        self.rank = rank
        self.size = size
        self.run = run
        self.timeout = timeout
        self._url = url
        self._places = places
        self._counts: dict[str, int] = {}
        self._store: Store | None = store
        try:
            self._claim(store)
        except BaseException:
            store.close()
            raise
        try:
            self._compare_sizes(store)
        except BaseException as error:
            self._leave(str(error) or type(error).__name__)
            raise

    @classmethod
    def from_env(cls, *, timeout: float = DEFAULT_TIMEOUT) -> Rendezvous:
        """Joins the processes that torchrun, Slurm or Kubernetes has started with this one."""
        return rendezvous("env", timeout=timeout)

    def exchange(self, info: bytes, name: str = "exchange", *, timeout: float | None = None) -> list[bytes]:
        """Sends `info` to every process; returns the info of each process, by rank.

        At most MAX_VALUE bytes. `name` identifies the exchange in errors; it is the same in every
        process.
        """
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", name):
            raise errors.InvalidArgumentError(f"name: 1 to 64 letters, digits, `_`, `.` or `-`, not {name!r}")
        if not isinstance(info, (bytes, bytearray, memoryview)):
            raise TypeError(f"info: expected bytes, got {type(info).__name__}")
        value = bytes(info)
        if len(value) > MAX_VALUE:
            raise errors.InvalidArgumentError(f"info: {len(value)} bytes are more than {MAX_VALUE}")
        if self._store is None:
            raise errors.ClosedError("the rendezvous is closed")
        # Distinct from earlier exchanges of the same name, and from folders that are no exchange.
        count = self._counts[name] = self._counts.get(name, 0) + 1
        timeout = self.timeout if timeout is None else timeout
        folder = f"{name}-{count}"
        gathered = self._store.gather(folder, self.rank, value, self.size, time.monotonic() + timeout)
        if len(gathered.values) < self.size:
            raise self._why_not(name, gathered, timeout)
        return [gathered.values[rank] for rank in range(self.size)]

    def barrier(self, name: str = "barrier", *, timeout: float | None = None) -> None:
        """Waits until every process has called this."""
        self.exchange(b"", name, timeout=timeout)

    def close(self) -> None:
        """Leaves. The last process to leave removes the stored data of the run."""
        self._leave(None)

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        # A process that stops because another one failed must not report a failure of its own.
        if error is None or isinstance(error, PeerFailedError):
            self._leave(None)
        else:
            self._leave(str(error) or type(error).__name__)

    def __repr__(self) -> str:
        return f"<Rendezvous: rank {self.rank} of {self.size}, {self._url}, run {self.run!r}>"

    def _claim(self, store: Store) -> None:
        # The random part distinguishes this process from one with the same id in another container.
        mine = f"{self.size} {os.getpid()} {os.urandom(8).hex()} {socket.gethostname()}".encode()
        if (other := store.claim(self.rank, mine)) is not None:
            raise RendezvousError(
                f"rank {self.rank} is taken, by {_host(other) or 'another process'}: two processes have the same rank,"
                f" or an earlier run was also called {self.run!r} and was killed. Give this run another name"
                " (TCPX_RENDEZVOUS_RUN)"
            )

    def _compare_sizes(self, store: Store) -> None:
        for rank, member in store.members().items():
            size = member.split(b" ", 1)[0].decode()
            if size != str(self.size):
                raise RendezvousError(
                    f"rank {rank} ({_host(member)}) says that there are {size} processes, rank {self.rank} that there"
                    f" are {self.size}: start all with the same size"
                )

    def _leave(self, failure: str | None) -> None:
        store, self._store = self._store, None
        if store is not None:
            try:
                store.leave(self.rank, self.size, failure)
            except RendezvousError:
                # The store is gone: nobody can be told, and this process no longer needs it.
                pass
            finally:
                store.close()

    def _why_not(self, name: str, gathered: Gathered, timeout: float) -> RendezvousError:
        if gathered.failed:
            rank, why = next(iter(sorted(gathered.failed.items())))
            who = self._names([rank], gathered.members)
            return PeerFailedError(f"{who} failed: {why.decode(errors='replace')}", rank)
        missing = [rank for rank in range(self.size) if rank not in gathered.values]
        late = [rank for rank in missing if rank in gathered.members]
        absent = [rank for rank in missing if rank not in gathered.members]
        said = []
        if absent:
            said.append(f"{self._names(absent, {})} never came")
        if late:
            said.append(f"{self._names(late, gathered.members)} came and did not reach it")
        return MissingError(
            f"{name}: {len(gathered.values)} of {self.size} processes are here after {timeout:g} s; {'; '.join(said)}."
            f" Look at their output; all must use the same place ({self._url}) and run ({self.run!r})",
            missing,
        )

    def _names(self, ranks: Iterable[int], members: Mapping[int, bytes]) -> str:
        ranks = list(ranks)
        names = []
        for rank in ranks[:NAMED]:
            place = _host(members[rank]) if rank in members else self._places.get(rank, "")
            names.append(f"rank {rank} ({place})" if place else f"rank {rank}")
        if len(ranks) > NAMED:
            names.append(f"{len(ranks) - NAMED} more")
        return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _host(member: bytes) -> str:
    """Returns the host and process of a member."""
    words = member.decode(errors="replace").split(" ", 3)
    return f"{words[3]}, pid {words[1]}" if len(words) == 4 else ""


def _identity(rank: int | None, size: int | None, launch: Launch | None) -> tuple[int, int]:
    if launch:
        rank = launch.rank if rank is None else rank
        size = launch.size if size is None else size
    if rank is None or size is None:
        raise RendezvousError(
            "cannot tell which process of how many this is: neither RANK and WORLD_SIZE (torchrun) nor SLURM_PROCID"
            " and SLURM_NTASKS (srun) nor JOB_COMPLETION_INDEX and WORLD_SIZE (Kubernetes) are set. Use a launcher,"
            " set the first two for each process, or pass rank and size"
        )
    if not 0 <= rank < size:
        raise errors.InvalidArgumentError(f"rank: {rank} is not from 0 to {size - 1}")
    return rank, size


def _launched(launch: Launch | None) -> str:
    """Returns the URL of the store that the launcher's variables allow."""
    if launch and launch.address:
        host, port = launch.address
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    launcher = f" ({launch.launcher} has started this process and does not say where rank 0 is)" if launch else ""
    raise RendezvousError(
        f"cannot tell where the processes meet{launcher}: set MASTER_ADDR and MASTER_PORT, or TCPX_RENDEZVOUS to"
        " etcd://HOST:2379/PREFIX, file:///SHARED/DIRECTORY or tcp://HOST:PORT"
    )


def _store(url: str, run: str | None, rank: int, timeout: float, deadline: float) -> Store:
    parts = urlsplit(url)
    if parts.scheme not in ("etcd", "etcds", "file", "tcp"):
        raise errors.InvalidArgumentError(
            f"url: {url!r} is none of etcd://HOST:2379/PREFIX, file:///DIRECTORY, tcp://HOST:PORT and env"
        )
    if "@" in parts.netloc:
        raise errors.InvalidArgumentError("url: users and passwords are not supported")
    if parts.scheme == "tcp":
        ((host, port),) = _addresses(url, parts.netloc, None)
        return TcpStore(host, port, run or "", rank, deadline)
    if not run:
        raise RendezvousError(
            f"nothing tells this run from others at {url}: set TCPX_RENDEZVOUS_RUN to the same text in all its"
            " processes, and to another one for each run, such as what `uuidgen` prints"
        )
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or len(parts.path) < 2:
            raise errors.InvalidArgumentError(f"url: {url!r} is not three slashes and a directory: file:///shared/tcpx")
        return FileStore(unquote(parts.path), run)
    addresses = _addresses(url, parts.netloc, ETCD_PORT)
    return EtcdStore(addresses, unquote(parts.path).rstrip("/") or "/tcpx", run, timeout, tls=parts.scheme == "etcds")


def _addresses(url: str, netloc: str, default: int | None) -> list[tuple[str, int]]:
    addresses = []
    for word in netloc.split(","):
        one = urlsplit(f"//{word}")
        try:
            port = one.port or default
        except ValueError:
            port = None
        if not one.hostname or not port:
            raise errors.InvalidArgumentError(f"url: {url!r} needs a host and a port from 1 to 65535")
        addresses.append((one.hostname, port))
    if default is None and len(addresses) > 1:
        raise errors.InvalidArgumentError(f"url: {url!r} must name one address")
    return addresses
