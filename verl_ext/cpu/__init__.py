"""verl on machines without an accelerator: its platform ``cpu`` and the patches that the real stack needs there.

Importing this package changes nothing. ``activate()`` does, and only in processes with ``VERL_PLATFORM=cpu``.
"""

from __future__ import annotations

import os

from verl_ext.cpu.environment import environment
from verl_ext.cpu.leftovers import cleanup, segments

__all__ = ["activate", "cleanup", "environment", "requested", "segments"]

_active = False


def requested() -> bool:
    """Whether this process was asked to run on the CPU platform."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def activate() -> bool:
    """Register verl's platform ``cpu`` and apply the patches; nothing happens unless ``VERL_PLATFORM=cpu``.

    Called from verl's plug-in entry point, hence in every process that imports verl. Idempotent.

    Returns:
        Whether the platform is active.

    Raises:
        verl_ext.cpu.patches.PatchError: what is installed is outside the supported versions.
    """
    global _active
    if _active or not requested():
        return _active
    _active = True  # before the imports below: they import verl, which loads the plug-in, which calls this
    for name, value in environment().items():  # workers of a Ray that was started without it
        os.environ.setdefault(name, value)
    from verl_ext.cpu import patches

    try:
        patches.apply_all()
        from verl_ext.cpu import platform  # noqa: F401  registers itself
    except BaseException:
        _active = False
        raise
    return _active
