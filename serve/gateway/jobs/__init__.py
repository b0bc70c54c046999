"""What the gateway does in the background: jobs to Triton servers, their videos, pictures and webhooks."""
