"""The demo's model and data: a small causal decoder, its parameters named as in Megatron, and arithmetic sequences."""

from __future__ import annotations

from collections.abc import Iterator

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer

VOCABULARY, HIDDEN, HEADS, LAYERS = 32, 32, 2, 2
SEQUENCE, BATCH = 16, 8


class RMSNorm(nn.Cell):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = Parameter(initializer("ones", (size,)), name="weight")

    def construct(self, x: Tensor) -> Tensor:
        return x * ops.rsqrt(ops.square(x).mean(-1, keep_dims=True) + 1e-6) * self.weight


class Attention(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv = nn.Dense(HIDDEN, 3 * HIDDEN, has_bias=False)
        self.q_layernorm = RMSNorm(HIDDEN // HEADS)
        self.k_layernorm = RMSNorm(HIDDEN // HEADS)
        self.linear_proj = nn.Dense(HIDDEN, HIDDEN, has_bias=False)
        self.mask = Tensor(np.triu(np.full((SEQUENCE, SEQUENCE), -1e9, np.float32), 1))

    def construct(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.linear_qkv(x).reshape(batch, length, 3, HEADS, -1).transpose(2, 0, 3, 1, 4)
        query, key, value = self.q_layernorm(qkv[0]), self.k_layernorm(qkv[1]), qkv[2]
        scores = ops.matmul(query, key.swapaxes(-1, -2)) / (HIDDEN // HEADS) ** 0.5 + self.mask
        mixed = ops.matmul(ops.softmax(scores, -1), value)
        return self.linear_proj(mixed.transpose(0, 2, 1, 3).reshape(batch, length, HIDDEN))


class MLP(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = nn.Dense(HIDDEN, 4 * HIDDEN, has_bias=False)
        self.linear_fc2 = nn.Dense(4 * HIDDEN, HIDDEN, has_bias=False)

    def construct(self, x: Tensor) -> Tensor:
        return self.linear_fc2(ops.relu(self.linear_fc1(x)))


class Layer(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(HIDDEN)
        self.self_attention = Attention()
        self.pre_mlp_layernorm = RMSNorm(HIDDEN)
        self.mlp = MLP()

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
        return self.word_embeddings(ids) + self.position_embeddings(self.positions)


class Decoder(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.CellList([Layer() for _ in range(LAYERS)])
        self.final_layernorm = RMSNorm(HIDDEN)

    def construct(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.final_layernorm(x)


class Model(nn.Cell):
    """A causal language model; called with (batch, SEQUENCE + 1) token ids, it gives the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embeddings()
        self.decoder = Decoder()
        self.output_layer = nn.Dense(HIDDEN, VOCABULARY, has_bias=False)

    def construct(self, ids: Tensor) -> Tensor:
        logits = self.output_layer(self.decoder(self.embedding(ids[:, :-1])))
        return ops.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))


def batches(seed: int, rank: int) -> Iterator[Tensor]:
    """This rank's endless shard of the data: a, a + d, a + 2d, … modulo VOCABULARY, to be gone on with."""
    rng = np.random.default_rng([seed, rank])
    while True:
        start, stride = rng.integers(VOCABULARY, size=(BATCH, 1)), rng.integers(1, 4, size=(BATCH, 1))
        yield Tensor((start + stride * np.arange(SEQUENCE + 1)) % VOCABULARY, ms.int32)
