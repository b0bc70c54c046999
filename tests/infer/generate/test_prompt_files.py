"""Files of prompts, as editors and programs write them."""

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megadit.infer.generate.outputs import output_paths
from megadit.infer.generate.specs import prompt_lines
from megadit.models.shared.errors import UserError

PROMPT = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1).filter(
    lambda text: text.strip() == text and not text.startswith(("#", "\ufeff"))
)


@settings(max_examples=40)
@given(
    st.lists(PROMPT, min_size=1),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]),
    st.sampled_from(["txt", "jsonl", "json", "yaml"]),
)
def test_each_prompt_is_a_line_in_any_encoding(tmp_path_factory, prompts, end, encoding, suffix):
    """Of separators of lines in Unicode, such as U+2028, prompts and JSON may hold all but those of files."""
    path = tmp_path_factory.mktemp("prompts") / f"prompts.{suffix}"
    written = {
        "txt": end.join(prompts),
        "jsonl": end.join(json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts),
        "json": json.dumps(prompts, ensure_ascii=False, indent=1),
        "yaml": yaml.safe_dump(prompts, allow_unicode=True),
    }[suffix]
    path.write_bytes(written.encode(encoding))
    assert [line["prompt"] for line in prompt_lines(str(path))] == prompts


@pytest.mark.parametrize("content", ["[" * 100_000, '["a", NaN]', '["a"', '[{"prompt": "a", "seed": 1e999}]'])
@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_what_is_no_json_is_one_line(content, suffix, tmp_path):
    (tmp_path / f"prompts.{suffix}").write_text(content)
    with pytest.raises(UserError, match="prompts.json.* (is not valid JSON|has more than 100 lists)"):
        prompt_lines(str(tmp_path / f"prompts.{suffix}"))


@pytest.mark.parametrize("words", ["--w 832 --h 480 --d 42", "--n blurry, dark --s 30", "--ar 16:9", "@@cat.png"])
def test_settings_of_other_programs_are_no_words(words, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text(f"a dog -- by day, a--b @ home\na cat {words}\n")
    with pytest.raises(UserError, match=rf"line 2: '({words[:2]}\S+).*' is no setting here.* keys of a .jsonl file"):
        prompt_lines(str(path))
    path.write_text("a dog -- by day, a--b @ home, git --amend now\n")
    assert len(prompt_lines(str(path))) == 1


def test_a_url_is_no_folder_to_write_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="s3://bucket/a.mp4 is a URL"):
        output_paths("s3://bucket/a.mp4", [])
    assert not list(tmp_path.iterdir())


def test_a_prompt_file_of_yaml(tmp_path):
    path = tmp_path / "prompts.yml"
    path.write_text("# a comment\n- a red seven\n- prompt: a blue two\n  seed: 3\n")
    assert prompt_lines(str(path)) == [{"prompt": "a red seven"}, {"prompt": "a blue two", "seed": 3}]
    for content, message in {
        "- {prompt: a, seed: 3, seed: 4}": "line 1: an object has a name twice",
        "- {prompt: a, seed: 010}": "010 is 8 to YAML",
        "- &a b\n- *a": "has aliases",
        "- !!python/object/apply:os.getcwd []": "could not determine a constructor",
    }.items():
        path.write_text(content)
        with pytest.raises(UserError, match=message):
            prompt_lines(str(path))


@pytest.mark.parametrize("name", ["prompts.json", "prompts.jsonl"])
def test_an_object_has_a_name_once(name, tmp_path):
    path = tmp_path / name
    line = '{"prompt": "a red seven", "seed": 3, "seed": 4}'
    path.write_text(f"[{line}]" if path.suffix == ".json" else line)
    with pytest.raises(UserError, match="prompts.json.* is not valid JSON: an object has 'seed' twice; give it once"):
        prompt_lines(str(path))
