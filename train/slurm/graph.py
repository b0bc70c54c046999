"""A chain as a picture: a box for each stage, an arrow from each that it waits for."""

from xml.sax.saxutils import escape

from megadit.train.slurm.config import ChainConfig, StageConfig

WIDTH, HEIGHT = 210, 58
"""Size of a box, in pixels."""
ACROSS, DOWN = 290, 84
"""Distance from one box to the next, in pixels."""
MARGIN = 20


def depths(chain: ChainConfig) -> dict[str, int]:
    """Stage -> how many others must end one after another before it starts."""
    found: dict[str, int] = {}
    for name in chain.stages:
        found[name] = 1 + max((found[before] for before in chain.before(name)), default=-1)
    return found


def describe(chain: ChainConfig, stage: StageConfig) -> str:
    """Summarise the resources that a stage requests."""
    what = "1 node"
    if stage.torchrun:
        what = f"{stage.nodes} node{'s' if stage.nodes > 1 else ''} x {stage.ranks(chain.cluster)} ranks"
    tasks = f", {len(stage.tasks)} tasks" if stage.tasks else ""
    return f"{what}{tasks}, {stage.time}"


def draw(chain: ChainConfig) -> str:
    """The picture as SVG; columns are depths."""
    places: dict[str, tuple[int, int]] = {}
    for name, depth in depths(chain).items():
        row = sum(column == depth for column, _ in places.values())
        places[name] = (depth, row)
    at = {name: (MARGIN + column * ACROSS, MARGIN + row * DOWN) for name, (column, row) in places.items()}
    width = max(x for x, _ in at.values()) + WIDTH + MARGIN
    height = max(y for _, y in at.values()) + HEIGHT + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z"/></marker></defs>',
    ]
    for name, (x, y) in at.items():
        for before in chain.before(name):
            from_x, from_y = at[before][0] + WIDTH, at[before][1] + HEIGHT // 2
            parts.append(
                f'<path d="M{from_x} {from_y}C{from_x + 40} {from_y} {x - 40} {y + HEIGHT // 2} {x} {y + HEIGHT // 2}" '
                'fill="none" stroke="black" marker-end="url(#tip)"/>'
            )
    for name, (x, y) in at.items():
        stage = chain.stages[name]
        parts += [
            f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#eef3f8" stroke="#456"/>',
            f'<text x="{x + 12}" y="{y + 24}" font-size="15">{escape(name)}</text>',
            f'<text x="{x + 12}" y="{y + 44}" font-size="11" fill="#456">{escape(describe(chain, stage))}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])
