"""Where MindSpore keeps its private api."""
