"""The hardest negatives of rows and columns, put right.

Near convergence a few negatives carry the gradient, each of them off by some 1e-5: that is what a float32 product
leaves of a logit of 80. So the hardest negative of each row, and of each column as far as this rank's rows go, is
computed once more in float64, and the difference corrected in the sums and in the products. Of 1,500 trained batches
that takes the largest error of a gradient from 1e-5 to 1.5e-6; rows alone would leave 1 % of them above 2e-6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from disco_ds.loss.memory import PIECE_ROWS
from disco_ds.loss.products import GradientProducts
from disco_ds.loss.tiles import NEGATIVE_INFINITY, LogitTiles, Tile, column_peaks, row_dots, row_peaks


class Peaks:
    """The largest logit of each line, row or column, and where along the line it is."""

    def __init__(self, lines: int, tiles: LogitTiles) -> None:
        self.logit = tiles.other.new_full((lines,), NEGATIVE_INFINITY, dtype=tiles.dtype)
        self.at = tiles.other.new_zeros((lines,), dtype=torch.long)

    def see(self, lines: slice, logit: Tensor, at: Tensor) -> None:
        """Take note of the largest logits of some lines in a tile."""
        harder = logit > self.logit[lines]
        self.logit[lines] = torch.where(harder, logit, self.logit[lines])
        self.at[lines] = torch.where(harder, at, self.at[lines])


class Hardest:
    """The hardest negatives that a rank finds, n = b + B: of each of its rows, and of each column among its rows."""

    def __init__(self, tiles: LogitTiles) -> None:
        self.of_rows = Peaks(tiles.rows, tiles)
        self.of_columns = Peaks(tiles.width if tiles.rows else 0, tiles)

    def see(self, tile: Tile, S: Tensor) -> Tensor:
        """Take note of the largest logits of a tile; returns the largest of all."""
        logit, column = row_peaks(S)
        self.of_rows.see(tile.rows, logit, column.add_(tile.columns.start))
        of_columns, row = column_peaks(S)
        self.of_columns.see(tile.columns, of_columns, row.add_(tile.rows.start))
        return logit.amax()

    def measure(self, tiles: LogitTiles) -> None:
        """After the last tile: compute all anew in float64, and keep by how much they were wrong."""
        rows, columns = self.of_rows, self.of_columns
        place = torch.arange(len(columns.at), device=rows.at.device)
        # What is the hardest of its row and of its column counts once. No logit is in a line of positives or of nan.
        seen = rows.at[columns.at] == place if len(place) else place.bool()
        self.row = torch.cat([torch.arange(tiles.rows, device=rows.at.device), columns.at])
        self.column = torch.cat([rows.at, place])
        self.logit = torch.cat([rows.logit, columns.logit.masked_fill_(seen, NEGATIVE_INFINITY)])
        self.excess = torch.zeros_like(self.logit, dtype=torch.float64)  # exp(exact - logit) - 1
        del self.of_rows, self.of_columns
        for piece in self._pieces():
            row, column = self.row[piece], self.column[piece]
            exact = row_dots(tiles.own.index_select(0, row), tiles.select(column)) + tiles.own_at_center[row]
            wrong = torch.expm1(exact.mul_(tiles.scale).sub_(tiles.level) - self.logit[piece])
            self.excess[piece] = torch.where(self.logit[piece] > NEGATIVE_INFINITY, wrong, 0.0)

    def correct(self, rows: Tensor, columns: Tensor) -> None:
        """Correct the log-sum-exps of rows (b,) and columns (B,) in place."""
        for sums, line in ((rows, self.row), (columns, self.column)):
            sums += torch.zeros_like(sums).index_add_(0, line, self._missing(sums[line])).log1p_()

    def add_gradient(self, row: Tensor, column: Tensor, products: GradientProducts) -> None:
        """Add what the gradient of these lacks, for log-sum-exps of rows and columns as in the second pass."""
        G = self._missing(row[self.row]) + self._missing(column[self.column])
        for piece in self._pieces():
            products.add_pairs(self.row[piece], self.column[piece], G[piece])

    def _missing(self, log_sum: Tensor) -> Tensor:
        """exp(exact - log_sum) - exp(logit - log_sum), (n,) float64."""
        share = (self.logit - log_sum).exp_().mul_(self.excess)
        return share.masked_fill_(self.logit == NEGATIVE_INFINITY, 0.0)

    def _pieces(self) -> list[slice]:
        n = len(self.logit)
        return [slice(i, min(i + PIECE_ROWS, n)) for i in range(0, n, PIECE_ROWS)]
