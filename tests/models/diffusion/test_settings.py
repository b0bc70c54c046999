"""Sampling settings: what follows from one declaration, and the rules between settings."""

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from megadit.infer.sampling.samplers import SAMPLERS as SAMPLER_FUNCTIONS
from megadit.infer.sampling.schedules import FLOW_LEVELS
from megadit.infer.sampling.schedules import SCHEDULES as SCHEDULE_FUNCTIONS
from megadit.models.diffusion import settings
from megadit.models.diffusion.settings import (
    OF_ADAPTERS,
    SAMPLERS,
    SCHEDULES,
    SERVED,
    PartialSettings,
    SamplingSettings,
    check_asked,
    resolve,
    switched_off,
)
from megadit.models.shared.cli.setting import settings_of
from megadit.models.shared.errors import UserError

DEFAULTS = SamplingSettings(num_steps=4, guidance=3.0, num_frames=3, height=8, width=8, fps=8.0)


def test_the_names_are_those_of_the_functions():
    assert tuple(SAMPLERS) == tuple(SAMPLER_FUNCTIONS) and set(SCHEDULES) == {*SCHEDULE_FUNCTIONS, *FLOW_LEVELS}


def test_every_setting_says_what_it_means():
    known = settings_of(SamplingSettings)
    assert list(known) == [field.name for field in fields(SamplingSettings)] == list(settings_of(PartialSettings))
    assert all(about.help for about in known.values())
    assert all(about.count is None and about.type in (str, int, float) for about in SERVED.values()), "single values"


REFUSED = {
    "sampler": ("nonsense", "../euler", 3),
    "num_steps": (0, 1001, 10**9, 2.5, "4"),
    "guidance": (-1, 1e6, float("nan"), float("inf"), 10**400),
    "sigmas": ([0.5] * 1001, [1e30], [-1.0], ["9"], 5, "9"),
    "shift": (1e308, 0, "auto", "auto_video", -1.0),
    "noise_scale": (1e38, 0, 1e-9, True),
    "eta": (1.5, -0.1, None),
}
"""What no adapter may ask for of the settings that it may ask for."""


@pytest.mark.parametrize("name", [*settings_of(SamplingSettings), "no_setting"])
def test_an_adapter_asks_for_few_settings_in_bounds_and_never_for_a_path_or_text(name):
    assert {each: about.type for each, about in OF_ADAPTERS.items() if about.type is str} == {"sampler": str}
    if name in OF_ADAPTERS:
        values = REFUSED[name]
        assert check_asked({name: getattr(DEFAULTS, name)}, "x: ")[name] == getattr(DEFAULTS, name)
    else:
        values = ("/etc/shadow", "a", 7, 0.3, [1.0, 2.0], True, None, {}, 10**400)
    for value in values:
        with pytest.raises(UserError, match=f"x: .*{name}"):
            check_asked({"eta": 0.5, name: value} if name != "eta" else {name: value}, "x: ")


def test_an_adapter_may_switch_off_what_its_base_has():
    off = {"negative_prompt": "", "autoguidance": "", "guidance_interval": [], "churn": 0, "cache_budget": 0.0}
    assert resolve(replace(DEFAULTS, churn=4.0, sampler="euler"), **check_asked(off, "")).churn == 0


def test_an_old_bundle_lacks_settings_that_were_added_since():
    old = {name: value for name, value in DEFAULTS.to_dict().items() if name not in ("eta", "cache_budget")}
    assert SamplingSettings.from_dict(json.loads(json.dumps(old))) == DEFAULTS


@pytest.mark.parametrize(
    ("given", "off"),
    [
        ({}, {}),
        ({"sampler": "Heun"}, {}),
        ({"sampler": "EDM"}, {}),
        ({"sampler": "unipc"}, {"churn": 0.0, "eta": 0.0}),
        ({"num_steps": 4, "schedule": "karras"}, {}),
        ({"rho": 3.0}, {"sigmas": ()}),
        ({"num_steps": 9, "sampler": "res"}, {"churn": 0.0, "eta": 0.0, "sigmas": ()}),
    ],
)
def test_what_is_given_switches_off_defaults_that_it_makes_meaningless(given, off):
    noisy = replace(DEFAULTS, sampler="euler", eta=1.0)
    assert switched_off(noisy.to_dict(), given) == off
    assert resolve(noisy, **given).eta == off.get("eta", 1.0)
    assert resolve(replace(noisy, noise_scale=0.6), **given).noise_scale == 0.6, "which suits every sampler"


def test_a_service_says_which_of_its_samplers_add_noise():
    defaults = {"sampler": "euler", "eta": 1.0}
    assert switched_off(defaults, {"sampler": "newer"}, ("euler", "newer")) == {}
    assert switched_off(defaults, {"sampler": "euler"}, ()) == {}, "an old service that does not tell"


def test_a_shift_that_suits_no_resolution_is_refused():
    with pytest.raises(UserError, match="shift=auto must be a number here"):
        replace(DEFAULTS, shift="auto")


# ------------------------------------------------------------------------------------- one line adds a setting


PAGE = Path(settings.__file__).parents[2] / "docs" / "extend.md"
ADDED = PAGE.read_text(encoding="utf-8").split("```python setting\n")[1].split("```")[0]
SHOW = """
import importlib.abc, importlib.util, json, sys
from contextlib import suppress

class Changed(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    def find_spec(self, name, path, target=None):
        if name == "megadit.models.diffusion.settings":
            return importlib.util.spec_from_file_location(name, sys.argv[1], loader=self)
    def get_filename(self, name):
        return sys.argv[1]
    def get_data(self, path):
        return open(path, "rb").read()

sys.meta_path.insert(0, Changed())
import megadit.models.diffusion.settings, megadit.serve.contract, megadit.serve.ask
import megadit.serve.gateway.http.schemas, megadit.serve.gateway.store.store
print("torch" in sys.modules, end="@@@")
from pathlib import Path
from unittest.mock import MagicMock
from megadit.infer.generate.specs import video_grid
from megadit.infer.generate.options import parse
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.shared.cli import verbs
from megadit.serve.contract import VideoRequest
from megadit.serve.service_info import Limits, ServiceInfo
from megadit.serve.gateway.http.app import create_app
from megadit.serve.repository.model_config import Scheduling, service_config

for verb in ("generate", "serve ask"):
    with suppress(SystemExit):
        verbs.main([*verb.split(), "--help"])
    print("@@@")
defaults = SamplingSettings(num_steps=4, guidance=3.0, num_frames=3, height=8, width=8, fps=8.0)
lines = Path(sys.argv[1]).with_name("prompts.jsonl")
options = parse(["--checkpoint_path", "x", "--prompt_file", str(lines), "--swirl", "1"])
print(json.dumps([spec.settings.swirl for spec in video_grid(options, defaults).specs]), end="@@@")
limits = Limits(max_frames=9, max_pixels=99, max_work=999)
info = ServiceInfo(defaults=defaults.to_dict(), limits=limits, samplers=("euler",), size_multiple=8)
print(service_config("text_to_video", info, Scheduling(), dtype="float32"), end="@@@")
print(json.dumps(create_app(MagicMock()).openapi()), end="@@@")
print(json.dumps(VideoRequest(prompt="a").filled(info.defaults).to_inputs(), default=bytes.decode))
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What SHOW prints with the setting of docs/extend.md."""
    folder, source = tmp_path_factory.mktemp("setting"), Path(settings.__file__).read_text()
    before, after = source.split("    guidance_interval: tuple")
    (folder / "settings.py").write_text(f"{before}{ADDED}    guidance_interval: tuple{after}")
    lines = [{"prompt": "a", "swirl": 2}, {"prompt": "b"}]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = [sys.executable, "-c", SHOW, str(folder / "settings.py")]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout.split("@@@")


def test_settings_and_what_asks_for_them_bring_no_torch(shown):
    assert shown[0] == "False"


def test_one_line_adds_a_setting_everywhere(shown):
    """In the options of two commands, the keys of prompt files, Triton's inputs and the gateway's schema."""
    _, generate, ask, jsonl, triton, openapi, request = shown
    for help in (generate, ask):
        assert "--swirl NUMBER" in help and "how much the video turns" in help
    assert json.loads(jsonl) == [2, 1]
    assert '{ name: "swirl" data_type: TYPE_FP32 dims: [ 1 ] optional: true }' in triton
    body = json.loads(openapi)["components"]["schemas"]["CreateVideo"]
    number = {"maximum": 2, "minimum": 0, "type": "number"}
    swirl = {"anyOf": [number, {"type": "null"}], "default": None, "description": "how much the video turns"}
    assert body["properties"]["swirl"].items() <= (swirl | {"title": "Swirl"}).items()
    assert json.loads(request)["swirl"] == 0.5
