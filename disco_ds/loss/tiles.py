"""The block of logits of one rank, own rows against all columns, visited tile by tile.

    S = scale * own @ other.T          (b, B)

No more than a tile of S exists at a time. Two things keep its digits:

- A pair's own logit (row i, column ``first + i``) is the positive. It is kept out of the tiles, where it reads -inf,
  because the losses treat it apart and in float64: near convergence the positive dwarfs all else, and what is added to
  it is lost.
- Features of one model lie in a cone: their cosines may all be near 0.8, and of a logit near 80 float32 has five
  digits behind the point. So the columns are multiplied less their mean c, and what that leaves out is added in
  float64:

      S_ij - level = scale * own_i @ (other_j - c)  +  (scale * own_i @ c - level)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from disco_ds.loss.memory import PIECE_ROWS, tile_rows

NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True)
class Tile:
    """Where a tile lies: its place in the order and in the grid of tiles, and its rows and columns of S."""

    index: int
    row_step: int
    column_step: int
    rows: slice
    columns: slice


class LogitTiles:
    """S in tiles.

    Args:
        own: features of this rank's rows, (b, D).
        other: features of all columns, (B, D), of the same dtype. Taken over: they are centered in place.
        scale: the factor of S.
        first: the column that is the positive of row 0.
        columns: columns of a tile.
        level: the tiles hold S - level; None picks a level in the middle of S and leaves it in ``level``.

    Float64 features are worked on in float64, all others in float32: on CUDA 16-bit features are multiplied as they are
    and summed in float32, on CPU they are cast first, a tile's columns at a time.
    """

    def __init__(
        self, own: Tensor, other: Tensor, scale: float, first: int, columns: int, level: float | None = None
    ) -> None:
        self.dtype = torch.promote_types(own.dtype, torch.float32)
        self.native = multiplies_16_bit(own)
        self.own = own if self.native else own.to(self.dtype)
        self.other = other
        self.scale = scale
        self.first = first
        self.level: Tensor | float = 0.0 if level is None else level
        self.rows, self.width = own.shape[0], other.shape[0]
        self.tile_columns = columns
        self.tile_rows = tile_rows(self.rows, own.device.type)
        self.row_steps = -(-self.rows // self.tile_rows)
        self.column_steps = -(-self.width // columns)
        self._cast: tuple[int, Tensor] | None = None
        # Subtracting the mean would round 16-bit features; there the digits it saves are not there to begin with.
        self.center = None if self.native else other.mean(0, dtype=self.dtype)
        if self.center is not None:
            self.own_at_center = torch.cat([piece.double() @ self.center.double() for piece in own.split(PIECE_ROWS)])
            if level is None:
                self.level = self.own_at_center.sum() * (scale / max(self.rows, 1))
            self._offsets = (scale * self.own_at_center - self.level).to(self.dtype).unsqueeze(1)
            if other.dtype == self.dtype:
                other.sub_(self.center)

    def __iter__(self) -> Iterator[Tile]:
        """All tiles, those of the same columns one after the other; none where this rank has no rows."""
        for j in range(self.column_steps):
            columns = slice(j * self.tile_columns, min(self.width, (j + 1) * self.tile_columns))
            for i in range(self.row_steps):
                rows = slice(i * self.tile_rows, min(self.rows, (i + 1) * self.tile_rows))
                yield Tile(j * self.row_steps + i, i, j, rows, columns)

    def new_room(self, whole: bool = False) -> Tensor:
        """Uninitialised flat room for the values of one tile, or of the whole block."""
        size = self.rows * self.width if whole else min(self.rows, self.tile_rows) * min(self.width, self.tile_columns)
        return self.other.new_empty(size, dtype=self.dtype)

    def view(self, room: Tensor, tile: Tile) -> Tensor:
        """A tile's (rows, columns) in ``room``: its own place in room for the whole block, else the front."""
        height, width = tile.rows.stop - tile.rows.start, tile.columns.stop - tile.columns.start
        whole = room.numel() == self.rows * self.width
        start = tile.columns.start * self.rows + tile.rows.start * width if whole else 0
        return room[start : start + height * width].view(height, width)

    def logits(self, tile: Tile, room: Tensor) -> Tensor:
        """The logits of one tile less the level, (rows, columns), written to its place in ``room``; positives: -inf."""
        rows, S = self.own[tile.rows], self.view(room, tile)
        if self.native:
            mm_16_bit(rows, self.columns(tile).T, out=S).mul_(self.scale).sub_(self.level)
        elif multiplies_with_onednn(rows):
            product = torch.ops.mkldnn._linear_pointwise(rows, self.columns(tile), None, "none", [], "")
            torch.add(self._offsets[tile.rows], product, alpha=self.scale, out=S)
        else:
            torch.addmm(S, rows, self.columns(tile).T, beta=0, alpha=self.scale, out=S).add_(self._offsets[tile.rows])
        first = max(tile.columns.start, self.first + tile.rows.start)
        last = min(tile.columns.stop, self.first + tile.rows.stop)
        if first < last:
            i, j = first - self.first - tile.rows.start, first - tile.columns.start
            S[i:, j:].diagonal()[: last - first].fill_(NEGATIVE_INFINITY)
        return S

    def columns(self, tile: Tile) -> Tensor:
        """Features of a tile's columns, less their mean, ready to be multiplied."""
        if self.center is None or self.other.dtype == self.dtype:
            return self.other[tile.columns]
        if self._cast is None or self._cast[0] != tile.column_step:  # once for all tiles of these columns
            self._cast = None  # lets go of the last ones before the next are made
            self._cast = tile.column_step, self.other[tile.columns] - self.center
        return self._cast[1]

    def select(self, columns: Tensor) -> Tensor:
        """Features of any columns, less their mean."""
        chosen = self.other.index_select(0, columns)
        return chosen if self.center is None or chosen.dtype == self.dtype else chosen - self.center

    def pieces(self) -> list[slice]:
        """The rows, a few at a time."""
        return [slice(i, min(i + PIECE_ROWS, self.rows)) for i in range(0, self.rows, PIECE_ROWS)]


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """The inner product of each row of ``a`` with the same row of ``b``, (rows,) float64, a few rows at a time."""
    pieces = zip(a.split(PIECE_ROWS), b.split(PIECE_ROWS), strict=True)
    return torch.cat([x.to(torch.float64, copy=True).mul_(y.double()).sum(1) for x, y in pieces])


def row_peaks(S: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of each row and its column, as ``S.max(1)`` finds them, in a third of its time on CPU.

    A reduction that looks for places is slow there, one that does not is fast: so first the largest of 16 columns that
    lie apart, then the place among these, then which of the 16 it was.
    """
    r, n = S.shape
    if n % 16 or S.device.type != "cpu":
        peaks, at = S.max(1)
        return peaks, at
    apart = S.view(r, 16, n // 16)
    peaks, at = apart.amax(1).max(1)
    which = apart.gather(2, at.view(r, 1, 1).expand(r, 16, 1)).argmax(1).squeeze(1)
    return peaks, which * (n // 16) + at


def column_peaks(S: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of each column and its row, as ``S.max(0)`` finds them; on CPU in a fifth of its time."""
    r, n = S.shape
    if r % 16 or S.device.type != "cpu":
        peaks, at = S.max(0)
        return peaks, at
    apart = S.view(16, r // 16, n)
    peaks, at = apart.amax(0).max(0)
    which = apart.gather(1, at.view(1, 1, n).expand(16, 1, n)).argmax(0).squeeze(0)
    return peaks, which * (r // 16) + at


def multiplies_with_onednn(rows: Tensor) -> bool:
    """Whether a float32 product on CPU goes to oneDNN and not to the BLAS that torch was built with.

    torch.mm takes MKL, which leaves half of an AMD processor idle (100 against 200 GFLOP/s a core, Zen 4, torch 2.14);
    oneDNN does not. It costs the room of one more tile, which ``loss_memory`` counts.
    """
    return _HAS_ONEDNN and rows.dtype == torch.float32 and rows.device.type == "cpu" and rows.numel() > 0


_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def multiplies_16_bit(features: Tensor) -> bool:
    """Whether 16-bit features are multiplied as they are, with sums and results in float32.

    That is ``torch.mm(..., out_dtype=torch.float32)``: on CUDA, from torch 2.8. Elsewhere they are cast to float32.
    """
    return features.dtype in (torch.bfloat16, torch.float16) and features.is_cuda and _HAS_OUT_DTYPE


_HAS_OUT_DTYPE = hasattr(torch.ops.aten.mm, "dtype_out")


def mm_16_bit(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b of 16-bit matrices, in float32."""
    return torch.mm(a, b, out_dtype=torch.float32, out=out)


@contextmanager
def exact_matmuls() -> Iterator[None]:
    """Float32 products in float32, whatever the process allows elsewhere (TF32, bfloat16): s = 100 magnifies errors."""
    allowed = torch.get_float32_matmul_precision()
    if allowed == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(allowed)
