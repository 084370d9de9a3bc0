"""The held-out reader: every sample once over any number of ranks and workers."""

from __future__ import annotations

import pytest
import torch

from disco_ds.errors import DataError
from tests.helpers.shards import heldout, json_sample, letters, make_shards, sample, write_shard


@pytest.mark.parametrize("sizes", [[19], [1, 2], [5, 0, 7, 3], [2] * 17])
@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 0), (3, 0), (8, 0), (2, 2)])
def test_every_sample_once_and_in_order_of_index(tmp_path, sizes, world_size, workers):
    if workers and len(sizes) != 4:
        pytest.skip("worker start-up costs; one shape is enough")
    make_shards(tmp_path, sizes)
    ranks = [heldout(str(tmp_path), rank, world_size, workers=workers) for rank in range(world_size)]
    rows = [
        (int(i), key, image)
        for rank in ranks
        for batch in rank
        for i, key, image in zip(batch.index, batch.keys, batch.images, strict=True)
    ]
    rows.sort(key=lambda row: row[0])
    assert len({index for index, _, _ in rows}) == sum(sizes)
    assert [key.split("#")[1] for _, key, _ in rows] == [f"{n:06d}" for n in range(sum(sizes))]
    assert [int(image[2, 0, 0]) for _, _, image in rows] == list(range(sum(sizes)))
    assert all(1 <= len(batch.keys) <= 4 for rank in ranks for batch in rank)
    if sum(sizes) > 3 * world_size:
        counts = [sum(len(batch.keys) for batch in rank) for rank in ranks]
        assert max(counts) - min(counts) <= max(4, max(sizes))


def test_captions_and_labels(tmp_path):
    write_shard(
        tmp_path / "a.tar",
        {"k": {**json_sample(0, ["one", " two"]), "cls": b" dogs \n"}, "l": json_sample(1, ["three"])},
    )
    (batch,) = heldout(str(tmp_path), caption_key="json:captions")
    assert batch.captions == [["one", "two"], ["three"]]
    assert batch.labels == ["dogs", None]
    assert torch.equal(batch.texts, letters(["one", "three"]))
    write_shard(tmp_path / "a.tar", {"k": sample(0, cls=b"7")})
    assert heldout(str(tmp_path))[0].labels == ["7"]


def test_no_held_out_data():
    with pytest.raises(DataError, match=r"data\.val is not set"):
        heldout(None)
    with pytest.raises(DataError, match=r"data\.val: '/nowhere\.tar' does not exist"):
        heldout("/nowhere.tar")
