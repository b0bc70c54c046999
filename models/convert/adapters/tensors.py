"""The tensors of an adapter file: which belong to linears of a network, which are ignored, and problems.

Ignored with a report, as in diffusers: changes of norms and modulations (`diff`, `diff_b`, `diff_m` in LightX2V's and
CausVid's files), of the bias of a linear that is not changed otherwise, and of image embeddings in networks without
them; each in a layer that the network has.
"""

import re
from collections.abc import Iterable, Mapping

import torch

from megadit.models.configs.protocol import NetworkConfig
from megadit.models.convert.adapters.adapter import ALPHA, BIAS, DIFFERENCE, DOWN, MAGNITUDE, SCALE, UP, UP_BIAS, Change
from megadit.models.convert.adapters.names import NamedRows, layers_of, plain_key, split_key
from megadit.models.convert.adapters.settings import LoraSettings
from megadit.models.shared.errors import UserError
from megadit.models.storage.tensor_source import TensorSource

MOST_RANK = 4096
Keys = dict[str, dict[str, str]]
"""Name of a linear -> factor -> key in the file."""


_OF_OTHER_LAYERS = re.compile(r"(\.)diff(_b|_m)?$")
"""Suffixes of changes of other tensors than the matrix of a linear."""
_OF_IMAGES = re.compile(r"(^|[._])(k_img|v_img|norm_k_img|img_emb|add_[kv]_proj|norm_added_k|image_embedder)([._]|$)")
"""Names of the layers by which Wan's networks read images."""
_KINDS = {
    "hada_w1": "a LoHa", "lokr_w1": "a LoKr", "oft_blocks": "an OFT", "oft_R": "an OFT", "oft_diag": "an OFT",
    "lora_mid": "a LoCon of convolutions", "ia3_l": "an IA3", "vera_lambda": "a VeRA", ".a1.": "a GLoRA",
    "emb_params": "a textual inversion",
}  # fmt: skip
"""Substring of a key -> unsupported kind of adapter."""


def kind_of(source: TensorSource) -> str:
    """Describe an unsupported kind of adapter, with a remedy, for messages; "" for others."""
    found = {kind for key in source.stored for part, kind in _KINDS.items() if part in key}
    if found:
        return f", for it is {' and '.join(sorted(found))}: only LoRA and DoRA are read; merge it elsewhere"
    if any(key.startswith(("lora_te", "text_encoder")) for key in source.stored):
        return ", for it changes a text encoder too: leave those tensors out"
    return ""


def keys_of_linears(
    source: TensorSource, linears: Mapping[str, NamedRows], config: NetworkConfig
) -> tuple[Keys, list[str]]:
    """The tensors of the network's linears, and the names of ignored ones."""
    keys: Keys = {}
    for key in source.stored:
        linear, factor = split_key(key) or ("", "")
        if linear in linears:
            keys.setdefault(linears[linear].name, {}).setdefault(factor, key)
    without_matrix = [name for name, of in keys.items() if of.keys() <= {BIAS, UP_BIAS, ALPHA, SCALE}]
    unused = [key for name in without_matrix if BIAS in keys[name] for key in keys.pop(name).values()]
    known = {key for of in keys.values() for key in of.values()} | set(unused)
    reads_images = getattr(config, "image_size", None) is not None or config.family != "wan"
    layers = layers_of(config)
    for key in source.stored:
        found = (not reads_images and _OF_IMAGES.search(key)) or _OF_OTHER_LAYERS.search(key)
        if key not in known and found:
            layer = plain_key(key[: found.end(1)]).rstrip("._")
            unused += [key] if layer in layers or not layer else []
    return keys, sorted(unused)


def problems_of(
    source: TensorSource,
    keys: Keys,
    unused: Iterable[str],
    linears: Mapping[str, NamedRows],
    settings: LoraSettings,
) -> dict[str, list[str]]:
    """List the problems of a file's tensors, from their names and shapes alone."""
    known, shapes = {*unused, *(key for of in keys.values() for key in of.values())}, source.shapes
    problems: dict[str, list[str]] = {
        "unexpected": [f"{key} {list(shapes[key])}" for key in shapes if key not in known],
        "missing": [],
        "misshapen": [] if keys else ["it changes no linear"],
    }
    is_dora = settings.is_dora or any(MAGNITUDE in of for of in keys.values())
    for name, of in keys.items():
        needed = {DIFFERENCE} if DIFFERENCE in of and DOWN not in of else {DOWN, UP}
        needed |= {MAGNITUDE} if is_dora else set()
        problems["missing"] += [f"{factor} of {name}" for factor in sorted(needed - of.keys())]
        if needed <= of.keys():
            problems["misshapen"] += _misshapen(source, of, linears[name], settings.rank_of(name))
    return problems


def _misshapen(
    source: TensorSource, of: Mapping[str, str], linear: NamedRows, expected_rank: float | None
) -> Iterable[str]:
    shapes, num_rows = {factor: _plain(source.shapes[key]) for factor, key in of.items()}, len(linear.rows_O)
    if DIFFERENCE in of:
        if DOWN in of or shapes[DIFFERENCE] != (num_rows, linear.in_features) or min(shapes[DIFFERENCE]) > MOST_RANK:
            expected = f"[{num_rows}, {linear.in_features}] without low-rank factors"
            yield f"{of[DIFFERENCE]} {list(shapes[DIFFERENCE])}, not {expected}"
            return
        expected_rank, shapes[DOWN] = None, (min(shapes[DIFFERENCE]),)
    rank = shapes[DOWN][0] if shapes[DOWN] else 0
    if not 0 < rank <= MOST_RANK or expected_rank not in (None, rank):
        expected = f"{expected_rank:g}" if expected_rank is not None else f"1 to {MOST_RANK}"
        yield f"{of[DOWN]} {list(shapes[DOWN])} has rank {rank}, not {expected}"
        return
    of_peft = linear.sides and ".lora_magnitude_vector" in of.get(MAGNITUDE, "")  # its axis of rows is the second
    fitting = {
        DOWN: [(rank,) if DIFFERENCE in of else (rank, linear.in_features)],
        DIFFERENCE: [(num_rows, linear.in_features)],
        UP: [(num_rows, rank)],
        MAGNITUDE: [(num_rows,), (num_rows, 1), *([(1, num_rows)] if of_peft else [])],
        BIAS: [(num_rows,)] if linear.has_bias else [],
        UP_BIAS: [(num_rows,)] if linear.has_bias else [],
        ALPHA: [(), (1,)],
        SCALE: [(), (1,)],
    }
    for factor, shape in shapes.items():
        if factor not in of:
            continue
        if shape not in fitting[factor]:
            expected = list(fitting[factor][0]) if fitting[factor] else "none: the linear has no bias"
            yield f"{of[factor]} {list(source.shapes[of[factor]])}, not {expected}"
        elif factor not in (ALPHA, SCALE) and not source.stored[of[factor]].dtype.is_floating_point:
            yield f"{of[factor]} holds no floating-point numbers"


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without the spatial sides of a 1x1 convolution."""
    return shape[:-2] if len(shape) == 4 and shape[2:] == (1, 1) else shape


def read_change(source: TensorSource, name: str, of: Mapping[str, str], settings: LoraSettings) -> tuple[Change, str]:
    """Read the change of a linear, and the source of its scale, for messages."""
    values = {}
    for factor, key in of.items():
        value = source.read(key).float()
        values[factor] = value.reshape(_plain(tuple(value.shape)))
        if not values[factor].isfinite().all():
            raise UserError(f"{source.label} is damaged: {key} has numbers that are not finite")
    if DIFFERENCE in values:
        values |= _factors_of(values.pop(DIFFERENCE))
    rank = len(values[DOWN])
    alpha, said_by = _alpha_of(values, name, settings)
    if alpha < 0:
        raise UserError(f"{source.label} has the alpha {alpha:g} for {name}, which must be at least 0")
    scale, bias_scale = f"times {alpha / rank:g} ({said_by})", alpha / rank
    if alpha == 0:  # no change: zero factors, so that scales can be compared
        alpha, values[UP] = float(rank), torch.zeros_like(values[UP])
    magnitude_O = values[MAGNITUDE].flatten() if MAGNITUDE in values else None
    bias_O = values.get(BIAS)
    if UP_BIAS in values:
        bias_O = values[UP_BIAS] * bias_scale + (0 if bias_O is None else bias_O)
    return Change(values[DOWN], values[UP], alpha, magnitude_O, bias_O), scale


def _factors_of(matrix_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    """Write a whole matrix as two factors, one of them the identity, with scale 1."""
    num_rows, in_features = matrix_OI.shape
    down, up = (matrix_OI, torch.eye(num_rows)) if num_rows <= in_features else (torch.eye(in_features), matrix_OI)
    return {DOWN: down, UP: up, SCALE: torch.ones(())}


def _alpha_of(values: Mapping[str, torch.Tensor], name: str, settings: LoraSettings) -> tuple[float, str]:
    """(alpha, source of it): from the linear's own tensors, else from the settings, else the rank."""
    rank = len(values[DOWN])
    for factor, unit in ((SCALE, rank), (ALPHA, 1)):
        if factor in values:
            return values[factor].item() * unit, f"{factor} of each linear"
    alpha = settings.alpha_of(name, rank)
    return (float(rank), "no alpha is set, so it is the rank") if alpha is None else (alpha, settings.said_by)
