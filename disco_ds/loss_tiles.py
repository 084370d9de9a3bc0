"""The block of logits of one rank, own rows against all columns, visited tile by tile.

    S = scale * own @ other.T          (b, B)

No more than a tile of S exists at a time. Two things keep its digits:

- A pair's own logit (row i, column ``first + i``) is the positive. It is kept out of the tiles, where it reads -inf,
  because the losses treat it apart and in float64: near convergence the positive dwarfs all else, and what is added to
  it is lost.
- Features of one model lie in a cone: their cosines may all be near 0.8, and logits near 80 have seven digits only in
  all. So the columns are multiplied less their mean c, and what that leaves out is added in float64:

      S_ij - level = scale * own_i @ (other_j - c)  +  (scale * own_i @ c - level)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from disco_ds.loss_memory import tile_rows

NEGATIVE_INFINITY = float("-inf")
DOT_ROWS = 256  # rows that row_dots holds in float64 at a time


@dataclass(frozen=True)
class Tile:
    """Where a tile lies: its place in the order and in the grid of tiles, and its rows and columns of S."""

    index: int
    row_step: int
    column_step: int
    rows: slice
    columns: slice


class LogitTiles:
    """S in tiles, and the two products its gradient enters.

    Args:
        own: features of this rank's rows, (b, D).
        other: features of all columns, (B, D), of the same dtype.
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
        self.dtype = torch.float64 if own.dtype == torch.float64 else torch.float32
        self.native = multiplies_16_bit(own)
        self.own = own if self.native else own.to(self.dtype)
        self.other = other
        self.scale = scale
        self.first = first
        self.rows, self.width = own.shape[0], other.shape[0]
        self.tile_columns = columns
        self.tile_rows = tile_rows(self.rows, own.device.type)
        self.row_steps = -(-self.rows // self.tile_rows)
        self.column_steps = -(-self.width // columns)
        self._columns_at: tuple[int, Tensor, Tensor] | None = None
        self.level: Tensor | float = 0.0 if level is None else level
        if not self.native:
            self._center = other.mean(0, dtype=self.dtype)
            offsets = row_dots(own, self._center.expand(own.shape)).mul_(scale)
            if level is None:
                self.level = offsets.sum() / max(self.rows, 1)
            self._offsets = (offsets - self.level).to(self.dtype).unsqueeze(1)

    def __iter__(self) -> Iterator[Tile]:
        """All tiles, those of the same columns one after the other; none where this rank has no rows."""
        for j in range(self.column_steps):
            columns = slice(j * self.tile_columns, min(self.width, (j + 1) * self.tile_columns))
            for i in range(self.row_steps):
                rows = slice(i * self.tile_rows, min(self.rows, (i + 1) * self.tile_rows))
                yield Tile(j * self.row_steps + i, i, j, rows, columns)

    def __len__(self) -> int:
        return self.row_steps * self.column_steps

    def new_buffer(self, whole: bool = False) -> Tensor:
        """Uninitialised flat room for the values of one tile, or of the whole block."""
        size = self.rows * self.width if whole else min(self.rows, self.tile_rows) * min(self.width, self.tile_columns)
        return self.other.new_empty(size, dtype=self.dtype)

    def new_rows(self) -> Tensor:
        """Zeros (b, D), to add a product to."""
        return self.other.new_zeros((self.rows, self.other.shape[1]), dtype=self.dtype)

    def new_columns(self) -> Tensor:
        """Room (B, D) for a product; zeros where this rank has no rows and visits no tile that would write it."""
        make = torch.empty if self.rows else torch.zeros
        return make(self.other.shape, dtype=self.dtype, device=self.other.device)

    def view(self, room: Tensor, tile: Tile) -> Tensor:
        """A tile's (rows, columns) in ``room``: its own place in room for the whole block, or the front of a buffer."""
        height, width = tile.rows.stop - tile.rows.start, tile.columns.stop - tile.columns.start
        whole = room.numel() == self.rows * self.width
        start = tile.columns.start * self.rows + tile.rows.start * width if whole else 0
        return room[start : start + height * width].view(height, width)

    def logits(self, tile: Tile, room: Tensor) -> Tensor:
        """The logits of one tile, (rows, columns), written to its place in ``room``; the positives are -inf."""
        rows, S = self.own[tile.rows], self.view(room, tile)
        if self.native:
            mm_16_bit(rows, self.other[tile.columns].T, out=S).mul_(self.scale).sub_(self.level)
        else:
            centered = self._columns(tile)[1]
            torch.addmm(self._offsets[tile.rows], rows, centered.T, alpha=self.scale, out=S)
        first = max(tile.columns.start, self.first + tile.rows.start)
        last = min(tile.columns.stop, self.first + tile.rows.stop)
        if first < last:
            i, j = first - self.first - tile.rows.start, first - tile.columns.start
            S[i:, j:].diagonal()[: last - first].fill_(NEGATIVE_INFINITY)
        return S

    def exact_logits(self, columns: Tensor) -> Tensor:
        """The logit of each row at the column named for it, (b,) float64, as accurate as the features are."""
        pieces = [row_dots(self.own[rows], self.other[columns[rows]]) for rows in self.row_pieces()]
        return torch.cat(pieces or [self.other.new_empty(0, dtype=torch.float64)]).mul_(self.scale).sub_(self.level)

    def row_pieces(self) -> list[slice]:
        """The rows in pieces of a few."""
        return [slice(i, min(i + DOT_ROWS, self.rows)) for i in range(0, self.rows, DOT_ROWS)]

    def add_products(self, tile: Tile, G: Tensor, H: Tensor | None, W: Tensor | None, alpha: float) -> None:
        """H (b, D) += G @ other and W (B, D) += alpha * G.T @ own, for the rows and columns of a tile.

        W need not be initialised: the first tile of its columns writes, the others add.
        """
        beta = float(tile.row_step > 0)
        if self.native:
            _add_16_bit_products(self, tile, G, H, W, alpha, beta)
            return
        if H is not None:
            H[tile.rows].addmm_(G, self._columns(tile)[0])
        if W is not None:
            W[tile.columns].addmm_(G.T, self.own[tile.rows], beta=beta, alpha=alpha)

    def _columns(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Features of a tile's columns as they are and less their mean, made once for all tiles of these columns."""
        if self._columns_at is None or self._columns_at[0] != tile.column_step:
            self._columns_at = None  # lets go of the last ones before the next are made
            columns = self.other[tile.columns].to(self.dtype)
            self._columns_at = tile.column_step, columns, columns - self._center
        return self._columns_at[1:]


def multiplies_16_bit(features: Tensor) -> bool:
    """Whether 16-bit features are multiplied as they are, with sums and results in float32.

    That is ``torch.mm(..., out_dtype=torch.float32)``: on CUDA, from torch 2.8. Elsewhere they are cast to float32.
    """
    return features.dtype in (torch.bfloat16, torch.float16) and features.is_cuda and _HAS_OUT_DTYPE


_HAS_OUT_DTYPE = hasattr(torch.ops.aten.mm, "dtype_out")


def mm_16_bit(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b of 16-bit matrices, in float32."""
    return torch.mm(a, b, out_dtype=torch.float32, out=out)


def _add_16_bit_products(
    tiles: LogitTiles, tile: Tile, G: Tensor, H: Tensor | None, W: Tensor | None, alpha: float, beta: float
) -> None:
    # Off-diagonal G lies in [0, 2], far below where float16 starts near convergence: a power of two moves it up.
    G = G.mul_(_LIFT).to(tiles.own.dtype)
    if H is not None:
        H[tile.rows].add_(mm_16_bit(G, tiles.other[tile.columns]), alpha=1 / _LIFT)
    if W is not None:
        product = mm_16_bit(G.T, tiles.own[tile.rows])
        if beta:
            W[tile.columns].add_(product, alpha=alpha / _LIFT)
        else:
            torch.mul(product, alpha / _LIFT, out=W[tile.columns])


_LIFT = 2.0**14


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """The inner product of each row of ``a`` with the same row of ``b``, (rows,) float64, a few rows at a time."""
    pieces = zip(a.split(DOT_ROWS), b.split(DOT_ROWS), strict=True)
    return torch.cat([(x.double() * y.double()).sum(1) for x, y in pieces])


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
