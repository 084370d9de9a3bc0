"""A model to evaluate, by whatever names it: a run, a checkpoint, an exported file or folder, an open_clip model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import open_clip
from torch import Tensor

from disco_ds.checkpoint.folder import find_all
from disco_ds.checkpoint.saved import find_saved
from disco_ds.config.schema import ModelConfig
from disco_ds.errors import ConfigError, nearest
from disco_ds.model.architecture import HUB, LOCAL, OPEN_CLIP_CONFIG
from disco_ds.model.build import build_model
from disco_ds.model.preprocess import build_tokenizer
from disco_ds.model.pretrained import Source, describe_file, source_of_run
from disco_ds.model.towers import TwoTowers
from disco_ds.run_layout import CONFIG, run_of


@dataclass(frozen=True)
class Chosen:
    """A model that has been found and not yet been built."""

    label: str
    config: ModelConfig
    source: Source | None = None
    """Its weights, where ``config.pretrained`` does not name them."""
    run_file: Path | None = None
    """The config.yaml of the run that it is from."""

    def build(self) -> tuple[TwoTowers, Callable[[list[str]], Tensor]]:
        """The model on the CPU in fp32, and its tokenizer.

        Raises:
            ConfigError: weights cannot be had or do not fit, the tokenizer cannot be had.
        """
        tokenizer = build_tokenizer(self.config)
        return build_model(self.config, 0, source=self.source).eval(), tokenizer


def choose(
    what: str, *, pretrained: str | None = None, model: str | None = None, checkpoint: str | None = None
) -> Chosen:
    """The model that ``what`` names.

    Args:
        what: a run's folder, a checkpoint, a folder or a file that was exported, or an open_clip name.
        pretrained: with an open_clip name: a tag or a file of weights.
        model: with a file that does not say which model it holds: its open_clip name or JSON.
        checkpoint: with a run's folder: the checkpoint to take; None: the newest that verifies.

    Raises:
        ConfigError: nothing of that name, or options that do not go with it.
        CheckpointError: no checkpoint that verifies.
    """
    path = Path(what).expanduser()
    run = bool(find_all(path))
    named = not path.exists() or path.suffix == ".json"
    for option, value, fits, place in (
        ("--checkpoint", checkpoint, run, "a run's folder"),
        ("--pretrained", pretrained, named, "an open_clip name"),
        ("--model", model, path.is_file() and not named, "a file of weights"),
    ):
        if value is not None and not fits:
            raise ConfigError(f"{option} {value}: goes with {place}, and {what} is none")
    if run:
        saved = find_saved(path, checkpoint)
        run_file = run_of(saved.path) / CONFIG if saved.run else None
        return Chosen(str(saved.path), saved.model, source_of_run(saved), run_file)
    if path.is_dir():
        if not (path / OPEN_CLIP_CONFIG).is_file():
            raise ConfigError(f"{what}: holds neither checkpoints nor {OPEN_CLIP_CONFIG}; give a run, or an export")
        return Chosen(what, ModelConfig(name=f"{LOCAL}{path}"))
    if path.is_file() and not named:
        content = None if model else describe_file(path).get("model_cfg")
        if not model and content is None:
            raise ConfigError(f"{path} does not say which model it holds; give its open_clip name or JSON with --model")
        return Chosen(str(path), ModelConfig(name=model or path.stem, config=content, pretrained=str(path)))
    if what.startswith((LOCAL, HUB)):
        return Chosen(what, ModelConfig(name=what))
    if pretrained is not None:
        return Chosen(f"{what}, {pretrained}", ModelConfig(name=what, pretrained=pretrained))
    name, known = what.replace("/", "-"), open_clip.list_models()
    if name not in known and not what.endswith(".json"):
        raise ConfigError(f"{what!r} is no run, no file and no model that open_clip knows.{nearest(what, known)}")
    tags = ", ".join(open_clip.list_pretrained_tags_by_model(name)) or "none"
    raise ConfigError(f"{what}: say which weights, with --pretrained TAG|FILE; open_clip's tags for it: {tags}")
