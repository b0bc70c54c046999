"""Evaluation of the demo: distances between generated and real clips in the classifier's features, with intervals.

Shapes: B clips, C colour channels, T/H/W frames, height, width.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megadit.infer.evaluate.evaluation import Candidate, Evaluation, differences
from megadit.infer.evaluate.extractors import open_extractors
from megadit.infer.evaluate.features import FeatureStore
from megadit.infer.evaluate.generated import BundleMaker, Request, made_videos, make_videos
from megadit.infer.evaluate.metrics.motion import MotionClips
from megadit.infer.evaluate.metrics.scorer import ProgramScorer
from megadit.infer.evaluate.report.show import write_report
from megadit.infer.evaluate.videos import VideoSet, videos_in_memory
from megadit.infer.evaluate.window import Window
from megadit.infer.runtimes.ranks import ALONE
from megadit.infer.sampling.resolve import resolve_settings
from megadit.models.bundle import Bundle
from megadit.train.demos.clips import as_uint8
from megadit.train.demos.digits import score
from megadit.train.demos.digits.classifier import round_trip
from megadit.train.demos.digits.data import FPS, FRAME_SIZE, NUM_FRAMES, Attributes

WINDOW = Window(frames=NUM_FRAMES, height=FRAME_SIZE, width=FRAME_SIZE, fps=FPS, is_resized=False)
ALL_GUIDANCES = (1.0, 2.0, 8.0)
"""Guidance scales at which clips can be made besides the model's own."""


def clip_set(label: str, video_BCTHW: Tensor, captions: Sequence[str]) -> VideoSet:
    """Clips in memory, BCTHW in [-1, 1] (or uint8), as a set that is evaluated."""
    if video_BCTHW.dtype != torch.uint8:
        video_BCTHW = as_uint8(video_BCTHW)
    return videos_in_memory(label, video_BCTHW.permute(0, 2, 3, 4, 1).contiguous().numpy(), captions, FPS)


def scored_by(folder: Path, classifier_file: Path, real: VideoSet, metrics: Sequence[str] = ()) -> Evaluation:
    """Evaluation of digits: the classifier's extractors, optical flow, and the classifier itself."""
    extractors = open_extractors(classifier_file, torch.device("cpu"))
    scorer = ProgramScorer(score.scorer_of_prompts(classifier_file), score.BETTER, extractors[0].fingerprint)
    store = FeatureStore(folder / "features", WINDOW)
    return Evaluation(
        store=store, real=real, extractors=[*extractors, MotionClips()], scorers=[scorer], metrics=metrics
    )


def evaluate_bundle(
    out: Path,
    bundle: Bundle,
    classifier_file: Path,
    video_BCTHW: Tensor,
    attributes: Sequence[Attributes],
    guidances: Sequence[float] = ALL_GUIDANCES,
) -> None:
    """Writes the report of a digits bundle: its clips of `attributes` at its own guidance, and those at `guidances`.

    Real clips are what the tokenizer leaves of them: the classifier learnt those, and no network makes sharper ones.

    Args:
        video_BCTHW: clips of the bundle's defaults that are there already (the seed of each its place), uint8 BCTHW.
    """
    captions = score.heldout_captions(attributes)
    made = [Candidate(model="demo", guidance=bundle.defaults.guidance, videos=clip_set("demo", video_BCTHW, captions))]
    maker = BundleMaker(bundle, device="cpu", dtype="float32")
    for guidance in guidances:
        settings = resolve_settings(bundle.defaults, guidance=guidance)
        request = Request(maker=maker, prompts=captions, settings=settings)
        make_videos(out / "videos", request, ALONE, shows_progress=True)
        made.append(Candidate(model="demo", guidance=guidance, videos=made_videos(out / "videos", request, "demo")))
    made.sort(key=lambda candidate: candidate.guidance)
    real = clip_set("real clips", round_trip(bundle.load_tokenizer())(score.real_clips(attributes)), captions)
    of = scored_by(out, classifier_file, real)
    of = replace(of, metrics=of.possible(len(captions)))
    of.compute_features(made, ALONE)
    metric_values = of.metric_values(made)
    write_report(out, of, made, metric_values, differences(metric_values), {})
