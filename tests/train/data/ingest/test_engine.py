"""A preparation as tasks of Ray leaves what one process leaves."""

import os
import sys
from types import SimpleNamespace

import pytest

from megadit.models.shared.errors import UserError
from megadit.train.data.ingest.engine import share, start_ray
from megadit.train.data.prepare import command as prepare

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
    many = ["--engine", "ray", "--stages", "fetch", "--num_workers", "5"]  # no node has five cores
    assert prepare.main(["videos", str(videos), str(tmp_path / "many"), *OPTIONS, *many]) == 0
    assert "fetch: 1 tasks of Ray" in capsys.readouterr().out


def test_workers_of_ray_do_not_import_from_the_current_folder(monkeypatch):
    """They would before anything else: it may be somebody else's data, and hold a module of the name `pyarrow`."""
    seen, before = [], os.getcwd()
    ray = SimpleNamespace(is_initialized=lambda: False, init=lambda **_: seen.append(os.getcwd()))
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert start_ray() is ray and seen == ["/"] and os.getcwd() == before


@pytest.mark.parametrize("engine", ["none", "ray"])
@pytest.mark.parametrize(
    ("source", "mistake", "told"),
    [
        ("clips", ("--sizes", "50x50"), "a multiple of 8"),
        ("clips", ("--shard", "1/2"), "--shard"),
        ("nowhere", (), "nowhere does not exist"),
        ("out/clips", (), "give another OUT"),
    ],
)
def test_a_data_set_stays_where_nothing_can_take_its_place(
    source, mistake, told, engine, tmp_path, capsys, monkeypatch
):
    begun = tmp_path / "out/prepare/settings.json"
    for folder in (begun.parent, tmp_path / "clips", tmp_path / "out/clips"):
        folder.mkdir(parents=True)
    begun.write_text("{}")
    command = ["videos", str(tmp_path / source), str(tmp_path / "out"), *OPTIONS, "--engine", engine, "--overwrite"]
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    assert prepare.main([*command, *mistake]) == 2 and told in capsys.readouterr().err
    assert begun.read_text() == "{}"


def test_a_data_set_stays_without_ray(tmp_path, capsys, monkeypatch):
    begun = tmp_path / "out/prepare/settings.json"
    begun.parent.mkdir(parents=True)
    begun.write_text("{}")
    monkeypatch.setitem(sys.modules, "ray", None)
    command = ["videos", str(tmp_path), str(tmp_path / "out"), *OPTIONS, "--engine", "ray", "--overwrite"]
    assert prepare.main(command) == 2 and "megadit[ray]" in capsys.readouterr().err and begun.is_file()


@pytest.mark.parametrize(
    ("nodes", "wanted", "found"),
    [
        ([{"CPU": 4}, {"CPU": 8}], 4, (4, 0, 3)),
        ([{"CPU": 4}, {"CPU": 8}], 0, (1, 0, 12)),
        ([{"CPU": 4}, {"CPU": 8}], 16, (8, 0, 1)),
        ([{"CPU": 64}, {"CPU": 8, "GPU": 2}], 16, (8, 1, 1)),
        ([{"CPU": 64}, {"CPU": 8, "GPU": 2}], 1, (1, 1, 2)),
    ],
)
def test_a_task_asks_for_what_a_node_has(nodes, wanted, found):
    assert share(nodes, wanted) == found


@pytest.mark.parametrize("nodes", [[], [{"GPU": 8}], [{"CPU": 8}, {"GPU": 8}]])
def test_nodes_without_a_core_are_refused(nodes):
    with pytest.raises(UserError, match="no node of the cluster"):
        share(nodes, 1)


def test_mistakes_are_told(tmp_path, capsys, monkeypatch):
    command = ["videos", str(tmp_path), str(tmp_path / "out"), *OPTIONS]
    assert prepare.main([*command, "--engine", "rey"]) == 2
    assert "did you mean 'ray'" in capsys.readouterr().err
    assert prepare.main([*command, "--engine", "ray", "--shard", "0/2"]) == 2
    assert "leave out --shard" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ray", None)
    assert prepare.main([*command, "--engine", "ray"]) == 2
    assert "pip install 'megadit[ray]'" in capsys.readouterr().err
