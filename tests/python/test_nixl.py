"""Tests tcpx.nixl: an installed NIXL finds the backend."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tcpx.nixl


def test_the_backend_comes_with_the_package():
    plugin = tcpx.nixl.plugin()
    assert plugin.read_bytes()[:4] == b"\x7fELF"


@pytest.fixture
def nixl(tmp_path, monkeypatch):
    """Creates a folder like an installed NIXL; returns its folder of plugins."""

    def make(version="1.5.1"):
        folder = tmp_path / ".nixl_cu12.mesonpy.libs" / "plugins"
        folder.mkdir(parents=True)
        (folder / "libplugin_UCX.so").write_text("NIXL's own")
        (tmp_path / "nixl_cu12.libs").mkdir()
        (tmp_path / "nixl_cu12").mkdir()
        (tmp_path / "nixl_cu12" / "__init__.py").write_text("")
        about = tmp_path / f"nixl_cu12-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nixl-cu12\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("NIXL_PLUGIN_DIR", "elsewhere")
        return folder

    return make


def test_enable_is_for_this_process_and_its_children(nixl):
    nixl()
    tcpx.nixl.enable()
    folder = Path(os.environ["NIXL_PLUGIN_DIR"])
    assert (folder / "libplugin_TCPX.so").samefile(tcpx.nixl.plugin())
    assert (folder / "libplugin_UCX.so").read_text() == "NIXL's own"


def test_enable_as_ucx(nixl):
    nixl()
    tcpx.nixl.enable(as_="UCX")
    folder = Path(os.environ["NIXL_PLUGIN_DIR"])
    assert (folder / "libplugin_UCX.so").read_bytes() == tcpx.nixl.plugin().read_bytes()
    with pytest.raises(RuntimeError, match="UCX"):
        tcpx.nixl.enable(as_="POSIX")


def test_the_calls_of_the_guide(nixl, block):
    folder = nixl()
    exec(block, {})
    assert (Path(os.environ["NIXL_PLUGIN_DIR"]) / "libplugin_TCPX.so").samefile(tcpx.nixl.plugin())
    assert (folder / "libplugin_TCPX.so").read_bytes() == tcpx.nixl.plugin().read_bytes()


@pytest.mark.parametrize("version, remedy", [("0.10.1", "pip install"), ("99.0.0", "--untested")])
def test_versions_that_are_not_supported(nixl, version, remedy):
    folder = nixl(version)
    for change in (tcpx.nixl.enable, tcpx.nixl.install):
        with pytest.raises(RuntimeError, match=f"{version}.*{remedy}"):
            change()
    assert os.environ["NIXL_PLUGIN_DIR"] == "elsewhere"
    assert [path.name for path in folder.iterdir()] == ["libplugin_UCX.so"]


def test_install_puts_it_beside_the_others(nixl):
    folder = nixl()
    target = folder / "libplugin_TCPX.so"
    target.write_text("old")
    assert target in tcpx.nixl.install()
    assert target.read_bytes() == tcpx.nixl.plugin().read_bytes()
    assert (folder / "libplugin_UCX.so").read_text() == "NIXL's own"
    assert target in tcpx.nixl.uninstall() and target not in tcpx.nixl.uninstall()
    assert [path.name for path in folder.iterdir()] == ["libplugin_UCX.so"]


def test_install_as_ucx_keeps_the_real_one(nixl):
    folder = nixl()
    tcpx.nixl.install(as_="UCX")
    assert (folder / "libplugin_UCX.so").read_bytes() == tcpx.nixl.plugin().read_bytes()
    tcpx.nixl.uninstall()
    assert (folder / "libplugin_UCX.so").read_text() == "NIXL's own"
    assert [path.name for path in folder.iterdir()] == ["libplugin_UCX.so"]


def test_without_nixl(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="nixl_cu12"):
        tcpx.nixl.install()
    assert tcpx.nixl.uninstall() == []
    monkeypatch.setenv("NIXL_PLUGIN_DIR", "elsewhere")
    tcpx.nixl.enable()
    assert os.environ["NIXL_PLUGIN_DIR"] == str(tcpx.nixl.plugin().parent)


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
    assert (Path(done.stdout.strip()) / "libplugin_TCPX.so").samefile(tcpx.nixl.plugin()), done.stderr
