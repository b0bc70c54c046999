"""`megadit bundle --average`: means of the weights of bundles of one network."""

from dataclasses import replace

import torch

from megadit.models.bundle import Bundle
from megadit.models.storage.components import load_network
from megadit.models.storage.license import License
from megadit.models.text_encoders import HashedWordEncoder
from megadit.train.checkpoints.to_bundle import main
from tests.bundles import CONFIG, write_pair_bundle, write_tiny_bundle


def weights(path, network="transformer"):
    return load_network(path / network).state_dict()


def test_it_is_the_mean_of_the_weights(tmp_path, capsys):
    base, one, two = (write_tiny_bundle(tmp_path / name, seed=seed).path for seed, name in enumerate("abc"))
    out = tmp_path / "out"
    assert main([str(one), str(out), "--average", f"{base}:0.5", "--average", str(two)]) == 0
    found, parts = weights(out), [(1, weights(one)), (0.5, weights(base)), (1, weights(two))]
    for name, tensor in found.items():
        expected = sum(weight * part[name].double() for weight, part in parts) / 2.5
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-6)
        assert tensor.dtype == parts[0][1][name].dtype
        assert not torch.allclose(tensor, parts[0][1][name], atol=1e-3), "it differs from each"
    bundle = Bundle.open(out)
    assert (bundle.config, bundle.defaults) == (CONFIG, Bundle.open(one).defaults)
    assert [each["weight"] for each in bundle.manifest["training"]["averaged_with"]] == [0.5, 1.0]
    assert f"{out}: {one} with {base}:0.5, {two}" in capsys.readouterr().out


def test_both_networks_of_a_pair_are_averaged(tmp_path):
    source = write_tiny_bundle(tmp_path / "source").path
    for name in ("one", "two"):
        write_pair_bundle(source, tmp_path / name)
    assert main([str(tmp_path / "one"), str(tmp_path / "out"), "--average", f"{tmp_path / 'two'}:3"]) == 0
    for network in Bundle.open(tmp_path / "out").networks:
        for name, tensor in weights(tmp_path / "one", network).items():
            torch.testing.assert_close(weights(tmp_path / "out", network)[name], tensor)
    assert Bundle.open(tmp_path / "out").boundary == Bundle.open(tmp_path / "one").boundary


def test_what_has_not_one_origin_is_refused(tmp_path, capsys):
    one, two = (write_tiny_bundle(tmp_path / name, seed=seed).path for seed, name in enumerate("ab"))
    other = write_tiny_bundle(tmp_path / "other", config=replace(CONFIG, num_layers=1))
    texts = HashedWordEncoder(dim=CONFIG.crossattn_emb_size, max_length=7)
    shorter = write_tiny_bundle(tmp_path / "shorter", text_encoder=texts)
    free, bound = (
        write_tiny_bundle(tmp_path / name, license=License(name=name)).path for name in ("apache-2.0", "openmdw-1.0")
    )
    for argv, said in (
        ([free, tmp_path / "out", "--average", bound], "its license is not that of"),
        ([one, tmp_path / "out", "--average", two, "--average", f"{two}:2"], "one bundle is given twice"),
        ([one, tmp_path / "out", "--average", two, "--ema", "none"], "leave out --ema"),
        ([one, tmp_path / "out", "--average", two, "--merge", two], "only one of the two"),
        ([one, tmp_path / "out", "--average", f"{two}:0"], "a weight is above 0"),
        ([one, one, "--average", two], "is the bundle itself"),
        ([one, tmp_path / "out", "--average", other.path], "its network is not that of"),
        ([one, tmp_path / "out", "--average", shorter.path], "its text encoder is not that of"),
    ):
        assert main([*map(str, argv)]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*map(str, [one, tmp_path / "out", "--average", bound])]) == 0
    assert Bundle.open(tmp_path / "out").license == License(name="openmdw-1.0")
