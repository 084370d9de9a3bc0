"""The two passes of the contrastive loss over its block of logits, with one exponential an element in each.

Within a tile one shift m, its largest logit, serves rows and columns alike:

    E = exp(S - m)      sums over rows and over columns of the same E, then their logarithms + m
    G = E * (exp(m - row_i) + exp(m - column_j))      in the second pass: no further exponential

That is exact unless a whole row or column of the tile lies so far below its shift that the sum nears underflow. Such a
tile is *wide*: its rows and columns get shifts of their own, in both passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from disco_ds.loss.hardest import Hardest
from disco_ds.loss.products import GradientProducts
from disco_ds.loss.tiles import NEGATIVE_INFINITY, LogitTiles

# A row or column whose sum is smaller than this, in units of the tile's largest exponential, makes the tile wide. It is
# far above 1e-38, where float32 begins to lose digits, so the terms that matter to the sum still have all of theirs.
SMALLEST_SUM = 1e-25


@dataclass
class LogSums:
    """What the first pass leaves behind. Logits are less the level of the tiles."""

    rows: Tensor  # (b,) float64, log-sum-exp over the negatives
    columns: Tensor  # (B,) float64, likewise, but over the rows of this rank only
    shifts: list[Tensor]  # the largest logit of each tile
    wide: set[int]  # indices of wide tiles
    kept: Tensor | None  # (b * B,), every tile as the pass left it: E, or S where wide; None if not kept
    hardest: Hardest | None  # None where products are in 16 bits


def first_pass(tiles: LogitTiles, keep: bool) -> LogSums:
    """Log-sum-exps over the negatives of rows and columns; with ``keep`` the tiles stay for the second pass.

    Which tiles are wide is asked once, after the last, because on CUDA the question makes the host wait.
    """
    room = tiles.new_room(whole=keep)
    rows = tiles.other.new_full((tiles.column_steps, tiles.rows), NEGATIVE_INFINITY, dtype=torch.float64)
    columns = tiles.other.new_full((tiles.row_steps, tiles.width), NEGATIVE_INFINITY, dtype=torch.float64)
    hardest = None if tiles.native else Hardest(tiles)
    shifts: list[Tensor] = []
    smallest: list[Tensor] = []
    for tile in tiles:
        S = tiles.logits(tile, room)
        shift = S.amax() if hardest is None else hardest.see(tile, S)
        E = S.sub_(shift).exp_()
        row_sums, column_sums = E.sum(1), E.sum(0)
        rows[tile.column_step, tile.rows] = row_sums.double().log_().add_(shift)
        columns[tile.row_step, tile.columns] = column_sums.double().log_().add_(shift)
        smallest.append(torch.minimum(row_sums.amin(), column_sums.amin()))
        shifts.append(shift)
    wide = _wide(smallest)
    for tile in tiles if wide else ():
        if tile.index in wide:
            S = tiles.logits(tile, room)
            rows[tile.column_step, tile.rows] = _log_sum_exp(S, 1)
            columns[tile.row_step, tile.columns] = _log_sum_exp(S, 0)
    sums = LogSums(rows.logsumexp(0), columns.logsumexp(0), shifts, wide, room if keep else None, hardest)
    if hardest is not None:
        hardest.measure(tiles)
        hardest.correct(sums.rows, sums.columns)
    return sums


def second_pass(tiles: LogitTiles, sums: LogSums, row: Tensor, column: Tensor, products: GradientProducts) -> None:
    """Add the off-diagonal gradient of the logits, exp(S - row) + exp(S - column), to the products.

    ``row`` (b,) and ``column`` (B,) are the full log-sum-exps, float64: positives and all ranks included, level not.
    Kept tiles are overwritten.
    """
    kept = sums.kept is not None
    room = sums.kept if sums.kept is not None else tiles.new_room()
    scratch = tiles.new_room()
    for tile in tiles:
        S = tiles.view(room, tile) if kept else tiles.logits(tile, room)
        factors = tiles.view(scratch, tile)
        row_i, column_j = row[tile.rows].unsqueeze(1), column[tile.columns]
        if tile.index in sums.wide:
            G = _wide_gradient(S, row_i, column_j, factors)
        else:
            shift = sums.shifts[tile.index]
            E = S if kept else S.sub_(shift).exp_()
            torch.add((shift - row_i).exp_().to(E.dtype), (shift - column_j).exp_().to(E.dtype), out=factors)
            G = E.mul_(factors)
        products.add(tile, G)
    if sums.hardest is not None:
        sums.hardest.add_gradient(row, column, products)


def _wide(smallest: list[Tensor]) -> set[int]:
    """Indices of tiles with a sum near underflow; a tile that is not a number counts as wide, too."""
    if not smallest:
        return set()
    fits = torch.stack(smallest) > SMALLEST_SUM
    return {i for i, fit in enumerate(fits.tolist()) if not fit}


def _peak(S: Tensor, dim: int) -> Tensor:
    """The largest logit of each row (dim 1) or column (0), kept as a dimension; finite where there are only -inf."""
    return S.amax(dim, keepdim=True).clamp_min_(torch.finfo(S.dtype).min)


def _log_sum_exp(S: Tensor, dim: int) -> Tensor:
    """Log-sum-exp along ``dim``, in float64 past the sum; -inf for nothing but -inf."""
    peak = _peak(S, dim)
    return (S - peak).exp_().sum(dim).double().log_().add_(peak.squeeze(dim))


def _wide_gradient(S: Tensor, row: Tensor, column: Tensor, factors: Tensor) -> Tensor:
    """exp(S - row) + exp(S - column), written over S. Each exponent is split at the row's or column's largest logit,
    so that the rounding of S - row at |row| ~ 1000 does not enter."""
    row_peak, column_peak = _peak(S, 1), _peak(S, 0)
    torch.sub(S, row_peak, out=factors).exp_().mul_((row_peak - row).exp_().to(S.dtype))
    return S.sub_(column_peak).exp_().mul_((column_peak - column).exp_().to(S.dtype)).add_(factors)
