"""Planner: estimates of work, memory and time of one rank in any layout, and the best layout."""
