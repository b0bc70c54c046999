"""What the demo adds to the handwritten digits: a judge of clips, the score and the figures."""
