"""Published networks and tokenizers: no code in their folders runs, whoever says yes."""

import ast
import io
import json
import sys
from pathlib import Path

import pytest

import megadit
from megadit.models.shared.errors import UserError
from megadit.models.storage import pretrained
from megadit.models.text_encoders.published import PublishedText

ROOT = Path(megadit.__file__).parent.parent
CODE = """from pathlib import Path
from transformers import PreTrainedTokenizerFast
Path({trace!r}).touch()
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def folder(tmp_path):
    """A tokenizer whose files name a class of their own, in a file beside them."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path / "folder"
    folder.mkdir()
    model = tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    named = {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}, "tokenizer_class": "Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "config.json").write_text(json.dumps({"model_type": "zog", "auto_map": {"AutoConfig": "evil.Tokenizer"}}))
    (folder / "evil.py").write_text(CODE.format(trace=str(tmp_path / "ran")))
    return folder


def test_a_tokenizer_s_own_code_does_not_run_though_somebody_says_yes(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    try:
        PublishedText("a text encoder", ("tokenizer.json",)).load_tokenizer(folder)
    except UserError as error:
        assert str(folder) in str(error)
    assert not (tmp_path / "ran").exists() and sys.stdin.read() == "y\n" * 100


def test_whatever_is_loaded_of_transformers_is_loaded_so():
    """Each call by itself: a class that asks today for no code may do so tomorrow."""
    seen = 0
    for folder in ("models", "infer", "train", "export", "serve"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                if is_call and node.func.attr == "from_pretrained" and ast.unparse(node.func.value) != "TextToVideo":
                    given = [ast.unparse(each.value) for each in node.keywords if each.arg is None]
                    assert "PRETRAINED" in given, (path, node.lineno)
                    seen += 1
    assert seen >= 7 and pretrained.PRETRAINED["trust_remote_code"] is False
