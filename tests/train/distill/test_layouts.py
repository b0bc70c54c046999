"""A student learns in any layout as on one rank, whatever its objective: its losses, its critic's, its weights."""

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from megadit.models.bundle_writer import write_bundle
from megadit.models.configs.block import ExpertConfig
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.megatron.checkpoint import _read
from megadit.models.networks.dit import DiT
from megadit.models.text_encoders import HashedWordEncoder
from megadit.models.tokenizers import HaarTokenizer
from megadit.train.recipes import load_recipe

from ..conftest import numbers

JOB = Path(__file__).parents[1] / "jobs" / "layouts.py"

pytestmark = pytest.mark.slow

CHANNELS = 24
SIGMAS = [20.0, 2.0, 0.4]
MATCHING = {"objective": "distribution_matching", "guidance": 3.0, "sigmas": SIGMAS}
OBJECTIVES = {
    "guidance": {"objective": "guidance", "guidance": 3.0},
    "progressive": {"objective": "progressive", "guidance": 3.0, "sigmas": SIGMAS},
    "consistency": {"objective": "consistency", "sigmas": SIGMAS},
    "continuous": {"objective": "continuous_consistency", "guidance": 3.0, "tangent_warmup": 3},
    "limit": {"objective": "consistency_limit"},
    "regression": {"objective": "regression", "sigmas": SIGMAS},
    "nft": {"objective": "diffusion_nft", "nft_beta": 0.3},
    "dpo": {"objective": "dpo", "dpo_beta": 0.5},
    "grpo": {"objective": "flow_grpo", "grpo_clip": 0.1},
    "matching": MATCHING,
    "adversarial": {**MATCHING, "adversarial_weight": 0.3, "critic_updates": 1},
}
EXPERTS = {"num_experts": 4, "ffn_hidden_size": 24}
AXES = {"family": "st_dit", "adaln_lora_dim": 4}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CP = {"context_parallel_size": 2}
FSDP = {"data_parallel": "fsdp"}
PP = {"pipeline_model_parallel_size": 2}
COVERED = {
    "sp": (SP, ("guidance", "consistency", "regression", "matching told", "grpo")),
    "recomputed sp": ({**SP, "recompute_granularity": "full"}, ("continuous", "adversarial given")),
    "cp": (CP, ("guidance told given", "progressive", "limit", "nft", "dpo", "grpo", "matching", "continuous of axes")),
    "ring": ({**CP, "context_parallel_comm": "ring"}, ("continuous given", "matching given")),
    "fsdp": (FSDP, ("guidance told", "progressive", "continuous", "regression", "matching", "adversarial")),
    "two readers": ({}, ("guidance told", "consistency", "limit", "matching")),
    "distributed optimizer": ({"data_parallel": "distributed_optimizer"}, ("continuous", "nft", "dpo", "adversarial")),
    "experts": ({"expert_model_parallel_size": 2}, ("progressive", "continuous", "matching")),
    "pp": (PP, ("nft", "dpo", "grpo", "regression")),
}
"""Layout -> who learns in it: every objective with its samples on several ranks, and with its weights or readers."""
LAYOUTS = {f"{name} {layout}": parallel for layout, (parallel, names) in COVERED.items() for name in names}
"""The first word is the objective; `given`, `experts` and `axes` are what the network has, `told` says that the student
is told scales of guidance."""
KINDS = ("given", "experts", "axes", "told")
SCALES = [1.0, 6.0]
BROKEN = {
    "sum over the ranks of a sample": ("matching", CP),
    "text left out": ("guidance", SP),
    "activations of the teacher": ("nft", PP),
}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """Two bundles of random weights for each kind of network: a teacher, and what its student starts from (of one that
    starts as its teacher the losses would be small differences, which are less exact)."""
    plain = replace(
        load_recipe("digits_tiny").model, num_layers=2, num_attention_heads=12, head_dim=8, in_channels=CHANNELS
    )
    kinds = {
        "": plain,
        "given": replace(plain, conditioning_sigma=0.02),
        "experts": replace(plain, experts=ExpertConfig(**EXPERTS)),
        "axes": replace(plain, **AXES),
    }

    def two(model, of_student):
        models = {3: model, 4: of_student}
        return [write(tmp_path_factory.mktemp("network") / "bundle", each, seed) for seed, each in models.items()]

    pairs = {kind: two(model, model) for kind, model in kinds.items()}
    told = {
        kind: two(kinds[kind], replace(kinds[kind], guidance_embedding_range=tuple(SCALES))) for kind in ("", "given")
    }
    return pairs | {f"{kind} told".strip(): pair for kind, pair in told.items()}


def write(path, model, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = DiT(model).state_dict()
    write_bundle(
        path,
        config=model,
        state_dict={name: 0.1 * torch.randn(value.shape, generator=generator) for name, value in shapes.items()},
        tokenizer=HaarTokenizer(temporal_compression=2, spatial_compression=2, sigma_data=model.sigma_data),
        text_encoder=HashedWordEncoder(dim=model.crossattn_emb_size),
        defaults=SamplingSettings(num_steps=4, guidance=3.0, num_frames=3, height=8, width=8, fps=8.0),
    )
    return path


def in_layout(case, parallel):
    """With both packs at once, as on one rank, where it has both; on a ring and in stages, one after the other."""
    packs = 2 if parallel == CP or "sequence_parallel" in parallel else 1
    return {**case, "parallel": parallel, "data": case["data"] | {"micro_batch_size": packs}}


def case_of(name, teachers):
    objective, *kinds = name.replace(",", "").split()
    kind = " ".join(kind for kind in KINDS if kind in kinds)
    teacher, start = map(str, teachers[kind])
    case = {"distill": {**OBJECTIVES[objective], "teacher": teacher}, "init_from": start}
    case |= {"model": {"in_channels": CHANNELS}, "data": {"global_batch_size": 2, "micro_batch_size": 2}}
    case["averages"] = False
    case["diffusion"] = {"learned_uncertainty": objective == "continuous"}
    if objective == "dpo":  # room for two videos
        case["data"] |= {"seq_length": 128, "text_seq_length": 96}
    if "given" in kinds:
        case["conditioning"] = ["first_frame:0.3", "prefix:0.2", "edit:1.0"]
    if "experts" in kinds:
        case["model"]["experts"] = EXPERTS
    if "axes" in kinds:
        case["model"] |= AXES
    if "told" in kinds:
        case["model"]["guidance_embedding_range"], case["distill"]["guidance"] = SCALES, 1.0
    return case


def counterpart(name):
    """The case of one rank."""
    objective, *kinds = name.replace(",", "").split()
    return " ".join([objective, *(kind for kind in KINDS if kind in kinds)])


def digests(teachers):
    files = [
        file for paths in teachers.values() for path in paths for file in sorted(path.rglob("*")) if file.is_file()
    ]
    return {str(file): sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="module")
def before(teachers):
    """What the bundles were when they were written."""
    return digests(teachers)


@pytest.fixture(scope="module")
def folder(folders_of, teachers, before):
    one = {counterpart(name): case_of(name, teachers) for name in LAYOUTS}
    two = {name: in_layout(case_of(name, teachers), parallel) for name, parallel in LAYOUTS.items()}
    for what, (name, parallel) in BROKEN.items():
        two[f"without {what}"] = in_layout({**case_of(name, teachers), "steps": 1, "broken": what}, parallel)
    return folders_of({1: one, 2: two}.__getitem__, JOB, timeout=560)


def has_critic(name):
    return name.startswith(("matching", "adversarial"))


def deviation(ours, one):
    """The largest relative distance of a loss of any network."""
    pairs = [pair for key in ("loss", "critic_loss") for pair in zip(ours[key], one[key], strict=False)]
    return max(abs(x - y) / abs(y) for x, y in pairs)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_student_learns_in_any_layout_as_on_one_rank(folder, name):
    ours, one = numbers(folder(2), name), numbers(folder(1), counterpart(name))
    assert len(one["loss"]) == 2 and bool(one["critic_loss"]) == has_critic(name)
    assert deviation(ours, one) < 1e-6 and ours["spread"] == 0
    expected = _read(folder(1) / counterpart(name) / "tensors", "")
    found = _read(folder(2) / name / "tensors", "")
    assert expected.keys() == found.keys()
    assert any(key.startswith("critic.optimizer.") for key in found) == has_critic(name)
    assert any("critic.model.adversary." in key for key in found) == name.startswith("adversarial")
    weights = [key for key in expected if "model." in key]
    assert max(((found[key] - expected[key]).norm() / expected[key].norm()).item() for key in weights) < 1e-4


def test_every_objective_moves_the_student_elsewhere(folder):
    students = [_read(folder(1) / name / "tensors", "model.") for name in OBJECTIVES]
    heads = [next(value for key, value in student.items() if "final_layer" in key) for student in students]
    assert all(not torch.equal(a, b) for place, a in enumerate(heads) for b in heads[:place])


@pytest.mark.parametrize("what", BROKEN)
def test_what_holds_it_together_is_needed(folder, what):
    broken, one = numbers(folder(2), f"without {what}"), numbers(folder(1), BROKEN[what][0])
    assert deviation(broken, one) > 1e-4


def test_a_teacher_stays_as_it_is(folder, teachers, before):
    for name in LAYOUTS:
        assert numbers(folder(2), name)["changed"] == []
    assert digests(teachers) == before
