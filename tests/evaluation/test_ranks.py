"""Evaluation on real ranks: the same numbers as on one, uneven and empty shards included, at ZeRO-3 too."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from disco_ds.config.schema import EvaluationConfig
from disco_ds.evaluation.evaluate import evaluate
from disco_ds.evaluation.result import EvalResult
from disco_ds.evaluation.retrieval import NonFiniteFeatures
from tests.helpers.ranks import run_ranks
from tests.helpers.towers import TinyTowers, batched, make_samples, tokenize

CLASSES = ["thing", "other", "more", "of", "many", "kinds", "zebra"]
CONFIG = EvaluationConfig(classes=CLASSES, templates=["a {}", "the {} of {}"], batch=5)


def dealt(samples: list, parts: int, deal: str) -> list[list]:
    """Shares of the samples: even, uneven (rank r gets about r times as many; rank 0 none), or all on the last rank."""
    if deal == "even":
        return [samples[rank::parts] for rank in range(parts)]
    if deal == "last":
        return [[] for _ in range(parts - 1)] + [samples]
    bounds = [len(samples) * rank * rank // (parts * parts) for rank in range(parts)] + [len(samples)]
    return [[], samples] if parts == 2 else [samples[bounds[r] : bounds[r + 1]] for r in range(parts)]


def comparable(result: EvalResult) -> dict[str, Any]:
    """All of a result but its time, with pixels as lists."""
    fields = dataclasses.asdict(result)
    del fields["seconds"]
    for sample in fields["samples"]:
        sample["pixels"] = np.asarray(sample["pixels"]).tolist()
    return fields


def samples_of(seed: int, captions: int = 3) -> list:
    return make_samples(26, seed, captions=captions, labels=("thing", "zebra", "3", "stranger", None))


def measured(engine: Any, samples: list) -> EvalResult:
    return evaluate(engine, batched(samples, 4), tokenizer=tokenize, config=CONFIG)


def plain_module(seed: int) -> dict[str, dict[str, Any]]:
    """Every way of dealing the samples, and the errors that all ranks must see together."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results = {}
    for deal in ("even", "uneven", "last"):
        share = dealt(samples_of(seed), world_size, deal)[rank]
        results[deal] = comparable(measured(TinyTowers(seed), share))
    with pytest.raises(ValueError, match="each must come once"):  # on all ranks
        measured(TinyTowers(seed), share + samples_of(seed)[:1])

    broken = TinyTowers(seed)
    if rank == world_size - 1:  # one rank's model only: all must stop
        torch.nn.init.constant_(broken.visual[1].bias, float("nan"))
    with pytest.raises(NonFiniteFeatures, match="held-out images and 0 texts"):
        measured(broken, dealt(samples_of(seed), world_size, "even")[rank])

    def unreadable():
        yield from batched(samples_of(seed), 4)
        raise OSError("the disk is gone")

    batches = unreadable() if rank == 0 else batched(samples_of(seed), 2)
    with pytest.raises(OSError if rank == 0 else RuntimeError, match="disk is gone" if rank == 0 else "another rank"):
        evaluate(TinyTowers(seed), batches, tokenizer=tokenize, config=CONFIG)
    dist.barrier()
    return results


def zero3_engine(seed: int) -> list[dict[str, Any]]:
    """A ZeRO-3 engine evaluates before and after a training step; rank 0 has no samples."""
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # spares its compilation
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = TinyTowers(seed)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
        },
    )
    weight = engine.module.visual[1].weight
    assert weight.numel() == 0  # partitioned: only the engine's forward can use it
    share = dealt(samples_of(seed), world_size, "uneven")[rank]
    engine.train()
    results = [comparable(measured(engine, share))]
    for _ in range(2):
        batch = next(batched(samples_of(seed + rank), 4))
        features = engine(batch.images, batch.texts)
        loss = -(features.image_features * features.text_features).sum() * features.logit_scale.double().sum()
        engine.backward(loss.float())
        engine.step()
        results.append(comparable(measured(engine, share)))
    assert engine.module.training
    assert engine.module.visual[2].training
    assert engine.global_steps == 2
    assert weight.numel() == 0
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_number_of_ranks_gives_what_one_process_does(world_size, seed):
    expected = comparable(measured(TinyTowers(seed), samples_of(seed)))
    assert expected["metrics"]["val/pairs"] > expected["metrics"]["val/images"] == 26
    for found in run_ranks(plain_module, world_size, seed):
        assert found == dict.fromkeys(("even", "uneven", "last"), expected)


def test_zero3_engine_gives_what_the_module_does(seed):
    expected = comparable(measured(TinyTowers(seed), samples_of(seed)))
    ranks = run_ranks(zero3_engine, 2, seed)
    for found in ranks:
        assert found[0] == expected
        assert found == ranks[0]
    assert ranks[0][2] != ranks[0][0]  # two training steps between them
