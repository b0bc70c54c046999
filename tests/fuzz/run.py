"""Has atheris look for bytes that end a parser otherwise than by a value or a refusal.

python -m tests.fuzz.run NAME SECONDS
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["megadit", "starlette", "python_multipart", "json", "yaml"]):
    from tests.fuzz.parsers import CORPUS, PARSERS, check


def main() -> None:
    name, seconds = sys.argv[1:]
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as seeds:
        for number, seed in enumerate(PARSERS[name].seeds):
            (Path(seeds) / str(number)).write_bytes(seed)
        options = [f"-max_total_time={seconds}", f"-artifact_prefix={folder}/", "-rss_limit_mb=4096", "-timeout=30"]
        atheris.Setup([sys.argv[0], *options, seeds], lambda data: check(name, data))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
