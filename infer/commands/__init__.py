"""Commands on a bundle: classify, similarity, tune-sampler, calibrate-cache."""
