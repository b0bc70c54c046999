"""The bundle, one folder with all that sampling needs: read, written, copied to and from hubs and stores."""
