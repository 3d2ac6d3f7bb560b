"""Names arrive where verl looks for them, once, by every route; and the code of a method keeps some promises."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
import verl
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

import recipes
import verl_ext
from verl_ext.registry import METHODS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]

ASK = textwrap.dedent(
    """
    import json
    import verl
    import verl_ext.plugin
    import importlib
    importlib.import_module("verl_ext.plugin").load()  # a second call
    from verl_ext.registry import METHODS
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    print(json.dumps({
        "estimators": [n for n, m in METHODS.items() if m.estimator and n in ADV_ESTIMATOR_REGISTRY],
        "losses": [n for n, m in METHODS.items() if m.policy_loss and n in POLICY_LOSS_REGISTRY],
    }))
    """
)
WANTED = {
    "estimators": [n for n, m in METHODS.items() if m.estimator],
    "losses": [n for n, m in METHODS.items() if m.policy_loss],
}


def python(code: str, **env: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("VERL_")}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env={**clean, **env}, capture_output=True, text=True, timeout=300
    )


def test_every_method_is_in_verls_registries():
    for name, method in METHODS.items():
        assert (name in ADV_ESTIMATOR_REGISTRY) == (method.estimator is not None)
        assert (name in POLICY_LOSS_REGISTRY) == (method.policy_loss is not None)
        if method.policy_loss:
            assert POLICY_LOSS_REGISTRY[name] is method.policy_loss


def test_every_recipe_with_a_method_registers_it():
    for name in recipes.names():
        method = getattr(importlib.import_module(f"recipes.{name}"), "METHOD", None)
        assert method is None or METHODS[method.name] is method


@pytest.mark.parametrize(
    "env",
    [
        {"VERL_USE_EXTERNAL_MODULES": "verl_ext.plugin"},
        {"VERL_USE_EXTERNAL_MODULES": "verl_ext.plugin", "VERL_USE_EXTERNAL_PLUGINS": "none"},
    ],
    ids=["both routes", "module only"],
)
def test_both_routes_register_once(env):
    """The entry point alone has served this very process; see the test above."""
    done = python(ASK, **env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == WANTED


def test_a_name_taken_by_someone_else_is_an_error(tmp_path):
    """Somebody's module registers our names first: ours does not replace them, says so, and a second try fails too."""
    (tmp_path / "theirs.py").write_text(
        "from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss\n"
        f"for name in {WANTED['estimators']}:\n    @register_adv_est(name)\n    def theirs(**kwargs): ...\n"
        f"for name in {WANTED['losses']}:\n    @register_policy_loss(name)\n    def theirs(**kwargs): ...\n"
    )
    done = python(
        "import verl\nprint('verl is there')\nimport verl_ext.plugin",
        PYTHONPATH=str(tmp_path),
        VERL_USE_EXTERNAL_MODULES="theirs",
    )
    assert "verl is there" in done.stdout
    assert done.returncode != 0
    message = f"{min(METHODS)!r} is already registered in verl by theirs.theirs"
    assert done.stderr.count(f"ValueError: {message}") >= 2, done.stderr


# -- versions ---------------------------------------------------------------------------------------------------------


def test_the_range_of_verl_is_the_same_everywhere_and_holds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (asked,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "verl")
    supported = SpecifierSet(verl_ext.SUPPORTED_VERL)
    assert asked.specifier == supported
    assert any(bound.operator in ("<", "<=") for bound in supported)
    assert supported.contains(importlib.metadata.version("verl"))
    assert importlib.metadata.version("verl") == verl.__version__


# -- promises of a method's code --------------------------------------------------------------------------------------

METHOD_FILES = sorted(path for path in (ROOT / "recipes").rglob("*.py") if path.name != "__init__.py")
TO_HOST = {"cpu", "cuda", "numpy"}
SYNCS = {"item", "tolist"}
LOOPS = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def breaches(source: str) -> list[str]:
    """Calls that tie a method to one device: `.cpu()` anywhere, `.item()` and `.tolist()` inside a loop."""
    found, tree = [], ast.parse(source)

    def visit(node, in_loop):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            if name in TO_HOST or (in_loop and name in SYNCS):
                found.append(f"line {node.lineno}: .{name}()")
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.split(":")[0] in ("cpu", "cuda")
        ):
            found.append(f"line {node.lineno}: {node.value!r}")
        for child in ast.iter_child_nodes(node):
            visit(child, in_loop or isinstance(node, LOOPS))

    visit(tree, False)
    return found


@pytest.mark.parametrize("path", METHOD_FILES, ids=lambda path: path.name)
def test_a_method_is_bound_to_no_device(path):
    assert breaches(path.read_text()) == []


@pytest.mark.parametrize(
    "source", ["x.cpu()", "for i in r: a = x[i].item()", "[v.item() for v in x]", "x.to('cuda:0')"]
)
def test_the_device_check_sees(source):
    assert breaches(source)


def test_the_device_check_allows_one_number():
    assert breaches("n = x.sum().item()") == []


@pytest.mark.parametrize("name", [name for name in METHODS if name in recipes.names()])
def test_every_method_has_an_oracle(name):
    """tests/recipes/test_<name>.py holds `oracle`: the method once more, over plain numbers, written from its spec."""
    tree = ast.parse((ROOT / "tests" / "recipes" / f"test_{name}.py").read_text())
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert "oracle" in functions
    oracle = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "oracle")
    assert not {node.id for node in ast.walk(oracle) if isinstance(node, ast.Name)} & {
        "torch",
        "np",
        METHODS[name].name,
    }


# -- workers ----------------------------------------------------------------------------------------------------------

WORKER = textwrap.dedent(
    """
    import json, sys
    import ray

    @ray.remote
    def names():
        import verl
        from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
        return list(ADV_ESTIMATOR_REGISTRY), list(POLICY_LOSS_REGISTRY)

    ray.init(address=sys.argv[1], log_to_driver=False)
    print(json.dumps(ray.get(names.remote(), timeout=240)))
    ray.shutdown()
    """
)


@pytest.mark.e2e
def test_a_worker_of_a_running_cluster_knows_the_names():
    """The cluster was started beforehand by somebody else and gets no variable: the entry point alone must do."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VERL_", "RAY_"))}
    clean["RAY_AUTH_MODE"] = "disabled"  # `ray start` asks for a token since Ray 2.60, `ray.init` brings none
    command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--port={port}", "--num-cpus=1", "--object-store-memory=100000000", "--include-dashboard=false"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    # Ray's sockets lie some 60 bytes deeper, and a socket's path holds 107.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        head = subprocess.Popen([*command, f"--temp-dir={folder}"], env=clean, start_new_session=True, **quiet)
        try:
            for _ in range(60):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(1)
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", WORKER, f"127.0.0.1:{port}"],
                env=clean,
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, done.stderr[-3000:]
            estimators, losses = json.loads(done.stdout.splitlines()[-1])
            assert set(estimators) >= set(WANTED["estimators"])
            assert set(losses) >= set(WANTED["losses"])
        finally:
            head.terminate()  # `ray start --block` takes its processes with it
            try:
                head.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(head.pid, signal.SIGKILL)
                head.wait()
