"""Two towers learn by the trainer of the denoisers: their losses by hand, the same on any ranks, coloured digits."""

from dataclasses import replace
from functools import cache
from math import prod

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

from megadit.infer.commands.classify import Classifier
from megadit.infer.evaluate.videos import Clip
from megadit.infer.matching import Matcher
from megadit.models.bundle import Bundle
from megadit.models.configs.named import NAMED_CONFIGS
from megadit.models.networks.embeddings import class_digits
from megadit.models.networks.registry import build_network
from megadit.train.checkpoints.to_bundle import main as to_bundle
from megadit.train.data.packs.packed_batch import PackFormat
from megadit.train.data.packs.training_sample import TrainingSample
from megadit.train.data.prepare import command as prepare
from megadit.train.demos.digits import data as digits
from megadit.train.objectives.contrast import matching_loss

from ..conftest import deviations, distance, numbers, tensors_of
from ..test_vit_layouts import FSDP, JOB, PP, SP, TP

MODEL = replace(NAMED_CONFIGS["clip_digits"], num_layers=2, hidden_size=32, num_attention_heads=2)
PAIRWISE = replace(MODEL, text_tower=replace(MODEL.text_tower, pairwise=True))
TOWER = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_words": 600,
    "max_length": 16,
    "embedding_size": 24,
}
CLIP = {
    "model": {
        "family": "clip",
        "position_embedding": "learned",
        "learned_positions": [1, 3, 5],
        "qk_layernorm": False,
        "crossattn_emb_size": 2,
        "in_channels": 3,
        "patch_spatial": 2,
        "text_tower": TOWER,
    },
    "data": {"mock_latent_shapes": [[1, 6, 10]], "text_dropout": 0.0},
}


def with_model(case, text_tower, **model):
    return case | {"model": CLIP["model"] | model | {"text_tower": TOWER | text_tower}}


LOSSES = {
    "clip": CLIP,
    "chunks": CLIP | {"train": {"contrast_rows": 3}},
    "siglip": with_model(CLIP, {"pairwise": True, "hidden_size": 64}),  # the wider tower is that of texts
}
DEEP = with_model(CLIP, {"num_layers": 4}, num_layers=4)
"""Four packs a step, two of them compared at a time: for stages that hold two parts of a network."""
DISTRIBUTED = {"data_parallel": "distributed_optimizer"}
# four packs a step: all at once, whoever has them
LAYOUTS = {
    1: {"one": ({}, LOSSES)},
    2: {
        "dp": ({}, LOSSES),
        "distributed": (DISTRIBUTED, ("clip",)),
        "fsdp": (FSDP, ("siglip",)),
        "tp": (TP, ("chunks",)),
        "sp": (SP, ("clip", "siglip")),
        "pp": (PP, ("chunks", "siglip")),
    },
    4: {
        "dp": ({}, ("chunks",)),
        "tp + fsdp": (TP | FSDP, ("clip",)),
        "sp + pp": (SP | PP, ("siglip",)),
        "pp + distributed": (PP | DISTRIBUTED, ("chunks",)),
    },
}
"""Ranks -> layout -> the losses that it is tried with: each is divided in every way."""
DEEP_IN = ("deep",)
IN_TURNS = {
    1: {"one": ({}, DEEP_IN)},
    2: {"pp": (PP, DEEP_IN), "vpp": (PP | {"virtual_pipeline_model_parallel_size": 2}, DEEP_IN)},
    4: {},
}
CASES = [
    (ranks, layout, loss)
    for layouts in (LAYOUTS, IN_TURNS)
    for ranks in (2, 4)
    for layout, (_, losses) in layouts[ranks].items()
    for loss in losses
]


def random_network(model):
    network, generator = build_network(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + ("scale" in name))
    return network


def make_samples(texts):
    generator = torch.Generator().manual_seed(1)
    return [
        TrainingSample(
            sample_id=f"sample-{index}",
            occurrence=0,
            latent_CTHW=torch.randn(3, 1, 32, 32, generator=generator),
            text_LE=torch.tensor([class_digits(token) for token in text]).reshape(-1, 2),
            fps=0.0,
        )
        for index, text in enumerate(texts)
    ]


@pytest.mark.parametrize(("model", "rows"), [(MODEL, None), (MODEL, 2), (PAIRWISE, None)])
def test_the_loss_is_that_of_each_pair_by_hand(model, rows):
    """A sample without a text, and the padding of the pack, count nothing."""
    network, texts = random_network(model), [[0, 299, 5, 1], [0, 7, 1], [], [0, 3, 4, 5, 1]]
    samples = make_samples(texts)
    batch = PackFormat(model=model, seq_length=300, text_seq_length=20, seed=0, text_dropout=0.0).pack(samples)
    found = matching_loss(network, batch, None, rows)
    paired = [(sample, text) for sample, text in zip(samples, texts, strict=True) if text]
    images = torch.cat([network.embed_images(sample.latent_CTHW[None]) for sample, _ in paired])
    pairs = [(torch.tensor([text]), torch.tensor([len(text)])) for _, text in paired]
    score = network.scale * images @ torch.cat([network.embed_texts(*pair) for pair in pairs]).T
    if network.score_offset is None:
        own = torch.arange(3)
        expected = (F.cross_entropy(score, own, reduction="sum") + F.cross_entropy(score.T, own, reduction="sum")) / 2
    else:
        expected = -F.logsigmoid((2 * torch.eye(3) - 1) * (score + network.score_offset)).sum()
    for value in found[:2]:
        torch.testing.assert_close(value / 65, expected, rtol=1e-5, atol=1e-5)
    assert found.error.item() == 65 * (score.argmax(1) != torch.arange(3)).sum()
    parameters = dict(network.named_parameters())
    by_hand = torch.autograd.grad(expected, parameters.values(), allow_unused=True)
    by_loss = torch.autograd.grad(found.objective / 65, parameters.values())
    for name, mine, hand in zip(parameters, by_loss, by_hand, strict=True):
        torch.testing.assert_close(mine, hand, rtol=1e-4, atol=1e-5, msg=name)


def cases(ranks):
    found = {}
    for layouts, packs in ((LAYOUTS, 4), (IN_TURNS, 2)):
        for layout, (parallel, losses) in layouts[ranks].items():
            copies = ranks // prod(parallel.get(f"{kind}_model_parallel_size", 1) for kind in ("tensor", "pipeline"))
            for loss in losses:
                case = DEEP if loss == "deep" else LOSSES[loss]
                data = case["data"] | {"micro_batch_size": packs // copies}
                found[f"{loss} {layout}"] = case | {"parallel": parallel, "data": data, "gradients": ranks == 1}
    if ranks == 2:
        data = CLIP["data"] | {"micro_batch_size": 2}
        found["own alone"] = CLIP | {"data": data, "broken": "pairs of other ranks"}
        found["own gradient"] = CLIP | {"data": data, "broken": "gradient from other ranks"}
    return found


@pytest.fixture(scope="module")
def folders(folders_of):
    return folders_of(cases, JOB, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout", "loss"), CASES)
def test_a_layout_trains_as_one_rank_does(folders, ranks, layout, loss):
    found = deviations(numbers(folders(ranks), f"{loss} {layout}"), numbers(folders(1), f"{loss} one"))
    assert max(found.values()) < 1, found
    names = (folders(ranks) / f"{loss} {layout}", folders(1) / f"{loss} one")
    assert distance(*(tensors_of(name, "model.") for name in names)) < 2e-5


SHORT = (
    *("-m", "megadit.train", "--recipe", "clip_digits", "--mock", "train.matmul_precision=ieee"),
    *("model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=2", "data.seq_length=1040"),
    *("data.text_seq_length=192", "optimizer.lr_warmup_iters=0", "optimizer.lr_decay_style=constant"),
    *("optimizer.optimizer=adamw", "optimizer.lr=0.001", "validation.interval=2", "checkpoint.save_interval=2"),
    *("train.num_threads=1", "logger.tensorboard=false", "logger.curves=false"),
)
"""Two packs of 16 images a step, which are compared with one another."""


@pytest.mark.slow
def test_pipeline_stages_go_on_with_a_run(run_ranks, tmp_path, read_metrics):
    """Of tensor-parallel ranks; with the same losses of validation, too. What stages write is compared above."""

    def run(ranks, folder, steps, *layout):
        run_ranks(ranks, *SHORT, f"train.output_dir={tmp_path / folder}", f"train.train_iters={steps}", *layout)
        return read_metrics(tmp_path / folder)

    together, stages = "data.micro_batch_size=2", "parallel.pipeline_model_parallel_size=2"
    expected = run(1, "one", 4, together)
    run(2, "turns", 2, together, "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
    found = run(2, "turns", 4, together, stages)
    for name, count in {"loss": 4, "validation": 2}.items():
        lines = [[line for line in each if name in line] for each in (expected, found)]
        one, turns = ([line[name] if name == "loss" else line[name]["none"]["mean"] for line in x] for x in lines)
        assert len(one) == count and turns == pytest.approx(one, rel=1e-5)


@pytest.mark.slow
def test_chunks_change_no_gradient(folders):
    whole, chunks = (
        safetensors.torch.load_file(folders(1) / f"{loss} one" / "gradients.safetensors") for loss in ("clip", "chunks")
    )
    for name, gradient in whole.items():
        assert gradient.norm() > 0, f"{name} has no gradient"
    # float32 through the towers, whose products processors round differently (5.7e-5 with AVX2); of the loss see below
    assert distance(chunks, whole) < 2e-4


@pytest.fixture(scope="module")
def pairs(run_ranks, tmp_path_factory):
    """pairs(ranks): losses and gradients of ten pairs, whoever has them."""

    def run(ranks):
        folder = tmp_path_factory.mktemp(f"pairs{ranks}")
        run_ranks(ranks, JOB.with_name("matching.py"), folder, timeout=120)
        each = [safetensors.torch.load_file(folder / f"{rank}.safetensors") for rank in range(ranks)]
        is_sum = {name: name.endswith(("scale", "offset")) for name in each[0]}
        return {n: sum(x[n] for x in each) if is_sum[n] else torch.cat([x[n] for x in each]) for n in each[0]}

    return cache(run)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_and_gradients_of_pairs_are_those_of_one_rank(pairs, ranks):
    """In float64, unequally many on each rank, none on one of four; chunked or not."""
    one, found = pairs(1), pairs(ranks)
    assert one.keys() == found.keys()
    for name, expected in one.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-10, msg=name)
        torch.testing.assert_close(found[name], found[name.replace("chunks", "softmax")], rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own alone", "own gradient"])
def test_what_is_left_out_would_be_noticed(folders, name):
    """Negative controls: negatives of one's own rank alone, and no gradient from the losses of other ranks."""
    found = deviations(numbers(folders(2), name), numbers(folders(1), "clip one"))
    assert found["loss"] > 1000 or found["grad_norm"] > 100


def shares(bundle):
    """Of pictures by writers that training never saw: top-1 among all 60 coloured digits, the same by labels of others,
    and the share of (right, wrong) captions in the right order."""
    generator = torch.Generator().manual_seed(5)
    attributes = digits.random_attributes(300, images=True, generator=generator)
    pixels = (digits.draw_images(attributes, "heldout", generator).movedim(1, -1) + 1) * 127.5
    clips = [Clip(pixels_THWC, 0.0, "a digit") for pixels_THWC in pixels.round().byte().numpy()]
    every = [f"{colour} {digit}" for colour in digits.COLOURS for digit in digits.DIGITS]
    own = torch.tensor([every.index(f"{each.colour} {digits.DIGITS[each.digit]}") for each in attributes])
    found = Classifier(Bundle.open(bundle), labels=every, prompts=["a {}", "a picture of a {}", "{}"])(clips).argmax(1)
    matcher = Matcher(Bundle.open(bundle))
    similarity = matcher.pictures(clips) @ matcher.texts([f"a {label}" for label in every]).T
    is_above = similarity.gather(1, own[:, None]) > similarity  # a caption is not above itself
    hits = [(found == label).float().mean().item() for label in (own, own.roll(1))]
    return *hits, is_above.sum().item() / len(own) / (len(every) - 1)


@pytest.mark.slow
def test_coloured_digits_that_it_never_saw(run_ranks, tmp_path):
    """The recipe, with fewer layers, pictures and steps: of 60 classes more are right than by colour alone (10 %)."""
    assert prepare.main(["digit_captions", str(tmp_path / "data"), "--num_images", "2500"]) == 0
    run = tmp_path / "run"
    smaller = ("model.num_layers=2", "data.seq_length=4160", "data.text_seq_length=768", "train.train_iters=80")
    folders = f"data.path={tmp_path / 'data'}", f"train.output_dir={run}"
    run_ranks(1, "-m", "megadit.train", "--recipe", "clip_digits", *smaller, "validation.interval=0", *folders)
    assert to_bundle([str(run), str(tmp_path / "bundle")]) == 0
    top, of_others, ordered = shares(tmp_path / "bundle")
    assert top > 0.16 and of_others < 0.06 and ordered > 0.92
