"""Tokens (and an encoding context) to chunk KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from kvboost_rag.datamodels import ChunkKV
from kvboost_rag.encode.mixture import ContextWeights, combine
from kvboost_rag.forward import onednn
from kvboost_rag.kv.buffer import KVLayout
from kvboost_rag.kv.realign import PositionTables, position_free
from kvboost_rag.models import hf_cache
from kvboost_rag.models.unwrap import input_device
from kvboost_rag.observe.timing import gpus_of, synchronise


@dataclass(frozen=True)
class EncodingJob:
    """A chunk's tokens and the tokens in front of it while it is encoded (dropped afterwards).

    Attributes:
        forward_tokens: least length of the forward; it is filled up after the chunk, where causal attention cannot
            see it, so that the chunk gets the bits that it had in front of others (`Encoder.encode_nested`).
    """

    token_ids: tuple[int, ...]
    context_ids: tuple[int, ...]
    forward_tokens: int = 0

    @property
    def end(self) -> int:
        """Position after the chunk's last token."""
        return len(self.context_ids) + len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens that are forwarded."""
        return max(self.end, self.forward_tokens)


@dataclass(frozen=True)
class ChunkJob:
    """All forwards that a chunk's KV is made of: one, or one after each of several contexts.

    Attributes:
        parts: the forwards; where `weights` ask for it the first is after the anchor alone.
        shares: how much each part counts where there are no weights.
        weights: fitted ones (`mixture.ContextWeights`), or None.
    """

    parts: tuple[EncodingJob, ...]
    shares: tuple[float, ...] = (1.0,)
    weights: ContextWeights | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.parts[0].token_ids

    @property
    def num_tokens(self) -> int:
        """Tokens that are forwarded."""
        return sum(part.num_tokens for part in self.parts)

    def combined(self, encoded: Sequence[ChunkKV], layout: KVLayout) -> ChunkKV:
        """The chunk's KV, from that of its parts."""
        return encoded[0] if len(encoded) == 1 else combine(encoded, layout, self.shares, self.weights)


class Encoder:
    """Computes chunk KV as a pure function of (chunk tokens, encoding context, model).

    Encoding a chunk after similar chunks of its corpus follows FusionRAG (2025); we keep the context's tokens in
    the catalog, so that a chunk that was evicted comes back bit-identical.

    `encode` runs one chunk a forward, which makes the result independent of what else is encoded. `encode_batch`
    with more than one job gives that up: matrix kernels round differently at other batch shapes, so a chunk encoded
    again alone differs in the last bits, and a cold answer may differ from a warm one by as much.
    """

    def __init__(self, model: PreTrainedModel, layout: KVLayout) -> None:
        self.model = model
        self.layout = layout
        self._cache_name = hf_cache.cache_argument(model)
        self._module = hf_cache.kv_module(model)

    @property
    def device(self) -> torch.device:
        return input_device(self.model)

    @property
    def signature(self) -> str:
        """What the last bits of a chunk's KV depend on besides tokens and weights: where and by what it is computed."""
        if self.device.type == "cuda":
            where = torch.cuda.get_device_name(self.device)
        else:
            where = f"{self.device.type} {torch.backends.cpu.get_cpu_capability()} x{torch.get_num_threads()}"
            where += " oneDNN" if onednn.wanted(self.device) else ""
        attention = getattr(self.model.config, "_attn_implementation", None)
        return f"{where}, torch {torch.__version__}, transformers {transformers.__version__}, {attention}"

    def synchronise(self) -> None:
        """Wait for what was computed, so that a clock may be read."""
        synchronise(gpus_of(self.model))

    def encode(self, job: EncodingJob) -> ChunkKV:
        """Position-free KV of the job's chunk, keys `[num_layers_in_group, num_kv_heads, seq_len, key_head_dim]`.

        Raises:
            ValueError: the chunk has no tokens.
        """
        return self.encode_batch([job])[0]

    @torch.no_grad()
    def encode_batch(self, jobs: Sequence[EncodingJob]) -> list[ChunkKV]:
        """Several jobs in one forward, padded on the right, where causal attention cannot see the padding."""
        if any(not job.token_ids for job in jobs):
            raise ValueError("a chunk without tokens cannot be encoded")
        longest = max(job.num_tokens for job in jobs)
        rows = [[*job.context_ids, *job.token_ids] + [job.token_ids[-1]] * (longest - job.end) for job in jobs]
        layers = self._forward(rows)
        tables = PositionTables.of(self.layout, longest)
        return [self._cut(layers, i, job, tables) for i, job in enumerate(jobs)]

    @torch.no_grad()
    def encode_nested(self, jobs: Sequence[EncodingJob]) -> list[ChunkKV]:
        """Jobs of which each is a beginning of the longest one, in one forward of as many tokens as that has.

        Bit for bit what `encode` gives for each, as its `forward_tokens` is the length of this forward. Only where
        every row of a layer's result is computed apart from the others: not with experts, which are given the rows
        that chose them.

        Raises:
            ValueError: the jobs are not beginnings of one another, or have other lengths of their forwards.
        """
        longest = max(jobs, key=lambda job: job.end)
        ids = (*longest.context_ids, *longest.token_ids)
        if not all(_begins(job, longest) for job in jobs):
            raise ValueError("chunks of one forward must each stand in the context of the next")
        filled = [*ids] + [ids[-1]] * (longest.num_tokens - longest.end)
        layers, tables = self._forward([filled]), PositionTables.of(self.layout, len(filled))
        return [self._cut(layers, 0, job, tables) for job in jobs]

    def _forward(self, rows: list[list[int]]) -> list[hf_cache.LayerKV]:
        kwargs: dict[str, Any] = {self._cache_name: hf_cache.full_length_cache()}
        with onednn.products(self.device):
            output = self._module(input_ids=torch.tensor(rows, device=self.device), use_cache=True, **kwargs)
        return hf_cache.layers_of(hf_cache.output_cache(output))

    def _cut(self, layers: list[hf_cache.LayerKV], item: int, job: EncodingJob, tables: PositionTables) -> ChunkKV:
        start = len(job.context_ids)
        keys, values = hf_cache.split_batch(layers, item, start, job.end)
        return position_free(self.layout.stack(keys, values), self.layout, start, tables)


@dataclass(frozen=True)
class GroupKV:
    """What came of the forwards of a group: KV of each job's parts, and how many tokens were forwarded in all."""

    parts: list[list[ChunkKV]]
    num_tokens: int


def encode_group(encoder: Encoder, jobs: Sequence[ChunkJob]) -> GroupKV:
    """Chunks after each other, in as few forwards as there are orders in which they follow each other."""
    places = [(number, index) for number, job in enumerate(jobs) for index in range(len(job.parts))]
    chains: list[list[tuple[int, int]]] = []
    for number, index in sorted(places, key=lambda place: -jobs[place[0]].parts[place[1]].end):
        part = jobs[number].parts[index]
        fitting = (chain for chain in chains if _begins(part, jobs[chain[0][0]].parts[chain[0][1]]))
        chain = next(fitting, None)
        if chain is None:
            chains.append(chain := [])
        chain.append((number, index))
    encoded: dict[tuple[int, int], ChunkKV] = {}
    for chain in chains:
        encoded |= zip(chain, encoder.encode_nested([jobs[n].parts[i] for n, i in chain]), strict=True)
    kvs = [[encoded[number, index] for index in range(len(job.parts))] for number, job in enumerate(jobs)]
    return GroupKV(kvs, sum(jobs[chain[0][0]].parts[chain[0][1]].num_tokens for chain in chains))


def _begins(part: EncodingJob, longest: EncodingJob) -> bool:
    """Whether a forward over the longest job holds the part as well."""
    ids = (*longest.context_ids, *longest.token_ids)
    return part.num_tokens == longest.num_tokens and (*part.context_ids, *part.token_ids) == ids[: part.end]


def has_experts(model: PreTrainedModel) -> bool:
    """Whether layers hand tokens to experts, whose results are rounded by how many tokens each was given."""
    config = model.config.get_text_config(decoder=True)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return any((getattr(config, name, None) or 0) > 1 for name in names)


def context_sensitivity(kv: ChunkKV, alone: ChunkKV) -> torch.Tensor:
    """How much each token of a chunk depends on what stood before it: float16 `[seq_len]`.

    Relative L2 distance √((δ_k² + δ_v²) / 2), δ = ‖after context − alone‖₂ / ‖alone‖₂ over heads and head dimensions
    of one token at one layer, mean over layers.

    Args:
        kv: encoded after its context; keys `[num_layers_in_group, num_kv_heads, seq_len, key_head_dim]`.
        alone: the same tokens encoded after less.
    """
    layers = []
    for key, value, alone_key, alone_value in zip(kv.keys, kv.values, alone.keys, alone.values, strict=True):
        squares = [
            (new.float() - old.float()).square().sum((1, 3)) / old.float().square().sum((1, 3)).clamp_min(1e-12)
            for new, old in ((key, alone_key), (value, alone_value))
        ]
        layers.append(((squares[0] + squares[1]) / 2).sqrt().cpu())  # groups may lie on several devices
    distance = torch.cat(layers).mean(0)
    return distance.clamp(max=torch.finfo(torch.float16).max).to(torch.float16)
