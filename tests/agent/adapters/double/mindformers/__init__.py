"""A double of MindFormers 2.1.0, for tests of the adapter: the same calls in the same order with the same arguments.

Written from reading the wheel `mindformers-2.1.0-py3-none-any.whl`; none of its code is in here. Each module says which
file it mirrors. MindFormers itself cannot run here: it needs `hyper-parallel`, which is not on PyPI, and an Ascend
device. What the double cannot show is listed in docs/adapters.md.
"""
