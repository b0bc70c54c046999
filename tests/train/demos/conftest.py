"""What tests of demos share."""

from collections.abc import Callable
from typing import Any

import pytest

from megadit.models.shared.errors import UserError


@pytest.fixture
def demo_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """demo_of(main, "--out", ...): the demo whose stages the command would run."""
    asked = []

    def stop(demo: Any, stages: Any) -> None:
        asked.append(demo)
        raise UserError("seen")

    monkeypatch.setattr("megadit.train.demos.stages.run_stages", stop)

    def ask(main: Callable[[list[str]], int], *words: str) -> Any:
        assert main([*words]) == 2
        return asked.pop()

    return ask
