"""How many files a reader opens who follows one prompt from the command to the mp4."""

import json
import subprocess
import sys

MOST_FILES = 70
"""Here 68; other processors choose other variants of ops."""
ENTERED = """
import inspect, json, sys, threading
from pathlib import Path
from megadit.models.shared.cli import verbs

ROOT = f"{Path(verbs.__file__).parents[3]}/"
entered = {}

def note(frame, event, arg):
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(ROOT) or code.co_filename in entered:
        return
    above = frame
    while above and not (above.f_code.co_name == "<module>" and above.f_code.co_filename.startswith(ROOT)):
        above = above.f_back
    if above is None and code.co_flags & inspect.CO_OPTIMIZED:  # neither an import nor the body of a class
        entered[code.co_filename] = code.co_qualname

threading.setprofile(note)
sys.setprofile(note)
code = verbs.main(sys.argv[1:])
sys.setprofile(None)
names = {file.removeprefix(ROOT): name for file, name in entered.items()}
print(json.dumps([code, {file: name for file, name in names.items() if file.split("/")[0] in ("models", "infer")}]))
"""


def test_a_plain_prompt_enters_few_files(bundle_dir, tmp_path):
    """Files of which a function runs, imports aside; the first function of each is shown."""
    asked = [
        "generate",
        "--checkpoint_path",
        bundle_dir,
        "--device",
        "cpu",
        "--prompt",
        "a red seven",
        "--num_steps",
        "2",
    ]
    found = subprocess.run(
        [sys.executable, "-c", ENTERED, *asked, "--video_save_path", tmp_path / "seven.mp4"],
        capture_output=True,
        text=True,
    )
    code, entered = json.loads(found.stdout.splitlines()[-1])
    assert code == 0 and (tmp_path / "seven.mp4").exists(), found.stderr
    assert {"infer/sampling/samplers.py", "models/networks/blocks.py", "infer/media/video_io.py"} <= entered.keys()
    assert len(entered) <= MOST_FILES, json.dumps(entered, indent=1)
