"""How the losses cut their logits into tiles, and the bytes they take: closed forms, without torch.

The losses ask this module for their tiles and the planner asks it for their memory, so the two cannot drift apart.
Shapes throughout: b pairs on this rank, B on all ranks, D the width of the features.
"""

from __future__ import annotations

# Logits kept for the second pass instead of computed again (3 matrix products instead of 4), if they stay below this.
KEEP_BUDGET_BYTES = 256 * 2**20
# A tile on CPU: large enough that its matrix products, and not the calls around them, take the time.
CPU_TILE_ROWS = 2048
CPU_TILE_ELEMENTS = 2**20
# Tiles side by side whose products are summed apart from the rest.
COLUMN_STEPS_APART = 16
# Rows that are worked on in float64 at a time.
PIECE_ROWS = 256
# On an accelerator a tile has all rows of the rank; its columns are what fits these bytes.
CUDA_TILE_BYTES = 64 * 2**20

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
KINDS = ("one_block", "sigmoid", "disco", "open_clip", "clip")


def default_tile(b: int, B: int, device: str = "cuda") -> int:
    """Columns of a tile of logits where the caller names none; b is the largest number of rows on any rank."""
    if device == "cpu":
        return max(1, min(B, CPU_TILE_ELEMENTS // min(max(b, 256), CPU_TILE_ROWS)))
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
    keep_logits: bool | str | None = "auto",
    kind: str = "one_block",
    device: str = "cuda",
    autocast: bool = False,
) -> int:
    """Peak bytes that a loss holds on one rank above its inputs, through forward and backward.

    Counted is every tensor the loss makes, from the gathered features to the gradients it hands back; not the features
    themselves, nor buffers that a library allocates out of sight (NCCL, gloo, a BLAS workspace), nor the rounding of an
    allocator. Ranks are taken to have b rows each.

    Args:
        b: pairs on this rank.
        B: pairs on all ranks.
        D: width of the features.
        tile: columns of a tile; None as the loss picks it.
        dtype: of the features.
        keep_logits: as in the loss; of "one_block" only.
        kind: "one_block", "sigmoid", or a peer: "disco" (the official recipe), "open_clip" (``local_loss`` with
            ``gather_with_grad``), "clip" (the original).
        device: "cuda" or "cpu", which differ in tiles and in how 16-bit features are multiplied.
        autocast: whether a peer runs its matrix products in 16 bits from float32 features; ours does not care.

    Raises:
        ValueError: an unknown kind or dtype.
    """
    if kind not in KINDS or dtype not in ITEMSIZE:
        raise ValueError(
            f"loss_bytes knows the kinds {KINDS} and the dtypes {tuple(ITEMSIZE)}, not {kind!r}, {dtype!r}"
        )
    if kind in ("disco", "open_clip", "clip"):
        return _peer_bytes(b, B, D, kind, dtype, autocast)
    if keep_logits == "auto":
        keep_logits = keeps_logits(b, B, max(4, ITEMSIZE[dtype]))
    tile = min(B, tile or default_tile(b, B, device))
    return _tiled_bytes(b, B, D, tile, ITEMSIZE[dtype], bool(keep_logits) and kind == "one_block", kind, device)


def _tiled_bytes(b: int, B: int, D: int, tile: int, item: int, keep: bool, kind: str, device: str) -> int:
    wide = max(4, item)  # bytes of what is computed with
    cast = item < wide
    native = cast and device == "cuda"
    rows = tile_rows(b, device)
    one_tile = wide * rows * tile
    steps = -(-B // tile), -(-b // rows)
    features, gathered = wide * b * D, wide * B * D
    # Alive through both passes: gathered features, own ones where they had to be cast; then the logits of either pass.
    base = item * B * D + (features if cast and not native else 0)
    logits = wide * b * B if keep else one_tile
    products = gathered + (2 if steps[0] > COLUMN_STEPS_APART else 1) * features
    # One tile's columns where they have to be cast; of the last tile, they are still there after the loop.
    columns, last_columns = (wide * D * n if cast and not native else 0 for n in (tile, B - (steps[0] - 1) * tile))
    product = one_tile if device == "cpu" and wide == 4 else 0  # oneDNN's product of a tile, before it is scaled
    piece = min(b, PIECE_ROWS) * D
    second = base + logits + one_tile + products + columns + (0 if keep else product)
    if kind == "sigmoid":
        first = 0
        second = max(second, base + last_columns + products + piece * (2 * wide if cast else wide)) + 40 * b
    else:
        entries = 0 if native else (24 + wide) * (b + B)
        measured, added = _one_block_bytes(b, B, D, steps, item, entries)
        first = base + logits + max(columns + product + 60 * b, last_columns + measured)
        second = max(second, base + logits + one_tile + products + last_columns + added)
        second += entries + 24 * B + 100 * b
    if native:
        second += item * rows * tile + max(wide * tile * D, features)
    if b == B:
        exchange = gathered + features
    elif device == "cuda":
        exchange = gathered + 2 * features
    else:
        exchange = 2 * gathered + 2 * features  # gloo: received from all, then summed
    backward = 2 * features + 2 * item * b * D + (features if cast else 0)
    return max(first, second, exchange, backward)


def _one_block_bytes(b: int, B: int, D: int, steps: tuple[int, int], item: int, entries: int) -> tuple[int, int]:
    """What the one block takes after the last tile of its first pass, and of its second beside ``entries``.

    These are the hardest negatives, of which each row and column has one; 16-bit products do without.
    """
    wide, n = max(4, item), b + B
    partial_sums = 8 * (b * steps[0] + B * steps[1])
    joined = 2 * partial_sums + 60 * b
    if not entries:
        return joined, 0
    pairs = min(n, PIECE_ROWS) * D
    measured = partial_sums + entries + 40 * n + pairs * (2 * wide + (8 if item == 8 else 16))
    added = max(25 * n, 8 * n + pairs * (wide if item == wide else wide + item))
    return max(joined, measured), added


def _peer_bytes(b: int, B: int, D: int, kind: str, dtype: str, autocast: bool) -> int:
    """The published forms, which a trace of each loss confirms."""
    if kind == "clip":
        return 16 * B * B + 12 * B * D
    if autocast or ITEMSIZE[dtype] < 4:
        return 16 * b * B + 12 * B * D + 4 * b * D
    return 16 * b * B + 8 * B * D + 8 * b * D
