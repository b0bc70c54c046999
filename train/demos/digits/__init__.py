"""Demo on handwritten digits: its classifier of clips, scores and figures."""
