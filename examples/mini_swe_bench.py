"""mini-swe-agent on a folder of instances, several at once, as for SWE-bench; two lines for sojourn.

    sojourn serve MODEL                      # one that calls tools, with vLLM's --tool-call-parser for it
    python examples/mini_swe_bench.py --model MODEL --workers 8 path/to/instances

An instance is a folder with repo/, problem.md and, to check the result, test.sh, run in the repository.
The agents work on copies, without a container: run them where they can do no harm. SWE-bench itself needs no
script: sojourn run -- mini-extra swebench …
The lines marked with an arrow are all that sojourn adds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# mini reads these when it is imported: no banner, no set-up dialogue, no prices for a local model.
os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("MSWEA_CONFIGURED", "true")
os.environ.setdefault("MSWEA_COST_TRACKING", "ignore_errors")

import sojourn  # <── sojourn
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

SYSTEM = "You work in a shell, one bash call at a time. You are in a repository with an issue."
INSTANCE = "{{task}} When done, run `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT` and nothing else."


def git(repository: Path, *arguments: str) -> str:
    line = ["git", "-c", "user.name=base", "-c", "user.email=base@localhost", *arguments]
    return subprocess.run(line, cwd=repository, check=True, capture_output=True, text=True).stdout


def solve(instance: Path, options: argparse.Namespace) -> dict:
    """Return the agent's patch for one instance, and whether its test passes. One program for sojourn."""
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder, "repo")
        shutil.copytree(instance / "repo", repository, ignore=shutil.ignore_patterns(".git"))
        git(repository, "init", "-q")
        git(repository, "add", "-A")
        git(repository, "commit", "-qm", "base")
        settings = {"api_base": f"{options.url}/v1", "api_key": "none", "max_tokens": 1024}
        agent = DefaultAgent(
            LitellmModel(model_name=f"openai/{options.model}", model_kwargs=settings),
            LocalEnvironment(timeout=120, cwd=str(repository)),
            system_template=SYSTEM,
            instance_template=INSTANCE,
            step_limit=options.steps,
            cost_limit=0.0,
        )
        try:
            status = agent.run((instance / "problem.md").read_text()).get("exit_status")
        except Exception as error:  # the other instances go on
            status = f"{type(error).__name__}: {error}"
        git(repository, "add", "-A")
        patch = git(repository, "diff", "--cached", "HEAD")
        test = instance / "test.sh"
        passed = test.exists() and not subprocess.run(["sh", test.resolve()], cwd=repository).returncode
    print(f"{instance.name}: {status}, {'resolved' if passed else 'not resolved'}")
    names = {"instance_id": instance.name, "model_name_or_path": options.model}
    return {**names, "model_patch": patch, "resolved": passed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("instances", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smol")
    parser.add_argument("--workers", type=int, default=4, help="instances at once")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--output", type=Path, default=Path("preds.json"))
    options = parser.parse_args()
    sojourn.init(options.url)  # <── sojourn
    instances = sorted(path.parent for path in options.instances.glob("*/problem.md"))
    with ThreadPoolExecutor(options.workers) as pool:
        predictions = list(pool.map(lambda instance: solve(instance, options), instances))
    options.output.write_text(json.dumps({one["instance_id"]: one for one in predictions}, indent=1))
    print(f"{sum(one['resolved'] for one in predictions)} of {len(instances)} resolved; {options.output}")


if __name__ == "__main__":
    main()
