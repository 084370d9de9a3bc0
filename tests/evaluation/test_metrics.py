"""Retrieval and zero-shot measures on features, against slow references and open_clip's own code."""

from __future__ import annotations

import itertools
from pathlib import Path

import open_clip
import pytest
import torch
from torch.nn import functional as F

from disco_ds.config.schema import EvaluationConfig
from disco_ds.evaluation.retrieval import GRID, NonFiniteFeatures, retrieval_metrics, to_grid, top_texts
from disco_ds.evaluation.zeroshot import (
    class_indices,
    class_ranks,
    count_hits,
    load_classes,
    load_templates,
    name_twins,
    zero_shot_metrics,
    zero_shot_weights,
)
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.towers import TinyTowers, exact_similarity, slow_ranks, slow_retrieval, tokenize


def class_hits(image, weights, labels, **options):
    return count_hits(*class_ranks(image, weights, labels, **options), len(weights))


def features(seed: int, images: int, texts_of: list[int], dim: int, noise: float = 1.0):
    """Random image and text features that belong together, and the image of each text."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(images, dim, generator=generator)
    owner = torch.tensor([i for i, count in enumerate(texts_of) for _ in range(count)])
    owner = owner[torch.randperm(len(owner), generator=generator)]
    text = image[owner] + noise * torch.randn(len(owner), dim, generator=generator)
    return image, text, owner


class TestRetrieval:
    @pytest.mark.parametrize("several", [False, True])
    def test_equals_plain_loops(self, seed, several):
        counts = [1 + (seed + i) % 4 for i in range(23)] if several else [1] * 23
        image, text, owner = features(seed, 23, counts, 5)
        found = retrieval_metrics(image, text, image_of_text=owner)
        expected = slow_retrieval(exact_similarity(image, text), owner.tolist())
        assert {name: found[name] for name in expected} == expected

    def test_equals_open_clip(self, seed):
        train = pytest.importorskip("open_clip_train.train")
        image, text, owner = features(seed, 300, [1] * 300, 32, noise=1.5)
        text = text[owner.argsort()]
        theirs = train.get_clip_metrics(to_grid(image).double(), to_grid(text).double(), 1.0)
        ours = retrieval_metrics(image, text)
        assert {name: ours[name] for name in theirs} == pytest.approx(theirs, abs=1e-12)

    def test_equals_the_rule_of_clip_benchmark(self, seed):
        """recall@k by clip_benchmark's own steps (zeroshot_retrieval.py): topk, one-hot, count the positives."""
        image, text, owner = features(seed, 60, [1 + (seed + i) % 5 for i in range(60)], 16, noise=1.5)
        scores = to_grid(text).double() @ to_grid(image).double().T
        positive = torch.zeros(scores.shape, dtype=torch.bool)
        positive[torch.arange(len(owner)), owner] = True
        found = retrieval_metrics(image, text, image_of_text=owner)
        for k in (1, 5, 10):
            for name, score, right in (("text_to_image", scores, positive), ("image_to_text", scores.T, positive.T)):
                retrieved = F.one_hot(score.topk(k, dim=1)[1], num_classes=score.shape[1])
                recall = (right[:, None, :] * retrieved).sum((1, 2)) > 0
                assert found[f"{name}_R@{k}"] == pytest.approx(float(recall.double().mean())), (name, k)

    def test_block_size_dtype_order_and_duplicates_change_nothing(self, seed):
        # many equal features: a similarity with another last bit in another block would break their ties otherwise
        image, text, owner = features(seed, 40, [2] * 40, 7)
        text[::3] = text[0]
        image[5:9] = image[4]
        whole = retrieval_metrics(image, text, image_of_text=owner)
        for block in (1, 7, 1000):
            assert retrieval_metrics(image, text, image_of_text=owner, block=block) == whole
        assert retrieval_metrics(image.double() * 3, text.double(), image_of_text=owner) == whole
        shuffled = torch.randperm(40)
        assert retrieval_metrics(image[shuffled], text, image_of_text=shuffled.argsort()[owner]) == whole

    def test_memory_is_a_block_of_rows(self):
        """Never images x texts: with twice as many of both the peak is twice, not four times."""
        peaks, block, dim = [], 16, 8
        for count in (2000, 4000):
            image, text = torch.randn(count, dim), torch.randn(count, dim)
            with LiveBytes() as live:
                retrieval_metrics(image, text, block=block)
            peaks.append(live.peak)
            assert live.peak < 2 * block * count * 8 + 16 * count * dim * 8
        assert peaks[1] < 2.1 * peaks[0]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_features_are_ranked_as_they_are(self, seed, dtype):
        image, text, owner = features(seed, 30, [1] * 30, 8)
        image, text = image.to(dtype), text.to(dtype)
        exact = retrieval_metrics(image.float(), text.float(), image_of_text=owner)
        assert retrieval_metrics(image, text, image_of_text=owner) == exact

    @pytest.mark.parametrize("value", [1.0, 0.0])
    def test_constant_features_rank_last(self, value):
        constant = torch.full((30, 4), value)
        metrics = retrieval_metrics(constant, constant)
        assert metrics["image_to_text_R@10"] == metrics["text_to_image_R@10"] == 0
        assert metrics["image_to_text_mean_rank"] == metrics["text_to_image_median_rank"] == 30

    def test_a_tie_with_the_right_one_counts_against_the_model(self):
        image = torch.eye(3)
        text = torch.stack([image[0], image[0], image[2]])  # the texts of images 0 and 1 are the same
        metrics = retrieval_metrics(image, text)
        assert metrics["image_to_text_R@1"] == pytest.approx(1 / 3)
        assert metrics["image_to_text_mean_rank"] == pytest.approx((2 + 3 + 1) / 3)

    def test_equal_captions_of_one_image_do_not_compete(self):
        image = torch.eye(2)
        text = image[[0, 0, 0, 1]]
        assert retrieval_metrics(image, text, image_of_text=[0, 0, 0, 1])["image_to_text_R@1"] == 1

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("where", [0, 1])
    def test_non_finite_features_are_an_error(self, value, where):
        pair = [torch.randn(6, 4), torch.randn(6, 4)]
        pair[where][3, 1] = value
        with pytest.raises(NonFiniteFeatures, match="1 of 6"):
            retrieval_metrics(*pair)

    def test_chance_is_what_random_orders_score(self):
        owner = torch.tensor([0, 0, 0, 1, 2, 2])
        image, text = torch.randn(3, 4), torch.randn(6, 4)
        found = retrieval_metrics(image, text, image_of_text=owner)
        orders = list(itertools.permutations(range(6)))
        for k in (1, 5, 10):
            hits = sum(any(owner[t] == i for t in order[:k]) for order in orders for i in range(3))
            assert found[f"image_to_text_R@{k}_chance"] == pytest.approx(hits / (3 * len(orders)))
            assert found[f"text_to_image_R@{k}_chance"] == pytest.approx(min(k, 3) / 3)

    @pytest.mark.parametrize(("images", "owner", "message"), [
        (3, None, "image_of_text"), (4, [0, 1, 2, 2], "1 of 4 images have no text"), (2, [0, 1, 2, 1], "from 0 to 2"),
        (4, [0, 1, 2], r"expected \(4,\)"), (0, None, "no images"),
    ])  # fmt: skip
    def test_what_does_not_fit_is_named(self, images, owner, message):
        with pytest.raises(ValueError, match=message):
            retrieval_metrics(torch.randn(images, 4), torch.randn(4, 4), image_of_text=owner)

    def test_the_grid_is_fine_and_its_sums_are_exact(self, seed):
        unit = F.normalize(torch.randn(50, 768, generator=torch.Generator().manual_seed(seed)).double(), dim=-1)
        grid = to_grid(unit)
        assert float((grid.double() / GRID - unit).abs().max()) <= 0.5 / GRID
        one, two = grid[0].tolist(), grid[1].tolist()
        assert int(grid[0].double() @ grid[1].double()) == sum(a * b for a, b in zip(one, two, strict=True))
        assert sum(a * a for a in one) < 2**53

    def test_top_texts_are_sorted_and_ties_keep_their_order(self):
        image = torch.tensor([[1.0, 0.0]])
        text = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.6, 0.8], [1.0, 0.0]])
        indices, similarity = top_texts(to_grid(image), to_grid(text), 3)
        assert indices.tolist() == [[1, 3, 2]]
        assert similarity.tolist()[0] == pytest.approx([1, 1, 0.6], abs=1e-7)


class TestZeroShot:
    classes = ("cat", "dog", "red fox", "owl", "bee", "ant", "cow")
    templates = ("a photo of a {}.", "the {} in the {}", "{}")

    def encode(self, tokens):
        with torch.no_grad():
            # of unequal lengths: without normalising each, the longer ones would rule the mean over templates
            return TinyTowers(3).eval()(None, tokens).text_features * (1 + tokens.sum(1, keepdim=True) % 7)

    @pytest.mark.parametrize("batch", [1, 4, 1000])
    def test_weights_are_the_normalised_mean_over_templates(self, batch):
        weights = zero_shot_weights(self.encode, tokenize, self.classes, self.templates, batch=batch)
        for name, weight in zip(self.classes, weights, strict=True):
            prompts = [template.replace("{}", name) for template in self.templates]
            units = [F.normalize(self.encode(tokenize([prompt]))[0], dim=0) for prompt in prompts]
            assert torch.allclose(weight, F.normalize(sum(units) / len(units), dim=0), atol=1e-6)

    @pytest.mark.parametrize("block", [1, 7, 4096])
    def test_accuracies_equal_plain_loops(self, seed, block):
        generator = torch.Generator().manual_seed(seed)
        image, weights = (torch.randn(n, 6, generator=generator) for n in (40, 7))
        labels = torch.randint(-1, 6, (40,), generator=generator)  # class 6 has no sample, -1 no label
        found = zero_shot_metrics(class_hits(image, weights, labels, block=block))
        rows = [row for row, label in zip(exact_similarity(image, weights), labels, strict=True) if label >= 0]
        right = [int(label) for label in labels if label >= 0]
        ranks = slow_ranks(rows, [[label] for label in right])
        assert found["zero_shot_samples"] == len(ranks)
        assert found["zero_shot_top1"] == sum(rank == 1 for rank in ranks) / len(ranks)
        assert found["zero_shot_top5"] == sum(rank <= 5 for rank in ranks) / len(ranks)
        by_class = [[rank == 1 for rank, own in zip(ranks, right, strict=True) if own == label] for label in range(7)]
        means = [sum(hits) / len(hits) for hits in by_class if hits]
        assert found["zero_shot_mean_per_class"] == pytest.approx(sum(means) / len(means))
        assert found["zero_shot_top1_chance"] == pytest.approx(1 / 7)

    def test_order_of_classes_does_not_matter(self, seed):
        generator = torch.Generator().manual_seed(seed)
        image, weights = (torch.randn(n, 6, generator=generator) for n in (40, 7))
        labels, order = torch.randint(7, (40,), generator=generator), torch.randperm(7, generator=generator)
        turned = class_hits(image, weights[order], order.argsort()[labels])
        assert torch.equal(turned, class_hits(image, weights, labels)[order])

    def test_labels_by_name_and_by_number(self):
        classes = ["cat", "Dog", "7", "dog"]
        labels = ["dog", "Dog", "DOG", " cat ", "0", "7", "3", "4", "-1", "cow", "", None]
        indices, unknown = class_indices(labels, classes)
        assert indices == [3, 1, 1, 0, 0, 2, 3, -1, -1, -1, -1, -1]
        assert unknown == ["4", "-1", "cow"]

    def test_names_of_open_clips_classes_and_templates(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        config = EvaluationConfig(classes=Path("imagenet"), templates=Path("openai"))
        classes, templates = load_classes(config), load_templates(config)
        assert (len(classes), len(templates)) == (1000, 80)

        class Model:
            def encode_text(_, tokens, normalize):
                return F.normalize(self.encode(tokens), dim=-1)

        some = slice(100, 104)
        theirs = open_clip.build_zero_shot_classifier(
            Model(), tokenize, open_clip.IMAGENET_CLASSNAMES[some], open_clip.OPENAI_IMAGENET_TEMPLATES
        )
        ours = zero_shot_weights(self.encode, tokenize, classes[some], templates)
        assert torch.allclose(ours, theirs.T, atol=1e-6)
        (tmp_path / "imagenet").write_text("cat\ndog\n")  # a file of that name is the file
        assert load_classes(config) == ["cat", "dog"]

    def test_classes_of_one_name_stand_in_their_order(self):
        classes = ["missile", "cat", "missile", "missile"]
        image, weights = torch.eye(4)[[0, 0, 0, 1]], torch.eye(4)[[0, 1, 0, 2]]
        labels = torch.tensor([0, 2, 3, 1])
        known, ahead = class_ranks(image, weights, labels, twins=name_twins(classes))
        assert known.tolist() == labels.tolist()
        assert ahead.tolist() == [0, 1, 2, 0]
        assert class_indices(["missile"], classes) == ([0], [])

    def test_a_tie_is_counted_for_the_wrong_class(self):
        vector = torch.rand(1, 5) + 0.1
        assert class_ranks(vector.repeat(6, 1), vector.repeat(3, 1), torch.arange(6) % 3)[1].tolist() == [2] * 6
