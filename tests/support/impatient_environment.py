"""mini-swe-agent's environment, in which ``sleep`` times out after 0.1 s, and other commands after 60 s."""

from typing import Any

from minisweagent.environments.local import LocalEnvironment


class ImpatientEnvironment(LocalEnvironment):
    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: Any = None) -> dict[str, Any]:
        limit_s = 0.1 if action.get("command", "").startswith("sleep") else 60
        return super().execute(action, cwd, timeout=timeout or limit_s)
