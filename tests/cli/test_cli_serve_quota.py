"""``sojourn serve --compute-quota-s``: options passed on, and errors before an engine starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from sojourn_server.cli import build_app, console
from sojourn_server.policies.costs.engine_profile import EngineProfile, PrefillCurve
from sojourn_server.policies.costs.step_costs import StepCosts
from typer.testing import CliRunner, Result

pytestmark = pytest.mark.usefixtures("tested_engine")


def serve(*args: str) -> Result:
    return CliRunner().invoke(build_app(), ["serve", "tiny", "--dry-run", *args])


def written(folder: Path, pair_s: float = 1e-9) -> str:
    """The path of a profile."""
    profile = EngineProfile(
        model="m",
        hardware="h",
        engine="e",
        block_size=16,
        prefill=PrefillCurve(0.0, 1e-4, 0.0),
        points=(),
        steps=StepCosts(0.01, 1e-4, pair_s, 0.0, 0.0),
    )
    path = folder / "profile.toml"
    path.write_text(profile.to_toml())
    return str(path)


def test_it_is_a_setting_of_the_engine(tmp_path: Path) -> None:
    result = serve("--compute-quota-s", "0.3", "--sojourn-profile", written(tmp_path))
    assert result.exit_code == 0, result.exception
    assert '"compute_quota_s": 0.3' in result.output
    assert "compute_quota_s" not in serve().output


@pytest.mark.parametrize(
    ("quota", "pair_s", "more", "said"),
    [
        ("0.3", None, (), "sojourn profile measures one"),
        ("-1", None, (), "expected `float` >= 0.0"),
        ("0.3", 0.0, (), "measure longer contexts"),
        ("0.3", 1e-9, ("--no-enable-chunked-prefill",), "expected chunked prefill"),
        ("0.3", None, ("--policy", "stock"), "stock"),
    ],
)
def test_what_the_engine_would_refuse_is_refused_before_it_starts(
    tmp_path: Path, quota: str, pair_s: float | None, more: tuple[str, ...], said: str
) -> None:
    profile = () if pair_s is None else ("--sojourn-profile", written(tmp_path, pair_s))
    error = serve("--compute-quota-s", quota, *profile, *more).exception
    assert isinstance(error, console.CliError)
    assert said in error.message
