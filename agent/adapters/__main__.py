"""`python -m rankd.agent.adapters` prints the folder that MindFormers wants in REGISTER_PATH."""

from pathlib import Path

if __name__ == "__main__":
    print(Path(__file__).parent / "registered")
