"""Processes of a service: finds, starts and supervises tritonserver and the gateway."""
