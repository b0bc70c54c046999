"""`megadit reward`: teaches a bundle what a scorer rewards (DiffusionNFT, arXiv 2509.16117; Flow-GRPO, 2505.05470).

    megadit reward BUNDLE OUT --prompts prompts.txt --scorer_dir my_scorer --nproc 2

Each round makes a group of videos of some prompts with the policy so far, scores them (`megadit prepare rollouts`), and
trains from the policy on what was better and worse in each group. Rollouts need no gradients and no likelihoods, so any
sampler serves. Every so often the policy is compared with the base, on prompts of its own: if it has lost its diversity
or moved too far, the command ends, and the last good policy is kept. A round that was interrupted is continued.

    megadit reward BUNDLE OUT --prompts prompts.txt --scorer_dir my_scorer --adapter_rank 16

With a rank the policies are adapters on the base, whose weights training holds once.

    megadit reward BUNDLE OUT --prompts prompts.txt --scorer_dir my_scorer --policy_decay 0.5

With a decay the policy that makes the rollouts is an average of what the rounds trained, DiffusionNFT's soft update;
training goes on from its own weights.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megadit.infer.evaluate.extractors import open_extractors
from megadit.infer.evaluate.videos import open_videos, prompts_of
from megadit.infer.generate.options import refuse
from megadit.infer.pipeline.adapters import NO_ADAPTERS, adapted_defaults
from megadit.infer.runtimes.torch import use_device
from megadit.infer.sampling.resolve import resolve_settings
from megadit.models.bundle import Bundle
from megadit.models.convert.merging.average import average_bundles
from megadit.models.diffusion.settings import OF_ADAPTERS, PartialSettings
from megadit.models.megatron.launch import launch
from megadit.models.shared.cli.command import run_module
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import group, setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path, read_json, write_json
from megadit.models.shared.folder_lock import FolderLock
from megadit.models.shared.resources import ANYWAY_HELP
from megadit.train.config.load import resolve_config
from megadit.train.config.schema import RunConfig
from megadit.train.data.prepare.rewards import Scoring
from megadit.train.data.prepare.rollouts import SCORES_FILE
from megadit.train.data.prepare.states import States
from megadit.train.data.writer import is_prepared
from megadit.train.distill.check import Bounds, Comparison, compare
from megadit.train.distill.runs import StageRun, check_memory, open_trained, publish, stage_run, write_student
from megadit.train.distill.stages import REGRESSION_OVERRIDES, model_overrides

ROUNDS_FILE = "rounds.jsonl"
SLOWER = 1 / 8
"""Fraction of the recipe's learning rate that a trained network continues with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardOptions:
    base: str = setting(help="a bundle, or a training directory", positional=True, metavar="BUNDLE")
    out: Path = setting(
        help="folder for the rounds, and for bundle/ or adapter/, the last policy", positional=True, metavar="OUT"
    )
    prompts: str = setting("", "text file with a prompt per line", metavar="PATH")
    scoring: Scoring = group(Scoring)
    rounds: int = setting(8, "rounds of rollouts and training (default: {default})", above=0)
    prompts_per_round: int = setting(64, "prompts of a round (default: {default})", above=0)
    train_steps: int = setting(30, "training steps of a round (default: {default})", above=0)
    beta: float = setting(
        0.3, "train.distill.nft_beta: lower values move the policy further in a round (default: {default})", above=0
    )
    objective: Literal["diffusion_nft", "flow_grpo"] = setting(
        "diffusion_nft",
        "train.distill.objective: diffusion_nft needs no likelihoods and takes any sampler, flow_grpo learns from "
        "single steps of euler with --eta above 0 (default: {default})",
    )
    policy_decay: float = setting(
        0.0,
        "share of the policy that a round keeps: policy = decay * policy + (1 - decay) * trained (default: {default})",
        low=0,
        below=1,
    )
    states: int = setting(4, "sampling steps of each video that flow_grpo learns from (default: {default})", low=1)
    seed: int = setting(0, "seed of the rollouts' prompts and noise (default: {default})", low=0)
    recipe: str | None = setting(
        None, "recipe whose data and optimizer settings are used (default: the bundle's)", metavar="NAME"
    )
    config_file: str | None = setting(
        None, "YAML or TOML with values to change", names=("--config-file",), metavar="FILE"
    )
    adapter_rank: int | None = setting(
        None, "rank of the adapters that are trained as policies (default: whole networks)", low=1
    )
    nproc: int = setting(1, "ranks on this machine (default: {default})", low=1)
    check_prompts: str = setting(
        "", "text file with a prompt per line for the comparisons (default: --prompts)", metavar="PATH"
    )
    check_interval: int = setting(5, "rounds between comparisons (default: {default})", above=0)
    count: int = setting(32, "prompts of a comparison, two videos each (default: {default})", low=8)
    real: Path | None = setting(None, "real videos, for distances from them (needs --extractors)", metavar="DIR")
    spread: tuple[float, float] = setting(
        (0.5, 2.0), "allowed diversity of one prompt's videos, as multiples of the base's (default: {default})"
    )
    distance: float = setting(
        1.5, "largest distance from real videos, as a multiple of the base's (default: {default})", above=0
    )
    moved: float = setting(
        2.0,
        "largest distance from the base's video of the same noise, as a multiple of the base's diversity (default: "
        "{default})",
        above=0,
    )
    even_if_too_large: bool = setting(False, ANYWAY_HELP)
    device: str = setting(
        "auto", "device for comparisons: auto, cpu, cuda or cuda:N (default: {default})", metavar="NAME"
    )
    settings: PartialSettings = group(
        PartialSettings,
        "sampling of the rollouts (default: the bundle's, without guidance)",
        only=("sampler", "num_steps", "guidance", "eta"),
    )
    overrides: tuple[str, ...] = setting((), "values of the training", positional=True, metavar="section.key=value")


GROUPS: dict[str, tuple[str, ...]] = {
    "most used": ("prompts", "scorer_dir", "reward", "rounds", "adapter_rank", "nproc", "recipe", "config_file"),
    "a round": (
        *("objective", "prompts_per_round", "group_size", "train_steps", "beta", "policy_decay", "states", "seed"),
        "clip",
        "scorer_seconds",
    ),
    "sampling of the rollouts (default: the bundle's, without guidance)": ("sampler", "num_steps", "guidance", "eta"),
    "comparison with the base": (
        *("check_interval", "check_prompts", "count", "extractors", "real", "spread", "distance", "moved"),
        *("watch_dir", "device"),
    ),
    "other": ("even_if_too_large",),
}
EXAMPLES = (
    "megadit reward runs/demo/bundle runs/liked --prompts prompts.txt --scorer_dir my_scorer",
    "megadit reward bundle runs/liked --prompts prompts.txt --scorer_dir my_scorer --adapter_rank 16 optimizer.lr=1e-4",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A bundle, and the adapter on it."""

    bundle: Path
    adapter: Path | None = None
    trained: Path | None = None
    """The bundle with which training goes on, where the policy is an average."""

    @property
    def place(self) -> Path:
        return self.adapter or self.bundle


@command(
    RewardOptions,
    is_run=True,
    groups=GROUPS,
    examples=EXAMPLES,
    prog="megadit reward",
    description="Teaches a bundle what a scorer rewards (DiffusionNFT, Flow-GRPO).",
)
def main(options: RewardOptions) -> None:
    """Runs `megadit reward`; returns its exit code."""
    options.scoring.check()
    refuse(not options.prompts, "give --prompts FILE, a text file with a prompt per line")
    refuse(options.policy_decay and options.adapter_rank, "--policy_decay averages networks: leave out --adapter_rank")
    with FolderLock(options.out, "rewards"):
        _reward(options)


def _reward(options: RewardOptions) -> None:
    base, recipe = open_trained(options.base, options.recipe)
    asked = asdict(options.settings)
    defaults = resolve_settings(base.defaults, **asked | {"guidance": asked["guidance"] or 1.0})
    if options.objective == "flow_grpo":
        States(defaults, options.states)  # raises for settings whose steps have no likelihood
    prompts = prompts_of(options.prompts, None, None, None)
    policy = good = Policy(bundle=base.path)
    check = _check(options, replace(base, defaults=defaults))
    for number in range(1, options.rounds + 1):
        run = _training_run(options, base, recipe, policy, options.out / f"round_{number:03d}")
        if number == 1 and not options.even_if_too_large:
            check_memory([run], options.nproc)
        result = run.folder / ("adapter" if options.adapter_rank else "bundle")
        if not result.exists():
            _make_rollouts(options, run, policy, _chosen(prompts, options, number), number, defaults.to_dict())
            run_module("megadit.train", *run.command)
            write_student(result, base, {name: getattr(defaults, name) for name in OF_ADAPTERS})
        policy = _next_policy(options, policy, result)
        scores = read_json(run.folder / "rollouts" / SCORES_FILE)
        found = None
        if number % options.check_interval == 0 or number == options.rounds:
            found = check(policy)
            write_json(run.folder / "comparison.json", found.to_dict())
        _report(options.out, number, options.rounds, scores, found)
        if found is None:
            continue
        if (fault := found.fault(_bounds(options), "base")) is not None:
            if good.place != base.path:
                publish(good.place, options.out / result.name)
            raise UserError(
                f"round {number}: {fault} ({found.text('base')}): the policy gains reward by worse videos "
                f"(reward hacking). {good.place} is kept; add another reward, or try a lower optimizer.lr or "
                "fewer rounds"
            )
        good = policy
    out = options.out / result.name
    publish(policy.place, out)
    use = f"megadit generate --checkpoint_path {base.path} --adapter {out}" if options.adapter_rank else "export it"
    print(f"{out}: score {scores['score']:.4g} in its last round of rollouts; {use}")


def _next_policy(options: RewardOptions, policy: Policy, trained: Path) -> Policy:
    """The policy after a round that trained this adapter or bundle."""
    if options.adapter_rank:
        return replace(policy, adapter=trained)
    if not options.policy_decay:
        return Policy(bundle=trained)
    average = trained.parent / "policy"
    if not average.exists():
        decay = options.policy_decay
        average_bundles(Bundle.open(trained), {str(policy.bundle): decay / (1 - decay)}, average)
    return Policy(bundle=average, trained=trained)


def _chosen(prompts: Sequence[str], options: RewardOptions, number: int) -> list[str]:
    """The prompts of a round: all take turns, in an order drawn anew whenever all have been taken."""
    count = options.prompts_per_round
    turn, first = divmod((number - 1) * count, len(prompts))
    turns = range(turn, turn + 1 + (first + count) // len(prompts))
    drawn = [each for turn in turns for each in random.Random(f"{options.seed} {turn}").sample(prompts, len(prompts))]
    return drawn[first : first + count]


def _make_rollouts(
    options: RewardOptions, run: StageRun, policy: Policy, prompts: Sequence[str], number: int, settings: dict[str, Any]
) -> None:
    """Videos of a round with rewards; finished ones are left unchanged, interrupted ones are completed."""
    data = run.folder / "rollouts"
    if is_prepared(data):
        return
    run.folder.mkdir(parents=True, exist_ok=True)
    lines = run.folder / "prompts.jsonl"
    with atomic_path(lines) as temporary:
        temporary.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    videos = options.prompts_per_round * options.scoring.group_size
    request = [str(policy.bundle), str(data), "--prompt_file", str(lines), *options.scoring.arguments]
    request += ["--seed", str(options.seed + (number - 1) * videos)]
    request += ["--adapter", str(policy.adapter)] if policy.adapter else []
    request += [f"--{name}={settings[name]}" for name in ("sampler", "num_steps", "guidance", "eta")]
    request += ["--states", str(options.states)] if options.objective == "flow_grpo" else []
    if launch("megadit.train.data.prepare.command", ["rollouts", *request], num_processes=options.nproc):
        raise UserError(f"the videos in {data} are incomplete; run the command again")


def _training_run(options: RewardOptions, base: Bundle, recipe: str, policy: Policy, folder: Path) -> StageRun:
    """The training run of a round, which begins with the policy's weights. Raises UserError if it could not start."""
    plain = resolve_config(recipe, config_file=options.config_file)
    adapter = []
    if options.adapter_rank is not None:
        adapter = [f"train.adapter.rank={options.adapter_rank}"]
        adapter += [] if policy.adapter is None else [f"train.distill.teacher_adapter={policy.adapter}"]
    overrides = [
        *model_overrides(base.config, plain),
        f"train.distill.teacher={policy.bundle}",
        f"train.distill.objective={options.objective}",
        *([f"train.distill.nft_beta={options.beta:g}"] if options.objective == "diffusion_nft" else []),
        *adapter,
        *([] if policy.trained is None else [f"checkpoint.init_from={policy.trained}"]),
        f"train.output_dir={folder}",
        f"train.train_iters={options.train_steps}",
        *_learning_rate(plain, options.train_steps),
        *("diffusion.learned_uncertainty=false", "data.text_dropout=0.0", "validation.interval=0", "ema.sigma_rels=[]"),
        *REGRESSION_OVERRIDES,
        *options.overrides,
    ]
    run = stage_run(folder, recipe, overrides, options, data=folder / "rollouts")
    refuse(run.config.model != base.config, "the network of a policy is that of the bundle: leave out model.*")
    return run


def _learning_rate(run: RunConfig, steps: int) -> list[str]:
    """Overrides of the learning rate, which falls to 0 in each round: its policy is sampled without an average."""
    rate = f"optimizer.lr={SLOWER * run.optimizer.lr:.6g}"
    return [rate, "optimizer.min_lr=0.0", "optimizer.lr_decay_style=linear", f"optimizer.lr_warmup_iters={steps // 10}"]


def _bounds(options: RewardOptions) -> Bounds:
    low, high = options.spread
    return Bounds(least_spread=low, most_spread=high, most_distance=options.distance, most_moved=options.moved)


def _check(options: RewardOptions, base: Bundle) -> Callable[[Policy], Comparison]:
    """A function that compares a policy with the base, which has the sampling settings of the rollouts; its inputs are
    checked before anything is made."""
    device = use_device(options.device)
    extractors = [each for path in options.scoring.extractors for each in open_extractors(path, device)]
    refuse(options.real and not extractors, "--real needs --extractors, whose features are compared")
    real = None if options.real is None else open_videos(options.real, None)
    prompts = prompts_of(options.check_prompts or options.prompts, None, None, options.count)

    def check(policy: Policy) -> Comparison:
        adapters = NO_ADAPTERS if policy.adapter is None else {str(policy.adapter): 1.0}
        called = replace(Bundle.open(policy.bundle), defaults=adapted_defaults(base.defaults, adapters))
        found = {"adapters": adapters, "extractors": extractors, "real": real, "device": str(device)}
        return compare(options.out / "check", base, called, prompts, **found)

    return check


def _report(out: Path, number: int, count: int, scores: dict[str, Any], found: Comparison | None) -> None:
    means = ", ".join(f"{name} {mean:.4g}" for name, mean in scores["means"].items())
    print(f"[{number}/{count}] score of the rollouts {scores['score']:.4g} ({means})", flush=True)
    if found is not None:
        print(f"  beside the base: {found.text('base')}", flush=True)
    known = [json.loads(line) for line in _lines(out / ROUNDS_FILE)][: number - 1]
    known.append({"round": number, **scores, "comparison": None if found is None else found.to_dict()})
    with atomic_path(out / ROUNDS_FILE) as temporary:
        temporary.write_text("".join(json.dumps(line) + "\n" for line in known), encoding="utf-8")


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


if __name__ == "__main__":
    raise SystemExit(main())
