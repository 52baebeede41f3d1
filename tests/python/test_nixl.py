"""tcpx.nixl: an installed NIXL sees the backend."""

import importlib.util
import os
import subprocess
import sys

import pytest
import tcpx.nixl


def test_the_backend_comes_with_the_package():
    plugin = tcpx.nixl.plugin()
    assert plugin.read_bytes()[:4] == b"\x7fELF"


def test_enable_is_for_this_process_and_its_children(monkeypatch):
    monkeypatch.setenv("NIXL_PLUGIN_DIR", "elsewhere")
    tcpx.nixl.enable()
    assert os.environ["NIXL_PLUGIN_DIR"] == str(tcpx.nixl.plugin().parent)


def test_install_puts_it_beside_the_others(tmp_path, monkeypatch):
    folder = tmp_path / ".nixl_cu12.mesonpy.libs" / "plugins"
    folder.mkdir(parents=True)
    (tmp_path / "nixl_cu12").mkdir()
    (tmp_path / "nixl_cu12" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    target = folder / "libplugin_TCPX.so"
    target.write_text("old")
    assert target in tcpx.nixl.install()
    assert target.read_bytes() == tcpx.nixl.plugin().read_bytes()
    assert [path.name for path in folder.iterdir()] == [target.name]
    assert target in tcpx.nixl.uninstall() and target not in tcpx.nixl.uninstall()


def test_without_nixl(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="nixl_cu12"):
        tcpx.nixl.install()
    assert tcpx.nixl.uninstall() == []


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed here")
def test_an_agent_uses_it():
    code = """
import tcpx.nixl; tcpx.nixl.enable()
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("me", nixl_agent_config(backends=["TCPX"]))
print(agent.get_plugin_list())
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert "TCPX" in done.stdout, done.stderr


def test_the_command_comes_with_the_package():
    done = subprocess.run([sys.executable, "-m", "tcpx", "nixl", "path"], capture_output=True, text=True)
    assert os.path.samefile(done.stdout.strip(), tcpx.nixl.plugin().parent), done.stderr
