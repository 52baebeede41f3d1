"""An endpoint in a process of its own, driven through a pipe.

Processes are forked from a server that has imported NIXL and has created no agent yet: starting one takes
milliseconds. None outlives the tests: it ends when the pipe closes, and is killed when the server goes.
"""

import ctypes
import functools
import multiprocessing
import os
import signal
import time
import traceback
from pathlib import Path

from endpoint import TIMEOUT, Endpoint

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["numpy", "nixl", "pytest"])

PR_SET_PDEATHSIG = 1


def die_with_parent():
    """Makes this process die with the one that started it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class RemoteError(Exception):
    """An exception in the other process; `name` is its class."""

    def __init__(self, name, text):
        super().__init__(text)
        self.name = name


def serve(connection, environment):
    die_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    endpoint = None  # what the first call makes
    while True:
        try:
            function, args, kwargs = connection.recv()
        except EOFError:
            break
        try:
            if endpoint is None:
                endpoint = function(*args, **kwargs)
                answer = (True, None)
            else:
                answer = (True, function(endpoint, *args, **kwargs))
        except BaseException as error:
            answer = (False, (type(error).__name__, traceback.format_exc()))
        connection.send(answer)
    # An agent must be able to end at any time, whatever it still has.
    if endpoint is not None:
        endpoint.close()


def all_stopped(pid):
    """Returns whether each thread of a process has stopped, which takes longer than sending the
    signal."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            stat = (task / "stat").read_text()
        except OSError:  # it has ended
            continue
        # The name, in parentheses, may contain anything; the state follows.
        if stat.rpartition(")")[2].split()[0] != "T":
            return False
    return True


class Peer:
    """Calls methods of an `Endpoint` by name; `run` calls any function of a module with the endpoint.

    `kind` is another class to make there; its first argument is a name, too, and it has `close`.
    """

    def __init__(self, *args, kind=Endpoint, **kwargs):
        self._connection, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=serve, args=(theirs, dict(os.environ)), daemon=True)
        self.process.start()
        theirs.close()
        self.name = args[0]
        self.kind = kind
        self.killed = False
        self.start(kind, *args, **kwargs)
        self.result()

    def __getattr__(self, name):
        return functools.partial(self.run, getattr(self.kind, name))

    def run(self, function, *args, **kwargs):
        self.start(function, *args, **kwargs)
        return self.result()

    def start(self, function, *args, **kwargs):
        """Starts the call; `result` waits for its end."""
        self._connection.send((function, args, kwargs))

    def result(self, timeout=TIMEOUT + 5):
        if not self._connection.poll(timeout):
            self.kill()
            raise TimeoutError(f"{self.name} has not answered within {timeout} s")
        good, answer = self._connection.recv()
        if not good:
            raise RemoteError(*answer)
        return answer

    def freeze(self):
        """Stops the process as a debugger would, and returns once all its threads have stopped."""
        os.kill(self.process.pid, signal.SIGSTOP)
        deadline = time.monotonic() + TIMEOUT
        while not all_stopped(self.process.pid):
            assert time.monotonic() < deadline, f"{self.name} does not stop"
            time.sleep(0.001)

    def thaw(self):
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self):
        """Sends SIGKILL: nothing is cleaned up, the kernel closes the sockets."""
        self.killed = True
        self.process.kill()
        self.process.join(TIMEOUT)

    def stop(self):
        """Lets it exit normally; returns 0 on success."""
        self._connection.close()
        self.process.join(TIMEOUT)
        if self.process.exitcode is None:
            self.kill()
        return self.process.exitcode
