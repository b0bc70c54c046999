"""The format of a data set on disk: its description, its samples' metadata, Energon's files, its place."""
