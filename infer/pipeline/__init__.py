"""`TextToVideo`, from prompts to videos: batches, adapters, step caching, windows, results."""
