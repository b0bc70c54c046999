"""python load_by_servers.py SERVER FOLDER: the weights of a Wan of diffusers' by a server's own loader, on a CPU.

Prints, as JSON, the tensors of the files that it does not use, and its parameters that no file fills or (of SGLang,
whose parameters keep their tensors) that differ from their tensor. Ends with 77, and says why, where the server cannot
be imported. What servers ask a GPU's driver is answered for a CPU.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

NOT_HERE = 77


def config_of(folder: Path) -> dict:
    values = json.loads((folder / "config.json").read_text())
    return {name: value for name, value in values.items() if not name.startswith("_")}


def by_sglang(folder: Path, tensors: dict[str, torch.Tensor], rendezvous: str) -> tuple[set, set]:
    from sglang.multimodal_gen.configs.models.dits.wanvideo import WanVideoConfig
    from sglang.multimodal_gen.runtime.distributed import parallel_state
    from sglang.multimodal_gen.runtime.loader.fsdp_load import maybe_load_fsdp_model
    from sglang.multimodal_gen.runtime.loader.utils import get_param_names_mapping
    from sglang.multimodal_gen.runtime.models.dits.wanvideo import WanTransformer3DModel
    from sglang.multimodal_gen.runtime.server_args.server_args import ServerArgs, set_global_server_args

    set_global_server_args(ServerArgs.from_kwargs(model_path=str(folder.parent), attention_backend="torch_sdpa"))
    parallel_state.maybe_init_distributed_environment_and_model_parallel(1, 1, distributed_init_method=rendezvous)
    config = WanVideoConfig()
    config.update_model_arch(config_of(folder))
    files = sorted(map(str, folder.glob("*.safetensors")))
    f32 = torch.float32
    options = {"strict": True, "component_starts_on_cpu": True, "pin_cpu_memory": False}
    network = maybe_load_fsdp_model(
        WanTransformer3DModel,
        {"config": config, "hf_config": config_of(folder)},
        files,
        torch.device("cpu"),
        *(1, 1, f32, f32),
        **options,
    )
    name_of = get_param_names_mapping(config.arch_config.param_names_mapping)
    filled = {name_of(name)[0]: tensor for name, tensor in tensors.items()}
    parameters = dict(network.named_parameters())
    differing = {name for name in parameters.keys() & filled.keys() if not torch.equal(parameters[name], filled[name])}
    return filled.keys() - parameters.keys(), (parameters.keys() - filled.keys()) | differing


def by_vllm_omni(folder: Path, tensors: dict[str, torch.Tensor], rendezvous: str) -> tuple[set, set]:
    import inspect

    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm_omni.diffusion.distributed import parallel_state
    from vllm_omni.diffusion.models.wan2_2.wan2_2_transformer import WanTransformer3DModel
    from vllm_omni.platforms import current_omni_platform

    platform = type(current_omni_platform)
    platform.get_device_count = classmethod(lambda cls: 1)
    platform.set_device = classmethod(lambda cls, device: None)
    platform.get_torch_device = classmethod(lambda cls, *place: torch.device("cpu"))
    attention = "vllm_omni.diffusion.attention.backends.sdpa.SDPABackend"
    platform.get_diffusion_attn_backend_cls = classmethod(lambda cls, *asked, **more: attention)
    known = inspect.signature(WanTransformer3DModel.__init__).parameters
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in config_of(folder).items()
        if name in known
    }
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        parallel_state.init_distributed_environment(1, 0, rendezvous, 0, backend="gloo")
        parallel_state.initialize_model_parallel(data_parallel_size=1)
        network = WanTransformer3DModel(**values)
        loaded = network.load_weights(tensors.items())
    unused = {name for name in tensors if not any(each.endswith(name) for each in loaded)}
    return unused, {name for name, _ in network.named_parameters()} - loaded


SERVERS = {"sglang": by_sglang, "vllm_omni": by_vllm_omni}


def main(server: str, folder: Path) -> int:
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    try:
        unused, unfilled = SERVERS[server](folder, tensors, f"file://{folder}/rendezvous")
    except ImportError as error:
        print(error)
        return NOT_HERE
    print(json.dumps({"unused": sorted(unused), "unfilled": sorted(unfilled)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], Path(sys.argv[2]).resolve()))
