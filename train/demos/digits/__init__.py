"""Demo on handwritten digits: its judge of clips, scores and figures."""
