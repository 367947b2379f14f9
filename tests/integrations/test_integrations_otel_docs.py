"""docs/opentelemetry.md names every attribute that is written, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from sojourn_integrations.otel import outcome_fetcher as otel_outcomes
from sojourn_integrations.otel import semantic_conventions as otel_names
from sojourn_integrations.otel import source as otel_source

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "opentelemetry.md").read_text(encoding="utf-8")
EXPORT = (ROOT / "integrations" / "sojourn_integrations" / "otel" / "export.py").read_text(encoding="utf-8")
OUT = PAGE[PAGE.index("## Spans out") :]


def test_every_sojourn_attribute_is_in_the_tables():
    written = {word for word in re.findall(r'"(sojourn\.[a-z_.]+)"', EXPORT)}
    written |= {"sojourn.queued_s", "sojourn.prefilling_s", "sojourn.new_tokens", "sojourn.tail_tokens"}
    written |= {"sojourn.tier_hits.device"}
    written |= {f"sojourn.decision.{name}" for name in ("kind", "reason", "seq", "ttl_s", "blocks")}
    written -= {"sojourn.decision"}  # an event
    documented = set(re.findall(r"`(sojourn\.[a-z_.]+)`", "\n".join(re.findall(r"^\|.*$", OUT, re.M))))
    assert documented == written
    assert len(written) > 20


def test_every_attribute_of_the_conventions_is_in_the_tables():
    used = {getattr(otel_names, name) for name in re.findall(r"semantic_conventions\.([A-Z_0-9]+)\b", EXPORT)}
    written = {name for name in used if name.startswith(("gen_ai.", "server.", "error."))}
    pattern = r"`((?:gen_ai|server|error)\.[a-z_.]+)`"
    assert set(re.findall(pattern, "\n".join(re.findall(r"^\|.*$", OUT, re.M)))) == written
    assert len(written) > 12


def test_the_numbers_are_the_codes():
    assert f"At most {otel_source.MAX_SPANS:,} open spans" in PAGE
    assert f"At most {otel_outcomes.MAX_PENDING:,} are held back" in PAGE
    assert f"after every {otel_outcomes.EVERY_REQUESTS} of its requests" in PAGE
    assert f"waited {otel_outcomes.IDLE_S:.0f} s" in PAGE
    assert f"nothing is fetched for {otel_outcomes.PAUSE_S:.0f} s" in PAGE.replace("\n", " ")
