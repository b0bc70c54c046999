"""The models of Triton's Python backend: the video service and its engine, embeddings and classes."""
