"""The order of the stream: the same on any number of ranks and workers, resumed anywhere, whole in every pass."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch

from disco_ds.data.cursor import default_lanes, merge_states
from disco_ds.data.faults import Tally
from disco_ds.data.lanes import draw
from disco_ds.data.shards import read_shard
from disco_ds.data.stream import TrainStream
from disco_ds.errors import DataError
from tests.helpers.ranks import ROOT
from tests.helpers.shards import data_config, make_shards, noisy, to_tensor, train_stream, write_shard

BATCH = 24


def streams(
    config: Any, world_size: int = 1, cursor: Any = None, batch: int = BATCH, **options: Any
) -> list[TrainStream]:
    options = {"seed": 5, "transform": noisy, "world_size": world_size, "cursor": cursor, **options}
    return [train_stream(config, batch, rank=rank, **options) for rank in range(world_size)]


def take(ranks: list[TrainStream], batches: int) -> list[list[tuple[str, float, str]]]:
    """``batches`` global batches as sorted lists of (key, pixel, text)."""
    taken = []
    for _ in range(batches):
        rows = []
        for stream in ranks:
            batch = next(stream)
            assert batch.images.dtype == torch.float32
            assert batch.texts.dtype == torch.int64
            texts = ["".join(map(chr, row)) for row in batch.texts.tolist()]
            rows += list(zip(batch.keys, batch.images[:, :, 0, 0].sum(1).tolist(), texts, strict=True))
        taken.append(sorted(rows))
    return taken


def stop(ranks: list[TrainStream]) -> None:
    for stream in ranks:
        stream.close()


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    make_shards(folder, [11, 7, 23, 5, 16, 9, 13])
    return str(folder)


def test_order_does_not_depend_on_ranks_or_workers(shards):
    expected = take(streams(data_config(shards, lanes=8)), 9)
    for world_size, workers in [(2, 0), (4, 0), (8, 0), (1, 1), (1, 3), (2, 3)]:
        ranks = streams(data_config(shards, lanes=8, workers=workers), world_size)
        assert take(ranks, 9) == expected, (world_size, workers)
        stop(ranks)


def test_batch_order_within_a_rank_is_by_position(shards):
    """Workers' parts are put where they belong, so that even the order inside a rank's batch is fixed."""
    plain = next(streams(data_config(shards, lanes=6))[0])
    with_workers = streams(data_config(shards, lanes=6, workers=2))
    batch = next(with_workers[0])
    assert batch.keys == plain.keys
    assert torch.equal(batch.images, plain.images)
    stop(with_workers)


def test_lanes_need_not_divide_the_batch(shards):
    expected = take(streams(data_config(shards, lanes=10)), 6)
    assert take(streams(data_config(shards, lanes=10), 2), 6) == expected


@pytest.mark.parametrize("fields", [{}, {"shuffle": 500}, {"shuffle": 1}, {"lanes": 4}, {"lanes": 48}])
def test_every_pass_holds_every_sample_once(shards, fields):
    """84 samples. The slices of three passes are each lane's first entries; what the lane gives is theirs."""
    (stream,) = streams(data_config(shards, **{"lanes": 12, **fields}))
    count = stream._head["lanes"]
    seen: Counter[str] = Counter()
    for number, lane in stream._plan._lanes(list(range(count)), Tally()).items():
        (blocks,) = lane.blocks
        slices, entry = blocks.slices, 0
        expected: Counter[str] = Counter()
        while slices.pass_of(number, entry) < 3:
            part = slices.entry(number, entry)
            expected.update(raw.key for raw in read_shard(part.shard, (), part.first, part.step))
            entry += 1
        found = Counter(blocks.next()[0].key for _ in range(expected.total()))
        assert found == expected
        seen.update(found)
    assert len(seen) == 84
    assert set(seen.values()) == {3}


def test_samples_are_seen_equally_often(shards):
    keys = Counter(key for batch in take(streams(data_config(shards, lanes=8)), 70) for key, _, _ in batch)
    assert len(keys) == 84
    assert min(keys.values()) >= 17  # 20 on average; lanes run apart a little
    assert max(keys.values()) <= 23


def test_seeds_and_passes_differ(shards):
    first = take(streams(data_config(shards, lanes=4)), 3)
    assert first != take(streams(data_config(shards, lanes=4), seed=6), 3)
    (stream,) = streams(data_config(shards, lanes=1), batch=84)
    passes = [next(stream).keys for _ in range(2)]
    assert len(set(passes[0])) == 84
    assert sorted(passes[0]) == sorted(passes[1])
    assert passes[0] != passes[1]


@pytest.mark.parametrize("broken_at", [0, 1, 4, 11])
@pytest.mark.parametrize(("before", "after"), [((1, 0), (1, 0)), ((2, 0), (4, 0)), ((4, 0), (1, 2)), ((1, 3), (2, 0))])
def test_resume_goes_on_exactly(shards, before, after, broken_at):
    """Mid-shard and mid-block, at the same and another world size, with what workers had read ahead thrown away."""
    if broken_at == 1 and (before[1] or after[1]):
        pytest.skip("worker start-up costs seconds; three moments are enough with workers")
    whole = take(streams(data_config(shards, lanes=8)), broken_at + 5)
    ranks = streams(data_config(shards, lanes=8, workers=before[1]), before[0])
    assert take(ranks, broken_at) == whole[:broken_at]
    cursor = json.loads(json.dumps(merge_states([stream.state() for stream in ranks])))
    stop(ranks)
    assert cursor["position"] == broken_at * BATCH
    resumed = streams(data_config(shards, lanes=8, workers=after[1]), after[0], cursor)
    assert take(resumed, 5) == whole[broken_at:]
    stop(resumed)


def test_resume_with_another_batch_goes_on_at_the_next_sample(shards):
    whole = [row for batch in take(streams(data_config(shards, lanes=8)), 6) for row in batch]
    ranks = streams(data_config(shards, lanes=8))
    first = [row for batch in take(ranks, 2) for row in batch]
    rest = take(streams(data_config(shards), 4, merge_states([ranks[0].state()]), batch=32), 3)
    assert sorted(first + [row for batch in rest for row in batch]) == sorted(whole)


def test_cursor_of_something_else_is_refused(shards, tmp_path):
    ranks = streams(data_config(shards, lanes=8))
    take(ranks, 1)
    cursor = merge_states([ranks[0].state()])
    with pytest.raises(DataError, match="seed was 5 and is now 6"):
        streams(data_config(shards), cursor=cursor, seed=6)
    with pytest.raises(DataError, match=r"data\.lanes was 8 and is now 4"):
        streams(data_config(shards, lanes=4), cursor=cursor)
    with pytest.raises(DataError, match=r"data\.shuffle was 64"):
        streams(data_config(shards, shuffle=65), cursor=cursor)
    make_shards(tmp_path, [3, 3])
    with pytest.raises(DataError, match=r"shards of data\.train"):
        streams(data_config(str(tmp_path)), cursor=cursor)
    with pytest.raises(ValueError, match="fixed by the checkpoint; use a divisor of 8"):
        streams(data_config(shards), 3, cursor)


def test_data_may_move_as_a_whole(tmp_path):
    make_shards(tmp_path / "a", [9, 8])
    make_shards(tmp_path / "b", [9, 8])
    ranks = streams(data_config(str(tmp_path / "a"), lanes=4))
    take(ranks, 1)
    moved = streams(data_config(str(tmp_path / "b")), cursor=merge_states([ranks[0].state()]))
    assert take(moved, 2) == take(ranks, 2)


def test_states_of_different_moments_are_refused(shards):
    ranks = streams(data_config(shards, lanes=8), 2)
    next(ranks[0])
    with pytest.raises(ValueError, match="not of one moment"):
        merge_states([stream.state() for stream in ranks])
    next(ranks[1])
    with pytest.raises(ValueError, match="states of 4 of 8 lanes"):
        merge_states([ranks[0].state()])


def test_uneven_batches_and_lanes_are_refused(shards):
    with pytest.raises(ValueError, match="global_batch 25 is not a multiple of the 2 ranks"):
        streams(data_config(shards), 2, batch=25)
    with pytest.raises(ValueError, match=r"data\.lanes 7 is not a multiple of the 2 ranks"):
        streams(data_config(shards, lanes=7), 2)


def test_default_lanes_suit_every_divisor():
    assert default_lanes(256, 1) == default_lanes(256, 8) == 64
    assert default_lanes(448, 7) == 448
    for batch, world_size in [(1000, 5), (4096, 96 // 3), (30720, 24), (7, 7)]:
        lanes = default_lanes(batch, world_size)
        assert lanes % world_size == 0
        assert batch % lanes == 0 or batch % world_size


def test_weights_give_each_source_its_share(tmp_path):
    make_shards(tmp_path / "a", [50, 50], prefix="a")
    make_shards(tmp_path / "b", [20], start=1000, prefix="b")
    make_shards(tmp_path / "c", [5], start=2000, prefix="c")
    entries = [str(tmp_path / name) for name in "abc"]
    config = data_config(entries, weights=[1, 3, 0], lanes=8)
    batches = take(streams(config), 40)
    shares = Counter(key[0] for batch in batches for key, _, _ in batch)
    assert shares["c"] == 0
    assert abs(shares["b"] / 960 - 0.75) < 0.05  # 3.6 standard deviations; the seed is fixed
    assert take(streams(config, 4), 40) == batches
    ranks = streams(config, 2)
    take(ranks, 7)
    cursor = merge_states([stream.state() for stream in ranks])
    assert take(streams(config, 4, cursor), 5) == batches[7:12]


def test_one_of_several_captions_is_chosen_by_seed(tmp_path):
    from tests.helpers.shards import json_sample

    write_shard(tmp_path / "s.tar", {f"k{i}": json_sample(i, ["one", " two ", ""]) for i in range(6)})
    config = data_config(str(tmp_path), caption_key="json:captions", lanes=2)
    batches = take(streams(config, batch=12), 6)
    texts = Counter(text.strip() for batch in batches for _, _, text in batch)
    assert set(texts) == {"one", "two"}
    assert min(texts.values()) > 18
    assert take(streams(config, 2, batch=12), 6) == batches


def test_training_process_generators_are_left_alone(shards):
    import random

    import numpy as np

    def draws():
        return float(torch.rand(())), random.random(), float(np.random.rand())

    for workers in (0, 1):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(3)
        (stream,) = streams(data_config(shards, lanes=4, workers=workers))
        next(stream)
        stream.close()
        found = draws()
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(3)
        assert found == draws(), workers


def test_gzip_and_pipes_read_like_files(shards, tmp_path):
    import gzip
    from pathlib import Path

    plain = sorted(Path(shards).glob("*.tar"))
    for path in plain:
        (tmp_path / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    expected = take(streams(data_config(shards, lanes=4), transform=to_tensor), 5)
    pixels = [[row[1:] for row in batch] for batch in expected]
    for entry in (str(tmp_path), f"pipe:cat {shards}/s{{000..006}}.tar"):
        found = take(streams(data_config(entry, lanes=4), transform=to_tensor), 5)
        assert [sorted(row[1:] for row in batch) for batch in found] == [sorted(batch) for batch in pixels], entry


@pytest.mark.parametrize(("fields", "expected"), [
    ({"lanes": 12}, "0d6c2531541c7351"),
    ({"lanes": 3, "shuffle": 9}, "15b7b40e2ffec41c"),
    ({"lanes": 6, "weights": [1, 2]}, "65dd6c47e103223f"),
])  # fmt: skip
def test_order_and_cursor_are_those_of_release_0_1(tmp_path, fields, expected):
    """Order within lanes, slices of shards, sources by weight; so that its checkpoints go on."""
    make_shards(tmp_path / "a", [11, 7, 23, 5, 16])
    make_shards(tmp_path / "b", [9, 30], start=200, prefix="b")
    (stream,) = streams(data_config([str(tmp_path / "a"), str(tmp_path / "b")], **fields))
    keys = [next(stream).keys for _ in range(9)]
    found = hashlib.sha256(json.dumps([keys, merge_states([stream.state()])], sort_keys=True).encode())
    assert found.hexdigest()[:16] == expected


def test_draws_are_the_same_for_ever():
    """The order of data in old checkpoints hangs on this."""
    rng = draw(0, "pass", "", 0)
    order = list(range(10))
    rng.shuffle(order)
    assert (order, draw(1, "sample", 2, 3).getrandbits(63)) == ([5, 0, 2, 7, 1, 3, 9, 8, 4, 6], 5295855997877734443)


def test_a_worker_that_fails_says_so(tmp_path):
    make_shards(tmp_path, [5])
    config = data_config(str(tmp_path), workers=1, lanes=1)
    (stream,) = streams(config, tokenizer=failing_tokenizer)
    with pytest.raises(RuntimeError, match="tokenizer broke"):
        next(stream)
    stream.close()


PROGRAM_THAT_LEAVES_WORKERS = """
import sys
from tests.data.test_stream import data_config, streams

if __name__ == "__main__":
    kept = streams(data_config(sys.argv[1], workers=2, lanes=8))
    print(len(next(kept[0]).keys))
    raise RuntimeError("in the middle of a run")
"""


def test_a_program_ends_though_its_workers_are_alive(shards, tmp_path):
    """Workers outlive SIGTERM, which is all that multiprocessing sends them at the end, and it waits for them."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM_THAT_LEAVES_WORKERS)
    ended = subprocess.run(
        [sys.executable, str(program), shards],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout) == (1, f"{BATCH}\n"), ended.stderr
    assert "in the middle of a run" in ended.stderr


def failing_tokenizer(texts):
    raise RuntimeError("tokenizer broke")


def test_a_run_file_of_release_0_1_may_name_its_indices(shards):
    assert data_config(shards, index="/indices") == data_config(shards)
