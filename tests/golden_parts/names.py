"""Where the few Python names that the record needs are found: each with the modules that had it, newest first."""

import sys
from importlib import import_module
from typing import Any


def find(*places: str) -> Any:
    """The first of `module:name` that exists."""
    for place in places:
        module, _, name = place.partition(":")
        try:
            return getattr(import_module(f"megadit.{module}"), name)
        except (ModuleNotFoundError, AttributeError) as error:
            if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("megadit"):
                raise
    raise ImportError(f"none of {', '.join(places)} exists")


def safe_reader() -> type:
    """Reads a checkpoint's tensors."""
    return find("models.megatron.integrity:SafeReader", "models.megatron.checkpoint:SafeReader")


def megadit_command() -> list[str]:
    """The command line that stands for `megadit`, whatever the installed script says."""
    return [sys.executable, "-c", "import sys; from golden_parts.names import verbs_main; sys.exit(verbs_main()())"]


def verbs_main() -> Any:
    return find("models.shared.cli.verbs:main", "models.shared.verbs:main")


def verbs() -> dict[str, Any]:
    return find("models.shared.cli.verbs:VERBS", "models.shared.verbs:VERBS")


def make_config(**values: Any) -> Any:
    experts = values.pop("experts", None)
    if experts is not None:
        places = ("models.configs.block", "models.configs.sections", "models.configs.experts", "models.expert_config")
        expert_config = find(*(f"{place}:ExpertConfig" for place in places))
        values["experts"] = expert_config(**experts)
    return find("models.configs.config:DiTConfig", "models.config:DiTConfig")(**values)


def make_dit(config: Any) -> Any:
    return find("models.networks.dit:DiT", "models.dit:DiT")(config)


def make_conditioning(text_BLE, text_length_B, fps_B) -> Any:
    return find("models.networks.conditioning:Conditioning", "models.conditioning:Conditioning")(
        text_BLE, text_length_B, fps_B
    )


def make_pack(segments: list[tuple[tuple[int, int, int], int]], *, capacity: int, text_capacity: int) -> Any:
    """The layout of (grid, text length) pairs."""
    segment = find("models.packing.segments:Segment", "models.segments:Segment")
    layout = find(
        "models.packing.pack_layout:PackLayout", "models.packing.layout:PackLayout", "models.layout:PackLayout"
    )
    return layout.pack([segment(*pair) for pair in segments], capacity=capacity, text_capacity=text_capacity)


def gateway_app(folder: Any) -> Any:
    settings = find("serve.gateway.service:GatewaySettings", "serve.gateway.settings:GatewaySettings")(
        servers=("grpc://127.0.0.1:1",),
        store=str(folder / "jobs.sqlite"),
        results=str(folder / "results"),
        min_free_bytes=0,
    )
    return find("serve.gateway.http.app:create_app", "serve.gateway.app:create_app")(
        find("serve.gateway.service:Gateway")(settings)
    )
