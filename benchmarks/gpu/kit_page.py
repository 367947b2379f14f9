"""The page of ``kit.py``, and tables of rows. Needs the standard library alone."""

from __future__ import annotations

from typing import Any

MAY_BE_UNSEEN = "the load's to read its slot"
"""The only wait whose removal may cause no wrong bytes, because CUDA may read the source early, but need
not."""


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table. A column that a row lacks is empty there."""
    head = list(dict.fromkeys(key for row in rows for key in row))
    lines = [head, ["---"] * len(head), *([str(row.get(name, "")) for name in head] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(document: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    parts = [
        f"# What one GPU says: {document['device']}",
        f"```bash\n{document['command']}\n```",
        f"{document['device']}; torch {document['torch']}, CUDA {document['cuda']}, "
        f"Python {document['python']}; seed {document['seed']}; {document['at']}; copies by "
        f"{document['copy_call']}. Seconds: {document['seconds']}.",
    ]
    for name, why in document.get("failed", {}).items():
        parts.append(f"**Failed: {name}**: {why}")
    if order := document.get("order"):
        parts += ["## Order of copies and kernels", table(order["layouts"])]
        if order["without"]:
            parts.append(
                "Wrong copies without one wait. 0 means that the life cannot tell; only "
                f"“{MAY_BE_UNSEEN}” may have it.\n\n"
                + table([{"wait removed": name, **found} for name, found in order["without"].items()])
            )
    if copies := document.get("copies"):
        parts += ["## Copies between device and pinned host memory", table(copies)]
    for name, title in (
        ("overlap", "## Work beside copies, times its duration alone"),
        ("graph", "## A CUDA graph behind `hold_compute`, of 200 replays"),
        ("pinning", "## Pinning"),
    ):
        if found := document.get(name):
            parts += [title, table([{"what": key, "value": value} for key, value in found.items()])]
    if found := document.get("roofline"):
        rows = [
            {"constant": key, "measured": f"{value:.5g}", "shipped": f"{found['shipped'][key]:.5g}"}
            for key, value in found["constants"].items()
        ]
        parts += [
            "## Roofline of an 8B-shaped model",
            f"Shipped: `{found['measured']['data_sheet']}`.",
            table(rows),
        ]
    parts += document.get("remarks", ())  # by hand, on this run
    return "\n\n".join(parts) + "\n"
