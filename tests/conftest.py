"""Shared by all tests: one thread per process, and random cases that are the same in every run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import HealthCheck, settings

# `from contracts.cases import ...` (pytest's importlib mode puts no folder on the path).
sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)
# No deadline: the time of one example says nothing on a busy machine.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
