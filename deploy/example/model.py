"""The demo's model and data: a small causal decoder, its parameters named as in Megatron, and arithmetic sequences.

Its second layer and its layer for multi-token prediction (MTP) are mixtures of experts. As MindFormers' models do, each
of those counts in `tokens_per_expert`, each attention keeps its largest logits, and the model offers both.
"""

from __future__ import annotations

from collections.abc import Iterator

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer

VOCABULARY, HIDDEN, HEADS, LAYERS = 32, 32, 2, 2
EXPERTS, EXPERTS_PER_TOKEN = 4, 2
MTP_LOSS_SCALE = 0.1
SEQUENCE, BATCH = 16, 8


class RMSNorm(nn.Cell):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = Parameter(initializer("ones", (size,)), name="weight")

    def construct(self, x: Tensor) -> Tensor:
        return x * ops.rsqrt(ops.square(x).mean(-1, keep_dims=True) + 1e-6) * self.weight


class CoreAttention(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.mask = Tensor(np.triu(np.full((SEQUENCE, SEQUENCE), -1e9, np.float32), 1))
        # The largest logit of each head since the last reset.
        self.max_logits_val = Parameter(initializer("zeros", (HEADS,)), name="max_logits_val", requires_grad=False)

    def construct(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length = query.shape[-2]
        logits = ops.matmul(query, key.swapaxes(-1, -2)) / (HIDDEN // HEADS) ** 0.5 + self.mask[:length, :length]
        largest = ops.stop_gradient(logits).amax((0, 2, 3))
        ops.assign(self.max_logits_val, ops.maximum(self.max_logits_val, largest))
        return ops.matmul(ops.softmax(logits, -1), value)


class Attention(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv = nn.Dense(HIDDEN, 3 * HIDDEN, has_bias=False)
        self.q_layernorm = RMSNorm(HIDDEN // HEADS)
        self.k_layernorm = RMSNorm(HIDDEN // HEADS)
        self.core_attention = CoreAttention()
        self.linear_proj = nn.Dense(HIDDEN, HIDDEN, has_bias=False)

    def construct(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.linear_qkv(x).reshape(batch, length, 3, HEADS, -1).transpose(2, 0, 3, 1, 4)
        query, key, value = self.q_layernorm(qkv[0]), self.k_layernorm(qkv[1]), qkv[2]
        mixed = self.core_attention(query, key, value)
        return self.linear_proj(mixed.transpose(0, 2, 1, 3).reshape(batch, length, HIDDEN))


class MLP(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = nn.Dense(HIDDEN, 4 * HIDDEN, has_bias=False)
        self.linear_fc2 = nn.Dense(4 * HIDDEN, HIDDEN, has_bias=False)

    def construct(self, x: Tensor) -> Tensor:
        return self.linear_fc2(ops.relu(self.linear_fc1(x)))


class MoELayer(nn.Cell):
    """Each token goes to EXPERTS_PER_TOKEN of EXPERTS; all experts are computed side by side, cheap at this size."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Dense(HIDDEN, EXPERTS, has_bias=False)
        self.linear_fc1 = nn.Dense(HIDDEN, EXPERTS * HIDDEN, has_bias=False)
        self.linear_fc2 = nn.Dense(EXPERTS * HIDDEN, HIDDEN, has_bias=False)
        # How many tokens each expert has received; counted on and on.
        self.tokens_per_expert = Parameter(
            initializer("zeros", (EXPERTS,)), name="tokens_per_expert", requires_grad=False
        )

    def construct(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, HIDDEN)
        scores = ops.softmax(self.router(tokens), -1)
        fixed = ops.stop_gradient(scores)
        chosen = (fixed >= ops.topk(fixed, EXPERTS_PER_TOKEN)[0][:, -1:]).astype(ms.float32)
        ops.assign_add(self.tokens_per_expert, chosen.sum(0))
        hidden = ops.relu(self.linear_fc1(tokens)).reshape(-1, EXPERTS, HIDDEN)
        gated = hidden * (scores * chosen).expand_dims(-1)
        return self.linear_fc2(gated.reshape(-1, EXPERTS * HIDDEN)).reshape(x.shape)


class Layer(nn.Cell):
    def __init__(self, mlp: nn.Cell) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(HIDDEN)
        self.self_attention = Attention()
        self.pre_mlp_layernorm = RMSNorm(HIDDEN)
        self.mlp = mlp

    def construct(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.pre_mlp_layernorm(x))


class Embedding(nn.Cell):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = Parameter(initializer(Normal(0.1), (rows, HIDDEN)), name="weight")

    def construct(self, ids: Tensor) -> Tensor:
        return ops.gather(self.weight, ids, 0)


class Embeddings(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = Embedding(VOCABULARY)
        self.position_embeddings = Embedding(SEQUENCE)
        self.positions = Tensor(np.arange(SEQUENCE, dtype=np.int32))

    def construct(self, ids: Tensor) -> Tensor:
        return self.word_embeddings(ids) + self.position_embeddings(self.positions[: ids.shape[1]])


class Decoder(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.CellList([Layer(MLP()), *(Layer(MoELayer()) for _ in range(LAYERS - 1))])
        self.final_layernorm = RMSNorm(HIDDEN)

    def construct(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.final_layernorm(x)


class MultiTokenPredictionLayer(nn.Cell):
    """From the hidden state of a token and the embedding of the next one to the hidden state of that one."""

    def __init__(self) -> None:
        super().__init__()
        self.eh_proj = nn.Dense(2 * HIDDEN, HIDDEN, has_bias=False)
        self.transformer_layer = Layer(MoELayer())

    def construct(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        return self.transformer_layer(self.eh_proj(ops.concat((embedded[:, 1:], hidden[:, :-1]), -1)))


class MultiTokenPrediction(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.CellList([MultiTokenPredictionLayer()])

    def construct(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        return self.layers[0](hidden, embedded)


class Model(nn.Cell):
    """A causal language model; called with (batch, SEQUENCE + 1) token ids, it gives the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embeddings()
        self.decoder = Decoder()
        self.mtp = MultiTokenPrediction()
        self.output_layer = nn.Dense(HIDDEN, VOCABULARY, has_bias=False)

    def construct(self, ids: Tensor) -> Tensor:
        embedded = self.embedding(ids[:, :-1])
        hidden = self.decoder(embedded)
        mtp_loss = self.loss(self.mtp(hidden, embedded), ids[:, 2:])
        return self.loss(hidden, ids[:, 1:]) + MTP_LOSS_SCALE * mtp_loss

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return ops.cross_entropy(self.output_layer(hidden).reshape(-1, VOCABULARY), labels.reshape(-1))

    def get_max_attention_logit(self) -> dict[str, Parameter]:
        """The largest logits since the last reset, by the parameter's name."""
        return {p.name: p for p in self.get_parameters() if p.name.endswith(".max_logits_val")}

    def reset_max_attention_logit(self) -> None:
        for largest in self.get_max_attention_logit().values():
            ops.assign(largest, ops.zeros_like(largest))


def batches(seed: int, rank: int) -> Iterator[Tensor]:
    """This rank's endless shard of the data: a, a + d, a + 2d, … modulo VOCABULARY, to be gone on with."""
    rng = np.random.default_rng([seed, rank])
    while True:
        start, stride = rng.integers(VOCABULARY, size=(BATCH, 1)), rng.integers(1, 4, size=(BATCH, 1))
        yield Tensor((start + stride * np.arange(SEQUENCE + 1)) % VOCABULARY, ms.int32)
