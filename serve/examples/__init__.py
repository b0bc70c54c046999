"""Short programs that ask the service for a video."""
