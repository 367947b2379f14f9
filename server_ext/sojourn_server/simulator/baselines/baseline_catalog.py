"""What the lab compares with: each baseline, what it follows, and what it leaves out.

Baselines with a preset hear from clients what Sojourn's own policies hear, the end of a program among it, and
let its blocks go at once; their papers' systems know it too. Stock, and what is stock behind a router or
before a host cache, keeps them until they are reused. The preset ``known-ends`` is stock with that alone:
what a policy gains over it is its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..request_router import RequestRouter
from .thunderagent_router import ThunderAgentRouter


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """How one baseline is built."""

    name: str
    paper: str
    """The paper or source it follows, with its sections."""
    leaves_out: str
    preset: str | None = None
    """Sojourn's preset; ``None``: the untouched scheduler class."""
    request_router: type[RequestRouter] | None = None
    """The router before the engine; ``None``: none."""
    host_cache: bool = False
    """The engine's own offloading connector is on: everything is written through to host memory, LRU."""


_ALL = (
    Baseline(
        name="stock",
        paper="vLLM 0.32: requests first come, first served; prefix caching; blocks LRU",
        leaves_out="nothing: it is the engine's own class",
    ),
    Baseline(
        name="lru-offload",
        host_cache=True,
        paper="vLLM 0.32 with its OffloadingConnector to host memory (LRU), outputs offloaded as well as "
        "prompts (offload_prompt_only: false)",
        leaves_out="nothing but the copies themselves, which are modelled",
    ),
    Baseline(
        name="admit",
        preset="admit",
        paper="no paper: whole programs are admitted in order of arrival while they fit, and held to the end",
        leaves_out="where contexts outgrow the pool the latest program gives way; an engine that stood idle "
        "for 30 s while somebody waits breaks into what is held",
    ),
    Baseline(
        name="autellix",
        preset="autellix",
        paper="Autellix (arXiv 2502.13965) §4.2, Algorithm 1: program-level attained service in K queues, "
        "quanta, promotion by β",
        leaves_out="waiting calls do not preempt running ones (vLLM preempts only for KV); recompute, not "
        "its swap kernel; the load balancer of §4.3. K, quanta and β are not printed: those of a "
        "re-implementation",
    ),
    Baseline(
        name="infercept",
        preset="infercept",
        host_cache=True,
        paper="InferCept (arXiv 2402.01869) §3.2, §4.1–4.4: preserve, swap or discard by least waste, with "
        "T̂ = time since the call",
        leaves_out="the swap budget of a step and swapping in parts: vLLM's connector writes through, so a "
        "context that is no longer preserved is both discarded and swapped",
    ),
    Baseline(
        name="thunderagent",
        request_router=ThunderAgentRouter,
        paper="ThunderAgent's public router (a7eef77; arXiv 2602.13692): pauses and resumes, 5 s tick",
        leaves_out="tokens guessed from characters, and what programs share; output counted while generated",
    ),
    Baseline(
        name="thunderagent-offload",
        request_router=ThunderAgentRouter,
        host_cache=True,
        paper="MORI §5, TA+O: ThunderAgent's router before an engine with a host cache of its own, "
        "neither aware of the other",
        leaves_out="as thunderagent; vLLM's connector stands in for HiCache",
    ),
    Baseline(
        name="continuum",
        preset="continuum",
        paper="Continuum §4–5 and our entry gate (docs/mechanisms.md)",
        leaves_out="host memory",
    ),
    Baseline(
        name="continuum-paper",
        preset="continuum-paper",
        paper="Continuum §4–5 as printed: admission is the engine's",
        leaves_out="host memory",
    ),
    Baseline(
        name="program-fcfs",
        preset="program-fcfs",
        paper="Continuum Figure 15: the queue in order of the programs' arrival, nothing kept",
        leaves_out="nothing",
    ),
    Baseline(
        name="static-ttl",
        preset="static-ttl",
        paper="Continuum Figure 15: program order, and the cold start's T_default (§4.2) for ever",
        leaves_out="nothing",
    ),
)

BASELINES: dict[str, Baseline] = {baseline.name: baseline for baseline in _ALL}
"""By name, in the order in which tables show them."""
