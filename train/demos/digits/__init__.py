"""Demo on handwritten digits: data, classifier of clips, scores and evaluation."""
