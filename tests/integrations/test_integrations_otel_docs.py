"""docs/opentelemetry.md names every attribute that is written, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from sojourn_integrations.otel import export as otel_export
from sojourn_integrations.otel import source as otel_source

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "opentelemetry.md").read_text(encoding="utf-8")
EXPORT = (ROOT / "integrations" / "sojourn_integrations" / "otel" / "export.py").read_text(encoding="utf-8")
OUT = PAGE[PAGE.index("## Spans out") :]


def test_every_sojourn_attribute_is_in_the_tables():
    written = {word for word in re.findall(r'"(sojourn\.[a-z_.]+)"', EXPORT)}
    written |= {"sojourn.queued_s", "sojourn.prefilling_s", "sojourn.new_tokens", "sojourn.tail_tokens"}
    written |= {"sojourn.tier_hits.device"}
    written |= {f"sojourn.{name}" for name in otel_export._FACTS} - {"sojourn.lease_ttl_s"}
    documented = set(re.findall(r"`(sojourn\.[a-z_.]+)`", "\n".join(re.findall(r"^\|.*$", OUT, re.M))))
    assert documented == written
    assert len(written) > 20


def test_every_attribute_of_the_conventions_is_in_the_tables():
    written = set(re.findall(r'"((?:gen_ai|server|error)\.[a-z_.]+)"', EXPORT))
    written |= {
        f"gen_ai.usage.{name}" for name in ("input_tokens", "output_tokens", "cache_read.input_tokens")
    }
    pattern = r"`((?:gen_ai|server|error)\.[a-z_.]+)`"
    assert set(re.findall(pattern, "\n".join(re.findall(r"^\|.*$", OUT, re.M)))) == written
    assert len(written) > 12


def test_the_numbers_are_the_codes():
    assert f"At most {otel_source.MAX_SPANS:,} open spans" in PAGE
    assert f"At most {otel_export.MAX_PENDING:,} programs" in PAGE
    assert f"after every {otel_export.EVERY_REQUESTS} of its requests" in PAGE
    assert f"nothing is fetched for {otel_export.PAUSE_S:.0f} s" in PAGE.replace("\n", " ")
