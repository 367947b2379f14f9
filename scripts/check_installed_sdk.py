"""Check an installed sojourn that has no extra. The SDK must work, and the command line must name what it
lacks.

python -I scripts/check_installed_sdk.py
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import subprocess
import sys
import sysconfig
from pathlib import Path

HEAVY = ("torch", "vllm", "ray", "httpx", "openai")
MISSING = "sojourn: the command line needs httpx, rich, typer: {}; sojourn run works without them\n"


def main() -> None:
    import sojourn
    from sojourn.errors import install_command
    from sojourn.testing import FakeServer

    site = Path(sysconfig.get_path("purelib"))
    assert Path(sojourn.__file__).is_relative_to(site), f"{sojourn.__file__} is not below {site}"
    assert importlib.metadata.version("sojourn") == sojourn.__version__
    loaded = [name for name in HEAVY if name in sys.modules]
    assert not loaded, f"import sojourn loads {loaded}"
    for package in ("sojourn", "sojourn_integrations", "sojourn_server"):
        assert (importlib.resources.files(package) / "py.typed").is_file(), f"{package} has no py.typed"
    with FakeServer() as server:
        sojourn.init(server.url)
        with sojourn.program("check"), sojourn.tool_call("bash"):
            pass
        assert sojourn.flush(5), sojourn.stats()
        sojourn.shutdown()
        sent = [type(event).__name__ for event in server.program_events()]
    assert sent == ["ProgramStart", "ToolStart", "ToolStop", "ProgramEnd"], sent
    command = Path(sysconfig.get_path("scripts")) / "sojourn"
    answer = subprocess.run([command, "serve", "tiny"], capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stderr) == (1, MISSING.format(install_command("server"))), answer
    print(f"sojourn {sojourn.__version__} works alone on Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
