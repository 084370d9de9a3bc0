"""Plans as people and as programs read them: text of at most 100 columns, and JSON with a version. Without torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from disco_ds.planner.coefficients import table
from disco_ds.planner.memory import CATEGORIES, GIB
from disco_ds.planner.search import MODEL_FLOPS_SHARE, Plan, Planner, Request, cuts

SCHEMA = "disco-plan/1"
"""The version in ``--json``: the number changes when a field changes its meaning or goes."""

COMPARED = ("one_block", "disco", "clip")
"""The losses that an answer is compared over."""


def gib(size: float) -> str:
    """Bytes as GiB with two decimals."""
    return f"{size / GIB:.2f}"


def policy_words(policy: str) -> str:
    """A checkpointing policy in a sentence."""
    return {"none": "no checkpointing", "full": "full checkpointing"}.get(policy, f"checkpointing {policy}")


def settings(plan: Plan) -> str:
    """The settings of a plan in one line."""
    setup, request = plan.setup, plan.request
    words = [f"ZeRO {setup.zero}", setup.precision, policy_words(setup.checkpointing), f"loss {setup.loss}"]
    if setup.offload != "none":
        words.append(f"offload {setup.offload}")
    if setup.attention != "flash":
        words.append(f"{setup.attention} attention")
    return ", ".join(words) + f", on {request.gpus} x {request.gpu.name}"


def cut(plan: Plan) -> str:
    """How a batch is cut: GPUs x micro-batch x accumulation."""
    prediction = plan.prediction
    text = f"{plan.setup.gpus} GPUs x {prediction.micro_batch}"
    if prediction.accumulation > 1:
        text += f" x {prediction.accumulation} micro-batches (cached gradients)"
    return text


def headline(plan: Plan, name: str) -> list[str]:
    """The answer, in two lines."""
    request, prediction = plan.request, plan.prediction
    verb = "fits" if plan.fits else "does not fit"
    what = "batch" if request.has_batch or not plan.fits else "largest batch"
    first = f"{name}: {what} {plan.global_batch} = {cut(plan)} {verb}: {gib(prediction.peak_bytes)} of "
    first += f"{gib(request.limit_bytes)} GiB"
    return [first, f"with {settings(plan)}"]


def breakdown(plan: Plan) -> list[str]:
    """Bytes by category at the highest moment, and the other moments."""
    prediction, limit = plan.prediction, plan.request.limit_bytes
    lines = [f"highest moment: {prediction.peak.name}; bytes in GiB (2^30)"]
    for name in CATEGORIES:
        size = prediction.peak.bytes[name]
        bar = "#" * round(40 * max(size, 0) / max(limit, 1))
        mark = "  <- binds" if name == prediction.binding else ""
        lines.append(f"  {name:<14}{gib(size):>8}  {bar[:44]}{mark}")
    total = gib(prediction.peak_bytes)
    lines.append(f"  {'total':<14}{total:>8}  of {gib(limit)}; headroom {gib(plan.headroom_bytes)}")
    others = [f"{m.name} {gib(m.total)}" for m in prediction.moments.values() if m is not prediction.peak]
    return [*lines, f"other moments: {', '.join(others)}"]


def assumptions(plan: Plan) -> list[str]:
    """What the answer rests on."""
    setup, request = plan.setup, plan.request
    notes = [
        f"{request.gpu.name}: {request.gpu.usable_gib:.2f} GiB usable"
        + (f", less a reserve of {gib(request.reserve_bytes)} GiB" if request.reserve_bytes else ""),
        f"runtime {gib(setup.runtime_bytes)} GiB: CUDA context, cuBLAS"
        + (", one NCCL communicator" if setup.gpus > 1 else ""),
        f"fragmentation: activations, features and loss x {request.fragmentation:.2f} (--frag)",
        f"{setup.optimizer} in fp32, fused; buckets as disco_ds fills its \"auto\"" if request.buckets is None
        else "buckets from --ds-config",
        f"attention: {setup.attention}",
        f"step time {plan.step_s:.2f} s: an estimate, only to rank settings by; {MODEL_FLOPS_SHARE:.0%} of "
        f"{request.gpu.tflops:g} TFLOP/s,",
        f"  collectives at {request.bandwidth_gb_s:g} GB/s (--bandwidth), not overlapped",
    ]  # fmt: skip
    if setup.checkpointing == "offload":
        notes.append("offload: what blocks keep goes to pinned host memory, which is not counted here")
    if setup.zero == 3 and setup.precision == "amp":
        notes.append("ZeRO 3 under amp: counts bf16 copies of weights that DeepSpeed's linear layers do not keep")
    return notes


def what_if(planner: Planner, plan: Plan) -> list[str]:
    """The three single changes that move the answer most, as sentences, largest first."""
    request, setup = plan.request, plan.setup
    # everything that was left open is pinned to the answer's choice, then one thing changes
    pinned = request.largest(zero=setup.zero, checkpointing=setup.checkpointing)
    base = planner.largest(pinned)
    policies = planner.policies(replace(request, checkpointing="auto"))
    options: list[tuple[str, dict[str, Any]]] = [(policy_words(p), {"checkpointing": p}) for p in policies]
    if setup.offload == "none":
        options += [(f"ZeRO {stage}", {"zero": stage}) for stage in (0, 1, 2, 3)]
    options += [(f"loss {loss}", {"loss": loss}) for loss in COMPARED]
    found: list[tuple[float, str]] = []
    start = base.prediction.per_gpu_batch if base.fits else 0
    for words, change_to in options:  # the present setting among them, which changes nothing
        there = planner.largest(replace(pinned, **change_to))
        reached = there.prediction.per_gpu_batch if there.fits else 0
        change = abs(reached - start) / max(min(reached, start), 1)
        if change > 0.02:
            slower = there.step_s / max(reached, 1) / (base.step_s / max(start, 1)) - 1 if start and reached else 0.0
            pace = f", about {abs(slower):.0%} {'more' if slower > 0 else 'less'} time a pair" if slower else ""
            found.append((change, f"{words}: {start} -> {reached} pairs per GPU{pace}"))
    return [text for _, text in sorted(found, key=lambda item: -item[0])[:3]]


def alternatives(planner: Planner, plan: Plan) -> list[str]:
    """What cached gradients would make of it."""
    request, setup, prediction = plan.request, plan.setup, plan.prediction
    cut_as_asked = request.micro_batch is not None or request.accumulation is not None
    if cut_as_asked or prediction.accumulation > 1 or not plan.fits:
        return []
    lines, least = [], request.min_micro_batch
    if prediction.per_gpu_batch < least:
        lines.append(f"note: {prediction.per_gpu_batch} pairs at a time feed a GPU badly (--min-micro-batch {least})")
    micro = prediction.per_gpu_batch * 3 // 4 // 8 * 8
    for times in (16, 8, 4, 2):
        if micro < min(least, prediction.per_gpu_batch):
            break
        cached = planner.plan(request, setup, micro * times, micro)
        if cached.fits:
            lines += [
                f"cached gradients go further, with every forward pass done twice: {cached.global_batch} =",
                f"  {cut(cached)}, {gib(cached.prediction.peak_bytes)} GiB",
            ]
            break
    return lines


def text_report(planner: Planner, plan: Plan, name: str, near: Plan | None = None) -> str:
    """The whole answer for people; ``near`` is what does fit, where the plan does not."""
    lines = headline(plan, name)
    if near is not None:
        lines += ["nearest that fits: " + headline(near, name)[0].partition(": ")[2], "  " + headline(near, name)[1]]
    lines += ["", *breakdown(plan), ""]
    changes = what_if(planner, plan)
    if changes:
        lines += ["what would change the largest batch most:", *(f"  {line}" for line in changes)]
    lines += alternatives(planner, plan)
    lines += ["", "assumed:", *(f"  {line}" for line in assumptions(plan))]
    return "\n".join(lines)


def settings_table(planner: Planner, request: Request) -> str:
    """ZeRO x checkpointing x loss: the largest batch of each, or the peak where a batch was given."""
    columns = replace(request, zero="auto").stages
    head = "peak in GiB, * over the device" if request.has_batch else "largest batch per GPU"
    lines = [f"{head}, {request.precision}, {request.gpus} x {request.gpu.name}"]
    lines.append(f"  {'checkpointing':<14}{'loss':<12}" + "".join(f"{f'ZeRO {stage}':>12}" for stage in columns))
    for policy in planner.policies(replace(request, checkpointing="auto")):
        for loss in COMPARED:
            cells = [_cell(planner, replace(request, zero=s, checkpointing=policy, loss=loss)) for s in columns]
            lines.append(f"  {policy:<14}{loss:<12}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def _cell(planner: Planner, request: Request) -> str:
    if request.has_batch:
        setup, cut = planner.setups(request)[0], cuts(request)[0]
        plan = planner.plan(request, setup, cut.per_rank, cut.micro_batch)
        return gib(plan.prediction.peak_bytes) + ("" if plan.fits else "*")
    plan = planner.largest(request)
    return str(plan.prediction.per_gpu_batch) if plan.fits else "-"


def as_json(plan: Plan, name: str, near: Plan | None = None, notes: Iterable[str] = ()) -> dict[str, Any]:
    """The answer for programs; ``docs/planner.md`` describes every field."""
    prediction, setup, request = plan.prediction, plan.setup, plan.request
    answer: dict[str, Any] = {
        "schema": SCHEMA,
        "model": name,
        "fits": plan.fits,
        "peak_bytes": prediction.peak_bytes,
        "limit_bytes": request.limit_bytes,
        "headroom_bytes": plan.headroom_bytes,
        "per_gpu_batch": prediction.per_gpu_batch,
        "micro_batch": prediction.micro_batch,
        "accumulation": prediction.accumulation,
        "global_batch": plan.global_batch,
        "breakdown_bytes": dict(prediction.peak.bytes),
        "moment": prediction.peak.name,
        "moments_bytes": {moment.name: moment.total for moment in prediction.moments.values()},
        "binding": prediction.binding,
        "settings": {
            "gpus": setup.gpus, "device": request.gpu.name, "zero": setup.zero, "precision": setup.precision,
            "checkpointing": setup.checkpointing, "loss": setup.loss, "offload": setup.offload,
            "attention": setup.attention, "optimizer": setup.optimizer,
        },
        "estimated_step_s": plan.step_s,
        "assumptions": [*assumptions(plan), *notes],
        "made_with": table()["made_with"],
    }  # fmt: skip
    if near is not None:
        answer["nearest"] = as_json(near, name)
    return answer
