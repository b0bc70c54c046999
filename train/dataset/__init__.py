"""Format of a data set on disk: description, metadata of samples, Energon's files, location."""
