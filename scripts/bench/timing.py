"""What the benchmarks share: alternating repeats, peak memory, facts of the machine."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable

import torch


def alternate(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Fastest of `repeats` runs of each function, in seconds; one after the other in each round, after a warm-up."""
    best = dict.fromkeys(functions, float("inf"))
    for function in functions.values():
        function()
    for _ in range(repeats):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            best[name] = min(best[name], time.perf_counter() - started)
    return best


def peak_memory(function: Callable[[], object]) -> int:
    """Largest sum of tensors that `function` holds at once, in bytes, beside what it was given.

    From torch's profiler: every allocation and release of the CPU allocator, in order.
    """
    from torch.profiler import ProfilerActivity, profile

    function()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        kept = function()
    events = [e for e in run.profiler.kineto_results.events() if e.name() == "[memory]"]
    del kept
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def machine() -> str:
    return f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {platform.machine()}, torch {torch.__version__}"


def table(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    line = lambda row: "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"  # noqa: E731
    return "\n".join([line(head), "|" + "|".join("-" * (w + 2) for w in widths) + "|", *map(line, rows)])
