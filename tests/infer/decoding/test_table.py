"""Every file of the table, read through every door: the same pixels, and the right ones."""

from pathlib import Path

import av
import numpy as np
import pytest

from megadit.infer.evaluate.videos import read_file
from megadit.infer.media.untrusted import decode
from megadit.infer.media.video_io import read_video
from megadit.models.diffusion.conditioning_settings import MediaLimits
from megadit.models.shared.errors import UserError
from megadit.train.data.ingest.clips.decode import read_frames, read_image, read_timeline
from megadit.train.data.ingest.clips.scan import scan
from megadit.train.data.ingest.plan import Settings, Source

from .drawing import COUNT, Row, fields_of, number_of
from .flags import moment
from .table import ROWS

SERVED = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".mp4", ".mov", ".mkv", ".webm")
"""What the gateway and Triton take; other formats they refuse."""


def made(row: Row, folder: Path) -> Path:
    for codec in row.needs:
        if codec not in av.codecs_available:
            pytest.skip(f"this build of ffmpeg lacks {codec}")
    row.make(path := folder / row.name)
    return path


def prepared(row: Row, path: Path) -> tuple[np.ndarray, float]:
    """What `megadit prepare` takes of it."""
    source = Source(name=path.name, kind="video" if row.fps else "image", path=str(path))
    settings = Settings(sizes=(row.size,), fps=1000.0)
    if not row.fps:
        return np.asarray(read_image(source, settings))[None], 0.0
    line = read_timeline(source, settings)
    pts = tuple(time for time, is_damaged in zip(line.pts, line.is_damaged_T, strict=True) if not is_damaged)
    return read_frames(source, settings, pts, line.height, line.width, is_regular=line.is_regular), line.fps


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_all_doors_see_the_same(row, tmp_path):
    path = made(row, tmp_path)
    doors = {"read": lambda: read_video(path), "evaluate": lambda: read_file(path)}
    if path.suffix in SERVED:
        doors["media"] = lambda: (decode(path.read_bytes(), MediaLimits()), None)
    if row.refused:
        for door in doors.values():
            with pytest.raises(UserError, match=row.refused if row.refused != "broken" else "cannot read|is no png"):
                door()
        if not row.clips_only:
            kind = "video" if path.suffix in (".mp4", ".mkv") else "image"
            finding = scan(Source(name=row.name, kind=kind, path=str(path)), Settings())
            reasons = [skip.reason for skip in finding.skips]
            assert reasons in ([row.refused], ["HEIC (pip install pillow-heif)"])
            return
    else:
        doors |= {"prepare": lambda: prepared(row, path)}
    seen = {name: door() for name, door in doors.items()} if not row.refused else {"prepare": prepared(row, path)}
    frames, fps = seen["prepare"]
    for name, (theirs, rate) in seen.items():
        assert np.array_equal(theirs, frames) and (rate is None or rate == pytest.approx(fps, rel=1e-3)), name
    assert frames.shape[1:] == (*row.size, 3) and fps == pytest.approx(row.fps, rel=0.01)
    if row.numbers is not None:
        assert [number_of(frame) for frame in frames] == list(row.numbers)
        assert len(frames) in (1, 2, COUNT) or row.numbers != range(COUNT)
    if row.name in ("top_first.mpg", "bottom_first.mpg"):
        for number, frame in enumerate(frames):
            assert np.abs(np.diff(frame[2:20].astype(int), axis=0)).mean() < 1, "combed lines differ by 10"
            is_red, was_red = (np.argmax(each[10], axis=1) == 0 for each in (frame, moment(2 * number)))
            assert (is_red == was_red).mean() > 0.97, "another moment is off by 8 % of the columns"
    else:
        off = np.abs(fields_of(frames[0]) - np.array(row.fields))
        assert off.max() <= row.near, fields_of(frames[0]).tolist()
