"""Statistics over groups: the responses to one prompt, which share a uid.

Everything is vectorised and aware of rows that must not count. A row *counts* when it has at least one response token
and its uid does not start with `pad` (the rows verl's V1 trainer appends to fill a batch). Rows that do not count keep
their place, so that row order and number never change, but they enter no statistic.

Shapes: B rows, N groups. All tensors live on the device of the rewards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

PAD_UID_PREFIX = "pad"


@dataclass(frozen=True)
class Groups:
    """Which row belongs to which group, and which rows count.

    index: (B,) int64, group of each row, 0..N-1 in the order of first appearance.
    counted: (B,) bool, rows that enter statistics.
    uids: N group names.
    real: (B,) bool, rows that are trained on: neither padding nor fully masked. `counted` is a part of them: of a
    session with several outputs only the last one counts.
    """

    index: torch.Tensor
    counted: torch.Tensor
    uids: tuple[str, ...]
    real: torch.Tensor

    def __len__(self) -> int:
        return len(self.uids)

    @cached_property
    def sizes(self) -> torch.Tensor:
        """(N,) int64: counted rows per group. Groups of padding rows have size 0."""
        return self.sum(torch.ones_like(self.index))

    @cached_property
    def comparable(self) -> torch.Tensor:
        """(N,) bool: groups of at least two counted rows, the only ones that can hold a preference."""
        return self.sizes >= 2

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """(B,) -> (N,): sum over the counted rows of each group."""
        out = values.new_zeros(len(self))
        return out.index_add_(0, self.index, torch.where(self.counted, values, torch.zeros_like(values)))

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """(B,) -> (N,): largest value over counted rows; -inf for a group without any."""
        low = torch.full_like(values, -torch.inf)
        return low.new_full((len(self),), -torch.inf).scatter_reduce_(
            0, self.index, torch.where(self.counted, values, low), "amax"
        )

    def min(self, values: torch.Tensor) -> torch.Tensor:
        """(B,) -> (N,): smallest value over counted rows; +inf for a group without any."""
        return -self.max(-values)

    def all(self, flags: torch.Tensor) -> torch.Tensor:
        """(B,) bool -> (N,) bool: every counted row of the group is set (and there is one)."""
        return (self.sum(flags.long()) == self.sizes) & (self.sizes > 0)

    def collapsed(self, rewards: torch.Tensor, tol: float) -> torch.Tensor:
        """(N,) bool: comparable groups with max(r) - min(r) <= tol (specs: never a test on std, never `== 0`)."""
        # Groups without counted rows give -inf - inf; `comparable` masks them.
        return self.comparable & (self.max(rewards) - self.min(rewards) <= tol)

    def matrices(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each group size: the groups of that size (n,) and the indices of their counted rows (n, size)."""
        yield from self._by_size(self.counted, self.sizes)

    def blocks(self, tokens: int, limit: int = 1 << 18) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For statistics over tokens: groups (n,) with at least two counted rows, of one size, and the indices of all
        their real rows (n, size).

        A block holds at most `limit` tokens (or one group), `tokens` for each row, so that the temporaries of a formula
        over it stay in the processor's cache and memory does not grow with the batch.
        """
        for which, rows in self._by_size(self.real, self._counts(self.real)):
            keep = self.comparable[which]
            which, rows = which[keep], rows[keep]
            step = max(1, limit // (rows.shape[1] * max(1, tokens)))
            for start in range(0, len(which), step):
                yield which[start : start + step], rows[start : start + step]

    def whole(self) -> Groups:
        """All rows of comparable groups as one group: for statistics over the batch."""
        use = self.comparable[self.index]
        index = torch.where(use & self.real, 0, 1)
        return Groups(index=index, counted=self.counted & use, uids=("batch", "rest"), real=self.real & use)

    def _counts(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.bincount(self.index[rows], minlength=len(self))

    def _by_size(self, use: torch.Tensor, sizes: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        rows = use.nonzero().squeeze(1)
        rows = rows[torch.sort(self.index[rows], stable=True).indices]  # grouped, original order inside a group
        starts = sizes.cumsum(0) - sizes
        for size in sizes.unique().tolist():
            if size > 0:
                which = (sizes == size).nonzero().squeeze(1)
                yield which, rows[starts[which, None] + torch.arange(size, device=rows.device)]

    def mean_std(self, values: torch.Tensor, ddof: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """(B,) -> mean (N,), std (N,) over counted rows; std is 0 for a group of at most `ddof` rows, mean 0 for an
        empty one.

        Groups of equal size are reduced together as a matrix with torch's own mean and std, so that each group gets the
        bits that verl's per-group loop gives it (a scatter would add in another order).
        """
        mean, std = values.new_zeros(len(self)), values.new_zeros(len(self))
        for which, rows in self.matrices():
            matrix = values[rows]
            mean[which] = matrix.mean(1)
            if matrix.shape[1] > ddof:
                std[which] = matrix.std(1, correction=ddof)
        return mean, std


def make_groups(uid: np.ndarray, response_mask: torch.Tensor, counted: torch.Tensor | None = None) -> Groups:
    """Group rows by uid.

    Args:
        uid: (B,) names, as verl's `index` / `non_tensor_batch["uid"]`.
        response_mask: (B, T); rows without a single 1 do not count.
        counted: optional (B,) bool, further restricts the rows that count (for example to a session's last output).

    Raises:
        ValueError: uid and response_mask disagree on B.
    """
    uid = np.asarray(uid, dtype=object)
    if uid.shape != (response_mask.shape[0],):
        raise ValueError(f"uid has shape {uid.shape}, but response_mask has {response_mask.shape[0]} rows")
    names: dict[str, int] = {}
    index = torch.tensor([names.setdefault(str(u), len(names)) for u in uid], dtype=torch.int64)
    is_pad = torch.tensor([name.startswith(PAD_UID_PREFIX) for name in names], dtype=torch.bool)
    device = response_mask.device
    index, is_pad = index.to(device), is_pad.to(device)
    real = (response_mask.sum(dim=1) > 0) & ~is_pad[index]  # several times faster than any()
    return Groups(
        index=index,
        counted=real if counted is None else real & counted.to(device),
        uids=tuple(names),
        real=real,
    )
