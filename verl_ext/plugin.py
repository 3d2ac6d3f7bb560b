"""Entry point of the group `verl.plugins`: verl imports this module in every process that imports verl.

Importing it registers every recipe. It must stay light: nothing of verl is imported here; what needs verl waits for
verl's own modules in post-import hooks. verl swallows the exception of a plug-in that fails to load, and the user then
only sees "Unknown advantage estimator"; so the failure is printed here before it is passed on.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback

import wrapt

# Our module to import once verl's own has been imported: it registers there.
AFTER = {
    "verl.trainer.ppo.v1": "verl_ext.trainer",
    "verl.experimental.agent_loop.single_turn_agent_loop": "verl_ext.agent",
}


def load() -> None:
    """Register recipes, trainer modes, the agent loop and, when VERL_PLATFORM=cpu, the CPU platform. Idempotent."""
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        from verl_ext import cpu

        cpu.activate()
    import recipes

    for name in recipes.names():
        importlib.import_module(f"recipes.{name}")
    for theirs, ours in AFTER.items():
        wrapt.register_post_import_hook(lambda _module, ours=ours: importlib.import_module(ours), theirs)


try:
    load()
except Exception:
    print("verl_ext: the plug-in failed to load; its recipes are not registered. Cause:", file=sys.stderr)
    traceback.print_exc()
    raise
