"""How the losses cut their logits into tiles, and the bytes they take: closed forms, without torch.

The losses ask this module for their tiles and the planner asks it for their memory, so the two cannot drift apart.
Shapes throughout: b pairs on this rank, B on all ranks, D the width of the features.
"""

from __future__ import annotations

# Logits kept for the second pass instead of computed again (3 matrix products instead of 4), if they stay below this.
KEEP_BUDGET_BYTES = 256 * 2**20
# A tile on CPU: rows x columns of float32 that fit a core's second-level cache.
CPU_TILE_ROWS = 1024
CPU_TILE_COLUMNS = 1024
# On an accelerator a tile has all rows of the rank; its columns are what fits these bytes.
CUDA_TILE_BYTES = 64 * 2**20


def default_tile(b: int, B: int, device: str = "cuda") -> int:
    """Columns of a tile of logits where the caller names none; b is the largest number of rows on any rank."""
    if device == "cpu":
        return max(1, min(B, CPU_TILE_COLUMNS))
    columns = CUDA_TILE_BYTES // (4 * max(b, 1)) // 256 * 256
    return max(1, min(B, max(256, columns)))


def tile_rows(b: int, device: str = "cuda") -> int:
    """Rows of a tile."""
    return max(1, min(b, CPU_TILE_ROWS) if device == "cpu" else b)


def keeps_logits(b: int, B: int, itemsize: int = 4) -> bool:
    """What ``keep_logits="auto"`` means: the logits of the rank with the most rows stay below 256 MiB."""
    return b * B * itemsize <= KEEP_BUDGET_BYTES


def loss_bytes(
    b: int,
    B: int,
    D: int,
    tile: int | None = None,
    dtype: str = "float32",
    keep_logits: bool | str = "auto",
    kind: str = "one_block",
    device: str = "cuda",
) -> int:
    """Peak bytes a loss holds on one rank above its inputs. (Refined below as the code settles.)"""
    raise NotImplementedError
