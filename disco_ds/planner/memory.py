"""What one training step takes on one GPU: the terms, and which moment of the step is the highest. Without torch.

    peak = runtime + states + f * max over moments of (activations + features + loss)

A step has few moments that can be highest: a point of forward or backward (:class:`Point`, with the gradients that have
arrived by then), the loss on top of what forward left, the reduction of the last gradients, the gradient norm and the
optimizer. What DeepSpeed (0.19.8) holds at each was measured on real steps, storage by storage; ``docs/planner.md`` has
the table. Bytes everywhere; P parameters, N GPUs, q elements of a reduction bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from disco_ds.engine.buckets import Buckets
from disco_ds.loss.memory import loss_bytes
from disco_ds.planner.coefficients import OPTIMIZER_BYTES, Coefficients, Point, Trace, trace_key
from disco_ds.planner.from_ds_config import planned_buckets
from disco_ds.planner.partitions import Held, full_buckets, owned_gradients

GIB = 2**30
CATEGORIES = (
    "runtime", "parameters", "gradients", "optimizer", "buckets", "features", "loss", "activations", "fragmentation",
)  # fmt: skip
ALLREDUCE_ELEMENTS = 500_000_000
"""DeepSpeed's stage 0 flattens this many gradients at a time for the all-reduce."""


@dataclass(frozen=True)
class Setup:
    """How a model is trained: everything but the batch."""

    gpus: int
    zero: int = 2
    precision: str = "bf16"
    checkpointing: str = "none"
    loss: str = "one_block"
    attention: str = "flash"
    offload: str = "none"
    """"none", "optimizer" (masters and moments on the host) or "all" (stage 3: parameters too)."""
    optimizer: str = "adamw"
    tile: int | None = None
    keep_logits: bool | str = "auto"
    reuse_last: bool = False
    """Cached form: the last micro-batch's graph waits for its gradient while the loss is computed."""
    reduce_once: bool = True
    """Cached form: gradients are reduced after the last micro-batch only, and are whole on each rank until then."""
    images_on_device: bool | str = False
    """The whole batch lies on the device until backward is over: "cached" in the cached form only, between its two
    passes; True in trainers whose loop keeps a name for it."""
    device: str = "cuda"
    runtime_bytes: int = 0
    fragmentation: float = 1.0
    buckets: Buckets | None = None

    @property
    def trace_key(self) -> str:
        """Which of a model's traces this is."""
        return trace_key(self.precision, self.checkpointing, self.attention, self.device)

    @property
    def parameter_bytes(self) -> int:
        """One parameter's working copy."""
        return 2 if self.precision == "bf16" else 4


@dataclass
class Moment:
    """One moment of a step and the bytes of each category in it."""

    name: str
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        """All categories together."""
        return sum(self.bytes.values())


@dataclass
class Prediction:
    """The memory of one step."""

    setup: Setup
    per_gpu_batch: int
    micro_batch: int
    peak: Moment
    moments: dict[str, Moment] = field(default_factory=dict)
    """The highest of each kind: "forward and backward", "loss", "reduction", "gradient norm", "optimizer"."""

    @property
    def peak_bytes(self) -> int:
        """The highest total."""
        return self.peak.total

    @property
    def accumulation(self) -> int:
        """Micro-batches a step."""
        return self.per_gpu_batch // self.micro_batch

    @property
    def binding(self) -> str:
        """The largest category at the peak."""
        return max(self.peak.bytes, key=lambda name: self.peak.bytes[name])


def predict(model: Coefficients, setup: Setup, per_gpu_batch: int, micro_batch: int | None = None) -> Prediction:
    """The memory of a step with ``per_gpu_batch`` pairs on each GPU, cut into micro-batches (None: whole).

    Raises:
        ValueError: the batch does not divide by the micro-batch, or is not positive.
        KeyError: the model has no trace for this setup.
    """
    micro = per_gpu_batch if micro_batch is None else micro_batch
    if per_gpu_batch < 1 or micro < 1 or per_gpu_batch % micro:
        raise ValueError(f"a batch of {per_gpu_batch} cannot be cut into micro-batches of {micro}")
    step = _Step(model, setup, model.traces[setup.trace_key], per_gpu_batch, micro)
    highest: dict[str, Moment] = {}
    for moment in step.moments():
        if moment.name not in highest or moment.total > highest[moment.name].total:
            highest[moment.name] = moment
    peak = max(highest.values(), key=lambda moment: moment.total)
    return Prediction(setup, per_gpu_batch, micro, peak, highest)


class _Step:
    """The moments of one step."""

    def __init__(self, model: Coefficients, setup: Setup, trace: Trace, batch: int, micro: int) -> None:
        self.model, self.setup, self.trace = model, setup, trace
        self.batch, self.micro, self.cuts = batch, micro, batch // micro
        self.buckets = setup.buckets or planned_buckets({}, model, setup.device, absent="auto")
        waiting = setup.images_on_device is True or (setup.images_on_device == "cached" and self.cuts > 1)
        self.held = waiting or setup.device == "cpu"  # there the loader's batch is the step's
        self.p = model.parameters
        self.coalesced = setup.reduce_once and batch > micro and setup.zero > 0 and setup.offload == "none"
        self.host = setup.offload in ("optimizer", "all")
        self.share = -(-self.p // setup.gpus) if setup.zero else self.p
        self.size = setup.parameter_bytes
        self.owned = self._once("owned", owned_gradients, setup.gpus) if setup.zero in (1, 2) else self.p
        self.base = self._base()
        self.full, self.last = self._once("buckets", full_buckets, self.buckets.reduce, setup.precision)

    def _once(self, name: str, find: Callable[..., Any], *arguments: Any) -> Any:
        """``find(model, *arguments)``, remembered with the model: a search asks for it at every batch."""
        memory = self.model.__dict__.setdefault("_memory", {})
        key = (name, *arguments)
        if key not in memory:
            memory[key] = find(self.model, *arguments)
        return memory[key]

    def moments(self) -> Iterator[Moment]:
        """All moments that can be highest."""
        for point in self.trace.points:
            yield self._moment("forward and backward", self._activations(point), self._arriving(point))
        yield self._loss()
        if self.setup.gpus > 1 or self.setup.zero:
            yield self._moment("reduction", {}, self._reduction())
        yield self._moment("gradient norm", {}, self._norm())
        yield self._moment("optimizer", {}, self._optimizer())

    def _moment(self, name: str, *terms: dict[str, int]) -> Moment:
        total = dict.fromkeys(CATEGORIES, 0)
        for term in (self.base, *terms):
            for category, size in term.items():
                total[category] += int(size)
        moving = total["activations"] + total["features"] + total["loss"]
        total["fragmentation"] = int((self.setup.fragmentation - 1) * moving)
        return Moment(name, total)

    def _base(self) -> dict[str, int]:
        """What is there at every moment."""
        setup, p, share = self.setup, self.p, self.share
        host = self.host
        masters = 0 if setup.zero == 0 and self.size == 4 else 4
        base = {
            "runtime": setup.runtime_bytes,
            "parameters": self.size * (share if setup.zero == 3 else p) + self.model.buffer_bytes,
            "optimizer": 0 if host else (masters + OPTIMIZER_BYTES[setup.optimizer]) * share,
            "gradients": 0,
            "buckets": 0,
        }
        if setup.zero == 3:
            if setup.offload == "all":
                base["parameters"] -= self.size * share
            base["gradients"] = 0 if host else self.size * share
            base["buckets"] = self.buckets.reduce * self._bucket_bytes()
        if host:
            base["buckets"] += self.model.largest * self.size  # where gradients wait for their copy to the host
        return base

    def _bucket_bytes(self) -> int:
        """Bytes of a reduction bucket's element; under autocast there is a second bucket for what goes in bf16."""
        if self.setup.precision == "bf16":
            return 2
        if self.setup.precision == "fp32":
            return 4
        return 6 if self.setup.zero == 3 else 8

    def _features(self) -> int:
        """Two features a pair, of the whole rank's batch."""
        return 2 * self.batch * self.model.embed_dim * self.trace.feature_bytes

    def _activations(self, point: Point) -> dict[str, int]:
        activations = point.per_pair * self.micro + point.fixed
        activations += self.batch * self.model.input_bytes if self.held else point.input * self.micro
        return {"activations": activations, "features": self._features()}  # the loss's gradient for each feature

    def _loss(self) -> Moment:
        """The loss on top of what forward has left."""
        setup = self.setup
        dtype = "float32" if self.trace.feature_bytes == 4 else "bfloat16"
        loss = loss_bytes(
            self.batch, self.batch * setup.gpus, self.model.embed_dim, setup.tile, dtype, setup.keep_logits, setup.loss,
            setup.device,
        )  # fmt: skip
        terms = {"loss": loss}
        if self.cuts == 1:
            terms["activations"] = self.trace.end(self.micro, self.model.input_bytes if self.held else None)
        else:
            # the micro-batches' features, and the same in one piece
            terms["features"] = 2 * self._features()
            terms["activations"] = self.batch * self.model.input_bytes if self.held else 0
            if setup.reuse_last:
                terms["activations"] += self.trace.end(self.micro, 0 if self.held else None)
        return self._moment("loss", terms, self._gathered(0))

    def _gathered(self, done: int) -> dict[str, int]:
        """Stage 3: whole parameters that are gathered, beyond the rank's own part.

        One that is used again within ``stage3_max_reuse_distance`` elements is kept: at DeepSpeed's 1e9 that is every
        parameter of most CLIPs, from forward until its gradient is done.
        """
        if self.setup.zero != 3:
            return {}
        if self.buckets.reuse_distance >= self.p and self.cuts == 1:
            return {"parameters": self.size * max(self.p - done, 0)}
        # Prefetched ones exist twice for a moment, as they arrive and in their places. Where micro-batches recompute
        # blocks, DeepSpeed finds its modules in another order than it noted, and no longer prefetches; the fifth fits
        # six measured cases of three models.
        live = 2 * self.buckets.max_live
        if self.cuts > 1 and self.setup.checkpointing != "none":
            live = self.buckets.max_live + self.p // 5
        return {"parameters": self.size * min(self.p, live)}

    def _arriving(self, point: Point) -> dict[str, int]:
        """Gradients and buckets at a point of the last micro-batch's forward and backward."""
        setup = self.setup
        done = point.gradients if setup.zero == 3 else point.gradients_max
        before = self.cuts > 1
        if setup.zero == 0:
            return {"gradients": self.size * (self.p if before else done)}
        if self.host and setup.zero < 3:
            return {"buckets": self._stage_2_buckets() if done else 0}
        if self.coalesced:
            return {**self._gathered(done), "gradients": self.size * self.p}
        if setup.zero == 1:
            whole = self.size * (self.p if before else done)
            return {"gradients": whole, "buckets": self._stage_2_buckets() if done else 0}
        flat = max(
            (self._flat_copy(held) for at, held in self.full if point.gradients <= at <= point.gradients_max), default=0
        )
        if setup.zero == 3:
            return {**self._gathered(done), "buckets": flat}
        # the rank's own part is allocated when a bucket has been reduced, and its flat copy is gone by then
        owned = self.size * self.owned
        reduced = any(at <= done for at, _ in self.full)
        first = reduced and not any(at < point.gradients for at, _ in self.full)
        copy = max(flat - owned, 0) if first else flat
        return {"gradients": owned * (before + reduced), "buckets": copy + (self._stage_2_buckets() if done else 0)}

    def _stage_2_buckets(self) -> int:
        return self.buckets.reduce * self._bucket_bytes() * (2 if self.buckets.overlap else 1)

    def _flat_copy(self, held: Held) -> int:
        """The flat copy of a bucket's gradients that goes to the other ranks."""
        if self.setup.precision == "amp":  # one bucket at a time; that of bf16 is cast once more
            return max(6 * held.low, 4 * held.other)
        copies = 2 if self.setup.zero == 3 and self.setup.device == "cpu" else 1  # gloo reduces in a copy of its own
        return copies * (held.low + held.other) * self.size

    def _reduction(self) -> dict[str, int]:
        """The end of backward: the last gradients are on their way."""
        setup, p, q = self.setup, self.p, self.buckets.reduce
        if setup.zero == 0:
            flat = self.size * min(p, ALLREDUCE_ELEMENTS)
            return {"gradients": self.size * p, "buckets": flat}
        if setup.zero == 3:
            # the first modules' parameters are still gathered, the token embedding among them
            gathered = self.size * min(2 * self.model.largest, self.p)
            whole = self.size * max(p - q, 0) if self.coalesced else 0
            return {"parameters": gathered, "gradients": whole, "buckets": self._flat_copy(self.last)}
        buckets = self._stage_2_buckets()
        if self.host:
            return {"buckets": buckets + self._flat_copy(self.last)}
        owned = self.size * self.owned
        if setup.zero == 1 or self.coalesced:
            # whole gradients until they are in a bucket; then those not yet there, the flat copy or the rank's own
            first = self._flat_copy(self.full[0][1] if self.full else self.last)
            beside = max(first, owned) if self.full or self.coalesced else first + owned
            return {"gradients": max(self.size * p, self.size * max(p - q, 0) + beside), "buckets": buckets}
        # earlier micro-batches' sum, what has been reduced of this one
        parts = (self.cuts > 1) + bool(self.full)
        return {"gradients": owned * parts, "buckets": buckets + self._flat_copy(self.last)}

    def _gradients_done(self) -> dict[str, int]:
        """Gradients after backward, beyond what stage 3 always holds."""
        if self.setup.zero == 3 or self.host:
            return {}
        return {"gradients": self.size * (self.p if self.setup.zero == 0 else self.owned)}

    def _norm(self) -> dict[str, int]:
        """The gradient norm: DeepSpeed takes it of each gradient in float64."""
        done = self._gradients_done()
        if self.setup.zero and self.setup.offload == "none":
            done["optimizer"] = 8 * min(self.model.largest, self.share if self.setup.zero == 3 else self.owned)
        return done

    def _optimizer(self) -> dict[str, int]:
        """The optimizer's step: gradients in fp32, and its temporaries where it is not fused."""
        setup = self.setup
        terms = self._gradients_done()
        if self.host:
            return terms
        updated = (
            self.model.largest
            if setup.zero == 0
            else -(-max(sum(self.model.matrices), self.model.vectors) // setup.gpus)
        )
        flat = 4 * updated if setup.zero else (4 * self.p if self.size == 2 else 0)
        if setup.zero in (1, 2) and self.size == 2 and setup.device == "cuda":
            flat += 2 * updated  # flat in bf16 for a moment before it is flat in fp32
        temporaries = 2 * 4 * updated if setup.device == "cpu" else 0
        if setup.zero in (1, 2) and temporaries + 4 * updated > terms["gradients"] + flat:
            return {"optimizer": 4 * updated + temporaries}  # what the rank owned was let go when it had been flattened
        return {**terms, "optimizer": flat + temporaries * (setup.zero in (0, 3))}
