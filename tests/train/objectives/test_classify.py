"""A classifier learns by the trainer of the denoisers: its loss, its start from other weights, handwritten digits."""

from dataclasses import replace

import imageio.v3 as iio
import pytest
import torch

from megadit.infer.commands.classify import main as classify
from megadit.models.bundle_writer import write_bundle
from megadit.models.diffusion.noise import sample_key
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.networks.embeddings import class_digits
from megadit.models.networks.registry import build_network
from megadit.models.networks.vit import resized_positions
from megadit.models.packing.segments import Segment
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json
from megadit.models.text_encoders import ClassLabels
from megadit.models.tokenizers import HaarTokenizer
from megadit.train.checkpoints.init_from import initial_weights
from megadit.train.checkpoints.to_bundle import main as to_bundle
from megadit.train.data.packs.mixup import draw_mixture
from megadit.train.data.packs.packed_batch import PackedBatch, PackFormat
from megadit.train.data.packs.training_sample import TrainingSample
from megadit.train.data.prepare import command as prepare
from megadit.train.demos.digits import data as digits
from megadit.train.objectives.classify import classification_loss
from megadit.train.recipes import load_recipe

RUN = load_recipe("vit_digits")
MODEL = replace(RUN.model, num_layers=2, hidden_size=32, num_classes=300)


def random_network(model=MODEL):
    network, generator = build_network(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return network


def packed(samples, mixup=0.0):
    pack_format = PackFormat(model=MODEL, seq_length=300, text_seq_length=8, seed=0, text_dropout=0.0, mixup=mixup)
    return pack_format.pack(samples)


def make_samples(classes):
    generator = torch.Generator().manual_seed(1)
    return [
        TrainingSample(
            sample_id=f"sample-{index}",
            occurrence=0,
            latent_CTHW=torch.randn(3, 1, 32, 32, generator=generator),
            text_LE=torch.tensor([class_digits(label)]) if label is not None else torch.empty(0, 2),
            fps=0.0,
        )
        for index, label in enumerate(classes)
    ]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_smoothed_cross_entropy_of_each_image(smoothing):
    """q ln p by hand; a sample without a label, and the padding of the pack, count nothing."""
    network, classes = random_network(), [299, 7, None]
    samples = make_samples(classes)
    found = classification_loss(network, packed(samples), smoothing)
    objective = entropy = wrong = 0.0
    for sample, label in zip(samples[:2], classes[:2], strict=True):
        log_p_K = network(sample.latent_CTHW[None])[0].log_softmax(-1)
        q_K = torch.full((300,), smoothing / 300)
        q_K[label] += 1 - smoothing
        objective -= (q_K * log_p_K).sum()
        entropy -= log_p_K[label]
        wrong += log_p_K.argmax() != label
    for value, expected in zip(found, (objective, entropy, wrong), strict=True):
        torch.testing.assert_close(value / 65, torch.as_tensor(expected).float(), rtol=1e-5, atol=1e-6)
    assert (found.objective != found.weighted) == (smoothing > 0)


def test_mixed_samples_learn_the_classes_of_both():
    """Each image and label by hand, of two packs as one; an image without a label stays as it is."""
    network, classes = random_network(), [299, 7, 31, None]
    samples = make_samples(classes)
    batch = PackedBatch.concatenate([packed(samples, mixup=1.0), packed(samples[:1], mixup=1.0)])
    shares = batch.extra_G["own_share"].tolist()
    assert all(0 < share < 1 for share in shares[:3]) and shares[3:] == [1.0] * (len(shares) - 3)
    objective = 0.0
    for index, share in enumerate(shares[:3]):
        own, other = samples[index], samples[(index + 1) % 3]
        image = share * own.latent_CTHW + (1 - share) * other.latent_CTHW
        log_p_K = network(image[None])[0].log_softmax(-1)
        objective -= share * log_p_K[classes[index]] + (1 - share) * log_p_K[classes[(index + 1) % 3]]
    objective -= network(samples[0].latent_CTHW[None])[0].log_softmax(-1)[299]
    torch.testing.assert_close(classification_loss(network, batch).objective / 65, objective, rtol=1e-5, atol=1e-6)


def test_shares_are_drawn_from_the_beta_distribution():
    segments = [Segment((1, 8, 8), 1)] * 4000
    share_G = draw_mixture(segments, [sample_key(1, f"sample-{index}", 0) for index in range(4000)], 0.2).share_G
    assert share_G.mean() == pytest.approx(0.5, abs=0.03)
    assert share_G.var() == pytest.approx(1 / (4 * (2 * 0.2 + 1)), abs=0.01)


def test_a_sample_of_another_size_does_not_fit():
    (sample,) = make_samples([1])
    with pytest.raises(UserError, match="do not match model.learned_positions, 1x8x8"):
        packed([replace(sample, latent_CTHW=torch.zeros(3, 1, 32, 36))])


def test_it_goes_on_at_another_size_and_with_other_classes(tmp_path):
    before = random_network()
    write_bundle(
        tmp_path / "bundle",
        config=MODEL,
        state_dict=before.state_dict(),
        tokenizer=HaarTokenizer(temporal_compression=1, spatial_compression=1),
        text_encoder=ClassLabels(names=tuple(map(str, range(300)))),
        defaults=SamplingSettings(num_steps=1, guidance=1.0, num_frames=1, height=32, width=32, fps=0.0),
    )
    checkpoint = replace(RUN.checkpoint, init_from=str(tmp_path / "bundle"))
    model = replace(MODEL, learned_positions=(1, 12, 12), num_classes=5)
    given = initial_weights(replace(RUN, model=model, checkpoint=checkpoint))
    after = build_network(model)
    after.load_state_dict({name: given.read(name) for name in after.state_dict()})
    old, new = before.state_dict(), after.state_dict()
    changed = {name for name in new if old[name].shape != new[name].shape or not torch.equal(old[name], new[name])}
    assert changed == {"x_embedder.positions", "head.linear.weight", "head.linear.bias"}
    expected = resized_positions(old["x_embedder.positions"], (1, 8, 8), (1, 12, 12))
    assert torch.equal(new["x_embedder.positions"], expected) and not new["head.linear.weight"].any()
    with pytest.raises(UserError, match=r"has model\.num_layers=2 \(not 3\)"):
        initial_weights(replace(RUN, model=replace(model, num_layers=3), checkpoint=checkpoint))


@pytest.mark.slow
def test_handwritten_digits_that_it_never_saw(run_ranks, read_metrics, tmp_path, capsys):
    """The recipe, with fewer pictures and steps: most held-out digits, by the run's word and by `classify`'s."""
    assert prepare.main(["digit_classes", str(tmp_path / "data"), "--num_images", "4000"]) == 0
    run = tmp_path / "run"
    smaller = ("train.train_iters=100", "model.num_layers=2", "validation.interval=100", "validation.num_batches=2")
    folders = f"data.path={tmp_path / 'data'}", f"train.output_dir={run}"
    run_ranks(1, "-m", "megadit.train", "--recipe", "vit_digits", *smaller, *folders)
    steps = read_metrics(run)
    assert steps[0]["wrong"] > 0.7
    losses = steps[-1]["validation"]  # of whole pictures: those of training are mixed
    assert min(each["wrong"] for each in losses.values()) <= 0.3
    assert to_bundle([str(run), str(tmp_path / "bundle")]) == 0
    images_BCTHW, names = digits.draw_glyphs("heldout", torch.arange(200), torch.zeros(200, 2))
    for index, (image_CTHW, name) in enumerate(zip(images_BCTHW, names, strict=True)):
        (tmp_path / "digits" / name).mkdir(parents=True, exist_ok=True)
        pixels = ((image_CTHW[:, 0].permute(1, 2, 0) + 1) * 127.5).round().byte().numpy()
        iio.imwrite(tmp_path / "digits" / name / f"{index}.png", pixels)
    options = ["--labelled", "--out", str(tmp_path / "found.json")]
    assert classify([str(tmp_path / "bundle"), str(tmp_path / "digits"), *options]) == 0
    assert read_json(tmp_path / "found.json")["accuracy"]["top-1"][0] >= 0.7
    assert "top-1" in capsys.readouterr().out
