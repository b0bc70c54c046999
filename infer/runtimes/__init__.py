"""One denoiser, several ways to run it. Each is a `Denoiser` (see `megadit.infer.sampling.guidance`)."""
