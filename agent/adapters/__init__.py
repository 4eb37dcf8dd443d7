"""Adapters: rankd in training loops that are not the user's own. None of them needs a line of the loop changed.

`mindspore_train` is for `mindspore.train.Model`, `mindformers` for the PyNative Trainer of MindFormers 2.x. Both use
what a loop of one's own uses, `rankd.agent.Agent`; what goes wrong in them is logged and never reaches the training.
"""
