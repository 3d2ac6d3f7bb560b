"""Shared-memory segments that a crashed run leaves behind.

verl's weight transfer and vLLM's message queues put segments into ``/dev/shm``; processes that are killed do not remove
theirs. What a run left is what appeared after it began, belongs to the same user, and is in no process's hands.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

SHM = Path("/dev/shm")
PATTERNS = ("psm_*", "verl_weights_*")  # Python's default name; verl's bucketed_weight_transfer.py:190


def segments() -> frozenset[str]:
    """Names of this user's segments of the kinds that the stack makes; take them before a run starts."""
    found = set()
    for path in (path for pattern in PATTERNS for path in SHM.glob(pattern)):
        try:
            if path.stat().st_uid == os.getuid():
                found.add(path.name)
        except FileNotFoundError:  # its owner removed it meanwhile
            continue
    return frozenset(found)


def in_use(names: Collection[str]) -> frozenset[str]:
    """Those of the segments that a live process has mapped or open.

    Segments are readable by their owner only, so processes that this user may not inspect do not have them.
    """
    used = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            held = (process / "maps").read_text(errors="replace")
            held += "\n".join(os.readlink(entry) for entry in (process / "fd").iterdir())
        except OSError:  # ended meanwhile, or somebody else's
            continue
        used.update(name for name in names if f"{SHM}/{name}" in held)
    return frozenset(used)


def cleanup(before: Collection[str] = ()) -> list[str]:
    """Remove the segments that a run left behind.

    Args:
        before: ``segments()`` from before the run; these stay.

    Returns:
        The names that were removed, sorted.
    """
    candidates = segments() - frozenset(before)
    orphans = sorted(candidates - in_use(candidates))
    for name in orphans:
        (SHM / name).unlink(missing_ok=True)
    return orphans
