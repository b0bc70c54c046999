"""A preparation as tasks of Ray leaves what one process leaves."""

import sys

import pytest

from megadit.train.data import prepare

OPTIONS = ("--sizes", "64x64", "--num_frames", "9", "--num_workers", "0", "--channels", "16")


@pytest.fixture(scope="module")
def ray():
    """Two workers on this machine."""
    module = pytest.importorskip("ray")
    module.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
    yield module
    module.shutdown()


def bytes_of(out) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("*.tar")} | {"report": (out / "report.json").read_bytes()}


@pytest.mark.slow
def test_tasks_of_ray_leave_the_same_bytes(ray, videos, tmp_path, capsys):
    plain, tasks = tmp_path / "plain", tmp_path / "tasks"
    assert prepare.main(["videos", str(videos), str(plain), *OPTIONS]) == 0
    for attempt in range(2):  # the second begins anew
        assert prepare.main(["videos", str(videos), str(tasks), *OPTIONS, "--engine", "ray", "--overwrite"]) == 0, (
            attempt
        )
    assert "encode: 2 tasks of Ray" in capsys.readouterr().out
    assert bytes_of(tasks) == bytes_of(plain) and len(bytes_of(plain)) > 1
    more = ["--engine", "ray", "--engine_tasks", "3", "--stages", "fetch,scan,select"]
    assert prepare.main(["videos", str(videos), str(tmp_path / "three"), *OPTIONS, *more]) == 0
    assert "scan: 3 tasks of Ray" in capsys.readouterr().out
    wrong = ["videos", str(tmp_path / "nowhere"), str(tmp_path / "wrong"), *OPTIONS, "--engine", "ray"]
    assert prepare.main(wrong) == 2
    assert "nowhere" in capsys.readouterr().err


def test_mistakes_are_told(tmp_path, capsys, monkeypatch):
    command = ["videos", str(tmp_path), str(tmp_path / "out"), *OPTIONS]
    assert prepare.main([*command, "--engine", "rey"]) == 2
    assert "did you mean 'ray'" in capsys.readouterr().err
    assert prepare.main([*command, "--engine", "ray", "--part", "0/2"]) == 2
    assert "leave out --part" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ray", None)
    assert prepare.main([*command, "--engine", "ray"]) == 2
    assert "pip install 'megadit[ray]'" in capsys.readouterr().err
