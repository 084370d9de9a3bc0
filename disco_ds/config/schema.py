"""What a run is: one pydantic model, its defaults, and what each field means.

A run is described by a YAML or JSON file (``--config run.yaml``), by dotted flags (``--model.name ViT-B-32``), or by
both, flags last. Name, type, default and docstring of a field are its flag, its ``--help`` text and its row in
docs/options.md. What DeepSpeed itself decides (ZeRO stage, buckets, offload) stays in the ds_config.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from PIL import ImageColor
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    Json,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)

MAX_LOGIT_SCALE = math.log(100.0)
"""Upper clamp of logit_scale (Radford et al. 2021, section 2.5): the softmax temperature never falls below 0.01."""
Average = Annotated[float, Field(ge=0, lt=1)]
"""What an exponential moving average keeps of its last value."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False)
    former_options: ClassVar[tuple[str, ...]] = ()
    """Options of earlier releases that decide nothing any more: their run files hold them."""

    @model_validator(mode="before")
    @classmethod
    def _drop_former_options(cls, values: Any) -> Any:
        return {k: v for k, v in values.items() if k not in cls.former_options} if isinstance(values, dict) else values


class LaunchConfig(_Section):
    """What is said on the command line alone, not in a run file."""

    config: Path | None = None
    """Run file, YAML or JSON, with the options below; flags win over it. Neither this nor data.train: the demo."""
    ds_config: str = "zero2"
    """DeepSpeed's config: a JSON file, or a shipped one by name: zero0, zero1, zero2, zero3, zero2_offload, …"""
    plan: Literal["auto"] | None = None
    """auto: the planner fills what is left open, for the device that it finds."""


class ModelConfig(_Section):
    """The two towers."""

    name: str = "ViT-B-32"
    """An open_clip model name (open_clip.list_models()), "demo" (shipped here), or a path to an open_clip JSON."""
    config: dict[str, Any] | Json[dict[str, Any]] | None = None
    """The model itself, as the content of an open_clip JSON (embed_dim, vision_cfg, text_cfg); name is then a label."""
    pretrained: str | None = None
    """Initial weights: an open_clip tag, .pt or .safetensors file, local-dir: or hf-hub: folder, or a run's folder."""
    image_size: PositiveInt | None = None
    """Pixels a side, where it is not the model's own; positional embeddings of pretrained weights are interpolated."""
    context_length: PositiveInt | None = None
    """Tokens a caption, where it is not the model's own; positional embeddings are interpolated likewise."""
    freeze: Literal["none", "image", "text"] = "none"
    """Tower that is not trained; "image" is LiT (arXiv 2111.07991)."""
    checkpointing: str = Field("none", pattern=r"^(none|full|every:[1-9]\d*|ops|offload)$")
    """Activations: none, full, every:K (recompute all or every K-th block), ops (keep products), offload (to host)."""
    patch_dropout: float | None = Field(None, ge=0, lt=1)
    """Fraction of image patches dropped in training (FLIP, arXiv 2212.00794). null: as the model's config says."""


class DataConfig(_Section):
    """Where the pairs come from and how they are read."""

    former_options = ("index",)
    train: str | list[str] = Field(min_length=1)
    """Training shards: "demo", tar path or URL, brace list "/data/{000..099}.tar", glob, folder, .txt list; or some."""
    weights: list[float] | None = None
    """Share of each entry of train in the stream. null: all shards are one list, each sample equally often."""
    val: str | list[str] | None = None
    """Held-out shards, in the same forms. null: no evaluation."""
    image_key: str = "jpg;jpeg;png;webp"
    """Extensions that hold the image, first match wins, any case; separated by ";"."""
    caption_key: str = "txt"
    """Extension that holds the caption; "json:KEY" reads KEY from the sample's .json (a text or a list of them)."""
    workers: NonNegativeInt = 4
    """Loader processes per rank. The order of samples does not depend on it."""
    shuffle: PositiveInt = 8192
    """Samples held in memory for shuffling, over all ranks (encoded: about 50 KB each for 256-pixel JPEGs)."""
    lanes: PositiveInt | None = None
    """Read positions in the stream; a multiple of every number of GPUs to be used. null: from global_batch."""
    augment: Literal["crop", "resize"] = "crop"
    """Training transform: open_clip's random resized "crop" (scale 0.9 to 1), or "resize" as in evaluation."""
    max_bad_fraction: float = Field(0.5, ge=0, le=1)
    """The run stops when more than this share of the samples read is bad (from 1,000 samples a rank on)."""
    max_pixels: PositiveInt = Field(89_478_485, le=178_956_970)
    """Images with more pixels are dropped before they are decoded (decompression bombs); Pillow's limit is the most."""
    min_image_size: NonNegativeInt = 0
    """Images whose shorter side has fewer pixels are dropped (tiny_image). 0: none."""
    max_aspect: float | None = Field(None, ge=1)
    """Images whose longer side is more than this many times the shorter are dropped (extreme_aspect). null: none."""
    clean_captions: bool = False
    """Unescape HTML entities in captions, and take out control characters and runs of white space."""
    background: str = "white"
    """Colour behind transparent images: a name or "#rrggbb", as Pillow reads it."""
    draft: bool = False
    """Decode JPEGs that are twice the model's resolution or more at 1/2, 1/4 or 1/8 size: faster, other pixels."""
    retries: NonNegativeInt = 3
    """Attempts after a URL or command failed, in a row without a new sample; a local file is never tried again."""
    retry_s: NonNegativeFloat = 1.0
    """Seconds before the first further attempt, give or take half; doubled for each one after it."""

    @model_validator(mode="after")
    def _weights_match(self) -> DataConfig:
        sources = 1 if isinstance(self.train, str) else len(self.train)
        if self.weights is not None and len(self.weights) != sources:
            raise ValueError(f"data.weights has {len(self.weights)} entries for {sources} in data.train; give one each")
        if self.weights is not None and (min(self.weights) < 0 or sum(self.weights) <= 0):
            raise ValueError("data.weights must be non-negative with a positive sum")
        return self

    @field_validator("background")
    @classmethod
    def _is_a_colour(cls, value: str) -> str:
        try:
            ImageColor.getrgb(value)
        except ValueError as error:
            raise ValueError(f'{error}; give a name such as "white" or a code such as "#ffffff"') from None
        return value


class LossConfig(_Section):
    """The contrastive loss. It is exact: the gradient is that of the whole global batch."""

    former_options = ("overlap",)
    kind: Literal["one_block", "sigmoid"] = "one_block"
    """"one_block": CLIP's softmax, one block of logits a rank. "sigmoid": SigLIP's, for models with a bias."""
    tile: PositiveInt | None = None
    """Columns of logits computed at a time. null: chosen by size."""
    keep_logits: bool | Literal["auto"] = "auto"
    """Keep the rank's block of logits for the second pass (faster) or recompute it (smaller). one_block only."""

    @model_validator(mode="after")
    def _options_of_the_kind(self) -> LossConfig:
        if self.keep_logits != "auto" and self.kind != "one_block":
            raise ValueError(f"loss.keep_logits: the loss {self.kind!r} has no such choice; leave it out")
        return self

    def options(self) -> dict[str, Any]:
        """What :func:`disco_ds.build_loss` takes for this kind."""
        return {"tile": self.tile, **({"keep_logits": self.keep_logits} if self.kind == "one_block" else {})}


class CachedConfig(_Section):
    """The cached form of a step, which is used when the per-GPU batch is more than one micro-batch."""

    images: Literal["host", "device"] = "host"
    """Where the images of a step wait between the two forwards of their micro-batch."""
    reduce: Literal["once", "each"] = "once"
    """Reduce gradients once a step, holding whole local gradients meanwhile, or after each micro-batch (smaller)."""
    reuse_last: bool = False
    """Keep the last micro-batch's graph from the first pass: saves a forward, holds its activations during the loss."""


class OptimizerConfig(_Section):
    """The optimizer. Weight decay leaves out gains, biases and logit_scale."""

    name: Literal["adamw", "lion"] = "adamw"
    """From torch, timm or, offloaded, DeepSpeed."""
    lr: float = Field(5e-4, gt=0)
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.2
    """Decoupled weight decay."""
    betas: tuple[Average, Average] = (0.9, 0.98)
    """Adam's averaging coefficients, each from 0 to below 1."""
    eps: float = Field(1e-6, gt=0, le=1)
    """Adam's denominator floor."""
    clip_norm: NonNegativeFloat = 1.0
    """The global gradient norm is clipped to this. 0: no clipping."""
    layer_decay: float = Field(1.0, gt=0, le=1)
    """Learning rate of a block = lr x this to the power of the blocks behind it (fine-tuning). 1: the same for all."""
    max_skipped: PositiveInt = 10
    """Steps in a row that may be skipped for a loss or gradient that is not finite; one more ends the run."""

    @model_validator(mode="after")
    def _decay_shrinks(self) -> OptimizerConfig:
        share = self.lr * self.weight_decay
        if share >= 1:
            raise ValueError(
                f"optimizer.weight_decay {self.weight_decay:g} x optimizer.lr {self.lr:g} is the share of each weight "
                f"that a step takes away: expected less than 1, found {share:g}"
            )
        return self


class ScheduleConfig(_Section):
    """The learning rate over the run."""

    kind: Literal["cosine", "constant", "cooldown"] = "cosine"
    """After warm-up: "cosine" to lr_end, "constant", or constant with a linear "cooldown" to lr_end at the end."""
    warmup_steps: NonNegativeInt | None = None
    """Linear warm-up in steps. Neither this nor warmup_samples: a tenth of the run, at most 2,000 steps."""
    warmup_samples: NonNegativeInt | None = None
    """Linear warm-up in samples, rounded up to whole steps."""
    cooldown_steps: NonNegativeInt | None = None
    """Length of the cooldown in steps (kind cooldown). Neither this nor cooldown_samples: a fifth of the run."""
    cooldown_samples: NonNegativeInt | None = None
    """Length of the cooldown in samples, rounded up to whole steps."""
    lr_end: NonNegativeFloat = 0.0
    """Learning rate at the end of the run."""

    @model_validator(mode="after")
    def _one_unit(self) -> ScheduleConfig:
        for what in ("warmup", "cooldown"):
            if None not in (getattr(self, f"{what}_steps"), getattr(self, f"{what}_samples")):
                raise ValueError(f"schedule.{what}_steps and schedule.{what}_samples are both given; give one")
        return self


class CheckpointConfig(_Section):
    """When the run saves itself. It also saves at its end, at SIGUSR1, and at SIGTERM, which ends it."""

    every_steps: PositiveInt | None = None
    """Save every so many steps."""
    every_minutes: float | None = Field(30.0, gt=0)
    """Save when so many minutes have passed since the last save."""
    keep: PositiveInt = 3
    """Checkpoints kept, newest first; older ones of this run are deleted after a new one is complete."""
    keep_every_steps: PositiveInt | None = None
    """Also keep, for good, the checkpoints whose step is a multiple of this."""


class EvaluationConfig(_Section):
    """What is measured on data.val, during the run and at its end."""

    every_steps: PositiveInt | None = None
    """Evaluate every so many steps. null: at the end only."""
    classes: list[str] | Path | None = None
    """Class names for zero-shot accuracy: a list, a text file with one a line, or "imagenet". Samples' are in .cls."""
    templates: list[str] | Path = ["a photo of a {}."]
    """Prompts with {} for the class, averaged: one, a list, a file with one a line, "openai" (80) or "simple" (7)."""
    batch: PositiveInt = 256
    """Samples a rank encodes at a time."""

    @field_validator("templates", mode="before")
    @classmethod
    def _one_template(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) and "{}" in value else value


class LoggingConfig(_Section):
    """What a person sees while it runs."""

    every_steps: PositiveInt = 10
    """A console line and a metrics.jsonl object every so many steps."""
    tensorboard: bool = False
    """Also write TensorBoard events into the run's folder (extra: tensorboard)."""
    wandb: str | None = None
    """Also log to this Weights & Biases project (extra: wandb; WANDB_MODE=offline works)."""
    profile_steps: NonNegativeInt = Field(0, json_schema_extra={"flag": "--profile", "without_value": "3"})
    """Profile so many steps after the first few: a torch trace a rank, on GPUs a memory snapshot too. --profile: 3."""


class RunConfig(_Section):
    """One training run. Sizes count samples (image-text pairs) unless a name says otherwise."""

    name: str = Field("clip", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run; its folder is runs_dir/name."""
    runs_dir: Path = Path("runs")
    """Folder that holds the runs."""
    seed: NonNegativeInt = 0
    """Seed of initial weights, order of samples, augmentation and dropout."""
    steps: PositiveInt | None = None
    """Length of the run in optimizer steps. Give this or samples."""
    samples: PositiveInt | None = None
    """Length of the run in samples seen, rounded up to whole steps."""
    global_batch: PositiveInt | None = None
    """Pairs per optimizer step over all GPUs, all of them negatives of each other. Fills train_batch_size."""
    micro_batch: PositiveInt | None = None
    """Pairs per forward on one GPU. Fills train_micro_batch_size_per_gpu. null: global_batch / GPUs."""
    precision: Literal["auto", "bf16", "amp", "fp32"] = "auto"
    """bf16: weights in bf16, fp32 masters. amp: fp32 weights, bf16 autocast. auto: bf16 on GPUs, fp32 on CPU."""
    timeout_minutes: float = Field(30.0, gt=0)
    """The run ends, naming the rank, when a rank has died or finished no step for so long."""
    resume: Literal["auto", "never"] | Path = "auto"
    """auto: go on from the run's newest checkpoint, if any. never: refuse to start where there is one. Or a path."""
    model: ModelConfig = ModelConfig()
    data: DataConfig
    loss: LossConfig = LossConfig()
    cached: CachedConfig = CachedConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _one_length(self) -> RunConfig:
        if (self.steps is None) == (self.samples is None):
            found = "neither is" if self.steps is None else f"both are (steps={self.steps}, samples={self.samples})"
            raise ValueError(f"give the length of the run as steps or as samples: {found} given")
        return self

    def to_yaml(self) -> str:
        """The resolved configuration as YAML, every field in it; ``--config`` reads it back unchanged."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
