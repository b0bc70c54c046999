"""From videos and images as people have them to a data set: list, scan, select, encode, finish."""
