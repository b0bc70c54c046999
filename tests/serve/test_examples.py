"""The examples do what they say, against the real server."""

import shutil
import subprocess
import sys

import numpy as np
import pytest

from megadit.infer.media.video_io import read_comment, read_video, write_video
from megadit.serve.examples import with_megadit, with_tritonclient


@pytest.mark.parametrize("program", ["with_megadit", "with_tritonclient", "with_curl"])
def test_example_writes_a_video(server, tmp_path, monkeypatch, program, capfd):
    monkeypatch.chdir(tmp_path)
    write_video("a.png", np.full((1, 16, 24, 3), 200, np.uint8))
    if program == "with_curl":
        if shutil.which("curl") is None:
            pytest.skip("no curl")
        script = with_megadit.__file__.replace("with_megadit.py", "with_curl.sh")
        command = [script, server.http_url, "a two", "a.png", "one:0.5"]
        subprocess.run(command, check=True, env={"PATH": f"{sys.prefix}/bin:/usr/bin:/bin"})
    elif program == "with_megadit":
        with_megadit.main(server.grpc_url, "a two", "a.png", "one:0.5")
    else:
        with_tritonclient.main(server.grpc_url, "a two", "a.png", "one:0.5")
    assert "step 4 of" in capfd.readouterr().out
    assert '"adapters": [{"name": "one", "scale": 0.5}]' in read_comment("video.mp4")
    frames, fps = read_video("video.mp4")
    assert frames.shape == (5, 16, 24, 3) and fps == 8
    assert np.abs(frames[0].astype(int) - 200).mean() < 5 < np.abs(frames[4].astype(int) - 200).mean()
