"""What the gradient G of a rank's logits is multiplied with, summed tile by tile.

    H = G @ other      (b, D), the gradient of the own features but for a factor
    W = G.T @ own      (B, D), this rank's share of the gradient of the other features
    sum_ij G_ij * own_i @ other_j, that of the scale

H is summed from the columns less their mean c, with the row sums of G beside it: where features share a direction, the
sums along it cancel, and in float32 what cancels leaves its rounding behind.

Nor is H one long sum: beside what has come together over hundreds of tiles, the small terms of the next one round to
nothing, always downwards, and the gradient of the scale, which is what is left of large terms, feels it (5e-6 at
B = 196,608). So a few columns of tiles are summed apart, and added in one.

Where 16-bit features are multiplied as they are (CUDA), G has to be of 16 bits too. Rounded once, it would cost the
features' gradients as many digits as their own rounding does, and that of the scale, where large terms cancel, all of
them now and then. So G is multiplied in two parts of 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from disco_ds.loss.memory import COLUMN_STEPS_APART
from disco_ds.loss.tiles import LogitTiles, Tile, mm_16_bit

# Off-diagonal G lies in [0, 2] and, near convergence, far below where float16 starts: a power of two moves it up.
_LIFT = 2.0**14


class GradientProducts:
    """The products for the tiles seen so far.

    Args:
        tiles: the logits, whose gradient is going to be added.
        need_H, need_W: which of the products are wanted; the gradient of the scale comes with H.
        alpha: a factor of W.
    """

    def __init__(self, tiles: LogitTiles, need_H: bool, need_W: bool, alpha: float) -> None:
        b, (B, D) = tiles.rows, tiles.other.shape
        self.tiles = tiles
        self.alpha = alpha
        self.H = self.W = None
        if need_H:
            self.H = tiles.other.new_zeros((b, D), dtype=tiles.dtype)
            self._row_sums = tiles.other.new_zeros(b, dtype=torch.float64)
            self._part = torch.zeros_like(self.H) if tiles.column_steps > COLUMN_STEPS_APART else self.H
        if need_W:
            # The first tile of each column writes W. A rank without rows has no tiles.
            self.W = (torch.empty if b else torch.zeros)((B, D), dtype=tiles.dtype, device=tiles.other.device)

    def add(self, tile: Tile, G: Tensor) -> None:
        """Add the gradient of a tile, (rows, columns); G is overwritten."""
        if self.H is not None and self.tiles.center is not None:
            self._row_sums[tile.rows] += G.sum(1)
        self._add_products(tile, G)
        if self.H is not None and tile.row_step == self.tiles.row_steps - 1:
            self._join((tile.column_step + 1) % COLUMN_STEPS_APART == 0)

    def _join(self, due: bool) -> None:
        """Add what was summed apart to H."""
        if due and self.H is not None and self._part is not self.H:
            self.H += self._part
            self._part.zero_()

    def _add_products(self, tile: Tile, G: Tensor) -> None:
        if self.tiles.native:
            self._add_16_bit(tile, G)
            return
        if self.H is not None:
            self._part[tile.rows].addmm_(G, self.tiles.columns(tile))
        if self.W is not None:
            beta = float(tile.row_step > 0)
            self.W[tile.columns].addmm_(G.T, self.tiles.own[tile.rows], beta=beta, alpha=self.alpha)

    def _add_16_bit(self, tile: Tile, G: Tensor) -> None:
        """Multiply G in 16 bits twice, rounded and what the rounding left, which keeps 16 (bf16) or 22 bits of it."""
        rounded = torch.empty_like(G.mul_(_LIFT), dtype=self.tiles.own.dtype)
        for turn in range(2):
            rounded.copy_(G)
            G.sub_(rounded)
            if self.H is not None:
                self._part[tile.rows].add_(mm_16_bit(rounded, self.tiles.columns(tile)), alpha=1 / _LIFT)
            if self.W is not None:
                product = mm_16_bit(rounded.T, self.tiles.own[tile.rows]).mul_(self.alpha / _LIFT)
                if tile.row_step > 0 or turn > 0:
                    self.W[tile.columns].add_(product)
                else:
                    self.W[tile.columns] = product

    def add_pairs(self, rows: Tensor, columns: Tensor, G: Tensor) -> None:
        """Add a gradient G (n,) float64 of the logits at ``rows`` (n,) and ``columns`` (n,)."""
        factors = G.to(self.tiles.dtype).unsqueeze(1)
        if self.H is not None:
            self._row_sums.index_add_(0, rows, G)
            self.H.index_add_(0, rows, self.tiles.select(columns).mul_(factors))
        if self.W is not None:
            own = self.tiles.own.index_select(0, rows)
            self.W.index_add_(0, columns, own.mul_(factors), alpha=self.alpha)

    def add_positives(self, other: Tensor, G: Tensor) -> None:
        """Add the gradient G (b,) float64 of the positives, whose columns are this rank's ``other`` (b, D)."""
        first, b = self.tiles.first, self.tiles.rows
        if self.H is not None:
            self._row_sums += G
        G = G.to(self.tiles.dtype).unsqueeze(1)
        for piece in self.tiles.pieces():
            if self.H is not None:
                columns = other[piece].to(self.tiles.dtype)
                if self.tiles.center is not None:
                    columns = columns - self.tiles.center
                self.H[piece].addcmul_(G[piece], columns)
            if self.W is not None:
                own = self.tiles.own[piece].to(self.tiles.dtype)
                self.W[first : first + b][piece].addcmul_(G[piece], own, value=self.alpha)

    def finish_H(self, balanced: bool) -> Tensor:
        """Complete H, and return the sum of G_ij * own_i @ other_j over the rows of this rank, float64.

        ``balanced``: G sums to zero over all ranks, as the gradient of a softmax does. Then a constant may be taken
        from the cosines without changing the sum over ranks, and their common part does not blur it.
        """
        assert self.H is not None
        self._join(True)
        self._part = self.H
        inner = self._row_sums.new_zeros(())
        for piece in self.tiles.pieces():
            inner += (self.tiles.own[piece] * self.H[piece]).sum(1).sum(dtype=torch.float64)
        center = self.tiles.center
        if center is not None:
            constant = center.double().square().sum() if balanced else 0.0
            inner += (self._row_sums * (self.tiles.own_at_center - constant)).sum()
            self.H.addcmul_(self._row_sums.to(self.H.dtype).unsqueeze(1), center)
        return inner
