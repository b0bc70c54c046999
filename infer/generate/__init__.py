"""`megadit generate`: options, one specification per video, output files, long videos, the memory plan."""
