"""Which settings fit, which batch is the largest, and which settings are estimated to be fastest. Without torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from disco_ds.engine.ds_config import BatchPlan, solve_batch
from disco_ds.errors import ConfigError
from disco_ds.loss.memory import keeps_logits
from disco_ds.planner.coefficients import trace_key
from disco_ds.planner.devices import GIB, Device
from disco_ds.planner.memory import Prediction, Setup, predict
from disco_ds.planner.models import ModelSource

MODEL_FLOPS_SHARE = 0.4
"""Of a device's dense bf16 rate, what training reaches; assumed, the same for all settings."""
POLICIES = ("none", "every:2", "ops", "full")
"""What ``--checkpointing auto`` chooses from."""
LOWEST_STAGE = {"none": 0, "optimizer": 1, "all": 3}
"""The ZeRO stage from which on there is something to offload."""


@dataclass(frozen=True, kw_only=True)
class Request(Setup):
    """What is asked: a setup in which stage and checkpointing may be "auto", which the planner chooses, and a batch.

    Raises:
        ConfigError: settings that do not go together.
    """

    gpu: Device
    global_batch: int | None = None
    per_gpu_batch: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    """Micro-batches a step, as a ds_config's gradient_accumulation_steps says it."""
    zero: int | str = "auto"  # type: ignore[assignment]
    checkpointing: str = "auto"
    fragmentation: float = 1.10
    reserve_bytes: int = 0
    """Of each device, to leave free."""
    min_micro_batch: int = 64
    """The smallest micro-batch that is tried for a given batch: smaller ones feed a device badly."""
    bandwidth_gb_s: float = 50.0
    """Of a GPU's collectives, for the ranking."""

    def __post_init__(self) -> None:
        """Raise ConfigError where the settings do not go together."""
        if self.fragmentation < 1:
            raise ConfigError(
                f"--frag {self.fragmentation}: a process never holds less than is allocated; expected at least 1"
            )
        if self.limit_bytes <= 0:
            usable = self.gpu.usable_gib
            raise ConfigError(f"--reserve {self.reserve_bytes / GIB:g}: nothing of {usable:.2f} GiB is left")
        if self.offload not in LOWEST_STAGE:
            raise ConfigError(f"--offload {self.offload}: expected {', '.join(LOWEST_STAGE)}")
        if self.zero not in ("auto", 0, 1, 2, 3):
            raise ConfigError(f"--zero {self.zero}: expected 0, 1, 2, 3 or auto")
        if not self.stages:
            what, at = ("parameters go", "3") if self.offload == "all" else ("the optimizer's states go", "1, 2 or 3")
            raise ConfigError(f"--offload {self.offload}: {what} to the host at --zero {at} only, not at {self.zero}")

    @property
    def stages(self) -> tuple[int, ...]:
        """The ZeRO stages to look at."""
        return tuple(z for z in range(LOWEST_STAGE[self.offload], 4) if self.zero in ("auto", z))

    @property
    def limit_bytes(self) -> int:
        """What a step may take: usable memory less the reserve."""
        return self.gpu.usable_bytes - self.reserve_bytes

    @property
    def has_batch(self) -> bool:
        """Whether the batch is given, rather than to be the largest."""
        return (self.global_batch or self.per_gpu_batch or (self.micro_batch and self.accumulation)) is not None

    def largest(self, **changes: Any) -> Request:
        """The request for the largest batch in place of a given one, with more changes."""
        accumulation = self.accumulation if self.micro_batch is None else None
        batch = {"global_batch": None, "per_gpu_batch": None, "accumulation": accumulation}
        return replace(self, **{**batch, **changes})

    def setup(self, zero: int, checkpointing: str) -> Setup:
        """The setup with this stage and this policy."""
        fixed = {name.name: getattr(self, name.name) for name in fields(Setup)}
        runtime = self.gpu.runtime_bytes(self.gpus) if self.device == "cuda" else 0
        return Setup(**{**fixed, "zero": zero, "checkpointing": checkpointing, "runtime_bytes": runtime})


@dataclass
class Plan:
    """One way to train, with its memory and its estimated time."""

    request: Request
    prediction: Prediction
    step_s: float
    """Estimated seconds a step: compute at an assumed share of the device's rate, plus collectives, not overlapped."""

    @property
    def setup(self) -> Setup:
        """The settings."""
        return self.prediction.setup

    @property
    def global_batch(self) -> int:
        """Pairs a step over all GPUs."""
        return self.prediction.per_gpu_batch * self.setup.gpus

    @property
    def fits(self) -> bool:
        """Whether the step stays within the device."""
        return self.prediction.peak_bytes <= self.request.limit_bytes

    @property
    def headroom_bytes(self) -> int:
        """What is left of the device; negative if it does not fit."""
        return self.request.limit_bytes - self.prediction.peak_bytes


class Planner:
    """Answers requests about one model."""

    def __init__(self, source: ModelSource) -> None:
        self.source = source

    def setups(self, request: Request) -> list[Setup]:
        """Every combination of what the request leaves open."""
        return [request.setup(stage, policy) for policy in self.policies(request) for stage in request.stages]

    def policies(self, request: Request) -> tuple[str, ...]:
        """The checkpointing policies to look at: of an unknown model only the two extremes, each is a trace."""
        if request.checkpointing != "auto":
            return (request.checkpointing,)
        keys = {p: trace_key(request.precision, p, request.attention, request.device) for p in POLICIES}
        shipped = tuple(policy for policy, key in keys.items() if key in self.source.in_table)
        return shipped or ("none", "full")

    def predict(self, setup: Setup, batch: int, micro: int | None = None) -> Prediction:
        """The memory of a step; traces the model where that has not been done."""
        return predict(self.source.of(setup), setup, batch, micro)

    def plan(self, request: Request, setup: Setup, batch: int, micro: int | None = None) -> Plan:
        """A plan for exactly this batch."""
        prediction = self.predict(setup, batch, micro)
        return Plan(request, prediction, self.step_time(request, prediction))

    def best(self, request: Request) -> Plan:
        """The answer to a request; where nothing fits, the plan that comes nearest.

        Raises:
            ConfigError: a batch that does not divide, or settings that do not go together.
        """
        return self.fastest(request) if request.has_batch else self.largest(request)

    def largest(self, request: Request) -> Plan:
        """The largest batch; among settings that reach the same one, the fastest."""
        plans = [self.largest_of(request, setup) for setup in self.setups(request)]
        fitting = [plan for plan in plans if plan.fits]
        if not fitting:
            return min(plans, key=lambda plan: plan.prediction.peak_bytes)
        return max(fitting, key=lambda plan: (plan.global_batch, -plan.step_s))

    def largest_of(self, request: Request, setup: Setup) -> Plan:
        """The largest batch of one setup, in one pass, or cut into micro-batches of the size or number asked for.

        What goes through at once is a multiple of 8 pairs from 8 on, for the matrix units.
        """
        micro, times = request.micro_batch, request.accumulation or 1

        def cut(units: int) -> tuple[int, int]:
            return (units * times, units) if micro is None else (units * micro, micro)

        def fits(units: int) -> bool:
            return self.predict(setup, *cut(units)).peak_bytes <= request.limit_bytes

        low = next((1 << power for power in range(22, -1, -1) if fits(1 << power)), 0)
        if low == 0:
            return self.plan(request, setup, *cut(1))
        high = 2 * low
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        if micro is None and low >= 8:
            low -= low % 8
        return self.plan(request, setup, *cut(low))

    def fastest(self, request: Request) -> Plan:
        """The plan with the least estimated time for the batch given; where none fits, the one nearest to fitting."""
        fitting: list[Plan] = []
        nearest: list[Plan] = []
        for setup in self.setups(request):
            for cut in cuts(request):
                plan = self.plan(request, setup, cut.per_rank, cut.micro_batch)
                if plan.fits:
                    fitting.append(plan)
                    break  # smaller micro-batches fit too, and are no faster
                nearest.append(plan)
        if fitting:
            return min(fitting, key=lambda plan: (plan.step_s, plan.prediction.peak_bytes))
        return min(nearest, key=lambda plan: plan.prediction.peak_bytes)

    def step_time(self, request: Request, prediction: Prediction) -> float:
        """Estimated seconds of a step."""
        setup = prediction.setup
        model = self.source.of(setup)
        forward = model.traces[setup.trace_key].forward_flops * prediction.per_gpu_batch
        passes = 3.0 + recomputed(setup.checkpointing)
        if prediction.accumulation > 1:
            passes += 1.0 - setup.reuse_last / prediction.accumulation
        rate = request.gpu.tflops * 1e12 * MODEL_FLOPS_SHARE * (0.5 if setup.precision == "fp32" else 1.0)
        compute = (forward * passes + loss_flops(setup, prediction.per_gpu_batch, model.embed_dim)) / rate
        if setup.gpus == 1:
            return compute
        sent = reduction_bytes(setup, model.parameters, prediction.accumulation)
        sent += 8 * prediction.per_gpu_batch * (setup.gpus - 1) * model.embed_dim  # features gathered, reduced back
        return compute + sent / (request.bandwidth_gb_s * 1e9)


def cuts(request: Request) -> list[BatchPlan]:
    """How the batch that is given may be cut, largest micro-batch first: whole, then by its divisors down to
    ``min_micro_batch``, unless a micro-batch or their number is given too.

    Raises:
        ConfigError: the numbers do not divide, or contradict each other.
    """
    gpus, total, per_gpu = request.gpus, request.global_batch, request.per_gpu_batch
    names, micro, steps = ("--global-batch", "--micro-batch"), request.micro_batch, request.accumulation
    if None not in (total, per_gpu) and total != per_gpu * gpus:  # type: ignore[operator]
        raise ConfigError(f"--per-gpu-batch {per_gpu} x --gpus {gpus} is not --global-batch {total}")
    if total is None and per_gpu is not None:  # then messages are about one GPU
        one = solve_batch(1, per_gpu, micro, steps, names=("--per-gpu-batch", names[1]), ranks="")
        whole = BatchPlan(per_gpu * gpus, one.micro_batch, one.accumulation, gpus)
    else:
        whole = solve_batch(gpus, total, micro, steps, names=names, ranks="--gpus {}")
    if micro is not None or steps is not None:
        return [whole]
    batch = whole.per_rank
    times = [k for k in range(1, batch + 1) if batch % k == 0 and batch // k >= min(request.min_micro_batch, batch)]
    return [BatchPlan(whole.global_batch, batch // k, k, gpus) for k in times]


def recomputed(policy: str) -> float:
    """Forward passes that backward repeats under a checkpointing policy, estimated."""
    if policy == "full":
        return 1.0
    if policy.startswith("every:"):
        return 1.0 / int(policy.partition(":")[2])
    return {"ops": 0.15, "offload": 0.25}.get(policy, 0.0)


def loss_flops(setup: Setup, batch: int, width: int) -> float:
    """Products of the loss: 2 D flops for each logit and product."""
    total = batch * setup.gpus
    if setup.loss == "clip":
        return 3 * 2.0 * total * total * width
    if setup.loss in ("disco", "open_clip"):
        return 6 * 2.0 * batch * total * width
    keeps = keeps_logits(batch, total) if setup.keep_logits == "auto" else setup.keep_logits
    again = setup.loss == "one_block" and not keeps
    return (3 + again) * 2.0 * batch * total * width


def reduction_bytes(setup: Setup, parameters: int, accumulation: int) -> float:
    """Bytes a GPU sends for gradients and parameters in a step."""
    size = setup.parameter_bytes
    if setup.zero in (0, 1):
        return 2.0 * size * parameters
    reductions = 1 if setup.reduce_once and setup.offload == "none" else accumulation
    if setup.zero == 2:
        return size * parameters * (2.0 * reductions + 1.0)
    gathers = (3 if accumulation > 1 else 2) * accumulation
    return size * parameters * (reductions + gathers)
