"""Who is slow and who is broken is found out and named."""

import os
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest

from megadit.infer.inspect.interconnect import Link, Place, _rounds, tournament, verdict_of

JOB = Path(__file__).parent / "jobs" / "sick_ranks.py"


def places(count=8, per_node=4, **faults):
    return [
        Place(
            rank=rank,
            node=rank // per_node,
            host=f"host{rank // per_node}",
            device="H100",
            flops=10e12,
            fault=faults.get(f"rank{rank}", ""),
        )
        for rank in range(count)
    ]


def links(kind, ends, *, slow=(), failed=()):
    """All pairs of `ends`; those that hold one of `slow` or `failed` are."""
    made = []
    for pair in combinations(range(ends), 2):
        is_slow = any(one in (pair, *pair) for one in slow)
        fault = "timed out" if any(one in (pair, *pair) for one in failed) else ""
        made.append(Link(kind=kind, ends=pair, bandwidth=0 if fault else 10e9 if is_slow else 100e9, fault=fault))
    return made


@pytest.mark.parametrize("count", [2, 3, 5, 8, 32])
def test_in_a_tournament_all_pairs_meet_once_and_nobody_has_two_partners(count):
    rounds = list(tournament(range(count)))
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(count), 2))
    for pairs in rounds:
        members = [member for pair in pairs for member in pair]
        assert len(members) == len(set(members))
    assert len(rounds) == count - 1 + count % 2


def test_rounds_pair_ranks_within_nodes_and_then_nodes():
    rounds = list(_rounds(places()))
    ranks = [ends for groups in rounds for kind, ends, _ in groups if kind == "rank"]
    assert sorted(ranks) == [*combinations(range(4), 2), *combinations(range(4, 8), 2)]
    assert [group for group in rounds[-1] if group[0] == "node"] == [("node", (0, 1), tuple(range(8)))]
    for groups in rounds:
        members = [rank for *_, ranks in groups for rank in ranks]
        assert len(members) == len(set(members))


def test_a_healthy_cluster_has_no_verdict():
    verdict = verdict_of(places(), links("rank", 4) + links("node", 6))
    assert not verdict.broken and not verdict.slow


def test_a_slow_node_is_named_once_and_not_its_links():
    verdict = verdict_of(places(24), links("node", 6, slow=[3]))
    assert verdict.slow == ("node 3 (host3): 10% of the usual bandwidth with 5 of 5 partners",)


def test_a_slow_cable_is_named_by_its_two_ends():
    verdict = verdict_of(places(24), links("node", 6, slow=[(1, 4)]))
    assert verdict.slow == ("node 1 (host1) with node 4 (host4): 10% of the usual bandwidth",)


def test_a_node_that_fails_all_its_partners_is_broken():
    verdict = verdict_of(places(24), links("node", 6, failed=[2]))
    assert verdict.broken == ("node 2 (host2): timed out with 5 of 5 partners",)
    assert not verdict.slow


def test_a_faulty_device_is_named_and_its_links_are_not_named_again():
    verdict = verdict_of(places(rank1="computes a wrong product"), links("rank", 4, failed=[1]))
    assert verdict.broken == ("rank 1 on host0 (node 0, H100): computes a wrong product",)


def test_where_every_link_fails_nobody_in_particular_is_blamed():
    verdict = verdict_of(places(12), links("node", 3, failed=[0, 1, 2]))
    assert len(verdict.broken) == 3
    assert all(" with node " in words for words in verdict.broken)


def test_a_slow_device_is_named():
    slow = [Place(rank=4, node=1, host="host1", device="H100", flops=3e12)]
    verdict = verdict_of(places(4) + slow, [])
    assert verdict.slow == ("rank 4 on host1 (node 1, H100) computes at 30% of the usual rate",)


@pytest.mark.slow
def test_sick_ranks_are_named_and_healthy_ones_are_not(start_ranks, tmp_path, monkeypatch):
    """Six ranks on gloo: one slow, one dead, one that computes wrongly."""
    monkeypatch.setenv("COLUMNS", "200")
    ranks = start_ranks(6, JOB, tmp_path)
    outputs = [rank.communicate(timeout=400)[0] for rank in ranks]
    told = outputs[0]
    assert ranks[0].returncode == 1, "\n".join(outputs)
    broken, slow = (re.findall(rf"^{word}: (.*)$", told, re.MULTILINE) for word in ("broken", "slow"))
    assert sorted(words[:6] for words in broken) == ["rank 3", "rank 4"], told
    assert "does not answer" in told and "computes a wrong product" in told
    assert any(re.match(r"rank 2 .* bandwidth with \d of 4 partners", words) for words in slow), told


@pytest.mark.slow
def test_command_starts_its_own_ranks_and_finds_them_healthy_enough():
    done = subprocess.run(
        [sys.executable, "-m", "megadit.infer.inspect.doctor", "--distributed", "--nproc", "2"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "broken" not in done.stdout and "failed" not in done.stdout
    speeds = dict(re.findall(r"^ *(\d+) +0 .* CPU +([\d.e+-]+) *$", done.stdout, re.MULTILINE))
    assert set(speeds) == {"0", "1"} and all(float(speed) > 0 for speed in speeds.values()), done.stdout
