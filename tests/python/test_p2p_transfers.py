"""Tests tcpx.p2p: registrations, descriptors and transfers."""

import threading

import numpy as np
import pytest
from conftest import Ends, pattern
from test_memory import Tensor
from tcpx import p2p

SIZE = 1 << 20


def address(array):
    return array.ctypes.data


def test_write_and_read(ends: Ends):
    mine, theirs = pattern(SIZE, 1), np.zeros(SIZE, np.uint8)
    mr, blob = ends.region(ends.here, mine), ends.blob(theirs)
    assert ends.here.write(ends.conn, mr, address(mine), SIZE, blob) is True
    assert (mine == theirs).all()
    theirs[:] = pattern(SIZE, 2)
    assert ends.here.read(ends.conn, mr, address(mine), SIZE, blob) is True
    assert (mine == theirs).all()
    # A part: the size in the call counts, and the blob's address may be changed in place.
    moved = (address(theirs) + 100).to_bytes(8, "little") + blob[8:]
    mine[:] = 0
    assert ends.here.read(conn_id=ends.conn, mr_id=mr, ptr=address(mine) + 7, size=50, meta=moved) is True
    assert (mine[7:57] == theirs[100:150]).all() and not mine[:7].any() and not mine[57:].any()


def test_async(ends: Ends):
    mine, theirs = pattern(SIZE, 3), np.zeros(SIZE, np.uint8)
    mr, blob = ends.region(ends.here, mine), ends.blob(theirs)
    started = ends.here.write_async(ends.conn, mr, address(mine), SIZE, blob)
    assert ends.finish(started) is True and (mine == theirs).all()
    assert ends.here.poll_async(started[1]) == (True, True)
    assert ends.here.poll_async(0) == (False, True) and ends.here.poll_async(10**9) == (False, True)
    theirs[:] = 0
    assert ends.finish(ends.here.read_async(ends.conn, mr, address(mine), SIZE, blob)) is True
    assert not mine.any()


def test_many_that_nobody_asks_about(ends: Ends):
    mine, theirs = pattern(4096, 4), np.zeros(4096 * 600, np.uint8)
    mr, blob = ends.region(ends.here, mine), ends.blob(theirs)
    for i in range(600):
        at = (address(theirs) + i * 4096).to_bytes(8, "little") + blob[8:]
        ok, last = ends.here.write_async(ends.conn, mr, address(mine), 4096, at)
        assert ok is True
    while not ends.here.poll_async(last)[1]:
        pass
    assert ends.here.write(ends.conn, mr, address(mine), 4096, blob) is True
    assert all(ends.here.poll_async(i + 1)[0] for i in range(600))
    assert (theirs.reshape(600, 4096) == mine).all()


@pytest.mark.parametrize("count", [0, 1, 3, 300])
@pytest.mark.parametrize("numbers", [list, tuple, np.array])
def test_vectors(ends: Ends, count, numbers):
    mine, theirs = [pattern(4096, i) for i in range(count)], [np.zeros(4096, np.uint8) for _ in range(count)]
    mrs = numbers([ends.region(ends.here, array) for array in mine])
    remote = [ends.region(ends.there, array) for array in theirs]
    pointers, sizes = numbers([address(array) for array in mine]), numbers([4096] * count)
    if count == 0 and numbers is np.array:
        mrs = pointers = sizes = np.array([], np.uint64)
    ok, blobs = ends.there.advertisev(remote, [address(array) for array in theirs], [4096] * count, count)
    assert ok is True and [len(blob) for blob in blobs] == [64] * count
    call = (ends.conn, mrs, pointers, sizes, blobs, count)
    assert ends.here.writev(*call) is True
    assert all((a == b).all() for a, b in zip(mine, theirs))
    for array in theirs:
        array[:] = 7
    assert ends.finish(ends.here.readv_async(*call)) is True
    assert all((array == 7).all() for array in mine)
    for array in theirs:
        array[:] = 8
    assert ends.here.readv(*call) is True and all((array == 8).all() for array in mine)
    for array in mine:
        array[:] = 9
    assert ends.finish(ends.here.writev_async(*call)) is True and all((array == 9).all() for array in theirs)


def test_older_programs_pass_a_connection_first(ends: Ends):
    theirs = np.zeros(64, np.uint8)
    mr = ends.region(ends.there, theirs)
    call = (mr, address(theirs), 64)
    assert ends.there.advertise(0, *call) == ends.there.advertise(*call)
    assert ends.there.advertise(conn_id=0, mr_id=mr, ptr=address(theirs), size=64) == ends.there.advertise(*call)
    vectors = ([mr], [address(theirs)], [64], 1)
    assert ends.there.advertisev(0, *vectors) == ends.there.advertisev(*vectors)
    for wrong in ((), (1,), (1, 2), (1, 2, 3, 4, 5)):
        with pytest.raises(TypeError):
            ends.there.advertise(*wrong)
    with pytest.raises(TypeError):
        ends.there.advertise(1, 2, sise=3)
    assert ends.there.advertise(999, 0, 1) == (False, b"")


def test_wrong_calls_are_type_errors_and_bad_lists_runtime_errors(ends: Ends):
    mine, theirs = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    mr, blob = ends.region(ends.here, mine), ends.blob(theirs)
    write, at = ends.here.write, address(mine)
    for wrong in (-1, 1.5, None, "1", 2**64):
        with pytest.raises(TypeError):
            write(wrong, mr, at, 64, blob)
        with pytest.raises(TypeError):
            ends.here.writev(ends.conn, [wrong], [at], [64], [blob], 1)
    assert write(np.uint64(ends.conn), np.int32(mr), np.uint64(at), np.int64(64), blob) is True
    for wrong in (bytearray(blob), memoryview(blob), None, "x" * 64):
        with pytest.raises(TypeError):
            write(ends.conn, mr, at, 64, wrong)
    with pytest.raises(TypeError):
        ends.here.writev(ends.conn, (n for n in [mr]), [at], [64], [blob], 1)
    with pytest.raises(TypeError):
        ends.here.writev(ends.conn, b"\0", [at], [64], [blob], 1)
    with pytest.raises(TypeError):
        ends.here.writev(ends.conn, [mr], [at], [64], (blob,), 1)
    for short in (blob[:-1], blob + b"\0", b"", bytes(64)):
        with pytest.raises(RuntimeError):
            write(ends.conn, mr, at, 64, short)
    with pytest.raises(RuntimeError):
        ends.here.writev(ends.conn, [mr], [at], [64], [blob], 2)
    with pytest.raises(RuntimeError):
        ends.here.regv([1], [])
    assert ends.here.regv([], []) == (True, [])


def test_unknown_numbers_and_lost_memory_are_false(ends: Ends):
    mine, theirs = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    mr, blob = ends.region(ends.here, mine), ends.blob(theirs)
    assert ends.here.write(999, mr, address(mine), 64, blob) is False
    assert ends.here.write(ends.conn, 999, address(mine), 64, blob) is False
    assert ends.here.write(ends.conn, mr, address(mine) + 1, 64, blob) is False
    assert ends.here.write(ends.conn, mr, address(mine) - 1, 1, blob) is False
    assert ends.here.write_async(999, mr, address(mine), 64, blob)[0] is False
    assert ends.there.dereg(0) is True and ends.there.dereg(0) is False
    assert ends.here.read(ends.conn, mr, address(mine), 64, blob) is False
    ok, transfer = ends.here.read_async(ends.conn, mr, address(mine), 64, blob)
    if ok:
        assert ends.finish((ok, transfer)) is False
        assert ends.here.poll_async(transfer) == (False, True)
    assert ends.here.reg(0, 64)[0] is False and ends.here.reg(address(mine), 0)[0] is False


def test_keys_are_shared_by_what_lies_inside():
    end = p2p.Endpoint(0)
    base = np.zeros(4096, np.float32)
    whole, again = end.register_memory([Tensor(base), Tensor(base)])
    # Kept: otherwise the next array could have the same address, inside memory that is still
    # registered.
    other = np.zeros(4096)
    part, beside = end.register_memory([Tensor(base[256:1280])])[0], end.register_memory([Tensor(other)])[0]
    assert len({whole.mr_id, again.mr_id, part.mr_id, beside.mr_id}) == 4
    assert len(whole.rkeys) == len(whole.lkeys) == 4
    assert whole.rkeys == again.rkeys == part.rkeys != beside.rkeys
    assert (part.addr, part.size) == (base[256:].ctypes.data, 4096)
    end.deregister_memory([whole, again])
    assert end.register_memory([Tensor(base[256:1280])])[0].rkeys == part.rkeys
    fresh = np.zeros(4096, np.float32)
    first = end.register_memory([Tensor(fresh[:100])])[0]
    second = end.register_memory([Tensor(fresh[50:150])])[0]
    assert first.rkeys != second.rkeys
    assert repr(part).startswith("<XferDesc addr=")


def test_what_is_deregistered_is_closed_whatever_was_made_of_it(ends: Ends):
    mine, theirs, more = (np.zeros(SIZE, np.uint8) for _ in range(3))
    _, here = ends.here.reg(address(mine), SIZE)
    _, there = ends.there.reg(address(theirs), SIZE)
    _, blob = ends.there.advertise(there, address(theirs), SIZE)
    # The other side uses the same memory, and never polls the result.
    _, back = ends.there.add_remote_endpoint(ends.here.get_metadata())
    _, target = ends.here.advertise_ipc(ends.conn, address(more), SIZE)
    ok, _ = ends.there.write_ipc_async(back, address(theirs), SIZE, target)
    assert ok and ends.here.write(ends.conn, here, address(mine), SIZE, blob)
    assert ends.there.dereg(there) is True
    mine[:] = 1
    assert ends.here.write(ends.conn, here, address(mine), SIZE, blob) is False
    assert not theirs.any()


def test_what_is_advertised_for_good_outlives_other_registrations(ends: Ends):
    mine, theirs = pattern(SIZE, 8), np.zeros(SIZE, np.uint8)
    _, there = ends.there.reg(address(theirs), SIZE)
    _, blob = ends.there.advertise_ipc(0, address(theirs), SIZE)
    assert ends.there.dereg(there) is True
    assert ends.here.write_ipc(ends.conn, address(mine), SIZE, blob) is True
    assert (mine == theirs).all()


def test_what_nobody_asks_about_is_forgotten_when_it_fails(ends: Ends):
    mine, theirs = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    _, here = ends.here.reg(address(mine), 64)
    _, there = ends.there.reg(address(theirs), 64)
    _, blob = ends.there.advertise(there, address(theirs), 64)
    ends.there.dereg(there)
    write = lambda: ends.here.write_async(ends.conn, here, address(mine), 64, blob)
    ok, first = write()
    # Transfers to one peer fail in order: the first has failed as well.
    assert ok and ends.finish(write()) is False
    # So many that ended ones are forgotten.
    assert all(ok for ok, _ in [write() for _ in range(1000)])
    assert ends.here.poll_async(first) == (False, True)


def test_descriptors_travel_as_bytes(ends: Ends):
    arrays = [Tensor(np.zeros(n, np.uint8)) for n in (10, 20)]
    descriptors = ends.there.register_memory(arrays)
    data = ends.there.get_serialized_descs(descriptors)
    assert type(data) is bytes and data[:8] == (2).to_bytes(8, "little")
    back = ends.here.deserialize_descs(data)
    assert [(d.addr, d.size, d.rkeys) for d in back] == [(d.addr, d.size, d.rkeys) for d in descriptors]
    assert ends.here.deserialize_descs(b"") == []
    for cut in (1, 9, 30, len(data) - 1):
        with pytest.raises(RuntimeError):
            ends.here.deserialize_descs(data[:cut])
    with pytest.raises(RuntimeError):
        ends.here.deserialize_descs((2**63).to_bytes(8, "little"))
    with pytest.raises(TypeError):
        ends.here.get_serialized_descs(tuple(descriptors))
    with pytest.raises(RuntimeError):
        ends.here.register_memory([object()])
    ends.there.deregister_memory(descriptors)


def test_transfer_of_descriptors_and_parts_made_in_python(ends: Ends):
    mine, theirs = pattern(SIZE, 6), np.zeros(SIZE, np.uint8)
    local = ends.here.register_memory([Tensor(mine)])[0]
    remote = ends.here.deserialize_descs(ends.there.get_serialized_descs(ends.there.register_memory([Tensor(theirs)])))[0]

    def part(whole, offset, size):
        new = p2p.XferDesc()
        new.addr, new.size, new.mr_id = whole.addr + offset, size, whole.mr_id
        new.lkeys, new.rkeys = whole.lkeys, whole.rkeys
        return new

    blocks = SIZE // 4096
    here = [part(local, i * 4096, 4096) for i in range(blocks)]
    there = [part(remote, (blocks - 1 - i) * 4096, 4096) for i in range(blocks)]
    assert ends.finish(ends.here.transfer(ends.conn, "write", here, there)) is True
    assert (theirs.reshape(blocks, 4096)[::-1] == mine.reshape(blocks, 4096)).all()
    theirs[:] = 5
    assert ends.finish(ends.here.transfer(ends.conn, "read", [local], [remote])) is True
    assert (mine == 5).all()
    with pytest.raises(RuntimeError, match="Invalid op_name: WRITE"):
        ends.here.transfer(ends.conn, "WRITE", here, there)
    with pytest.raises(RuntimeError, match="Invalid conn_id"):
        ends.here.transfer(999, "write", here, there)
    with pytest.raises(RuntimeError):
        ends.here.transfer(ends.conn, "write", here, there[:-1])
    with pytest.raises(RuntimeError):
        ends.here.transfer(ends.conn, "write", [local], [p2p.XferDesc()])
    # Outside of the peer's region: its owner refuses.
    assert ends.finish(ends.here.transfer(ends.conn, "write", [local], [part(remote, 1, SIZE)])) is False
    assert ends.finish(ends.here.transfer(ends.conn, "read", [], [])) is True


def test_calls_for_one_host(ends: Ends):
    mine, theirs = pattern(SIZE, 7), np.zeros(SIZE, np.uint8)
    ok, info = ends.there.advertise_ipc(0, address(theirs), SIZE)
    assert ok is True and type(info) is bytes and len(info) == 104
    assert ends.here.write_ipc(ends.conn, address(mine), SIZE, info) is True and (mine == theirs).all()
    theirs[:] = 1
    assert ends.finish(ends.here.read_ipc_async(ends.conn, address(mine), SIZE, info)) is True and (mine == 1).all()
    half = SIZE // 2
    ok, infos = ends.there.advertisev_ipc(0, [address(theirs), address(theirs) + half], [half, half])
    assert ok is True
    mine[:] = pattern(SIZE, 8)
    call = (ends.conn, [address(mine) + half, address(mine)], [half, half], infos)
    assert ends.here.writev_ipc(*call) is True and (np.roll(theirs, half) == mine).all()
    theirs[:] = 3
    assert ends.here.readv_ipc(*call) is True and (mine == 3).all()
    with pytest.raises(RuntimeError):
        ends.here.write_ipc(ends.conn, address(mine), SIZE, info[:-1])


def test_messages(ends: Ends):
    *_, back = ends.there.accept()
    ok, other = ends.there.add_remote_endpoint(ends.here.get_metadata())
    assert ok is True
    *_, other_here = ends.here.accept()
    mine, theirs = pattern(SIZE, 9), np.zeros(SIZE, np.uint8)
    here, there = ends.region(ends.here, mine), ends.region(ends.there, theirs)
    # The other connection's messages do not match.
    ok, decoy = ends.here.send_async(other_here, here, address(mine), 10)
    ok, sent = ends.here.send_async(ends.conn, here, address(mine), SIZE)
    assert ok is True and ends.there.recv(back, there, address(theirs), SIZE) is True
    assert (mine == theirs).all() and ends.finish((ok, sent)) is True
    assert ends.there.recv(other, there, address(theirs), SIZE) is True and ends.finish((True, decoy)) is True
    # In the other direction too, many at once.
    theirs[:] = pattern(SIZE, 10)
    quarter = SIZE // 4
    rows = ([there] * 4, [address(theirs) + i * quarter for i in range(4)], [quarter] * 4, 4)
    sender = threading.Thread(target=ends.there.sendv, args=(back, *rows))
    sender.start()
    rows = ([here] * 4, [address(mine) + i * quarter for i in range(4)], [quarter] * 4, 4)
    assert ends.here.recvv(ends.conn, *rows) is True and (mine == theirs).all()
    sender.join()
    sender = threading.Thread(target=ends.here.send_ipc, args=(ends.conn, address(mine), 100))
    sender.start()
    assert ends.there.recv_ipc(back, address(theirs) + 100, 100) is True and (theirs[100:200] == mine[:100]).all()
    sender.join()


def test_threads_share_an_endpoint(ends: Ends):
    theirs = np.zeros(8 * 65536, np.uint8)
    blob = ends.blob(theirs)
    failures = []

    def work(number):
        mine = pattern(65536, number)
        mr = ends.region(ends.here, mine)
        at = (address(theirs) + number * 65536).to_bytes(8, "little") + blob[8:]
        for _ in range(50):
            if not ends.here.write(ends.conn, mr, address(mine), 65536, at):
                failures.append(number)
        ends.here.dereg(mr)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all((theirs[n * 65536 : (n + 1) * 65536] == pattern(65536, n)).all() for n in range(8))
