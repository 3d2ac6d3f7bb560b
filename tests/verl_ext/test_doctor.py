"""The doctor: each fault it is there to find is made here, and must be found, with advice."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import textwrap
from collections import namedtuple
from pathlib import Path

import pytest

from verl_ext import doctor
from verl_ext.doctor import FAIL, OK, WARN, Check

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = {"advantage estimators": {"mine"}, "policy losses": set(), "trainer modes": {"mode"}}
SAME = dict.fromkeys(("python", "node", "executable", "verl", "verl-recipes", "torch", "transformers", "verl_ext"), "1")
GOOD = {**SAME, "advantage estimators": ["gae", "mine"], "policy losses": ["vanilla"], "trainer modes": ["mode"]}


def failed(checks) -> list[Check]:
    checks = list(checks)
    assert checks
    assert all(check.advice for check in checks if check.status == FAIL), "every failure comes with advice"
    return [check for check in checks if check.status == FAIL]


@pytest.mark.parametrize(
    "version, wanted, good",
    [
        ("0.9.1", ">=0.9.0,<0.10", True),
        ("0.10.0", ">=0.9.0,<0.10", False),
        ("0.9.0.dev1", ">=0.8", True),
        ("2.13.0+cpu", "==2.13.0+cpu", True),
        ("2.13.0+cpu", ">=2.13", True),
        ("1", "", True),
    ],
)
def test_satisfies(version, wanted, good):
    assert doctor.satisfies(version, wanted) is good


def test_versions_here_are_supported():
    checks = {check.what: check for check in doctor.check_versions()}
    assert checks["verl"].detail.startswith(importlib.metadata.version("verl"))
    assert not [check for name, check in checks.items() if check.status == FAIL and name != doctor.DISTRIBUTION]


def test_unsupported_and_missing_versions_are_found(monkeypatch):
    versions = {"verl": "0.8.2", "TransferQueue": None}
    real = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda name: versions[name] if name in versions else real(name))
    found = {check.what: check for check in failed(doctor.check_versions())}
    assert (
        "0.8.2, but supported is >=0.9.0,<0.10" in found["verl"].detail
        and "pip install 'verl>=" in found["verl"].advice
    )
    assert found["TransferQueue"].detail == "not installed"


def test_a_range_of_verl_or_vllm_that_is_left_is_a_warning(monkeypatch):
    real = doctor.requirements
    asked = {"verl": {"ray": ">=99"}}
    monkeypatch.setattr(doctor, "requirements", lambda name: {**real(name), **asked.get(name, {})})
    ray = next(check for check in doctor.check_versions() if check.what == "ray")
    assert ray.status == WARN and "verl asks for >=99" in ray.detail


def test_requirements_leave_out_extras():
    assert "numpy" in doctor.requirements("torchdata") or doctor.requirements("verl")
    assert doctor.requirements("no-such-distribution") == {}
    assert "pytest" not in doctor.requirements(doctor.DISTRIBUTION)


@pytest.fixture
def entry_points(tmp_path, monkeypatch):
    """Make `verl.plugins` consist of the given name -> source of a module."""

    def make(**modules: str):
        points = []
        for name, source in modules.items():
            (tmp_path / f"plugin_{name}.py").write_text(textwrap.dedent(source))
            points.append(importlib.metadata.EntryPoint(name, f"plugin_{name}", "verl.plugins"))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)

    monkeypatch.delenv("VERL_USE_EXTERNAL_PLUGINS", raising=False)
    monkeypatch.delenv("VERL_USE_EXTERNAL_MODULES", raising=False)
    return make


def test_plugin_that_raises_is_shown_with_its_traceback(entry_points):
    entry_points(
        verl_recipes="def f():\n    raise KeyError('the cause')\nf()", somebody="x = 1", broken="import nothere"
    )
    checks = {check.what: check for check in doctor.check_entry_points()}
    ours = checks["entry point verl_recipes"]
    assert ours.status == FAIL and "Traceback" in ours.detail and "KeyError: 'the cause'" in ours.detail and ours.advice
    assert checks["entry point somebody"].status == OK
    assert checks["entry point broken"].status == WARN, "somebody else's fault does not fail our check"


def test_plugin_that_is_not_installed(entry_points, monkeypatch):
    entry_points()
    (check,) = failed(doctor.check_entry_points())
    assert "not found" in check.detail and "pip install" in check.advice
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "verl_ext.plugin")
    (check,) = failed(doctor.check_entry_points())
    assert "does not hand to Ray workers" in check.detail


@pytest.mark.parametrize(
    "policy, good", [("none", False), ("other", False), ("other,verl_recipes", True), ("auto", True)]
)
def test_policy_that_excludes_the_plugin(entry_points, monkeypatch, policy, good):
    entry_points(verl_recipes="x = 1")
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", policy)
    found = failed(doctor.check_entry_points())
    assert bool(found) is not good
    if found:
        assert policy in found[0].detail and "VERL_USE_EXTERNAL_PLUGINS" in found[0].advice


def test_judge_finds_missing_names():
    assert failed(doctor.judge("driver", GOOD, EXPECTED)) == []
    (check,) = failed(doctor.judge("driver", {**GOOD, "advantage estimators": ["gae"]}, EXPECTED))
    assert check.what == "driver: advantage estimators" and "MISSING mine" in check.detail


def test_judge_compares_a_worker_with_the_driver():
    assert failed(doctor.judge("worker", GOOD, EXPECTED, driver=GOOD)) == []
    worker = {**GOOD, "verl": "0.8", "executable": "/other/python", "trainer modes": []}
    names, versions = failed(doctor.judge("worker", worker, EXPECTED, driver=GOOD))
    assert "MISSING mode" in names.detail and "/other/python" in names.advice
    assert "verl 0.8 (driver 1)" in versions.detail
    (check,) = failed(doctor.judge("worker", {**SAME, "error": "ImportError: no verl"}, EXPECTED, driver=GOOD))
    assert "ImportError: no verl" in check.detail


def test_inventory_reaches_a_worker_without_this_package():
    """What Ray sends must not name a module of ours: unpickle and run it where verl_ext cannot be imported."""
    from ray import cloudpickle

    payload = cloudpickle.dumps(doctor._make_inventory())
    script = textwrap.dedent(
        """
        import pickle, sys
        for name in ("verl_ext", "verl"):
            sys.modules[name] = None  # importing it raises ImportError
        found = pickle.loads(bytes.fromhex(sys.stdin.read()))()
        assert found["verl_ext"] is None and "ModuleNotFoundError" in found["error"], found
        """
    )
    subprocess.run([sys.executable, "-c", script], input=payload.hex(), text=True, check=True)


def test_names_are_registered_in_this_process():
    expected = doctor.expected_names()
    assert "avspo" in expected["advantage estimators"] and "recipe_sync" in expected["trainer modes"]
    assert failed(doctor.judge("driver", doctor._make_inventory()(), expected)) == []


def test_name_that_verl_lost_is_found(monkeypatch):
    from verl.trainer.ppo import core_algos

    monkeypatch.delitem(core_algos.ADV_ESTIMATOR_REGISTRY, "avspo")
    (check,) = failed(doctor.judge("driver", doctor._make_inventory()(), doctor.expected_names()))
    assert "MISSING avspo" in check.detail


def test_every_recipe_composes_for_fsdp_megatron_and_cpu():
    checks = list(doctor.check_recipes())
    assert {check.what for check in checks} >= {f"recipe {r}, {v}" for r in ("avspo", "grpo") for v in doctor.VARIANTS}
    assert [check.detail for check in failed(checks)] == []
    strategies = {v: doctor.compose("avspo", o).actor_rollout_ref.actor.strategy for v, o in doctor.VARIANTS.items()}
    assert strategies["Megatron"] == "megatron" and strategies["CPU"] == "fsdp2"


def test_configuration_that_cannot_work_is_found(monkeypatch):
    monkeypatch.setattr(
        doctor, "VARIANTS", {"bad": [*doctor.GIVEN, "algorithm.avspo.alpha=2"], "no": ["nothing.here=1"]}
    )
    found = {check.what: check.detail for check in failed(doctor.check_recipes())}
    assert "algorithm.avspo.alpha" in found["recipe avspo, bad"] and "nothing" in found["recipe grpo, no"]


def test_machine(monkeypatch):
    import psutil

    assert failed(doctor.check_machine()) == []
    monkeypatch.setattr(psutil, "virtual_memory", lambda: namedtuple("M", "available")(1e9))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: namedtuple("D", "free")(1e8))
    checks = {check.what: check for check in doctor.check_machine()}
    assert all(check.status == WARN and check.advice for check in checks.values())
    assert "shm-size" in checks["disk /dev/shm"].advice


def test_platform_without_a_device(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    (check,) = doctor.check_platform()
    assert check.status == WARN and "verl_ext.cpu" in check.advice


def test_a_check_that_breaks_is_a_failure_and_the_others_go_on(monkeypatch):
    def broken():
        raise OSError("disk on fire")
        yield

    monkeypatch.setattr(doctor, "check_machine", broken)
    for name in ("check_platform", "check_recipes"):
        monkeypatch.setattr(doctor, name, lambda: iter(()))
    checks = list(doctor.examine(with_ray=False))
    (check,) = [check for check in checks if check.what == "machine"]
    assert check.status == FAIL and "disk on fire" in check.detail
    assert any(check.what.startswith("driver") for check in checks)


@pytest.mark.parametrize("status, code", [(OK, 0), (WARN, 0), (FAIL, 1)])
def test_exit_status_and_json(monkeypatch, capsys, status, code):
    monkeypatch.setattr(doctor, "examine", lambda *_: iter([Check(OK, "a", "b"), Check(status, "c", "d", "do this")]))
    monkeypatch.setattr(doctor.signal, "signal", lambda *_: None)
    assert doctor.main([]) == code
    assert "-> do this" in capsys.readouterr().out
    assert doctor.main(["--json"]) == code
    assert json.loads(capsys.readouterr().out)[1] == {"status": status, "what": "c", "detail": "d", "advice": "do this"}


# ------------------------------------------------------------------------------------------------------------ with Ray


def run_doctor(*arguments: str, **environment: str) -> tuple[int, dict[str, dict], str]:
    command = [sys.executable, "-m", "verl_ext", "doctor", "--json", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env={**os.environ, **environment}, cwd=ROOT
    )
    assert done.stdout.strip().startswith("["), done.stdout + done.stderr
    return done.returncode, {check["what"]: check for check in json.loads(done.stdout)}, done.stderr


def ray_processes(folder: str) -> set[int]:
    """Pids of the raylet and the GCS server of the cluster whose files are in `folder`."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            name, command = (process.joinpath(file).read_text().strip("\n") for file in ("comm", "cmdline"))
            if name in ("raylet", "gcs_server") and folder in command:
                found.add(int(process.name))
        except OSError:
            continue
    return found


@pytest.mark.e2e
def test_worker_of_a_ray_of_its_own_and_of_one_that_was_running(tmp_path):
    """A cluster started before, by a process that knows nothing of us, stays as it was in both cases."""
    import shutil
    import tempfile

    folder, before = tempfile.mkdtemp(prefix="vr", dir="/tmp"), set(Path("/tmp").glob("vd*"))
    script = f"""
import ray, sys
ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=80_000_000, _temp_dir={folder!r})
print("address", ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
    plain = {key: value for key, value in os.environ.items() if not key.startswith("VERL")}
    plain["RAY_AUTH_MODE"] = "disabled"
    cluster = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=plain,
        cwd=tmp_path,
    )
    try:
        address = next(line.split()[1] for line in cluster.stdout if line.startswith("address"))
        running = ray_processes(folder)
        assert len(running) == 2
        for arguments in ([], ["--ray-address", address]):
            code, checks, errors = run_doctor(*arguments)
            worker = {what: check for what, check in checks.items() if what.startswith("worker")}
            assert [check["status"] for check in worker.values()] == [OK] * 4, (worker, checks.get("Ray"), errors)
            assert "avspo" in worker["worker: advantage estimators"]["detail"]
            assert code == 0, [check for check in checks.values() if check["status"] == FAIL]
            assert running == ray_processes(folder), "the cluster is left alone"
        code, checks, _ = run_doctor("--ray-address", address, VERL_USE_EXTERNAL_PLUGINS="none", VERL_PLATFORM="")
        assert code == 1 and checks["entry point verl_recipes"]["status"] == FAIL
        assert "MISSING avspo" in checks["driver: advantage estimators"]["detail"]
    finally:
        cluster.communicate("")
        shutil.rmtree(folder, ignore_errors=True)
    assert set(Path("/tmp").glob("vd*")) <= before, "the doctor's own Ray left nothing"


@pytest.mark.e2e
def test_address_without_a_cluster():
    code, checks, _ = run_doctor("--ray-address", "127.0.0.1:1")
    assert code == 1 and checks["Ray"]["status"] == FAIL and "ray status" in checks["Ray"]["advice"]
