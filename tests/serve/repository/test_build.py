"""The repository on disk, and its configuration by Triton's schema; the server's own parser is in test_triton.py."""

import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest

from megadit.infer.runtimes.load import most_videos_at_once, weights_checksum
from megadit.infer.runtimes.network_spec import Axis, NetworkSpec, TensorSpec
from megadit.models.bundle import Bundle, update_manifest
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.shared.cli import verbs
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json, write_json
from megadit.serve.contract import INPUTS, VideoRequest
from megadit.serve.repository.build import build_repository
from megadit.serve.repository.model_config import Scheduling, service_config
from megadit.serve.service_info import Limits, ServiceInfo
from tests.bundles import CONFIG, write_tiny_bundle

text_format = pytest.importorskip("google.protobuf.text_format")
ModelConfig = pytest.importorskip("tritonclient.grpc.model_config_pb2").ModelConfig

# What model_config.proto of Triton 22.12 (2.29) knew of the messages used here; newer ones only added to it.
FIELDS_OF_2022 = {
    "ModelConfig": {"name", "backend", "max_batch_size", "input", "output", "dynamic_batching", "instance_group"}
    | {"parameters", "model_warmup", "model_transaction_policy"},
    "ModelInput": {"name", "data_type", "dims", "optional", "allow_ragged_batch"},
    "ModelOutput": {"name", "data_type", "dims"},
    "ModelDynamicBatching": {"max_queue_delay_microseconds", "priority_levels", "default_priority_level"}
    | {"default_queue_policy"},
    "ModelQueuePolicy": {"timeout_action", "default_timeout_microseconds", "allow_timeout_override", "max_queue_size"},
    "ModelInstanceGroup": {"count", "kind", "gpus"},
    "ModelWarmup": {"name", "batch_size", "inputs"},
    "InputsEntry": {"key", "value"},
    "Input": {"data_type", "dims", "zero_data"},
    "ParametersEntry": {"key", "value"},
    "ModelParameter": {"string_value"},
    "ModelTransactionPolicy": {"decoupled"},
}


def parse(text: str):
    return text_format.Parse(text, ModelConfig())


def used_fields(message, found: dict[str, set[str]]) -> dict[str, set[str]]:
    """Message type -> its fields that are set, in this message and those inside."""
    for descriptor, value in message.ListFields():
        found.setdefault(message.DESCRIPTOR.name, set()).add(descriptor.name)
        if descriptor.message_type is None:
            continue
        if descriptor.message_type.GetOptions().map_entry:
            found.setdefault(descriptor.message_type.name, set()).update({"key", "value"})
            values = value.values()
        else:
            values = value if hasattr(value, "__len__") else [value]
        for each in values:
            used_fields(each, found)
    return found


def test_configuration_says_what_the_contract_says(repository, bundle_dir):
    config = parse((repository / "text_to_video" / "config.pbtxt").read_text())
    assert [each.name for each in config.input] == [each.name for each in INPUTS]
    assert [each.name for each in config.input if not each.optional] == ["prompt"]
    assert config.model_transaction_policy.decoupled
    assert config.dynamic_batching.default_queue_policy.max_queue_size == 48
    info = ServiceInfo.from_json(config.parameters["service"].string_value)
    assert SamplingSettings.from_dict(info.defaults) == Bundle.open(bundle_dir).defaults
    assert info.size_multiple == 4


def test_students_are_models_of_their_own(bundle_dir, tmp_path, capsys):
    """Named by their calls, and told of by their teacher; what is no student is refused."""

    def student(name, **settings):
        shutil.copytree(bundle_dir, tmp_path / name)
        asked = {"sampler": "consistency", "guidance": 1.0} | settings
        update_manifest(tmp_path / name, defaults=replace(Bundle.open(bundle_dir).defaults, **asked).to_dict())
        return str(tmp_path / name)

    two, one = student("two", num_steps=2, sigmas=(20.0, 2.0)), student("one", num_steps=1, sigmas=(20.0,))
    command, out = ["serve", "build-repository", str(bundle_dir), str(tmp_path / "models")], tmp_path / "models"
    assert verbs.main([*command, "--student", two, "--student", one]) == 0
    models = {path.parent.name: parse(path.read_text()) for path in out.glob("*/config.pbtxt")}
    infos = {name: ServiceInfo.from_json(each.parameters["service"].string_value) for name, each in models.items()}
    names = ("text_to_video_2_calls", "text_to_video_1_call")
    assert infos.keys() == {"text_to_video", *names} and infos["text_to_video"].students == names
    assert infos["text_to_video_1_call"].defaults["sigmas"] == [20.0] and infos["text_to_video_1_call"].students == ()
    assert Bundle.open(out / "text_to_video_2_calls" / "1" / "bundle").defaults.sigmas == (20.0, 2.0)
    guided = student("guided", num_steps=3, sigmas=(20.0, 2.0, 0.5), guidance=4.0)
    for more, says in (
        ([guided], "its defaults have guidance"),
        ([two, two], f"--student {two} takes as many calls as {two}: serve one of them"),
        ([str(bundle_dir)], "is not a student: its defaults have guidance, or no sigmas of their own"),
    ):
        assert verbs.main([*command, *(word for path in more for word in ("--student", path))]) == 2
        assert says in capsys.readouterr().err


def test_a_student_that_is_told_the_scale_is_one_at_any_scale(bundle_dir, tmp_path):
    """And clients know which scales it knows."""
    few = replace(
        Bundle.open(bundle_dir).defaults, sampler="consistency", num_steps=2, sigmas=(20.0, 2.0), guidance=4.0
    )
    write_tiny_bundle(tmp_path / "told", replace(CONFIG, guidance_embedding_range=(1.5, 6.0)), defaults=few)
    out = build_repository(bundle_dir, tmp_path / "models", students=[tmp_path / "told"])
    infos = {}
    for path in out.glob("*/config.pbtxt"):
        service = parse(path.read_text()).parameters["service"].string_value
        infos[path.parent.name] = ServiceInfo.from_json(service)
    told = infos["text_to_video_2_calls"]
    assert told.guidance_embedding_range == (1.5, 6.0) and infos["text_to_video"].guidance_embedding_range == ()
    for name, info in infos.items():
        info.check_guidance(info.filled(VideoRequest(prompt="a")))
        asked = info.filled(VideoRequest(prompt="a", guidance=7.0))
        with pytest.raises(UserError, match="1.5 to 6") if name == "text_to_video_2_calls" else nullcontext():
            info.check_guidance(asked)


def test_the_page_begins_with_what_the_bundle_was_validated_with(bundle_dir, tmp_path):
    shutil.copytree(bundle_dir, tmp_path / "bundle")
    update_manifest(tmp_path / "bundle", training={"prompts": ["a cat jumps", 7, "a dog"]})
    build_repository(tmp_path / "bundle", tmp_path / "models")
    config = parse((tmp_path / "models" / "text_to_video" / "config.pbtxt").read_text())
    assert ServiceInfo.from_json(config.parameters["service"].string_value).examples == ("a cat jumps", "a dog")


def test_every_scheduling_field_reaches_the_configuration():
    info = ServiceInfo(defaults={}, limits=Limits(max_frames=1, max_pixels=1, max_work=1), samplers=(), size_multiple=1)
    changed = {
        "max_batch_size": 3,
        "max_queue_size": 5,
        "queue_seconds": 7.0,
        "batching_seconds": 0.5,
        "instances": 2,
        "device": "0,3",
        "ranks": 4,
        "tp_size": 2,
        "cp_size": 2,
    }
    on_gpus = Scheduling(device="0,1,2,3,4,5,6,7", ranks=8)
    plain = service_config("m", info, on_gpus, dtype="float32")
    assert set(changed) == set(Scheduling.__dataclass_fields__)
    for name, value in changed.items():
        ranks = {"ranks": 1} if name == "device" else {}
        config = service_config("m", info, replace(on_gpus, **{name: value}, **ranks), dtype="float32")
        assert parse(config) != parse(plain), name
    for scheduling, gpus in ((Scheduling(device="0,3"), [0, 3]), (replace(on_gpus, ranks=4), [0, 4])):
        config = parse(service_config("m", info, scheduling, dtype="float32"))
        assert list(config.instance_group[0].gpus) == gpus, "those of the first ranks"


def test_an_old_triton_knows_every_field(repository):
    config = parse((repository / "text_to_video" / "config.pbtxt").read_text())
    for message, names in used_fields(config, {}).items():
        assert names <= FIELDS_OF_2022[message], message


def test_texts_survive_the_configuration():
    info = ServiceInfo(
        defaults={},
        limits=Limits(max_frames=1, max_pixels=1, max_work=1),
        samplers=(),
        size_multiple=1,
        examples=('a "quoted" \\ back\\slash', "ä \N{SNOWMAN} \n new line"),
    )
    config = parse(service_config("m", info, Scheduling(), dtype="float32"))
    assert ServiceInfo.from_json(config.parameters["service"].string_value) == info


def test_the_repository_holds_the_bundle_for_both_models(repository, bundle_dir):
    for model in ("text_to_video", "text_to_image"):
        assert (
            Bundle.open(repository / model / "1" / "bundle", verify=True).manifest == Bundle.open(bundle_dir).manifest
        )
    weights = "1/bundle/transformer/model.safetensors"
    assert (repository / "text_to_video" / weights).samefile(repository / "text_to_image" / weights)
    assert not (repository / "text_to_video" / weights).samefile(bundle_dir / "transformer/model.safetensors")


def test_the_command_builds_and_replaces(bundle_dir, tmp_path, capsys):
    out = tmp_path / "repository"
    for _ in range(2):
        command = ["serve", "build-repository", str(bundle_dir), str(out), "--max-videos", "2", "--device", "cpu"]
        assert verbs.main(command) == 0
    assert "serve run" in capsys.readouterr().out
    config = parse((out / "text_to_video" / "config.pbtxt").read_text())
    assert ServiceInfo.from_json(config.parameters["service"].string_value).limits.max_videos == 2
    assert [folder.name for folder in tmp_path.iterdir()] == ["repository"]


CHANGES = ("num_steps=3", "guidance=5", "sampler=EDM", "negative_prompt=a=b", "guidance_interval=0.1,5", "fps=4")


def test_defaults_are_changed_by_the_rules_of_a_request(bundle_dir, tmp_path, capsys):
    """In what clients are told, in the bundle beside it, and in both models; the bundle itself stays as it was."""
    before = (bundle_dir / "megadit.json").read_bytes()
    build = ["serve", "build-repository", str(bundle_dir)]
    flags = [word for change in CHANGES for word in ("--default", change)]
    assert verbs.main([*build, str(tmp_path / "models"), "--images", *flags]) == 0
    expected = replace(
        Bundle.open(bundle_dir).defaults,
        **{"num_steps": 3, "guidance": 5.0, "sampler": "heun", "negative_prompt": "a=b", "fps": 4.0},
        guidance_interval=(0.1, 5.0),
    )
    for model in ("text_to_video", "text_to_image"):
        version = tmp_path / "models" / model / "1"
        assert Bundle.open(version / "bundle", verify=True).defaults == expected
        told = parse((version.parent / "config.pbtxt").read_text()).parameters["service"].string_value
        defaults = ServiceInfo.from_json(told).defaults
        assert (defaults["num_steps"], defaults["guidance"], defaults["sampler"]) == (3, 5.0, "heun")
    assert (bundle_dir / "megadit.json").read_bytes() == before
    for change, told in (
        ("num_steps", "must be NAME=VALUE"),
        ("num_stps=3", "did you mean 'num_steps'?"),
        ("num_steps=0", "num_steps=0 must be greater than 0"),
        ("num_steps=many", "'many' is no int"),
        ("sampler=eular", "did you mean 'euler'?"),
        ("height=17", "height=17 is not a multiple of 4"),
        ("sigma_max=0.001", "must be smaller than"),
    ):
        assert verbs.main([*build, str(tmp_path / "other"), "--default", change]) == 2
        assert told in capsys.readouterr().err and not (tmp_path / "other").exists(), change


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--dtype", "float12"], "float12"),
        (["--device", "tpu"], "tpu"),
        (["--runtime", "onxx"], "'onnx'"),
        (["--runtime", "onnx"], "megadit export"),
        (["--instances", "0"], "instances=0"),
        (["--queue_seconds", "nan"], "queue_seconds=nan"),
        (["--max_videos", "0"], "max_videos=0"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(bundle_dir, tmp_path, capsys, arguments, told):
    assert verbs.main(["serve", "build-repository", str(bundle_dir), str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_other_files_are_not_replaced(bundle_dir, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="choose another"):
        build_repository(bundle_dir, tmp_path)
    assert (tmp_path / "thesis.txt").exists()


@pytest.fixture
def exported(bundle_dir, tmp_path):
    """A bundle with the settings of an export, and empty files for its graphs."""
    path = tmp_path / "exported"
    shutil.copytree(bundle_dir, path)
    side = [Axis(name=name, min=1, opt=2, max=8) for name in ("batch", "time", "height", "width")]
    latents = TensorSpec(name="x", dtype="float32", axes=(side[0], 48, *side[1:]))
    lengths = TensorSpec(name="text_length", dtype="int64", axes=(side[0],))
    networks = {
        "denoiser": NetworkSpec(name="denoiser", inputs=(latents, lengths), output="x0"),
        "video_decoder": NetworkSpec(name="video_decoder", inputs=(latents,), output="video"),
    }
    (path / "onnx").mkdir()
    for name in ("denoiser.onnx", "denoiser.onnx.data", "video_decoder.onnx"):
        (path / "onnx" / name).write_text(name)
    settings = {"format_version": 1, "source": weights_checksum(Bundle.open(path))}
    write_json(
        path / "onnx" / "settings.json",
        settings | {"networks": {name: spec.to_dict() for name, spec in networks.items()}},
    )
    return path


def test_exported_networks_become_plain_models(exported, tmp_path):
    out = build_repository(exported, tmp_path / "repository", runtime="onnx", with_networks=True)
    config = parse((out / "denoiser" / "config.pbtxt").read_text())
    assert (config.platform, config.default_model_filename) == ("onnxruntime_onnx", "denoiser.onnx")
    assert [list(each.dims) for each in config.input] == [[-1, 48, -1, -1, -1], [-1]]
    assert [list(each.dims) for each in config.output] == [[-1, 48, -1, -1, -1]]
    assert sorted(file.name for file in (out / "denoiser" / "1").iterdir()) == ["denoiser.onnx", "denoiser.onnx.data"]
    assert list(parse((out / "video_decoder" / "config.pbtxt").read_text()).output[0].dims)[1] == 3
    service = parse((out / "text_to_video" / "config.pbtxt").read_text())
    assert service.parameters["runtime"].string_value == "onnx"


@pytest.mark.parametrize(("precision", "told"), [("fp32", ""), ("int8", "CPUs with VNNI"), ("bf16", "no CPU opens it")])
def test_where_tritons_own_backend_runs_a_network_is_said(exported, tmp_path, capsys, precision, told):
    settings = read_json(exported / "onnx" / "settings.json") | {"precision": precision, "opset": 20}
    write_json(exported / "onnx" / "settings.json", settings)
    out = build_repository(exported, tmp_path / "repository", runtime="onnx", with_networks=True)
    said = capsys.readouterr().err
    assert told in said and ("opset 20" in said) == bool(told)
    kinds = [[group.kind for group in parse((out / name / "config.pbtxt").read_text()).instance_group]
             for name in ("denoiser", "video_decoder")]  # fmt: skip
    assert (kinds[0] != []) == (precision == "bf16") and kinds[1] == []


def test_an_export_bounds_the_batch(exported):
    assert most_videos_at_once(Bundle.open(exported), "onnx") == 4, "guidance takes two places for each video"
    assert most_videos_at_once(Bundle.open(exported), "torch") is None
    told = Bundle.open(exported)
    told = replace(told, config=replace(told.config, guidance_embedding_range=(1.0, 6.0)))
    assert most_videos_at_once(told, "onnx") == 8, "a network that is told the scale gives each video one answer"


def test_networks_need_an_export(bundle_dir, tmp_path):
    with pytest.raises(UserError, match="onnx or tensorrt"):
        build_repository(bundle_dir, tmp_path / "repository", with_networks=True)
    assert not (tmp_path / "repository").exists()
