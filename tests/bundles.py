"""Bundles that tests make of others."""

from dataclasses import replace
from os import PathLike

from megadit.models.bundle.bundle import Bundle, write_bundle
from megadit.train.data.given import USES


def write_able_bundle(source: PathLike | str, out: PathLike | str) -> None:
    """A bundle as if its network had been trained to be given parts of every kind."""
    bundle = Bundle.open(source)
    write_bundle(
        out,
        config=replace(bundle.config, given_sigma=0.02),
        state_dict=bundle.load_dit().state_dict(),
        tokenizer=bundle.load_tokenizer(),
        text_encoder=bundle.load_text_encoder(),
        defaults=bundle.defaults,
        training={"given": dict.fromkeys(USES, 0.1)},
    )
