"""Mirrors `get_grad` of mindformers/pynative/trainer/utils.py: `main_grad` under sharding, `grad` otherwise."""

from __future__ import annotations

from typing import Any


def get_grad(param: Any) -> Any:
    main_grad = getattr(param, "main_grad", None)
    return main_grad if main_grad is not None else param.grad
