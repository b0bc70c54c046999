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
from megadit.models.storage.components import write_component
from megadit.models.storage.tokenizer_file import check_tokenizer, load_tokenizer
from megadit.models.text_encoders.published import PublishedText
from megadit.models.text_encoders.token_ids import TokenIds

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


HOSTILE = {
    "takes exponential time": lambda library: {
        "pre_tokenizer": library.pre_tokenizers.Split(library.Regex(r"([a-z ]+)+!"), "isolated")
    },
    "replaces a character by up to 1,000,000,000,000": lambda library: {
        "normalizer": library.normalizers.Sequence([library.normalizers.Replace("a", "a" * 100)] * 6)
    },
    "adds 1,000,000,000,000 tokens": lambda _: {},
    "adds 8,002,000 tokens": lambda library: {
        "post_processor": library.processors.TemplateProcessing("a:0 " * 4000 + "$0", "$A $B", [("a", 0)])
    },
}
"""What a small tokenizer.json may ask for."""


@pytest.mark.parametrize("reason", HOSTILE)
def test_a_tokenizer_s_program_takes_neither_time_nor_memory(folder, reason):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for name, value in HOSTILE[reason](tokenizers).items():
        setattr(words, name, value)
    values = json.loads(words.to_str())
    if "1,000,000,000,000 tokens" in reason:
        padding = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
        values["padding"] = {"strategy": {"Fixed": 10**12}, **padding}
    if "8,002,000" in reason:
        values["post_processor"]["special_tokens"]["a"]["ids"] *= 2000
    (folder / "tokenizer.json").write_text(json.dumps(values))
    for read in (PublishedText("a text encoder", ("tokenizer.json",)).load_tokenizer, load_tokenizer, TokenIds.load):
        if read == TokenIds.load:
            write_component(folder, {"type": "token_ids", "max_length": 77}, {})
            (folder / "tokenizer.json").write_text(json.dumps(values))
        with pytest.raises(UserError, match=reason) as raised:
            read(folder)
        assert "\n" not in str(raised.value)


def test_patterns_of_published_tokenizers_are_taken():
    """GPT-2's, Qwen's, CLIP's and GPT-4o's."""
    for pattern in (
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)",
        r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}]*[\p{Ll}\p{Lm}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}",
    ):
        check_tokenizer(json.dumps({"pre_tokenizer": {"pattern": {"Regex": pattern}}}), "it")


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
    assert seen >= 6 and pretrained.PRETRAINED["trust_remote_code"] is False
