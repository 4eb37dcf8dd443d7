"""Train a small decoder on arithmetic sequences, data-parallel, with rankd watching: the demo's training script.

Every rank draws its own sequences, so that the losses and norms of the ranks differ as they do in real training.

    msrun --worker_num=4 --local_worker_num=4 --join=True train.py --config train.yaml
"""

from __future__ import annotations

import argparse
import os

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init
from model import Model, batches

from rankd.agent import Agent

SEED = 1


def all_reduce_mean(tensors: list[Tensor], ranks: int) -> list[Tensor]:
    """The means over all ranks, by one collective."""
    flat = ops.concat([tensor.reshape(-1) for tensor in tensors])
    if ranks > 1:
        flat = ops.AllReduce()(flat) / ranks
    parts = ops.split(flat, [tensor.size for tensor in tensors])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def accumulate(accumulated: list[Tensor] | None, grads: tuple[Tensor, ...]) -> list[Tensor]:
    return list(grads) if accumulated is None else [a + g for a, g in zip(accumulated, grads, strict=True)]


def train(config: str, steps: int, micro_steps: int, rank: int, ranks: int) -> None:
    ms.set_seed(SEED)  # the same weights on every rank
    net = Model()
    weights = net.trainable_params()

    def forward(ids: Tensor) -> tuple[Tensor, Tensor]:
        loss = net(ids)
        return loss / micro_steps, loss  # the gradients of the first add up to those of the mean

    forward_backward = ms.value_and_grad(forward, None, weights, has_aux=True)
    rates = nn.cosine_decay_lr(5e-4, 1e-2, steps, 1, steps)
    optimizer = nn.Adam(weights, learning_rate=rates)
    data = batches(SEED, rank)

    with Agent.from_yaml(config, model=net, total_steps=steps, micro_steps=micro_steps) as agent:
        for step in range(1, steps + 1):
            with agent.step(step):
                accumulated: list[Tensor] | None = None
                losses = []
                for _ in range(micro_steps):
                    (_, loss), grads = forward_backward(next(data))
                    accumulated = accumulate(accumulated, grads)
                    losses.append(loss)
                    agent.micro_step(loss=loss, grads=accumulated)
                mean_loss, *grads = all_reduce_mean([sum(losses) / micro_steps, *(accumulated or [])], ranks)
                grad_norm = ops.sqrt(sum(ops.square(grad).sum() for grad in grads))
                optimizer(tuple(grads))
                agent.end_step(loss=mean_loss, lr=rates[step - 1], grad_norm=grad_norm)
            if rank == 0 and (step == 1 or step % 5 == 0):
                print(f"step {step}/{steps} loss {float(mean_loss):.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="train.yaml", help="the training YAML (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: %(default)s)")
    parser.add_argument("--micro-steps", type=int, default=4, help="micro-batches a step (default: %(default)s)")
    args = parser.parse_args()
    rank, ranks = 0, 1
    if "MS_ROLE" in os.environ:  # started by msrun; its scheduler process runs this too, and ends inside init()
        init()
        rank, ranks = get_rank(), get_group_size()
    train(args.config, args.steps, args.micro_steps, rank, ranks)


if __name__ == "__main__":
    main()
