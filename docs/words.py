"""Words that names and prose of the product no longer use, each with the field's word for it.

`docs/prose.py`, which `make lint` runs, counts the names that hold one and refuses texts that do.
"""

RETIRED = {
    "answers": "responses, annotation cache",
    "averages": "EMA weights",
    "beside": "attached to, extra",
    "boards": "trackers",
    "doubts": "warnings",
    "exchanges": "HTTP retries",
    "figure": "metric value, measurement",
    "figures": "metric values, measurements",
    "floor": "baseline",
    "foreign": "untrusted, importers",
    "given": "conditioning, clean",
    "half": "conditional or unconditional pass",
    "halves": "conditional and unconditional pass",
    "judge": "scorer, classifier, anomaly detector, discriminator",
    "judged": "scored, classified",
    "judges": "scorers, classifiers",
    "kept": "cached",
    "known": "encoded, conditioning",
    "licence": "license",
    "look": "probe",
    "narration": "console",
    "originals": "source media",
    "pace": "throughput",
    "pair": "high-noise and low-noise experts",
    "pairs": "high-noise and low-noise experts",
    "part": "model chunk, component, shard",
    "parts": "model chunks, components, shards",
    "piece": "token span",
    "pieces": "token spans",
    "placement": "device group",
    "preconditioner": "parameterization",
    "ranked": "distributed",
    "remake": "video-to-video",
    "room": "quota, free space",
    "shelf": "LRU cache",
    "slots": "adapter inputs",
    "spared": "cached steps",
    "takes": "supported conditionings",
    "team": "workers",
    "tell": "print, report",
    "teller": "progress",
    "tells": "prints, reports",
    "told": "guidance-distilled, reported",
    "use": "kind",
    "uses": "kinds",
    "wanted": "target",
    "way": "variant",
    "ways": "variants",
}
"""Word, as a part of a name between underscores or capitals -> what the field says."""

NEVER_IN_PROSE = ("judge", "licence", "preconditioner", "remake", "spared", "surer", "teller", "what is given")
"""Words and phrases that no first line of a docstring and no help text holds."""

MOST_NAMES = 40
"""Names of variables, arguments, attributes, functions and classes that may hold a retired word: most say `part` of a
path, `use` of a module or `pairs` of anything, as the field does, too."""
