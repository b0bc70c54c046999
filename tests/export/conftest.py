from dataclasses import replace

import pytest

from megadit.export import signatures as contract
from megadit.export.build import ExportSettings, export_bundle
from megadit.models.bundle import Bundle
from tests.bundles import CONFIG, write_tiny_bundle


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory) -> Bundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny")


@pytest.fixture(scope="session")
def shallow(tmp_path_factory) -> Bundle:
    """The tiny bundle with one block: to export it takes half as long."""
    return write_tiny_bundle(tmp_path_factory.mktemp("shallow") / "tiny", replace(CONFIG, num_layers=1))


@pytest.fixture(scope="session")
def exported(tiny_bundle, tmp_path_factory) -> Bundle:
    """The tiny bundle after `megadit export`."""
    out = tmp_path_factory.mktemp("exported") / "tiny"
    export_bundle(tiny_bundle.path, out, ExportSettings(profiles=("text=1,4,9",)))
    return Bundle.open(out, verify=True)


@pytest.fixture(scope="session")
def specs(tiny_bundle):
    tokenizer, encoder = tiny_bundle.load_tokenizer(), tiny_bundle.load_text_encoder()
    profiles = contract.parse_profiles(["text=1,4,9"], contract.default_profiles(tiny_bundle, tokenizer, encoder))
    return contract.specs(profiles, tiny_bundle.config, tokenizer)
