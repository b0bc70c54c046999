"""Source media of the samples (`--source_media`), stored so that the data can be encoded anew later.

`source_media/train-000000.tar` holds, for every sample of `train-000000.tar` except mirror images, its description and
its source: the unchanged file of an image or short video, or an mp4, in the size of its bucket, of a clip cut out of a
longer video. Training does not read them.
"""

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from PIL import Image

from megadit.infer.decoding.animations import is_animated
from megadit.infer.decoding.pictures import IMAGE_FORMATS
from megadit.infer.media.video_io import encode_mp4
from megadit.train.data.ingest.clips.decode import open_source, read_image
from megadit.train.data.ingest.clips.encode import decoded_clips, describe, png_bytes
from megadit.train.data.ingest.lines import LongList
from megadit.train.data.ingest.plan import Clip, Settings, Source, source_from_json
from megadit.train.data.ingest.pool import Pool
from megadit.train.data.ingest.sources.files import file_size, open_file
from megadit.train.data.ingest.sources.webdataset import SOURCE_MEDIA
from megadit.train.data.writer import write_members

MOST_BYTES = 1 << 26
"""Maximum size of a file that is stored unchanged: each is in memory once. Larger ones are stored decoded."""
MOST_PROBED = 1000
"""Number of files from whose sizes the total is estimated."""
_ANIMATIONS = ((b"\x89PNG", "apng"), (b"RIFF", "webp"), (b"GIF8", "gif"))


def source_media_of(shard: Path) -> Path:
    """Path of the source media of a shard."""
    return shard.parent / SOURCE_MEDIA / shard.name


def source_media_bytes(root: Path) -> int:
    """Size of the source media in a data set's folder; 0 if there are none."""
    return sum(path.stat().st_size for path in (root / SOURCE_MEDIA).glob("[!.]*.tar"))


def write_source_media(shard: Path, clips: Sequence[Clip], settings: Settings, pool: Pool) -> None:
    """Write the source media of one shard atomically, in the order of `clips`.

    Raises:
        UserError: for a source that has changed since it was scanned.
    """
    path = source_media_of(shard)
    path.parent.mkdir(exist_ok=True)
    write_members(path, _members(list(_own(clips)), settings, pool))


def _own(clips: Iterable[Clip]) -> Iterator[Clip]:
    """Without those that are another's mirror image."""
    return (clip for clip in clips if not clip.is_mirrored)


def _members(clips: Sequence[Clip], settings: Settings, pool: Pool) -> Iterator[tuple[str, bytes]]:
    whole = {clip.key for clip in clips if clip.is_whole and _size(clip.source) <= MOST_BYTES}
    cut = decoded_clips([clip for clip in clips if clip.key not in whole], settings, pool)
    for clip in clips:
        yield f"{clip.key}.json", json.dumps(describe(clip), ensure_ascii=False).encode()
        if clip.key not in whole:
            frames_THWC = next(cut).frames_THWC
            suffix, content = (
                ("mp4", encode_mp4(frames_THWC, clip.fps)) if clip.fps else ("png", png_bytes(frames_THWC[0]))
            )
        else:
            with open_source(clip.source) as file:
                content = file.read(MOST_BYTES)
            suffix = _video_suffix(content) if clip.fps else _image_suffix(content)
            if suffix is None:  # a picture of several, or of a kind that would be listed as a video
                picture = io.BytesIO()
                read_image(clip.source, settings).save(picture, format="png")
                suffix, content = "png", picture.getvalue()
        yield f"{clip.key}.{suffix}", content


def _video_suffix(content: bytes) -> str:
    """File suffix under which the content is listed as a video; its format is read from its bytes."""
    moving = is_animated(content[:4096])
    return next((suffix for head, suffix in _ANIMATIONS if content.startswith(head) and moving), "mp4")


def _image_suffix(content: bytes) -> str | None:
    with Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
        return None if image.format == "GIF" or is_animated(content[:4096]) else image.format.lower()


def _size(source: Source) -> int:
    if source.size is not None:
        return source.size
    with open_file(source.path) as file:
        return file_size(file) - source.offset


def expected(clips: Iterable[Clip]) -> str:
    """Describe the expected size of a plan's source media, before any is written."""
    whole, cut = LongList(source_from_json), 0
    for clip in _own(clips):
        if clip.is_whole:
            whole.append(clip.source)
        else:
            cut += 1
    looked_at = whole[:: max(1, len(whole) // MOST_PROBED)]
    num_bytes = sum(map(_size, looked_at)) * len(whole) / max(1, len(looked_at))
    return f"source media: {len(whole):,} files of about {num_bytes / 1e6:,.1f} MB together" + (
        f", and {cut:,} clips that are cut out of longer videos" if cut else ""
    )
