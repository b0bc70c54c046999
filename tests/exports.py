"""Exports that several tests look at: to trace a network takes seconds, however small it is."""

import fcntl
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

TARGETS = ("blocks.*", "final_layer.*")
RANK = 5
"""Of the adapters together that `slotted` has room for."""


def export_denoiser(source, out, **settings):
    """As `megadit export`, of the denoisers alone: tokenizer and text encoder stay torch's."""
    from megadit.export import build
    from megadit.infer.runtimes.network_spec import DENOISERS
    from megadit.models.bundle import Bundle

    all_specs = build._specs

    def specs(*about):
        return {name: spec for name, spec in all_specs(*about).items() if name in DENOISERS}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_specs", specs)
        build.export_bundle(source, out, build.ExportSettings(**settings))
    return Bundle.open(out, verify=True)


@pytest.fixture(scope="session")
def once(tmp_path_factory) -> Callable[[str, Callable[[Path], object]], Path]:
    """once(name, write): the folder that `write(folder)` has filled, once for all workers of a run."""
    base = tmp_path_factory.getbasetemp()
    return partial(fill_once, base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)


def fill_once(shared: Path, name: str, write: Callable[[Path], object]) -> Path:
    folder = shared / "once" / name
    folder.parent.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if lock.seek(0, os.SEEK_END) == 0:  # the end as it is now: another worker may have written meanwhile
            shutil.rmtree(folder, ignore_errors=True)  # of one that failed
            folder.mkdir()
            write(folder)
            lock.write("filled")
    return folder


@pytest.fixture(scope="session")
def slotted(once):
    """The tiny bundle, exported with room for adapters, for up to five videos at once."""
    from megadit.models.bundle import Bundle

    from .bundles import write_tiny_bundle

    def write(folder: Path) -> None:
        profiles = ("text=1,4,9", "batch=1,1,5")
        bundle = write_tiny_bundle(folder / "bundle").path
        export_denoiser(bundle, folder / "exported", profiles=profiles, adapter_rank=RANK, adapter_targets=TARGETS)

    return Bundle.open(once("slotted", write) / "exported")


@pytest.fixture(scope="session")
def exported_able(once):
    """The tiny bundle as if it had been trained for every use, exported."""
    from megadit.models.bundle import Bundle

    from .bundles import DEFAULTS, write_able_bundle, write_tiny_bundle

    def write(folder: Path) -> None:
        tiny = write_tiny_bundle(folder / "tiny", defaults=replace(DEFAULTS, num_steps=4)).path
        write_able_bundle(tiny, folder / "bundle")
        export_denoiser(folder / "bundle", folder / "exported", profiles=("text=1,4,9", "batch=1,1,2"))

    return Bundle.open(once("able", write) / "exported")


@pytest.fixture(scope="session")
def exported_pair(once):
    """Two networks split by noise level, exported with room for adapters."""
    from megadit.models.bundle import Bundle

    from .bundles import CONFIG, write_pair_bundle, write_tiny_bundle

    def write(folder: Path) -> None:
        write_pair_bundle(write_tiny_bundle(folder / "tiny", replace(CONFIG, num_layers=1)).path, folder / "pair")
        room = {"adapter_rank": 4, "adapter_targets": TARGETS}
        export_denoiser(folder / "pair", folder / "exported", profiles=("batch=1,1,2", "text=1,4,9"), **room)

    return Bundle.open(once("pair", write) / "exported")


@pytest.fixture(scope="session")
def exported_told(once):
    """A network that is told a scale of guidance, exported with room for adapters."""
    from megadit.models.bundle import Bundle

    from .bundles import CONFIG, write_tiny_bundle

    def write(folder: Path) -> None:
        config = replace(CONFIG, num_layers=1, guidance_embedding_range=(1.0, 6.0))
        bundle = write_tiny_bundle(folder / "bundle", config).path
        export_denoiser(bundle, folder / "exported", profiles=("text=1,4,9", "batch=1,2,2"), adapter_rank=2)

    return Bundle.open(once("told", write) / "exported")


@pytest.fixture(scope="session")
def exported_clip(once):
    """Both towers of a random CLIP, of pictures of 32 x 32, for up to three at once."""
    return _exported_judge(once, "clip")


@pytest.fixture(scope="session")
def exported_classifier(once):
    """A random classifier, of pictures of 16 x 16, for up to three at once."""
    return _exported_judge(once, "classifier")


def _exported_judge(once, kind: str):
    from megadit.export.build import ExportSettings, export_bundle
    from megadit.models.bundle import Bundle
    from megadit.models.shared.files import write_manifest

    from . import bundles

    def write(folder: Path) -> None:
        bundle = getattr(bundles, f"write_{kind}_bundle")(folder / "bundle")
        record = {"export": {"tensorrt": "engines of an export that it was copied from, without them"}}
        write_manifest(bundle.path, bundle.manifest | record)
        export_bundle(folder / "bundle", folder / "exported", ExportSettings(profiles=("batch=1,2,3",)))

    return Bundle.open(once(kind, write) / "exported")
