"""What MindFormers loads for `auto_register: rankd_callback.RankdCallback`; its folder is what REGISTER_PATH names.

MindFormers copies this file into a cache of its own and loads it from there, so the import is absolute.
"""

from rankd.agent.adapters.mindformers import RankdCallback

__all__ = ["RankdCallback"]
