"""Tests two processes: peers that die, Ctrl-C, fork."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import numpy as np
import pytest
import tcpx
from conftest import WAIT
from tcpx import p2p


def run(code, *args, **kwargs):
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), *args], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **kwargs)


OWNER = """
    import sys
    import numpy as np
    from tcpx import p2p
    end = p2p.Endpoint(0)
    memory = np.full(1 << 20, 42, np.uint8)
    ok, mr = end.reg(memory.ctypes.data, memory.nbytes)
    ok, blob = end.advertise(mr, memory.ctypes.data, memory.nbytes)
    print(end.get_metadata().hex(), blob.hex(), flush=True)
    sys.stdin.read()
"""


def test_a_peer_whose_python_sleeps_is_read_and_one_that_died_is_reported():
    with run(OWNER) as owner:
        metadata, blob = (bytes.fromhex(word) for word in owner.stdout.readline().split())
        end = p2p.Endpoint(0)
        ok, conn = end.add_remote_endpoint(metadata)
        assert ok is True
        mine = np.zeros(1 << 20, np.uint8)
        ok, mr = end.reg(mine.ctypes.data, mine.nbytes)
        assert end.read(conn, mr, mine.ctypes.data, mine.nbytes, blob) is True
        assert (mine == 42).all()
        owner.kill()
        owner.wait()
        assert end.read(conn, mr, mine.ctypes.data, mine.nbytes, blob) is False


def test_other_threads_go_on_while_an_endpoint_that_is_dropped_waits_for_its_peer():
    dropping, resumed = threading.Event(), threading.Event()
    with run(OWNER) as owner:

        def resume():
            dropping.wait(WAIT)
            # The drop is in progress by then; otherwise the test would prove nothing, but not fail.
            time.sleep(0.1)
            resumed.set()
            owner.send_signal(signal.SIGCONT)

        metadata, _ = owner.stdout.readline().split()
        end = p2p.Endpoint(0)
        ok, _ = end.add_remote_endpoint(bytes.fromhex(metadata))
        assert ok is True
        owner.send_signal(signal.SIGSTOP)
        # Nobody answers any more only once every thread has stopped.
        os.waitid(os.P_PID, owner.pid, os.WSTOPPED)
        other = threading.Thread(target=resume)
        other.start()
        dropping.set()
        # Ends once the peer answers, which it does when the other thread runs, or else after five
        # seconds.
        del end
        had_its_turn = resumed.is_set()
        other.join()
        owner.kill()
    assert had_its_turn


def test_messages_do_not_outlive_their_connection(monkeypatch):
    """The accepting side of a lost connection does not know a new one in its place."""
    monkeypatch.setenv("TCPX_PEER_TIMEOUT", "1s")
    code = """
        import sys
        from tcpx import p2p
        end = p2p.Endpoint(0)
        print(end.get_metadata().hex(), flush=True)
        end.accept()
        print("accepted", flush=True)
        sys.stdin.read()
    """
    memory = np.zeros(64, np.uint8)
    with run(code) as acceptor:
        end = p2p.Endpoint(0)
        metadata = bytes.fromhex(acceptor.stdout.readline())
        ip, port, gpu = p2p.Endpoint.parse_metadata(metadata)
        ok, conn = end.connect(ip, gpu, remote_port=port)
        assert ok and acceptor.stdout.readline() == "accepted\n"
        mr = end.reg(memory.ctypes.data, 64)[1]
        acceptor.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, acceptor.pid, os.WSTOPPED)
        assert end.send(conn, mr, memory.ctypes.data, 64) is False
        acceptor.send_signal(signal.SIGCONT)
        assert end.send(conn, mr, memory.ctypes.data, 64) is False
        # A new connection works.
        ok, again = end.connect(ip, gpu, remote_port=port)
        assert ok and again != conn
        acceptor.kill()


@pytest.mark.parametrize(
    "waiting",
    [
        "p2p.Endpoint(0).accept()",
        "tcpx.Session().accept()",
        "tcpx.Session().wait_notification()",
        "end.recv(end.add_remote_endpoint(end.get_metadata())[1], end.reg(a.ctypes.data, 8)[1], a.ctypes.data, 8)",
    ],
)
def test_ctrl_c_ends_a_wait(waiting):
    code = f"""
        import tcpx, numpy as np
        from tcpx import p2p
        end, a = p2p.Endpoint(0), np.zeros(8, np.uint8)
        try:
            print("waiting", flush=True)
            {waiting}
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """
    with run(code) as process:
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert process.wait(WAIT) == 0


def test_nothing_stops_where_stderr_takes_nothing():
    code = """
        import tcpx, numpy as np
        alice, bob, gone = (tcpx.Session(name) for name in ("alice", "bob", "gone"))
        nobody = alice.add_peer(gone.connection_info)
        gone.close()
        alice.notify(nobody, b"a line for the log")
        try:
            nobody.connect(20)
        except tcpx.Error:
            pass
        there = np.zeros(64, np.uint8)
        theirs, mine = bob.register(there), alice.register(np.ones(64, np.uint8))
        peer = alice.add_peer(bob.connection_info)
        alice.write(peer, [(mine, 0, tcpx.RemoteRegion(theirs.descriptor), 0, 64)]).wait(20)
        print(there.sum(), flush=True)
    """
    with open("/dev/full", "w") as full, run(code, stderr=full) as process:
        assert process.stdout.readline() == "64\n"
        assert process.wait(WAIT) == 0


def test_a_forked_child_leaves_what_it_inherited_alone():
    session = tcpx.Session("parent")
    end = p2p.Endpoint(0)
    region = session.register(bytearray(1 << 20))
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # later Pythons warn of forking with threads
        child = os.fork()
    if child == 0:
        try:
            del session, end, region  # what the interpreter does at its end
            with tcpx.Session("child") as own:
                memory = own.register(bytearray(8))
                own.write(own.own_peer, [(memory, 0, tcpx.RemoteRegion(memory.descriptor), 4, 4)]).wait(WAIT)
            os.write(write, b"fine")
        finally:
            os._exit(0)
    assert os.read(read, 4) == b"fine"
    os.waitpid(child, 0)
    session.notify(session.own_peer, b"still here")
    assert session.wait_notification(WAIT).message == b"still here"
    session.close()


def test_importing_starts_nothing():
    code = "import os, tcpx, tcpx.p2p; print(len(os.listdir('/proc/self/task')))"
    with run(code) as process:
        assert process.communicate(timeout=WAIT)[0] == "1\n"


def _child(pipe):
    end = p2p.Endpoint(0)
    pipe.send(end.get_metadata())
    pipe.send(end.accept()[0])


def test_endpoints_in_forked_children():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=_child, args=(theirs,))
        process.start()
    end = p2p.Endpoint(0)
    assert end.add_remote_endpoint(ours.recv())[0] is True
    assert ours.poll(WAIT) and ours.recv() is True
    process.join()
    assert process.exitcode == 0
