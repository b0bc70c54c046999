"""Four blocks of the 7B network, forward and backward: milliseconds of one, the largest kernels, and what all of them
would take beside the planner's budget. The one measurement to take if only one can be taken."""

import torch
from rows import DEVICE, DTYPE, HAS_GPU, attempt, normal, seconds, size, tell
from torch.profiler import ProfilerActivity, profile

from megadit.models.machine import datasheet_flops
from megadit.models.networks.dit import DiT
from megadit.models.ops.registry import describe_variants, force_variants, variants_run
from megadit.train.config.load import resolve_config
from megadit.train.plan.budget import budget
from megadit.train.plan.hardware import find_gpu, this_device
from megadit.train.plan.layout import Layout
from megadit.train.plan.work import typical_pack

LAYERS = 4
ONE_PACK = ("data.mock=true", "data.global_batch_size=1", "data.micro_batch_size=1", "optimizer.optimizer=adamw")
SMALL = ("model.hidden_size=256", "model.num_attention_heads=2", "data.seq_length=256", "data.text_seq_length=16",
         "data.mock_latent_shapes=[[4,16,16]]", "model.ffn_hidden_size=512")  # fmt: skip
GPU = this_device(1) if HAS_GPU else find_gpu("h200-141gb")
IN_BLOCKS = ("linears", "attention", "norm", "gates", "activation")


def configured(layers: int):
    small = () if HAS_GPU else SMALL
    overrides = [*ONE_PACK, "optimizer.moments=bf16", "ema.sigma_rels=[]", f"model.num_layers={layers}", *small]
    return resolve_config("performance_7b_8k_baseline", overrides=overrides)


def measure(forced: str | None) -> None:
    force_variants([] if forced is None else [forced])
    config = configured(LAYERS)
    with DEVICE:
        dit = DiT(config.model).to(DTYPE)
    for parameter in dit.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    layout = typical_pack(config)
    tokens = normal(layout.capacity, 1, config.model.patch_dim)
    text = normal(layout.text_capacity, 1, config.model.crossattn_emb_size)
    noise, fps = (torch.zeros(layout.num_segments, device=DEVICE) for _ in range(2))

    def step() -> None:
        dit.forward_packed(tokens, noise, text, fps, layout).float().square().mean().backward()
        for parameter in dit.parameters():
            parameter.grad = None

    taken = seconds(step, at_most=5)
    whole = configured(size(32, 2))
    parts = budget(whole, Layout.of(whole, 1), GPU)
    predicted = sum(p.seconds for p in parts if any(name in p.name for name in IN_BLOCKS)) / whole.model.num_layers
    layers = f"{taken / LAYERS * 1e3:.2f} ms a block, {taken / LAYERS * 32 * 1e3:.0f} for 32"
    of = f" (planned for {GPU.name}: {predicted * 1e3:.2f}, {predicted * 32e3:.0f})" if HAS_GPU else ""
    tell(f"four blocks, {forced or 'as chosen'}", layers + of, ms=taken / LAYERS * 1e3, planned_ms=predicted * 1e3)
    tell("  variants", describe_variants(variants_run()))
    if HAS_GPU:
        attempt("  kernels", lambda: kernels(step))


def kernels(step) -> None:
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        step()
    events = sorted(watched.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in events[:15]:
        tell(f"  {event.key[:70]}", f"{event.self_device_time_total / 1e3:.2f} ms in {event.count}")


if __name__ == "__main__":
    torch.manual_seed(0)
    tell("data sheet", f"{(datasheet_flops(DEVICE, DTYPE) or 0) / 1e12:,.0f} TFLOP/s")
    for forced in (None, "attention=varlen_flash") if HAS_GPU else (None,):
        attempt(f"four blocks, {forced}", lambda forced=forced: measure(forced))
