"""Tests how metadata is exchanged and withdrawn: by hand, by NIXL's listener, by etcd."""

import functools
import os
import pathlib
import shutil
import subprocess
import time
import urllib.request

import nixl._bindings as bindings
import numpy as np
import pytest

from conftest import Pair
from endpoint import BACKEND, DONE, ERRORS, NOT_FOUND, moved, on_free_ports, rows, until
from peer import die_with_parent

MIB = 1 << 20


# By hand


def test_loaded_twice(pair, op):
    pair = pair()
    pair.transfer(op, [(0, 0, MIB)], b"once")
    assert pair.local.load(pair.remote.metadata()) == "target"
    pair.transfer(op, [(0, 0, MIB)], b"twice")


def ours(metadata, address):
    """Returns the positions of TCPX's bytes in the metadata of an agent with one region: the
    connection info, the region's description."""
    info = metadata.index(b"TCXI")
    length = int.from_bytes(metadata[info - 8 : info], "little")
    # NIXL's own description comes first: address, length, device.
    region = metadata.index(address.to_bytes(8, "little")) + 24
    return range(info, info + length), range(region, len(metadata) - 1)


def damaged(endpoint, metadata, address):
    """Loads metadata with each byte of TCPX changed; the original still works afterwards."""
    refused = 0
    for part in ours(metadata, address):
        for place in part:
            other = bytearray(metadata)
            other[place] ^= 1 << place % 8
            try:
                endpoint.forget(endpoint.load(bytes(other)))
            except ERRORS:
                refused += 1
    return refused, endpoint.load(metadata)


def test_damaged(pair, peer):
    """Malformed metadata is refused. In a process of its own, because a crash would be the
    failure."""
    metadata, address = (remote := pair().remote).metadata(), remote.address()
    refused, name = peer("victim", 0).run(damaged, metadata, address)
    assert refused > 10 and name == "target"


def test_refused_and_then_another(endpoint, peer, op):
    """Metadata with malformed memory is refused completely: its connection info does not stay
    for an agent of the same name."""
    local, first, second = endpoint("initiator"), peer("target"), peer("target", seed=7)
    metadata = bytearray(first.metadata())
    for place in ours(metadata, first.address())[1]:
        metadata[place] = 0xFF
    with pytest.raises(ERRORS):
        local.load(bytes(metadata))
    Pair(local, second).transfer(op, [(0, 0, MIB)], b"for the second")
    assert first.no_notifications() == {}


def part(endpoint, ranges, with_connection):
    descriptors = bindings.nixlRegDList(bindings.DRAM_SEG)
    if ranges:
        offsets, lengths = zip(*ranges)
        table = rows([endpoint.base + offset for offset in offsets], lengths)
        descriptors = endpoint.agent.get_reg_descs(table, mem_type="DRAM")
    return endpoint.agent.get_partial_agent_metadata(descriptors, with_connection, [BACKEND])


def register_halves(endpoint):
    endpoint.deregister()
    half = endpoint.size // 2
    endpoint.registrations = [endpoint.register(offset, half) for offset in (0, half)]


@pytest.mark.parametrize("connection", ["first", "with-memory", "last"])
def test_in_parts(endpoint, peer, op, connection):
    """Connection info and memory may come separately, in any order; only loaded memory can be
    accessed."""
    local, remote = endpoint("initiator", MIB), peer("target", MIB)
    remote.run(register_halves)
    half = MIB // 2
    place = ("target", remote.address())
    if connection == "first":
        assert local.load(remote.run(part, [], True)) == "target"
        local.notify("target", b"no memory yet")
        assert remote.notifications(1) == [("initiator", b"no memory yet")]
    local.load(remote.run(part, [(0, half)], connection == "with-memory"))
    if connection == "last":
        assert local.load(remote.run(part, [], True)) == "target"
    handle = local.request(op, place, [(0, 0, half)], b"first half")
    mine, theirs = moved(op, local.contents(), remote.contents(), [(0, 0, half)])
    assert local.outcome(handle) == DONE
    assert np.array_equal(local.contents(), mine) and np.array_equal(remote.contents(), theirs)
    assert remote.notifications(1) == [("initiator", b"first half")]
    local.release(handle)
    with pytest.raises(Exception, match="NIXL_ERR_NOT_FOUND"):
        local.request(op, place, [(half, half, half)])
    local.load(remote.run(part, [(half, half)], False))
    handle = local.request(op, place, [(half, half, half)])
    assert local.outcome(handle) == DONE
    local.release(handle)


def test_memory_of_a_peer_that_connects_to_us(endpoint, peer, op):
    """Its memory came without its connection info; once it has connected to this agent, that is
    enough."""
    local, remote = endpoint("initiator", MIB), peer("target", MIB)
    local.load(remote.run(part, [(0, MIB)], False))
    remote.load(local.metadata())
    remote.notify("initiator", b"here I am")
    assert local.notifications(1) == [("target", b"here I am")]
    handle = local.request(op, ("target", remote.address()), [(0, 0, MIB)], b"found you")
    assert local.outcome(handle) == DONE
    assert remote.notifications(1) == [("initiator", b"found you")]
    local.release(handle)


@pytest.mark.usefixtures("lanes")
def test_removed_in_flight(pair, op):
    """Removing a peer ends its transfers, without its help; loaded again, it works again."""
    pair = pair(size=16 * MIB, params={"peer_timeout": "1h"})
    pair.transfer(op, [(0, 0, 4096)], b"connected")
    handles = [pair.request(op, [(0, 0, 16 * MIB)], b"removed") for _ in range(3)]
    pair.remote.freeze()
    for handle in handles:
        assert pair.local.post(handle) == "PROC"
    pair.local.forget("target")
    assert {pair.local.wait(handle) for handle in handles} == {NOT_FOUND}
    for handle in handles:
        pair.local.release(handle)
    pair.remote.thaw()
    pair = Pair(pair.local, pair.remote)
    pair.transfer(op, [(0, 0, 16 * MIB)], b"again")
    assert pair.remote.no_notifications() == {}


def test_removed_is_disconnected(pair):
    """No state of a removed peer is left: its connections are closed."""
    files = lambda: len(os.listdir("/proc/self/fd"))
    before = files()
    pair = pair()
    pair.local.forget("target")
    known = files()
    for _ in range(3):
        pair = Pair(pair.local, pair.remote)
        pair.transfer("WRITE", [(0, 0, MIB)], b"connected")
        assert files() > known > before
        pair.local.forget("target")
        until(lambda: files() <= known, "connections closed")


# NIXL's listener


def listening(make, name, size=MIB):
    """Returns an endpoint whose agent listens, and its port."""

    def on(port):
        return make(name, size, enable_listen_thread=True, listen_port=port), port

    return on_free_ports(1, on)


def knows(endpoint, name):
    return endpoint.agent.check_remote_metadata(name)


def send_to(endpoint, port):
    endpoint.agent.send_local_metadata("127.0.0.1", port)


def fetch_from(endpoint, name, port):
    endpoint.agent.fetch_remote_metadata(name, "127.0.0.1", port)


def invalidate_at(endpoint, port):
    endpoint.agent.invalidate_local_metadata("127.0.0.1", port)


def wait_known(endpoint, name, known=True):
    until(lambda: knows(endpoint, name) == known, f"{name} known: {known}")


def test_listener(endpoint, peer):
    """Metadata is fetched by one side, sent to the other; then withdrawn in the middle of
    transfers."""
    local, mine = listening(endpoint, "initiator", 16 * MIB)
    remote, theirs = listening(peer, "target", 16 * MIB)
    fetch_from(local, "target", theirs)
    send_to(local, theirs)
    wait_known(local, "target")
    remote.run(wait_known, "initiator")
    place = ("target", remote.address())
    for op in ("WRITE", "READ"):
        expected = moved(op, local.contents(), remote.contents(), [(0, 0, MIB)])
        handle = local.request(op, place, [(0, 0, MIB)], b"listened")
        assert local.outcome(handle) == DONE
        assert np.array_equal(local.contents(), expected[0])
        assert np.array_equal(remote.contents(), expected[1])
        assert remote.notifications(1) == [("initiator", b"listened")]
        local.release(handle)
    remote.notify("initiator", b"and back")
    assert local.notifications(1) == [("target", b"and back")]

    handles = [local.request(op, place, [(0, 0, 16 * MIB)]) for op in ("WRITE", "READ")]
    remote.start(invalidate_at, mine)
    ends = set()
    while NOT_FOUND not in ends:
        ends.add(local.outcome(handles[0]))
        ends.add(local.outcome(handles[1]))
    remote.result()
    assert ends <= {DONE, NOT_FOUND}
    for handle in handles:
        local.release(handle)
    wait_known(local, "target", False)
    fetch_from(local, "target", theirs)
    wait_known(local, "target")
    handle = local.request("WRITE", place, [(0, 0, 16 * MIB)])
    assert local.outcome(handle) == DONE
    local.release(handle)


# etcd


def library():
    package = pathlib.Path(bindings.__file__).parent
    return package.parent / f".{package.name}.mesonpy.libs" / "libnixl.so"


@pytest.fixture
def etcd(tmp_path, monkeypatch):
    """Runs an etcd server on loopback; agents created now use it."""
    if b"libetcd-cpp-api" not in library().read_bytes():
        pytest.skip("this NIXL was built without etcd")
    program = os.environ.get("ETCD") or shutil.which("etcd")
    if not program:
        pytest.skip("no etcd: install Debian's etcd-server, or name the program with ETCD")
    client, server = on_free_ports(2, functools.partial(start_etcd, program, tmp_path))
    try:
        monkeypatch.setenv("NIXL_ETCD_ENDPOINTS", client)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield
    finally:
        server.kill()
        server.wait()


def start_etcd(program, folder, client_port, members_port):
    """Returns the server's address and its process, once it answers."""
    client, members = (f"http://127.0.0.1:{port}" for port in (client_port, members_port))
    log = folder / f"log-{client_port}"
    with open(log, "wb") as output:
        server = subprocess.Popen(
            [program, "--data-dir", folder / f"data-{client_port}", "--log-level", "warn", "--unsafe-no-fsync"]
            + ["--listen-client-urls", client, "--advertise-client-urls", client]
            + ["--listen-peer-urls", members, "--initial-advertise-peer-urls", members]
            + ["--initial-cluster", f"default={members}"],
            stdout=output,
            stderr=output,
            preexec_fn=die_with_parent,
        )
    try:
        until(lambda: healthy(client, server), "etcd")
    except AssertionError as error:
        server.kill()
        server.wait()
        raise AssertionError(f"{error}; etcd said:\n{log.read_text()}") from None
    return client, server


def healthy(url, server):
    assert server.poll() is None, "etcd has ended"
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return b"true" in answer.read()
    except OSError:
        time.sleep(0.05)
        return False


def publish(endpoint):
    endpoint.agent.send_local_metadata()


def withdraw(endpoint):
    endpoint.agent.invalidate_local_metadata()


def publish_part(endpoint, ranges, label):
    offsets, lengths = zip(*ranges)
    table = rows([endpoint.base + offset for offset in offsets], lengths)
    descriptors = endpoint.agent.get_reg_descs(table, mem_type="DRAM")
    endpoint.agent.send_partial_agent_metadata(descriptors, True, [BACKEND], label=label)


def fetch_known(endpoint, name, **how):
    """Fetches until it is known: a fetch fails if NIXL notices late that it was withdrawn
    before."""

    def fetched():
        endpoint.agent.fetch_remote_metadata(name, **how)
        deadline = time.monotonic() + 1
        while not (known := knows(endpoint, name)) and time.monotonic() < deadline:
            time.sleep(0.001)
        return known

    until(fetched, f"{name} known")


def test_etcd(etcd, endpoint, peer, op):
    """Metadata is published and fetched by both; withdrawn, it disappears at the other side as
    well."""
    local, remote = endpoint("initiator"), peer("target")
    place = ("target", remote.address())
    publish(local)
    remote.run(publish)
    fetch_known(local, "target")
    handle = local.request(op, place, [(0, 0, MIB)], b"by etcd")
    expected = moved(op, local.contents(), remote.contents(), [(0, 0, MIB)])
    assert local.outcome(handle) == DONE
    assert np.array_equal(local.contents(), expected[0])
    assert np.array_equal(remote.contents(), expected[1])
    assert remote.notifications(1) == [("initiator", b"by etcd")]
    remote.run(withdraw)
    wait_known(local, "target", False)
    assert local.outcome(handle) == NOT_FOUND
    local.release(handle)
    remote.run(publish)
    fetch_known(local, "target")
    handle = local.request(op, place, [(0, 0, MIB)], b"by etcd again")
    assert local.outcome(handle) == DONE
    assert remote.notifications(1) == [("initiator", b"by etcd again")]
    local.release(handle)


def test_etcd_in_parts(etcd, endpoint, peer, op):
    """Publishes part of the memory under a label of its own."""
    local, remote = endpoint("initiator"), peer("target")
    remote.run(register_halves)
    half = MIB // 2
    remote.run(publish_part, [(half, half)], "upper")
    fetch_known(local, "target", label="upper")
    place = ("target", remote.address())
    handle = local.request(op, place, [(0, half, half)], b"upper half")
    assert local.outcome(handle) == DONE
    assert remote.notifications(1) == [("initiator", b"upper half")]
    local.release(handle)
    with pytest.raises(Exception, match="NIXL_ERR_NOT_FOUND"):
        local.request(op, place, [(0, 0, half)])
