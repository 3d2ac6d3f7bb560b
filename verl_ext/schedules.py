"""Numbers as functions of training progress. A schedule is a pure function of the global step, so it is the same on
every rank and after a resume; nothing counts calls."""

from __future__ import annotations

import math


def progress(step: int, total_steps: int) -> float:
    """Training progress in [0, 1]: 0 at the first step (step = 1), 1 at the last.

    Raises:
        ValueError: step or total_steps below 1.
    """
    if step < 1 or total_steps < 1:
        raise ValueError(f"step={step} and total_steps={total_steps} must be at least 1")
    return min(1.0, (step - 1) / (total_steps - 1)) if total_steps > 1 else 1.0


def constant(start: float, end: float, t: float) -> float:
    return start


def linear(start: float, end: float, t: float) -> float:
    return start + (end - start) * t


def cosine(start: float, end: float, t: float) -> float:
    """Half a cosine: flat at both ends."""
    return end + (start - end) * (1 + math.cos(math.pi * t)) / 2


def power(start: float, end: float, t: float, exponent: float = 2.0) -> float:
    """Slow at first, for an exponent above 1."""
    return start + (end - start) * t**exponent


def cubic(start: float, end: float, t: float) -> float:
    """Fast at both ends, flat in the middle."""
    return (start + end) / 2 + (end - start) / 2 * (2 * t - 1) ** 3


SHAPES = {"constant": constant, "linear": linear, "cosine": cosine}


def value(shape: str, start: float, end: float, t: float) -> float:
    """The scheduled number at progress t in [0, 1].

    Raises:
        ValueError: unknown shape, or t outside [0, 1].
    """
    if shape not in SHAPES:
        raise ValueError(f"schedule shape {shape!r} is not one of {', '.join(SHAPES)}")
    if not 0 <= t <= 1:
        raise ValueError(f"progress {t} lies outside [0, 1]")
    return SHAPES[shape](start, end, t)
