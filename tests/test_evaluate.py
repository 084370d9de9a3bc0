"""Evaluation on one process, against slow references and open_clip's own code."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from disco_ds.config import EvaluationConfig
from disco_ds.errors import ConfigError, DataError
from disco_ds.evaluate import check_evaluation, evaluate, format_result
from disco_ds.evaluation.retrieval import GRID, NonFiniteFeatures, retrieval_metrics, to_grid, top_texts
from disco_ds.evaluation.zeroshot import class_hits, class_indices, zero_shot_metrics, zero_shot_weights
from tests.towers import SIDE, TinyTowers, batched, make_samples, slow_ranks, slow_retrieval, tokenize


@pytest.fixture
def seed() -> int:
    """A fresh one each time; pytest shows it when a test fails."""
    return random.SystemRandom().randrange(2**31)


def features(seed: int, images: int, texts_of: list[int], dim: int, noise: float = 1.0):
    """Random image and text features that belong together, and the image of each text."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(images, dim, generator=generator)
    owner = torch.tensor([i for i, count in enumerate(texts_of) for _ in range(count)])
    owner = owner[torch.randperm(len(owner), generator=generator)]
    text = image[owner] + noise * torch.randn(len(owner), dim, generator=generator)
    return image, text, owner


def exact_similarity(image, text) -> list[list[float]]:
    """Integer dot products on the grid, as Python integers."""
    rows, columns = to_grid(image).tolist(), to_grid(text).tolist()
    return [[sum(a * b for a, b in zip(x, y, strict=True)) for y in columns] for x in rows]


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

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_features_are_ranked_as_they_are(self, seed, dtype):
        image, text, owner = features(seed, 30, [1] * 30, 8)
        image, text = image.to(dtype), text.to(dtype)
        assert retrieval_metrics(image, text, image_of_text=owner) == retrieval_metrics(
            image.float(), text.float(), image_of_text=owner
        )

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

    @pytest.mark.parametrize(
        ("images", "owner", "message"),
        [
            (3, None, "image_of_text"),
            (4, [0, 1, 2, 2], "1 of 4 images have no text"),
            (2, [0, 1, 2, 1], "from 0 to 2"),
            (4, [0, 1, 2], r"expected \(4,\)"),
            (0, None, "no images"),
        ],
    )
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
            return TinyTowers(3).eval()(None, tokens).text_features * 5  # not unit length: the weights must make it so

    @pytest.mark.parametrize("batch", [1, 4, 1000])
    def test_weights_are_the_normalised_mean_over_templates(self, batch):
        weights = zero_shot_weights(self.encode, tokenize, self.classes, self.templates, batch=batch)
        for name, weight in zip(self.classes, weights, strict=True):
            prompts = [template.replace("{}", name) for template in self.templates]
            units = [F.normalize(self.encode(tokenize([prompt]))[0], dim=0) for prompt in prompts]
            assert torch.allclose(weight, F.normalize(sum(units) / len(units), dim=0), atol=1e-6)

    def test_weights_equal_open_clips(self):
        open_clip = pytest.importorskip("open_clip")

        class Model:
            def encode_text(_, tokens, normalize):
                return F.normalize(self.encode(tokens), dim=-1)

        single = [template for template in self.templates if template.count("{}") == 1]
        theirs = open_clip.build_zero_shot_classifier(Model(), tokenize, self.classes, single)
        ours = zero_shot_weights(self.encode, tokenize, self.classes, single)
        assert torch.allclose(ours, theirs.T, atol=1e-6)

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

    def test_constant_features_score_nothing(self):
        hits = class_hits(torch.ones(20, 4), torch.ones(8, 4), torch.arange(20) % 8)
        assert zero_shot_metrics(hits)["zero_shot_top5"] == 0

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


def run(samples, size=4, model=None, **options):
    config = options.pop("config", None) or EvaluationConfig()
    return evaluate(model or TinyTowers(), batched(samples, size), tokenizer=tokenize, config=config, **options)


class TestEvaluate:
    def test_equals_the_plain_loops_on_the_models_features(self, seed):
        samples = make_samples(19, seed, captions=3)
        model = TinyTowers(seed).eval()
        with torch.no_grad():
            image = model(torch.stack([sample.image for sample in samples])).image_features
            captions = [caption for sample in samples for caption in sample.captions]
            text = model(None, tokenize(captions)).text_features
        owner = [number for number, sample in enumerate(samples) for _ in sample.captions]
        expected = slow_retrieval(exact_similarity(image, text), owner)
        for config in (EvaluationConfig(), EvaluationConfig(batch=2)):
            found = run(samples, model=TinyTowers(seed).train(), config=config).metrics
            assert {name: found[f"val/{name}"] for name in expected} == pytest.approx(expected)

    def test_batches_and_order_of_samples_change_nothing(self, seed):
        config = EvaluationConfig(classes=["thing", "other", "more"])
        samples = make_samples(17, seed, captions=2, labels=("thing", "other", "2", None))
        whole = run(samples, 17, config=config)
        for size in (1, 5):
            part = run(random.Random(seed).sample(samples, 17), size, config=config)
            assert part.metrics == whole.metrics
            assert part.per_class == whole.per_class
            assert [image.index for image in part.samples] == [image.index for image in whole.samples]
            assert [image.rank for image in part.samples] == [image.rank for image in whole.samples]

    def test_leaves_modes_gradients_and_random_states_alone(self):
        model = TinyTowers().train()
        model.visual.eval()  # a locked tower
        before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()

        def drawing():
            for batch in batched(make_samples(9, 1), 3):
                torch.rand(1), np.random.rand(), random.random()
                yield batch

        evaluate(model, drawing(), tokenizer=tokenize, config=EvaluationConfig())
        assert model.training
        assert model.text.training
        assert not model.visual.training
        assert not model.visual[2].training
        assert all(parameter.grad is None for parameter in model.parameters())
        assert torch.equal(before[0], torch.get_rng_state())
        assert np.array_equal(before[1], np.random.get_state()[1])
        assert before[2] == random.getstate()

    def test_samples_to_show(self, seed):
        samples = make_samples(30, seed, captions=2)
        result = run(samples, seed=seed)
        assert result.samples == sorted(result.samples, key=lambda image: image.index)
        assert len({image.index for image in result.samples}) == 12
        by_index = {sample.index: sample for sample in samples}
        for image in result.samples:
            assert image.captions == by_index[image.index].captions
            assert image.key == f"shard.tar#{image.index}"
            assert (image.pixels.shape, image.pixels.dtype) == ((SIDE, SIDE, 3), np.uint8)
            similarities = [caption.similarity for caption in image.top]
            assert similarities == sorted(similarities, reverse=True)
            assert all(caption.text in image.captions for caption in image.top if caption.right)
            if image.rank <= 5 and len(set(similarities)) == 5:
                assert image.top[image.rank - 1].right
            assert not any(caption.right for caption in image.top[: image.rank - 1][:5]) or len(set(similarities)) < 5
        assert [image.index for image in run(samples, seed=seed + 1).samples] != [i.index for i in result.samples]

    def test_pixels_are_the_image_before_normalising(self):
        pixels = torch.randint(0, 256, (3, 300, 150), dtype=torch.uint8)
        mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
        from disco_ds.evaluation.encode import THUMBNAIL, Thumbnails

        kept = Thumbnails(0, 1, mean, std)
        normalised = (pixels / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
        assert np.array_equal(kept._pixels(normalised[:, :100, :100]), pixels[:, :100, :100].permute(1, 2, 0).numpy())
        assert kept._pixels(normalised).shape == (THUMBNAIL, THUMBNAIL // 2, 3)

    def test_a_sample_that_comes_twice_is_counted_once(self, seed):
        samples = make_samples(14, seed, captions=2)
        once, twice = run(samples), run(samples[3:6] + samples)
        assert twice.metrics == once.metrics
        assert once.notes == []
        assert twice.notes == ["3 held-out samples came more than once and were counted once"]

    def test_unknown_labels_are_counted_and_named(self, seed):
        samples = make_samples(25, seed, labels=("thing", "stranger", None))
        result = run(samples, config=EvaluationConfig(classes=["thing", "other"]))
        strangers = sum(sample.label == "stranger" for sample in samples)
        assert result.metrics["val/zero_shot_unknown_labels"] == strangers > 0
        assert result.metrics["val/zero_shot_samples"] == sum(sample.label == "thing" for sample in samples)
        assert any(f"{strangers} held-out samples" in note and "'stranger'" in note for note in result.notes)
        assert set(result.per_class) == {"thing"}

    def test_classes_without_any_label(self, seed):
        result = run(make_samples(5, seed), config=EvaluationConfig(classes=["thing", "other"]))
        assert "val/zero_shot_top1" not in result.metrics
        assert any("no held-out sample has a known label" in note for note in result.notes)
        assert "zero-shot" not in format_result(result).split("note:")[0]

    def test_faults_of_the_reader_are_told(self):
        batches = list(batched(make_samples(6, 0), 2))
        batches[0].faults, batches[2].faults = {"demo/no_caption": 2}, {"demo/no_caption": 1, "demo/bad_image": 1}
        result = evaluate(TinyTowers(), batches, tokenizer=tokenize, config=EvaluationConfig())
        assert result.metrics["val/data_faults"] == 4
        assert "demo/bad_image 1, demo/no_caption 3" in result.notes[0]

    def test_nothing_held_out_is_an_error(self):
        with pytest.raises(DataError, match=r"data\.val"):
            run([])

    def test_nan_is_an_error_never_a_score(self):
        model = TinyTowers()
        with torch.no_grad():
            model.visual[1].weight[0, 0] = float("nan")
        with pytest.raises(NonFiniteFeatures, match="8 held-out images and 0 texts"):
            run(make_samples(8, 0), model=model)
        assert model.training

    def test_any_callable_with_the_contract_will_do(self, seed):
        model = TinyTowers(seed).eval()
        samples = make_samples(9, seed)
        found = evaluate(
            lambda images, texts: model(images, texts),
            batched(samples, 4),
            tokenizer=tokenize,
            config=EvaluationConfig(),
        )
        assert found.metrics == run(samples, model=model).metrics

    def test_console_text_shows_scores_next_to_chance(self, seed):
        samples = make_samples(40, seed, labels=("thing", "other"))
        result = run(samples, config=EvaluationConfig(classes=["thing", "other"]))
        text = format_result(result)
        assert "40 pairs of 40 images" in text
        for name in ("image_to_text_R@10", "text_to_image_R@1", "zero_shot_top1"):
            assert f"{result.metrics[f'val/{name}']:.3f} (chance {result.metrics[f'val/{name}_chance']:.3f})" in text


class TestConfig:
    def test_files_are_read(self, tmp_path):
        (tmp_path / "classes.txt").write_text("cat\n\n dog \n")
        (tmp_path / "templates.txt").write_text("a {}\nthe {}\n")
        from disco_ds.evaluation.zeroshot import load_classes, load_templates

        config = EvaluationConfig(classes=tmp_path / "classes.txt", templates=tmp_path / "templates.txt")
        assert load_classes(config) == ["cat", "dog"]
        assert load_templates(config) == ["a {}", "the {}"]

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"classes": "missing.txt"}, "evaluation.classes: missing.txt cannot be read"),
            ({"classes": ["cat", "dog", "cat"]}, "'cat' given more than once"),
            ({"classes": ["cat"]}, "two classes or more"),
            ({"classes": ["cat", " "]}, "entry 1 is empty"),
            ({"templates": ["a photo"]}, "'a photo' has no {}"),
            ({"templates": []}, "there is none"),
        ],
    )
    def test_what_cannot_be_used_is_named_before_training(self, fields, message):
        with pytest.raises(ConfigError, match=message):
            check_evaluation(EvaluationConfig(**fields))
