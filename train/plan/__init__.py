"""Cost of a run before it runs: work, memory and time of one rank in any layout, and the best layout."""
