"""mini-swe-agent in your own script, on a toy repository; two lines for sojourn.

    sojourn serve MODEL
    python examples/mini_swe_agent.py --model MODEL
The `mini` command needs no script: sojourn run -- mini …
A model such as tiny never submits; the run then ends at --steps, or earlier if mini aborts it.
The lines marked with an arrow are all that sojourn adds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

# mini reads these when it is imported: no banner, no set-up dialogue, no prices for a local model.
os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("MSWEA_CONFIGURED", "true")
os.environ.setdefault("MSWEA_COST_TRACKING", "ignore_errors")

SYSTEM = "You work in a shell, one bash call at a time."
INSTANCE = "{{task}} When done, run `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT` and nothing else."
BUG = "def mean(values):\n    return sum(values) / (len(values) - 1)\n"
TEST = "from stats import mean\n\nassert mean([2, 4]) == 3, mean([2, 4])\nprint('ok')\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smol")
    parser.add_argument("--task", default="`python check.py` fails. Mend stats.py.")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()

    import sojourn  # <── sojourn
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    sojourn.init(options.url)  # <── sojourn
    settings = {"api_base": f"{options.url}/v1", "api_key": "none", "max_tokens": 256}
    with tempfile.TemporaryDirectory() as repository:
        Path(repository, "stats.py").write_text(BUG)
        Path(repository, "check.py").write_text(TEST)
        agent = DefaultAgent(
            LitellmModel(model_name=f"openai/{options.model}", model_kwargs=settings),
            LocalEnvironment(timeout=60, cwd=repository),
            system_template=SYSTEM,
            instance_template=INSTANCE,
            step_limit=options.steps,
            cost_limit=0.0,
        )
        print(agent.run(options.task).get("exit_status"))
        print(Path(repository, "stats.py").read_text())


if __name__ == "__main__":
    main()
