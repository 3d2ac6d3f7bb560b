"""Installs tests/toy_recipe as a user's package is installed, into a folder that goes on PYTHONPATH."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "toy_recipe"


def install(folder: Path, change: Callable[[str], str] = lambda text: text) -> Path:
    """`pip install` of a copy (building leaves files behind), with its module changed; returns where it went."""
    source, target = folder / "source", folder / "site"
    shutil.copytree(PACKAGE, source)
    module = source / "toy_recipe.py"
    module.write_text(change(module.read_text()))
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", str(target), str(source)],
        check=True,
        capture_output=True,
        timeout=120,
    )
    return target


def with_path(site: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).rstrip(":")}
