"""Facts that the rules of a run need: its configuration, ranks, machine and data set."""

import math
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from megadit.models.megatron.parallel_sizes import Division, ParallelSizes
from megadit.models.shared.errors import UserError
from megadit.models.shared.shards import damaged_shards

OF_DATASET = {"in_channels": "latent_channels", "crossattn_emb_size": "text_width", "sigma_data": "sigma_data"}
"""Setting of the network -> field of `DatasetInfo` that it must equal."""


def agree(setting: Any, fact: Any) -> bool:
    return math.isclose(setting, fact, rel_tol=1e-6)


class TooLong(NamedTuple):
    """Samples with more tokens than a pack."""

    share: float
    most: int
    """Tokens of the longest."""
    looked_at: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """A configuration and known facts about ranks, machine and data; its sections are attributes (`run.train`).

    What several rules ask for is worked out once.
    """

    config: Any
    """The `RunConfig`."""
    world_size: int | None = None
    """Number of ranks; None: not known yet."""
    starts_here: bool = False
    """Whether the run is about to start on this machine."""
    reads_data: bool = False
    """Whether the run is about to open `data.path`."""
    dataset: Any = None
    """The `DatasetInfo` of `data.path`; None: not opened yet."""

    def __getattr__(self, section: str) -> Any:
        return getattr(self.config, section)

    # -------------------------------------------------------------------------------------------- ranks

    @cached_property
    def sizes(self) -> ParallelSizes:
        return self.parallel.sizes

    @cached_property
    def division(self) -> Division:
        """Division of the ranks; of the smallest possible number of them while it is not known."""
        ranks = self.sizes.smallest_world if self.world_size is None else self.world_size
        return Division(self.sizes, self.model, ranks)

    @property
    def data_parallel_size(self) -> int:
        return self.division.world_size // self.sizes.model_parallel_size

    @property
    def packs_at_a_time(self) -> int:
        """Packs that all ranks compute before the optimizer can step."""
        turns = self.sizes.pipeline if self.sizes.virtual_pipeline > 1 else 1
        return self.data.micro_batch_size * self.data_parallel_size * turns

    # -------------------------------------------------------------------------------------------- network

    @property
    def is_fp8(self) -> bool:
        return self.train.fp8 != "none"

    @property
    def has_engine(self) -> bool:
        return self.parallel.transformer_impl == "transformer_engine"

    @property
    def has_experts(self) -> bool:
        return self.model.experts.num_experts > 0

    @property
    def projection_rows(self) -> int:
        """Rows of the matrix of queries, keys and values."""
        return self.model.attention_size + 2 * self.model.key_heads * self.model.dim_per_head

    @property
    def has_adapter(self) -> bool:
        return self.train.adapter is not None

    @property
    def is_student(self) -> bool:
        return self.train.distill is not None

    @property
    def adapted_chunks(self) -> tuple[bool, ...]:
        """Whether each model chunk has a linear that `train.adapter.targets` names."""
        from megadit.models.lora.adapters import chosen_targets

        paths = [target.linear.split(".") for target in chosen_targets(self.model, self.train.adapter.targets).values()]
        size = self.model.num_layers // self.sizes.num_chunks
        of_blocks = {int(path[1]) // size for path in paths if path[0] == "blocks"}
        everywhere = any(path[0] not in ("x_embedder", "blocks", "final_layer") for path in paths)
        return tuple(everywhere or part in of_blocks for part in range(self.sizes.num_chunks))

    # -------------------------------------------------------------------------------------------- data

    @cached_property
    def set_sampling(self) -> dict[str, Any]:
        """The settings of `validation.sampling` that are set (not None)."""
        return {name: value for name, value in asdict(self.validation.sampling).items() if value is not None}

    @property
    def longest_mock(self) -> tuple[tuple[int, int, int], int]:
        """(latent shape, tokens) of the mock sample with most tokens. Raises UserError if a side is not a multiple of
        the patch."""
        tokens = {shape: math.prod(self.model.sample_grid(*shape)) for shape in self.data.mock_latent_shapes}
        return max(tokens.items(), key=lambda item: item[1])

    @cached_property
    def damaged_shards(self) -> dict[Path, list[str]]:
        """Folders of the data set, or of blended data sets, with descriptions of shards of the wrong size."""
        from megadit.train.dataset.dataset_info import folders_of

        folders = folders_of(self.data.path) if self.data.path else []
        found = {folder: damaged_shards(folder) for folder in folders}
        return {folder: damaged for folder, damaged in found.items() if damaged}

    @cached_property
    def too_long(self) -> TooLong:
        """Statistics over those latents whose size the network accepts."""
        kept = self.data.max_frames or math.inf
        tokens = []
        for frames, height, width in self.dataset.latent_shapes:
            with suppress(UserError):  # the reader of the sample reports a size that the network cannot take
                tokens.append(math.prod(self.model.sample_grid(int(min(frames, kept)), height, width)))
        beyond = sum(number > self.data.seq_length for number in tokens)
        return TooLong(beyond / max(1, len(tokens)), max(tokens, default=0), len(tokens))

    @property
    def encoding(self) -> str:
        """The `data.encode` that the data set needs."""
        return "on_the_fly" if self.dataset.store == "raw" else "precached"

    @property
    def frame_conditionings(self) -> list[str]:
        """Modes of `data.conditioning` that need frames encoded as images."""
        modes = [text.partition(":")[0] for text in self.data.conditioning]
        return [use for use in modes if use in ("last_frame", "keyframes")]

    @property
    def is_blend(self) -> bool:
        """Whether `data.path` is a YAML file that blends data sets."""
        return str(self.data.path).endswith((".yaml", ".yml"))

    @property
    def has_tokenizer_of_dataset(self) -> bool:
        """Whether `validation.tokenizer_folder` holds the tokenizer that encoded the data set."""
        from megadit.models.tokenizers import load_tokenizer

        return load_tokenizer(self.validation.tokenizer_folder).fingerprint() == self.dataset.tokenizer_fingerprint

    @property
    def num_labels(self) -> int:
        """Number of classes of the data set; 0 if its texts are no labels."""
        from megadit.models.text_encoders import load_text_encoder

        return len(getattr(load_text_encoder(self.dataset.text_encoder_folder), "names", ()))

    @property
    def num_words(self) -> int:
        """Vocabulary size of the data set's text tokens; 0 if its texts are stored as features."""
        from megadit.models.text_encoders import load_text_encoder

        return getattr(load_text_encoder(self.dataset.text_encoder_folder), "num_words", 0)

    @property
    def longest_text(self) -> int:
        """Maximum tokens of a text of the data set; 0 if texts are labels."""
        from megadit.models.text_encoders import load_text_encoder

        return getattr(load_text_encoder(self.dataset.text_encoder_folder), "max_length", 0)

    # -------------------------------------------------------------------------------------------- machine

    @property
    def extensions(self) -> ModuleType:
        """Module that reports capabilities of GPUs and libraries; it imports torch, which other rules do not need."""
        from megadit.models.megatron import extensions

        return extensions
