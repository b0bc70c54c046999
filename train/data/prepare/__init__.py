"""`megadit prepare SOURCE OUT`: the table of sources, and the data sets that a command draws or generates."""
