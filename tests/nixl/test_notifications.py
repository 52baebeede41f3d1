"""Tests notifications: any bytes, any length, exactly once, after the data."""

import threading

import pytest

from endpoint import DONE, Endpoint, pattern, until

MIB = 1 << 20


@pytest.mark.parametrize(
    "message",
    [b"", b"\0", bytes(range(256)), pattern(1, 70_000).tobytes(), pattern(2, MIB).tobytes()],
    ids=["empty", "nul", "binary", "70K", "1M"],
)
def test_standalone(pair, message):
    """In both directions, before anything else has connected the two; no other agent gets it."""
    pair = pair(size=4096)
    pair.introduce()
    pair.local.notify("target", message)
    assert pair.remote.notifications(1) == [("initiator", message)]
    pair.remote.notify("initiator", message)
    assert pair.local.notifications(1) == [("target", message)]
    assert pair.remote.no_notifications() == {} and pair.local.no_notifications() == {}


@pytest.mark.parametrize("message", [b"\0\xff\0", pattern(3, MIB).tobytes()], ids=["binary", "1M"])
def test_with_a_transfer(pair, op, message):
    pair().transfer(op, [(0, 0, MIB)], message)


def test_standalone_in_order(pair):
    pair = pair(size=4096, params={"lanes": "4", "workers": "2"})
    messages = [b"%d" % i + b"." * (i % 97) * (i % 31) for i in range(2000)]
    for message in messages:
        pair.local.notify("target", message)
    assert pair.remote.notifications(2000) == [("initiator", message) for message in messages]


def test_to_a_peer_that_does_not_know_us(pair, op):
    """The target has loaded no metadata at all: it still gets its notifications, with the
    sender's name."""
    pair = pair()
    pair.local.notify("target", b"hello")
    assert pair.remote.notifications(1) == [("initiator", b"hello")]
    pair.transfer(op, [(0, 0, MIB)], b"from a stranger")


def seen(endpoint):
    """Returns whether every byte had arrived when the notification did."""
    assert endpoint.notifications(1) == [("initiator", b"look")]
    return bool((endpoint.block[Endpoint.GUARD : -Endpoint.GUARD] == 0x5A).all())


def test_after_all_of_the_data(pair):
    pair = pair(size=16 * MIB, params={"lanes": "4", "workers": "2"})
    handle = pair.request("WRITE", [(i * MIB, i * MIB, MIB) for i in range(16)], b"look")
    for _ in range(5):
        pair.remote.fill(4)
        pair.local.block[:] = 0x5A
        pair.remote.start(seen)
        assert pair.local.outcome(handle) == DONE
        assert pair.remote.result()
    pair.local.release(handle)


def test_none_where_none_was_asked_for(pair, op):
    pair = pair()
    for _ in range(3):
        pair.transfer(op, [(0, 0, MIB)])
    assert pair.remote.no_notifications() == {}


def test_to_itself(endpoint):
    one = endpoint("alone", 0)
    messages = [b"", b"again", pattern(5, MIB).tobytes()]
    for message in messages:
        one.notify("alone", message)
    assert one.notifications(3) == [("alone", message) for message in messages]


def test_the_other_ways_to_ask(pair):
    """update_notifs keeps notifications; check_remote_xfer_done takes matching ones."""
    pair = pair(size=0)
    for message in (b"one-a", b"two-b", b"three-c"):
        pair.remote.run(notify_when_known, pair.local.metadata(), message)
    agent = pair.local.agent
    until(lambda: len(agent.update_notifs().get("target", [])) == 3, "three notifications")
    assert agent.check_remote_xfer_done("target", b"two")
    assert not agent.check_remote_xfer_done("target", b"two")
    assert not agent.check_remote_xfer_done("target", b"-c")
    assert agent.check_remote_xfer_done("target", b"-c", tag_is_prefix=False)
    assert agent.update_notifs() == {"target": [b"one-a"]}


def notify_when_known(endpoint, metadata, message):
    endpoint.load(metadata)
    endpoint.notify("initiator", message)


@pytest.mark.parametrize("to", ["peer", "itself"])
def test_four_threads(pair, to):
    pair = pair(size=0)
    receiver, name = (pair.remote, "target") if to == "peer" else (pair.local, "initiator")

    def send(thread):
        for i in range(100):
            pair.local.notify(name, b"%d %d" % (thread, i))

    threads = [threading.Thread(target=send, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got = [message for _, message in receiver.notifications(400)]
    for thread in range(4):
        mine = [message for message in got if message.startswith(b"%d " % thread)]
        assert mine == [b"%d %d" % (thread, i) for i in range(100)]


@pytest.mark.parametrize(
    "name", [" padded ", "prefill/0 é 東", "x" * 255, "a\nb"], ids=["spaces", "unicode", "long", "lines"]
)
def test_the_name_of_the_sender(endpoint, peer, name):
    sender, target = endpoint(name, 4096), peer("target", 4096)
    sender.load(target.metadata())
    sender.notify("target", b"standalone")
    handle = sender.request("WRITE", ("target", target.address()), [(0, 0, 4096)], b"with data")
    assert sender.outcome(handle) == DONE
    assert sorted(target.notifications(2)) == [(name, b"standalone"), (name, b"with data")]
    sender.release(handle)
    # And back, by that name.
    assert target.load(sender.metadata()) == name
    target.notify(name, b"back")
    assert sender.notifications(1) == [("target", b"back")]


def test_to_nobody(endpoint):
    with pytest.raises(Exception, match="NOT_FOUND"):
        endpoint("alone", 0).notify("nobody", b"hello")
