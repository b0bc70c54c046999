"""Processes of a service: a tritonserver found, started, watched, and put behind a gateway."""
