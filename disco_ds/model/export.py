"""A run's model for others to load: a state dict or a folder under open_clip's names, as open_clip itself reads them.

Nothing is built on the way: weights are read from the checkpoint's files (:mod:`disco_ds.checkpoint.saved`), compared
with the model that open_clip makes of the configuration (on the meta device), and written under a temporary name first.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import open_clip
import torch
from open_clip.transform import PreprocessCfg, merge_preprocess_dict
from safetensors.torch import save_file
from torch import Tensor

from disco_ds.checkpoint.saved import SavedModel
from disco_ds.config.schema import ModelConfig
from disco_ds.errors import CheckpointError, ConfigError
from disco_ds.files import replace_text, replacing
from disco_ds.model.architecture import OPEN_CLIP_CONFIG, open_clip_config, registered_name
from disco_ds.model.build import create_clip
from disco_ds.model.preprocess import build_tokenizer
from disco_ds.model.pretrained import DESCRIPTION, known_preprocess
from disco_ds.run_layout import CHECKPOINTS, EXPORT

Form = Literal["open_clip", "safetensors", "hf"]
ENDINGS: dict[Form, str] = {"open_clip": ".pt", "safetensors": ".safetensors", "hf": "-hf"}
WEIGHTS = "open_clip_model.safetensors"
"""The weights in a folder that open_clip loads as ``local-dir:`` or from a hub."""


@dataclass
class Exported:
    """What has been written."""

    path: Path
    bytes: int
    """Size of the weights."""
    usage: list[str]
    """Python lines that load it."""
    notes: list[str] = field(default_factory=list)
    """What the user should know, a sentence each."""


def default_path(saved: SavedModel, form: Form) -> Path:
    """``export/NAME-step-…`` in the run's folder, or beside a checkpoint that lies alone."""
    folder = saved.path.absolute().parent
    run = folder.parent if folder.name == CHECKPOINTS else folder
    return run / EXPORT / f"{run.name}-{saved.path.name}{ENDINGS[form]}"


def export(
    saved: SavedModel, form: Form, out: Path | None = None, *, precision: str = "fp32", force: bool = False
) -> Exported:
    """Write the model of a checkpoint.

    Args:
        saved: the checkpoint.
        form: "open_clip" (.pt) or "safetensors": a state dict; "hf": a folder with weights, configuration and
            preprocessing.
        out: the file or folder; its parents are made.
        precision: "fp32" or "bf16". Temperatures and buffers (batch norm's statistics) stay as they are in bf16 too:
            rounded to bf16, a logit_scale of ln 100 would multiply by 98.9.
        force: replace what is there.

    Raises:
        ConfigError: the file exists, cannot be written, or ``out`` does not go with ``form``.
        CheckpointError: the weights are not those of the model as open_clip builds it.
    """
    out = default_path(saved, form) if out is None else out
    _check_target(out, form, force)
    content = open_clip_config(saved.model)
    beside = None if form == "hf" or _known_to_open_clip(saved.model) else out.with_suffix(".json")
    if beside is not None and beside.exists() and not force and not _holds(beside, content):
        raise ConfigError(
            f"{beside} exists and describes another model; open_clip would load it with the new weights. Choose "
            "another --out, or --force to replace it"
        )
    size = content["vision_cfg"].get("image_size", 224)
    preprocess = {**merge_preprocess_dict(PreprocessCfg(), known_preprocess(saved.model)), "size": size}
    weights = _checked_weights(saved, precision)
    description = {
        "model_cfg": content, "preprocess_cfg": preprocess, "name": saved.model.name, "step": saved.step,
        "samples_seen": saved.manifest["state"]["samples_seen"],
    }  # fmt: skip
    notes: list[str] = []
    try:
        with replacing(out, sync=True) as unfinished:
            if form == "hf":
                notes += _write_folder(unfinished, weights, description, saved.model)
            else:
                _write_file(unfinished, form, weights, description)
        if beside is not None:
            replace_text(beside, _json_text(content), sync=True)
    except (OSError, RuntimeError) as error:  # torch's zip writer turns a failed write into a RuntimeError
        raise ConfigError(f"--out {out} could not be written: {error}") from error
    if form == "hf":
        return Exported(out, (out / WEIGHTS).stat().st_size, [_loading(f"local-dir:{out}", None)], notes)
    usage = [_loading(saved.model.name.replace("/", "-"), out)]
    if beside is not None:
        usage = [f"open_clip.add_model_config({str(beside)!r})", _loading(beside.stem, out)]
    if _as_json(preprocess) != _as_json(merge_preprocess_dict(PreprocessCfg(), {"size": size})):
        notes.append(f"the model's images are prepared with {json.dumps(preprocess)}; --to hf keeps that, a file not")
    return Exported(out, out.stat().st_size, usage, notes)


def _check_target(out: Path, form: Form, force: bool) -> None:
    if form != "hf" and out.suffix != ENDINGS[form]:
        # open_clip goes by the ending: it would try to unpickle a safetensors file of another name
        raise ConfigError(f"--out {out}: expected a name that ends in {ENDINGS[form]}")
    if not out.exists():
        return
    if not force:
        raise ConfigError(f"--out {out} exists; name another, or say --force to replace it")
    if out.is_dir() != (form == "hf"):
        raise ConfigError(f"--out {out} is a {'folder' if out.is_dir() else 'file'} and is not replaced by the other")
    if out.is_dir() and any(out.iterdir()) and not (out / OPEN_CLIP_CONFIG).is_file():
        raise ConfigError(f"--out {out} holds other things than an exported model; it is not replaced")


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _checked_weights(saved: SavedModel, precision: str) -> dict[str, Tensor]:
    """The weights, if open_clip can load them strictly into the model of this configuration and all are finite."""
    weights = saved.weights()
    model = create_clip(registered_name(saved.model), device="meta", resize_trunk=False)
    expected = model.state_dict()
    wrong = [
        f"{name}: {_shape(weights.get(name))} saved, {_shape(expected.get(name))} in open_clip's model"
        for name in {**expected, **weights}
        if _shape(weights.get(name)) != _shape(expected.get(name))
    ]
    if wrong:
        raise CheckpointError(
            f"{saved.path}: {len(wrong)} weights are not those of {saved.model.name} as open_clip builds it; {wrong[0]}"
        )
    for name, value in weights.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise CheckpointError(
                f"{saved.path}: {name} holds NaN or infinity; export an earlier one with --checkpoint"
            )
    if precision == "fp32":
        return weights
    rounded = {name for name, _ in model.named_parameters()} - {"logit_scale", "logit_bias"}
    return {name: value.bfloat16() if name in rounded else value for name, value in weights.items()}


def _shape(value: Tensor | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value.shape)


def _write_file(path: Path, form: Form, weights: dict[str, Tensor], description: dict[str, Any]) -> None:
    told = json.dumps(description)
    if form == "safetensors":
        save_file({k: v.contiguous() for k, v in weights.items()}, path, {"format": "pt", DESCRIPTION: told})
        return
    state = OrderedDict(weights)
    setattr(state, DESCRIPTION, told)  # as torch keeps its own _metadata: pickled along, and no tensor among the others
    with path.open("wb") as file:
        torch.save(state, file)


def _write_folder(
    folder: Path, weights: dict[str, Tensor], description: dict[str, Any], model: ModelConfig
) -> list[str]:
    folder.mkdir()
    _write_file(folder / WEIGHTS, "safetensors", weights, description)
    config = {"model_cfg": description["model_cfg"], "preprocess_cfg": description["preprocess_cfg"]}
    (folder / OPEN_CLIP_CONFIG).write_text(_json_text(config), encoding="utf-8")
    name = description["model_cfg"]["text_cfg"].get("hf_tokenizer_name")
    try:  # open_clip looks for these files in the folder itself
        if name:
            build_tokenizer(model).save_pretrained(str(folder))  # type: ignore[attr-defined]
    except (ConfigError, AttributeError) as error:
        return [f"the tokenizer {name} is not in the folder, open_clip will miss it: {error}"]
    return []


def _json_text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


def _known_to_open_clip(model: ModelConfig) -> bool:
    """Whether it is one of open_clip's own, so that its name is enough to load a file."""
    shipped = Path(open_clip.__file__).parent / "model_configs" / f"{model.name.replace('/', '-')}.json"
    return model.config is None and model.image_size is None and model.context_length is None and shipped.is_file()


def _holds(path: Path, content: dict[str, Any]) -> bool:
    """Whether a JSON file says the same, from an export of the same model in another form."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) == _as_json(content)
    except (OSError, ValueError):
        return False


def _loading(name: str, weights: Path | None) -> str:
    extra = f", pretrained={str(weights)!r}" if weights is not None else ""
    return f"open_clip.create_model_and_transforms({name!r}{extra})"
