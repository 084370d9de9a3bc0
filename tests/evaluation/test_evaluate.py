"""Evaluation of a module on one process, from batches to the report's samples, against plain loops."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from disco_ds.config.schema import EvaluationConfig
from disco_ds.errors import ConfigError, DataError
from disco_ds.evaluation.encode import LONGEST_SIDE, Thumbnails
from disco_ds.evaluation.evaluate import check_evaluation, evaluate
from disco_ds.evaluation.result import format_result
from disco_ds.evaluation.retrieval import NonFiniteFeatures
from disco_ds.evaluation.zeroshot import load_classes, load_templates
from tests.helpers.towers import SIDE, TinyTowers, batched, exact_similarity, make_samples, slow_retrieval, tokenize


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

    def test_equal_captions_are_equally_similar_in_any_batch(self, seed):
        """A model's rounding differs from batch to batch; the same words must not beat each other by it."""
        samples = [sample._replace(captions=["a thing"]) for sample in make_samples(13, seed)]
        model = TinyTowers(seed).eval()

        def rounding(images, texts):
            found = model(images, texts)
            if texts is None:
                return found
            return found._replace(text_features=found.text_features + 1e-6 * torch.randn(found.text_features.shape))

        assert run(samples, 5, model=rounding).metrics["val/image_to_text_mean_rank"] == 13  # any callable will do

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
            right = [caption.similarity for caption in image.top if caption.right]
            ahead = sum(not caption.right and caption.similarity >= max(right, default=-1) for caption in image.top)
            if right and right[0] > similarities[-1]:
                assert image.rank == 1 + ahead
            else:  # others that are as similar may not be shown
                assert image.rank >= 1 + ahead
        assert [image.index for image in run(samples, seed=seed + 1).samples] != [i.index for i in result.samples]

    def test_pixels_are_the_image_before_normalising(self):
        pixels = torch.randint(0, 256, (3, 300, 150), dtype=torch.uint8)
        mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
        kept = Thumbnails(0, 1, mean, std)
        normalised = (pixels / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
        assert np.array_equal(kept.pixels(normalised[:, :100, :100]), pixels[:, :100, :100].permute(1, 2, 0).numpy())
        assert kept.pixels(normalised).shape == (LONGEST_SIDE, LONGEST_SIDE // 2, 3)

    def test_a_sample_that_comes_twice_is_an_error(self, seed):
        samples = make_samples(14, seed, captions=2)
        with pytest.raises(ValueError, match="each must come once"):
            run(samples[3:6] + samples)

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
