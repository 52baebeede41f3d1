"""Tests tcpx.p2p: endpoints, metadata, connections, and their guarantees."""

import os
import pathlib
import random
import re
import stat
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from conftest import Ends
from tcpx import p2p


def test_metadata_is_stable_and_of_one_length():
    ends = [p2p.Endpoint(0), p2p.Endpoint(), p2p.Endpoint(num_cpus=4), p2p.Endpoint(local_gpu_idx=0, num_cpus=4)]
    metadata = [end.get_metadata() for end in ends]
    assert metadata == [end.get_metadata() for end in ends]
    assert len(set(metadata)) == 4 and len({len(blob) for blob in metadata}) == 1
    assert all(type(blob) is bytes for blob in metadata)


def test_metadata_is_laid_out_as_the_interface_says():
    metadata = p2p.Endpoint(0).get_metadata()
    ip, port, bdf = p2p.Endpoint.parse_metadata(metadata)
    assert bytes(int(part) for part in ip.split(".")) == metadata[:4] and ip == p2p.get_oob_ip()
    assert int.from_bytes(metadata[4:6], "big") == port > 0
    assert metadata[7 : 7 + metadata[6]].decode() == bdf
    assert bdf == "" or re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", bdf)


def test_metadata_of_others_is_parsed_and_not_connected_to():
    bdf = b"0000:4a:00.0"
    v4 = bytes([10, 0, 0, 1]) + (4242).to_bytes(2, "big") + bytes([len(bdf)]) + bdf
    assert p2p.Endpoint.parse_metadata(v4) == ("10.0.0.1", 4242, "0000:4a:00.0")
    v6 = bytes(15) + b"\1" + (1).to_bytes(2, "big") + b"\0"
    assert p2p.Endpoint.parse_metadata(v6) == ("::1", 1, "")
    end = p2p.Endpoint(0)
    with pytest.raises(RuntimeError, match="does not run tcpx"):
        end.add_remote_endpoint(v4)
    with pytest.raises(RuntimeError, match="parse_metadata"):
        end.connect("10.0.0.1", "", 4242)
    for wrong in (b"", b"abc", v4[:-1], v4 + b"x", b"TCPX", b"\xff" * 40 + b"TCPX"):
        with pytest.raises(RuntimeError):
            p2p.Endpoint.parse_metadata(wrong)
    with pytest.raises(TypeError):
        p2p.Endpoint.parse_metadata(bytearray(v4))


def test_connect_before_accept_and_both_ways():
    here, there = p2p.Endpoint(0), p2p.Endpoint(0)
    ip, port, bdf = there.parse_metadata(there.get_metadata())
    assert here.connect(ip, bdf, remote_port=port) == (True, 0)
    assert here.connect(remote_ip_addr=ip, remote_gpu_idx=0, remote_port=port) == (True, 1)
    accepted = [there.accept(), there.accept()]
    assert accepted == [(True, "127.0.0.1", 0, 0), (True, "127.0.0.1", 0, 1)]
    ip, port, bdf = p2p.Endpoint.parse_metadata(here.get_metadata())
    assert there.connect(ip, bdf, port) == (True, 2)
    assert here.accept() == (True, "127.0.0.1", 0, 2)


def test_accept_waits_without_holding_python():
    here, there = p2p.Endpoint(0), p2p.Endpoint(0)
    result = []
    waiter = threading.Thread(target=lambda: result.append(there.accept()))
    waiter.start()
    assert here.add_remote_endpoint(there.get_metadata()) == (True, 0)
    waiter.join(20)
    assert result == [(True, "127.0.0.1", 0, 0)]


def test_local_connections():
    here, there = p2p.Endpoint(0), p2p.Endpoint(0)
    *_, bdf = p2p.Endpoint.parse_metadata(there.get_metadata())
    assert here.connect_local(bdf) == (True, 0)
    assert there.accept_local() == (True, bdf, 0)
    assert here.connect_local("ffff:ff:ff.f")[0] is False


@pytest.fixture
def without_gpus():
    if p2p.Endpoint.parse_metadata(p2p.Endpoint(0).get_metadata())[2]:
        pytest.skip("endpoints are known by their GPUs here")


def some_numbers(count):
    """Returns GPU numbers that no other program on this host uses."""
    return random.sample(range(1000, 1 << 30), count)


def test_local_connections_without_metadata(without_gpus):
    first, second = some_numbers(2)
    there, here = p2p.Endpoint(local_gpu_idx=first), p2p.Endpoint(local_gpu_idx=second)
    for number, name in enumerate([{"remote_gpu_idx": first}, {"remote_gpu_bdf": first}]):
        assert here.connect_local(**name) == (True, number)
        assert there.accept_local() == (True, "", number)
    assert there.connect_local(remote_gpu_idx=second) == (True, 2)
    assert here.accept_local() == (True, "", 2)
    target = np.zeros(4096, np.uint8)
    source = np.ones(4096, np.uint8)
    ok, blob = there.advertise_ipc(0, target.ctypes.data, target.nbytes)
    assert ok and here.write_ipc(0, source.ctypes.data, source.nbytes, blob)
    assert (target == 1).all()


def test_local_connections_between_processes_without_metadata(without_gpus):
    (number,) = some_numbers(1)
    code = f"""
        import numpy as np
        from tcpx import p2p
        end = p2p.Endpoint({number})
        ok, gpu, conn = end.accept_local()
        target = np.zeros(4096, np.uint8)
        ok, blob = end.advertise_ipc(conn, target.ctypes.data, target.nbytes)
        print(blob.hex(), flush=True)
        input()
        assert (target == 1).all()
        print("fine", flush=True)
    """
    here, source = p2p.Endpoint(0), np.ones(4096, np.uint8)
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        # It may still be starting.
        deadline = time.monotonic() + 60
        while not (found := here.connect_local(remote_gpu_idx=number))[0]:
            assert time.monotonic() < deadline
        blob = bytes.fromhex(process.stdout.readline())
        assert here.write_ipc(found[1], source.ctypes.data, source.nbytes, blob)
        said, _ = process.communicate("go on\n", timeout=60)
    assert said == "fine\n"


def test_a_local_peer_may_start_later(without_gpus):
    (number,) = some_numbers(1)
    here, later = p2p.Endpoint(0), []
    started = threading.Thread(target=lambda: later.append(p2p.Endpoint(number)))
    started.start()
    assert here.connect_local(remote_gpu_idx=number)[0] is True
    started.join()


def test_nobody_finds_itself(without_gpus):
    (number,) = some_numbers(1)
    alone = p2p.Endpoint(number)
    assert alone.connect_local(remote_gpu_idx=number)[0] is False


def left_for_neighbours():
    folder = pathlib.Path("/dev/shm", f"tcpx-{os.getuid()}")
    return folder, {path for path in folder.glob("*") if f".{os.getpid()}." in path.name}


def test_metadata_that_is_left_for_neighbours_is_private():
    folder, before = left_for_neighbours()
    endpoint = p2p.Endpoint(0)
    (left,) = left_for_neighbours()[1] - before
    assert stat.S_IMODE(left.stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert left.stat().st_uid == folder.stat().st_uid == os.getuid()
    del endpoint
    assert not left.exists()


def test_what_a_process_left_that_was_killed_is_removed():
    code = "import os; from tcpx import p2p; e = p2p.Endpoint(0); print(os.getpid(), flush=True); os._exit(0)"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    folder, _ = left_for_neighbours()
    # The file exists until a process searches the folder, which may be another program on this
    # host.
    _ = p2p.Endpoint(0)
    assert list(folder.glob(f"*.{int(said.stdout)}.*")) == []


class Tensor:
    """Has the attributes of a tensor that registration reads."""

    def __init__(self, array):
        self.data_ptr, self.numel = lambda: array.ctypes.data, lambda: array.size
        self.element_size = lambda: array.itemsize


def test_keys_are_shared_by_what_one_registration_covers():
    array, other = np.zeros(4096, np.float32), np.zeros(4096, np.float32)
    endpoint = p2p.Endpoint(0)

    def register(memory):
        (desc,) = endpoint.register_memory([Tensor(memory)])
        assert len(desc.lkeys) == len(desc.rkeys) == 4 and any(desc.lkeys)
        return desc

    whole, again, part = register(array), register(array), register(array[256:1280])
    assert whole.lkeys == again.lkeys == part.lkeys and whole.rkeys == again.rkeys == part.rkeys
    assert len({whole.mr_id, again.mr_id, part.mr_id}) == 3
    endpoint.deregister_memory([whole, again])
    assert register(array[256:1280]).lkeys == part.lkeys
    # Neither overlapping memory, nor memory elsewhere.
    first, second, elsewhere = register(other[:1024]), register(other[768:1792]), register(np.zeros(64, np.uint8))
    assert len({tuple(desc.lkeys) for desc in (first, second, elsewhere)}) == 3
    assert len({tuple(desc.rkeys) for desc in (first, second, elsewhere)}) == 3


def test_adding_again_is_cached_and_removing_gives_a_new_number(ends: Ends):
    metadata = ends.there.get_metadata()
    assert ends.here.add_remote_endpoint(metadata) == (True, ends.conn)
    assert ends.here.remove_remote_endpoint(ends.conn) is True
    assert ends.here.remove_remote_endpoint(ends.conn) is False
    assert ends.here.remove_remote_endpoint(999999) is False
    ok, again = ends.here.add_remote_endpoint(metadata)
    assert ok is True and again != ends.conn


def test_what_is_not_there(ends: Ends):
    assert ends.here.start_passive_accept() is True and ends.here.start_passive_accept() is True
    assert ends.here.conn_id_of_rank(0) == 2**64 - 1
    assert ends.here.dereg(12345) is False
    with pytest.raises(TypeError):
        ends.here.connect("127.0.0.1")
    with pytest.raises(TypeError):
        p2p.XferHandle()


def test_the_names_of_the_interface():
    for name in p2p.__all__:
        assert hasattr(p2p, name)
    assert p2p.FloatType.kFloat16.value == 1 and p2p.kFloat8E5M2 is p2p.FloatType.kFloat8E5M2
    assert (p2p.FloatType.kFloat16 == 1) is False
    methods = {name for name in dir(p2p.Endpoint) if not name.startswith("_")}
    onesided = {f"{op}{v}{ipc}{a}" for op in ("read", "write") for v in ("", "v") for ipc in ("", "_ipc") for a in ("", "_async")}
    messages = {f"{op}{kind}{a}" for op in ("send", "recv") for kind in ("", "v", "_ipc") for a in ("", "_async")}
    others = (
        "accept accept_local add_remote_endpoint advertise advertise_ipc advertisev advertisev_ipc conn_id_of_rank connect "
        "connect_local dereg deregister_memory deserialize_descs get_metadata get_serialized_descs parse_metadata poll_async "
        "reg register_memory regv remove_remote_endpoint start_passive_accept transfer"
    )
    assert methods == onesided | messages | set(others.split())
