"""Pictures and videos that others made to test their decoders: nothing crashes, hangs, or fills the memory."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import PIL
import pytest

MOST_KIB = 1 << 20
SUFFIXES = (".mp4", ".avi", ".webm", ".mov", ".gif", ".webp", ".png", ".jpg")
PEAK = """
import re, resource
from pathlib import Path
own = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])  # ru_maxrss holds the parent's too
print(max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
"""
"""KiB of the largest of a process and its children."""
READ = """
import signal, sys
from megadit.infer.media.video_io import read_video
from megadit.models.shared.errors import UserError
seen = 0
for path in sys.stdin.read().splitlines():
    signal.setitimer(signal.ITIMER_PROF, 60)  # a file that hangs its decoder ends this process
    try:
        read_video(path)
        seen += 1
    except UserError:
        pass
print(seen)
"""
PREPARE = """
import sys
from megadit.train.data.prepare import command as prepare
assert prepare.main(sys.argv[1:]) == 0
"""


@pytest.fixture(scope="module")
def strangers(tmp_path_factory) -> Path:
    """The test pictures in Pillow's source, and videos that come with packages."""
    root = tmp_path_factory.mktemp("strangers")
    wanted = ["--no-deps", "--no-binary", "pillow", f"pillow=={PIL.__version__}"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(root), *wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        pytest.skip(f"Pillow's source cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    (root / "files").mkdir()
    with tarfile.open(next(root.glob("*.tar.gz"))) as tar:
        for member in tar:
            if member.isfile() and "/Tests/images/" in member.name:
                name = member.name.partition("/Tests/images/")[2].replace("/", "_")
                (root / "files" / name).write_bytes(tar.extractfile(member).read())
    others = (path for path in (Path(PIL.__file__).parent.parent / "gradio").rglob("*") if path.suffix in SUFFIXES)
    for number, path in enumerate(sorted(others)):
        (root / "files" / f"{number}-{path.name}").symlink_to(path)
    return root / "files"


def run(program: str, *words: str, given: str = "") -> str:
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", program + PEAK, *words]
    done = subprocess.run(command, capture_output=True, text=True, input=given, timeout=1800)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_the_reader_takes_or_refuses_each(strangers):
    paths = [path for path in sorted(strangers.iterdir()) if not path.is_symlink()]  # videos are read whole here
    seen, peak = map(int, run(READ, given="\n".join(map(str, paths))).split())
    assert len(paths) > 600 and 500 < seen < len(paths) and peak < MOST_KIB


@pytest.mark.slow
def test_a_preparation_accounts_for_each(strangers, tmp_path):
    options = ["--sizes", "32x32", "--num_frames", "1", "--tokenizer", "pixels", "--num_workers", "2"]
    said = run(PREPARE, "images", str(strangers), str(tmp_path / "out"), *options, "--follow_links")
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["sources"] == report["used"] + report["left_out"] + report["not_used"] == len([*strangers.iterdir()])
    assert report["used"] > 200 and int(said.splitlines()[-1]) < MOST_KIB
