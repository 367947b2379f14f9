"""What of a model its forward pass costs: the shape in its ``config.json``, and what follows from it."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any

from .latency_profile_files import (
    LatencyProfileError,
    find_profile_file,
    parse_integer,
    parse_number,
    parse_text,
    read_profile_toml,
    reject_unknown_fields,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer with grouped-query attention and gated MLPs, dense or mixture of experts."""

    name: str
    source: str
    """Where the figures are from."""
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate_size: int
    """Of the dense MLP; of one expert where ``experts`` > 0."""
    vocabulary: int
    max_context_tokens: int
    experts: int = 0
    """Per layer; 0: a dense model."""
    experts_per_token: int = 0
    tied_embeddings: bool = False
    """Output head and input embedding are one matrix."""
    qkv_bias: bool = False
    qk_norm: bool = False
    weight_bytes: float = 2.0
    """Bytes of a parameter: 2 for bf16."""
    kv_element_bytes: float = 2.0

    # Everything below is counted in parameters; biases and norms matter only to the exact total.

    @property
    def attention_parameters(self) -> int:
        """Of one layer's four projections."""
        return self.hidden_size * self.head_size * 2 * (self.heads + self.kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Gate, up and down of one MLP or one expert."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def layer_parameters(self) -> int:
        """All of one layer's: every expert, router, norms and biases."""
        norms = 2 * self.hidden_size + (2 * self.head_size if self.qk_norm else 0)
        biases = self.head_size * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0
        router = self.hidden_size * self.experts
        return (
            self.attention_parameters + self.mlp_parameters * max(1, self.experts) + router + norms + biases
        )

    @property
    def head_parameters(self) -> int:
        """Of the matrix that turns hidden states into logits."""
        return self.hidden_size * self.vocabulary

    @property
    def parameters(self) -> int:
        """The total, as the hub's model page counts it."""
        embeddings = self.head_parameters * (1 if self.tied_embeddings else 2)
        return self.layers * self.layer_parameters + embeddings + self.hidden_size

    @property
    def active_layer_parameters(self) -> int:
        """Of one layer, those that one token goes through."""
        if not self.experts:
            return self.attention_parameters + self.mlp_parameters
        router = self.hidden_size * self.experts
        return self.attention_parameters + self.mlp_parameters * self.experts_per_token + router

    @property
    def weights_bytes(self) -> float:
        """Of the whole model in memory."""
        return self.parameters * self.weight_bytes

    def kv_heads_per_device(self, tp: int) -> int:
        """Under tensor parallelism; with more devices than heads each holds a copy, as in vLLM."""
        return max(1, self.kv_heads // tp)

    def kv_bytes_per_token(self, tp: int = 1) -> int:
        """K and V of all layers, all ``tp`` devices together, in bytes."""
        heads = self.kv_heads_per_device(tp) * tp
        return round(2 * self.layers * heads * self.head_size * self.kv_element_bytes)

    def check_tp(self, tp: int) -> None:
        """Raise ``LatencyProfileError`` where vLLM could not split the model over ``tp`` devices."""
        if not self.splits(tp):
            possible = [n for n in range(1, self.heads + 1) if self.splits(n)]
            raise LatencyProfileError(
                f"tp is {tp}; {self.name} has {self.heads} heads and {self.kv_heads} KV heads: "
                f"expected one of {', '.join(map(str, possible))}"
            )

    def check_context(self, max_model_len: int | None) -> None:
        """Raise ``LatencyProfileError`` where an engine's limit is beyond the model's own."""
        if max_model_len is not None and max_model_len > self.max_context_tokens:
            raise LatencyProfileError(
                f"max_model_len is {max_model_len:,}; {self.name} takes at most {self.max_context_tokens:,}"
            )

    def splits(self, tp: int) -> bool:
        """Whether heads and KV heads divide evenly over ``tp`` devices, the latter possibly as copies."""
        return tp >= 1 and self.heads % tp == 0 and (self.kv_heads % tp == 0 or tp % self.kv_heads == 0)


def load_model_shape(name: str) -> ModelShape:
    """A shipped model by name, or one of the user's own from a TOML file. Raises ``LatencyProfileError``."""
    path = find_profile_file(name, "models")
    document = read_profile_toml(path)
    reject_unknown_fields(path, document, [field.name for field in fields(ModelShape)])
    values: dict[str, Any] = {}
    for field in fields(ModelShape):
        if field.name not in document:
            if field.default is MISSING:
                raise LatencyProfileError(f"{path}: {field.name} is missing")
            continue
        found = document[field.name]
        if field.type == "str":
            values[field.name] = parse_text(path, field.name, found)
        elif field.type == "bool":
            if not isinstance(found, bool):
                raise LatencyProfileError(f"{path}: {field.name} is {found!r}; expected true or false")
            values[field.name] = found
        elif field.type == "float":
            values[field.name] = parse_number(path, field.name, found, least=0.1, most=8.0)
        else:
            least = 0 if field.name.startswith("experts") else 1
            values[field.name] = parse_integer(path, field.name, found, least=least)
    model = ModelShape(**values)
    if model.heads % model.kv_heads:
        raise LatencyProfileError(
            f"{path}: kv_heads is {model.kv_heads}; expected a divisor of heads, {model.heads}"
        )
    if bool(model.experts) != bool(model.experts_per_token) or model.experts_per_token > model.experts:
        raise LatencyProfileError(
            f"{path}: experts is {model.experts} and experts_per_token {model.experts_per_token}; "
            "expected both 0, or experts ≥ experts_per_token ≥ 1"
        )
    return model
