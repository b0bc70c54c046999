"""`megadit demo-shapes`: scenes of drawn things that move, turn, grow and change colour; classifier and score."""
