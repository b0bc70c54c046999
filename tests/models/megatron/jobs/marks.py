"""What a rank holds of each parameter and how it is marked: networks in every kind of layout, on rank 0 of a group
of ranks that are not there.

Usage: marks.py OUT. OUT has {"marks": {network: {parameter: {case: marks}}}, "unseen": [changes of the plan that leave
all marks as they are], "unused": [patterns of the plan that no parameter has]}.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megadit.models.megatron import cpu_shim

cpu_shim.install()

from megatron.core import parallel_state  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from megadit.models.configs.adapter import AdapterConfig  # noqa: E402
from megadit.models.configs.block import ExpertConfig  # noqa: E402
from megadit.models.configs.config import DiTConfig  # noqa: E402
from megadit.models.lora.adapters import adapter_key, attach  # noqa: E402
from megadit.models.megatron import groups as process_groups  # noqa: E402
from megadit.models.megatron import plan  # noqa: E402
from megadit.models.megatron.blocks import LINEARS  # noqa: E402
from megadit.models.megatron.linears.parallel import ColumnLinear, RowLinear  # noqa: E402
from megadit.models.megatron.parallel_sizes import ParallelSizes  # noqa: E402
from megadit.models.megatron.parallelize import parallelize  # noqa: E402
from megadit.models.megatron.shards import is_expert, splits  # noqa: E402
from megadit.models.megatron.transformer_config import transformer_config  # noqa: E402
from megadit.models.networks.dit import Chunk  # noqa: E402
from megadit.models.networks.registry import build_network  # noqa: E402

SIZES = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "crossattn_emb_size": 16, "in_channels": 2}
LEARNED = {"position_embedding": "learned", "learned_positions": (4, 5, 5)}
EXPERTS = {"num_experts": 4, "ffn_hidden_size": 24}
MOVIEGEN = {"family": "moviegen", "num_query_groups": 2, **LEARNED}
CLASSES = {"num_classes": 5, "crossattn_emb_size": 2, "learned_variance": True}
NETWORKS = {
    "megadit": {},
    "dit": {"family": "dit", "position_embedding": "sincos", "qk_layernorm": False, **CLASSES},
    "cosmos": {"family": "cosmos", "adaln_lora_dim": 4, "learned_positions": (4, 5, 5), "padding_mask_channel": True},
    "nemo": {"family": "nemo", "position_embedding": "sincos", "hidden_size": 256},
    "dfm": {"family": "dfm", "hidden_size": 256, "adaln_lora_dim": 4},
    "moviegen": MOVIEGEN | {"qk_layernorm": False},
    "moviegen of NeMo": MOVIEGEN | {"compat": "nemo", "hidden_size": 256, "qk_layernorm": False},
    "st_dit": {"family": "st_dit", "adaln_lora_dim": 4},
    "wan": {"family": "wan"},
    "wan of images": {"family": "wan", "image_size": 20, "image_positions": 3},
    "vit": {
        **{"family": "vit", "position_embedding": "learned", "learned_positions": (1, 4, 4), "qk_layernorm": False},
        **{"num_classes": 5, "crossattn_emb_size": 2},
    },
    "experts": {"experts": ExpertConfig(**EXPERTS, shared_ffn_hidden_size=20)},
    "experts of moviegen": MOVIEGEN | {"experts": ExpertConfig(**EXPERTS, routing="expert_choice")},
}
ADAPTER = AdapterConfig(rank=3, targets=("*",), kind="dora")
"""Beside every linear of a network."""
SP = {"tensor": 2, "sequence_parallel": True}
LAYOUTS = {
    "one": (1, {}),
    "tp": (2, {"tensor": 2}),
    "sp": (2, SP),
    "pp": (2, {"pipeline": 2}),
    "sp pp": (4, SP | {"pipeline": 2}),
    "ep": (2, {"expert": 2}),
    "sp ep": (2, SP | {"expert": 2}),
    "sp experts cut": (2, SP | {"expert_tensor": 2}),
}
"""name: (ranks, sizes)."""
ROLES = [role for role in vars(plan).values() if isinstance(role, plan.Role)]


def start(world_size):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    process_groups._copy_group = lambda readers: None  # it asks other ranks


def network(name):
    return DiTConfig(**SIZES | NETWORKS[name])


def marks(config, sizes, table=plan.PLAN, adapter=None, impl="local"):
    """{case: {parameter: its marks}} of each part of the network."""
    groups, found = process_groups.initialize(sizes, config), {}
    try:
        for index in range(sizes.num_chunks):
            with torch.device("meta"):
                dit = build_network(config, Chunk(index, sizes.num_chunks))
            if adapter is not None:
                attach(dit, adapter)
            megatron = transformer_config(config, sizes, dtype=torch.float32)
            parallelize(dit, megatron, groups, device=torch.device("cpu"), plan=table, split=LINEARS[impl])
            found[f" {index}" if sizes.num_chunks > 1 else ""] = {
                name: in_words(dit.get_submodule(name.rpartition(".")[0]), parameter)
                for name, parameter in dit.named_parameters()
            }
    finally:
        parallel_state.destroy_model_parallel()
    return found


def in_words(owner, parameter):
    found = ["x".join(map(str, parameter.shape)), _linear(owner)]
    found += [f"split {dim} {axis}" for dim, axis in splits(parameter)]
    if getattr(parameter, "tensor_model_parallel", False):
        found.append(f"dim {parameter.partition_dim}/{parameter.partition_stride}")
    found += ["partial"] * getattr(parameter, "sequence_parallel", False) + ["own"] * is_expert(parameter)
    names = ("pipeline_parallel", "shared_embedding", "shared")
    return ", ".join(filter(None, found + [name for name in names if getattr(parameter, name, False)]))


def _linear(module):
    if isinstance(module, ColumnLinear):
        return "column" + " gathers" * module.sequence_parallel + " reduces" * module.allreduce_dgrad
    return "row" + " scatters" * module.sequence_parallel if isinstance(module, RowLinear) else ""


def all_marks():
    found = {name: {} for name in NETWORKS}
    for layout, (world_size, sizes) in LAYOUTS.items():
        start(world_size)
        for name, parameters in found.items():
            if not ParallelSizes(**sizes).is_legal(network(name), world_size):
                continue
            for part, marked in marks(network(name), ParallelSizes(**sizes)).items():
                for parameter, words in marked.items():
                    cases = parameters.setdefault(parameter.replace("blocks.1.", "blocks.0."), {})
                    assert cases.setdefault(layout + part, words) == words, "blocks differ"
        dist.destroy_process_group()
    return found


def unseen_changes():
    """(row, role) of each change of one row under which every network is marked as before; an error is seen."""
    start(2)
    sizes = ParallelSizes(**SP)
    networks = [(network(name), None, "local") for name in NETWORKS]
    networks += [(network("megadit"), ADAPTER, "local"), (network("megadit"), None, "int8")]
    before = [marks(config, sizes, adapter=adapter, impl=impl) for config, adapter, impl in networks]
    decided = [{row_of(name) for parameters in each.values() for name in parameters} for each in before]

    def is_seen(table, row):
        for (config, *beside), expected, rows in zip(networks, before, decided, strict=True):
            if row not in rows:
                continue
            try:
                if marks(config, sizes, table, *beside) != expected:
                    return True
            except (AssertionError, IndexError, RuntimeError, LookupError):
                return True
        return False

    found = []
    for index, row in enumerate(plan.PLAN):
        for role in ROLES:
            changed = (*plan.PLAN[:index], replace(row, role=role), *plan.PLAN[index + 1 :])
            # how the linear is shared, not its adapter, says whether tokens are gathered
            is_same = "adapters" in row.names and {role, row.role} == {plan.COLUMN, plan.COLUMN_OF_TEXT}
            if role is not row.role and not is_same and not is_seen(changed, row):
                found.append((row.names, role.name))
    dist.destroy_process_group()
    return found


def marks_beside(**beside):
    """{parameter: its marks} under sequence parallelism."""
    start(2)
    (found,) = marks(network("megadit"), ParallelSizes(**SP), **beside).values()
    dist.destroy_process_group()
    return found


def row_of(name):
    return next(row for row in plan.PLAN if row.has(name))


def unused_patterns(found, others):
    names = {name for parameters in found.values() for name in parameters} | set(others)
    decided = {name: row_of(name) for name in names}
    patterns = [(row, pattern) for row in plan.PLAN for pattern in row.names.split("|")]
    return [
        pattern
        for row, pattern in patterns
        if not any(decided[name] is row and replace(row, names=pattern).has(name) for name in names)
    ]


if __name__ == "__main__":
    found, adapted, in_eight_bits = all_marks(), marks_beside(adapter=ADAPTER), marks_beside(impl="int8")
    adapted = {name: words for name, words in adapted.items() if adapter_key(name)}
    # the others of two towers are the parameters of networks above
    unused = unused_patterns(found, [*adapted, *in_eight_bits, "log_scale", "score_offset"])
    result = {"marks": found, "adapter": adapted, "unseen": unseen_changes(), "unused": unused}
    Path(sys.argv[1]).write_text(json.dumps(result))
