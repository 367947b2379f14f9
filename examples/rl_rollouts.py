"""Rollouts for reinforcement learning: groups of episodes, many at once; four lines for sojourn.

    sojourn serve MODEL
    python examples/rl_rollouts.py --model MODEL --tasks 16 --group 8 --concurrency 64 > rollouts.jsonl

Each line is one episode: its messages, its reward, and its advantage within its group, as GRPO needs it. The
environment hides a number; put your sandbox, browser or game in its place. After each update of the weights
empty the server's prefix cache, since KV of the old weights is wrong.
The lines marked with an arrow are all that sojourn adds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics

import sojourn  # <── sojourn
from openai import AsyncOpenAI

ASK = "I think of a number from 1 to 100. Guess it; answer with the number alone. I say higher or lower."


class Environment:
    """A guessing game. Answers each action with an observation, a reward, and whether the episode is over."""

    def __init__(self, task: int, latency_s: float) -> None:
        self.number = random.Random(task).randint(1, 100)
        self.latency_s = latency_s

    @sojourn.tool  # <── sojourn: the steps of the environment are the agent's tools
    async def step(self, action: str) -> tuple[str, float, bool]:
        await asyncio.sleep(self.latency_s)
        found = re.search(r"\d+", action)
        if found is None:
            return "That is no number.", 0.0, False
        guess = int(found[0])
        if guess == self.number:
            return "Right.", 1.0, True
        return "higher" if guess < self.number else "lower", 0.0, False


@sojourn.program(agent_type="rollout")  # <── sojourn: every episode is a program of its own
async def episode(client: AsyncOpenAI, model: str, environment: Environment, turns: int) -> dict:
    messages = [{"role": "user", "content": ASK}]
    reward = 0.0
    for _ in range(turns):
        answer = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=32, temperature=1.0
        )
        action = answer.choices[0].message.content or ""
        observation, reward, over = await environment.step(action)
        messages += [{"role": "assistant", "content": action}, {"role": "user", "content": observation}]
        if over:
            break
    return {"messages": messages, "reward": reward}


async def rollouts(options: argparse.Namespace) -> None:
    free = asyncio.Semaphore(options.concurrency)

    async def one(task: int) -> dict:
        async with free:
            environment = Environment(task, options.latency_s)
            return {"task": task, **await episode(client, options.model, environment, options.turns)}

    async def group(task: int) -> None:
        episodes = await asyncio.gather(*(one(task) for _ in range(options.group)))
        rewards = [each["reward"] for each in episodes]
        mean, spread = statistics.mean(rewards), statistics.pstdev(rewards) or 1.0
        for each in episodes:
            print(json.dumps({**each, "advantage": (each["reward"] - mean) / spread}), flush=True)

    async with AsyncOpenAI(base_url=f"{options.url}/v1", api_key="none") as client:
        await asyncio.gather(*(group(task) for task in range(options.tasks)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smol")
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--group", type=int, default=4, help="episodes of each task")
    parser.add_argument("--turns", type=int, default=8, help="of an episode, at most")
    parser.add_argument("--concurrency", type=int, default=16, help="episodes at once")
    parser.add_argument("--latency-s", type=float, default=0.5, help="of one step of the environment")
    options = parser.parse_args()
    sojourn.init(options.url)  # <── sojourn
    asyncio.run(rollouts(options))


if __name__ == "__main__":
    main()
