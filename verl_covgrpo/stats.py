"""Masked moments of rows, and of scopes made of whole rows (a prompt group, or the batch).

Everything runs over fixed-size chunks of rows that stay in the processor's cache, never over groups
or tokens, and is accumulated in float64. Shape suffixes: B rows, T columns, r the rows of a chunk,
S scopes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

CHUNK_ELEMENTS = (1 << 15) - 1
"""Elements of a chunk. torch runs an operation on fewer than 2^15 elements in the calling thread; the
chunks are spread over threads instead, which costs one barrier in all and not one per operation."""
MOST_THREADS = 8
"""Beyond this the interpreter, which hands out the operations, is the bottleneck."""

_Partial = TypeVar("_Partial")


def row_chunks(x_BT: torch.Tensor) -> Iterator[slice]:
    """Yield slices of consecutive rows, about `CHUNK_ELEMENTS` elements at a time."""
    size, columns = x_BT.shape
    step = max(1, CHUNK_ELEMENTS // max(1, columns))
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def over_chunks(
    work: Callable[[Iterator[slice]], _Partial], x_BT: torch.Tensor
) -> list[_Partial]:
    """Let some threads share the row chunks of `x_BT`; return what each of them returns.

    `work` is called once per thread and takes the next chunk until there is none. It may write only
    to the rows of its chunks, so that the result does not depend on who took which.
    """
    chunks = list(row_chunks(x_BT))
    threads = torch.get_num_threads() if x_BT.device.type == "cpu" else 1
    threads = min(threads, MOST_THREADS, len(chunks))
    queue = iter(chunks)
    if threads <= 1:
        return [work(queue)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, [queue] * threads))


def scratch(x_BT: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised buffer as large as the first, and largest, chunk of `x_BT`."""
    first = next(row_chunks(x_BT), slice(0, 0))
    return torch.empty(x_BT[first].shape, dtype=dtype, device=x_BT.device)


def row_counts(mask_BT: torch.Tensor) -> torch.Tensor:
    """Return the number of ones of each row of a boolean mask, (B,) int64."""
    counts_B = torch.empty(mask_BT.shape[0], dtype=torch.int64, device=mask_BT.device)

    def count(chunks: Iterator[slice]) -> None:
        for rows in chunks:
            counts_B[rows] = torch.count_nonzero(mask_BT[rows], dim=1)

    over_chunks(count, mask_BT)
    return counts_B


def first_valid(mask_BT: torch.Tensor) -> torch.Tensor:
    """Return the column of the first one of each row, (B,) int64; 0 where there is none."""
    if bool(mask_BT[:, :1].all()):
        return torch.zeros(mask_BT.shape[0], dtype=torch.int64, device=mask_BT.device)
    return mask_BT.to(torch.uint8).argmax(dim=1)


@dataclass(frozen=True)
class RowMoments:
    """Moments of each row over its valid tokens, all (B,) float64 and 0 for a row without any."""

    count: torch.Tensor
    mean: torch.Tensor
    m2: torch.Tensor
    """The squared deviations from the row's mean, added up."""


class MomentsOfRows:
    """Collects `RowMoments` chunk by chunk.

    The values of a row are given as deviations from a pivot, any value that one of its own valid
    tokens has. A row that does not vary then has m2 = 0 exactly, and in any other row the subtraction
    below loses no more than the digits of the row's length.
    """

    def __init__(self, count_B: torch.Tensor, pivot_B: torch.Tensor) -> None:
        self.count = count_B.double()
        self.pivot = pivot_B.double()
        self.deviation = torch.zeros_like(self.count)
        self.norm = torch.zeros_like(self.count)

    def add(self, rows: slice, deviation_rT: torch.Tensor) -> None:
        """Take up the deviations of some rows, (r, T) float64, 0 where the mask is 0."""
        torch.sum(deviation_rT, dim=1, out=self.deviation[rows])
        torch.linalg.vector_norm(deviation_rT, dim=1, out=self.norm[rows])

    def result(self) -> RowMoments:
        """Return the moments of all rows."""
        mean_deviation = self.deviation / self.count.clamp(min=1)
        m2 = (self.norm.square() - self.deviation * mean_deviation).clamp(min=0)
        return RowMoments(self.count, self.pivot + mean_deviation, m2)


def row_moments(
    x_BT: torch.Tensor, mask_BT: torch.Tensor, count_B: torch.Tensor, first_B: torch.Tensor
) -> RowMoments:
    """Return the moments of each row of `x_BT` over its valid tokens.

    Args:
        x_BT: (B, T) floating; anything where the mask is 0.
        mask_BT: (B, T) bool.
        count_B: (B,) valid tokens of each row.
        first_B: (B,) int64 column of the first of them.
    """
    pivot_B = at_column(x_BT, first_B, count_B)
    moments = MomentsOfRows(count_B, pivot_B)

    def add(chunks: Iterator[slice]) -> None:
        buffer = scratch(x_BT, torch.float64)
        for rows in chunks:
            deviation_rT = buffer[: rows.stop - rows.start].copy_(x_BT[rows])
            deviation_rT.sub_(moments.pivot[rows, None]).masked_fill_(~mask_BT[rows], 0.0)
            moments.add(rows, deviation_rT)

    over_chunks(add, x_BT)
    return moments.result()


def at_column(x_BT: torch.Tensor, column_B: torch.Tensor, count_B: torch.Tensor) -> torch.Tensor:
    """Return the value of each row in its column, (B,) float64; 0 for a row without valid tokens."""
    value_B = x_BT.gather(1, column_B.unsqueeze(1)).squeeze(1).double()
    return torch.where(count_B > 0, value_B, 0.0)


def row_extremes(x_BT: torch.Tensor, mask_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the greatest value of each row over its valid tokens, (B,) float64.

    Infinity and minus infinity for a row without any.
    """
    low_B = torch.empty(x_BT.shape[0], dtype=torch.float64, device=x_BT.device)
    high_B = torch.empty_like(low_B)

    def find(chunks: Iterator[slice]) -> None:
        for rows in chunks:
            masked_rT = ~mask_BT[rows]
            low_B[rows] = x_BT[rows].masked_fill(masked_rT, torch.inf).amin(dim=1).double()
            high_B[rows] = x_BT[rows].masked_fill(masked_rT, -torch.inf).amax(dim=1).double()

    over_chunks(find, x_BT)
    return low_B, high_B


@dataclass(frozen=True)
class Scopes:
    """A partition of the rows into scopes, over which the moments of rows are pooled."""

    index: torch.Tensor
    """(B,) int64 scope of each row."""
    size: int

    def add(self, x_B: torch.Tensor) -> torch.Tensor:
        """Return the values of each scope's rows added up, (S,) float64."""
        zero_S = torch.zeros(self.size, dtype=torch.float64, device=x_B.device)
        return zero_S.index_add_(0, self.index, x_B.double())

    def mean(self, rows: RowMoments) -> torch.Tensor:
        """Return the mean over all tokens of each scope, (S,); 0 for a scope without any."""
        return self.add(rows.count * rows.mean) / self.add(rows.count).clamp(min=1)

    def variance(self, rows: RowMoments) -> torch.Tensor:
        """Return the population variance over all tokens of each scope, (S,).

        By the law of total variance: the variance within the rows plus that of their means. Both
        are sums of squares, so a scope that does not vary has exactly 0.
        """
        between_B = rows.count * (rows.mean - self.mean(rows)[self.index]).square()
        return self.add(rows.m2 + between_B) / self.add(rows.count).clamp(min=1)

    def constant(self, low_B: torch.Tensor, high_B: torch.Tensor) -> torch.Tensor:
        """Return whether all tokens of each scope have one value, (S,) bool, given row extremes.

        True for a scope without tokens.
        """
        inf_S = torch.full((self.size,), torch.inf, dtype=torch.float64, device=low_B.device)
        low_S = inf_S.scatter_reduce(0, self.index, low_B, "amin")
        high_S = (-inf_S).scatter_reduce(0, self.index, high_B, "amax")
        return low_S >= high_S
