"""tcpx.p2p: endpoints, metadata, connections; what callers may rely on."""

import re
import threading

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
    with pytest.raises(RuntimeError, match="no tcpx"):
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
