"""HTTP in front of Triton: the video API, keys, a job store that survives restarts, routing over several servers."""
