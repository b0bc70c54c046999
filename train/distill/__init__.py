"""A student that makes a teacher's videos in few calls: what it learns, and from which networks."""
