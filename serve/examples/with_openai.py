"""Requests a video by OpenAI's client, from the HTTP video API with a key; copy this file anywhere.

pip install openai
python with_openai.py http://127.0.0.1:8080 KEY "a red seven moving left"
"""

import sys

from openai import OpenAI


def main(url: str, key: str, prompt: str = "a red seven moving left") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key=key)
    # all other settings of the service go in extra_body
    video = client.videos.create_and_poll(prompt=prompt, extra_body={"seed": 7, "num_steps": 10}, poll_interval_ms=500)
    client.videos.download_content(video.id).write_to_file("video.mp4")
    print(f"video.mp4: {video.status}, {video.size}")


if __name__ == "__main__":
    main(*sys.argv[1:])
