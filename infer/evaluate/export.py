"""Exports generated videos in the folder layouts of other benchmarks, which need environments of their own.

| name      | files                          | read by                                                             |
|-----------|--------------------------------|---------------------------------------------------------------------|
| vbench    | PROMPT-INDEX.mp4               | `vbench evaluate --videos_path` (with --mode custom_input: as well)  |
| cdfvd     | 000000.mp4, ... (no captions)  | cd-fvd's `load_videos(folder)`                                      |
| vqascore  | 000000.mp4, ..., captions.json | t2v_metrics: a list of {"video", "text"}                            |
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megadit.infer.evaluate.evaluation import Candidate
from megadit.infer.evaluate.videos import Clip
from megadit.infer.media.video_io import encode_mp4
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import LONGEST_NAME, atomic_directory, write_json

Write = Callable[[Path, Sequence[Candidate]], None]


def vbench(folder: Path, candidates: Sequence[Candidate]) -> None:
    """A folder for each candidate; the index counts the videos of one prompt."""
    for candidate, place in _folders(folder, candidates):
        with atomic_directory(place) as temporary:
            seen: Counter[str] = Counter()
            for clip in _clips(candidate):
                name = f"{clip.prompt}-{seen[clip.prompt]}.mp4"
                if not clip.prompt or "/" in name or "\0" in name or len(name.encode()) > LONGEST_NAME:
                    raise UserError(f"the prompt {clip.prompt[:60]!r} cannot be a file name, which vbench needs")
                seen[clip.prompt] += 1
                (temporary / name).write_bytes(encode_mp4(clip.video_THWC, clip.fps))


def numbered(folder: Path, candidates: Sequence[Candidate]) -> None:
    """Numbered files, and captions.json."""
    for candidate, place in _folders(folder, candidates):
        with atomic_directory(place) as temporary:
            captions = []
            for number, clip in enumerate(_clips(candidate)):
                (temporary / f"{number:06d}.mp4").write_bytes(encode_mp4(clip.video_THWC, clip.fps))
                captions.append({"video": f"{number:06d}.mp4", "text": clip.prompt})
            write_json(temporary / "captions.json", captions)


EXPORTS: dict[str, Write] = {"vbench": vbench, "cdfvd": numbered, "vqascore": numbered}


def _folders(folder: Path, candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Path]]:
    for candidate in candidates:
        scale = "" if candidate.guidance is None else f"-guidance-{candidate.guidance:g}"
        yield candidate, folder / (candidate.model.replace("/", "-") + scale)


def _clips(candidate: Candidate) -> Iterator[Clip]:
    for part in candidate.videos.parts:
        yield from part.read()
