"""One folder per method. `recipes.<name>` registers the method on import; `names()` lists what there is."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent


def names() -> list[str]:
    """Names of the recipes: the folders that hold `config/<name>.yaml`."""
    return sorted(p.parent.parent.name for p in ROOT.glob("*/config/*.yaml") if p.stem == p.parent.parent.name)
