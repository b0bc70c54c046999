"""`megadit doctor` reports, whatever is missing."""

import re
from importlib import metadata

import pytest

from megadit.infer.inspect import doctor


def test_report_names_every_library_and_exits_with_0(capsys):
    assert doctor.main([]) == 0
    shown = capsys.readouterr().out
    for name, *_ in doctor.LIBRARIES:
        assert name in shown
    assert "CPU cores" in shown


def test_a_missing_library_is_reported_with_its_remedy(monkeypatch):
    row = ("no-such-library", "no_such_library", "nothing", "pip install it")
    monkeypatch.setattr(doctor, "LIBRARIES", (row, ("torch", "torch", "everything", "")))
    missing, present = doctor.library_findings()
    assert missing.found is None
    assert missing.remedy == "pip install it"
    assert present.found


@pytest.mark.parametrize(("tested", "told"), [(("0.1", "0.2"), "{}; tested are 0.1 and 0.2"), (("0.1", None), "{}")])
def test_a_version_that_no_test_ran_is_told(monkeypatch, tested, told):
    installed = metadata.version("torch")
    monkeypatch.setattr(doctor, "TESTED", {"torch": tuple(version or installed for version in tested)})
    monkeypatch.setattr(doctor, "LIBRARIES", (("torch", "torch", "everything", ""),))
    (finding,) = doctor.library_findings()
    assert finding.found == told.format(installed)


@pytest.mark.parametrize(
    ("on_path", "packaged", "told"),
    [
        ("/opt/tritonserver", "0.7.0", "/opt/tritonserver"),
        (None, "0.7.0", "that of nvidia-pytriton 0.7.0"),
        (None,) * 3,
    ],
)
def test_either_tritonserver_is_found(monkeypatch, on_path, packaged, told):
    monkeypatch.setattr(doctor.shutil, "which", {"tritonserver": on_path}.get)
    monkeypatch.setattr(doctor, "_library", lambda *names: {("nvidia-pytriton", "pytriton"): packaged}[names])
    found = {finding.name: finding.found for finding in doctor.program_findings()}
    assert found["tritonserver"] == told


def test_remedies_keep_their_square_brackets(monkeypatch, capsys):
    row = ("no-such-library", "no_such_library", "nothing", "pip install 'megadit[te]'")
    monkeypatch.setattr(doctor, "LIBRARIES", (row,))
    doctor.main([])
    assert "megadit[te]" in capsys.readouterr().out


def test_a_broken_library_does_not_stop_the_report(monkeypatch):
    def broken(name: str):
        raise OSError("libcudart.so: cannot open shared object file")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    (torch_finding,) = doctor.accelerator_findings()
    assert torch_finding.found is None


def test_memory_is_between_nothing_and_a_pebibyte():
    total, available = doctor._memory()
    assert 0 < available <= total < 2**50


def test_help_is_not_a_report(capsys):
    with pytest.raises(SystemExit) as stop:
        doctor.main(["--help"])
    assert stop.value.code == 0
    assert "megadit doctor" in capsys.readouterr().out


def test_a_name_that_leads_to_loopback_is_told(monkeypatch):
    """Ranks of other nodes cannot reach what listens there."""
    monkeypatch.setattr(doctor.platform, "node", lambda: "node7")
    for address, told in (("10.0.0.7", "node7 is 10.0.0.7$"), ("127.0.1.1", "node7 is 127.0.1.1, loopback: ")):
        monkeypatch.setattr(doctor.socket, "gethostbyname", lambda name, address=address: address)
        assert re.match(told, doctor.own_address())

    def unknown(name):
        raise OSError

    monkeypatch.setattr(doctor.socket, "gethostbyname", unknown)
    assert "has no address" in doctor.own_address()
