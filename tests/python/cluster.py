"""The environment of tests with many nodes: an etcd, and network namespaces as machines."""

import contextlib
import http.client
import os
import shutil
import socket
import subprocess
import time

import pytest

# How long something that must happen may take on a busy machine, in seconds.
PATIENCE = 90


def free_port(host="127.0.0.1"):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        return listener.getsockname()[1]


@contextlib.contextmanager
def etcd_server(folder, host="127.0.0.1", prefix=(), certificate=None):
    """Runs an etcd; gives its address.

    `prefix` is a command that runs it in a namespace, `certificate` a file with a certificate and its key.
    """
    program = os.environ.get("ETCD") or shutil.which("etcd")
    if not program:
        pytest.skip("no etcd: install Debian's etcd-server, or name the program with ETCD")
    for _ in range(5):
        # Another program may take a free port before etcd does.
        port, members_port = free_port(), free_port()
        client = f"{'https' if certificate else 'http'}://{host}:{port}"
        members = f"http://127.0.0.1:{members_port}"
        command = [*prefix, program, "--data-dir", folder / f"etcd-{port}", "--log-level", "warn", "--unsafe-no-fsync"]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", members, "--initial-advertise-peer-urls", members]
        command += ["--initial-cluster", f"default={members}"]
        if certificate:
            command += ["--cert-file", certificate, "--key-file", certificate]
        with open(folder / "etcd.log", "wb") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            # A client waits for it as well.
            if prefix or certificate or _healthy(host, port, server):
                yield f"{host}:{port}"
                return
        finally:
            server.kill()
            server.wait()
    pytest.fail(f"etcd does not start: {(folder / 'etcd.log').read_text()}")


def _healthy(host, port, server):
    deadline = time.monotonic() + PATIENCE
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(host, port, timeout=5)
            try:
                connection.request("GET", "/health")
                if b"true" in connection.getresponse().read():
                    return True
            finally:
                connection.close()
        time.sleep(0.05)
    return False


class Machines:
    """Network namespaces `10.202.0.1` and so on, joined by a switch, which is `10.202.0.254`."""

    def __init__(self, count):
        self.count = count
        self.switch = f"tcpx-nodes-{os.getpid()}-switch"
        self.names = [f"tcpx-nodes-{os.getpid()}-{number}" for number in range(1, count + 1)]

    def __enter__(self):
        try:
            remove_leftovers()
            ip("netns", "add", self.switch)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces need root and iproute2: {getattr(error, 'stderr', error)}")
        try:
            self._wire()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wire(self):
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "address", "add", "10.202.0.254/24", "dev", "bridge")
        for name in ("lo", "bridge"):
            ip("-n", self.switch, "link", "set", name, "up")
        for number, name in enumerate(self.names, 1):
            ip("netns", "add", name)
            ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{number}", "netns", self.switch)
            ip("-n", self.switch, "link", "set", f"port{number}", "master", "bridge", "up")
            ip("-n", name, "address", "add", f"10.202.0.{number}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", name, "link", "set", link, "up")
        deadline = time.monotonic() + PATIENCE
        for name in self.names:
            # The kernel notices a cable within a second, not at once.
            while "state UP" not in ip("-n", name, "link", "show", "eth0") and time.monotonic() < deadline:
                time.sleep(0.02)

    def __exit__(self, *_):
        for name in (self.switch, *self.names):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    @staticmethod
    def inside(name):
        return ["ip", "netns", "exec", name]


def remove_leftovers():
    """Removes the namespaces of killed tests."""
    for line in ip("netns", "list").splitlines():
        name = line.split()[0]
        if name.startswith("tcpx-nodes-") and not os.path.exists(f"/proc/{name.split('-')[2]}"):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def ip(*arguments):
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
