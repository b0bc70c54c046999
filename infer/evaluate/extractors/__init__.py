"""Feature extractors for evaluations: their interface, and the networks that can be loaded."""

from megadit.infer.evaluate.extractors.base import Extractor
from megadit.infer.evaluate.extractors.files import KINDS, open_extractors

__all__ = ["KINDS", "Extractor", "open_extractors"]
