"""Background work of the gateway: jobs to Triton servers, their videos, pictures and webhooks."""
