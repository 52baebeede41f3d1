"""Public names and their arguments stay, as docs/compatibility.md promises.

public.txt lists those of all releases. A release adds what is new: TCPX_BLESS=1 with this test.
"""

import importlib
import inspect
import os
from pathlib import Path

MODULES = ("tcpx", "tcpx.errors", "tcpx.nixl", "tcpx.p2p")
LIST = Path(__file__).with_name("public.txt")


def arguments(function):
    """Returns the names of a function's arguments, in their order; None if they are unknown."""
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    return [name for name in names if name != "self"]


def public(owner, prefix):
    """Returns every public name below `owner`, each with its arguments if it can be called."""
    names = getattr(owner, "__all__", None) if inspect.ismodule(owner) else None
    for name in sorted(names or vars(owner)):
        value = getattr(owner, name)
        if name.startswith("_") or inspect.ismodule(value):
            continue
        taken = arguments(value) if callable(value) and not inspect.isclass(value) else None
        yield f"{prefix}.{name}" + (f"({', '.join(taken)})" if taken is not None else "")
        if inspect.isclass(value):
            yield from public(value, f"{prefix}.{name}")


def kept(line, now):
    """Returns whether a released name still exists, with its arguments before any new ones."""
    name, bracket, rest = line.partition("(")
    if not bracket:
        return any(there.partition("(")[0] == name for there in now)
    start = f"{name}({rest.removesuffix(')')}"
    return any(there == line or there.startswith(f"{start}, ") for there in now) or (
        rest == ")" and any(there.startswith(start) for there in now)
    )


def test_released_names_are_still_there():
    now = [line for name in MODULES for line in public(importlib.import_module(name), name)]
    assert "tcpx.Session.register" in {line.partition("(")[0] for line in now}
    released = LIST.read_text().splitlines() if LIST.exists() else []
    gone = [line for line in released if not kept(line, now)]
    assert not gone, f"changed or removed: {gone}"
    if os.environ.get("TCPX_BLESS"):
        replaced = {line.partition("(")[0] for line in now}
        stay = [line for line in released if line.partition("(")[0] not in replaced]
        LIST.write_text("\n".join(sorted(set(stay + now))) + "\n")


def test_a_name_or_an_argument_that_goes_is_noticed():
    now = ["m.f(a, b)", "m.C"]
    assert all(kept(line, now) for line in ("m.f(a)", "m.f(a, b)", "m.f()", "m.C"))
    gone = ("m.f(b)", "m.f(a, c)", "m.f(a, b, c)", "m.g()", "m.D")
    assert not any(kept(line, now) for line in gone)
