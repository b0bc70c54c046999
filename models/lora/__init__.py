"""Low-rank adapters: layers, loading and scaling of several adapters, and adapters as inputs of exported networks."""
