"""How the losses cut their logits into tiles, and the bytes they take: closed forms, without torch.

The losses ask this module for their tiles and the planner asks it for their memory, so the two cannot drift apart.
Shapes throughout: b pairs on this rank, B on all ranks, D the width of the features.
"""

from __future__ import annotations

KEEP_BUDGET_BYTES = 256 * 2**20
"""Logits up to this size are kept for the second pass: 3 matrix products instead of 4."""
TILE_BYTES = {"cuda": 64 * 2**20, "cpu": 4 * 2**20}
"""Of one tile of logits: large enough that its products, and not the calls around them, take the time."""

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
KINDS = ("one_block", "sigmoid", "disco", "open_clip", "clip")


def default_tile(b: int, B: int, device: str = "cuda") -> int:
    """Columns of a tile of logits where the caller names none; it has all b rows of the rank."""
    columns = TILE_BYTES.get(device, TILE_BYTES["cuda"]) // (4 * max(b, 1)) // 256 * 256
    return max(1, min(B, max(256, columns)))


def keeps_logits(b: int, B: int, itemsize: int = 4) -> bool:
    """What ``keep_logits="auto"`` means: the rank's logits take at most 256 MiB."""
    return b * B * itemsize <= KEEP_BUDGET_BYTES


def loss_bytes(
    b: int,
    B: int,
    D: int,
    tile: int | None = None,
    dtype: str = "float32",
    keep_logits: bool | str | None = "auto",
    kind: str = "one_block",
    device: str = "cuda",
    autocast: bool = False,
) -> int:
    """Peak bytes that a loss holds on one rank above its inputs, through forward and backward.

    Counted is every tensor the loss makes, from the gathered features to the gradients it hands back; not the features
    themselves, nor buffers that a library allocates out of sight (NCCL, gloo, a BLAS workspace), nor the rounding of an
    allocator.

    Args:
        b: pairs on this rank.
        B: pairs on all ranks.
        D: width of the features.
        tile: columns of a tile; None as the loss picks it.
        dtype: of the features.
        keep_logits: as in the loss; of "one_block" only.
        kind: "one_block", "sigmoid", or for comparison "disco" (the official recipe), "open_clip" (``local_loss`` with
            ``gather_with_grad``), "clip" (the original).
        device: "cuda" or "cpu", which differ in the size of a tile.
        autocast: whether a rival runs its matrix products in 16 bits from float32 features; ours does not care.

    Raises:
        ValueError: an unknown kind or dtype.
    """
    if kind not in KINDS or dtype not in ITEMSIZE:
        raise ValueError(
            f"loss_bytes knows the kinds {KINDS} and the dtypes {tuple(ITEMSIZE)}, not {kind!r}, {dtype!r}"
        )
    if kind in ("disco", "open_clip", "clip"):
        return _rival_bytes(b, B, D, kind, dtype, autocast)
    item = ITEMSIZE[dtype]
    wide = max(4, item)  # bytes of what is computed with
    if keep_logits == "auto":
        keep_logits = keeps_logits(b, B, wide)
    tile = min(B, tile or default_tile(b, B, device))
    features, gathered = wide * b * D, wide * B * D
    own = gathered if b < B or item < wide else 0  # gathered, unless it is the input itself
    block = b * B + b * tile if keep_logits and kind == "one_block" else 2 * b * tile
    base = own + features + wide * block  # the scaled own features, and two tiles, or the block and one
    second = base + features + gathered
    finish = second + (2 * 8 * b * D if item < 8 else 0)  # the scale's gradient, in float64
    scatter = second + (features if b < B else 0)
    backward = 2 * features + 2 * features + (2 * item * b * D if item < wide else 0)
    return max(finish, scatter, backward) + 16 * B + 44 * b


def _rival_bytes(b: int, B: int, D: int, kind: str, dtype: str, autocast: bool) -> int:
    """The published forms, which a trace of each loss confirms."""
    if kind == "clip":
        return 16 * B * B + 12 * B * D
    if autocast or ITEMSIZE[dtype] < 4:
        return 16 * b * B + 12 * B * D + 4 * b * D
    return 16 * b * B + 8 * B * D + 8 * b * D
