"""Validation in a short run on two ranks, with real data, averages and videos."""

import json

import pytest

from megadit.infer.media.video_io import read_video

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(run_ranks, tiny_arguments, tmp_path_factory):
    """Folders of the same run by one rank and by two."""
    folders = {}
    for count in (1, 2):
        folders[count] = tmp_path_factory.mktemp(f"validated{count}")
        run_ranks(count, *tiny_arguments, f"train.output_dir={folders[count]}")
    return folders


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["validation"] for line in lines if "validation" in line}


def test_every_average_has_a_loss_at_every_sigma(runs):
    measured = losses(runs[2])
    assert list(measured) == [2, 4]
    assert list(measured[4]) == ["none", "0.05", "0.15"]
    assert list(measured[4]["none"]) == ["mean", "0.1", "0.3", "1", "3", "10"]
    of_sigmas = [value for name, value in measured[4]["0.15"].items() if name != "mean"]
    assert measured[4]["0.15"]["mean"] == pytest.approx(sum(of_sigmas) / 5)
    assert len({measured[4][name]["mean"] for name in measured[4]}) == 3, "the averages differ"


def test_validation_packs_do_not_depend_on_the_ranks(runs):
    # at step 2 the weights differ a little already: training packs are dealt differently
    one, two = losses(runs[1])[2], losses(runs[2])[2]
    assert one["none"]["mean"] == pytest.approx(two["none"]["mean"], rel=0.05)


def test_checkpoints_know_the_best_average(runs):
    state = json.loads((runs[2] / "checkpoints" / "iter_0000004" / "state.json").read_text())
    validation = state["run"]["validation"]
    means = {name: values["mean"] for name, values in validation["losses"].items()}
    assert validation["step"] == 4 and validation["best"] == min(means, key=means.get)


def test_videos_of_the_validation_captions(runs):
    folder = runs[2] / "samples" / "step_0000004"
    assert sorted(path.name for path in folder.iterdir()) == [f"0{n}_sample_number_{n}.mp4" for n in range(4)]
    frames, fps = read_video(folder / "01_sample_number_1.mp4")
    assert frames.shape == (3, 8, 8, 3) and fps == pytest.approx(8)
