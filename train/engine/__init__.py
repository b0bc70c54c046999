"""The training engine: network and optimizer set up, one step over micro-batches, the loop, validation."""
