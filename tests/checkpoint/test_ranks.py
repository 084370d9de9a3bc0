"""Checkpoints on real ranks: every weight and optimizer state comes back, on any number of ranks and any ZeRO stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from disco_ds.checkpoint.save import Identity, RunState, save_checkpoint
from disco_ds.checkpoint.state import FP32, SavedState
from disco_ds.engine.deepspeed_engine import resume_engine
from tests.helpers.engines import BATCH, build, own_rows
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import TINY_RESNET, tiny_batch

SMALL = {
    "embed_dim": 16,
    "vision_cfg": {"layers": 2, "width": 16, "head_width": 8, "patch_size": 16, "image_size": 32},
    "text_cfg": {"context_length": 16, "vocab_size": 100, "width": 16, "heads": 2, "layers": 1},
}
RESNET = {**SMALL, "vision_cfg": TINY_RESNET["vision_cfg"]}
CASES = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero2-bf16": {"stage": 2, "precision": "bf16"},
    "zero3-bf16-lion": {"stage": 3, "precision": "bf16", "optimizer": {"name": "lion", "lr": 1e-4}},
    "zero2-locked": {"stage": 2, "freeze": "image"},
    "zero3-locked": {"stage": 3, "freeze": "image"},
    "zero1-resnet": {"stage": 1, "config": RESNET},
    "zero2-lion": {"stage": 2, "optimizer": {"name": "lion", "lr": 1e-4, "layer_decay": 0.7}},
    "zero0": {"stage": 0},
    "zero0-bf16": {"stage": 0, "precision": "bf16"},
}
LOADED_AT = {"zero1": (1, 3), "zero2": (2, 3), "zero3": (3, 1), "zero0": (0, 2), "zero0-bf16": (0, 3)}
"""The stages that each case is loaded at; others at their own."""


def states(case):
    return ("exp_avg",) if "lion" in case else ("exp_avg", "exp_avg_sq")


LOADED_IN = {"zero2": "bf16", "zero2-bf16": "fp32", "zero3": "bf16"}
"""The precision that a case is loaded in, too."""


def identity(stage, precision="fp32"):
    return Identity(dist.get_world_size(), stage, precision, BATCH, {}, "adamw")


def everything(engine, keys):
    """All fp32 weights and optimizer states, whole: (name, key) → tensor."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    if engine.zero_optimization_stage() < 3:  # DeepSpeed makes these links before all groups have states
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[name, FP32] = safe_get_full_fp32_param(parameter).float().cpu().clone().reshape(-1)
            for key in keys:
                state = safe_get_full_optimizer_state(parameter, key)
                found[name, key] = state.float().cpu().clone().reshape(-1)
    found.update({(name, "buffer"): buffer.clone() for name, buffer in engine.module.named_buffers()})
    return found


def steps(step, seeds):
    losses = []
    for seed in seeds:
        images, texts = tiny_batch(BATCH, seed)
        loss = step(images[own_rows()], texts[own_rows()]).loss.clone()
        dist.all_reduce(loss)
        losses.append(float(loss) / dist.get_world_size())
    return losses


def save_all(folder, cases):
    """Three steps and a checkpoint for each case; then what it held, and the losses of the next two steps."""
    held = {}
    for case in cases:
        engine, step = build(**{"config": SMALL, **CASES[case]})
        steps(step, (1, 2, 3))
        stage = CASES[case]["stage"]
        run = identity(stage, CASES[case].get("precision", "fp32"))
        save_checkpoint(engine, Path(folder) / case, RunState(3, 3 * BATCH, None), run, keep=1)
        content = everything(engine, states(case)) if stage else None
        held[case] = (content, steps(step, (4, 5)))
        engine.destroy()
    return held


def load_all(folder, cases):
    held = {}
    for case in cases:
        own = CASES[case].get("precision", "fp32")
        ways = [(stage, own) for stage in LOADED_AT.get(case, (CASES[case]["stage"],))]
        ways += [(CASES[case]["stage"], LOADED_IN[case])] if case in LOADED_IN else []
        for stage, precision in ways:
            engine, step = build(**{"config": SMALL, **CASES[case], "stage": stage, "precision": precision})
            state = resume_engine(engine, Path(folder) / case / "step-00000003", identity(stage, precision))
            assert (state.step, state.samples_seen) == (3, 3 * BATCH)
            assert engine.global_steps == 3
            content = everything(engine, states(case)) if stage else None
            held[case, stage, precision] = (content, steps(step, (4, 5)))
            engine.destroy()
    return held


SAVED_BY = {
    1: ["zero2", "zero3-locked", "zero0-bf16", "zero1-resnet"],
    2: list(CASES),
    3: ["zero1", "zero3", "zero2-bf16", "zero1-resnet"],
}


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory):
    """Ranks → folder of the checkpoints of so many ranks, and what they hold; each saved once."""
    made = {}

    def saved(ranks):
        if ranks not in made:
            folder = tmp_path_factory.mktemp(f"saved-by-{ranks}")
            made[ranks] = folder, run_ranks(save_all, ranks, str(folder), SAVED_BY[ranks])[0]
        return made[ranks]

    return saved


@pytest.mark.parametrize(
    ("ranks", "loaded_by", "cases"),
    [(2, 3, list(CASES)), (3, 1, SAVED_BY[3]), (1, 4, ["zero2", "zero3-locked"]), (2, 2, list(LOADED_IN))],
    ids=["2-3", "3-1", "1-4", "2-2"],
)
def test_everything_comes_back_on_another_number_of_ranks(saved_by, ranks, loaded_by, cases):
    folder, saved = saved_by(ranks)
    loaded = run_ranks(load_all, loaded_by, str(folder), cases)[0]
    for (case, stage, precision), (content, losses) in loaded.items():
        expected, expected_losses = saved[case]
        where = f"{case} at stage {stage} in {precision}"
        if expected is not None and content is not None:
            assert content.keys() == expected.keys(), where
            for name in expected:
                same = content[name] if name[1] != "buffer" else content[name].to(expected[name].dtype)
                assert torch.equal(same, expected[name]), f"{where}: {name}"
        if "resnet" in case:  # batch norms see a rank's own batch, which has another size now
            continue
        within = 5e-3 if "bf16" in where else 1e-5  # bf16 gradients are summed in another order
        assert losses == pytest.approx(expected_losses, rel=within), where


@pytest.mark.parametrize("ranks", [1, 2])
def test_saved_weights_are_read_without_an_engine(saved_by, ranks):
    folder, saved = saved_by(ranks)
    for case, (content, _) in saved.items():
        weights = SavedState(folder / case / "step-00000003" / "engine", CASES[case]["stage"]).weights()
        if content is None:
            assert weights["clip.visual.conv1.weight"].dtype == torch.float32
            continue
        for (name, key), value in content.items():
            if key == FP32 or (key == "buffer" and name in weights):  # not all buffers are saved
                assert torch.equal(weights[name].reshape(-1), value.reshape(-1)), f"{case}: {name}"
