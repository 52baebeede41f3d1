"""Tests tcpx.rendezvous: every store with threads as processes, and the variables of launchers."""

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import tcpx
from cluster import PATIENCE, etcd_server, free_port
from tcpx.rendezvous import (
    MAX_VALUE,
    MissingError,
    PeerFailedError,
    Rendezvous,
    RendezvousError,
    _etcd,
    _tcp,
    rendezvous,
)
from tcpx.rendezvous._launch import detect, expand_counts, expand_nodes


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    with etcd_server(tmp_path_factory.mktemp("etcd")) as address:
        yield address


@pytest.fixture(params=["tcp", "file", "etcd"])
def place(request, tmp_path):
    """Returns a store that no other test uses."""
    if request.param == "tcp":
        return f"tcp://127.0.0.1:{free_port()}"
    if request.param == "file":
        return f"file://{tmp_path}/meet"
    return f"etcd://{request.getfixturevalue('etcd')}/{uuid.uuid4()}"


@pytest.fixture(params=["file", "etcd"])
def kept(request, tmp_path):
    """Returns a store that outlives its runs."""
    if request.param == "file":
        return f"file://{tmp_path}/meet"
    return f"etcd://{request.getfixturevalue('etcd')}/{uuid.uuid4()}"


def join(place, rank, size, run="a", timeout=PATIENCE):
    return rendezvous(place, rank=rank, size=size, run=run, timeout=timeout, environ={})


def together(place, size, work, **options):
    """Runs `work(meeting)` in all processes of a run; returns the result of each, or its error."""

    def one(rank):
        try:
            with join(place, rank, size, **options) as meeting:
                return work(meeting)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def test_everybody_gets_what_everybody_gave(place):
    def work(meeting):
        assert (meeting.size, meeting.run) == (4, "a")
        first = meeting.exchange(b"%d" % meeting.rank)
        second = meeting.exchange(bytearray(b"again %d" % meeting.rank), "named")
        third = meeting.exchange(b"", "named")
        return first, second, third

    numbers = [b"%d" % rank for rank in range(4)]
    assert together(place, 4, work) == [(numbers, [b"again " + number for number in numbers], [b""] * 4)] * 4


def test_more_values_than_are_fetched_at_once(etcd, monkeypatch):
    monkeypatch.setattr("tcpx.rendezvous._etcd.PAGE", 3)
    work = lambda meeting: meeting.exchange(b"%d" % meeting.rank)
    assert together(f"etcd://{etcd}/{uuid.uuid4()}", 8, work) == [[b"%d" % rank for rank in range(8)]] * 8


def test_values_have_a_limit(place):
    def work(meeting):
        with pytest.raises(ValueError, match="info: 1048577 bytes are more than 1048576"):
            meeting.exchange(bytes(MAX_VALUE + 1))
        with pytest.raises(TypeError, match="info: expected bytes, got str"):
            meeting.exchange("text")
        with pytest.raises(ValueError, match="name: "):
            meeting.exchange(b"", "../up")
        return [len(value) for value in meeting.exchange(bytes(MAX_VALUE))]

    assert together(place, 2, work) == [[MAX_VALUE] * 2] * 2


def test_a_barrier_holds_until_the_last_one_comes(place):
    came = []

    def work(meeting):
        for turn in range(1, 6):
            if meeting.rank == 2:
                # Makes the others arrive first: they would pass a broken barrier.
                time.sleep(0.05)
                came.append(turn)
            meeting.barrier()
            assert came == list(range(1, turn + 1))
            meeting.barrier()

    assert together(place, 3, work) == [None] * 3


def test_rank_0_may_leave_first(place):
    """A process that has completed an exchange need not stay for the others."""
    for turn in range(5):
        work = lambda meeting: len(meeting.exchange(bytes(100_000)))
        assert together(place, 4, work, run=f"run {turn}") == [4] * 4


def test_the_missing_are_named(place):
    late = threading.Event()

    def work(meeting):
        meeting.exchange(b"", "first")
        if meeting.rank == 1:
            late.wait(PATIENCE)
            return
        with pytest.raises(TimeoutError) as caught:
            meeting.exchange(b"", "second", timeout=0.5)
        late.set()
        raise caught.value

    first, _, *_ = together(place, 2, work)
    assert isinstance(first, MissingError) and first.missing == [1]
    host = f"{socket.gethostname()}, pid {os.getpid()}"
    assert f"second: 1 of 2 processes are here after 0.5 s; rank 1 ({host}) came and did not reach it" in str(first)


def test_those_who_never_came_are_named(place):
    said = r"1 of 12 processes .* rank 1, rank 2.* rank 8 and 3 more never came"
    with pytest.raises(MissingError, match=said) as caught:
        with join(place, 0, 12, timeout=0.5) as meeting:
            meeting.barrier()
    assert caught.value.missing == list(range(1, 12))


def test_a_failure_is_told_to_the_others(place):
    def work(meeting):
        meeting.barrier()
        if meeting.rank == 1:
            raise ValueError("no GPU here")
        meeting.barrier()

    errors = together(place, 3, work)
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerFailedError) and error.rank == 1
        assert str(error) == f"rank 1 ({socket.gethostname()}, pid {os.getpid()}) failed: no GPU here"


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("slow", [0.0, 0.3])
def test_who_has_left_is_not_waited_for(place, leaver, slow):
    """Also if rank 0, which may serve, has been told and has ended before another one asks."""

    def work(meeting):
        meeting.barrier()
        if meeting.rank != leaver:
            time.sleep(slow if meeting.rank == 2 else 0)
            meeting.barrier("more")

    ends = together(place, 3, work)
    assert ends.pop(leaver) is None
    # If rank 0 serves, its exit may be noticed before its message.
    assert {type(end) for end in ends} <= {PeerFailedError} | ({RendezvousError} if leaver == 0 else set())
    assert all(f"rank {leaver}" in str(end) for end in ends)


def test_a_rank_is_taken_once(place):
    with join(place, 0, 2), join(place, 1, 2):
        with pytest.raises(RendezvousError, match=rf"rank 1 is taken, by .*pid {os.getpid()}"):
            join(place, 1, 2)


def test_sizes_must_agree(place):
    with join(place, 0, 3):
        said = r"rank 0 \(.*\) says that there are 3 processes, rank 1 that there are 2"
        with pytest.raises(RendezvousError, match=said):
            join(place, 1, 2)


def test_a_closed_one_says_so(place):
    meeting = join(place, 0, 1)
    assert meeting.exchange(b"alone") == [b"alone"]
    meeting.close()
    meeting.close()
    with pytest.raises(tcpx.errors.ClosedError):
        meeting.barrier()


# Stored data


def test_two_runs_at_once_do_not_meet(kept):
    with ThreadPoolExecutor(2) as pool:
        give = lambda run: together(kept, 3, lambda meeting: meeting.exchange(run.encode()), run=run)
        assert list(pool.map(give, ["red", "blue"])) == [[[b"red"] * 3] * 3, [[b"blue"] * 3] * 3]


def test_what_a_killed_run_has_left_is_not_found_by_the_next(kept):
    stale = [join(kept, rank, 2, run="killed") for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda one: one.exchange(b"old"), stale)) == [[b"old"] * 2] * 2
    for one in stale:
        # As the exit of a process does.
        one._store.close()
    work = lambda meeting: meeting.exchange(b"new")
    assert together(kept, 2, work, run="next") == [[b"new"] * 2] * 2
    # A run of the same name notices it.
    with pytest.raises(RendezvousError, match="rank 0 is taken.*another name"):
        join(kept, 0, 2, run="killed")


def test_nothing_is_left_behind(kept):
    assert together(kept, 3, lambda meeting: meeting.barrier()) == [None] * 3
    assert remains(kept) == 0
    # Nor if some have failed.
    errors = together(kept, 2, lambda meeting: meeting.barrier() or 1 / 0)
    assert {type(error) for error in errors} <= {ZeroDivisionError, PeerFailedError}
    assert remains(kept) == 0
    # The same name can be used again.
    assert together(kept, 3, lambda meeting: meeting.barrier()) == [None] * 3


def remains(kept):
    if kept.startswith("file"):
        return len(os.listdir(kept.removeprefix("file://")))
    host, port = kept.split("/")[2].split(":")
    store = _etcd.EtcdStore([(host, int(port))], "/" + kept.split("/")[3], "", PATIENCE, tls=False)
    start = store.prefix.rstrip("/") + "/"
    found = store._call("kv/range", {"key": _etcd._encode(start.encode()), "range_end": _etcd._after(start)})
    store.close()
    return len(found.get("kvs", []))


def test_a_run_needs_a_name(kept):
    with pytest.raises(RendezvousError, match="set TCPX_RENDEZVOUS_RUN"):
        join(kept, 0, 1, run=None)
    with join(f"{kept}?run=here", 0, 1, run=None) as meeting:
        assert meeting.run == "here"
    with rendezvous(kept, rank=0, size=1, environ={"TCPX_RENDEZVOUS_RUN": "../odd name"}) as meeting:
        assert meeting.exchange(b"fine") == [b"fine"]
        if kept.startswith("file"):
            assert os.listdir(kept.removeprefix("file://")) == ["..%2Fodd%20name"]
    assert remains(kept) == 0


def test_files_are_the_users_own(tmp_path):
    meeting = join(f"file://{tmp_path}/meet", 0, 1)
    meeting.exchange(b"secret")
    found = [path for path in tmp_path.rglob("*") if path.name != "meet"]
    assert len(found) > 4 and not any(stat.S_IMODE(path.stat().st_mode) & 0o077 for path in found)
    meeting.close()


def test_another_member_of_the_etcd_cluster_answers(etcd):
    place = f"etcd://127.0.0.1:{free_port()},{etcd}/{uuid.uuid4()}"
    assert together(place, 2, lambda meeting: meeting.exchange(b"x")) == [[b"x"] * 2] * 2


def test_etcd_with_tls(tmp_path, monkeypatch):
    """A server with an untrusted certificate gets nothing."""
    if not shutil.which("openssl"):
        pytest.skip("no openssl to make a certificate with")
    certificate = tmp_path / "etcd.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=etcd -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*make.split(), "-out", certificate, "-keyout", tmp_path / "key"], check=True, capture_output=True)
    with open(certificate, "a") as file:
        file.write((tmp_path / "key").read_text())
    with etcd_server(tmp_path, certificate=certificate) as address:
        place = f"etcds://{address}/tcpx"
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert together(place, 2, lambda meeting: meeting.exchange(b"x")) == [[b"x"] * 2] * 2
        monkeypatch.setenv("SSL_CERT_FILE", "/dev/null")
        monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
        with pytest.raises(RendezvousError, match="certificate verify failed"):
            join(place, 0, 1, run="b", timeout=0.5)


def test_an_etcd_that_is_not_there_is_named():
    port = free_port()
    with pytest.raises(RendezvousError, match=rf"etcd at 127.0.0.1:{port} did not answer within 0.5 s"):
        join(f"etcd://127.0.0.1:{port}/x", 0, 1, timeout=0.5)


def test_etcd_forgets_a_run_that_was_killed(etcd):
    """Every key has a lease."""
    place = f"etcd://{etcd}/{uuid.uuid4()}"
    meeting = join(place, 0, 1)
    meeting.barrier()
    store = meeting._store
    start = store.prefix
    found = store._call("kv/range", {"key": _etcd._encode(start.encode()), "range_end": _etcd._after(start)})
    assert len(found["kvs"]) == 2 and all(int(pair["lease"]) for pair in found["kvs"])
    meeting.close()


# The store of rank 0


def test_rank_0_is_named_where_nobody_serves():
    with pytest.raises(MissingError, match="rank 0, which serves the store, was not found at 127.0.0.1:") as caught:
        join(f"tcp://127.0.0.1:{free_port()}", 1, 2, timeout=0.3)
    assert caught.value.missing == [0]


def test_another_run_at_the_same_port_is_noticed():
    place = f"tcp://127.0.0.1:{free_port()}"
    with join(place, 0, 2, run="theirs"):
        with pytest.raises(RendezvousError, match=r"another run \('theirs', this is 'ours'\): use another port"):
            join(place, 1, 2, run="ours")


def test_ipv6():
    try:
        port = free_port("::1")
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    assert together(f"tcp://[::1]:{port}", 2, lambda meeting: meeting.exchange(b"6")) == [[b"6"] * 2] * 2


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"cannot serve the store at port {port}: .*TCPX_RENDEZVOUS=tcp://"):
            join(f"tcp://127.0.0.1:{port}", 0, 2)


def test_a_process_that_dies_is_noticed_at_once():
    place = f"tcp://127.0.0.1:{free_port()}"
    code = (
        "import sys, time\nfrom tcpx.rendezvous import rendezvous\n"
        f"meeting = rendezvous({place!r}, rank=1, size=2)\nmeeting.barrier()\n"
        "print('here', flush=True)\ntime.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        with pytest.raises(PeerFailedError, match=rf"rank 1 \(.*pid {process.pid}\) failed: its connection"):
            with join(place, 0, 2, run=None) as meeting:
                meeting.barrier()
                assert process.stdout.readline() == b"here\n"
                process.send_signal(signal.SIGKILL)
                # Longer than any test may last.
                meeting.barrier(timeout=10_000)


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x05\0\0\0\xffx", b"\0\0\0\x06\0\0\0\x02hi", b"\0\0\0\0", b"\0"]
)
def test_strangers_do_no_harm(said):
    port = free_port()

    def work(meeting):
        if meeting.rank == 0:
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                # An end, or a reset if bytes were left unread: even before the shutdown.
                with contextlib.suppress(OSError):
                    stranger.sendall(said)
                    stranger.shutdown(socket.SHUT_WR)
                    assert stranger.recv(100) == b""
        return meeting.exchange(b"fine")

    assert together(f"tcp://127.0.0.1:{port}", 2, work) == [[b"fine"] * 2] * 2


def test_a_frame_that_is_too_long_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("tcpx.rendezvous._tcp.HELLO_TIMEOUT", 10 * PATIENCE)
    port = free_port()
    with join(f"tcp://127.0.0.1:{port}", 0, 1):
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as stranger:
            stranger.sendall(b"GET ")
            assert stranger.recv(100) == b""


def test_replies_that_are_due_are_sent_before_rank_0_ends(monkeypatch):
    """Others read slowly, and replies are larger than the kernel's buffers."""
    monkeypatch.setattr(_tcp, "CLOSE_TIMEOUT", PATIENCE)
    port, size = free_port(), 8
    with contextlib.ExitStack() as stack:
        meeting = join(f"tcp://127.0.0.1:{port}", 0, size)
        others = [stack.enter_context(socket.socket()) for _ in range(1, size)]
        for rank, other in enumerate(others, 1):
            other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            other.settimeout(PATIENCE)
            other.connect(("127.0.0.1", port))
            _tcp._send(other, [b"join", b"a", b"%d" % rank, b"8 1 1 somewhere"])
            assert _tcp._receive(other, 100) == [b"ok"]
            _tcp._send(other, [b"gather", b"exchange-1", bytes(MAX_VALUE), b"8", b"%d" % (1000 * PATIENCE)])
        assert len(meeting.exchange(bytes(MAX_VALUE))) == size
        server = meeting._store.server
        leaving = threading.Thread(target=meeting.close)
        leaving.start()
        # By then rank 0 waits only for the replies.
        server.acceptor.join(PATIENCE)
        for other in others:
            reply = _tcp._receive(other, 1 << 30)
            assert len(reply) == 1 + 3 * size and len(reply[-1]) == MAX_VALUE
        leaving.join()


def test_where_rank_0_listens():
    """Listens on one address if it is given, and on all if only a name is known."""
    port = free_port()
    server = _tcp.Server("127.0.0.1", port, "")
    assert server.listener.getsockname()[0] == "127.0.0.1"
    server.close()
    server = _tcp.Server("some-node", port, "")
    assert server.listener.getsockname()[0] in ("::", "0.0.0.0") and server.address[0] in ("::1", "127.0.0.1")
    server.close()


# Launchers

SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[08-09,11],big",
    "SLURM_TASKS_PER_NODE": "1(x2),2,1",
}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "29400"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "3"}


def launched(environ, hostname="host", **changes):
    launch = detect({**environ, **changes}, lambda: hostname)
    return launch.rank, launch.size, launch.run, launch.address


def test_torchrun():
    assert launched(TORCHRUN) == (3, 4, None, ("head", 29400))
    assert launched(TORCHRUN, TORCHELASTIC_RUN_ID="none") == (3, 4, None, ("head", 29400))
    # Its own store has the port.
    agent = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert launched({**TORCHRUN, **agent}) == (3, 4, "job", ("head", 29401))
    # Inside Slurm or Kubernetes torchrun takes precedence.
    assert launched({**SLURM, **KUBERNETES, **TORCHRUN}) == (3, 4, None, ("head", 29400))


def test_slurm():
    launch = detect(SLURM, lambda: "host")
    assert launched(SLURM) == (3, 5, "slurm-4711-0", ("gpu08", 24711))
    nodes = ["gpu08", "gpu09", "gpu11", "gpu11", "big"]
    assert launch.places == {rank: f"node {node}" for rank, node in enumerate(nodes)}
    # Steps of one job, and the same job once more, are separate runs.
    assert launched(SLURM, SLURM_STEP_ID="1")[2:] == ("slurm-4711-1", ("gpu08", 24812))
    assert launched(SLURM, SLURM_RESTART_COUNT="2")[2] == "slurm-4711-0-2"
    assert launched(SLURM, SLURM_STEP_NUM_TASKS="4")[:2] == (3, 4)
    assert launched(SLURM, MASTER_ADDR="10.0.0.1", MASTER_PORT="9")[3] == ("10.0.0.1", 9)
    # Another order of ranks: no node is guessed.
    assert detect({**SLURM, "SLURM_DISTRIBUTION": "cyclic"}, lambda: "host").places == {}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("one", ["one"]),
        ("a,b", ["a", "b"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[1,3-4],m7,k[2]-x", ["n1", "n3", "n4", "m7", "k2-x"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
    ],
)
def test_node_lists(text, names):
    assert expand_nodes(text) == names


def test_counts():
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(RendezvousError, match="cannot read the node list"):
        expand_nodes("n[a-b]")


def test_kubernetes():
    name = "kv-2.kv.default.svc.cluster.local"
    assert launched(KUBERNETES, name) == (2, 3, None, ("kv-0.kv.default.svc.cluster.local", 29500))
    assert detect(KUBERNETES, lambda: name).places == {0: "pod kv-0", 1: "pod kv-1", 2: "pod kv-2"}
    assert launched(KUBERNETES, "kv-2", MASTER_ADDR="kv-0.kv", MASTER_PORT="1") == (2, 3, None, ("kv-0.kv", 1))
    # Without a service for the pods' names there is no place to meet.
    assert launched(KUBERNETES, "kv-2")[3] is None
    with pytest.raises(RendezvousError, match=r"where the processes meet \(Kubernetes .*TCPX_RENDEZVOUS"):
        rendezvous(environ=KUBERNETES)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "cannot tell which process of how many this is"),
        ({"RANK": "1"}, "the variable WORLD_SIZE is not set, though RANK is"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "the variable RANK is 'one'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank: 2 is not from 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "set MASTER_ADDR and MASTER_PORT, or TCPX_RENDEZVOUS"),
        ({**TORCHRUN, "MASTER_PORT": "x"}, "the variable MASTER_PORT is 'x'"),
        ({"JOB_COMPLETION_INDEX": "1"}, "the variable WORLD_SIZE is not set, though JOB_COMPLETION_INDEX is"),
        ({"SLURM_PROCID": "0"}, "the variable SLURM_NTASKS is not set, though SLURM_PROCID is"),
        ({**TORCHRUN, "TCPX_RENDEZVOUS": "http://x"}, "'http://x' is none of etcd://"),
    ],
)
def test_an_environment_that_does_not_say_enough(environ, said):
    with pytest.raises(tcpx.Error) as caught:
        rendezvous(environ=environ)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("tcp://host", "needs a host and a port"),
        ("tcp://:1", "needs a host and a port"),
        ("tcp://host:99999", "needs a host and a port"),
        ("tcp://a:1,b:2", "must name one address"),
        ("file://relative/path", "three slashes"),
        ("file:///", "three slashes"),
        ("etcd://user:word@host/x", "users and passwords"),
        ("zookeeper://host", "is none of"),
    ],
)
def test_urls_that_make_no_sense(url, said):
    with pytest.raises(ValueError) as caught:
        join(url, 1, 2)
    assert said in str(caught.value)


def test_from_env(monkeypatch):
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with Rendezvous.from_env(timeout=PATIENCE) as meeting:
        assert (meeting.rank, meeting.size) == (0, 1)
        assert meeting.exchange(b"me") == [b"me"]
