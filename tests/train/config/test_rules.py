"""Each rule of a run has a configuration that breaks it, and is missed where it is left out."""

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megadit.models import text_encoders, tokenizers
from megadit.models.configs.adapter import AdapterConfig
from megadit.models.configs.block import ExpertConfig
from megadit.models.configs.config import TextTowerConfig
from megadit.models.megatron import extensions
from megadit.models.shared.errors import UserError, first_broken
from megadit.models.shared.files import write_json
from megadit.train.config import rules
from megadit.train.config.distill import DistillConfig
from megadit.train.config.facts import Run
from megadit.train.config.load import config_keys
from megadit.train.config.rules import RULES, check_inputs, check_layout
from megadit.train.config.schema import RunConfig
from tests.train.config.test_schema import make_run

EXPERTS = {"experts": ExpertConfig(num_experts=6)}
DATASET = SimpleNamespace(
    root="here",
    latent_channels=16,
    text_width=1024,
    sigma_data=0.5,
    store=None,
    tokenizer_fingerprint="its own",
    has_keyframes=False,
    latent_shapes=(),
)


@dataclass(frozen=True, kw_only=True)
class Breach:
    """A configuration that breaks a rule, and where that is seen."""

    says: str
    of: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Section -> values."""
    seen: dict[str, Any] = field(default_factory=dict)
    """Fields of `Run`."""


def breach(says: str, seen: dict[str, Any] | None = None, **of: dict[str, Any]) -> Breach:
    return Breach(says=says, of=of, seen=seen or {})


def of_fp8(says: str, *, train=None, parallel=None, **of: dict[str, Any]) -> Breach:
    train = {"fp8": "hybrid", "precision": "bf16", **(train or {})}
    return breach(says, train=train, parallel={"transformer_impl": "transformer_engine", **(parallel or {})}, **of)


def of_fp16(says: str, *, train=None, **of: dict[str, Any]) -> Breach:
    return breach(
        f"train.precision=fp16 needs a loss scale, {says}", train={"precision": "fp16", **(train or {})}, **of
    )


def of_graphs(says: str, *, parallel=None, **of: dict[str, Any]) -> Breach:
    says = f"parallel.cuda_graph_max_segments=8 does not go with {says}"
    return breach(says, parallel={"cuda_graph_max_segments": 8, **(parallel or {})}, **of)


def of_classifier(says: str, seen=None, *, model=None, data=None, **of: dict[str, Any]) -> Breach:
    positions = {"position_embedding": "learned", "learned_positions": (1, 4, 4), "crossattn_emb_size": 2}
    model = {"family": "vit", "num_classes": 5, **positions, **(model or {})}
    return breach(says, seen, model=model, data={"text_dropout": 0.0, **(data or {})}, **of)


def of_towers(says: str, seen=None, *, model=None, **of: dict[str, Any]) -> Breach:
    tower = TextTowerConfig(num_layers=1, num_attention_heads=2, num_words=600)
    two = {"family": "clip", "num_classes": None, "text_tower": tower, **(model or {})}
    return of_classifier(says, seen, model=two, **of)


def on_start(says: str, **of: dict[str, Any]) -> Breach:
    of = {"train": {"output_dir": "runs/x"}, **of}
    return breach(says, {"starts_here": True}, **of)


def of_dataset(says: str, *, validation=None, **facts: Any) -> Breach:
    seen = {"starts_here": True, "dataset": SimpleNamespace(**{**vars(DATASET), **facts})}
    return breach(says, seen, train={"output_dir": "runs/x"}, validation=validation or {})


def of_sampling(says: str, **sampling: Any) -> Breach:
    return breach(says, validation={"sampling": sampling})


ST_DIT = {"family": "st_dit", "adaln_lora_dim": 16}
MUON = {"optimizer": "muon"}
ADAPTER = {"adapter": AdapterConfig(rank=2)}
IN_INT8 = {**ADAPTER, "base_precision": "int8"}
STUDENT = {"distill": DistillConfig(teacher="nowhere", objective="guidance")}
MATCHING = {"distill": DistillConfig(teacher="nowhere", objective="distribution_matching", sigmas=(80.0, 1.0))}
BREACHES = (
    breach(
        "global_batch_size=8 is not a multiple of data.micro_batch_size=3; use 6 or 9", data={"micro_batch_size": 3}
    ),
    breach("data.mock_latent_shapes=[] needs at least one (T, H, W)", data={"mock_latent_shapes": ()}),
    breach(
        "diffusion.p_std=2.0 is the scale of diffusion.noise_levels=mode, at most 1.75",
        diffusion={"noise_levels": "mode", "p_std": 2.0},
    ),
    breach("optimizer.moments=bf16 is for optimizer.optimizer=adamw", optimizer={**MUON, "moments": "bf16"}),
    breach("optimizer.min_lr=0.01 exceeds optimizer.lr=0.001; lower it", optimizer={"min_lr": 0.01}),
    breach(
        "optimizer.lr_decay_iters=5 must exceed optimizer.lr_warmup_iters=5",
        optimizer={"lr_warmup_iters": 5, "lr_decay_iters": 5},
    ),
    breach("ema.sigma_rels=[0.1, 0.1] lists one profile twice", ema={"sigma_rels": (0.1, 0.1)}),
    breach(
        "did you mean 'first_frame'", data={"conditioning": ("first_fame:0.2",)}, model={"conditioning_sigma": 0.02}
    ),
    breach("data.conditioning needs model.conditioning_sigma", data={"conditioning": ("first_frame:0.2",)}),
    breach(
        "model.conditioning_mode=channels model.image_size=None cannot be trained here",
        model={"conditioning_mode": "channels", "conditioning_sigma": 0.02},
    ),
    breach(
        "data.conditioning_dropout=[0.5, 0.3, 0.2] must be three fractions",
        data={"conditioning_dropout": (0.5, 0.3, 0.2)},
    ),
    breach("train.label_smoothing=0.1 is for classifiers", train={"label_smoothing": 0.1}),
    breach("data.mixup=0.2 is for classifiers", data={"mixup": 0.2}),
    of_classifier("model.family=vit learns classes: give model.num_classes", model={"num_classes": None}),
    of_towers(
        "model.text_tower.num_attention_heads=2 is not a multiple of parallel.tensor_model_parallel_size=3",
        parallel={"tensor_model_parallel_size": 3},
    ),
    of_towers(
        "data.text_seq_length=63 is not a multiple of 2: parallel.sequence_parallel divides",
        data={"text_seq_length": 63},
        parallel={"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
    breach("train.contrast_rows=8 is for a softmax over all pairs", train={"contrast_rows": 8}),
    of_classifier("data.text_dropout=0.1 drops labels or texts", data={"text_dropout": 0.1}),
    of_classifier("parallel.context_parallel_size=2 would divide", parallel={"context_parallel_size": 2}),
    of_classifier("are for networks that denoise; leave them out", diffusion={"learned_uncertainty": True}),
    of_classifier(
        "validation.evaluate_interval=5 evaluates videos, which vit does not generate",
        validation={"evaluate_interval": 5},
    ),
    breach(
        "train.adapter.targets: no linear of the network is named 'blocks.*.self_atention.q'; did you mean 'blocks.9.",
        train={"adapter": AdapterConfig(rank=2, targets=("blocks.*.self_atention.q",))},
    ),
    breach(
        "gradient_accumulation_fusion=true sums gradients of matrices that train.adapter freezes",
        train=ADAPTER,
        parallel={"gradient_accumulation_fusion": True},
    ),
    breach(
        "train.adapter.targets=['blocks.0.*'] leaves nothing to train in one of the 2 model chunks",
        train={"adapter": AdapterConfig(rank=2, targets=("blocks.0.*",))},
        parallel={"pipeline_model_parallel_size": 2},
    ),
    breach("train.base_precision=int8 is for the frozen base of an adapter", train={"base_precision": "int8"}),
    breach(
        "train.base_precision=int8 does not work with parallel.data_parallel=fsdp",
        train=IN_INT8,
        parallel={"data_parallel": "fsdp"},
    ),
    breach(
        "train.base_precision=int8 has linears of its own",
        train=IN_INT8,
        parallel={"transformer_impl": "transformer_engine"},
    ),
    breach(
        "train.distill.objective=guidance does not support pipeline parallelism, as diffusion_nft",
        train=STUDENT,
        parallel={"pipeline_model_parallel_size": 2},
    ),
    breach(
        "train.distill.objective=diffusion_nft does not support pipeline parallelism",
        train={"distill": DistillConfig(teacher="nowhere", objective="diffusion_nft", guidance=2.0)},
        parallel={"pipeline_model_parallel_size": 2},
    ),
    breach(
        "train.distill needs whole pipeline stages",
        train={"distill": DistillConfig(teacher="nowhere", objective="diffusion_nft")},
        parallel={"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        model={"num_layers": 4},
    ),
    breach(
        "diffusion.learned_uncertainty=true weights the denoising loss",
        train=STUDENT,
        diffusion={"learned_uncertainty": True},
    ),
    breach(
        "train.distill.objective=continuous_consistency needs forward-mode differentiation, which TransformerEngine",
        train={"distill": DistillConfig(teacher="nowhere", objective="continuous_consistency")},
        parallel={"transformer_impl": "transformer_engine"},
    ),
    breach(
        "train.distill.teacher_adapter=one initializes train.adapter",
        train={"distill": DistillConfig(teacher="nowhere", teacher_adapter="one", objective="guidance")},
    ),
    breach(
        "train.distill.objective=consistency needs the noise levels of the student's sampling steps",
        train={"distill": DistillConfig(teacher="nowhere", objective="consistency")},
    ),
    breach(
        "train.distill.objective=regression learns videos that the teacher generated from noise and text alone",
        train={"distill": DistillConfig(teacher="nowhere", objective="regression", sigmas=(80.0,))},
        data={"conditioning": ("first_frame:0.5",)},
        model={"conditioning_sigma": 0.02},
    ),
    breach(
        "validation.sampling: guidance=9 is outside 1 to 6, the range of this guidance-distilled model",
        model={"guidance_embedding_range": (1.0, 6.0)},
        validation={"sampling": {"guidance": 9.0}},
    ),
    breach(
        "train.distill.guidance=3.0 is one scale, and model.guidance_embedding_range=[1.0, 6.0] trains",
        train={"distill": DistillConfig(teacher="nowhere", objective="guidance", guidance=3.0)},
        model={"guidance_embedding_range": (1.0, 6.0)},
        validation={"sampling": {"guidance": 3.0}},
    ),
    breach(
        "train.distill.objective=regression learns from videos of one guidance scale",
        train={"distill": DistillConfig(teacher="nowhere", objective="regression", sigmas=(80.0,))},
        model={"guidance_embedding_range": (1.0, 6.0)},
        validation={"sampling": {"guidance": 3.0}},
    ),
    breach(
        "train.distill.sigmas=[1.0, 2.0] must decrease",
        train={"distill": DistillConfig(teacher="nowhere", objective="progressive", sigmas=(1.0, 2.0))},
    ),
    breach(
        "train.distill.adversarial_weight=0.1 needs a critic, which only",
        train={"distill": DistillConfig(teacher="nowhere", objective="guidance", adversarial_weight=0.1)},
    ),
    breach(
        "train.distill.adversarial_weight=0.1 takes gradients through the critic, to which",
        train={"distill": replace(MATCHING["distill"], adversarial_weight=0.1)},
        model=EXPERTS,
    ),
    breach(
        "train.distill.objective=distribution_matching updates two networks in a step",
        train=MATCHING,
        health={"on_not_finite": "skip"},
    ),
    breach(
        "gradient_accumulation_fusion=true needs gradient buffers, which parallel.data_parallel=fsdp",
        parallel={"gradient_accumulation_fusion": True, "data_parallel": "fsdp"},
    ),
    breach(
        "cpu_offloading_num_layers=1 offloads blocks that are not recomputed",
        parallel={"cpu_offloading_num_layers": 1, "recompute_granularity": "full"},
    ),
    breach("recompute_num_layers=1 needs parallel.recompute_granularity=full", parallel={"recompute_num_layers": 1}),
    # layouts
    breach("start 2 or 4 ranks", {"world_size": 3}, parallel={"tensor_model_parallel_size": 2}),
    breach("does not divide model.num_attention_heads=6", parallel={"tensor_model_parallel_size": 4}),
    breach(
        "does not divide model.num_query_groups=3",
        parallel={"tensor_model_parallel_size": 2},
        model={"num_query_groups": 3},
    ),
    breach(
        "does not divide model.ffn_hidden_size=99",
        parallel={"tensor_model_parallel_size": 2},
        model={"ffn_hidden_size": 99},
    ),
    breach("with 1 there is nothing to split", parallel={"sequence_parallel": True}),
    breach("does not divide the 6 heads of a tensor-parallel rank", parallel={"context_parallel_size": 4}),
    breach("do not divide model.num_layers=12", parallel={"pipeline_model_parallel_size": 5}),
    of_towers("do not divide model.text_tower.num_layers=1", parallel={"pipeline_model_parallel_size": 2}),
    breach("nothing to interleave", parallel={"virtual_pipeline_model_parallel_size": 2}),
    breach(
        "cannot be combined with parallel.data_parallel=fsdp",
        parallel={"pipeline_model_parallel_size": 2, "data_parallel": "fsdp"},
    ),
    breach("the network has none (model.experts.num_experts=0)", parallel={"expert_model_parallel_size": 2}),
    breach("does not divide model.experts.num_experts=6", parallel={"expert_model_parallel_size": 4}, model=EXPERTS),
    breach(
        "the 4 ranks of a stage cannot hold whole sets of experts over 3",
        {"world_size": 4},
        parallel={"expert_model_parallel_size": 3},
        model=EXPERTS,
    ),
    breach(
        "does not divide model.experts.ffn_hidden_size=1536",
        parallel={"expert_tensor_parallel_size": 5},
        model=EXPERTS,
    ),
    breach("experts need parallel.sequence_parallel=true", parallel={"tensor_model_parallel_size": 2}, model=EXPERTS),
    breach(
        "data.seq_length=255 is not a multiple of 2: it is divided over 2 ranks by",
        parallel={"tensor_model_parallel_size": 2, "sequence_parallel": True},
        data={"seq_length": 255},
    ),
    breach(
        "global_batch_size=8 is not a multiple of 6 (data.micro_batch_size=2 x 3 data-parallel ranks); use 6 or 12",
        {"world_size": 3},
        data={"micro_batch_size": 2},
    ),
    # fp16
    of_fp16("which parallel.data_parallel=fsdp does not support", parallel={"data_parallel": "fsdp"}),
    of_fp16("which optimizer.optimizer=muon does not support", optimizer=MUON),
    of_fp16("and that of experts may differ", model=EXPERTS),
    of_fp16("which skips steps at overflows", train=MATCHING),
    # eight bits
    of_fp8(
        "with train.fp8_recipe=blockwise needs parallel.transformer_impl=transformer_engine",
        train={"fp8_recipe": "blockwise"},
        parallel={"transformer_impl": "local"},
    ),
    of_fp8("train.fp8=hybrid needs train.precision=bf16, not fp32", train={"precision": "fp32"}),
    of_fp8("by TransformerEngine does not work with parallel.data_parallel=fsdp", parallel={"data_parallel": "fsdp"}),
    of_fp8(
        "needs TransformerEngine for parallel.gradient_accumulation_fusion",
        parallel={"transformer_impl": "local", "gradient_accumulation_fusion": True},
    ),
    of_fp8("train.fp8_weight_cache=true needs train.fp8 by torch", train={"fp8_weight_cache": True}),
    of_fp8(
        "train.fp8_weight_cache=true needs train.fp8 by torch, and weights that fsdp does not shard",
        train={"fp8_weight_cache": True},
        parallel={"transformer_impl": "local", "data_parallel": "fsdp"},
    ),
    of_fp8("does not support experts", model=EXPERTS),
    of_fp8("the same number of tokens on each of 2 ranks", parallel={"context_parallel_size": 2}, model=ST_DIT),
    of_fp8("model.hidden_size=396 is not a multiple of 16", model={"hidden_size": 396}),
    of_fp8("model.ffn_hidden_size=100 is not a multiple of 16", model={"ffn_hidden_size": 100}),
    of_fp8("model.num_attention_heads x model.head_dim=60 is not a multiple of 16", model={"head_dim": 10}),
    of_fp8(
        "rows of queries, keys and values=72 is not a multiple of 16",
        model={"num_attention_heads": 4, "head_dim": 12, "num_query_groups": 1},
    ),
    of_fp8(
        "data.seq_length=104 is not a multiple of 16, which train.fp8=hybrid with train.fp8_recipe=tensorwise needs on "
        "1 rank(s); use 96 or 112",
        data={"seq_length": 104},
    ),
    of_fp8(
        "data.seq_length=96 is not a multiple of 64",
        parallel={"context_parallel_size": 4, "context_parallel_comm": "ring"},
        model={"num_attention_heads": 4},
        data={"seq_length": 96},
    ),
    of_fp8(
        "model.num_attention_heads x model.head_dim=16 is not a multiple of 32",
        parallel={"tensor_model_parallel_size": 2},
        model={"num_attention_heads": 2, "head_dim": 8},
    ),
    of_fp8(
        "model.hidden_size=48 is not a multiple of 32",
        train={"fp8_recipe": "mxfp8"},
        model={"hidden_size": 48, "num_attention_heads": 2},
    ),
    of_fp8(
        "model.crossattn_emb_size=1000 is not a multiple of 16",
        model={"family": "nemo", "position_embedding": "sincos", "crossattn_emb_size": 1000},
    ),
    of_fp8("data.text_seq_length=60 is not a multiple of 16", data={"text_seq_length": 60}),
    # CUDA graphs
    of_graphs("model parallelism", parallel={"tensor_model_parallel_size": 2}),
    of_graphs("parallel.data_parallel=fsdp: use ddp", parallel={"data_parallel": "fsdp"}),
    of_graphs("overlapped weight gathers", parallel={"data_parallel": "distributed_optimizer"}),
    of_graphs(
        "TransformerEngine: parallel.transformer_impl=local", parallel={"transformer_impl": "transformer_engine"}
    ),
    of_graphs("train.fp8=hybrid: leave that out", train={"precision": "bf16", "fp8": "hybrid"}),
    of_graphs("gradient_accumulation_fusion: leave that out", parallel={"gradient_accumulation_fusion": True}),
    of_graphs("recomputation", parallel={"recompute_granularity": "full"}),
    of_graphs("parallel.cpu_offloading_num_layers=2", parallel={"cpu_offloading_num_layers": 2}),
    of_graphs("train.adapter: leave that out", train=ADAPTER),
    of_graphs("train.distill: leave that out", train=STUDENT),
    of_graphs("experts, whose token counts vary", model=EXPERTS),
    of_graphs("attention along one axis", model=ST_DIT),
    of_graphs(
        "networks that do not denoise",
        model={
            **{"family": "vit", "num_classes": 5, "crossattn_emb_size": 2},
            **{"position_embedding": "learned", "learned_positions": (1, 4, 4)},
        },
        data={"text_dropout": 0.0},
    ),
    of_graphs("train.precision=fp32: train.precision=bf16", train={"precision": "fp32"}),
    of_graphs("this head size", model={"head_dim": 12}),
    # Muon
    breach("needs whole matrices", optimizer=MUON, parallel={"data_parallel": "fsdp"}),
    breach("does not support experts", optimizer=MUON, model=EXPERTS),
    # mock samples
    breach(
        "data.mock_latent_shapes=[1, 64, 64] has 1024 tokens, more than data.seq_length=256",
        data={"mock_latent_shapes": ((1, 8, 8), (1, 64, 64)), "mock": True},
    ),
    breach("validation.sigmas=[] leaves nothing to measure", validation={"sigmas": ()}),
    breach(
        "validation.patience=3 counts validations: set validation.interval", validation={"patience": 3, "interval": 0}
    ),
    breach(
        "validation.evaluate_interval=5 compares with the videos of a data set in a folder",
        data={"path": "s3://bucket/clips"},
        validation={"evaluate_interval": 5},
    ),
    of_sampling("validation.sampling: sampler dpmpp_2m cannot add noise", eta=1.0),
    of_sampling("validation.sampling.autoguidance=elsewhere needs a second network", autoguidance="elsewhere"),
    of_sampling("validation.sampling.adapter_interval=[1, 2] needs a bundle", adapter_interval=(1, 2)),
    of_sampling("validation.sampling.image_guidance=2.0 needs conditioning", image_guidance=2.0),
    of_sampling(
        "validation.sampling.low_guidance=2.0 is for bundles with a high-noise and a low-noise expert", low_guidance=2.0
    ),
    of_sampling("validation.sampling.cache_budget=0.1 needs a bundle", cache_budget=0.1),
    # this machine
    on_start(
        "transformer_impl=transformer_engine needs a GPU and TransformerEngine (megadit[te])",
        parallel={"transformer_impl": "transformer_engine"},
    ),
    on_start("train.fp8=hybrid needs a torch with FP8 matrix products", train={"precision": "bf16", "fp8": "hybrid"}),
    on_start(
        "gradient_accumulation_fusion=true needs a GPU, and torch 2.8", parallel={"gradient_accumulation_fusion": True}
    ),
    on_start("needs a GPU (Ampere or newer) and torch 2.10", parallel={"cuda_graph_max_segments": 8}),
    on_start(
        "train.adapter needs the weights of a base; give checkpoint.init_from",
        train={"output_dir": "runs/x", **ADAPTER},
    ),
    on_start(
        "model.guidance_embedding_range=[1.0, 9.0] is learnt from a guided teacher; training on samples has no",
        model={"guidance_embedding_range": (1.0, 9.0)},
    ),
    on_start("train.distill.teacher=nowhere does not exist", train={"output_dir": "runs/x", **STUDENT}),
    on_start(
        "train.distill.teacher_adapter=nowhere does not exist",
        train={
            "output_dir": "runs/x",
            **ADAPTER,
            "distill": DistillConfig(teacher=".", teacher_adapter="nowhere", objective="guidance"),
        },
    ),
    on_start("validation.sampling: sigmas=[1.0, 2.0] must decrease", validation={"sampling": {"sigmas": (1.0, 2.0)}}),
    on_start(
        "validation.extractors=['nowhere.safetensors'] names weights that do not exist",
        validation={"evaluate_interval": 5, "extractors": ("nowhere.safetensors",)},
    ),
    on_start("checkpoint.copy_to=nowhere://x cannot be used", checkpoint={"copy_to": "nowhere://x"}),
    on_start(
        "checkpoint.init_from=nowhere holds no weights; give a bundle, a run, or one of its checkpoints",
        checkpoint={"init_from": "nowhere"},
    ),
    on_start("weights alone: checkpoint.init_from=a_bundle starts from them", checkpoint={"load": "a_bundle"}),
    on_start(
        "train.output_dir=a_bundle/megadit.json cannot be a folder", train={"output_dir": "a_bundle/megadit.json"}
    ),
    on_start("train.output_dir=a_bundle/runs/a is a bundle, or lies in one", train={"output_dir": "a_bundle/runs/a"}),
    on_start("iter_0000001 was written with train.seed=-7, which is", train={"output_dir": "a_run"}),
    on_start("train.output_dir is not set; give train.output_dir=FOLDER", train={}),
    # the data set
    breach("data.path is not set; give data.path=FOLDER (see `megadit prepare`), or --mock", {"reads_data": True}),
    of_dataset("model.in_channels=16 does not fit here, whose value is 8; set it to that", latent_channels=8),
    of_dataset("model.crossattn_emb_size=1024 does not fit here, whose value is 512", text_width=512),
    of_dataset("model.sigma_data=0.5 does not fit here, whose value is 0.7", sigma_data=0.7),
    of_towers(
        "here has a vocabulary of 0 tokens (0: it holds text features)",
        {"dataset": SimpleNamespace(**{**vars(DATASET), "text_width": 2, "text_encoder_folder": "here"})},
    ),
    of_towers(
        "here has texts of up to 90 tokens, more than model.text_tower.max_length=77",
        {"dataset": SimpleNamespace(**{**vars(DATASET), "text_width": 2, "text_encoder_folder": "of words"})},
    ),
    of_classifier(
        "here has 3 classes (0: texts), but model.num_classes=5",
        {"dataset": SimpleNamespace(**{**vars(DATASET), "text_width": 2, "text_encoder_folder": "here"})},
    ),
    of_dataset("data.encode=precached does not fit here, which holds pixels; set it to on_the_fly", store="raw"),
    breach(
        "data.conditioning=['last_frame:0.2'] needs frames encoded as images, and here has none: prepare it with",
        {"dataset": DATASET},
        data={"conditioning": ("last_frame:0.2",), "path": "here"},
        model={"conditioning_sigma": 0.02},
    ),
    breach(
        "damaged is damaged: train-000000.tar cannot be read (No such file or directory). Copy these shards again",
        {"starts_here": True, "dataset": DATASET},
        train={"output_dir": "runs/x"},
        data={"path": "damaged"},
    ),
    of_dataset("is too small for 50% of the samples of here (2 checked)", latent_shapes=((1, 2, 2), (999, 64, 64))),
    of_dataset(
        "tokenizer_folder=elsewhere is not the data set's tokenizer",
        validation={"tokenizer_folder": "elsewhere"},
    ),
)


@pytest.fixture
def found(tmp_path, monkeypatch):
    """found(breach, of=RULES): the first of the rules that is broken, and its message; or (None, "")."""
    (tmp_path / "a_bundle" / "transformer").mkdir(parents=True)
    (tmp_path / "a_bundle" / "megadit.json").write_text("{}")
    (tmp_path / "damaged/.nv-meta").mkdir(parents=True)
    write_json(tmp_path / "damaged/.nv-meta/.info.json", {"shard_counts": {"train-000000.tar": 1}})
    write_json(
        tmp_path / "a_run/checkpoints/iter_0000001/state.json",
        {"run": {"iteration": 1}, "ema_sigma_rels": [], "settings": {"train.seed": -7}},
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(extensions, "has_eight_bit_products", lambda: False)
    other = SimpleNamespace(fingerprint=lambda: "another")
    monkeypatch.setattr(tokenizers, "load_tokenizer", lambda folder: other)
    three_classes = SimpleNamespace(names=("one", "two", "three"))
    folders = {"of words": SimpleNamespace(num_words=600, max_length=90)}
    monkeypatch.setattr(text_encoders, "load_text_encoder", lambda folder: folders.get(folder, three_classes))

    def found(case: Breach, of=RULES):
        monkeypatch.setattr(rules, "RULES", ())
        run = Run(config=made(case), **case.seen)
        monkeypatch.setattr(rules, "RULES", RULES)
        broken = first_broken(of, run)
        return broken, "" if broken is None else broken.message(run)

    return found


def made(case: Breach) -> RunConfig:
    of = dict(case.of)
    extra = {name: of.pop(name) for name in ("ema", "checkpoint") if name in of}
    run = make_run(**of)
    return replace(run, **{name: replace(getattr(run, name), **values) for name, values in extra.items()})


def test_a_breach_is_refused_with_its_remedy(found):
    for case in BREACHES:
        _, message = found(case)
        assert case.says in message and "\n" not in message
        named = re.findall(r"\b((?:model|data|train|optimizer|ema|parallel|checkpoint|validation)\.[a-z_.]+)=", message)
        assert set(named) <= set(config_keys()), "a message names keys that exist"


def test_a_rule_left_out_is_missed(found):
    """The control: without a rule, one of the configurations that it refuses is no longer refused as it should be."""
    refused = defaultdict(list)
    for case in BREACHES:
        refused[RULES.index(found(case)[0])].append(case)
    for index in range(len(RULES)):
        others = RULES[:index] + RULES[index + 1 :]
        missed = any(case.says not in found(case, others)[1] for case in refused[index])
        assert missed, f"rule {index} has no configuration that breaks it"


def test_a_configuration_that_breaks_a_rule_cannot_be_made():
    for case in BREACHES:
        if not case.seen:
            with pytest.raises(UserError, match=re.escape(case.says)):
                made(case)


# ------------------------------------------------------------------------------------------------ details


def test_what_is_legal_is_taken():
    make_run(parallel={"tensor_model_parallel_size": 3})
    make_run(data={"mock_latent_shapes": ((1, 64, 64),)})  # not of mock data
    gathered_before = {"data_parallel": "distributed_optimizer", "overlap_param_gather": False}
    make_run(train={"precision": "bf16"}, parallel={"cuda_graph_max_segments": 8, **gathered_before})


def test_mock_samples_must_divide_into_patches():
    with pytest.raises(UserError, match="latent height 7 is not a multiple of the patch size 2; use 6 or 8"):
        make_run(data={"mock_latent_shapes": ((1, 7, 8),), "mock": True})


def test_a_refused_layout_comes_with_one_that_works():
    with pytest.raises(UserError, match=r"num_attention_heads=6.*nearest layout .*parallel_size=2"):
        make_run(parallel={"tensor_model_parallel_size": 4})


def test_sequence_and_context_parallel_ranks_together_cut_the_pack():
    with pytest.raises(UserError, match=r"divided over 4 ranks .* use 252 or 256"):
        make_run(
            parallel={"tensor_model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True},
            model={"num_attention_heads": 12},
            data={"seq_length": 254},
        )


@pytest.mark.parametrize(("world_size", "tensor_parallel", "data_parallel"), [(1, 1, 1), (8, 1, 8), (4, 2, 2)])
def test_layout_gives_the_data_parallel_size(world_size, tensor_parallel, data_parallel):
    run = make_run(parallel={"tensor_model_parallel_size": tensor_parallel})
    assert check_layout(run, world_size) == data_parallel


def test_parts_taken_in_turn_need_micro_batches_for_every_stage():
    parallel = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    assert check_layout(make_run(parallel=parallel), world_size=8) == 4
    with pytest.raises(UserError, match=r"global_batch_size=8 is not a multiple of 16 .*2 interleaved"):
        check_layout(make_run(parallel=parallel), world_size=16)


def test_inputs_need_data_or_mock():
    with pytest.raises(UserError, match=r"train\.output_dir is not set"):
        check_inputs(make_run())
    with pytest.raises(UserError, match=r"data\.path is not set.*--mock"):
        check_inputs(make_run(train={"output_dir": "runs/x"}))
    check_inputs(make_run(train={"output_dir": "runs/x"}, data={"mock": True}))


def test_inputs_need_a_prepared_dataset(tmp_path):
    with pytest.raises(UserError, match="megadit prepare"):
        check_inputs(make_run(train={"output_dir": "runs/x"}, data={"path": str(tmp_path)}))


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"sampler": "eular"}, r"validation\.sampling: .*eular.*euler"),
        ({"schedule": "carras"}, r"validation\.sampling: .*carras.*karras"),
        ({"sampler": "dpmpp_2m", "eta": 1.0}, r"dpmpp_2m cannot add noise.*euler"),
        ({"sampler": "euler", "eta": 2.0}, r"validation\.sampling\.eta=2.* must lie between 0 and 1"),
        ({"second_prompt": "a"}, "go together"),
        ({"sigma_min": 90.0}, r"sigma_min=90.* must be smaller"),
    ],
)
def test_sampling_that_cannot_be_is_refused_before_training(sampling, message):
    with pytest.raises(UserError, match=message):
        make_run(validation={"sampling": sampling})
