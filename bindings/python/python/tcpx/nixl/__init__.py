"""Makes an installed NIXL see the backend `TCPX`, which comes with this package.

    import tcpx.nixl
    tcpx.nixl.enable()                                    # for this process and its children
    agent = nixl_agent("me", nixl_agent_config(backends=["TCPX"]))
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

__all__ = ["enable", "install", "plugin", "uninstall"]

_FILE = "libplugin_TCPX.so"
_PACKAGES = ("nixl_cu12", "nixl_cu13")


def plugin() -> Path:
    """The backend's file."""
    path = Path(__file__).parent / _FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: this package was built without the NIXL backend")
    return path


def enable() -> None:
    """Makes NIXL look for backends in this package, in this process and its children.

    Call it before the first agent is made. NIXL then looks nowhere else: UCX and its other backends are not there for this process. Where
    they are needed too, use `install`.
    """
    os.environ["NIXL_PLUGIN_DIR"] = str(plugin().parent)


def install() -> list[Path]:
    """Puts the backend beside those of every installed NIXL, once and for all; says where."""
    folders = _folders()
    if not folders:
        raise ModuleNotFoundError(f"no NIXL is installed here: looked for {' and '.join(_PACKAGES)}")
    return [_replace(folder / _FILE) for folder in folders]


def uninstall() -> list[Path]:
    """Undoes `install`; says from where."""
    removed = [folder / _FILE for folder in _folders() if (folder / _FILE).exists()]
    for path in removed:
        path.unlink()
    return removed


def _replace(target: Path) -> Path:
    # In one step: a program that is starting finds the old one or the new one.
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        shutil.copy2(plugin(), fresh)
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)
    return target


def _folders() -> list[Path]:
    """Where installed NIXLs load backends from."""
    found = []
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            site = Path(spec.origin).parent.parent
            found.append(site / f".{package}.mesonpy.libs" / "plugins")
    return [folder for folder in found if folder.is_dir()]
