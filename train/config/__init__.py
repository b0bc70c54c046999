"""The configuration of a run: its schema, the rules between its keys, loading, and names of other packages."""
