"""ds_configs: what is read, resolved and filled in, and what each mistake is answered with."""

from __future__ import annotations

import json

import pytest

from disco_ds.config.schema import RunConfig
from disco_ds.engine.buckets import fill_buckets
from disco_ds.engine.ds_config import resolve
from disco_ds.engine.ds_schema import DsConfig, read_ds_config
from disco_ds.engine.refused_keys import REFUSED
from disco_ds.errors import ConfigError
from disco_ds.planner.from_ds_config import choices
from tests.helpers.ranks import ROOT


def solved(ds=None, world_size=2, on_gpu=False, **fields):
    config = RunConfig(data={"train": "x"}, steps=1, **fields)
    return resolve(config, ds or {}, world_size=world_size, on_gpu=on_gpu, source="ds.json")


def with_buckets(engine_config, parameters, largest):
    zero = engine_config.deepspeed["zero_optimization"]
    return zero, fill_buckets(zero, parameters, largest, on_gpu=False, source="ds.json")


def read_for_the_planner(path):
    return read_ds_config(path, "--ds-config", deepspeed=False)


def batch_of(engine_config):
    plan = engine_config.batch
    return plan.global_batch, plan.micro_batch, plan.accumulation


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda p: p.stem)
def test_shipped_ds_configs_resolve(path):
    engine_config = solved(read_ds_config(path), global_batch=64)
    with_buckets(engine_config, 1_000_000, 400_000)
    assert batch_of(engine_config) == (64, 32, 1)
    assert "auto" not in json.dumps(engine_config.deepspeed)
    assert engine_config.zero_stage == int(path.stem[4])


@pytest.mark.parametrize(
    ("ds", "fields", "expected"),
    [
        ({"train_batch_size": "auto"}, {"global_batch": 24}, (24, 12, 1)),
        ({}, {"global_batch": 24, "micro_batch": 3}, (24, 3, 4)),
        ({"gradient_accumulation_steps": 3}, {"global_batch": 24}, (24, 4, 3)),
        ({"train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 3}, {}, (30, 5, 3)),
        ({"train_micro_batch_size_per_gpu": 5}, {}, (10, 5, 1)),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": "auto"}, {"micro_batch": 6}, (24, 6, 2)),
    ],
)
def test_batch_keys(ds, fields, expected):
    engine_config = solved(ds, **fields)
    assert batch_of(engine_config) == expected
    # DeepSpeed sees the rank's whole batch as one micro-batch: the cached step is ours
    assert engine_config.deepspeed["gradient_accumulation_steps"] == 1
    assert engine_config.deepspeed["train_micro_batch_size_per_gpu"] * 2 == expected[0]


@pytest.mark.parametrize(
    ("ds", "fields", "words"),
    [
        ({}, {}, ["global_batch", "train_batch_size"]),
        ({}, {"global_batch": 25}, ["25", "2 ranks", "24 and 26"]),
        ({}, {"global_batch": 24, "micro_batch": 5}, ["24", "micro_batch 5", "20 and 30"]),
        ({"train_batch_size": 32}, {"global_batch": 24}, ["24", "32", "ds.json"]),
        ({"train_batch_size": 0}, {}, ["train_batch_size", "0"]),  # checked again, whoever read it
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3},
            {},
            ["8", "12"],
        ),
        ({"bf16": {"enabled": True}, "torch_autocast": {"enabled": True}}, {"global_batch": 2}, ["both"]),
        ({"bf16": {"enabled": True}}, {"global_batch": 2, "precision": "fp32"}, ["fp32", "enables bf16"]),
        ({"gradient_clipping": 3}, {"global_batch": 2, "optimizer": {"clip_norm": 1}}, ["gradient_clipping", "3"]),
    ],
)
def test_named_errors_of_the_resolution(ds, fields, words):
    with pytest.raises(ConfigError) as caught:
        solved(ds, **fields)
    assert all(word in str(caught.value) for word in words), caught.value


def zero(**keys):
    return {"zero_optimization": keys}


WRONG = [  # in any ds_config, for whoever reads it; the words of the message between bars
    ({"train_batchsize": 3}, "train_batchsize|'train_batch_size'"),
    ([1], "JSON object|list"),
    ({"scheduler": {"type": "x"}}, "scheduler|--schedule"),
    ({"optimizer": {"type": "Adam"}}, "optimizer|decay groups"),
    ({"fp16": {"enabled": True}}, "fp16|bf16"),
    ({"hybrid_engine": {"enabled": True}}, "hybrid_engine: not taken here"),
    ({"comet": {"enabled": True, "project": "x"}}, "comet: not taken here|--logging.wandb"),
    ({"progressive_layer_drop": {"enabled": True}}, "progressive_layer_drop: not taken here"),
    ({"dataloader_drop_last": True}, "dataloader_drop_last: not taken here|--data."),
    (zero(stage=2, cpu_offload=True), 'zero_optimization.cpu_offload|"offload_optimizer": {"device"'),
    (zero(stage=2, offload_param={"device": "cpu"}), "offload_param|stage 3"),
    (zero(stage=0, offload_optimizer={"device": "cpu"}), "offload_optimizer|stage 1"),
    (zero(stage=2, offload_optimizer={"device": "nvme"}), "offload_optimizer|nvme needs stage 3"),
    (zero(stage=2, offload_optimizer={"device": "disk"}), "offload_optimizer.device|'disk'"),
    ({"prescale_gradients": True, **zero(stage=2)}, "prescale_gradients|stage 2"),
    ({"gradient_predivide_factor": 2, **zero(stage=2)}, "gradient_predivide_factor|stage 2"),
    ({"activation_checkpointing": {"contiguous_memory_optimization": True}}, "contiguous_memory_optimization"),
    ({"activation_checkpointing": {"cpu_checkpointing": True}}, "cpu_checkpointing|offload"),
    (zero(allgather_bucket_size=1001), "zero_optimization.allgather_bucket_size|even"),
    (zero(sub_group_size="auto"), 'sub_group_size|"auto"'),
    (zero(stage3_max_reuse_distance="auto"), 'stage3_max_reuse_distance|"auto" is not known'),
    # values of another kind than their key takes
    ({"zero_optimization": 2}, "zero_optimization: expected an object|found 2"),
    ({"bf16": True}, 'bf16: expected an object|{"enabled": "auto"}|found true'),
    ({"flops_profiler": True}, "flops_profiler: expected an object"),
    (zero(stage=2, offload_optimizer="cpu"), 'zero_optimization.offload_optimizer|{"device": "cpu"}|\'cpu\''),
    (zero(stage=4), "zero_optimization.stage: expected 0, 1, 2 or 3, found 4"),
    (zero(stage=True), "zero_optimization.stage: expected 0, 1, 2 or 3, found true"),
    (zero(stage="2"), "zero_optimization.stage|write 2 without quotes"),
    (zero(stage=2, reduce_bucket_size="5e8"), "zero_optimization.reduce_bucket_size|'5e8'|write 5e8 without quotes"),
    (zero(stage3_param_persistence_threshold="1e5"), "stage3_param_persistence_threshold|write 1e5 without quotes"),
    (zero(sub_group_size="1e9"), "zero_optimization.sub_group_size|write 1e9 without quotes"),
    (zero(reduce_bucket_size=0.5), "reduce_bucket_size|whole number|0.5"),
    (zero(reduce_bucket_size=True), "reduce_bucket_size|true"),
    (zero(overlap_comm="True"), "overlap_comm|write true without quotes"),
    (zero(offload_param={"pin_memory": 1}), "zero_optimization.offload_param.pin_memory|true or false"),
    ({"gradient_clipping": "one"}, "gradient_clipping|a number, 0 or more or \"auto\"|'one'"),
    ({"gradient_clipping": float("nan")}, "gradient_clipping|NaN"),
    ({"train_batch_size": "64"}, "train_batch_size|write 64 without quotes"),
    ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu|positive|found 0"),
    ({"bf16": {"enabled": "yes"}}, "bf16.enabled|'yes'"),
    ({"steps_per_print": 0}, "steps_per_print|positive"),
    ({"communication_data_type": "fp8"}, "communication_data_type|fp32, fp16 or bf16|'fp8'"),
]
WRONG_FOR_DEEPSPEED = [
    (zero(reduce_bucket=4), "zero_optimization.reduce_bucket|'reduce_bucket_size'"),
    (zero(stage=3, offload_optimizer={"devise": "cpu"}), "offload_optimizer.devise"),
    (zero(stage=2, offload_optimizer={"device": "cpu", "ratio": 0.5}), "Stage 3"),
    (zero(stage=2, sub_group_size="many"), "zero_optimization.sub_group_size: DeepSpeed does not take it|'many'"),
]


@pytest.mark.parametrize(
    ("read", "content", "words"),
    [(read, *row) for read in (read_ds_config, read_for_the_planner) for row in WRONG]
    + [(read_ds_config, *row) for row in WRONG_FOR_DEEPSPEED],
)
def test_named_errors_of_ds_config_files(tmp_path, read, content, words):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert all(word in str(caught.value) for word in ["bad.json", *words.split("|")]), caught.value


@pytest.mark.parametrize("read", [read_ds_config, read_for_the_planner], ids=["run", "planner"])
def test_null_means_absent_and_round_floats_are_whole_numbers(tmp_path, read):
    path = tmp_path / "ok.json"
    zero = {"stage": 2, "offload_optimizer": None, "reduce_bucket_size": 5e8, "offload_param": {"nvme_path": None}}
    path.write_text(json.dumps({"train_batch_size": 64.0, "bf16": None, "optimizer": None, "zero_optimization": zero}))
    content = read(path)
    assert content == {
        "train_batch_size": 64,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 500_000_000, "offload_param": {}},
    }
    assert isinstance(content["train_batch_size"], int)
    assert choices(content, 2) == {"zero": 2, "global_batch": 64}
    assert "offload_optimizer" not in solved(content).deepspeed["zero_optimization"]


def test_what_is_off_is_no_mistake(tmp_path):
    path = tmp_path / "ok.json"
    off = {"fp16": {"enabled": False}, "sparse_gradients": False, "dataloader_drop_last": False, "comet": {}}
    path.write_text(json.dumps({**off, "train_batch_size": 4, "zero_optimization": {"cpu_offload": False}}))
    # DeepSpeed refuses some of these names whatever their value
    assert not off.keys() & solved(read_ds_config(path)).deepspeed.keys()


def test_deepspeeds_other_keys_are_not_called_unknown():
    """Every name that DeepSpeed's reader looks up at the top level is either taken or refused with a reason."""
    from deepspeed.runtime import config

    asked = set()

    class Recording(dict):
        def get(self, key, default=None):
            asked.add(key)
            return super().get(key, default)

        def __contains__(self, key):
            asked.add(key)
            return super().__contains__(key)

    config.DeepSpeedConfig(Recording(train_batch_size=1))
    assert {"zero_optimization", "hybrid_engine", "comet"} <= asked  # it records what it should
    assert asked - DsConfig.model_fields.keys() - REFUSED.keys() == set()


@pytest.mark.parametrize(
    ("ds", "precision", "on_gpu", "expected"),
    [
        ({}, "auto", False, "fp32"),
        ({}, "auto", True, "bf16"),
        ({"bf16": {"enabled": False}}, "auto", True, "fp32"),
        ({"bf16": {"enabled": True}}, "auto", False, "bf16"),
        ({"bf16": {"enabled": "auto"}}, "amp", True, "amp"),
        ({"torch_autocast": {"enabled": True}}, "auto", False, "amp"),
    ],
)
def test_precision(ds, precision, on_gpu, expected):
    engine_config = solved(ds, on_gpu=on_gpu, global_batch=2, precision=precision)
    assert engine_config.precision == expected
    assert engine_config.deepspeed["bf16"]["enabled"] is (expected == "bf16")
    assert engine_config.deepspeed.get("torch_autocast", {}).get("enabled", False) is (expected == "amp")


def test_recomputing_by_deepspeed_needs_a_policy_that_recomputes():
    section = {"activation_checkpointing": {"partition_activations": True}}
    with pytest.raises(ConfigError, match=r"model\.checkpointing is none"):
        solved(section, global_batch=2)
    assert solved(section, global_batch=2, model={"checkpointing": "every:2"}).batch.global_batch == 2


def test_a_threshold_that_would_partition_nothing_is_refused():
    engine_config = solved(zero(stage=3, stage3_param_persistence_threshold=5000), global_batch=2)
    with pytest.raises(ConfigError, match=r"persistence_threshold 5000.*1000 elements"):
        with_buckets(engine_config, 1234, 1000)


@pytest.mark.parametrize(
    ("asked", "parameters", "size", "told"),
    [(500_000_000, 1235, 1236, "1236 (lowered from 5e+08"), ("auto", 1234, 1234, "1234")],
)
def test_buckets_fit_the_model(asked, parameters, size, told):
    engine_config = solved(zero(stage=2, reduce_bucket_size=asked), global_batch=2)
    section, filled = with_buckets(engine_config, parameters, 1000)
    assert section["reduce_bucket_size"] == size
    assert str(filled["zero_optimization.reduce_bucket_size"]).startswith(told)
