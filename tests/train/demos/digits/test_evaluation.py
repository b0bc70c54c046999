"""What the demo's figures see of clips that are spoilt on purpose, and that they see nothing where nothing is wrong."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from megadit.infer.evaluate.evaluation import Candidate, differences
from megadit.infer.evaluate.extractors.files import KIND
from megadit.infer.evaluate.metrics.scorer import ProgramScorer
from megadit.infer.runtimes.ranks import ALONE
from megadit.models.shared.errors import UserError
from megadit.train.demos.digits import classifier, evaluation, score

METRICS = ("fid", "kid", "fvd", "kvd", "consistency", "motion", "flicker")


def noisy(video, strength):
    return video + strength * torch.randn(video.shape, generator=torch.Generator().manual_seed(0))


def blurred(video, strength):
    frames = video.transpose(1, 2).flatten(0, 1)
    blurry = F.avg_pool2d(frames, 3, 1, 1).reshape(video.transpose(1, 2).shape).transpose(1, 2)
    return video + strength * (blurry - video)


def frozen(video, strength):
    """The last frames, a share of all, are copies of the one before them."""
    last = round(video.shape[2] * (1 - strength)) - 1
    return torch.cat([video[:, :, : last + 1], video[:, :, last : last + 1].expand(-1, -1, 8 - last, -1, -1)], dim=2)


def out_of_order(video, strength):
    """So many neighbouring frames, or all of them, change places."""
    orders = {0.25: [1, 0, 2, 3, 4, 5, 6, 7, 8], 1.0: [4, 0, 7, 2, 8, 1, 5, 3, 6]}
    return video[:, :, orders[strength]]


SPOILT = {
    "noise": (noisy, (0.1, 0.3), ("fid", "kid")),
    "blur": (blurred, (0.4, 1.0), ("fid", "kid")),
    "frozen frames": (frozen, (0.35, 0.9), ("motion",)),
    "frames out of order": (out_of_order, (0.25, 1.0), ("motion",)),
}
"""What is done to clips, a weak and a strong one, and the figures that are meant to see it."""


@pytest.fixture(scope="module")
def attributes():
    return score.scored_attributes()[0][::2]


@pytest.fixture(scope="module")
def of(tmp_path_factory, attributes):
    """An evaluation against real clips, by a classifier that was trained for a moment."""
    folder = tmp_path_factory.mktemp("evaluation")
    reader = classifier.train_reader(lambda video: video, num_clips=800, num_steps=250, show_progress=False)
    save_file(reader.state_dict(), folder / "classifier.safetensors", metadata={KIND: "digits"})
    captions = score.heldout_captions(attributes)
    real = evaluation.clip_set("real", score.real_clips(attributes, seed=5), captions)
    return evaluation.scored_by(folder, folder / "classifier.safetensors", real, METRICS)


def metric_values(of, attributes, video, label="model", captions=None):
    captions = captions or score.heldout_captions(attributes)
    made = Candidate(model=label, guidance=None, videos=evaluation.clip_set(label, video, captions))
    of.compute_features([made], ALONE, shows_progress=False)
    return {each.metric: each for each in of.metric_values([made], shows_progress=False)}


@pytest.fixture(scope="module")
def clean(of, attributes):
    return metric_values(of, attributes, score.real_clips(attributes, seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("name", SPOILT)
def test_a_fault_is_seen_and_a_worse_one_more(of, clean, attributes, name):
    spoil, strengths, metrics = SPOILT[name]
    clips = score.real_clips(attributes, seed=1)
    weak, strong = (metric_values(of, attributes, spoil(clips, strength), name) for strength in strengths)
    for metric in metrics:
        _, high = clean[metric].estimate.interval
        assert strong[metric].estimate.interval[0] > high, metric
        assert strong[metric].estimate.value > weak[metric].estimate.value > clean[metric].estimate.value, metric


def mismatched(attributes, share, is_caption):
    """Clips and captions of which this share have the caption, or are the clip, of another digit."""
    own_clips, own_captions = score.real_clips(attributes, seed=1), score.heldout_captions(attributes)
    clips, captions = own_clips.clone(), list(own_captions)
    chosen = torch.randperm(len(attributes), generator=torch.Generator().manual_seed(0))[
        : round(share * len(attributes))
    ]
    for place in chosen.tolist():
        others = [n for n, other in enumerate(attributes) if other.digit != attributes[place].digit]
        other = others[place % len(others)]
        if is_caption:
            captions[place] = own_captions[other]
        else:
            clips[place] = own_clips[other]
    return clips, captions


@pytest.mark.slow
@pytest.mark.parametrize("is_caption", [False, True], ids=["videos of another class", "captions of others"])
def test_clips_that_show_something_else_are_seen_by_the_judge(of, clean, attributes, is_caption):
    low, _ = clean["all"].estimate.interval
    tenth, half = (
        metric_values(of, attributes, clips, f"{share} mismatched", captions)["all"].estimate
        for share in (0.1, 0.5)
        for clips, captions in [mismatched(attributes, share, is_caption)]
    )
    assert half.value < tenth.value < low
    assert tenth.interval[1] < low and half.interval[1] < tenth.interval[0]


@pytest.mark.slow
def test_another_seed_does_not_leave_the_interval(of, clean, attributes):
    other = metric_values(of, attributes, score.real_clips(attributes, seed=2), "another seed")
    pairs = differences([*clean.values(), *other.values()])
    assert len(pairs) == len(clean) == len(METRICS) + 2
    for metric in ("fid", "kid", "fvd", "kvd", "all"):
        (pair,) = [each for each in pairs if each.first.metric == metric]
        assert pair.winner == "", metric
        assert clean[metric].baseline is None or clean[metric].estimate.interval[0] < clean[metric].baseline.interval[1]


def test_the_judge_is_asked_with_the_attributes_of_the_caption(attributes, tmp_path):
    reader = classifier.DigitReader().eval()
    save_file(reader.state_dict(), tmp_path / "classifier.safetensors", metadata={KIND: "digits"})
    score.write_scorer(tmp_path / "judge", tmp_path / "classifier.safetensors")
    some = attributes[:6]
    captions = score.heldout_captions(some)
    scorer = ProgramScorer.open(tmp_path / "judge")
    clips = score.real_clips(some)
    video = ((clips + 1) * 127.5).round().byte().permute(0, 2, 3, 4, 1)
    expected = score.frames_and_clips_right(
        classifier.classify(reader, video.permute(0, 4, 1, 2, 3).float() / 127.5 - 1), some
    )
    assert scorer(video, captions)[:, 0].tolist() == expected["all"].float().tolist()
    assert scorer(video, captions)[:, 1].tolist() == score.right_in_every_frame(expected).float().tolist()
    with pytest.raises(UserError, match="returns no all, every_frame for a video of 'something else'"):
        scorer(video, ["something else"] * 6)
