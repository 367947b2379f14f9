"""Outputs are written beforehand: an engine makes the tokens it is to make, and what is known of them is told
to its adapter as far as a run wants that. The same for one engine and for each of several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .account import Account
from .bare_engine import STOP_TOKEN, BareEngine
from .outputs import Outputs
from .predictors import Erring, Oracle

if TYPE_CHECKING:
    from .simulation import SimulationOptions


def follow_script(engine: BareEngine, account: Account, outputs: Outputs, options: SimulationOptions) -> None:
    """From now on ``engine`` makes the outputs of ``account``'s requests. Its adapter, where it has one,
    reads in ``outputs`` what tools they call and has another predictor, if ``options`` say so."""

    def next_token(request: Any) -> int:
        output = account.live[request.request_id].output
        index = request.num_output_tokens
        # The last token is never computed, hence in no block: it may be another one than the prompt's.
        return output[index] if index + 1 < len(output) else STOP_TOKEN

    def output_tokens(request_id: str) -> int:
        return account.live[request_id].life.output_tokens

    engine.tokens = next_token
    adapter = getattr(engine.scheduler, "sojourn", None)
    if adapter is None:
        return
    if options.outputs_name_tools:
        adapter.reader = outputs
    prospects = adapter.steward.prospects
    if options.oracle:
        prospects.predictor = Oracle(length=output_tokens)
    elif options.erring is not None:
        prospects.predictor = Erring(length=output_tokens, error=options.erring, unseen=prospects.predictor)
