"""Environment variables of the CPU stack."""

from __future__ import annotations

import os
import tempfile

_FIXED = {
    # verl: our platform; its engines are registered for "cuda" and "npu" only, and the former run on a CPU as they are.
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    # One thread for each process: ranks, vLLM and workers already outnumber the cores, and OpenMP threads that wait for
    # a core spin (60 times slower steps were seen with two).
    "OMP_NUM_THREADS": "1",
    # No kernels to compile for: saves some 20 s at the first generation.
    "TORCHDYNAMO_DISABLE": "1",
    # Memory for the KV cache [GiB, whole number].
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Do not pin vLLM to cores that the trainer uses too.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Lets rollout.engine_kwargs.vllm.distributed_executor_backend=uni stand (vLLM would put "mp" in its place): the
    # model runs in vLLM's engine process, which saves one process for each replica and a hop for each token.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Models and data are local.
    "HF_HUB_OFFLINE": "1",
    # No telemetry.
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray starts one idle worker for each (logical) CPU; none of them has verl's environment, so none is ever used.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
}


def environment() -> dict[str, str]:
    """Variables that the CPU stack needs, to be set before torch or Ray is imported.

    Use: ``for name, value in environment().items(): os.environ.setdefault(name, value)``.
    """
    # Short, because Ray puts sockets below it (limit 107 bytes), and the user's own. Runs share it: each Ray session
    # has a folder of its own inside.
    folder = tempfile.gettempdir() if len(tempfile.gettempdir()) <= 30 else "/tmp"
    return {**_FIXED, "VERL_EXT_RAY_TMP": os.path.join(folder, f"ray-cpu-{os.getuid()}")}
