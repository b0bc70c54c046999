"""Short programs that request a video from the service."""
