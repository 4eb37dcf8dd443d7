"""Mirrors mindformers/tools/register/register.py and tools/hub/dynamic_module_utils.py: classes by name.

`get_instance_from_cfg` pops `auto_register` and `type` from a configuration, loads the former's file out of
REGISTER_PATH (a copy of it, made elsewhere), and calls the class with what is left. What the constructor raises is
raised again as the same type with the class's name before the text.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar


class MindFormerModuleType:
    CALLBACK = "callback"


class MindFormerRegister:
    registry: ClassVar[dict[str, dict[str, Any]]] = {}

    @classmethod
    def register_cls(cls, register_class: Any, module_type: str, alias: str | None = None) -> Any:
        cls.registry.setdefault(module_type, {})[alias or register_class.__name__] = register_class
        return register_class

    @classmethod
    def get_instance_from_cfg(cls, cfg: dict[str, Any], module_type: str) -> Any:
        if "auto_register" in cfg:
            cls.auto_register(cfg.pop("auto_register"), module_type)
        name = cfg.pop("type")
        if name not in cls.registry.get(module_type, {}):
            raise ValueError(f"Can't find class type {module_type} class name {name} in class registry")
        found = cls.registry[module_type][name]
        try:
            return found(**cfg)
        except Exception as e:
            raise type(e)(f"{found.__name__}: {e}") from e

    @classmethod
    def auto_register(cls, class_reference: str, module_type: str) -> None:
        folder = os.environ.get("REGISTER_PATH", "")
        if not folder:
            raise OSError("REGISTER_PATH must be specified")
        module_name, class_name = class_reference.split(".")
        copy = Path(tempfile.mkdtemp()) / f"{module_name}.py"
        shutil.copy(Path(folder) / f"{module_name}.py", copy)
        spec = importlib.util.spec_from_file_location(module_name, copy)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        cls.register_cls(getattr(module, class_name), module_type)
