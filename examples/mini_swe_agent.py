"""mini-swe-agent in your own script: build the agent as always, attach, run.

    sojourn serve smol --port 8000
    python examples/mini_swe_agent.py --model smol --task 'List the files here.'

For the `mini` command nothing is to be written: sojourn run -- mini …
A model such as tiny never submits; the run then ends at --steps.
"""

from __future__ import annotations

import argparse
import os

# Read by mini as it is imported: no banner, no set-up dialogue, no prices for a local model.
os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("MSWEA_CONFIGURED", "true")
os.environ.setdefault("MSWEA_COST_TRACKING", "ignore_errors")

SYSTEM = "You work in a shell, one bash call at a time."
INSTANCE = "{{task}} When done, run `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT` and nothing else."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--task", default="List the files here.")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()

    import sojourn
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel
    from sojourn_integrations import mini_swe_agent

    sojourn.init(options.url)  # <── sojourn: once a process
    agent = DefaultAgent(
        LitellmModel(
            model_name=f"openai/{options.model}",
            model_kwargs={"api_base": f"{options.url}/v1", "api_key": "none", "max_tokens": 256},
        ),
        LocalEnvironment(timeout=60),
        system_template=SYSTEM,
        instance_template=INSTANCE,
        step_limit=options.steps,
        cost_limit=0.0,
    )
    mini_swe_agent.attach(agent)  # <── sojourn: once an agent
    print(agent.run(options.task).get("exit_status"))


if __name__ == "__main__":
    main()
