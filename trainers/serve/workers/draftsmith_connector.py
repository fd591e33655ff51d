"""vLLM's connector of hidden states without CUDA's streams and pinned memory. Runs in vLLM's environment, on a CPU."""

import os

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class OnCpu(ExampleHiddenStatesConnector):
    """Writes each request's states when it has finished, before it is reported as finished."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self._written = set()

    def _submit_async_write(self, pending):
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (torch.arange(self._block_size)[None] + blocks[:, None] * self._block_size).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        save_file(
            {"hidden_states": states.clone().contiguous(), "token_ids": pending.token_ids.clone()}, pending.filename
        )
        self._unlock(pending.req_id)
        self._written.add(pending.req_id)

    def get_finished(self, finished_req_ids):
        if self.has_connector_metadata():
            for pending in self._get_connector_metadata().pending_saves:
                self._submit_async_write(pending)
        self._accumulated_finished_req_ids.update(finished_req_ids)
        done = self._accumulated_finished_req_ids & self._written
        self._accumulated_finished_req_ids -= done
        self._written -= done
        return done or None, None

    def _unlock(self, req_id):
        descriptor = self._lock_fds.pop(req_id, None)
        if descriptor is not None:
            os.close(descriptor)
