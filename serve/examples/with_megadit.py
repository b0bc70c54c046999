"""Requests a video, with progress, by megadit's client.

python -m megadit.serve.examples.with_megadit [URL PROMPT IMAGE ADAPTER:SCALE]
"""

import sys
from pathlib import Path

from megadit.serve.client import VideoClient
from megadit.serve.contract import VideoRequest


def main(url: str = "localhost", prompt: str = "a red seven moving left", image: str = "", adapter: str = "") -> None:
    client = VideoClient(url)
    first_frame = Path(image).read_bytes() if image else None
    adapters = (adapter,) if adapter else ()  # NAME:SCALE, one or several
    request = VideoRequest(prompt=prompt, seed=7, num_steps=10, image=first_frame, adapters=adapters)
    for video in client.generate(request, on_progress=lambda now: print(f"step {now.step} of {now.num_steps}")):
        path = Path(f"video{video.suffix}")
        path.write_bytes(video.data)
        print(f"{path}: made in {video.seconds:.2f} s, settings {video.settings}")


if __name__ == "__main__":
    main(*sys.argv[1:])
