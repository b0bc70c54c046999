"""Low-rank adapters: layers, loading and scaling of several at once, and adapters as inputs of exported networks."""
