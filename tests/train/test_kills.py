"""A run killed at random moments tells, in the end and after each restart, what the uninterrupted run tells.

Losses, gradient norms, samples with their occurrence, and validations: equal to the last bit, in float32. By hand, with
many kills: `pytest tests/train/test_kills.py -m slow --cases 30`.
"""

import random
import shutil
import signal
import time

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
NUM_KILLS = 2
STEPS = 24
SETTINGS = (
    *(f"train.train_iters={STEPS}", "train.precision=fp32", "optimizer.lr=0.002", "logger.tensorboard=false"),
    *("checkpoint.save_interval=4", "checkpoint.keep_last=3", "validation.interval=6", "validation.num_batches=1"),
    *("validation.sigmas=[1.0]", "ema.sigma_rels=[0.1]", "data.global_batch_size=4", "data.packing_buffer_size=4"),
)
MOMENTS = ("step", "save", "validation")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)


@pytest.fixture(scope="module", params=[0, 2], ids=["in the process", "2 workers"])
def uninterrupted(request, run_ranks, tiny_arguments, tmp_path_factory, read_metrics):
    """(command but for its folder, metrics)."""
    out = tmp_path_factory.mktemp("uninterrupted")
    command = (*tiny_arguments, *SETTINGS, f"data.num_workers={request.param}")
    run_ranks(2, *command, f"train.output_dir={out}")
    metrics = read_metrics(out)
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    return command, metrics


class Folder:
    """What can be seen of a run from outside."""

    def __init__(self, path):
        self.path = path

    def steps(self):
        file = self.path / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.is_file() else 0

    def is_at(self, moment, start):
        if moment == "save":
            return any((self.path / "checkpoints").glob("*.unfinished"))
        if moment == "validation":
            return self.steps() % 6 == 5
        return self.steps() > start


def kill_once(ranks, folder, draw):
    """Waits for a random moment and sends a random signal; what was done, or None if the run was over before."""
    moment, number = draw.choice(MOMENTS), draw.choice(SIGNALS)
    start = folder.steps() + draw.randrange(6)
    while not folder.is_at(moment, start):
        if any(rank.poll() is not None for rank in ranks):
            break
        time.sleep(0.002)
    time.sleep(draw.random() * 0.05)
    is_over = any(rank.poll() is not None for rank in ranks)
    victims = ranks if draw.random() < 0.5 else [draw.choice(ranks)]
    for rank in victims:
        rank.send_signal(number)
    outputs = []
    for rank in ranks:
        try:
            outputs.append(rank.communicate(timeout=60)[0])
        except Exception:
            rank.kill()
            outputs.append(rank.communicate()[0])
    return None if is_over else f"{number.name} to {len(victims)} of {len(ranks)} during a {moment}", outputs


def test_killed_at_random_moments(uninterrupted, start_ranks, tmp_path, request, read_metrics, same, capsys):
    command, expected = uninterrupted
    num_kills, done, restarts, differing = request.config.getoption("--cases") or NUM_KILLS, [], 0, []
    out, attempt = tmp_path / "run0", 0
    while len(done) < num_kills or (out.exists() and len(read_metrics(out)) < STEPS):
        draw = random.Random(attempt)
        ranks = start_ranks(2, *command, f"train.output_dir={out}")
        attempt += 1
        if len(done) < num_kills:
            killed, outputs = kill_once(ranks, Folder(out), draw)
            done += [killed] if killed else []
        else:
            outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
            killed = None
            assert [rank.returncode for rank in ranks] == [0, 0], outputs[0][-3000:]
        if not (out / "metrics.jsonl").is_file():
            continue
        told = whole_lines(out / "metrics.jsonl", read_metrics)
        restarts += 1
        if not same(told, expected[: len(told)]):
            differing.append((attempt, killed))
        if len(told) == STEPS and not any((out / "checkpoints").glob("*.unfinished")):
            shutil.rmtree(out)
            out = tmp_path / f"run{attempt}"
            if len(done) >= num_kills:
                break
    with capsys.disabled():
        print(f"\n{len(done)} kills ({', '.join(done)}): {len(differing)} of {restarts} histories differ")
    assert not differing


def whole_lines(path, read_metrics):
    """A process killed while it writes leaves a part of a line, which the next one cuts off."""
    content = path.read_bytes()
    path.write_bytes(content[: content.rfind(b"\n") + 1])
    return read_metrics(path.parent)
