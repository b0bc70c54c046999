"""The examples of infer/README.md run as they stand."""

import re
from pathlib import Path

import megadit.infer

from .conftest import make_adapter

README = Path(megadit.infer.__file__).parent / "README.md"


def test_the_python_examples_run(bundle_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/demo").mkdir(parents=True)
    (tmp_path / "runs/demo/bundle").symlink_to(bundle_dir)
    examples = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 6
    make_adapter(tmp_path / "zog", bundle_dir, 1)
    make_adapter(tmp_path / "other", bundle_dir, 2)
    names: dict = {}
    for example in examples:
        exec(compile(example, str(README), "exec"), names)
    assert (tmp_path / "1.mp4").exists() and (tmp_path / "2.mp4").exists()
    assert names["result"].settings.sampler == "unipc"


def test_every_module_is_in_the_reading_order():
    text = README.read_text(encoding="utf-8")
    modules = {path.name for path in README.parent.glob("*.py")} - {"__init__.py"}
    assert not {name for name in modules if f"`{name}`" not in text}
