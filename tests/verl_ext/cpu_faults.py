"""Shows, for each entry of ``verl_ext.cpu.patches.PATCHES``, whether the fault that it cures is there.

Run by test_cpu_platform.py in a process of its own: once without the CPU platform and once with it. Prints one line of
JSON: ``{"registered": bool, "again": bool, "faults": {patch: bool}, "patched": [modules], "unchanged": bool}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import json
import os
import sys
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import torch

FAULTS = {}


def fault(probe):
    FAULTS[probe.__name__.replace("_", "-")] = probe
    return probe


@fault
def alias_of_vllm():
    try:
        importlib.import_module("verl.third_party.vllm")
    except ValueError as error:
        return "not supported" in str(error)
    return False


@fault
def one_backend_for_the_cpu():
    from verl.utils.distributed import initialize_global_process_group_ray

    try:
        initialize_global_process_group_ray()
    except ValueError as error:
        return "Duplicate device type cpu" in str(error)
    torch.distributed.destroy_process_group()
    return False


@fault
def reference_model_without_pinned_memory():
    from torch.distributed.fsdp import fully_shard
    from verl.workers.engine.fsdp.transformer_impl import CPUOffloadPolicy

    torch.distributed.init_process_group("cpu:gloo", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        module = fully_shard(torch.nn.Linear(2, 2), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=True))
        module(torch.ones(1, 2))
    except RuntimeError as error:
        return "pin" in str(error) or "accelerator" in str(error)
    finally:
        torch.distributed.destroy_process_group()
    return False


@fault
def quick_replay_buffer():
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    return ReplayBuffer("sync", {}, 1, "drop", {}).poll_interval > 1


@fault
def linear_that_can_be_reloaded():
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    def product_after_reload(remove_weight):
        layer = torch.nn.Linear(64, 64, bias=False)
        dispatch_cpu_unquantized_gemm(layer, remove_weight)
        with torch.no_grad():
            layer.weight.copy_(torch.eye(64))
            return layer.cpu_linear(torch.ones(1, 64), layer.weight, None)

    try:
        return not all(torch.equal(product_after_reload(remove), torch.ones(1, 64)) for remove in (True, False))
    except RuntimeError:  # the weight was freed
        return True


def transfer():
    """Send one weight to a receiver that cannot load it; what the two sides raised within 5 s, None while they wait."""
    from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transport

    from verl_ext.cpu import weight_sync

    address, receiving, raised = f"ipc:///tmp/cpu-faults-{os.getpid()}.sock", Future(), {}

    def load(weights, is_last):
        raise LookupError("injected fault")

    def receive():
        try:
            transport.BucketedWeightReceiver(address, torch.device("cpu"), use_shm=True).receive_weights(load)
        except Exception as error:
            raised["receiver"] = error
            receiving.set_exception(error)

    def send():
        weight_sync.receiver.set(receiving)
        sender = transport.BucketedWeightSender(address, bucket_size_mb=1, use_shm=True)
        try:
            asyncio.run(sender.async_send_weights(iter([("weight", torch.ones(4))])))
        except Exception as error:
            raised["sender"] = error

    threads = [threading.Thread(target=side, daemon=True) for side in (send, receive)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=5)
    with contextlib.suppress(OSError):
        os.remove(address.removeprefix("ipc://"))
    return raised.get("sender"), raised.get("receiver")


@fault
def sender_that_gives_up():
    sender, _ = transfer()
    return not (type(sender).__name__ == "WeightSyncError" and "injected fault" in str(sender))


@fault
def receiver_that_names_the_cause():
    _, receiver = transfer()
    return not isinstance(receiver, LookupError)


@fault
def sender_that_knows_its_receiver():
    from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

    from verl_ext.cpu import weight_sync

    call = SimpleNamespace(future=lambda: "the receiving call")
    adapter = ServerAdapter.__new__(ServerAdapter)
    adapter._ensure_server_handle = lambda: True
    adapter.server_handle = SimpleNamespace(
        collective_rpc=SimpleNamespace(remote=lambda method, timeout, args, kwargs: call)
    )

    async def known():
        await adapter._execute_method("update_weights_from_ipc", non_block=True, kwargs={})
        return weight_sync.receiver.get()

    return asyncio.run(known()) != "the receiving call"


@fault
def weights_of_this_run_only():
    """Two runs on one machine, each with a Ray of its own, hence each with job 1."""
    from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transport

    def address(kind, raylet):
        os.environ["RAY_RAYLET_PID"] = raylet
        return kind(zmq_handle="ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0.sock", **more[kind]).zmq_handle

    more = {transport.BucketedWeightSender: {}, transport.BucketedWeightReceiver: {"device": torch.device("cpu")}}
    (sender, receiver), (other, _) = ([address(kind, raylet) for kind in more] for raylet in ("11", "12"))
    assert sender == receiver, "the two sides of one run must meet"
    return sender == other


def main() -> None:
    import verl  # noqa: F401  loads the plug-in
    from verl.plugin.platform import PlatformRegistry, set_platform

    from verl_ext import cpu
    from verl_ext.cpu.patches import PATCHES

    report = {"registered": "cpu" in PlatformRegistry.registered_names(), "again": cpu.activate(), "faults": {}}
    if not report["registered"]:  # the faults are those of an unpatched stack on this platform
        from verl_ext.cpu.platform import PlatformCPU

        set_platform(PlatformCPU())
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, probe in FAULTS.items():
        report["faults"][name] = probe()
        if name == "alias-of-vllm":  # without it, what the other probes look at cannot be imported
            PATCHES[name].install(importlib.metadata)
    report["patched"] = sorted(
        name for name, module in list(sys.modules.items()) if "__verl_ext_patches__" in getattr(module, "__dict__", {})
    )
    wrapped = {name: vars(sys.modules[name]).copy() for name in report["patched"]}
    cpu.activate()
    if report["registered"]:
        from verl_ext.cpu import patches

        patches.apply_all()
    report["unchanged"] = all(wrapped[name] == vars(sys.modules[name]) for name in wrapped)
    print(json.dumps(report), flush=True)
    os._exit(0)  # a sender that waits for ever does not keep the process


if __name__ == "__main__":
    main()
