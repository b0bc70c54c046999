"""Files as people have them, made by PyAV and Pillow, and what anybody should see in each: a row is a format."""

from .clips import ASPECTS, CONTAINERS, PIXELS, SPACES, TIMES, TITLED, TURNED, UNDECODABLE
from .flags import ALPHA, FLAGS
from .stills import ANIMATIONS, NOTHING, PICTURES

ROWS = [*CONTAINERS, *PIXELS, *SPACES, *TURNED, *ASPECTS, *TIMES, *FLAGS, *ALPHA, *PICTURES, *ANIMATIONS]
ROWS += [*TITLED, *UNDECODABLE, *NOTHING]
assert len(ROWS) == len({row.name for row in ROWS}) >= 120
