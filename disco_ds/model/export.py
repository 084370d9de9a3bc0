"""A run's model for others to load: a state dict or a folder under open_clip's names, as open_clip itself reads them.

Nothing is built on the way: weights are read from the checkpoint's files (:mod:`disco_ds.checkpoint.saved`), compared
with the model that open_clip makes of the configuration (on the meta device), and written under a temporary name first.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import open_clip
import torch
from open_clip.transform import PreprocessCfg, merge_preprocess_dict
from torch import Tensor

from disco_ds.checkpoint.saved import SavedModel
from disco_ds.config.schema import ModelConfig
from disco_ds.errors import CheckpointError, ConfigError
from disco_ds.model.build import build_tokenizer, open_clip_config, registered_name
from disco_ds.model.pretrained import DESCRIPTION, OPEN_CLIP_CONFIG, known_preprocess

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
    run = folder.parent if folder.name == "checkpoints" else folder
    return run / "export" / f"{run.name}-{saved.path.name}{ENDINGS[form]}"


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
    beside = None if form == "hf" else _beside(out, saved.model)
    if beside is not None and not force:
        _check_beside(beside, content)
    preprocess = _preprocess(saved.model, content)
    weights = saved.weights()
    _check_weights(saved, weights)
    if precision == "bf16":
        weights = _in_bf16(saved, weights)
    description = {
        "model_cfg": content,
        "preprocess_cfg": preprocess,
        "name": saved.model.name,
        "step": saved.step,
        "samples_seen": saved.manifest["state"]["samples_seen"],
    }
    notes: list[str] = []
    if form == "hf":
        _replace(out, lambda path: notes.extend(_write_folder(path, weights, description, saved.model)))
        size, usage = (out / WEIGHTS).stat().st_size, [_loading(f"local-dir:{out}", None)]
    else:
        _replace(out, lambda path: _write_file(path, form, weights, description))
        size, usage = out.stat().st_size, _usage(out, beside, saved.model, content)
        plain = merge_preprocess_dict(PreprocessCfg(), {"size": preprocess["size"]})
        if _as_json(preprocess) != _as_json(plain):
            notes.append(
                f"the model's images are prepared with {json.dumps(preprocess)}; --to hf keeps that, a file not"
            )
    return Exported(out, size, usage, notes)


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


def _preprocess(model: ModelConfig, content: dict[str, Any]) -> dict[str, Any]:
    """open_clip's preprocessing of the run, as in training."""
    size = content["vision_cfg"].get("image_size", 224)
    return {**merge_preprocess_dict(PreprocessCfg(), known_preprocess(model)), "size": size}


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _check_weights(saved: SavedModel, weights: dict[str, Tensor]) -> None:
    """Refuse weights that open_clip could not load strictly into the model of this configuration."""
    expected = _meta_model(saved.model).state_dict()
    wrong = [
        f"{name}: {_shape(weights.get(name))} saved, {_shape(expected.get(name))} in open_clip's model"
        for name in {**expected, **weights}
        if _shape(weights.get(name)) != _shape(expected.get(name))
    ]
    if wrong:
        raise CheckpointError(
            f"{saved.path}: {len(wrong)} weights are not those of {saved.model.name} as open_clip builds it; {wrong[0]}"
        )
    bad = [name for name, value in weights.items() if value.is_floating_point() and not bool(value.isfinite().all())]
    if bad:
        raise CheckpointError(f"{saved.path}: {bad[0]} holds NaN or infinity; export an earlier one with --checkpoint")


def _shape(value: Tensor | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value.shape)


def _meta_model(model: ModelConfig) -> Any:
    before = logging.root.level
    logging.root.setLevel(logging.ERROR)  # that it has no weights
    try:
        return open_clip.create_model(registered_name(model), device="meta", pretrained=None, pretrained_text=False)
    finally:
        logging.root.setLevel(before)


def _in_bf16(saved: SavedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    matrices = {name for name, _ in _meta_model(saved.model).named_parameters()} - {"logit_scale", "logit_bias"}
    return {name: value.bfloat16() if name in matrices else value for name, value in weights.items()}


def _write_file(path: Path, form: Form, weights: dict[str, Tensor], description: dict[str, Any]) -> None:
    told = json.dumps(description)
    if form == "safetensors":
        from safetensors.torch import save_file

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
    _write_json(folder / OPEN_CLIP_CONFIG, config)
    if not description["model_cfg"]["text_cfg"].get("hf_tokenizer_name"):
        return []
    try:  # open_clip looks for these files in the folder itself
        build_tokenizer(model).save_pretrained(str(folder))  # type: ignore[attr-defined]
    except (ConfigError, AttributeError) as error:
        name = description["model_cfg"]["text_cfg"]["hf_tokenizer_name"]
        return [f"the tokenizer {name} is not in the folder, open_clip will miss it: {error}"]
    return []


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(_json_text(content), encoding="utf-8")


def _json_text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


def _replace(out: Path, write: Callable[[Path], None]) -> None:
    """Write under a temporary name beside ``out``, flush, and rename; nothing is left behind when that fails."""
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write(unfinished)
        for path in filter(Path.is_file, [unfinished, *unfinished.rglob("*")]):
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        if out.is_dir():
            shutil.rmtree(out)
        os.replace(unfinished, out)
    except (OSError, RuntimeError) as error:  # torch's zip writer turns a failed write into a RuntimeError
        raise ConfigError(f"--out {out} could not be written: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True) if unfinished.is_dir() else unfinished.unlink(missing_ok=True)


def _beside(out: Path, model: ModelConfig) -> Path | None:
    """Where the JSON of a model goes that is none of open_clip's own."""
    name = model.name.replace("/", "-")
    own = model.config is None and model.image_size is None and model.context_length is None
    if own and (Path(open_clip.__file__).parent / "model_configs" / f"{name}.json").is_file():
        return None
    return out.with_suffix(".json")


def _check_beside(beside: Path, content: dict[str, Any]) -> None:
    """The JSON may be there already, from an export of the same model in another form."""
    if not beside.exists():
        return
    try:
        same = json.loads(beside.read_text(encoding="utf-8")) == _as_json(content)
    except (OSError, ValueError):
        same = False
    if not same:
        raise ConfigError(
            f"{beside} exists and describes another model; open_clip would load it with the new weights. Choose "
            "another --out, or --force to replace it"
        )


def _usage(out: Path, beside: Path | None, model: ModelConfig, content: dict[str, Any]) -> list[str]:
    """How open_clip loads the file, with the model's JSON beside it where it needs one."""
    if beside is None:
        return [_loading(model.name.replace("/", "-"), out)]
    if not beside.exists() or beside.read_text(encoding="utf-8") != _json_text(content):
        _replace(beside, lambda path: _write_json(path, content))
    return [f"open_clip.add_model_config({str(beside)!r})", _loading(beside.stem, out)]


def _loading(name: str, weights: Path | None) -> str:
    extra = f", pretrained={str(weights)!r}" if weights is not None else ""
    return f"open_clip.create_model_and_transforms({name!r}{extra})"
