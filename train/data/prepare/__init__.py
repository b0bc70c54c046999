"""`megadit prepare SOURCE OUT`: the table of sources, and data sets that are drawn or generated."""
