"""Weights of text encoders as people have them: read as what they are, or refused by name; never half random."""

import json
import random
import shutil
import time

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from safetensors.torch import load_file, save_file

from megadit.models.shared.errors import UserError
from megadit.models.storage.wrapped import open_tensor_file
from megadit.models.text_encoders import CLIPTextEncoder, T5TextEncoder
from megadit.models.text_encoders.published import PublishedText

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

PROMPT = "a red seven moving left"
LAST = "encoder.block.1.layer.1.DenseReluDense.wi.weight"
TOLERANCE = 1e-5
"""Relative, float32: the same sums."""


@pytest.fixture(scope="module")
def t5(tmp_path_factory, write_t5):
    folder = write_t5(tmp_path_factory.mktemp("t5") / "t5-tiny")
    return folder, load_file(folder / "model.safetensors"), features(folder)


def features(model, kind=T5TextEncoder):
    return kind(model=str(model), dtype="float32").encode([PROMPT, "a red"]).features_BLE


def copied(folder, out):
    """All but the weights."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors"))
    return out


def save(tensors, file):
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})


def prefixed(prefix):
    return lambda tensors: {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def without(*names):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def with_one(name, tensor):
    return lambda tensors: {**tensors, name: tensor}


def in_eight_bits(tensors, *, shape=(), ending="scale_weight"):
    """As ComfyUI stores them: w / scale, and the scale beside it; what they stand for is returned too."""
    stored, meant = {"scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)}, {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or "shared" in name or "bias" in name:
            stored[name] = meant[name] = tensor
            continue
        scale = torch.full(shape or (), 0.037)
        low = (tensor / 0.037).clamp(-400, 400).to(torch.float8_e4m3fn)
        stored[name], stored[name.replace("weight", ending)] = low, scale
        meant[name] = low.float() * 0.037
    return stored, meant


def embedding_elsewhere(tensors):
    return {name.replace("shared.", "encoder.embed_tokens."): tensor for name, tensor in tensors.items()}


CHANGES = {
    # tensors changed, and what is said; None: features are the same
    "a layer is missing": (without(LAST), rf"missing: {LAST}"),
    "the embedding is missing": (without("shared.weight", "encoder.embed_tokens.weight"), "missing: .*shared.weight"),
    "the last norm is missing": (without("encoder.final_layer_norm.weight"), "missing: encoder.final_layer_norm"),
    "names of another program": (
        lambda tensors: {name.replace("SelfAttention", "attn"): tensor for name, tensor in tensors.items()},
        r"missing: .*SelfAttention.*unexpected: .*layer\.0\.attn",
    ),
    "another shape": (with_one(LAST, torch.ones(3, 16)), rf"misshapen: {LAST} \[3, 16\], not \[\d+, 16\]"),
    "one too many": (with_one("encoder.block.7.extra", torch.ones(3)), r"unexpected: encoder\.block\.7\.extra"),
    "of blocks": (
        with_one(LAST.replace("weight", "scale_weight"), torch.ones(2, 2)), "scales .* in blocks, which",
    ),
    "one prefix": (prefixed("text_encoder."), None),
    "a pipeline's": (prefixed("text_encoders.umt5xxl.transformer."), None),
    "torch.compile": (prefixed("_orig_mod."), None),
    "DDP and torch.compile": (prefixed("module._orig_mod."), None),
    "FSDP": (
        lambda tensors: {name.replace("encoder.block.", "encoder._fsdp_wrapped_module.block."): tensor
                         for name, tensor in tensors.items()}, None,
    ),
    "the other name of the embedding": (embedding_elsewhere, None),
    "words in the file": (with_one("spiece_model", torch.zeros(4, dtype=torch.uint8)), None),
    "a decoder": (with_one("decoder.block.0.layer.0.SelfAttention.q.weight", torch.ones(3)), None),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_tensors_of_a_t5(change, t5, tmp_path):
    folder, tensors, expected = t5
    change, message = CHANGES[change]
    place = copied(folder, tmp_path / "theirs")
    save(change(tensors), place / "model.safetensors")
    if message is None:
        assert torch.equal(features(place), expected)
        T5TextEncoder(model=str(place)).save(tmp_path / "part")
        return
    for ask in (features, lambda model: T5TextEncoder(model=str(model)).save(tmp_path / "part")):
        with pytest.raises(UserError, match=message) as error:
            ask(place)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "part").exists(), "nothing is converted"


@pytest.mark.parametrize("ending", ["scale_weight", "weight_scale"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_eight_bits_with_scales_are_the_numbers_they_stand_for(ending, shape, t5, tmp_path):
    folder, tensors, exact = t5
    stored, meant = in_eight_bits(tensors, shape=shape, ending=ending)
    expected = copied(folder, tmp_path / "meant")
    save(meant, expected / "model.safetensors")
    place = copied(folder, tmp_path / "theirs")
    save(stored, place / "model.safetensors")
    assert torch.equal(features(place), features(expected))
    assert not torch.equal(features(place), exact), "negative control: eight bits are fewer"


TOKENIZERS = {
    # settings changed, in which file, and what is said; None: features are the same
    "no pad token": ("tokenizer_config.json", {"pad_token": None}, None),
    "padded before": ("tokenizer_config.json", {"padding_side": "left"}, None),
    "cut before": ("tokenizer_config.json", {"truncation_side": "left", "model_max_length": 2}, None),
    "padded before, by its file": (
        "tokenizer.json",
        {"padding": {"strategy": {"Fixed": 9}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
                     "pad_type_id": 0, "pad_token": "<pad>"}}, None,
    ),
    "a class of T5": ("tokenizer_config.json", {"tokenizer_class": "T5TokenizerFast", "pad_token": None}, None),
    "no end of texts": ("tokenizer.json", {"post_processor": None}, "a tokenizer that ends no text with </s>"),
}  # fmt: skip


@pytest.mark.parametrize("change", TOKENIZERS)
def test_tokenizers_that_do_not_say_all(change, t5, tmp_path):
    (folder, tensors, expected), (name, settings, message) = t5, TOKENIZERS[change]
    place = copied(folder, tmp_path / "theirs")
    save(tensors, place / "model.safetensors")
    (place / name).write_text(json.dumps(json.loads((place / name).read_text()) | settings))
    if message is None:
        assert torch.equal(features(place), expected)
        return
    for ask in (features, lambda model: T5TextEncoder(model=str(model)).save(tmp_path / "part")):
        with pytest.raises(UserError, match=message):
            ask(place)


def test_a_tokenizer_of_clip_without_its_settings_is_named(write_clip, tmp_path):
    folder = write_clip(tmp_path / "clip")
    transformers.CLIPTokenizer.from_pretrained(folder).save_pretrained(folder)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink(missing_ok=True)
    assert len(features(folder, CLIPTextEncoder))
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="a tokenizer without a pad_token: give its tokenizer_config.json too"):
        features(folder, CLIPTextEncoder)


def test_words_of_sentencepiece_alone(t5, tmp_path):
    """As slow tokenizers of T5 were saved."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    place = copied(t5[0], tmp_path / "theirs")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (place / name).unlink()
    (tmp_path / "texts").write_text("\n".join(["a red seven on the beach", "two blue digits"] * 9))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "texts"), model_prefix=str(place / "spiece"), vocab_size=24, pad_id=0, eos_id=1, unk_id=2,
        bos_id=-1, minloglevel=2,
    )  # fmt: skip
    published = PublishedText("a T5", vocabularies=("spiece.model",), padding="<pad>", ending="</s>")
    tokenizer, text = published.load_tokenizer(place), "a red digit on the beach"
    plain = sentencepiece.SentencePieceProcessor(model_file=str(place / "spiece.model"))
    assert tokenizer(text).input_ids == [*plain.encode(text), plain.eos_id()] and tokenizer.pad_token_id == 0
    (place / "spiece.model").write_bytes(b"")
    with pytest.raises(UserError, match="spiece.model is empty"):
        published.load_tokenizer(place)


CLASSES = [
    "BertTokenizer", "GPT2Tokenizer", "LlamaTokenizer", "Qwen2Tokenizer", "WhisperTokenizer", "CLIPTokenizer",
    "T5Tokenizer", "BartTokenizer", "ByT5Tokenizer",
]  # fmt: skip
"""Of `tokenizer_class`, which may be untrue."""
OF_TOKENIZERS = {
    "tokenizer_class": CLASSES, "padding_side": ["left", "right", "up"], "truncation_side": ["left", "right"],
    "pad_token": ["red", "zog", ""], "eos_token": ["zog", None], "bos_token": ["zog"], "model_max_length": [1, 10**30],
    "extra_ids": [100], "additional_special_tokens": [["seven"]], "chat_template": ["{{ 1 }}"],
    "added_tokens_decoder": [{"0": {"content": "red", "special": True}}], "add_bos_token": [True],
}  # fmt: skip
OF_NETWORKS = {
    **dict.fromkeys(
        ("num_layers", "num_hidden_layers", "d_model", "hidden_size", "vocab_size", "max_position_embeddings",
         "d_ff", "intermediate_size", "relative_attention_num_buckets", "projection_dim"), [0, -1, 10**9, "x", None],
    ),
    "eos_token_id": [None, 0, -1, [1], 10**9, "x"], "pad_token_id": [None, -5, 10**9], "architectures": [5, [], None],
    "hidden_act": ["zog", None], "quantization_config": [{"quant_method": "gptq", "bits": 4}], "auto_map": [{"a": "b"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def clip(tmp_path_factory, write_clip):
    folder = write_clip(tmp_path_factory.mktemp("clip") / "clip")
    return folder, load_file(folder / "model.safetensors"), features(folder, CLIPTextEncoder)


@hypothesis.settings(max_examples=80, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(data=st.data(), kind=st.sampled_from([T5TextEncoder, CLIPTextEncoder]))
def test_any_setting_is_used_or_named_in_little_time_and_memory(data, kind, t5, clip, tmp_path_factory):
    """What a folder says of its tokenizer never changes features in silence: it is read as what it is, or named."""
    folder, _, expected = t5 if kind is T5TextEncoder else clip
    name, file = data.draw(st.sampled_from([
        *((name, "tokenizer_config.json") for name in OF_TOKENIZERS), *((name, "config.json") for name in OF_NETWORKS),
    ]))  # fmt: skip
    value = data.draw(st.sampled_from((OF_TOKENIZERS | OF_NETWORKS)[name]))
    place = tmp_path_factory.mktemp("settings") / "theirs"
    shutil.copytree(folder, place)
    (place / file).write_text(json.dumps(json.loads((place / file).read_text()) | {name: value}))
    begun = time.process_time()
    for ask in (lambda: features(place, kind), lambda: kind(model=str(place)).save(place.parent / "part")):
        try:
            found = ask()
        except UserError as error:
            assert "\n" not in str(error)
        else:
            assert found is None or file == "config.json" or torch.equal(found, expected), (name, value)
    assert time.process_time() - begun < 10


FILES = {
    "of another name": lambda tensors, place: save(tensors, place / "umt5_xxl_fp16.safetensors"),
    "a variant": lambda tensors, place: save(tensors, place / "model.fp16.safetensors"),
    "pickled": lambda tensors, place: torch.save(tensors, place / "pytorch_model.bin"),
    "a pickled variant": lambda tensors, place: torch.save(tensors, place / "pytorch_model.fp16.bin"),
    "pickled, deeper": lambda tensors, place: torch.save({"state_dict": tensors}, place / "t5.pth"),
}


def in_shards(tensors, place, *, name, index, write):
    names, places = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = name.format(number + 1)
        write({key: tensors[key] for key in part}, place / file)
        places |= dict.fromkeys(part, file)
    (place / index).write_text(json.dumps({"metadata": {}, "weight_map": places}))


for _kind, _name, _index, _write in (
    ("shards", "model-0000{}-of-00002.safetensors", "model.safetensors.index.json", save),
    ("shards of a variant", "model.fp16-0000{}-of-00002.safetensors", "model.safetensors.index.fp16.json", save),
    ("pickled shards", "pytorch_model-0000{}-of-00002.bin", "pytorch_model.bin.index.json", torch.save),
):
    FILES[_kind] = lambda tensors, place, name=_name, index=_index, write=_write: in_shards(
        tensors, place, name=name, index=index, write=write
    )


@pytest.mark.parametrize("files", FILES)
def test_files_of_other_names(files, t5, tmp_path):
    folder, tensors, expected = t5
    place = copied(folder, tmp_path / "theirs")
    FILES[files](tensors, place)
    assert torch.equal(features(place), expected)
    T5TextEncoder(model=str(place)).save(tmp_path / "part")


def test_which_files_is_not_guessed(t5, tmp_path):
    folder, tensors, _ = t5
    place = copied(folder, tmp_path / "theirs")
    with pytest.raises(UserError, match="has no weight file with a known name; needs config.json"):
        features(place)
    for name in ("model.fp16.safetensors", "model.bf16.safetensors"):
        save(tensors, place / name)
    with pytest.raises(UserError, match=r"several variants .*model.bf16.safetensors.*: keep one"):
        features(place)
    for name in ("model.fp16.safetensors", "model.bf16.safetensors"):
        (place / name).rename(place / name.replace("model.", ""))
    with pytest.raises(UserError, match=r"there are bf16.safetensors, fp16.safetensors: keep one"):
        features(place)


def released(tensors):
    """A umT5's tensors under the names of Wan's first publication."""
    names = (
        ("shared.", "token_embedding."), ("encoder.final_layer_norm.", "norm."), ("encoder.block.", "blocks."),
        ("layer.0.layer_norm.", "norm1."), ("layer.1.layer_norm.", "norm2."),
        ("layer.0.SelfAttention.relative_attention_bias.", "pos_embedding.embedding."),
        ("layer.0.SelfAttention.", "attn."), ("layer.1.DenseReluDense.wi_0.", "ffn.gate.0."),
        ("layer.1.DenseReluDense.wi_1.", "ffn.fc1."), ("layer.1.DenseReluDense.wo.", "ffn.fc2."),
    )  # fmt: skip
    for ours, theirs in names:
        tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("encoder.embed_tokens")}


@pytest.fixture(scope="module")
def umt5(tmp_path_factory, t5):
    folder = copied(t5[0], tmp_path_factory.mktemp("umt5") / "umt5")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 3}
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    network = transformers.UMT5EncoderModel(transformers.UMT5Config(**sizes, vocab_size=vocabulary))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    network.save_pretrained(folder)
    return folder, load_file(folder / "model.safetensors"), features(folder)


def test_the_released_folder_of_wan(umt5, tmp_path):
    folder, tensors, expected = umt5
    words = copied(folder, tmp_path / "Wan" / "google" / "umt5-xxl")
    (words / "config.json").unlink()
    (tmp_path / "Wan" / "config.json").write_text('{"_class_name": "WanModel"}')
    torch.save(released(tensors), tmp_path / "Wan" / "models_t5_umt5-xxl-enc-bf16.pth")
    assert torch.equal(features(tmp_path / "Wan"), expected)
    T5TextEncoder(model=str(tmp_path / "Wan")).save(tmp_path / "part")
    broken = released(tensors)
    del broken["blocks.1.ffn.fc2.weight"]
    torch.save(broken, tmp_path / "Wan" / "models_t5_umt5-xxl-enc-bf16.pth")
    with pytest.raises(UserError, match=r"missing: encoder.block.1.layer.1.DenseReluDense.wo.weight"):
        features(tmp_path / "Wan")


@pytest.mark.parametrize("where", [".", "tokenizer", "google/umt5-xxl"])
def test_one_file_by_itself(where, umt5, tmp_path):
    folder, tensors, _ = umt5
    stored, meant = in_eight_bits(tensors)
    copied(folder, tmp_path / "meant")
    save(meant, tmp_path / "meant" / "model.safetensors")
    words = tmp_path / "comfy" / where
    words.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, words)
    file = tmp_path / "comfy" / "umt5_xxl_fp8_e4m3fn_scaled.safetensors"
    save(stored, file)
    torch.testing.assert_close(features(file), features(tmp_path / "meant"), rtol=TOLERANCE, atol=TOLERANCE)
    (words / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="has neither tokenizer.json nor spiece.model"):
        features(file)


def test_clip(write_clip, tmp_path):
    folder = write_clip(tmp_path / "clip")
    tensors, expected = load_file(folder / "model.safetensors"), features(folder, CLIPTextEncoder)
    place, last = (
        copied(folder, tmp_path / "theirs"),
        next(name for name in tensors if "layers.2.mlp.fc2.weight" in name),
    )
    for change, message in (
        (prefixed("cond_stage_model.transformer."), None),
        (with_one("visual_projection.weight", torch.ones(3, 3)), None),
        (without(last), f"missing: .*{last}"),
        (with_one(last, torch.ones(3, 3)), f"misshapen: .*{last}"),
        (with_one("more", torch.ones(3)), "unexpected: .*more"),
    ):
        save(change(tensors), place / "model.safetensors")
        if message is None:
            assert torch.equal(features(place, CLIPTextEncoder), expected)
            continue
        for ask in (features, lambda model, kind: kind(model=str(model)).save(tmp_path / "part")):
            with pytest.raises(UserError, match=message):
                ask(place, CLIPTextEncoder)


@hypothesis.settings(max_examples=25, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(seed=st.integers(0, 10**6), how=st.sampled_from(["drop", "rename", "shape", "half", "prefix", "all"]))
def test_random_damage_is_named_or_changes_nothing(seed, how, t5, tmp_path_factory):
    folder, tensors, expected = t5
    name = random.Random(seed).choice(sorted(tensors))
    changed = {
        "drop": without(name), "half": with_one(name, tensors[name].half().float()),
        "shape": with_one(name, tensors[name].flatten()[None]), "all": prefixed(f"p{seed}."),
        "rename": lambda t: {key + "x" * (key == name): value for key, value in t.items()},
        "prefix": lambda t: {f"p{seed}." * (key == name) + key: value for key, value in t.items()},
    }[how](tensors)  # fmt: skip
    place = copied(folder, tmp_path_factory.mktemp("damage") / "t5")
    save(changed, place / "model.safetensors")
    try:
        found = features(place)
    except UserError as error:
        assert name in str(error) and "\n" not in str(error)
    else:
        tolerance = 1e-2 if how == "half" else 0
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_tensor_files_say_what_they_hold(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF\x03\0\0\0")
    torch.save({"shadow_params": [torch.ones(2)], "decay": 0.9}, tmp_path / "ema.pt")
    torch.save({"step": 3, "lr": 0.1}, tmp_path / "nothing.pt")
    for name, message in (
        ("a.gguf", "is a quantised GGUF file"), ("ema.pt", r"lists of tensors without names \(shadow_params\)"),
        ("nothing.pt", "holds no named tensors, only: step, lr; they are also looked for under generator_ema"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            open_tensor_file(tmp_path / name)


NUMBERS = {
    "none": (lambda tensor: torch.full_like(tensor, torch.nan), "has numbers that are not finite"),
    "one too large": (
        lambda tensor: tensor.index_fill(0, torch.tensor(0), torch.inf),
        "has numbers that are not finite",
    ),
    "integers": (lambda tensor: tensor.to(torch.int8), r"holds torch.int8: give the original weights"),
    "flags": (lambda tensor: tensor > 0, "holds torch.bool"),
    "half": (torch.Tensor.half, None),
    "eight bits": (lambda tensor: tensor.to(torch.float8_e4m3fn), None),
}


@pytest.mark.parametrize(("change", "message"), NUMBERS.values(), ids=NUMBERS)
def test_weights_that_are_no_numbers_are_found_when_a_bundle_is_written(change, message, t5, write_clip, tmp_path):
    for folder, kind, last in (
        (t5[0], T5TextEncoder, LAST),
        (write_clip(tmp_path / "clip"), CLIPTextEncoder, "layers.2.mlp.fc2.weight"),
    ):
        place = copied(folder, tmp_path / kind.__name__)
        tensors = load_file(folder / "model.safetensors")
        name = next(each for each in tensors if each.endswith(last))
        save({**tensors, name: change(tensors[name])}, place / "model.safetensors")
        if message is None:
            kind(model=str(place)).save(tmp_path / "part")
            continue
        with pytest.raises(UserError, match=f"{name} {message}"):
            kind(model=str(place)).save(tmp_path / "part")


def of_another(folder):
    words = json.loads((folder / "tokenizer.json").read_text())
    words["model"]["vocab"] += [[f"word{number}", -3.0] for number in range(99)]
    return json.dumps(words)


WORDS = {
    "cut": (lambda folder: (folder / "tokenizer.json").read_text()[:500], "tokenizer.json is not valid JSON"),
    "empty": (lambda folder: "{}", "has no readable tokenizer"),
    "of another model": (of_another, r"has a tokenizer of \d+ tokens, and its network \d+: give its own"),
}


@pytest.mark.parametrize(("change", "message"), WORDS.values(), ids=WORDS)
def test_a_damaged_tokenizer_is_found_when_a_bundle_is_written(change, message, t5, tmp_path):
    place = tmp_path / "theirs"
    shutil.copytree(t5[0], place)
    (place / "tokenizer.json").write_text(change(place))
    with pytest.raises(UserError, match=message):
        T5TextEncoder(model=str(place)).save(tmp_path / "part")


def test_a_vocabulary_without_words_is_no_tokenizer(write_clip, tmp_path):
    place = write_clip(tmp_path / "clip")
    (place / "vocab.json").write_text("{}")
    for ask in (features, lambda model, kind: kind(model=str(model)).save(tmp_path / "part")):
        with pytest.raises(UserError, match="has no readable tokenizer .*not found in the vocabulary"):
            ask(place, CLIPTextEncoder)


def test_eight_bits_as_comfyui_marks_them(t5, tmp_path):
    folder, tensors, _ = t5
    stored, meant = in_eight_bits(tensors, ending="weight_scale")
    marks = {name.replace("weight_scale", "comfy_quant"): torch.zeros(9, dtype=torch.uint8) for name in stored}
    for place, those in (("meant", meant), ("theirs", stored | {n: t for n, t in marks.items() if "comfy" in n})):
        copied(folder, tmp_path / place)
        save(those, tmp_path / place / "model.safetensors")
    assert torch.equal(features(tmp_path / "theirs"), features(tmp_path / "meant"))
