"""The characters a table is written with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dialect:
    """Separator and quote; both are one character and differ."""

    separator: str = ","
    quote: str = '"'
    newline: str = "\n"

    def __post_init__(self) -> None:
        if len(self.separator) != 1 or len(self.quote) != 1 or self.separator == self.quote:
            raise ValueError(f"{self} cannot be read back")


CSV = Dialect()
TSV = Dialect(separator="\t")
SEMICOLON = Dialect(separator=";")


def guess(line: str) -> Dialect:
    """The dialect whose separator occurs most often in a header line."""
    return max((CSV, TSV, SEMICOLON), key=lambda dialect: line.count(dialect.separator))
