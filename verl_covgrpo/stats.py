"""Masked moments of rows, and of scopes made of whole rows (a prompt group, or the batch).

Moments and weights run over chunks of rows that stay in the processor's cache, never over groups or
tokens, and are accumulated in float64. A chunk holds rows that end at about the same column, so
that little time goes into padding.

Shape suffixes: B rows, T columns, r rows and w columns of a chunk, S scopes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

CHUNK_ELEMENTS = 1 << 18
"""Elements of a chunk: 1 MB in float32."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch run on the calling thread alone.

    An operation on a chunk is too short to be worth sharing: where other processes keep a core
    busy, waiting for the other threads after each of them takes many times longer than the work.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU in huge pages that are only touched where they are written to."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    item = torch.empty((), dtype=dtype).element_size()
    return torch.from_numpy(np.zeros(math.prod(shape) * item, np.uint8)).view(dtype).view(shape)


class Scratch:
    """Memory for one chunk at a time; new memory for each would take longer than the arithmetic."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._flat = torch.empty(0, dtype=dtype, device=device)

    def of(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return uninitialised memory of a shape; what was there before is gone."""
        size = math.prod(shape)
        if self._flat.numel() < size:
            self._flat = self._flat.new_empty(size)
        return self._flat[:size].view(shape)

    def like(self, x_rw: torch.Tensor) -> torch.Tensor:
        """Return uninitialised memory of the shape of `x_rw`."""
        return self.of(tuple(x_rw.shape))

    def copy(self, x_rw: torch.Tensor) -> torch.Tensor:
        """Return a copy of `x_rw` in the dtype of the scratch."""
        return self.like(x_rw).copy_(x_rw)


class Counter:
    """Counts the elements of a chunk that lie above or below a value, or are not 0."""

    def __init__(self, device: torch.device) -> None:
        self._scratch = Scratch(torch.bool, device)

    def above(self, x_rw: torch.Tensor, value: float) -> int:
        """Return how many elements are greater than `value`."""
        return self._count(np.greater, torch.gt, x_rw, value)

    def below(self, x_rw: torch.Tensor, value: float) -> int:
        """Return how many elements are less than `value`."""
        return self._count(np.less, torch.lt, x_rw, value)

    def nonzero(self, x_rw: torch.Tensor) -> int:
        """Return how many elements are not 0."""
        return self._count(np.not_equal, torch.ne, x_rw, 0.0)

    def _count(self, in_numpy: Any, in_torch: Any, x_rw: torch.Tensor, value: float) -> int:
        flags_rw = self._scratch.like(x_rw)
        if x_rw.device.type != "cpu":
            return int(torch.count_nonzero(in_torch(x_rw, value, out=flags_rw)))
        # numpy compares into booleans, and counts those, many times faster than torch.
        return int(np.count_nonzero(in_numpy(x_rw.numpy(), value, out=flags_rw.numpy())))


def row_slices(x_BT: torch.Tensor, elements: int = CHUNK_ELEMENTS) -> list[slice]:
    """Return slices of consecutive rows, about `elements` elements each."""
    size, columns = x_BT.shape
    step = max(1, elements // max(1, columns))
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def add_up(parts: Sequence[torch.Tensor]) -> float:
    """Return all values of chunks added up in float64."""
    return sum(float(x_rw.sum(dtype=torch.float64)) for x_rw in parts)


def add_up_squares(parts: Sequence[torch.Tensor]) -> float:
    """Return the squares of all values of chunks, added up."""
    return sum(float(torch.linalg.vector_norm(x_rw, dtype=torch.float64)) ** 2 for x_rw in parts)


@dataclass(frozen=True)
class Chunk:
    """Some rows, and the columns up to the last valid token of any of them."""

    rows: torch.Tensor
    """(r,) int64"""
    width: int
    masked: torch.Tensor
    """(r, m) bool where the mask is 0 in the last m columns; before these it is 1 throughout."""
    holes: bool
    """Whether a masked token stands before a valid one; then m is the width."""

    def take(self, x_BT: torch.Tensor, scratch: Scratch | None = None) -> torch.Tensor:
        """Return a copy of the chunk of `x_BT`, (r, w); that of a (B, 1) tensor is (r, 1).

        With a scratch of the dtype of `x_BT` the copy lies in there.
        """
        x_Bw = x_BT[:, : self.width]
        if scratch is None:
            return x_Bw.index_select(0, self.rows)
        out = scratch.of((len(self.rows), x_Bw.shape[1]))
        return torch.index_select(x_Bw, 0, self.rows, out=out)

    def mask_(self, x_rw: torch.Tensor, value: float) -> torch.Tensor:
        """Fill the chunk with `value` where the mask is 0, in place."""
        x_rw[:, self.width - self.masked.shape[1] :].masked_fill_(self.masked, value)
        return x_rw

    def put(self, x_rw: torch.Tensor, x_BT: torch.Tensor) -> None:
        """Write the chunk of `x_BT`."""
        if x_BT.device.type == "cpu":  # twice as fast in numpy
            x_BT.numpy()[self.rows.numpy(), : self.width] = x_rw.numpy()
        else:
            x_BT[:, : self.width].index_copy_(0, self.rows, x_rw)

    @property
    def ranks(self) -> torch.Tensor:
        """Each token's place among its row's valid tokens, from 0 on: (r or 1, w) int64.

        Where the mask is 0 it may be anything from -1 to w - 1.
        """
        if not self.holes:
            return torch.arange(self.width, device=self.masked.device).unsqueeze(0)
        return self.masked.logical_not().cumsum(dim=1) - 1


@dataclass(frozen=True, eq=False)
class Tokens:
    """Where the valid tokens of a batch are."""

    mask: torch.Tensor
    """(B, T) bool"""
    count: torch.Tensor
    """(B,) int64 number of valid tokens of each row."""
    end: torch.Tensor
    """(B,) int64 column after the last of them; 0 where there is none."""

    @cached_property
    def first(self) -> torch.Tensor:
        """(B,) int64 column of the first of them; 0 where there is none."""
        first_B = self.mask.cpu().numpy().argmax(axis=1)  # torch takes many times longer
        return torch.from_numpy(first_B).to(self.mask.device)

    @cached_property
    def chunks(self) -> list[Chunk]:
        """The rows that have a token, longest first, `CHUNK_ELEMENTS` elements at a time."""
        end_B, order_B = self.end.sort(descending=True, stable=True)
        holes_B = (self.count != self.end)[order_B]
        solid_B = torch.where(holes_B, 0, end_B)
        ends = [end for end in end_B.tolist() if end > 0]
        chunks, start = [], 0
        while start < len(ends):
            width = ends[start]
            stop = min(start + max(1, CHUNK_ELEMENTS // width), len(ends))
            rows, solid = order_B[start:stop], int(solid_B[start:stop].amin())
            masked = ~self.mask[:, solid:width].index_select(0, rows)
            chunks.append(Chunk(rows, width, masked, bool(holes_B[start:stop].any())))
            start = stop
        return chunks

    @cached_property
    def order(self) -> torch.Tensor:
        """The rows of all chunks, one after the other."""
        return torch.cat([chunk.rows for chunk in self.chunks])

    def split(self, x_B: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the part of every chunk of what each row has, (B, ...)."""
        return x_B[self.order].split([len(chunk.rows) for chunk in self.chunks])

    def pack(self, x_BT: torch.Tensor) -> list[torch.Tensor]:
        """Return a copy of every chunk, (r, w) float32, or float64 where `x_BT` is."""
        dtype = torch.promote_types(x_BT.dtype, torch.float32)
        sizes = [len(chunk.rows) * chunk.width for chunk in self.chunks]
        memory = zeros((sum(sizes),), dtype, x_BT.device).split(sizes)
        packed = []
        for chunk, part in zip(self.chunks, memory, strict=True):
            packed.append(part.view(-1, chunk.width))
            if x_BT.dtype == dtype:
                torch.index_select(x_BT[:, : chunk.width], 0, chunk.rows, out=packed[-1])
            else:
                packed[-1].copy_(chunk.take(x_BT))
        return packed

    def each(self, x_BT: torch.Tensor) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """Yield every chunk and its part of `x_BT`, (r, w) float32, or float64 where `x_BT` is.

        The part may be written to, and is gone when the next one comes: what is done with it at
        once costs no memory, and is done in the processor's cache.
        """
        dtype = torch.promote_types(x_BT.dtype, torch.float32)
        taken, exact = Scratch(x_BT.dtype, x_BT.device), Scratch(dtype, x_BT.device)
        for chunk in self.chunks:
            x_rw = chunk.take(x_BT, taken)
            yield chunk, x_rw if x_rw.dtype == dtype else exact.copy(x_rw)

    def weigh_(
        self,
        weights: Sequence[torch.Tensor],
        A: torch.Tensor,
        addends: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return weights * A + addends, (B, T) float32, 0 where the mask is 0.

        A is (B, 1) or (B, T), the others are chunks that are 0 there; the weights are used up.
        """
        weighted_BT = self.zeros()
        for i, (chunk, w_rw) in enumerate(zip(self.chunks, weights, strict=True)):
            w_rw.mul_(chunk.take(A))
            if A.shape[1] > 1:  # then it may hold anything where the mask is 0
                chunk.mask_(w_rw, 0.0)
            if addends is not None:
                w_rw.add_(addends[i])
            chunk.put(w_rw.float(), weighted_BT)
        return weighted_BT

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """Return a (B, 1) or (B, T) field as (B, T) float32, 0 where the mask is 0.

        A (B, 1) field must be finite.
        """
        if x.shape[1] > 1 or self.mask.shape[1] == 1:
            return torch.where(self.mask, x.float(), 0.0)
        return self.mask.float().mul_(x.float())  # many times faster than where

    def zeros(self) -> torch.Tensor:
        """Return a field without values yet, (B, T) float32."""
        return zeros(self.mask.shape, torch.float32, self.mask.device)

    def unpack_rows(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Put one number per row, (r,) of every chunk, where it belongs, (B,) float64."""
        x_B = torch.zeros(self.count.shape, dtype=torch.float64, device=self.count.device)
        x_B[self.order] = torch.cat(list(parts)).double()
        return x_B

    def at_first(self, x_BT: torch.Tensor) -> torch.Tensor:
        """Return the value at each row's first valid token, (B,) float64; 0 where there is none."""
        value_B = x_BT.gather(1, self.first.unsqueeze(1)).squeeze(1).double()
        return torch.where(self.count > 0, value_B, 0.0)


def tokens_of(mask_BT: torch.Tensor) -> Tokens:
    """Locate the ones of a boolean or 0/1 mask, (B, T).

    Raises:
        NotBoolean: a value is neither 0 nor 1.
    """
    if mask_BT.dtype != torch.bool:
        counts_BT, mask_BT = mask_BT, zeros(mask_BT.shape, torch.bool, mask_BT.device)
        for rows in row_slices(counts_BT, CHUNK_ELEMENTS // 4):
            _check_zero_one(counts_BT[rows], rows.start)
            mask_BT[rows] = counts_BT[rows]
    count_B, end_B = _counts_and_ends(mask_BT.cpu().numpy())
    return Tokens(mask_BT, count_B.to(mask_BT.device), end_B.to(mask_BT.device))


def _counts_and_ends(mask_BT: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `Tokens.count` and `Tokens.end`; in numpy, where torch takes ten times as long."""
    columns = mask_BT.shape[1]
    if not columns:
        return (torch.zeros(len(mask_BT), dtype=torch.int64),) * 2
    count_B = mask_BT.view(np.uint8).sum(axis=1, dtype=np.min_scalar_type(columns))
    end_B = count_B.astype(np.int64)
    ragged_B = (count_B != columns) & (count_B != mask_BT.argmin(axis=1))
    end_B[ragged_B] = columns - mask_BT[ragged_B, ::-1].argmax(axis=1)
    return torch.from_numpy(count_B.astype(np.int64)), torch.from_numpy(end_B)


class NotBoolean(ValueError):
    """A mask with a value that is neither 0 nor 1."""

    def __init__(self, value: float, row: int, column: int) -> None:
        super().__init__(f"{value} at row {row}, column {column}")


def _check_zero_one(mask_rT: torch.Tensor, start: int) -> None:
    """Raise `NotBoolean` where the rows of a mask from `start` on are not 0 or 1."""
    in_numpy = mask_rT.device.type == "cpu" and not mask_rT.is_floating_point()
    # Any other integer would leave one of its bits in here.
    if in_numpy and np.bitwise_or.reduce(mask_rT.numpy(), axis=None) in (0, 1):
        return
    wrong_rT = mask_rT != (mask_rT != 0)
    if bool(wrong_rT.any()):
        row, column = (int(i) for i in wrong_rT.nonzero()[0])
        raise NotBoolean(mask_rT[row, column].item(), start + row, column)


def mean_of(tokens: Tokens, x_BT: torch.Tensor) -> float:
    """Return the mean of a (B, T) field over the valid tokens."""
    parts = [chunk.mask_(chunk.take(x_BT), 0.0) for chunk in tokens.chunks]
    return add_up(parts) / int(tokens.count.sum())


def weight_metrics(tokens: Tokens, w: torch.Tensor, A: torch.Tensor) -> dict[str, float]:
    """Return mean and std of weights over the valid tokens, and the means by the sign of A.

    w and A are (B, 1) or (B, T); where there is no token of a sign its mean is 1.
    """
    if w.shape[1] == A.shape[1] == 1:
        count = tokens.count.double().unsqueeze(1)
    else:
        count = tokens.mask.double()
        w = torch.where(tokens.mask, w.double(), 0.0)
        A = torch.where(tokens.mask, A.double(), 0.0)

    def mean(counts: torch.Tensor, default: float) -> float:
        added = float(counts.sum())
        return float((w.double() * counts).sum()) / added if added else default

    whole = mean(count, 1.0)
    variance = float(((w.double() - whole).square() * count).sum()) / float(count.sum())
    return {
        "weight": whole,
        "weight_std": variance**0.5,
        "positive_weight": mean(count * (A > 0), 1.0),
        "negative_weight": mean(count * (A < 0), 1.0),
    }


@dataclass(frozen=True)
class RowMoments:
    """Moments of each row over its valid tokens, all (B,) float64 and 0 for a row without any."""

    count: torch.Tensor
    mean: torch.Tensor
    m2: torch.Tensor
    """The squared deviations from the row's mean, added up."""


class MomentsOfRows:
    """Collects `RowMoments` chunk by chunk.

    The values of a row are given as deviations from a pivot, the value that one of its own valid
    tokens has. A row that does not vary then has m2 = 0 exactly, and in any other row the
    subtraction below loses no more digits than the row's length has.
    """

    def __init__(self, tokens: Tokens, pivot_B: torch.Tensor) -> None:
        self.tokens = tokens
        self.pivot = pivot_B
        self.deviations: list[torch.Tensor] = []
        self.norms: list[torch.Tensor] = []

    def add(self, deviation_rw: torch.Tensor) -> None:
        """Take up the deviations of the next chunk, (r, w) float64, 0 where the mask is 0."""
        self.deviations.append(deviation_rw.sum(dim=1))
        self.norms.append(torch.linalg.vector_norm(deviation_rw, dim=1))

    def result(self) -> RowMoments:
        """Return the moments of all rows."""
        count_B = self.tokens.count.double()
        deviation_B = self.tokens.unpack_rows(self.deviations)
        mean_B = deviation_B / count_B.clamp(min=1)
        m2_B = self.tokens.unpack_rows(self.norms).square() - deviation_B * mean_B
        return RowMoments(count_B, self.pivot + mean_B, m2_B.clamp(min=0))


def row_moments(x_BT: torch.Tensor, tokens: Tokens) -> RowMoments:
    """Return the moments of each row; x may be anything where the mask is 0."""
    pivot_B = tokens.at_first(x_BT)
    moments = MomentsOfRows(tokens, pivot_B)
    scratch64 = Scratch(torch.float64, x_BT.device)
    pivots = tokens.split(pivot_B.unsqueeze(1))
    for (chunk, x_rw), pivot_r1 in zip(tokens.each(x_BT), pivots, strict=True):
        x_rw.sub_(pivot_r1.to(x_rw.dtype))
        chunk.mask_(x_rw, 0.0)
        moments.add(scratch64.copy(x_rw))
    return moments.result()


def row_extremes(x_BT: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the greatest value of each row over its valid tokens, (B,) float64.

    Infinity and minus infinity for a row without any.
    """
    low_B = torch.full_like(tokens.count, torch.inf, dtype=torch.float64)
    high_B = -low_B
    for chunk in tokens.chunks:
        x_rw = chunk.take(x_BT)
        low_B[chunk.rows] = chunk.mask_(x_rw, torch.inf).amin(dim=1).double()
        high_B[chunk.rows] = chunk.mask_(x_rw, -torch.inf).amax(dim=1).double()
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
        return -self.greatest(-low_B) >= self.greatest(high_B)

    def greatest(self, x_B: torch.Tensor) -> torch.Tensor:
        """Return the greatest value of each scope's rows, (S,) float64; -inf without a row."""
        low_S = torch.full((self.size,), -torch.inf, dtype=torch.float64, device=x_B.device)
        return low_S.scatter_reduce(0, self.index, x_B.double(), "amax")
