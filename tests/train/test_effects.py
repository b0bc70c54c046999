"""Every field of a run's configuration does something: changed on the command line, the run is seen to differ.

Runs repeat to the last bit, so that any difference is an effect of the setting. A field without an entry in `EFFECTS`
fails. One rank has to refuse what needs several; what that does there is tested in test_layouts.py.
"""

import json
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from megadit.train.config.load import config_keys

pytestmark = pytest.mark.timeout(2400)
JOB = Path(__file__).parent / "jobs" / "effects.py"

BASE = (
    *("--recipe", "digits_tiny", "train.output_dir={out}", "train.precision=fp32", "train.num_threads=1"),
    *("train.train_iters=3", "optimizer.lr=0.02", "optimizer.lr_warmup_iters=0", "data.mock=true"),
    *("validation.interval=0", "checkpoint.save_interval=100", "logger.tensorboard=false"),
    "data.global_batch_size=1",
)
REAL = (
    *("data.mock=false", "data.path={data}", "data.num_workers=0", "data.seq_length=64"),
    *("model.in_channels={channels}", "model.crossattn_emb_size={text_width}", "model.sigma_data={sigma_data}"),
)
PRIOR = (*REAL, "data.path={prior}")
VALIDATED = (
    *(*REAL, "validation.interval=3", "validation.num_batches=1", "validation.sigmas=[1.0]"),
    *("validation.prompts=[a red seven]", "validation.sampling.num_steps=2"),
)
EVALUATED = (
    *(*REAL, "validation.evaluate_interval=3", "validation.evaluate_count=8", "data.use_train_split_for_val=true"),
    "validation.sampling.num_steps=2",
)
STILL = ("optimizer.lr=1e-30", "ema.sigma_rels=[]", "validation.interval=1")
GUIDED = (*VALIDATED, "validation.sampling.num_steps=3", "validation.sampling.guidance=500.0")
TWO_PROMPTS = (*GUIDED, "validation.sampling.second_prompt=a blue two", "validation.sampling.second_guidance=500.0")
CLASSES = ("model.family=dit", "model.num_classes=5", "model.crossattn_emb_size=2", "model.position_embedding=sincos")
CLASSIFIER = (
    *("model.family=vit", "model.num_classes=5", "model.crossattn_emb_size=2", "model.position_embedding=learned"),
    *("model.learned_positions=[1,4,4]", "data.mock_latent_shapes=[[1,4,4]]", "data.text_dropout=0"),
    "diffusion.learned_uncertainty=false",
)
MATCHING = (
    *("model.family=clip", "model.text_tower.num_layers=1", "model.crossattn_emb_size=2", "data.text_dropout=0"),
    *("model.position_embedding=learned", "model.learned_positions=[1,4,4]", "data.mock_latent_shapes=[[1,4,4]]"),
    *("diffusion.learned_uncertainty=false", "model.text_tower.num_words=600"),
)
SPIKES = ("train.train_iters=6", "health.on_spike=skip", "health.spike_window=2", "health.spike_factor=1e-9")
HALF = ("train.precision=fp16", "optimizer.optimizer=adamw", "train.loss_scale=1024")
EXPERTS = ("model.experts.num_experts=4", "optimizer.optimizer=adamw")
CHOOSING = (*EXPERTS, "model.experts.routing=expert_choice")
EIGHT_BITS = ("model.hidden_size=64", "train.precision=bf16")
ADAPTER = ("checkpoint.init_from={finished}", "optimizer.optimizer=adamw", "train.adapter.rank=4")
STUDENT = (
    *("train.distill.teacher={finished}", "train.distill.objective=distribution_matching"),
    *("train.distill.sigmas=[20,2]", "diffusion.learned_uncertainty=false", "optimizer.lr=0.002"),
)
CONTINUOUS = (*STUDENT, "train.distill.objective=continuous_consistency")
PROGRESSIVE = (*STUDENT, "train.distill.objective=progressive")
LOGGED = ("logger.wandb_exp_name=first",)


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What a field is set to, in which run, and where the difference shows (see `jobs/effects.py`)."""

    value: str
    sees: str
    given: tuple[str, ...] = ()
    says: str = ""
    """Of an error."""


def told(value, *given):
    """metrics.jsonl has other numbers."""
    return Effect(value=value, sees="metrics", given=given)


def ends(says, value, *given):
    """The run ends, and says why (otherwise than before, if it ended before)."""
    return Effect(value=value, sees="error", given=given, says=says)


def seen(where, value, *given):
    return Effect(value=value, sees=where, given=given)


EFFECTS = {
    "recipe": ends("--recipe NAME", "pretrain_xl"),
    "model.num_layers": seen("names", "3"),
    "model.hidden_size": told("64"),
    "model.num_attention_heads": told("4"),
    "model.head_dim": told("12"),
    "model.num_query_groups": told("1"),
    "model.ffn_hidden_size": told("100"),
    "model.in_channels": told("16"),
    "model.patch_spatial": told("2"),
    "model.patch_temporal": told("2", "data.mock_latent_shapes=[[2,4,4]]"),
    "model.crossattn_emb_size": told("32"),
    "model.position_embedding": told("sincos"),
    "model.rope_theta": told("100.0"),
    "model.rope_scale": told("[2.0,1.0,1.0]"),
    "model.rope_interpolation": told("[1.0,2.0,2.0]"),
    "model.learned_positions": told("[3,4,4]"),
    "model.qk_layernorm": told("false"),
    "model.layernorm_epsilon": told("0.1"),
    "model.sigma_data": told("0.7"),
    "model.parameterization": told("vp"),
    "model.conditioning_sigma": told("0.2", "data.conditioning=[first_frame:0.9]", "model.conditioning_sigma=0.02"),
    "model.conditioning_mode": told(
        "augmented", "data.conditioning=[first_frame:0.9]", "model.conditioning_sigma=0.02"
    ),
    "model.guidance_embedding_range": told("[1.0,9.0]", *STUDENT),
    "model.image_size": ends("is for model.family=wan", "8"),
    "model.image_positions": ends("needs model.image_size", "8"),
    "model.family": told("nemo", "model.hidden_size=256", "model.position_embedding=sincos"),
    "model.compat": told("nemo", "model.family=moviegen", "model.hidden_size=256"),
    "model.adaln_lora_dim": told("4"),
    "model.num_classes": told("7", *CLASSES),
    "model.learned_variance": seen("weights", "true", *CLASSES),
    "model.padding_mask_channel": told("true"),
    "model.frequency_shift": told("1.0"),
    "model.qk_layernorm_epsilon": told("0.1"),
    "model.mlp_layernorm_epsilon": told("0.1"),
    "model.experts.num_experts": seen("names", "4", "optimizer.optimizer=adamw"),
    "model.experts.routing": seen("weights", "expert_choice", *EXPERTS),
    "model.experts.top_k": seen("weights", "1", *EXPERTS),
    "model.experts.capacity_factor": seen("weights", "1.0", *CHOOSING),
    "model.experts.ffn_hidden_size": seen("weights", "50", *EXPERTS),
    "model.experts.shared_ffn_hidden_size": seen("names", "24", *EXPERTS),
    "model.experts.balance_coefficient": seen("weights", "100.0", *EXPERTS),
    "model.quick_gelu": told("true", *MATCHING),
    "model.text_tower.num_layers": told("2", *MATCHING),
    "model.text_tower.hidden_size": told("64", *MATCHING),
    "model.text_tower.num_attention_heads": told("4", *MATCHING),
    "model.text_tower.ffn_hidden_size": told("96", *MATCHING),
    "model.text_tower.num_words": told("700", *MATCHING),
    "model.text_tower.max_length": seen("weights", "40", *MATCHING),
    "model.text_tower.embedding_size": told("24", *MATCHING),
    "model.text_tower.pairwise": told("true", *MATCHING),
    "data.path": ends("data.path=/nowhere", "/nowhere", *REAL),
    "data.mock": told("true", *REAL),
    "data.seq_length": told("128"),
    "data.text_seq_length": told("16"),
    "data.micro_batch_size": seen("layout", "2", "data.global_batch_size=2"),
    "data.global_batch_size": told("2"),
    "data.num_workers": told("2", *REAL),
    "data.packing_buffer_size": told("2", *REAL),
    "data.balance": told("tokens", *REAL, "data.packing_buffer_size=40"),
    "data.shuffle_buffer_size": told("1", *REAL),
    "data.text_dropout": told("0.9"),
    "data.prior_weight": told("0.5", *PRIOR),
    "data.mixup": told("0.5", *CLASSIFIER),
    "data.prior_text_dropout": told("0.9", *PRIOR),
    "data.conditioning": told("[first_frame:0.9]", "model.conditioning_sigma=0.02"),
    "data.conditioning_dropout": told(
        "[0.9,0.0,0.0]", "data.conditioning=[first_frame:0.9]", "model.conditioning_sigma=0.02"
    ),
    "data.mock_latent_shapes": told("[[2,3,4]]"),
    "data.use_train_split_for_val": told("true", *VALIDATED),
    "data.encode": ends("which holds latents", "on_the_fly", *REAL),
    "data.max_frames": told("1", *REAL),
    "data.max_latent": told("2.1", *REAL, "health.max_refused_share=1"),
    "data.min_aesthetic_score": told("2.0", *REAL),
    "data.keep": told("[image:0.3]", *REAL),
    "train.train_iters": told("4"),
    "train.max_epochs": ends("both say how long", "1.0", *REAL),
    "train.seed": told("7"),
    "train.output_dir": seen("files", "{out}-elsewhere"),
    "train.precision": told("bf16"),
    "train.loss_scale": told("2048.0", *HALF),
    "train.loss_scale_window": told("1", *HALF),
    "train.matmul_precision": seen("matmul", "bf16"),
    "train.fp8": told("hybrid", *EIGHT_BITS),
    "train.fp8_recipe": ends(
        "needs parallel.transformer_impl=transformer_engine", "mxfp8", *EIGHT_BITS, "train.fp8=hybrid"
    ),
    "train.fp8_weight_cache": ends("needs train.fp8 by torch", "true", "train.precision=bf16"),
    "train.log_interval": seen("printed", "2"),
    "train.num_threads": seen("threads", "2"),
    "train.adapter.rank": told("2", *ADAPTER),
    "train.adapter.alpha": told("8.0", *ADAPTER),
    "train.adapter.targets": seen("names", "[blocks.*.fc1]", *ADAPTER),
    "train.adapter.dropout": told("0.5", *ADAPTER),
    "train.adapter.kind": seen("names", "dora", *ADAPTER),
    "train.base_precision": told("int8", *ADAPTER),
    "train.objective": ends("the objectives are: denoise", "best"),
    "train.label_smoothing": told("0.5", *CLASSIFIER),
    "train.contrast_rows": ends("train.contrast_rows=2 is for a softmax over all pairs", "2"),
    "train.distill.teacher": ends("nowhere does not exist", "nowhere", *STUDENT),
    "train.distill.teacher_adapter": ends("nowhere does not exist", "nowhere", *STUDENT, "train.adapter.rank=4"),
    "train.distill.objective": told("consistency", *STUDENT),
    "train.distill.guidance": told("3.0", *STUDENT),
    "train.distill.sigmas": told("[20,3]", *STUDENT),
    "train.distill.teacher_steps": told("3", *PROGRESSIVE),
    "train.distill.tangent_warmup": told("1", *CONTINUOUS),
    "train.distill.critic_lr": told("0.02", *STUDENT),
    "train.distill.adversarial_weight": told("0.5", *STUDENT),
    "train.distill.critic_updates": told("1", *STUDENT),
    "train.distill.nft_beta": told("0.5", *STUDENT, "train.distill.objective=diffusion_nft"),
    "train.distill.dpo_beta": told("5.0", *STUDENT, "train.distill.objective=dpo"),
    "train.distill.grpo_clip": told("0.5", *STUDENT, "train.distill.objective=flow_grpo"),
    "optimizer.optimizer": told("adamw"),
    "optimizer.lr": told("0.01"),
    "optimizer.min_lr": told("0.01"),
    "optimizer.weight_decay": told("0.5"),
    "optimizer.adam_beta1": told("0.5"),
    "optimizer.adam_beta2": told("0.5"),
    "optimizer.adam_eps": told("1.0"),
    "optimizer.moments": seen("weights", "bf16", "optimizer.optimizer=adamw"),
    "optimizer.muon_momentum": told("0.5"),
    "optimizer.clip_grad": told("0.001"),
    "optimizer.lr_warmup_iters": told("2"),
    "optimizer.lr_decay_style": told("constant"),
    "optimizer.lr_decay_iters": told("9"),
    "diffusion.noise_levels": told("uniform"),
    "diffusion.p_mean": told("1.0"),
    "diffusion.p_std": told("0.5"),
    "diffusion.shift_tokens": told("4"),
    "diffusion.learned_uncertainty": seen("names", "false"),
    "ema.sigma_rels": seen("names", "[0.2]"),
    "parallel.tensor_model_parallel_size": ends("start 2 ranks", "2"),
    "parallel.pipeline_model_parallel_size": ends("start 2 ranks", "2"),
    "parallel.virtual_pipeline_model_parallel_size": ends(
        "do not divide model.num_layers=2", "2", "parallel.pipeline_model_parallel_size=2"
    ),
    "parallel.context_parallel_size": ends("start 2 ranks", "2"),
    "parallel.context_parallel_comm": ends("start 4 ranks", "ring", "parallel.context_parallel_size=4"),
    "parallel.expert_model_parallel_size": ends("whole sets of experts over 2", "2", *EXPERTS),
    "parallel.expert_tensor_parallel_size": ends("whole sets of experts over 2", "2", *EXPERTS),
    "parallel.sequence_parallel": ends("nothing to split", "true"),
    "parallel.transformer_impl": ends("parallel.transformer_impl=transformer_engine", "transformer_engine"),
    "parallel.gradient_accumulation_fusion": ends("fused_weight_gradient_mlp_cuda", "true"),
    "parallel.data_parallel": seen("layout", "distributed_optimizer", "optimizer.optimizer=adamw"),
    "parallel.overlap_grad_reduce": seen("layout", "false"),
    "parallel.overlap_param_gather": seen(
        "layout", "false", "optimizer.optimizer=adamw", "parallel.data_parallel=distributed_optimizer"
    ),
    "parallel.recompute_granularity": seen("recomputed", "selective"),
    "parallel.recompute_num_layers": seen("recomputed", "1", "parallel.recompute_granularity=full"),
    "parallel.cpu_offloading_num_layers": seen("offloaded", "1"),
    "parallel.cuda_graph_max_segments": ends("needs a GPU", "8", "train.precision=bf16"),
    "checkpoint.save_interval": seen("there", "1"),
    "checkpoint.save_minutes": seen("there", "1e-9"),
    "checkpoint.keep_last": seen("files", "1", "checkpoint.save_interval=1"),
    "checkpoint.copy_to": seen("files", "file://{out}/copy"),
    "checkpoint.load": told("{finished}", "train.train_iters=5"),
    "checkpoint.init_from": told("{finished}"),
    "checkpoint.async_save": seen("there", "false", "checkpoint.save_interval=1"),
    "validation.interval": told("2", *VALIDATED),
    "validation.patience": told("1", *VALIDATED, *STILL),
    "validation.num_batches": told("2", *VALIDATED),
    "validation.sigmas": told("[2.0]", *VALIDATED),
    "validation.prompts": seen("videos", "[a blue two,a green one]", *VALIDATED),
    "validation.sampling.sampler": seen("videos", "heun", *VALIDATED),
    "validation.sampling.num_steps": seen("videos", "3", *VALIDATED),
    "validation.sampling.guidance": seen("videos", "500.0", *VALIDATED),
    "validation.sampling.num_frames": seen("videos", "1", *GUIDED),
    "validation.sampling.height": seen("videos", "16", *GUIDED),
    "validation.sampling.width": seen("videos", "16", *GUIDED),
    "validation.sampling.fps": seen("videos", "500.0", *GUIDED),
    "validation.sampling.sigma_min": seen("videos", "1.0", *GUIDED),
    "validation.sampling.sigma_max": seen("videos", "20.0", *GUIDED),
    "validation.sampling.rho": seen("videos", "2.0", *GUIDED),
    "validation.sampling.negative_prompt": seen("videos", "a blue two", *GUIDED),
    "validation.sampling.schedule": seen("videos", "linear", *GUIDED),
    "validation.sampling.sigmas": seen("videos", "[5.0,1.0]", *GUIDED),
    "validation.sampling.shift": seen("videos", "2.0", *GUIDED),
    "validation.sampling.noise_scale": seen("videos", "0.5", *GUIDED),
    "validation.sampling.churn": seen("videos", "2.0", *GUIDED),
    "validation.sampling.churn_interval": seen("videos", "[0.5,2.0]", *GUIDED, "validation.sampling.churn=2.0"),
    "validation.sampling.eta": seen("videos", "0.0", *VALIDATED),
    "validation.sampling.guidance_interval": seen("videos", "[0.5,2.0]", *GUIDED),
    "validation.sampling.guidance_rescale": seen("videos", "0.7", *GUIDED),
    "validation.sampling.autoguidance": ends("needs a second network", "elsewhere"),
    "validation.sampling.second_prompt": seen("videos", "a green one", *TWO_PROMPTS),
    "validation.sampling.second_guidance": seen("videos", "50.0", *TWO_PROMPTS),
    "validation.sampling.cache_budget": ends("needs a bundle", "0.1"),
    "validation.sampling.adapter_interval": ends("needs a bundle", "[0.5,2.0]"),
    "validation.sampling.low_guidance": ends("is for bundles with a high-noise and a low-noise expert", "2.0"),
    "validation.sampling.image_guidance": ends("needs conditioning", "2.0"),
    "validation.evaluate_interval": told("2", *EVALUATED),
    "validation.evaluate_count": told("9", *EVALUATED),
    "validation.extractors": told("[{reader}]", *EVALUATED),
    "validation.tokenizer_folder": ends("/nowhere", "/nowhere", *VALIDATED),
    "health.on_not_finite": seen("events", "skip", "optimizer.optimizer=adamw", "optimizer.lr=1e30"),
    "health.on_spike": seen("events", "rollback", *SPIKES),
    "health.spike_factor": seen("events", "1e9", *SPIKES),
    "health.spike_window": seen("events", "100", *SPIKES),
    "health.max_anomalies": ends("2 since the last checkpoint", "1", *SPIKES),
    "health.watchdog_seconds": seen("files", "0.0"),
    "health.starving_share": seen("printed", "1e-9", "health.starving_share=1.0", "train.train_iters=35"),
    "health.max_refused_share": ends(
        "is too small for", "0.01", *REAL, "health.max_refused_share=1.0", "data.seq_length=16"
    ),
    "health.statistics_interval": told("2"),
    "logger.tensorboard": seen("files", "true"),
    "logger.curves": seen("files", "true"),
    "logger.wandb_exp_name": seen("wandb", "second", *LOGGED),
    "logger.wandb_project": seen("wandb", "elsewhere", *LOGGED),
    "logger.wandb_entity": seen("wandb", "us", *LOGGED),
    "logger.wandb_save_dir": seen("wandb", "{out}/there", *LOGGED),
}
FINISHED = "finished"
"""A run of `BASE` that others start from."""
TENSORS = ("names", "weights")
"""What is seen in a checkpoint: it is read where that is looked at."""
OF_SAVING = (*TENSORS, "files", "there", "printed", "events", "error")
"""What depends on checkpoints."""


def test_every_field_has_an_entry():
    assert set(EFFECTS) == set(config_keys())


def before(given):
    """The name of the run without the change."""
    return FINISHED if not given else f"given-{zlib.crc32(repr(given).encode()):08x}"


def runs():
    """Name -> arguments of everything to be run; what others start from comes first."""
    planned = {"first": BASE, FINISHED: BASE, "finished-again": BASE}  # the first one of a process may warn of things
    for key, effect in EFFECTS.items():
        arguments = (*BASE, *effect.given)
        planned.setdefault(before(effect.given), arguments)
        planned[key] = (*arguments, f"{key}={effect.value}")
    return planned


def seen_in(places):
    """Names of the runs of which any of these is looked at."""
    seen = [key for key, effect in EFFECTS.items() if effect.sees in places]
    return {FINISHED, "finished-again", *seen, *(before(EFFECTS[key].given) for key in seen)}


@pytest.fixture(scope="module")
def observed(run_ranks, tiny_dataset, write_tiny_dataset, tmp_path_factory):
    """observed(name): what was seen of one run."""
    from safetensors.torch import save_file

    from megadit.infer.evaluate.extractors.digits import DigitReader
    from megadit.infer.evaluate.extractors.files import KIND
    from megadit.train.data.writer import DatasetInfo

    info, folder = DatasetInfo.read(tiny_dataset), tmp_path_factory.mktemp("effects")
    places = {"{data}": info.root, "{channels}": info.latent_channels, "{text_width}": info.text_width}
    places |= {"{sigma_data}": info.sigma_data, "{finished}": folder / FINISHED, "{prior}": folder / "prior"}
    write_tiny_dataset(folder / "prior", is_prior=True)
    save_file(DigitReader().state_dict(), folder / "reader.safetensors", metadata={KIND: "digits"})
    places["{reader}"] = folder / "reader.safetensors"
    planned = {
        name: {
            "arguments": [fill(word, places) for word in words],
            "saves": name in seen_in(OF_SAVING),
            "reads_tensors": name in seen_in(TENSORS),
        }
        for name, words in runs().items()
    }
    (folder / "runs.json").write_text(json.dumps(planned))
    run_ranks(1, JOB, folder, timeout=1500)
    return lambda name: json.loads((folder / f"{name}.json").read_text())


def fill(word, places):
    for place, value in places.items():
        word = word.replace(place, str(value))
    return word


@pytest.mark.slow
@pytest.mark.parametrize("key", EFFECTS)
def test_a_field_changes_what_a_run_does(observed, key):
    effect = EFFECTS[key]
    first, second = observed(before(effect.given)), observed(key)
    assert first[effect.sees] != second[effect.sees]
    if effect.sees == "error":
        assert effect.says in second["error"]
    elif effect.sees != "events":  # what ends a run is told there
        assert (first["error"], second["error"]) == (None, None)


@pytest.mark.slow
def test_nothing_differs_without_a_change(observed):
    """The control: were it otherwise, the test above would see effects of nothing."""
    assert observed(FINISHED) == observed("finished-again")
    assert observed(FINISHED)["metrics"] and observed(FINISHED)["printed"]
