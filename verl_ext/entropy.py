"""The entropy mapping: from token entropies to a gate, a progress coordinate and buckets of equal entropy.

Plain functions on tensors, for n groups of G responses and T tokens at once; nothing here knows of verl or of one
method. Source: arXiv 2605.04960, spec ep_grpo section 3 (equation numbers are the spec's). `mask` is a float tensor of
0 and 1, and `use` the part of it that enters statistics.
"""

from __future__ import annotations

import torch

EPS = 1e-6


def token_moments(
    values: torch.Tensor, use: torch.Tensor, dim: tuple[int, ...], ddof: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Number, mean and std of the used tokens over the dimensions `dim` (kept with size 1).

    std is 0 where there are at most `ddof` tokens, the mean 0 where there are none.
    """
    n = use.sum(dim, keepdim=True)
    mean = (values * use).sum(dim, keepdim=True) / n.clamp(min=1)
    squares = ((values - mean) * use).square_().sum(dim, keepdim=True)
    std = (squares / (n - ddof).clamp(min=1)).sqrt()
    return n, mean, torch.where(n > ddof, std, torch.zeros_like(std))


def gate(entropy: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, gamma: float) -> torch.Tensor:
    """W = sigmoid(gamma (H - mean) / std) of (3): 0.5 at the mean, near 1 on uncertain tokens. [second-hand]

    A std of 0 gives 0.5.
    """
    return (entropy - mean).mul_(gamma / (std + EPS)).sigmoid_()


def progress(entropy: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """tau of (6): share of the response's total entropy up to and with each token, in (0, 1]. [second-hand]

    A response without any entropy (deterministic text) falls back to the position: t / length. Tokens that are masked
    out carry the value reached before them. An entropy below 0 is rounding and counts as 0.
    """
    running = (entropy * mask).clamp_(min=0).cumsum(-1)
    total = running[..., -1:].clone()  # not a view: `running` is divided in place
    flat = total <= 0
    if bool(flat.any()):
        steps = mask.cumsum(-1)
        running = torch.where(flat, steps, running)
        total = torch.where(flat, steps[..., -1:].clamp(min=1), total)
    return running.div_(total)


def position(mask: torch.Tensor) -> torch.Tensor:
    """t / length in (0, 1]: what (6) is compared with."""
    steps = mask.cumsum(-1)
    return steps / steps[..., -1:].clamp(min=1)


def buckets(tau: torch.Tensor, k: int) -> torch.Tensor:
    """Bucket number min(floor(k tau), k - 1) of (6), int64. At an edge float32 may fall either way."""
    return (tau * k).long().clamp_(max=k - 1)


def bucket_moments(
    values: torch.Tensor, use: torch.Tensor, bucket: torch.Tensor, k: int, ddof: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Number, mean and std (n, k) of the used tokens in each bucket of each group of (7).

    Args:
        values, use, bucket: (n, G, T). Groups do not share buckets.
    """
    groups = values.shape[0]
    cell = bucket.flatten(1)
    zeros = values.new_zeros(groups, k)
    n = zeros.scatter_add(1, cell, use.flatten(1))
    mean = zeros.scatter_add(1, cell, (values * use).flatten(1)) / n.clamp(min=1)
    centred = (values.flatten(1) - mean.gather(1, cell)).square_().mul_(use.flatten(1))
    std = (zeros.scatter_add(1, cell, centred) / (n - ddof).clamp(min=1)).sqrt()
    return n, mean, torch.where(n > ddof, std, torch.zeros_like(std))


def quantile(values: torch.Tensor, mask: torch.Tensor, q: float) -> torch.Tensor:
    """(n, 1) the q-quantile (0 to 1, linear interpolation as numpy's) of the masked values of each row of (n, T).

    Infinite where a row has no masked values.
    """
    ordered = values.masked_fill(mask == 0, torch.inf).sort(-1).values
    place = q * (mask.sum(-1, keepdim=True).double() - 1).clamp(min=0)
    low = place.floor().long()
    below = ordered.gather(-1, low)
    # The value above is not read where it would lie outside: there the place is whole.
    above = ordered.gather(-1, (low + 1).clamp(max=values.shape[-1] - 1))
    part = (place - low).to(values.dtype)
    return torch.where(part == 0, below, below + part * (above - below))


def segments(cut: torch.Tensor, n: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Segments with equally many cut points each. arXiv 2604.20659 (2), spec grpo_vps sections 4 and 7.

    A row with U cut points gets M = ceil(U / n) segments, at most `most`, and one when U < n. Segment m + 1 starts at
    cut point round(m U / M) (counted from 0, halves to even). U / M >= 1, so every start lies after the one before.

    Args:
        cut: (..., T) bool, the cut points.

    Returns:
        segment number of each token (..., T) int64 from 0, and M (...,) int64.
    """
    points = cut.sum(-1, keepdim=True)
    number = ((points + n - 1) // n).clamp(min=1, max=most).where(points >= n, torch.ones_like(points))
    seen = cut.cumsum(-1)
    segment = torch.zeros_like(seen)
    for m in range(1, int(number.max()) if number.numel() else 1):
        twice = 2 * m * points
        whole, rest = twice // (2 * number), twice % (2 * number)
        start = whole + ((rest > number) | ((rest == number) & (whole % 2 == 1)))  # round half to even, exactly
        segment += (m < number) & (seen > start)
    return segment, number.squeeze(-1)
