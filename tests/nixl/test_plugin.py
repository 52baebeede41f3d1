"""Tests the backend's properties in NIXL before any transfer."""

import nixl._bindings as bindings
import pytest
from nixl._api import nixl_agent, nixl_agent_config

from endpoint import BACKEND, DONE, on_free_ports, rows

MIB = 1 << 20


@pytest.fixture
def agent():
    return nixl_agent("alone", nixl_agent_config(backends=[]))


def test_is_listed(agent):
    assert BACKEND in agent.get_plugin_list()
    assert "DRAM_SEG" in agent.get_plugin_mem_types(BACKEND)


def test_lists_its_parameters(agent):
    """Lists every setting but the name, with its default, which the environment may change."""
    params = agent.get_plugin_params(BACKEND)
    assert params["interfaces"] == "lo"
    assert params["transport"] == "tcp" and int(params["lanes"]) >= 1
    assert "name" not in params


def test_chosen_by_name_alone():
    """As applications do: only backends=["TCPX"]."""
    agent = nixl_agent("alone", nixl_agent_config(backends=[BACKEND]))
    assert list(agent.backends) == [BACKEND]


def test_takes_parameters(endpoint):
    one = endpoint("alone", params={"lanes": "3", "chunk_bytes": "65536", "peer_timeout": "2s"})
    params = one.agent.get_backend_params(BACKEND)
    assert params["lanes"] == "3" and params["chunk_bytes"] == "65536" and params["peer_timeout"] == "2s"
    assert params["interfaces"] == "lo"
    assert "DRAM_SEG" in one.agent.get_backend_mem_types(BACKEND)


def test_takes_its_own_defaults(agent):
    """The result of get_plugin_params can be passed back, changed or not."""
    params = agent.get_plugin_params(BACKEND)
    agent.create_backend(BACKEND, {**params, "lanes": "2"})
    assert agent.get_backend_params(BACKEND)["lanes"] == "2"


def test_parameters_win_over_the_environment(agent, monkeypatch):
    monkeypatch.setenv("TCPX_LANES", "5")
    monkeypatch.setenv("TCPX_WINDOW", "7")
    agent.create_backend(BACKEND, {"lanes": "2"})
    params = agent.get_backend_params(BACKEND)
    assert params["lanes"] == "2" and params["window"] == "7"


@pytest.mark.parametrize(
    "params, words",
    [
        ({"lane": "2"}, ['"lane"', "lanes"]),
        ({"lanes": "many"}, ["lanes", "many", "1 to 64"]),
        ({"lanes": "0"}, ["lanes", "1 to 64"]),
        ({"interfaces": "nosuch0"}, ["nosuch0"]),
        ({"name": "other"}, ["name"]),
    ],
    ids=["unknown", "not-a-number", "out-of-range", "no-such-interface", "name"],
)
def test_refuses_parameters(agent, capfd, params, words):
    """Creation fails with a message on stderr: NIXL itself returns only a status."""
    with pytest.raises(bindings.nixlBackendError):
        agent.create_backend(BACKEND, params)
    said = [line for line in capfd.readouterr().err.splitlines() if "TCPX" in line]
    assert any(all(word in line for word in words) for line in said), said
    # The agent continues without it, and can create it once the mistake is corrected.
    agent.create_backend(BACKEND, {})


def test_refuses_the_environment(agent, capfd, monkeypatch):
    monkeypatch.setenv("TCPX_LANES", "many")
    with pytest.raises(bindings.nixlBackendError):
        agent.create_backend(BACKEND, {})
    assert "TCPX_LANES" in capfd.readouterr().err


def test_refuses_a_port_that_is_taken(agent, endpoint, capfd):
    def take_in_turns(port):
        params = {"listen_port": str(port)}
        first = endpoint("first", params=params)
        with pytest.raises(bindings.nixlBackendError):
            agent.create_backend(BACKEND, params)
        assert str(port) in capfd.readouterr().err
        first.close()
        agent.create_backend(BACKEND, params)

    on_free_ports(1, take_in_turns)


def test_agents_share_a_range_of_ports(endpoint, capfd):
    def share(first):
        params = {"listen_port": f"{first}-{first + 1}"}
        agents = [endpoint(name, params=params) for name in ("one", "two")]
        assert agents[0].agent.get_backend_params(BACKEND) | params == agents[0].agent.get_backend_params(BACKEND)
        with pytest.raises(bindings.nixlBackendError):
            endpoint("three", params=params)
        assert "widen the range" in capfd.readouterr().err

    # Other programs may take one of the two, but hardly every time.
    for first in range(21011, 21811, 100):
        try:
            return share(first)
        except bindings.nixlBackendError as error:
            taken = error
    raise taken


def test_refuses_a_name(capfd):
    """A name longer than the protocol allows."""
    with pytest.raises(bindings.nixlBackendError):
        nixl_agent("x" * 300, nixl_agent_config(backends=[BACKEND]))
    assert "name" in capfd.readouterr().err


def test_does_not_query_memory(endpoint):
    one = endpoint("alone")
    with pytest.raises(bindings.nixlNotSupportedError):
        one.agent.query_memory(rows([one.base], 4096), BACKEND, "DRAM")


@pytest.mark.parametrize("everything", [False, True], ids=["captured", "exported"])
def test_telemetry(endpoint, peer, op, everything, monkeypatch, tmp_path):
    """NIXL measures each transfer, also with the exporter enabled."""
    if everything:
        monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", "y")
        monkeypatch.setenv("NIXL_TELEMETRY_DIR", str(tmp_path))
    local, remote = endpoint("initiator", capture_telemetry=True), peer("target", capture_telemetry=True)
    local.load(remote.metadata())
    handle = local.request(op, ("target", remote.address()), [(0, 0, 4096), (8192, 4096, MIB // 2)], b"timed")
    assert local.outcome(handle) == DONE
    assert remote.notifications(1) == [("initiator", b"timed")]
    measured = local.agent.get_xfer_telemetry(handle)
    assert measured.descCount == 2 and measured.totalBytes == 4096 + MIB // 2
    # In microseconds: posting may take less than one.
    assert measured.startTime > 0 and measured.xferDuration > 0
    assert measured.xferDuration >= measured.postDuration >= 0
    local.release(handle)
