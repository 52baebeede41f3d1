"""Tests processes on one host: their memory is copied directly, or carried by lanes if that is
off."""

import contextlib
import os
import signal

import numpy as np
import pytest
import tcpx
from conftest import WAIT, pattern
from tcpx import p2p
from test_processes import run

SIZE = 1 << 20

# Offers memory: a pattern to be read, and as much to be written, whose bytes it prints.
SESSION = """
    import sys
    import numpy as np, tcpx
    from conftest import pattern
    memory = np.concatenate([pattern(1 << 20, 1), np.zeros(1 << 20, np.uint8)])
    with tcpx.Session("owner") as session:
        region = session.register(memory)
        print(session.connection_info.hex(), region.descriptor.hex(), flush=True)
        sys.stdin.readline()
        sys.stdout.write(memory[1 << 20 :].tobytes().hex() + "\\n")
"""

# The same for uccl.p2p: many pieces, each advertised separately.
ENDPOINT = """
    import sys
    import numpy as np
    from conftest import pattern
    from tcpx import p2p
    end = p2p.Endpoint(0)
    memory = pattern(1 << 20, 1)
    at = memory.ctypes.data
    ok, whole = end.advertise_ipc(0, at, 1 << 20)
    ok_too, parts = end.advertisev_ipc(0, [at + i * 65536 for i in range(16)], [65536] * 16)
    assert ok is True and ok_too is True
    print(end.get_metadata().hex(), whole.hex(), *(part.hex() for part in parts), flush=True)
    sys.stdin.readline()
    sys.stdout.write(memory.tobytes().hex() + "\\n")
"""


@contextlib.contextmanager
def owner(code):
    """Starts a process that offers memory; yields it and what it printed."""
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    with run(code, env={**os.environ, "PYTHONPATH": path}) as process:
        try:
            yield process, [bytes.fromhex(word) for word in process.stdout.readline().split()]
        finally:
            process.kill()


@contextlib.contextmanager
def stopped(process):
    """Stops every thread of a process for a while, so that it carries nothing on lanes."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def memory_of(process):
    """Returns the final content of the process's writable memory."""
    process.stdin.write("\n")
    process.stdin.flush()
    return np.frombuffer(bytes.fromhex(process.stdout.readline()), np.uint8)


@pytest.mark.parametrize("way", ["require", "off"])
def test_bytes_move_both_ways(monkeypatch, way):
    monkeypatch.setenv("TCPX_SAME_HOST", way)
    with owner(SESSION) as (process, (info, descriptor)), tcpx.Session("user") as session:
        peer = session.add_peer(info)
        assert peer.same_host is None
        theirs = tcpx.RemoteRegion(descriptor)
        mine, out = np.zeros(SIZE, np.uint8), pattern(SIZE, 2)
        here, outgoing = session.register(mine), session.register(out)
        session.read(peer, [(here, 0, theirs, 0, SIZE)]).wait(WAIT)
        assert (mine == pattern(SIZE, 1)).all()
        session.write(peer, [(outgoing, 0, theirs, SIZE, SIZE)]).wait(WAIT)
        found = peer.same_host
        carried = sum(lane.bytes_sent + lane.bytes_received for lane in peer.lanes)
        if way == "require":
            assert (found.why_not, found.bytes) == (None, 2 * SIZE)
            assert carried < SIZE
            assert repr(found) == f"<tcpx.SameHost {2 * SIZE} bytes copied>"
            # The other side takes no part.
            out[:] = pattern(SIZE, 3)
            with stopped(process):
                session.write(peer, [(outgoing, 0, theirs, SIZE, SIZE)]).wait(WAIT)
        else:
            assert (found.why_not, found.bytes) == ("same_host is off", 0)
            assert carried >= 2 * SIZE
            assert repr(found) == "<tcpx.SameHost not used: same_host is off>"
        assert (memory_of(process) == out).all()


def test_what_is_required_of_a_peer_that_does_not_offer_it_fails(monkeypatch):
    monkeypatch.setenv("TCPX_SAME_HOST", "off")
    with owner(SESSION) as (_, (info, _)), tcpx.Session("user", same_host="require") as session:
        with pytest.raises(tcpx.errors.NotSupportedError):
            session.add_peer(info).connect(WAIT)


@pytest.mark.parametrize("way", ["require", "auto", "off"])
def test_calls_with_ipc(monkeypatch, way):
    """Calls everything that uccl.p2p has; if direct copies are required, with a stopped process."""
    monkeypatch.setenv("TCPX_SAME_HOST", way)
    with owner(ENDPOINT) as (process, (metadata, whole, *parts)):
        end = p2p.Endpoint(0)
        _, _, gpu = p2p.Endpoint.parse_metadata(metadata)
        ok, conn = end.connect_local(gpu)
        assert ok is True
        mine = np.zeros(SIZE, np.uint8)
        at = mine.ctypes.data

        def finish(started):
            ok, transfer = started
            assert ok is True
            while not (answer := end.poll_async(transfer))[1]:
                pass
            return answer[0]

        # The pieces in reverse order: none of them has its position in the whole.
        pointers, sizes = [at + i * 65536 for i in reversed(range(16))], [65536] * 16
        one, many = (conn, at, SIZE, whole), (conn, pointers, sizes, parts)
        turned = lambda bytes: bytes.reshape(16, 65536)[::-1].reshape(SIZE)
        # These open the regions that the peer has advertised.
        assert end.read_ipc(*one) is True and (mine == pattern(SIZE, 1)).all()
        assert end.readv_ipc(*many) is True and (turned(mine) == pattern(SIZE, 1)).all()
        with stopped(process) if way == "require" else contextlib.nullcontext():
            for seed, write, read in [
                (2, lambda: end.write_ipc(*one), lambda: end.read_ipc(*one)),
                (3, lambda: finish(end.write_ipc_async(*one)), lambda: finish(end.read_ipc_async(*one))),
                (4, lambda: end.writev_ipc(*many), lambda: end.readv_ipc(*many)),
                (5, lambda: finish(end.writev_ipc_async(*many)), lambda: finish(end.readv_ipc_async(*many))),
            ]:
                mine[:] = pattern(SIZE, seed)
                assert write() is True
                mine[:] = 0
                assert read() is True and (mine == pattern(SIZE, seed)).all()
        assert (turned(memory_of(process)) == pattern(SIZE, 5)).all()
