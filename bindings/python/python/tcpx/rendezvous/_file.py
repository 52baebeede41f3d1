"""A store in a directory shared by all processes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from urllib.parse import quote

from tcpx.rendezvous._errors import RendezvousError
from tcpx.rendezvous._store import MEMBERS, PolledStore


class FileStore(PolledStore):
    """Keeps each value in a file, `DIRECTORY/RUN/FOLDER/RANK`, readable by the user only.

    A file appears complete, by renaming. NFS is enough: nothing needs locks.
    """

    def __init__(self, directory: str, run: str) -> None:
        self.root = Path(directory, quote(run, safe=""))
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise RendezvousError(f"cannot make the directory {self.root}: {error}") from error

    def claim(self, rank: int, value: bytes) -> bytes | None:
        claim = self._folder(MEMBERS) / f"{rank}.claim"
        try:
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return self.values(MEMBERS).get(rank, b"")
        except OSError as error:
            raise RendezvousError(f"cannot write to {self.root}: {error}") from error
        self.put(MEMBERS, rank, value)
        return None

    def put(self, folder: str, rank: int, value: bytes) -> None:
        try:
            target = self._folder(folder) / str(rank)
            fresh = target.with_name(f"{rank}.new")
            with open(fresh, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(value)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(target)
        except OSError as error:
            raise RendezvousError(f"cannot write to {self.root}: {error}") from error

    def ranks(self, folder: str) -> set[int]:
        try:
            # A change by this client makes an NFS client ask the server, which knows the changes of
            # others; otherwise it may answer from its cache for a minute.
            os.utime(self.root / folder)
            return {int(name) for name in os.listdir(self.root / folder) if name.isdigit()}
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise RendezvousError(f"cannot read {self.root}: {error}") from error

    def values(self, folder: str) -> dict[int, bytes]:
        try:
            paths = {rank: self.root / folder / str(rank) for rank in self.ranks(folder)}
            return {rank: path.read_bytes() for rank, path in paths.items()}
        except OSError as error:
            raise RendezvousError(f"cannot read {self.root}: {error}") from error

    def clear(self) -> None:
        # Another process may be doing the same.
        shutil.rmtree(self.root, ignore_errors=True)

    def close(self) -> None:
        pass

    def _folder(self, folder: str) -> Path:
        path = self.root / folder
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path
