"""What tests of the dashboard and the alert rules run on: a real Prometheus, and two sessions that it scrapes."""

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np
import tcpx
from cluster import PATIENCE, free_port

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "docs" / "monitoring" / "tcpx-dashboard.json"
RULES = ROOT / "docs" / "monitoring" / "tcpx-alerts.yml"

# What stands for the dashboard's variables: everything.
VARIABLES = {"job": ".+", "instance": ".+", "session": ".+", "peer": ".+", "__rate_interval": "1m"}


def program(name):
    """Finds `prometheus` or `promtool`; none where there is none."""
    server = os.environ.get("PROMETHEUS") or shutil.which("prometheus")
    found = server and Path(server).with_name(name)
    return str(found) if found and found.exists() else None


def eventually(look, what):
    """Waits until `look` returns something true, and returns that."""
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)
    return found


def panels():
    """Returns the dashboard's panels that show something."""
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def filled(expression):
    """Puts values into the place of the dashboard's variables."""
    return re.sub(r"\$(\w+)", lambda found: VARIABLES[found[1]], expression)


class Prometheus:
    """A server that scrapes ports of this machine four times a second and evaluates the rules as often."""

    def __init__(self, folder, ports):
        self.folder, self.ports = folder, ports
        # Alerts fire as soon as their expression holds.
        rules = re.sub(r"(?m)^( +for:) .*$", r"\1 0s", RULES.read_text())
        (folder / "rules.yml").write_text(rules)
        targets = [f"127.0.0.1:{port}" for port in ports]
        config = {
            "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms", "evaluation_interval": "250ms"},
            "rule_files": ["rules.yml"],
            "scrape_configs": [{"job_name": "tcpx", "static_configs": [{"targets": targets}]}],
        }
        # JSON is YAML.
        (folder / "prometheus.yml").write_text(json.dumps(config))

    def __enter__(self):
        for _ in range(5):
            # Another program may take a free port before Prometheus does.
            port = free_port()
            self.base = f"http://127.0.0.1:{port}"
            command = [program("prometheus"), f"--config.file={self.folder / 'prometheus.yml'}"]
            command += [f"--storage.tsdb.path={self.folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
            command += ["--log.level=warn"]
            with open(self.folder / "prometheus.log", "wb") as log:
                self.server = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
            eventually(lambda: self.server.poll() is not None or self._ready(), "Prometheus")
            if self.server.poll() is None:
                return self
        raise RuntimeError((self.folder / "prometheus.log").read_text())

    def __exit__(self, *_):
        self.server.kill()
        self.server.wait()

    def _ready(self):
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(f"{self.base}/-/ready", timeout=5).status == 200

    def get(self, path, **parameters):
        """Asks the HTTP API; an expression that does not parse raises, with what Prometheus says of it."""
        url = f"{self.base}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def query(self, expression):
        return self.get("query", query=expression)["result"]

    def rules(self):
        return self.get("rules")["groups"][0]["rules"]

    def alerts(self):
        """Returns the alerts that fire, by name."""
        found = {}
        for alert in self.get("alerts")["alerts"]:
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], []).append(alert)
        return found


# The other process: memory that is read and written, notifications that are taken, and metrics.
OTHER = """
import sys, threading
import numpy as np, tcpx
session = tcpx.Session("bob", metrics=int(sys.argv[1]), same_host="off", lanes=2)
memory = np.zeros(1 << 20, np.uint8)
region = session.register(memory)
print(session.connection_info.hex(), region.descriptor.hex(), flush=True)
threading.Thread(target=lambda: [None for _ in iter(session.wait_notification, None)], daemon=True).start()
sys.stdin.read()
"""


class Pair:
    """Session alice here and bob in another process, with metrics, and traffic from one to the other."""

    def __init__(self, threads=1):
        self.threads = [threading.Thread(target=self._move, args=(1 << 20, number << 20)) for number in range(threads)]
        self.ports = [free_port(), free_port()]
        self.over = threading.Event()

    def __enter__(self):
        self.alice = tcpx.Session("alice", metrics=self.ports[0], same_host="off", lanes=2)
        command = [sys.executable, "-c", OTHER, str(self.ports[1])]
        self.bob = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        info, descriptor = (bytes.fromhex(word) for word in self.bob.stdout.readline().split())
        self.peer = self.alice.add_peer(info)
        self.peer.connect(PATIENCE)
        self.memory = np.ones(len(self.threads) << 20, np.uint8)
        self.mine, self.theirs = self.alice.register(self.memory), tcpx.RemoteRegion(descriptor)
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        for thread in self.threads:
            thread.join()
        self.alice.close()
        self.bob.kill()
        self.bob.wait()
        self.bob.stdin.close()
        self.bob.stdout.close()

    def _move(self, most, offset):
        while not self.over.is_set():
            for nbytes in (4096, most):
                segments = [(self.mine, offset, self.theirs, 0, nbytes)]
                try:
                    self.alice.write(self.peer, segments, notify=b"written").wait(PATIENCE)
                    self.alice.read(self.peer, segments).wait(PATIENCE)
                except tcpx.Error:
                    pass
            self.over.wait(0.02)

    def stats(self):
        return self.alice.stats()["peers"]["bob"]

    def reset_lane(self):
        """Resets the stream of alice's first lane, as a firewall would."""
        lane = self.stats()["lanes"][0]
        host, port = lane["local"].rsplit(":", 1)
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as stream:
                if stream.getsockname()[:2] == (host, int(port)) and stream.getpeername():
                    # A connect to nowhere ends a stream with a reset, on both sides.
                    nowhere = ctypes.create_string_buffer(16)
                    assert ctypes.CDLL(None).connect(stream.fileno(), nowhere, len(nowhere)) == 0
                    return
        raise AssertionError(f"no stream from {host}:{port}")

    def kill(self):
        """Kills bob's process."""
        self.bob.send_signal(signal.SIGKILL)
        self.bob.wait()
