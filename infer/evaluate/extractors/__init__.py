"""Networks whose features stand for videos: one protocol, a table of those that can be read."""

from megadit.infer.evaluate.extractors.base import Extractor
from megadit.infer.evaluate.extractors.files import KINDS, open_extractors

__all__ = ["KINDS", "Extractor", "open_extractors"]
