"""Which settings fit, which batch is the largest, and which settings are estimated to be fastest. Without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from disco_ds.errors import ConfigError
from disco_ds.loss.memory import keeps_logits
from disco_ds.planner.coefficients import trace_key
from disco_ds.planner.devices import Device
from disco_ds.planner.memory import Prediction, Setup, predict
from disco_ds.planner.models import ModelSource
from disco_ds.planner.partitions import Buckets

MODEL_FLOPS_SHARE = 0.4
"""Of a device's dense bf16 rate, what training reaches; assumed, the same for all settings."""
POLICIES = ("none", "every:2", "ops", "full")
"""What ``--checkpointing auto`` chooses from."""


@dataclass(frozen=True)
class Request:
    """What is asked. "auto" is chosen by the planner."""

    gpus: int
    device: Device
    global_batch: int | None = None
    per_gpu_batch: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    """Micro-batches a step, as a ds_config's gradient_accumulation_steps says it."""
    zero: int | str = "auto"
    precision: str = "bf16"
    checkpointing: str = "auto"
    loss: str = "one_block"
    attention: str = "flash"
    offload: str = "none"
    optimizer: str = "adamw"
    fragmentation: float = 1.10
    reserve_bytes: int = 0
    min_micro_batch: int = 64
    bandwidth_gb_s: float = 50.0
    buckets: Buckets | None = None
    tile: int | None = None
    keep_logits: bool | str = "auto"
    reuse_last: bool = False
    reduce_once: bool = True
    images_on_device: bool | str = False
    """These five as in :class:`~disco_ds.planner.memory.Setup`."""

    @property
    def limit_bytes(self) -> int:
        """What a step may take: usable memory less the reserve."""
        return self.device.usable_bytes - self.reserve_bytes


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

    def setups(self, request: Request) -> Iterator[Setup]:
        """Every combination of what the request leaves open.

        Raises:
            ConfigError: there is none.
        """
        for policy in self.policies(request):
            for stage in stages(request):
                yield Setup(
                    gpus=request.gpus, zero=stage, precision=request.precision, checkpointing=policy,
                    loss=request.loss, attention=request.attention, offload=request.offload,
                    optimizer=request.optimizer,
                    runtime_bytes=request.device.runtime_bytes(request.gpus),
                    fragmentation=request.fragmentation, buckets=request.buckets,
                    tile=request.tile, keep_logits=request.keep_logits, reuse_last=request.reuse_last,
                    reduce_once=request.reduce_once, images_on_device=request.images_on_device,
                )  # fmt: skip

    def policies(self, request: Request) -> tuple[str, ...]:
        """The checkpointing policies to look at: of an unknown model only the two extremes, each is a trace."""
        if request.checkpointing != "auto":
            return (request.checkpointing,)
        shipped = tuple(p for p in POLICIES if self.source.has(trace_key(request.precision, p, request.attention)))
        return shipped or ("none", "full")

    def predict(self, setup: Setup, batch: int, micro: int | None = None) -> Prediction:
        """The memory of a step; traces the model where that has not been done."""
        model = self.source.get(setup.precision, setup.checkpointing, setup.attention, setup.device)
        return predict(model, setup, batch, micro)

    def plan(self, request: Request, setup: Setup, batch: int, micro: int | None = None) -> Plan:
        """A plan for exactly this batch."""
        prediction = self.predict(setup, batch, micro)
        return Plan(request, prediction, self.step_time(request, prediction))

    def best(self, request: Request) -> Plan:
        """The answer to a request; where nothing fits, the plan that comes nearest.

        Raises:
            ConfigError: a batch that does not divide, or settings that do not go together.
        """
        if request.global_batch is None and request.per_gpu_batch is None:
            return self.largest(request)
        return self.fastest(request, batch_per_gpu(request))

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

        low = 0
        for power in range(22, -1, -1):
            if fits(1 << power):
                low = 1 << power
                break
        if low == 0:
            return self.plan(request, setup, *cut(1))
        high = 2 * low
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        if micro is None and low >= 8:
            low -= low % 8
        return self.plan(request, setup, *cut(low))

    def fastest(self, request: Request, batch: int) -> Plan:
        """The plan for a given batch with the least estimated time; where none fits, the one nearest to fitting."""
        fitting: list[Plan] = []
        nearest: list[Plan] = []
        for setup in self.setups(request):
            for micro in micro_batches(request, batch):
                plan = self.plan(request, setup, batch, micro)
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
        model = self.source.get(setup.precision, setup.checkpointing, setup.attention, setup.device)
        forward = model.traces[setup.trace_key].forward_flops * prediction.per_gpu_batch
        passes = 3.0 + recomputed(setup.checkpointing)
        if prediction.accumulation > 1:
            passes += 1.0 - setup.reuse_last / prediction.accumulation
        rate = request.device.tflops * 1e12 * MODEL_FLOPS_SHARE * (0.5 if setup.precision == "fp32" else 1.0)
        compute = (forward * passes + loss_flops(setup, prediction.per_gpu_batch, model.embed_dim)) / rate
        if setup.gpus == 1:
            return compute
        sent = reduction_bytes(setup, model.parameters, prediction.accumulation)
        sent += 8 * prediction.per_gpu_batch * (setup.gpus - 1) * model.embed_dim  # features gathered, reduced back
        return compute + sent / (request.bandwidth_gb_s * 1e9)


def stages(request: Request) -> tuple[int, ...]:
    """The ZeRO stages that a request allows, at least one.

    Raises:
        ConfigError: offload needs another stage than the one given, or there is no such stage or offload.
    """
    lowest = {"none": 0, "optimizer": 1, "all": 3}
    if request.offload not in lowest:
        raise ConfigError(f"--offload {request.offload}: expected {', '.join(lowest)}")
    needed = lowest[request.offload]
    if request.zero == "auto":
        return tuple(range(needed, 4))
    if request.zero not in (0, 1, 2, 3):
        raise ConfigError(f"--zero {request.zero}: expected 0, 1, 2, 3 or auto")
    if int(request.zero) < needed:
        what, at = ("parameters go", "3") if request.offload == "all" else ("the optimizer's states go", "1, 2 or 3")
        raise ConfigError(f"--offload {request.offload}: {what} to the host at --zero {at} only, not at {request.zero}")
    return (int(request.zero),)


def with_accumulation(request: Request, content: dict[str, Any]) -> Request:
    """The request with a ds_config's gradient_accumulation_steps, whoever gave batch and micro-batch."""
    steps = content.get("gradient_accumulation_steps", "auto")
    if steps == "auto":
        return request
    request = changed(request, accumulation=steps)
    open_batch = request.global_batch is None and request.per_gpu_batch is None
    if open_batch and request.micro_batch is not None:
        return changed(request, per_gpu_batch=request.micro_batch * steps)
    return request


def batch_per_gpu(request: Request) -> int:
    """The batch of one GPU that the request names.

    Raises:
        ConfigError: the numbers do not divide, or contradict each other.
    """
    if request.global_batch is None:
        assert request.per_gpu_batch is not None
        return request.per_gpu_batch
    if request.global_batch % request.gpus:
        low = request.global_batch // request.gpus * request.gpus
        near = " and ".join(str(v) for v in (low, low + request.gpus) if v > 0)
        raise ConfigError(
            f"--global-batch {request.global_batch} does not divide by --gpus {request.gpus}; nearest that do: {near}"
        )
    batch = request.global_batch // request.gpus
    if request.per_gpu_batch not in (None, batch):
        raise ConfigError(
            f"--per-gpu-batch {request.per_gpu_batch} x --gpus {request.gpus} is not --global-batch "
            f"{request.global_batch}"
        )
    return batch


def micro_batches(request: Request, batch: int) -> list[int]:
    """Sizes to try, largest first: the whole batch, then divisors down to the smallest that feeds a device.

    Raises:
        ConfigError: the micro-batch asked for does not divide the batch, or their number does not.
    """
    if request.accumulation is not None:
        return [_micro_of_accumulation(request, batch, request.accumulation)]
    if request.micro_batch is not None:
        if batch % request.micro_batch:
            raise ConfigError(
                f"--micro-batch {request.micro_batch} does not divide the batch of {batch} pairs per GPU; nearest that "
                f"does: {max(d for d in range(1, batch + 1) if batch % d == 0 and d <= request.micro_batch)}"
            )
        return [request.micro_batch]
    divisors = [batch // k for k in range(1, batch + 1) if batch % k == 0]
    feeding = [d for d in divisors if d >= min(request.min_micro_batch, batch)]
    return feeding or [batch]


def _micro_of_accumulation(request: Request, batch: int, steps: int) -> int:
    if batch % steps:
        low = batch // steps * steps
        near = " and ".join(str(value) for value in (low, low + steps) if value > 0)
        raise ConfigError(
            f"gradient_accumulation_steps {steps} does not divide the batch of {batch} pairs per GPU; nearest batches "
            f'that do: {near}. Or write "auto" for it in the ds_config'
        )
    if request.micro_batch not in (None, batch // steps):
        raise ConfigError(
            f"a micro-batch of {request.micro_batch} pairs x gradient_accumulation_steps {steps} is not the batch of "
            f'{batch} pairs per GPU; write "auto" for one of them in the ds_config'
        )
    return batch // steps


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
    backward = 4 if setup.precision == "bf16" else 2  # 16-bit features take the gradient in two parts
    keeps = keeps_logits(batch, total) if setup.keep_logits == "auto" else setup.keep_logits
    again = setup.loss == "one_block" and not keeps
    return (1 + again + backward) * 2.0 * batch * total * width


def reduction_bytes(setup: Setup, parameters: int, accumulation: int) -> float:
    """Bytes a GPU sends for gradients and parameters in a step."""
    size = setup.parameter_bytes
    if setup.zero in (0, 1):
        return 2.0 * size * parameters
    once = setup.reduce_once and setup.offload == "none"
    reductions = 1 if once else accumulation
    if setup.zero == 2:
        return size * parameters * (2.0 * reductions + 1.0)
    gathers = (3 if accumulation > 1 else 2) * accumulation
    return size * parameters * (reductions + gathers)


def changed(request: Request, **changes: object) -> Request:
    """The request with some fields changed."""
    return replace(request, **changes)  # type: ignore[arg-type]
