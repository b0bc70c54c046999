"""`megadit demo-adapter`: fine-tunes the demo's model on a subject, a shape that is not a digit, with an adapter.

    megadit demo-adapter                # from the bundle of `megadit demo`, into runs/demo-adapter

The subject has ten clips and one word. The adapter is trained twice: with prior preservation (clips of digits that the
model generated) and without. Both learn the subject, but only the first preserves the digits.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.models.bundle import Bundle
from megadit.models.shared.cli.command import run_module
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import group, setting
from megadit.models.shared.files import atomic_path, read_json, write_json
from megadit.models.shared.progress import Progress
from megadit.train.demos import contact_sheets
from megadit.train.demos.clips import as_float
from megadit.train.demos.contact_sheets import spread
from megadit.train.demos.digits import classifier, score, subject
from megadit.train.demos.digits.data import Attributes, random_attributes, random_captions
from megadit.train.demos.stages import FollowingDemo, FollowingOptions, Stage, following_demo, run_and_show, write_blend

NUM_PRIOR = 256
CLASS_STRIDE = 3
"""The class is scored on every so-manyth of the demo's captions, of which every second is slow."""
SUBJECT_CLIPS = 4
"""Clips of each colour and direction that the subject is scored on, each from another seed."""
GUIDANCE = {"right": 4.0, "strict": 2.0}
"""Score of the subject -> the guidance of its clips: at 4 its colours saturate, which the measure of likeness minds."""
ADAPTERS = ("with prior", "without prior")
"""Adapters that are trained; "before" is the model without one."""
MODELS = ("before", *ADAPTERS)


@dataclass(frozen=True, kw_only=True)
class AdapterDemo(FollowingDemo):
    """The folder of this demo, the model it starts from, and what the subject is called."""

    word: str = "zog"

    @property
    def subject(self) -> Path:
        return self.out / "subject"

    @property
    def prior(self) -> Path:
        return self.out / "prior"

    def adapter(self, name: str) -> Path:
        return self.out / name.replace(" ", "-")

    @cached_property
    def subject_attributes(self) -> list[Attributes]:
        """Attributes in the prompts of the subject's clips: the ten pairs of its own clips first, each several
        times."""
        return [each for each in sum(subject.pairs(), []) for _ in range(SUBJECT_CLIPS)]

    @cached_property
    def class_attributes(self) -> list[Attributes]:
        return score.scored_attributes()[0][::CLASS_STRIDE]


# --- stages -------------------------------------------------------------------------------------------------------


def _subject(demo: AdapterDemo) -> None:
    subject.write_subject(demo.subject, Bundle.open(demo.base), demo.word)


def _prior(demo: AdapterDemo) -> None:
    generator = torch.Generator().manual_seed(1)
    attributes = random_attributes(NUM_PRIOR, images=False, generator=generator)
    prompts = demo.out / "prior.txt"
    with atomic_path(prompts) as temporary:
        temporary.write_text("\n".join(random_captions(attributes, "train", generator)), encoding="utf-8")
    # guidance would make clips brighter than those that the model was trained on
    arguments = ["--prompt_file", str(prompts), "--count", str(NUM_PRIOR), "--guidance", "1"]
    run_module("megadit.train.data.prepare.command", "prior", str(demo.base), str(demo.prior), *arguments)


def _train(demo: AdapterDemo, name: str) -> None:
    data = demo.subject
    if name == "with prior":  # one clip of the subject for each of the prior
        data = demo.out / "with-prior.yaml"
        write_blend(data, [demo.subject, demo.prior], demo.subject)
    run = demo.out / f"{name.replace(' ', '-')}-run"
    run_module(
        *("megadit.train", "--recipe", "digits_dreambooth", "--nproc", str(demo.num_ranks)),
        *(f"data.path={data}", f"train.output_dir={run}", *demo.training_overrides),
    )
    run_module("megadit.train.checkpoints.to_bundle", str(run), str(demo.adapter(name)))


def _generate(demo: AdapterDemo) -> None:
    """The subject's and the class's clips of every model, uint8 BCTHW."""
    pipeline = TextToVideo.from_pretrained(demo.base, device="cpu")
    words = [subject.caption(each, demo.word) for each in demo.subject_attributes]
    captions = score.heldout_captions(demo.class_attributes)
    runs = [(f"subject_{name}", words, guidance) for name, guidance in GUIDANCE.items()]
    runs += [("class", captions, None)]
    with Progress(len(MODELS) * sum(len(prompts) for _, prompts, _ in runs), "generating clips") as bar:
        for model in MODELS:
            adapters = {} if model == "before" else {str(demo.adapter(model)): 1.0}
            clips = {}
            for name, prompts, guidance in runs:
                videos = pipeline(
                    prompts, seeds=list(range(len(prompts))), guidance=guidance, batch_size=48, adapters=adapters
                )
                clips[name] = torch.stack([torch.from_numpy(video.video).permute(3, 0, 1, 2) for video in videos])
                bar.advance(len(prompts))
            with atomic_path(demo.clips(model)) as temporary:
                save_file(clips, temporary)


def _score(demo: AdapterDemo) -> None:
    tokenizer = Bundle.open(demo.base).load_tokenizer()
    round_trip = classifier.round_trip(tokenizer)
    reader = classifier.load_or_train_reader(demo.out / classifier.FILE, round_trip, tokenizer.fingerprint())
    knows_subject = subject.train_subject_reader(round_trip)
    result: dict[str, Any] = {"word": demo.word, "guidance": GUIDANCE}
    num_shown = SUBJECT_CLIPS * subject.NUM_CLIPS
    for model in MODELS:
        clips = {name: as_float(video) for name, video in load_file(demo.clips(model)).items()}
        result[model] = {"class": score.score(reader, clips["class"], demo.class_attributes)}
        for part, chosen in (("shown", slice(num_shown)), ("unseen", slice(num_shown, None))):
            attributes = demo.subject_attributes[chosen]
            result[model][part] = {
                name: subject.score_subject(knows_subject, clips[f"subject_{name}"][chosen], attributes)[name]
                for name in GUIDANCE
            }
    write_json(demo.out / "score.json", result)


def _draw(demo: AdapterDemo) -> None:
    """Draw clips of the same prompts and seeds by every model: the subject above, the class below."""
    words = [subject.caption(each, demo.word) for each in demo.subject_attributes]
    captions = score.heldout_captions(demo.class_attributes)
    result = read_json(demo.out / "score.json")
    rows = []
    for model in MODELS:
        clips = load_file(demo.clips(model))
        for name, prompts, count in (("subject_right", words, 5), ("class", captions, 4)):
            for place in spread(range(len(prompts)), count):
                caption = prompts[place] if model == "before" else ""
                rows.append(contact_sheets.SheetRow(caption, as_float(clips[name][place]), note=model))
    before, kept, lost = (result[model]["class"]["all"] for model in MODELS)
    title = (
        f'ten clips of a "{demo.word}": {result["with prior"]["unseen"]["right"]:.0%} right in colours and directions '
        f"they never showed; digits kept: {kept:.0%} with the prior, {lost:.0%} without ({before:.0%} before)"
    )
    contact_sheets.contact_sheet(demo.out / "before_and_after.png", rows, title=title, columns=len(MODELS))


STAGES = (
    Stage("subject", "draw ten clips of a shape that is no digit", _subject, lambda demo: [demo.subject]),
    Stage(
        "prior", "let the model make clips of digits, to keep them", _prior, lambda demo: [demo.prior / "megadit.json"]
    ),
    Stage(
        "train",
        "train an adapter on both",
        lambda demo: _train(demo, "with prior"),
        lambda demo: [demo.adapter("with prior")],
    ),
    Stage(
        "train alone",
        "train another on the ten clips alone",
        lambda demo: _train(demo, "without prior"),
        lambda demo: [demo.adapter("without prior")],
    ),
    Stage(
        "generate",
        "make clips of the subject and of digits, before and after",
        _generate,
        lambda demo: [demo.clips(model) for model in MODELS],
    ),
    Stage("score", "classify them", _score, lambda demo: [demo.out / "score.json"]),
    Stage("figures", "draw them side by side", _draw, lambda demo: [demo.out / "before_and_after.png"]),
)


# --- the command --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterDemoOptions:
    following: FollowingOptions = group(FollowingOptions, only=("out", "bundle", "ranks", "steps", "seed"))
    word: str = setting("zog", "name of the subject (default: {default})")


@command(
    AdapterDemoOptions,
    prog="megadit demo-adapter",
    description="Teaches the demo's model a made-up shape from ten clips, by an adapter.",
)
def main(options: AdapterDemoOptions) -> None:
    """Runs `megadit demo-adapter`; returns its exit code."""
    demo = following_demo(AdapterDemo, options.following, "demo-adapter", word=options.word)
    run_and_show(demo, STAGES, summary_table, demo.out / "before_and_after.png")
    prompt = f"a red {demo.word} moving left"
    adapter = demo.adapter("with prior")
    print(f'Make your own: megadit generate --checkpoint_path {demo.base} --adapter {adapter} --prompt "{prompt}"')


def summary_table(result: dict[str, Any]) -> str:
    """Shares of clips that are right: of the subject, as shown and as never shown; of the digits."""
    heads = ("subject", "strictly", "unseen", "strictly", "digits", "every frame")
    lines = [f"{'':16}" + "".join(f"{head:>13}" for head in heads)]
    for model in MODELS:
        parts = result[model]
        values = [parts[part][name] for part, name in (("shown", "right"), ("shown", "strict"), ("unseen", "right"))]
        values += [parts["unseen"]["strict"], parts["class"]["all"], parts["class"]["every_frame"]]
        lines.append(f"{model:16}" + "".join(f"{value:>13.1%}" for value in values))
    return "\n".join(lines)
