"""``disco-data show``: a picture of what the model will see."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from disco_ds.cli.data.options import EPILOG, Reading, add_shards, positive, reading
from disco_ds.cli.parser import Parser
from disco_ds.data.decode import Decoder, Pair
from disco_ds.data.faults import Tally
from disco_ds.data.lanes import Lane, Slices
from disco_ds.data.tools.preparation import Preparation, prepare
from disco_ds.data.tools.sheet import TEXT_PX, Tile, contact_sheet, lacking, load_font
from disco_ds.errors import ConfigError, DataError

log = logging.getLogger("disco_ds.data")

AHEAD = 4
"""Samples read for each one that is shown, so that neighbours in a shard do not stand together."""


def add(commands: Any) -> None:
    """Add the command to ``disco-data``."""
    parser: Parser = commands.add_parser(
        "show",
        help="draw some images as the model gets them, with captions and token counts",
        description="Draw a contact sheet: images from all over the shards after the model's transform, at\n"
        "its resolution, with captions beneath, the number of their tokens, and keys.",
        epilog="examples:\ndisco-data show '/data/{00000..00099}.tar' --model ViT-B-32 --out sheet.png\n"
        "disco-data show --run runs/clip/config.yaml --evaluation --count 36 --out sheet.png\n\n" + EPILOG,
    )
    add_shards(parser, workers=False)
    add = parser.add_argument
    out = "picture to write; its ending decides the format (.png, .jpg, …)"
    add("--out", metavar="FILE", type=Path, required=True, help=out)
    add("--count", type=positive, default=16, metavar="N", help="images (default: %(default)s)")
    add("--evaluation", action="store_true", help="the transform of evaluation, and the run's held-out data")
    add("--seed", type=int, default=0, metavar="N", help="which samples, and their augmentation (default: %(default)s)")
    add("--font", metavar="FILE", type=Path, help="font for captions in other letters than Latin ones")
    parser.set_defaults(run_command=run)


def run(arguments: argparse.Namespace) -> int:
    """Draw the sheet."""
    read = reading(arguments)
    if not read.has_model:
        raise ConfigError("name the model whose transform and tokenizer are used: --model NAME or --run FILE")
    if arguments.font is not None and not arguments.font.is_file():
        raise ConfigError(f"--font {arguments.font}: there is no such file; expected a .ttf, .otf or .ttc file")
    prepared = prepare(read.run, training=not arguments.evaluation)
    tally = Tally()
    pairs = pick(read, prepared, arguments.count, arguments.seed, tally, arguments.evaluation)
    tiles = [_tile(pair, prepared) for pair in pairs]
    font = str(arguments.font) if arguments.font else None
    try:
        missing = lacking("".join(tile.caption for tile in tiles), load_font(TEXT_PX, font))
    except OSError as error:
        raise ConfigError(
            f"--font {arguments.font}: not a font ({error}); expected a .ttf, .otf or .ttc file"
        ) from None
    try:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        contact_sheet(tiles, prepared.mean, prepared.std, font).save(arguments.out)
    except (OSError, ValueError) as error:
        raise DataError(f"--out {arguments.out} cannot be written: {error}") from error
    cut = sum(tile.tokens > prepared.context for tile in tiles)
    size = f"{tiles[0].image.shape[2]} x {tiles[0].image.shape[1]}"
    print(f"{arguments.out}: {len(tiles)} images of {size} pixels, {cut} captions cut to {prepared.context} tokens")
    for note in tally.notes:
        log.warning("left out: %s", note)
    if missing:
        some = " ".join(sorted(missing)[:8])
        hint = "give --font FILE, such as one of Debian's fonts-dejavu, fonts-noto-core or fonts-noto-cjk"
        log.warning("the font lacks %d of the characters (%s): they are boxes; %s", len(missing), some, hint)
    return 0


def _tile(pair: Pair, prepared: Preparation) -> Tile:
    tokens = prepared.count_tokens(pair.caption)
    return Tile(pair.image, pair.caption, pair.key, tokens, prepared.context)


def pick(
    read: Reading, prepared: Preparation, count: int, seed: int, tally: Tally, evaluation: bool = False
) -> Iterator[Pair]:
    """One sample from each of ``count`` places of the shards, in a seeded order; of the held-out ones for evaluation.

    Raises:
        DataError: there is no good sample.
    """
    slices = [Slices(read.val if evaluation and read.val else read.train, count, seed)]
    decoder = Decoder(read.run.data, prepared.transform)
    seen: set[str] = set()
    nothing: DataError | None = None
    for number in range(count):
        lane = Lane(number, slices, None, seed=seed, block_size=AHEAD, decoder=decoder, tally=tally)
        try:
            for _ in range(AHEAD):  # in small data lanes come to the same sample
                pair = lane.next()
                if pair.key not in seen:
                    seen.add(pair.key)
                    yield pair
                    break
        except DataError as error:  # fewer samples than places: this one has none
            nothing = error
        finally:
            lane.close()
    if not seen and nothing is not None:
        raise nothing
