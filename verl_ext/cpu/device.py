"""What verl expects of an accelerator's ``torch.<device>`` namespace, for a CPU.

``verl.utils.device.get_torch_device()`` returns this module. Everything ``torch.cpu`` has is taken from there
(``synchronize``, ``Stream``, ...); the memory and random-number half, which only accelerators have, is defined here.
"""

from __future__ import annotations

import resource
from typing import Any

import psutil
import torch

get_rng_state = torch.get_rng_state
set_rng_state = torch.set_rng_state


def __getattr__(name: str) -> Any:
    return getattr(torch.cpu, name)


def empty_cache() -> None:
    """Nothing is cached."""


def ipc_collect() -> None:
    """No handles to collect."""


def reset_peak_memory_stats(*_: Any) -> None:
    """The peak of a process cannot be reset."""


def max_memory_allocated(*_: Any) -> int:
    """Peak resident memory of this process [bytes]."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def memory_allocated(*_: Any) -> int:
    """Resident memory of this process [bytes]."""
    return psutil.Process().memory_info().rss


max_memory_reserved = max_memory_allocated
memory_reserved = memory_allocated


def mem_get_info(*_: Any) -> tuple[int, int]:
    """Free and total memory of the machine [bytes]."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def get_device_name(*_: Any) -> str:
    """Name for reports; verl has no peak FLOPS for it, so its MFU is not meaningful."""
    return "CPU"
