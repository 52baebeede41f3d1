"""Tests statistics: the counts match the transfers, as a dictionary and as metrics."""

import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest
import tcpx
from conftest import WAIT, pattern
from prometheus_client.openmetrics import parser


def samples(text):
    """Returns every sample by its name and labels; the parser refuses text that is not
    OpenMetrics."""
    found = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def total(found, name, **labels):
    return sum(v for (n, have), v in found.items() if n == name and labels.items() <= dict(have).items())


def move(alice, bob, peer, nbytes, rounds):
    source, target = pattern(nbytes, 1), np.zeros(nbytes, np.uint8)
    mine, theirs = alice.register(source), bob.register(target)
    remote = tcpx.RemoteRegion(theirs.descriptor)
    for _ in range(rounds):
        alice.write(peer, [(mine, 0, remote, 0, nbytes)], notify=b"abc").wait(WAIT)
        alice.read(peer, [(mine, 0, remote, 0, nbytes)]).wait(WAIT)
        bob.wait_notification(WAIT)


def moved(stats, peer, side):
    return sum(path[side]["bytes"] for path in stats["peers"][peer]["paths"].values())


def test_counts_are_what_was_moved(pair):
    alice, bob, peer = pair
    move(alice, bob, peer, 100_000, 3)
    here = alice.stats()
    assert here["session"] == "alice"
    to_bob = here["peers"]["bob"]
    for kind in ("read", "write"):
        assert to_bob["transfers"][kind] == {"started": 3, "completed": 3, "bytes": 300_000, "aborted": 0}
    assert to_bob["failed"] == {} and to_bob["in_flight"] == 0 and to_bob["connected"] is True
    assert moved(here, "bob", "written") == moved(here, "bob", "read") == 300_000
    assert to_bob["latency"]["1MiB"]["count"] == 6
    assert to_bob["notifications_sent"] == {"count": 3, "bytes": 9}
    assert "kernel" not in to_bob["lanes"][0]
    kernel = alice.stats(kernel=True)["peers"]["bob"]["lanes"][0]["kernel"]
    assert kernel["rtt_seconds"] > 0 and kernel["congestion_window"] > 0
    heard = bob.stats()["peers"]["alice"]["notifications_received"]
    assert heard == {"count": 3, "bytes": 9}


def test_metrics_text_is_openmetrics_and_says_the_same(pair):
    alice, bob, peer = pair
    move(alice, bob, peer, 70_000, 2)
    found = samples(alice.metrics())
    labels = {"session": "alice", "peer": "bob", "initiator": "self"}
    assert total(found, "tcpx_bytes_total", direction="sent", **labels) == 140_000
    assert total(found, "tcpx_bytes_total", direction="received", **labels) == 140_000
    count = total(found, "tcpx_transfer_duration_seconds_count", peer="bob")
    assert count == total(found, "tcpx_transfer_duration_seconds_bucket", peer="bob", le="+Inf") == 4
    assert total(found, "tcpx_connected", peer="bob") == 1


def test_a_name_may_hold_anything():
    with tcpx.Session('a "b"\\ \n{}') as session:
        found = samples(session.metrics())
    assert {dict(labels).get("session") for _, labels in found} == {None, 'a "b"\\ \n{}'}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def scrape(port, path="/metrics"):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=WAIT) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
        return samples(answer.read().decode())


def test_sessions_are_served_together_until_they_close():
    port = free_port()
    with tcpx.Session("one", metrics=port) as one:
        with tcpx.Session("two", metrics=port):
            sessions = {dict(labels).get("session") for _, labels in scrape(port)}
            assert sessions == {None, "one", "two"}
            with pytest.raises(urllib.error.HTTPError):
                scrape(port, "/other")
        assert {dict(labels).get("session") for _, labels in scrape(port)} == {None, "one"}
        one.close()
    with pytest.raises(OSError):
        scrape(port)


def test_a_port_that_is_taken_costs_metrics_and_nothing_else():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with tcpx.Session("alice", metrics=port) as alice:
            assert alice.stats()["session"] == "alice"


HUB = """
import tcpx
settings = dict(same_host="off", lanes=1, workers=1)
with tcpx.Session("hub", **settings) as hub:
    others = [tcpx.Session(f"peer-{number}", **settings) for number in range(15)]
    for other in others:
        hub.add_peer(other.connection_info).connect(60)
    ways = {name: peer["same_host"] for name, peer in hub.stats()["peers"].items()}
    assert ways == {"hub": None, **{other.name: "off" for other in others}}, ways
"""


def test_each_peer_has_a_line_in_the_log():
    environment = dict(os.environ, TCPX_LOG="info")
    ran = subprocess.run([sys.executable, "-c", HUB], env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    lines = [line for line in ran.stderr.splitlines() if " connected " in line]
    named = {re.search(r'peer="([^"]*)"', line)[1] for line in lines}
    assert named == {"hub", *(f"peer-{number}" for number in range(15))}
    assert all('path="tcp"' in line and "lanes=1" in line and "better=" in line for line in lines)
