"""Clips of a source: scanned, scored, selected, decoded, captioned and encoded."""
