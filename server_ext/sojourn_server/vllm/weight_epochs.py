"""Keeps KV of replaced weights from being found: by requests after an adapter (LoRA) or the model is loaded
again.

vLLM's block hashes have an adapter's name and path, and of the model nothing. After a first replacement, the
hashes of new requests also have a number, through vLLM's ``cache_salt``. Until then they are vLLM's. Running
requests keep their hashes, so that a new request does not find their blocks either.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .compat import RequestStatus

if TYPE_CHECKING:
    from .compat import Request, Scheduler

_MARK = "\0weights "
"""Separates the client's ``cache_salt`` from the number. Clients send no such text."""
CHANGES_WEIGHTS = re.compile(r"(?!get|compute|check|init|list|save|pin|start).*(weight|lora)")
"""Names of workers' methods that change weights: of vLLM and of extensions for reinforcement learning."""


@dataclass(slots=True)
class _Adapter:
    lora_id: int
    files: Any = None
    """Its files at the last request that loaded them again."""
    epoch: int = 0


class WeightEpochs:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._of_model = 0
        self._adapters: dict[tuple[str, str], _Adapter] = {}
        """(Name, path) → the adapter that requests used last."""

    def mark(self, request: Request) -> None:
        """Put the present numbers of a new request's weights into its block hashes, if there are any."""
        lora, epochs = request.lora_request, [self._of_model]
        if lora is not None:
            name = (lora.lora_name, lora.lora_path)
            adapter = self._adapters.setdefault(name, _Adapter(lora.lora_int_id))
            # With ``load_inplace`` vLLM's workers read the files again for each request.
            files = _file_versions(lora.lora_path, request.request_id) if lora.load_inplace else adapter.files
            if (adapter.lora_id, adapter.files) != (lora.lora_int_id, files):
                adapter.lora_id, adapter.files = lora.lora_int_id, files
                adapter.epoch += 1
            epochs.append(adapter.epoch)
        if any(epochs):
            of_client = (request.cache_salt or "").partition(_MARK)[0]
            request.cache_salt = f"{of_client}{_MARK}{epochs}"
            request.block_hashes = []
            request.update_block_hashes()

    def adapter_changed(self, lora_id: int) -> None:
        """Handle that the engine has loaded or removed the adapter with this id."""
        for adapter in self._adapters.values():
            adapter.epoch += adapter.lora_id == lora_id
        self._mark_waiting()

    def model_changed(self) -> None:
        self._of_model += 1
        self._mark_waiting()

    def _mark_waiting(self) -> None:
        connector = self._scheduler.connector
        for request in self._scheduler.requests.values():
            if request.status is RequestStatus.WAITING and not request.num_computed_tokens:
                self.mark(request)
                if connector is not None:  # vLLM's keeps the hashes of its last look-up
                    connector.on_new_request(request)


def _file_versions(folder: str, unknown: str) -> Any:
    """Return what changes with each change of a file in the folder, also if size and date stay the same;
    ``unknown`` if there is no such folder."""
    try:
        stats = [(each.name, each.stat()) for each in os.scandir(folder)]
    except OSError:
        return unknown
    return sorted((name, stat.st_ino, stat.st_size, stat.st_ctime_ns) for name, stat in stats)
