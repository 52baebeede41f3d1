"""Makes an installed NIXL see the backend `TCPX`, which comes with this package.

    import tcpx.nixl
    tcpx.nixl.enable()                                    # for this process and its children
    agent = nixl_agent("me", nixl_agent_config(backends=["TCPX"]))

Applications that request UCX from NIXL, and cannot be configured otherwise, get TCPX with
`enable(as_="UCX")`. The command `tcpx nixl` does the same from a shell, and does the work here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["enable", "install", "plugin", "uninstall"]

_FILE = "libplugin_TCPX.so"
_PACKAGES = ("nixl_cu12", "nixl_cu13")


def plugin() -> Path:
    """Returns the backend's file."""
    path = Path(__file__).parent / _FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: this package was built without the NIXL backend")
    return path


def enable(as_: str | None = None, *, untested: bool = False) -> None:
    """Makes NIXL find the backend, in this process and its children.

    Call it before the first agent is created. It sets NIXL_PLUGIN_DIR to a folder in the user's
    cache that has the backend and links to all of NIXL's own plugins. With `as_="UCX"` the backend
    answers to that name too, in place of NIXL's UCX. Raises RuntimeError if the version of NIXL is
    not supported; `untested` allows a version newer than any tested.
    """
    if as_ is None and not _found():
        # NIXL may be installed without its Python package.
        os.environ["NIXL_PLUGIN_DIR"] = str(plugin().parent)
        return
    os.environ["NIXL_PLUGIN_DIR"] = _tcpx("path", *_how(as_, untested))["path"]


def install(as_: str | None = None, *, untested: bool = False) -> list[Path]:
    """Installs the backend permanently beside those of every installed NIXL; returns its files.

    With `as_="UCX"` it replaces NIXL's UCX too, which is kept beside it. Raises RuntimeError if the
    version of NIXL is not supported; `untested` allows a version newer than any tested.
    """
    return [Path(row["plugin"]) for row in _tcpx("install", *_how(as_, untested))["nixl"]]


def uninstall() -> list[Path]:
    """Undoes `install`, and restores NIXL's own UCX; returns the removed files."""
    if not _found():
        return []
    rows = _tcpx("uninstall")["nixl"]
    return [Path(row["plugin"]) for row in rows if row["state"] == "removed"]


def _how(as_: str | None, untested: bool) -> list[str]:
    return [*(["--as", as_] if as_ is not None else []), *(["--untested"] if untested else [])]


def _tcpx(action: str, *options: str) -> Any:
    """Returns the output of `tcpx nixl` about the NIXLs of this Python."""
    found = _found()
    if not found:
        raise ModuleNotFoundError(f"no NIXL is installed here: looked for {' and '.join(_PACKAGES)}")
    command = Path(__file__).parents[1] / "bin" / "tcpx"
    if not command.is_file():
        raise FileNotFoundError(f"{command} does not exist: this package was built without the command")
    places = [f"--found={line}" for line in found]
    python = sys.executable or "python3"
    about = ["--json", "--plugin", str(plugin()), "--python", python, *places]
    done = subprocess.run([command, "nixl", action, *about, *options], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip().removeprefix("error: "))
    return json.loads(done.stdout)


def _found() -> list[str]:
    """Returns package, version and folder of every NIXL of this Python, for `tcpx nixl`."""
    lines = []
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            try:
                version = importlib.metadata.version(package.replace("_", "-"))
            except importlib.metadata.PackageNotFoundError:
                version = "unknown"
            lines.append(f"{package}\t{version}\t{Path(spec.origin).parent.parent}")
    return lines
